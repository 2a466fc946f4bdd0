"""The routing of a run: from its file, or built from a frequency file, or from the data's own token counts."""

from pathlib import Path

import numpy as np

from xgram_dist.config import Config
from xgram_dist.data.dataset import PreparedData
from xgram_dist.errors import UserError
from xgram_dist.memory.layout import has_tables, ngram_rows, num_rows, num_views, routing_settings
from xgram_dist.memory.routing.build import build_routing
from xgram_dist.memory.routing.frequencies import load_frequencies
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.memory.touched import chance_seen, expected_touched_share


def resolve_routing(config: Config, data: PreparedData) -> Routing | None:
    """None where there is nothing to route: no tables, or row = token id."""
    if config.memory.method != "xgram" or config.memory.compression == 1:
        return None
    settings = config.memory.routing
    if settings.file is not None:
        return _checked(Routing.load(Path(settings.file)), config, settings.file)
    source = _frequency_file(config, data)
    if not source.exists():
        raise UserError(f"the data set has no '{source}'; set memory.routing.file or memory.routing.frequencies")
    frequencies = load_frequencies(source, vocabulary=config.model.vocabulary)
    return build_routing(np.asarray(frequencies), routing_settings(config), num_views(config))


def touched_share(config: Config, data: PreparedData, routing: Routing | None) -> float | None:
    """Share of the rows a step is expected to hit; None where no token counts say."""
    tokens = config.train.global_batch * config.model.sequence_length
    if config.memory.method == "engram":  # as if no n-gram came twice
        return float(chance_seen(np.array([1 / ngram_rows(config)[0]]), tokens)[0])
    source = _frequency_file(config, data)
    if not has_tables(config) or not source.exists():
        return None
    frequencies = load_frequencies(source, vocabulary=config.model.vocabulary)
    return expected_touched_share(np.asarray(frequencies), routing, num_rows(config), tokens)


def _frequency_file(config: Config, data: PreparedData) -> Path:
    # Not the folder the shards are read from: that may be a cache, which holds shards alone.
    prepared = Path(config.data.path) if config.data.path is not None else data.folder
    named = config.memory.routing.frequencies
    return Path(named) if named is not None else prepared / "counts.npz"


def _checked(routing: Routing, config: Config, file: str) -> Routing:
    vocabulary, rows, views = config.model.vocabulary, num_rows(config), num_views(config)
    if routing.vocabulary != vocabulary:
        raise UserError(
            f"memory.routing.file = '{file}' is for a vocabulary of {routing.vocabulary:,}, but model.vocabulary = "
            f"{vocabulary:,}; make it again with 'xgram-dist route --vocabulary {vocabulary}'"
        )
    if routing.num_rows != rows:
        raise UserError(
            f"memory.routing.file = '{file}' has {routing.num_rows:,} rows, but memory.compression = "
            f"{config.memory.compression} gives {rows:,}; make it again with 'xgram-dist route --compression'"
        )
    if len(routing.views) < views:
        raise UserError(
            f"memory.routing.file = '{file}' has {len(routing.views)} view(s), but memory.sites ask for {views}; "
            f"make it again with 'xgram-dist route --views {views}'"
        )
    return routing
