"""The checkpoints of a run: `checkpoints/step-00000100/`, complete or not there.

A checkpoint is written into a folder with another name, flushed to the disk, and renamed as the last thing. So what has
the name is complete, and a run that dies while writing leaves the one before untouched. A run that starts clears away
what others have not completed; so of two runs, one that lost the folder without knowing it cannot complete anything.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from xgram_dist.checkpoint.manifest import FILE
from xgram_dist.errors import UserError

FOLDER = "checkpoints"
_NAME = re.compile(r"^step-(\d{8,})$")


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def found_steps(run: Path) -> list[int]:
    """Steps of the checkpoints of a run, ascending."""
    folder = run / FOLDER
    if not folder.is_dir():
        return []
    matches = (_NAME.match(path.name) for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(int(match[1]) for match in matches if match)


def checkpoints_at(path: Path) -> list[Path]:
    """What a person means by a path: one checkpoint, or those of a run, oldest first."""
    if (path / FILE).is_file():
        return [path]
    run = path.parent if path.name == FOLDER else path
    found = [run / FOLDER / name_of(step) for step in found_steps(run)]
    if not found:
        what = "is neither a checkpoint nor the folder of a run that has one" if path.exists() else "does not exist"
        raise UserError(f"'{path}' {what}; give a folder such as runs/NAME or runs/NAME/{FOLDER}/{name_of(100)}")
    return found


def begin(run: Path, step: int, token: str) -> Path:
    """An empty folder to write into; `token` is the run's own, so that no other writes into it."""
    aside = _aside(run, step, token)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


def complete(run: Path, step: int, token: str) -> Path:
    """What was written aside becomes the checkpoint."""
    aside, final = _aside(run, step, token), run / FOLDER / name_of(step)
    _flush(aside)
    if final.exists():  # of an earlier attempt at this step, that was refused
        replaced = aside.with_suffix(".replaced")
        final.rename(replaced)
        try:
            aside.rename(final)
        except OSError:
            replaced.rename(final)
            raise
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        aside.rename(final)
    _flush(run / FOLDER)
    return final


def copy_file(file: Path, folder: Path) -> None:
    """Copied and flushed to the disk."""
    with file.open("rb") as source, (folder / file.name).open("wb") as target:
        shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())


def discard(run: Path, step: int, token: str) -> None:
    shutil.rmtree(_aside(run, step, token), ignore_errors=True)


def clear_unfinished(run: Path) -> None:
    """What earlier runs did not finish. Renamed first: a run that is still at it can then no longer complete it."""
    for old in (run / FOLDER).glob(".step-*"):
        gone = old.with_name(f".gone-{old.name[1:]}")
        try:
            old.rename(gone)
        except OSError:
            continue  # completed this very moment
    for old in (run / FOLDER).glob(".gone-*"):
        shutil.rmtree(old, ignore_errors=True)


def _aside(run: Path, step: int, token: str) -> Path:
    return run / FOLDER / f".{name_of(step)}.{token}.part"


def superfluous(steps: list[int], keep: int, keep_every: int) -> Iterator[int]:
    """Steps whose checkpoints may go: all but the last `keep` and every `keep_every`th."""
    return (step for step in steps[:-keep] if not keep_every or step % keep_every)


def remove(run: Path, step: int) -> None:
    """The manifest goes first: half a checkpoint must not look like one."""
    folder = run / FOLDER / name_of(step)
    (folder / FILE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
