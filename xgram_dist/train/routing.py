"""The routing of a run: from its file, or built from a frequency file, or from the data's own token counts."""

from pathlib import Path

import numpy as np

from xgram_dist.config import Config
from xgram_dist.data.dataset import PreparedData
from xgram_dist.errors import UserError
from xgram_dist.memory.layout import num_rows, num_views, routing_settings
from xgram_dist.memory.routing.build import build_routing
from xgram_dist.memory.routing.frequencies import load_frequencies
from xgram_dist.memory.routing.routing import Routing


def resolve_routing(config: Config, data: PreparedData) -> Routing | None:
    """None where there is nothing to route: no tables, or row = token id."""
    if config.memory.method == "vanilla" or config.memory.compression == 1:
        return None
    settings = config.memory.routing
    if settings.file is not None:
        return _checked(Routing.load(Path(settings.file)), config, settings.file)
    # Not the folder the shards are read from: that may be a cache, which holds shards alone.
    prepared = Path(config.data.path) if config.data.path is not None else data.folder
    source = Path(settings.frequencies) if settings.frequencies is not None else prepared / "counts.npz"
    if not source.exists():
        raise UserError(f"the data set has no '{source}'; set memory.routing.file or memory.routing.frequencies")
    frequencies = load_frequencies(source, vocabulary=config.model.vocabulary)
    return build_routing(np.asarray(frequencies), routing_settings(config), num_views(config))


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
