"""Uploading checkpoints behind training, and fetching the newest one to an empty disk.

On the first rank a thread uploads the newest complete checkpoint of the run folder; one that is saved meanwhile is
next, and those between are left out. The files are linked first, so that retention on disk does not take them away. An
upload that fails is reported; the next one, or the next start, continues it.

Fetching is divided among the ranks, which share the run folder, and each verifies what it fetches.
"""

import os
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from xgram_dist.checkpoint.chain import link_files
from xgram_dist.checkpoint.folder import (
    FOLDER,
    MANIFEST,
    begin_checkpoint,
    commit_checkpoint,
    discard_checkpoint,
    list_steps,
    name_of,
)
from xgram_dist.checkpoint.lease import Lease
from xgram_dist.checkpoint.manifest import Manifest
from xgram_dist.checkpoint.remote import Index, LostPlaceError, RemoteCheckpoints, RemoteWriter, make_files
from xgram_dist.checkpoint.safetensors_io import DamagedFileError
from xgram_dist.config.schema import CheckpointConfig
from xgram_dist.console import ByteProgress
from xgram_dist.errors import UserError
from xgram_dist.parallel.process_group import ProcessGroup

_LINKS = ".step-upload"
"""Cleared by `folder.clear_unfinished`."""


@dataclass(frozen=True)
class UploadResult:
    """How an upload ended."""

    step: int
    address: str
    seconds: float
    bytes: int = 0
    new_bytes: int = 0
    """Those that were not there."""
    error: str | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return (
                f"step {self.step}: checkpoint NOT uploaded: {self.error}; it is on disk, and is uploaded with the next"
            )
        return (
            f"step {self.step}: checkpoint uploaded to {self.address} in {self.seconds:.1f} s "
            f"({self.new_bytes / 1e6:,.1f} of {self.bytes / 1e6:,.1f} MB were new)"
        )


class Uploads:
    """Of the first rank."""

    def __init__(self, run: Path, settings: CheckpointConfig):
        assert settings.remote is not None
        self._run, self._settings = run, settings
        self._writer = RemoteWriter(settings.remote, run.resolve().name)
        self._wanted: int | None = None
        self._is_idle = False
        self._uploaded: int | None = None
        self._changed = threading.Condition()
        self._results: list[UploadResult] = []
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        return self._writer.address

    def take(self, *, fresh: bool) -> str | None:
        """Take the place of the run at the address; a start on another machine that still has it will end. `fresh`: the
        checkpoints there are removed. A sentence if the address cannot be written."""
        try:
            self._writer.take()
            if fresh:
                self._writer.clear()
        except UserError as error:
            return str(error)
        return None

    def want(self, step: int) -> None:
        """Upload the checkpoint of a step, next."""
        with self._changed:
            self._wanted = step
            self._is_idle = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def results(self, *, wait: bool = False) -> list[UploadResult]:
        """Of uploads that have ended, once; with `wait`, when none is left."""
        with self._changed:
            while wait and self._thread is not None and not self._is_idle:
                self._changed.wait()
            results, self._results = self._results, []
            return results

    # On the thread.

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._wanted is None:
                    self._is_idle = True
                    self._changed.notify_all()
                    self._changed.wait()
                step, self._wanted = self._wanted, None
            result = self._upload(step)
            with self._changed:
                self._results.append(result)

    def _upload(self, step: int) -> UploadResult:
        start = time.monotonic()
        links = self._run / FOLDER / _LINKS
        first, error, sizes = self._uploaded is None, None, (0, 0)
        try:
            shutil.rmtree(links, ignore_errors=True)
            links.mkdir(parents=True)
            folder = self._run / FOLDER / name_of(step)
            link_files(folder, [*Manifest.read(folder).files, MANIFEST], links)
            sizes = self._writer.upload(links, ByteProgress(f"step {step}: upload").update)
            self._uploaded = step
            self._writer.expire(self._settings.keep, self._settings.keep_every, step)
            if first:
                self._writer.sweep()
        except LostPlaceError as lost:
            self._end(str(lost))
        except (UserError, DamagedFileError, FileNotFoundError) as failure:
            error = str(failure)
        except Exception as failure:  # training goes on whatever happened to an upload
            error = getattr(failure, "strerror", None) or type(failure).__name__
        shutil.rmtree(links, ignore_errors=True)
        if error is not None and self._uploaded == step:  # what failed is tidying up, which comes again
            error = None
        return UploadResult(step, self.address, time.monotonic() - start, *sizes, error=error)

    def _end(self, reason: str) -> None:
        print(f"xgram-dist train: {reason}; this run exits and writes nothing more", file=sys.stderr, flush=True)
        os._exit(1)


def fetch_newer(
    run: Path, settings: CheckpointConfig, than: int, world: ProcessGroup, lease: Lease | None
) -> tuple[bool, list[str]]:
    """Fetch the newest checkpoint after a step that can be: (whether there was one, a sentence for each that could not
    be fetched). All ranks call it, and all raise if the address cannot be read. Collectives: all-gathers on the world
    group."""
    assert settings.remote is not None
    remote = RemoteCheckpoints(settings.remote, run.resolve().name)
    complaints: list[str] = []
    for step in reversed(_steps_after(remote, than, world)):
        token = world.all_gather_object("alone" if lease is None else lease.token)[0]
        index, problem = _begin(remote, run, step, token) if world.first else (None, None)
        index, problem = world.all_gather_object((index, problem))[0]
        if index is not None:
            problem = _fetch_share(remote, index, run, token, world)
        if problem is None:
            if world.first:
                commit_checkpoint(run, step, token)
            world.all_gather_object(None)
            return True, complaints
        if world.first:
            discard_checkpoint(run, step, token)
        complaints.append(f"checkpoint of step {step} is not taken from {remote.address}: {problem}")
    return False, complaints


def newest_on_disk(run: Path) -> int:
    return max(list_steps(run), default=0)


def _steps_after(remote: RemoteCheckpoints, than: int, world: ProcessGroup) -> list[int]:
    steps: list[int] = []
    error = None
    if world.first:
        try:
            steps = [step for step in remote.steps() if step > than]
        except UserError as failure:
            error = str(failure)
    steps, error = world.all_gather_object((steps, error))[0]
    if error is not None:
        raise UserError(error)
    return steps


def _begin(remote: RemoteCheckpoints, run: Path, step: int, token: str) -> tuple[Index | None, str | None]:
    try:
        index = remote.index(step)
        make_files(index, begin_checkpoint(run, step, token))
        return index, None
    except (UserError, FileNotFoundError) as error:
        return None, str(error)
    except OSError as error:
        return None, error.strerror


def _fetch_share(remote: RemoteCheckpoints, index: Index, run: Path, token: str, world: ProcessGroup) -> str | None:
    """This rank's pieces; what went wrong on some rank."""
    pieces = list(index.pieces())[world.rank :: world.size]
    total, done = sum(piece.nbytes for piece in pieces), 0
    lines = ByteProgress(f"fetching the checkpoint of step {index.step}") if world.first else None

    def progress(count: int) -> None:
        nonlocal done
        done += count
        if lines is not None:
            lines.update(done, total)

    problem = None
    try:
        remote.fetch_pieces(pieces, run / FOLDER / f".{name_of(index.step)}.{token}.part", progress)
    except (UserError, FileNotFoundError) as error:
        problem = str(error)
    except OSError as error:
        problem = error.strerror or type(error).__name__
    return next((one for one in world.all_gather_object(problem) if one is not None), None)
