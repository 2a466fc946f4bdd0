"""What the workers of `prepare` need: the fork server imports this module once, and every worker inherits it."""

import contextlib

import tokenizers  # noqa: F401

import xgram_dist.data.shards  # noqa: F401
from xgram_dist.data.engines import import_gigatoken

with contextlib.suppress(ImportError):
    import_gigatoken()
