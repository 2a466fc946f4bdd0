"""Distributed training of language models whose capacity lives in token-indexed tables."""

__version__ = "0.2.0"
