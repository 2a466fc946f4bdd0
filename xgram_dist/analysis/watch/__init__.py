"""`xgram-dist watch`: runs on the terminal."""
