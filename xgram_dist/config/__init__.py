"""Typed, frozen configuration. Depends on nothing else of the package."""

from xgram_dist.config.load import build_config, dump_config, load_config, parse_config
from xgram_dist.config.schema import Config

__all__ = ["Config", "build_config", "dump_config", "load_config", "parse_config"]
