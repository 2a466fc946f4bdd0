"""Checkpoints for other people's tools."""
