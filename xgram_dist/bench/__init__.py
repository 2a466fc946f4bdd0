"""Benchmarks: each compares two things side by side in one run."""
