"""What the workers of `prepare` need: the fork server imports this module once, and every worker inherits it."""

import tokenizers  # noqa: F401

import xgram_dist.data.shards  # noqa: F401
from xgram_dist.data.streaming_import import streaming

streaming()
