"""The run folder.

config.yaml           the resolved recipe; loading it repeats the run
deepspeed.json        the DeepSpeed config, if that is the engine
metrics.jsonl         one JSON object a line
tensorboard/          the same for TensorBoard
wandb/, mlflow/       the same for these loggers, without a server
run_id                one for all starts of the run, in its loggers
trace.json            a profiler trace, if asked for
checkpoints/          the state of the run, to resume from
lease/                which process writes to the folder
watchdog/             after a collective took too long: the stacks of each rank that waited
stacks/               stacks of all ranks, when they were last asked for
compile/              what torch.compile has compiled, for later starts
starts/               a file for each start of the run: nodes, and where its time went
spikes/               for each step whose loss jumped: the documents of its batch
routing.npz           the token -> row map, if there is one
keys.npz              how n-grams are looked up, if they are
"""

import io
import json
import os
import re
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from xgram_dist.checkpoint.folder import FOLDER, list_steps
from xgram_dist.config import Config, dump_config, is_saved_as
from xgram_dist.engine.deepspeed import deepspeed_config
from xgram_dist.errors import BadFileError, UserError
from xgram_dist.files import remove, set_aside, write_atomically
from xgram_dist.train.metrics_file import FILE as METRICS
from xgram_dist.train.metrics_file import Record, parse_record, read_lines, read_metrics
from xgram_dist.untrusted import read_file

CONFIG, ROUTING = "config.yaml", "routing.npz"
DEEPSPEED, TRACE, WATCHDOG, TENSORBOARD = "deepspeed.json", "trace.json", "watchdog", "tensorboard"
STACKS, STARTS, SPIKES, RUN_ID = "stacks", "starts", "spikes", "run_id"
LOGGER_FILES = ("wandb", "mlflow")
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
        return same and all(record["kind"] != "end" for record in read_metrics(folder / METRICS).records)
    except (OSError, ValueError, BadFileError):
        return False


def open_run_folder(folder: Path, config: Config, data_size: int, resumed: int) -> list[str]:
    """Create the folder and write the config. Returns sentences about files that could not be read.

    `resumed`: the step the run resumes after; metrics of later steps are removed. 0: everything an earlier run left is
    removed. `data_size`: ranks of the data axis.
    """
    sentences: list[str] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if resumed:
            sentences += _truncate_metrics(folder / METRICS, resumed)
        else:
            for name in RUN_FILES:
                remove(folder / name)
            for name in (FOLDER, WATCHDOG, STACKS, STARTS, SPIKES, *LOGGER_FILES):
                shutil.rmtree(folder / name, ignore_errors=True)
            for events in folder.glob("tensorboard/events.out.tfevents.*"):
                remove(events)
        for name, is_right in ((TENSORBOARD, stat.S_ISDIR), (WATCHDOG, stat.S_ISDIR), (CONFIG, stat.S_ISREG)):
            path = folder / name
            if os.path.lexists(path) and not is_right(path.lstat().st_mode):
                kind = "folder" if is_right is stat.S_ISDIR else "regular file"
                sentences.append(f"'{path}' is not a {kind}; it is now '{set_aside(path).name}'")
        write_atomically(folder / CONFIG, dump_config(config))
        if config.parallel.engine == "deepspeed":
            text = json.dumps(deepspeed_config(config, data_size), indent=2)
            write_atomically(folder / DEEPSPEED, text)
    except OSError as error:
        raise UserError(
            f"cannot write the run folder '{folder}': {error.strerror}; choose another with --folder"
        ) from error
    return sentences


def settle_run_id(folder: Path, saved: str | None, fresh: bool) -> str:
    """Of a checkpoint that is resumed, else of an earlier start in the folder, else a new one."""
    path = folder / RUN_ID
    run_id = saved
    if run_id is None and not fresh:
        with suppress(OSError, BadFileError):
            run_id = read_file(path, limit=100).decode("ascii", "replace").strip()
    if run_id is None or not re.fullmatch(r"[0-9a-f]{16}", run_id):
        run_id = secrets.token_hex(8)
    write_atomically(path, run_id.encode() + b"\n")
    return run_id


def _truncate_metrics(path: Path, step: int) -> list[str]:
    """Keep the records up to a step; the steps after the checkpoint are trained, and recorded, again.

    Lines that are no records are moved to a file beside it; a sentence for what was moved."""
    try:
        lines = read_lines(path)
        kept, unreadable = io.BytesIO(), io.BytesIO()
        for line in lines:
            record = parse_record(line) if line.endswith(b"\n") else None
            if record is None:
                unreadable.write(line)
            elif record["step"] <= step and record["kind"] != "end":
                kept.write(line)
    except FileNotFoundError:
        return []
    except BadFileError as error:
        return [f"{error}; it is now '{set_aside(path)}', and the run begins a new one"]
    sentences = []
    if size := unreadable.tell():
        aside = path.with_name(f"{path.name}.unreadable-{secrets.token_hex(4)}")
        write_atomically(aside, unreadable.getvalue())
        sentences.append(f"{size:,} bytes of '{path}' are no metrics records; they are now in '{aside.name}'")
    write_atomically(path, kept.getvalue())
    return sentences


def records_at(folder: Path, step: int) -> dict[str, Record]:
    """The records of a step, the last of each kind."""
    return {record["kind"]: record for record in _records(folder) if record["step"] == step}


def unrecorded_checkpoints(folder: Path) -> list[int]:
    """Steps of complete checkpoints whose run was killed before it could record the save."""
    recorded = {record["step"] for record in _records(folder) if record["kind"] == "checkpoint"}
    return [step for step in list_steps(folder) if step not in recorded]


def _records(folder: Path) -> list[Record]:
    try:
        return read_metrics(folder / METRICS).records
    except (FileNotFoundError, BadFileError):
        return []
