"""The command `xgram-dist`: one module per command, imported only when it is run."""
