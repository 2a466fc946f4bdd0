"""Whether a checkpoint fits a run: one sentence where it does not."""

from pathlib import Path
from typing import Any

from xgram_dist.checkpoint.boxes import State
from xgram_dist.checkpoint.manifest import Manifest
from xgram_dist.config import Config, parse_config
from xgram_dist.errors import UserError
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.optim.tables import TableOptimizer

SHAPE = ("vocabulary", "layers", "width", "ffn_width", "heads", "kv_heads")
"""Keys of `model` that decide the shapes of the backbone's parameters, or what they mean."""


def saved_config(folder: Path, facts: dict[str, Any]) -> Config:
    try:
        return parse_config(facts["config"])
    except UserError as error:
        raise UserError(f"the recipe in '{folder}' is not one of this release: {error}") from None


def check_model(folder: Path, facts: dict[str, Any], config: Config) -> None:
    saved = saved_config(folder, facts)
    for key in SHAPE:
        mine, theirs = getattr(config.model, key), getattr(saved.model, key)
        if mine != theirs:
            raise UserError(
                f"'{folder}' holds a model with model.{key} = {theirs}, but this recipe has {mine}; set "
                f"model.{key}={theirs}, or start without it"
            )


def check_tokenizer(folder: Path, facts: dict[str, Any], tokenizer: str) -> None:
    saved = str(facts["tokenizer"].get("sha256"))
    if saved != tokenizer:
        raise UserError(
            f"'{folder}' was trained with another tokenizer ({saved[:12]}) than data.path was prepared "
            f"with ({tokenizer[:12]}): the same ids mean other tokens; prepare the data with its tokenizer"
        )


def check_state(folder: Path, manifest: Manifest, state: State) -> None:
    """That everything wanted is there, in its shape, and nothing else."""
    apart = ("rng.", "tables.slab-")
    for name in [*state, *(name for name in manifest.tensors if not name.startswith(apart))]:
        entry, spread = manifest.tensors.get(name), state.get(name)
        if entry is None or spread is None or list(entry.shape) != list(spread.shape):
            if entry is None or spread is None:
                theirs = "is not in it" if entry is None else "is not in this run"
            else:
                theirs = f"is {entry.shape} there and {list(spread.shape)} here"
            raise UserError(
                f"'{folder}' does not fit this recipe: '{name}' {theirs}; set memory.sites and the keys of model as "
                f"they were, or take what fits into a new run with --from {folder} --weights-only"
            )


def check_tables(folder: Path, facts: dict[str, Any], tables: TableOptimizer | None, routing: Routing | None) -> None:
    """For going on with the state of the tables as it is."""
    mine, theirs = None if tables is None else tables.kind, facts["table_optimizer"]
    if (mine is None) != (theirs is None):
        words = ("without", "with") if tables is not None else ("with", "without")
        raise UserError(
            f"'{folder}' was saved {words[0]} tables, this run is {words[1]}: set memory.method as it was, or take its "
            f"weights into a new run with --from {folder} --weights-only"
        )
    if mine != theirs:
        raise UserError(
            f"'{folder}' was saved with the table optimizer '{theirs}', this run has '{mine}'; set "
            f"memory.optimizer={theirs}"
        )
    hashed = None if routing is None else routing.sha256()
    if facts["routing"] != hashed:
        if facts["routing"] is None or hashed is None:
            way = "set memory.compression as it was"
        else:
            way = f"set memory.routing.file={folder}/routing.npz"
        raise UserError(
            f"'{folder}' was saved with another routing; {way}, or take its weights into a new run with --from "
            f"{folder} --weights-only"
        )
