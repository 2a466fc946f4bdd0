"""The run folder: what a run leaves behind.

config.yaml           the resolved recipe; loading it repeats the run
metrics.jsonl         one JSON object a line
tensorboard/          the same for TensorBoard
routing.npz           the token -> row map, where there is one
model.safetensors     weights by name: `backbone.*` and `tables.layers.LAYER.SITE.VIEW.*`
tables-R-of-N.safetensors   with N > 1 ranks: the table rows of rank R, and their numbers as `rows`
"""

import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from xgram_dist.config import Config, dump_config
from xgram_dist.errors import UserError
from xgram_dist.memory.sharded_tables import owned_tables
from xgram_dist.memory.working_set import Lookup
from xgram_dist.parallel.ranks import Ranks

METRICS, CONFIG, WEIGHTS, ROUTING = "metrics.jsonl", "config.yaml", "model.safetensors", "routing.npz"
OWN = (METRICS, CONFIG, WEIGHTS, ROUTING)


def check_run_folder(folder: Path, fresh: bool) -> None:
    """A folder with a run in it is taken only when told."""
    if (folder / METRICS).exists() and not fresh:
        raise UserError(f"'{folder}' already holds a run; choose another with --folder DIR, or start over with --fresh")


def open_run_folder(folder: Path, config: Config) -> None:
    """Make the folder, clear it of an earlier run, and write the config."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in OWN:
            (folder / name).unlink(missing_ok=True)
        for old in (*folder.glob("tables-*-of-*.safetensors"), *folder.glob("tensorboard/events.out.tfevents.*")):
            old.unlink()
        (folder / CONFIG).write_text(dump_config(config), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write the run folder '{folder}': {error.strerror}; choose another with --folder"
        ) from error


def save_weights(folder: Path, model: torch.nn.Module, lookup: Lookup, step: int, ranks: Ranks) -> Path:
    """The weights, written aside and renamed: one file, or with several ranks each rank's rows in a file of its own."""
    tensors: dict[str, torch.Tensor] = {}
    if ranks.first:
        tensors = {f"backbone.{name}": value.detach() for name, value in model.named_parameters()}
    tables = owned_tables(lookup)
    if tables is not None:
        rows = {f"tables.{name}": value for name, value in tables.named_tensors().items()}
        if ranks.size == 1:
            tensors |= rows
        else:
            rows["rows"] = tables.states[0].owned
            _write(folder / f"tables-{ranks.rank:05d}-of-{ranks.size:05d}.safetensors", rows, step)
    if ranks.first:
        _write(folder / WEIGHTS, tensors, step)
    return folder / WEIGHTS


def _write(path: Path, tensors: dict[str, torch.Tensor], step: int) -> None:
    aside = path.with_name(f".{path.name}.part")
    try:
        save_file({k: v.contiguous().cpu() for k, v in tensors.items()}, aside, metadata={"step": str(step)})
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.rename(path)
    except Exception as error:  # safetensors wraps the system's errors in its own
        aside.unlink(missing_ok=True)
        raise UserError(f"cannot write '{path}': {error}; free space, or choose another place with --folder") from error
