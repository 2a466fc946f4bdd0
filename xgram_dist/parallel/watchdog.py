"""`Phases`: seconds of each phase of a step, and a watchdog over the phases that wait for other ranks.

    with ranks.phases("fetch"): ...

A phase within another one interrupts it: the time of a wait during "compute" counts as "wait" alone.
Times are read off the device's stream and only when asked for, so measuring does not synchronise. A phase with
collectives that lasts longer than `limit` ends the process with one sentence that names rank, step and phase: another
rank may hang or be gone, and the collective would wait for it in silence. The stacks of all threads are printed before.

On a GPU the host only enqueues work, and waits in whichever phase reads a result first. There the watchdog names the
oldest phase that the device's stream has not completed.

At half of the limit the stacks of all ranks are requested (stacks.py): the rank that the others wait for is in none of
these phases, and would not be seen otherwise.

    FOLDER/rank-0.txt           stacks of all threads
    FOLDER/nccl_trace_rank_0    NCCL's last collectives, where torch's flight recorder has them
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from xgram_dist.parallel.device import dump_flight_recorder, is_reached, record_time, seconds_between
from xgram_dist.parallel.stacks import POLL_SECONDS, StackDumps

WATCHED = frozenset({"plan", "fetch", "wait", "return", "update", "agree", "save"})
"""Phases with collectives. "compute" is watched from its second time on: the first may compile for long."""

DUMP_SECONDS = 10.0
"""How long writing the files may take: the file system or the GPU may be what hangs."""


class Phases:
    def __init__(self, rank: int, device: torch.device):
        self.rank, self.device, self.step = rank, device, 0
        self._taken_at_step = 0
        self._intervals: list[tuple[str, Any, Any]] = []
        """(phase, start, end)"""
        self._watched = set(WATCHED)
        self._open: dict[int, tuple[str, float, Any]] = {}
        """By thread: the phase it is in, since when, and that point of the device's stream."""
        self._watcher: threading.Thread | None = None
        self._closed = threading.Event()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times a phase, and interrupts the one it is in. An exception gets a note that names rank, step and phase."""
        thread = threading.get_ident()
        device = self.device if name != "plan" else torch.device("cpu")  # planning is host work, in a thread
        outer, start = self._open.get(thread), record_time(device)
        if outer is not None:
            self._intervals.append((outer[0], outer[2], start))
        self._open[thread] = (name, time.monotonic(), start)
        try:
            yield
        except Exception as error:
            error.add_note(f"rank {self.rank}, step {self.step}, phase {name}")
            raise
        finally:
            _, _, start = self._open.pop(thread)
            if outer is not None:
                self._open[thread] = outer
        end = record_time(device)
        self._intervals.append((name, start, end))
        if outer is not None:
            self._open[thread] = (outer[0], time.monotonic(), end)
        if name == "compute":
            self._watched.add(name)

    def take(self) -> dict[str, float]:
        """Mean seconds a step by phase, as `seconds_PHASE`, since the last call. Synchronise the device first."""
        intervals, self._intervals = self._intervals, []
        steps, self._taken_at_step = max(1, self.step - self._taken_at_step), self.step
        total: dict[str, float] = {}
        for name, start, end in intervals:
            total[f"seconds_{name}"] = total.get(f"seconds_{name}", 0.0) + seconds_between(start, end) / steps
        return total

    def watch(self, limit: float, folder: Path | None = None, stacks: StackDumps | None = None) -> None:
        """Starts the watchdog. `limit`: seconds that a phase with collectives may take. `folder`: for its files.
        `stacks`: answers requests for stacks."""
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, args=(limit, folder, stacks, self._closed), daemon=True)
        self._watcher.start()

    def doing(self) -> str:
        """Step and phase of this rank, for people."""
        phases = [f"{name} for {time.monotonic() - since:.1f} s" for name, since, _ in list(self._open.values())]
        return f"step {self.step}, {', '.join(phases) or 'between phases'}"

    def close(self) -> None:
        self._closed.set()

    def overdue(self, limit: float) -> str | None:
        """The phase that waits for longer than `limit`, or None."""
        for name, since, _ in list(self._open.values()):
            if name in self._watched and time.monotonic() - since > limit:
                return name if name == "plan" else self._oldest_on_device() or name
        return None

    def _oldest_on_device(self) -> str | None:
        """The oldest phase that the host has left and the device has not completed."""
        with suppress(RuntimeError):  # a failed device does not tell
            return next((name for name, _, end in list(self._intervals) if not is_reached(end)), None)
        return None

    def _watch(self, limit: float, folder: Path | None, stacks: StackDumps | None, closed: threading.Event) -> None:
        asked = False
        while not closed.wait(min(POLL_SECONDS, limit / 4)):
            if stacks is not None:
                late = self.overdue(limit / 2) is not None
                if late and not asked:
                    stacks.request()
                asked = late
                stacks.answer(self.doing())
            name = self.overdue(limit)
            if name is None:
                continue
            try:
                with suppress(OSError, ValueError):
                    faulthandler.dump_traceback(file=2)
                # After the stacks, because a launcher may show only the last lines.
                print(
                    f"rank {self.rank}: step {self.step}, phase '{name}': waited {limit:g} s for the other ranks "
                    f"(train.collective_timeout); look at the output of the others, or raise it",
                    file=sys.stderr,
                    flush=True,
                )
                if folder is not None:
                    writer = threading.Thread(target=self._write_dumps, args=(folder,), daemon=True)
                    writer.start()
                    writer.join(DUMP_SECONDS)
            finally:
                os._exit(1)

    def _write_dumps(self, folder: Path) -> None:
        with suppress(OSError, RuntimeError):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank-{self.rank}.txt"
            path.unlink(missing_ok=True)  # a link is not followed
            with path.open("x", encoding="utf-8") as file:
                faulthandler.dump_traceback(file=file)
            dump_flight_recorder(self.device, folder / f"nccl_trace_rank_{self.rank}")
