"""Saving while training goes on: the state is copied, then written by a thread over a process group of its own.

A save succeeds on all ranks or fails on all: each stage of torch.distributed.checkpoint gathers the failures of all
ranks, and what the first rank does alone is told to the others. Only a rank that dies takes the others with it.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from xgram_dist.checkpoint.boxes import State
from xgram_dist.checkpoint.copy import HostCopy
from xgram_dist.checkpoint.folder import (
    begin,
    clear_unfinished,
    complete,
    copy_file,
    discard,
    found_steps,
    remove,
    superfluous,
)
from xgram_dist.checkpoint.lease import Lease
from xgram_dist.checkpoint.storage import BoxSavePlanner, FolderWriter, allow_one_process
from xgram_dist.config.schema import CheckpointConfig
from xgram_dist.parallel.ranks import Ranks
from xgram_dist.progress import Lines


@dataclass(frozen=True)
class Saved:
    """How a save ended."""

    step: int
    seconds: float
    blocked: float
    """Seconds that training stood still for it."""
    bytes: int = 0
    """Of all ranks; known to the first."""
    error: str | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"step {self.step}: checkpoint NOT written: {self.error}; the checkpoint before it stays good"
        rate = self.bytes / 1e6 / max(self.seconds, 1e-9)
        return (
            f"step {self.step}: checkpoint of {self.bytes / 1e6:,.1f} MB in {self.seconds:.1f} s ({rate:,.0f} MB/s, "
            f"training stood still for {1000 * self.blocked:,.0f} ms)"
        )


class Saver:
    def __init__(self, run: Path, settings: CheckpointConfig, world: Ranks, lease: Lease | None = None):
        """`lease`: of the run folder; the first rank's."""
        self.run, self.settings, self.world, self.lease = run, settings, world, lease
        # Its own group: the thread's messages must not mix with those of training.
        self._group = dist.new_group(backend="gloo", timeout=world.timeout) if world.size > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._under_way: Future[Saved] | None = None
        self._copy = HostCopy()
        if world.first:
            clear_unfinished(run)
        self._last = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether it is time to save; ranks may differ about it, the first decides."""
        every, minutes = self.settings.every, self.settings.minutes
        late = minutes > 0 and time.monotonic() - self._last >= 60 * minutes
        return late or (every > 0 and step % every == 0)

    def save(self, state: State, facts: dict[str, Any], files: list[Path], *, wait: bool) -> list[Saved]:
        """Begin to save; how the save before ended, if not yet told, and this one where it was waited for."""
        start = self._last = time.monotonic()
        before = self.outcome(wait=True)
        if wait or not self.settings.asynchronous:
            self._under_way = self._thread.submit(self._write, state, facts, files, start, None)
            return before + self.outcome(wait=True)
        copied = self._copy.of(state)
        blocked = time.monotonic() - start
        self._under_way = self._thread.submit(self._write, copied, facts, files, start, blocked)
        return before

    def outcome(self, *, wait: bool = False) -> list[Saved]:
        """How the last save ended, once, when it is through."""
        if self._under_way is None or not (wait or self._under_way.done()):
            return []
        done, self._under_way = self._under_way, None
        return [done.result()]

    def close(self) -> None:
        self._thread.shutdown()

    @property
    def _token(self) -> str:
        return "alone" if self.lease is None else self.lease.token

    def _write(
        self, state: State, facts: dict[str, Any], files: list[Path], start: float, blocked: float | None
    ) -> Saved:
        step = facts["step"]
        lines = Lines(f"step {step}: checkpoint") if self.world.first else None
        try:
            aside = Path(self._by_first(lambda: self._begin(step, files)))
            writer = FolderWriter(aside, self.world.rank, facts, lines)
            allow_one_process()
            save(
                state,
                storage_writer=writer,
                planner=BoxSavePlanner(),
                process_group=self._group,
                no_dist=self.world.size == 1,
            )
            self._by_first(lambda: self._complete(step))
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            if self.world.first:
                self._check_lease()
                discard(self.run, step, self._token)
            seconds = time.monotonic() - start
            return Saved(step, seconds, seconds if blocked is None else blocked, error=_cause(error))
        self._copy.only(writer.written)
        seconds = time.monotonic() - start
        return Saved(step, seconds, seconds if blocked is None else blocked, writer.total)

    def _check_lease(self) -> None:
        if self.lease is not None:
            self.lease.check()

    def _begin(self, step: int, files: list[Path]) -> str:
        self._check_lease()
        aside = begin(self.run, step, self._token)
        for file in files:
            copy_file(file, aside)
        return str(aside)

    def _complete(self, step: int) -> str:
        self._check_lease()
        final = complete(self.run, step, self._token)
        for old in superfluous(found_steps(self.run), self.settings.keep, self.settings.keep_every):
            self._check_lease()
            remove(self.run, old)
        return str(final)

    def _by_first(self, work: Callable[[], str]) -> str:
        """Done by the first rank; its result, or its failure, on all."""
        found: list[Any] = [None, None]
        if self.world.first:
            try:
                found[0] = work()
            except Exception as error:
                found[1] = _cause(error)
        if self.world.size > 1:
            dist.broadcast_object_list(found, src=0, group=self._group)
        if found[1] is not None:
            raise RuntimeError(found[1])
        return str(found[0])


def _cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # torch.distributed.checkpoint gathers those of all ranks
    if failures:
        rank, (first, _) = next(iter(failures.items()))
        return f"rank {rank}: {_cause(first)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ('{error.filename}')" if error.filename else "")
    return str(error) or type(error).__name__
