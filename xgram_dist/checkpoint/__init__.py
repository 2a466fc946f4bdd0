"""Sharded checkpoints: one format for every engine, number of ranks and tensor degree."""
