"""The run folder: what a run leaves behind.

config.yaml           the resolved recipe; loading it repeats the run
deepspeed.json        what DeepSpeed was told, where it is the engine
metrics.jsonl         one JSON object a line
tensorboard/          the same for TensorBoard
trace.json            some steps as torch's profiler saw them, where asked for
checkpoints/          the state of the run, to go on from
routing.npz           the token -> row map, where there is one
model.safetensors     weights by name: `backbone.*` and `tables.layers.LAYER.SITE.VIEW.*`
tables-R-of-N.safetensors   with N > 1 ranks: the table rows of rank R, and their numbers as `rows`
"""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from xgram_dist.checkpoint.folder import FOLDER, found_steps
from xgram_dist.config import Config, dump_config
from xgram_dist.engine.deepspeed_config import deepspeed_config
from xgram_dist.engine.protocol import Engine
from xgram_dist.errors import UserError
from xgram_dist.memory.tables import store_of
from xgram_dist.memory.working_set import Lookup
from xgram_dist.parallel.mesh import Mesh

METRICS, CONFIG, WEIGHTS, ROUTING = "metrics.jsonl", "config.yaml", "model.safetensors", "routing.npz"
DEEPSPEED, TRACE = "deepspeed.json", "trace.json"
OWN = (METRICS, CONFIG, WEIGHTS, ROUTING, DEEPSPEED, TRACE)


def check_run_folder(folder: Path, fresh: bool) -> None:
    """A run with a checkpoint goes on; one without is started over only when told."""
    if (folder / METRICS).exists() and not fresh and not found_steps(folder):
        raise UserError(
            f"'{folder}' already holds a run, without a checkpoint to go on from; choose another folder with --folder "
            f"DIR, or start over with --fresh"
        )


def open_run_folder(folder: Path, config: Config, data_size: int, resumed: int) -> None:
    """Make the folder and write the config. Of an earlier run in it all is cleared, or what came after `resumed`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if resumed:
            _cut_metrics(folder / METRICS, resumed)
        else:
            for name in OWN:
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / FOLDER, ignore_errors=True)
            for old in folder.glob("tensorboard/events.out.tfevents.*"):
                old.unlink()
        for old in folder.glob("tables-*-of-*.safetensors"):
            old.unlink()
        (folder / CONFIG).write_text(dump_config(config), encoding="utf-8")
        if config.parallel.engine == "deepspeed":
            text = json.dumps(deepspeed_config(config, data_size), indent=2)
            (folder / DEEPSPEED).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write the run folder '{folder}': {error.strerror}; choose another with --folder"
        ) from error


def _cut_metrics(path: Path, step: int) -> None:
    """Keep what was said up to a step; what a run said after its last checkpoint will be said again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed
        if record.get("step", 0) <= step and record.get("kind") != "end":
            kept.append(line)
    aside = path.with_name(f".{path.name}.part")
    aside.write_text("".join(kept), encoding="utf-8")
    aside.rename(path)


def save_weights(folder: Path, engine: Engine, lookup: Lookup, step: int, mesh: Mesh) -> Path:
    """The weights, written aside and renamed: one file, or with several ranks each rank's rows in a file of its own."""
    tensors: dict[str, torch.Tensor] = {}
    ranks = mesh.world
    for name, value in engine.full_parameters():
        value = mesh.tensor.gather_along(value, engine.tensor_dims.get(name))
        if ranks.first:
            tensors[f"backbone.{name}"] = value.detach().cpu()
    tables = store_of(lookup)
    if tables is not None:
        rows = {
            f"tables.{name}": mesh.tensor.gather_along(value, 1 if name.endswith(".rows") else None)
            for name, value in tables.named_tensors().items()
        }
        if ranks.size == 1:
            tensors |= rows
        else:
            rows["rows"] = tables.states[0].owned
            if mesh.tensor.first:
                _write(folder / f"tables-{mesh.data.rank:05d}-of-{mesh.data.size:05d}.safetensors", rows, step)
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
