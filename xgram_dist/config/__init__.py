"""Typed, frozen configuration: `schema` (the keys), `load` (YAML to config), `validate` (keys that must agree)."""

from xgram_dist.config.load import build_config, dump_config, is_saved_as, load_config, parse_config
from xgram_dist.config.schema import Config

__all__ = ["Config", "build_config", "dump_config", "is_saved_as", "load_config", "parse_config"]
