"""Whether a checkpoint is compatible with a run: each check raises one sentence with the way out if it is not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xgram_dist.checkpoint.manifest import Manifest
from xgram_dist.config import Config, parse_config
from xgram_dist.errors import UserError, one_line
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.table_shards import TableShards
from xgram_dist.untrusted import MAX_SHOWN, shown

SHAPE_KEYS = (
    "vocabulary",
    "layers",
    "width",
    "ffn_width",
    "heads",
    "kv_heads",
    "width_of_head",
    "norms",
    "qk_norm",
)
"""Keys of `model` that determine the shapes of the backbone's parameters, or their meaning."""


def saved_config(folder: Path, facts: dict[str, Any]) -> Config:
    try:
        return parse_config(facts["config"])
    except UserError as error:
        raise UserError(f"the recipe in '{folder}' is not valid in this release: {error}") from None


def check_model(folder: Path, facts: dict[str, Any], config: Config) -> None:
    saved = saved_config(folder, facts)
    for key in SHAPE_KEYS:
        current, needed = getattr(config.model, key), getattr(saved.model, key)
        if current != needed:
            name = "head_width" if key == "width_of_head" else key
            raise UserError(
                f"'{folder}' holds a model with model.{name} = {needed}, but this recipe has {current}; set "
                f"model.{name}={needed}, or start without it"
            )


def check_tokenizer(folder: Path, facts: dict[str, Any], tokenizer: str) -> None:
    saved = str(facts["tokenizer"].get("sha256"))
    if saved != tokenizer:
        raise UserError(
            f"'{folder}' was trained with another tokenizer ({shown(saved, 12)}) than data.path was prepared "
            f"with ({tokenizer[:12]}), so token ids have other meanings; prepare the data with its tokenizer"
        )


def check_state(folder: Path, manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """The checkpoint must hold every tensor wanted, in its shape, and no other parameter or table. `shapes`: of all
    stages of a pipeline."""
    not_compared = ("rng.", "row_ids.", "tables.view-")
    for name in [*shapes, *(name for name in manifest.tensors if not name.startswith(not_compared))]:
        entry, shape = manifest.tensors.get(name), shapes.get(name)
        if entry is None or shape is None or manifest.table_shape(name) != list(shape):
            if entry is None or shape is None:
                difference = "is not in it" if entry is None else "is not in this run"
            else:
                difference = f"is {manifest.table_shape(name)} there and {list(shape)} here"
            raise UserError(
                f"'{folder}' does not fit this recipe: {shown(name)} {difference}; set memory.sites and the keys of "
                f"model as they were, or start a new run from the weights that fit with --from {folder} --weights-only"
            )


def check_tables(folder: Path, facts: dict[str, Any], tables: TableShards | None, routing: Routing | None) -> None:
    """Tables, table optimizer and routing must be those of the run, to resume with the state of the tables."""
    new_run = f"or start a new run from its weights with --from {folder} --weights-only"
    current, saved = None if tables is None else tables.settings.kind, facts["table_optimizer"]
    if (current is None) != (saved is None):
        words = ("without", "with") if tables is not None else ("with", "without")
        raise UserError(
            f"'{folder}' was saved {words[0]} tables, this run is {words[1]}: set memory.method as it was, {new_run}"
        )
    if current != saved:
        raise UserError(
            f"'{folder}' was saved with the table optimizer {shown(saved)}, this run has '{current}'; set "
            f"memory.optimizer={one_line(str(saved), MAX_SHOWN)}"
        )
    if tables is not None and tables.counts_updates and not saved_config(folder, facts).memory.count_updates:
        raise UserError(f"'{folder}' was saved without counts of updates; set memory.count_updates=false, {new_run}")
    digest = None if routing is None else routing.sha256()
    if facts["routing"] != digest:
        if facts["routing"] is None or digest is None:
            way_out = "set memory.compression as it was"
        else:
            way_out = f"set memory.routing.file={folder}/routing.npz"
        raise UserError(f"'{folder}' was saved with another routing; {way_out}, {new_run}")
