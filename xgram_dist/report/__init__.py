"""Runs, read back: figures, tables and pictures."""
