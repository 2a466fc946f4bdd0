"""The checkpoints of a run: `checkpoints/step-00000100/`, complete or not there.

A checkpoint is written into a hidden folder, flushed to the disk, and renamed in the end. So a folder with the final
name is complete, and a run that dies while writing leaves the previous checkpoint as it was. A run that starts clears
what others left unfinished: a run that lost its lease without knowing it can then complete nothing.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from xgram_dist.errors import UserError

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
"""`manifest.FILE`, not imported: the first process of a Slurm job runs this file with the standard library only."""
AHEAD_BYTES = 8 << 30
"""Of a rank's file that are read ahead."""
_NAME = re.compile(r"step-([0-9]{8,12})")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def list_steps(run: Path) -> list[int]:
    """Steps of the checkpoints of a run, ascending."""
    folder = run / FOLDER
    if not folder.is_dir():
        return []
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(int(match[1]) for match in matches if match)


def read_ahead(run: Path, rank: int) -> None:
    """Have the system read this rank's file of the newest checkpoint, beside what this process does next: importing,
    meeting the other ranks, building modules. On another number of ranks it is a part of what is needed."""
    for step in reversed(list_steps(run)):
        try:
            descriptor = os.open(run / FOLDER / name_of(step) / f"rank-{rank:05d}.safetensors", os.O_RDONLY)
        except OSError:
            return
        try:
            size = min(os.fstat(descriptor).st_size, AHEAD_BYTES)
            os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
        return


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoints that a user's path means: the one at it, or those of a run, oldest first."""
    if (path / MANIFEST).is_file():
        return [path]
    run = path.parent if path.name == FOLDER else path
    folders = [run / FOLDER / name_of(step) for step in list_steps(run)]
    if not folders:
        if not path.exists():
            problem = "does not exist"
        elif path.name.endswith(".part"):
            problem = "was never completed"
        else:
            problem = "is neither a checkpoint nor the folder of a run that has one"
        raise UserError(f"'{path}' {problem}; give a folder such as runs/NAME or runs/NAME/{FOLDER}/{name_of(100)}")
    return folders


def begin_checkpoint(run: Path, step: int, token: str) -> Path:
    """An empty folder to write into. Its name has the run's `token`, so that no other run writes into it."""
    unfinished = _unfinished(run, step, token)
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def commit_checkpoint(run: Path, step: int, token: str) -> Path:
    """Rename the unfinished folder to its final name."""
    unfinished, final = _unfinished(run, step, token), run / FOLDER / name_of(step)
    _flush(unfinished)
    if final.exists():  # a checkpoint of this step that was refused as damaged
        replaced = unfinished.with_suffix(".replaced")
        final.rename(replaced)
        try:
            unfinished.rename(final)
        except OSError:
            replaced.rename(final)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        unfinished.rename(final)
    _flush(run / FOLDER)
    return final


def discard_checkpoint(run: Path, step: int, token: str) -> None:
    """Delete an unfinished checkpoint after a failed save."""
    shutil.rmtree(_unfinished(run, step, token), ignore_errors=True)


def clear_unfinished(run: Path) -> None:
    """Delete what earlier runs left unfinished. Renamed first: a run that still writes to it can then not commit it."""
    for unfinished in (run / FOLDER).glob(".step-*"):
        try:
            unfinished.rename(unfinished.with_name(f".gone-{unfinished.name[1:]}"))
        except OSError:
            continue  # committed at this moment
    for removed in (run / FOLDER).glob(".gone-*"):
        shutil.rmtree(removed, ignore_errors=True)


def copy_file(file: Path, folder: Path) -> None:
    """Copy into a folder and flush to the disk."""
    with file.open("rb") as source, (folder / file.name).open("wb") as target:
        shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())


def expired_steps(steps: list[int], keep: int, keep_every: int) -> Iterator[int]:
    """Retention: all steps but the last `keep` and every `keep_every`th."""
    return (step for step in steps[:-keep] if not keep_every or step % keep_every)


def remove_checkpoint(run: Path, step: int) -> None:
    """The manifest goes first: a half-deleted checkpoint must not look like one."""
    folder = run / FOLDER / name_of(step)
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _unfinished(run: Path, step: int, token: str) -> Path:
    return run / FOLDER / f".{name_of(step)}.{token}.part"


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
