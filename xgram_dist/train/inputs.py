"""What a run derives from its recipe and data before anything is built: routing, n-gram keys, expected touched rows.

The routing comes from its file, or is built from a frequency file or the data's own token counts. Keys (foldings for
engram, f-grams for scone) are computed by the first rank at the start of every run, from the data alone, so that they
are the same each time; they are saved as keys.npz beside what is trained with them. `check_agreement` compares recipe,
routing, data and code over all ranks.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from xgram_dist import __version__
from xgram_dist.checkpoint.compatibility import saved_config
from xgram_dist.config import Config, dump_config
from xgram_dist.data.dataset import PreparedData
from xgram_dist.errors import UserError
from xgram_dist.model.methods.base import Keys, method_of, table_layout
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.frequencies import load_frequencies
from xgram_dist.tables.layout import routing_settings
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.routing_build import build_routing
from xgram_dist.tables.routing_io import load_routing


def check_agreement(ranks: ProcessGroup, config: Config, routing: Routing | None, fingerprint: str) -> None:
    """All ranks must start from the same inputs. Collective: one all-gather over `ranks`."""
    mine = {
        "version": __version__,
        "config": hashlib.sha256(dump_config(config).encode()).hexdigest()[:16],
        "routing": "none" if routing is None else routing.sha256()[:16],
        "data": fingerprint[:16],
    }
    everyone = ranks.all_gather_object(mine)
    for what in mine:
        for rank, theirs in enumerate(everyone):
            if theirs[what] != everyone[0][what]:
                raise UserError(
                    f"rank {rank} has another {what} ({theirs[what]}) than rank 0 ({everyone[0][what]}); start all "
                    f"ranks from the same recipe, overrides and files"
                )


# Routing


def resolve_routing(config: Config, data: PreparedData) -> Routing | None:
    """None where row = token id, and without tables."""
    layout = table_layout(config)
    if not layout.hashed:
        return None
    settings = config.memory.routing
    if settings.file is not None:
        routing = load_routing(Path(settings.file))
        _check_routing(routing, config, settings.file)
        return routing
    source = _frequency_file(config, data)
    if not source.exists():
        raise UserError(f"the data set has no '{source}'; set memory.routing.file or memory.routing.frequencies")
    frequencies = load_frequencies(source, vocabulary=config.model.vocabulary)
    return build_routing(np.asarray(frequencies), routing_settings(config), layout.num_views)


def touched_share(config: Config, data: PreparedData, routing: Routing | None) -> float | None:
    """Share of the rows that a step is expected to touch; None if token frequencies are unknown."""
    tokens = config.train.global_batch * config.model.sequence_length
    method, source, frequencies = method_of(config), _frequency_file(config, data), None
    if method.trains_tables and not method.looks_up_ngrams and source.exists():
        frequencies = np.asarray(load_frequencies(source, vocabulary=config.model.vocabulary))
    return method.touched_share(tokens, frequencies, routing)


def _frequency_file(config: Config, data: PreparedData) -> Path:
    # Shards may be read from a cache folder, which has no counts.
    prepared = Path(config.data.path) if config.data.path is not None else data.folder
    named = config.memory.routing.frequencies
    return Path(named) if named is not None else prepared / "counts.npz"


def _check_routing(routing: Routing, config: Config, file: str) -> None:
    layout, vocabulary = table_layout(config), config.model.vocabulary
    rows, views = layout.num_rows, layout.num_views
    if routing.vocabulary != vocabulary:
        raise UserError(
            f"memory.routing.file = '{file}' is for a vocabulary of {routing.vocabulary:,}, but model.vocabulary = "
            f"{vocabulary:,}; build it again with 'xgram-dist route --vocabulary {vocabulary}'"
        )
    if routing.num_rows != rows:
        raise UserError(
            f"memory.routing.file = '{file}' has {routing.num_rows:,} rows, but memory.compression = "
            f"{config.memory.compression} gives {rows:,}; build it again with 'xgram-dist route --compression'"
        )
    if len(routing.views) < views:
        raise UserError(
            f"memory.routing.file = '{file}' has {len(routing.views)} view(s), but memory.sites ask for {views}; "
            f"build it again with 'xgram-dist route --views {views}'"
        )


# N-gram keys

KEYS_FILE = "keys.npz"


def resolve_keys(config: Config, data: PreparedData, ranks: ProcessGroup) -> tuple[Keys | None, str | None]:
    """(keys, a sentence about them). Collective: the first rank computes them, one all-gather over `ranks`."""
    method = method_of(config)
    if not method.looks_up_ngrams:
        return None, None
    resolved = ranks.all_gather_object(method.resolve_keys(data) if ranks.first else None)[0]
    assert resolved is not None
    return resolved


def check_keys(saved: str | None, keys: Keys | None) -> None:
    """Refuse to load a checkpoint with other n-gram keys. `saved`: the hash in the checkpoint."""
    mine = None if keys is None else keys.sha256()
    if saved != mine:
        raise UserError(
            f"the checkpoint was saved with other n-gram keys ({str(saved)[:12]}, here {str(mine)[:12]}): its rows "
            "would belong to other n-grams; resume with the data set, tokenizer and keys of memory it was saved with"
        )


def check_init_from(folder: Path, facts: dict[str, Any], config: Config, keys: Keys | None) -> None:
    """Before a run is initialised from the checkpoint `folder`: rows of n-grams are valid for the same hashing only."""
    if method_of(config).check_same_keys(method_of(saved_config(folder, facts)), folder):
        check_keys(facts.get("keys"), keys)
