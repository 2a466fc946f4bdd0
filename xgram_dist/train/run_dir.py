"""The run folder.

config.yaml           the resolved recipe; loading it repeats the run
deepspeed.json        the DeepSpeed config, if that is the engine
metrics.jsonl         one JSON object a line
tensorboard/          the same for TensorBoard
trace.json            a profiler trace, if asked for
checkpoints/          the state of the run, to resume from
lease/                which process writes to the folder
watchdog/             after a collective took too long: the stacks of each rank that waited
routing.npz           the token -> row map, if there is one
keys.npz              how n-grams are looked up, if they are
"""

import json
import shutil
from pathlib import Path

from xgram_dist.checkpoint.folder import FOLDER, list_steps
from xgram_dist.config import Config, dump_config, is_saved_as
from xgram_dist.engine.deepspeed import deepspeed_config
from xgram_dist.errors import UserError

METRICS, CONFIG, ROUTING = "metrics.jsonl", "config.yaml", "routing.npz"
DEEPSPEED, TRACE, WATCHDOG = "deepspeed.json", "trace.json", "watchdog"
RUN_FILES = (METRICS, CONFIG, ROUTING, "keys.npz", DEEPSPEED, TRACE)


def check_run_folder(folder: Path, config: Config, fresh: bool) -> None:
    """Refuse a folder whose run can neither be resumed nor repeated without loss, unless `fresh` clears it."""
    if (folder / METRICS).exists() and not fresh and not list_steps(folder) and not _can_repeat(folder, config):
        raise UserError(
            f"'{folder}' already holds a run without a checkpoint to resume from; choose another folder with --folder "
            f"DIR, or start over with --fresh"
        )


def _can_repeat(folder: Path, config: Config) -> bool:
    """The same recipe, and the run was lost before its first checkpoint: only metrics of a few steps are there."""
    try:
        same = is_saved_as(config, folder / CONFIG)
        return same and '"kind": "end"' not in (folder / METRICS).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def open_run_folder(folder: Path, config: Config, data_size: int, resumed: int) -> None:
    """Create the folder and write the config.

    `resumed`: the step the run resumes after; metrics of later steps are removed. 0: everything an earlier run left is
    removed. `data_size`: ranks of the data axis.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if resumed:
            _truncate_metrics(folder / METRICS, resumed)
        else:
            for name in RUN_FILES:
                (folder / name).unlink(missing_ok=True)
            for name in (FOLDER, WATCHDOG):
                shutil.rmtree(folder / name, ignore_errors=True)
            for events in folder.glob("tensorboard/events.out.tfevents.*"):
                events.unlink()
        (folder / CONFIG).write_text(dump_config(config), encoding="utf-8")
        if config.parallel.engine == "deepspeed":
            text = json.dumps(deepspeed_config(config, data_size), indent=2)
            (folder / DEEPSPEED).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write the run folder '{folder}': {error.strerror}; choose another with --folder"
        ) from error


def _truncate_metrics(path: Path, step: int) -> None:
    """Keep the records up to a step; the steps after the checkpoint are trained, and recorded, again."""
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
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.rename(path)
