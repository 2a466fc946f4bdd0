"""The command `xgram-dist`. `main` lists the commands; a command's module is imported when it is run."""
