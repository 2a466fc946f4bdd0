"""The run folder: what a run leaves behind.

config.yaml           the resolved recipe; loading it repeats the run
deepspeed.json        what DeepSpeed was told, where it is the engine
metrics.jsonl         one JSON object a line
tensorboard/          the same for TensorBoard
trace.json            some steps as torch's profiler saw them, where asked for
checkpoints/          the state of the run, to go on from
lease/                who is writing to the folder
routing.npz           the token -> row map, where there is one
keys.npz              how n-grams are looked up, where they are
"""

import json
import shutil
from pathlib import Path

from xgram_dist.checkpoint.folder import FOLDER, found_steps
from xgram_dist.config import Config, dump_config
from xgram_dist.engine.deepspeed_config import deepspeed_config
from xgram_dist.errors import UserError

METRICS, CONFIG, ROUTING = "metrics.jsonl", "config.yaml", "routing.npz"
DEEPSPEED, TRACE = "deepspeed.json", "trace.json"
OWN = (METRICS, CONFIG, ROUTING, "keys.npz", DEEPSPEED, TRACE)


def check_run_folder(folder: Path, config: Config, fresh: bool) -> None:
    """A run with a checkpoint goes on; one that was lost before its first is started over; else only when told."""
    if (folder / METRICS).exists() and not fresh and not found_steps(folder) and not _was_lost(folder, config):
        raise UserError(
            f"'{folder}' already holds a run, without a checkpoint to go on from; choose another folder with --folder "
            f"DIR, or start over with --fresh"
        )


def _was_lost(folder: Path, config: Config) -> bool:
    """This very run, which never came to its end: nothing but the first steps' metrics is lost by repeating it."""
    try:
        same = (folder / CONFIG).read_text(encoding="utf-8") == dump_config(config)
        return same and '"kind": "end"' not in (folder / METRICS).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


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
