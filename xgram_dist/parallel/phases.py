"""What a rank is doing: time by phase, and a name for a wait that does not end.

    with ranks.phases("fetch"): ...

Times are of the device's queue of work, read only when asked for. A phase that talks to other ranks and lasts longer
than `limit` ends the process with one sentence that names rank, step and phase: the others may be stuck or gone, and a
collective that waits for them would wait in silence.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from xgram_dist.parallel.device import now, seconds_between

WATCHED = frozenset({"plan", "fetch", "wait", "return", "update", "agree", "save"})
"""Phases with collectives. Computing has some too, but may take as long as it likes the first time: it compiles."""


class Phases:
    def __init__(self, rank: int, device: torch.device):
        self.rank, self.device, self.step = rank, device, 0
        self._since = 0
        self._marks: list[tuple[str, Any, Any]] = []
        self._watched = set(WATCHED)
        self._open: dict[int, tuple[str, float]] = {}
        self._watcher: threading.Thread | None = None
        self._ended = threading.Event()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        thread = threading.get_ident()
        device = self.device if name != "plan" else torch.device("cpu")  # planning is host work, in a thread
        self._open[thread] = (name, time.monotonic())
        start = now(device)
        try:
            yield
        except Exception as error:
            error.add_note(f"rank {self.rank}, step {self.step}, phase {name}")
            raise
        finally:
            self._open.pop(thread, None)
        self._marks.append((name, start, now(device)))
        if name == "compute":
            self._watched.add(name)

    def take(self) -> dict[str, float]:
        """Seconds a step by phase, as `seconds_PHASE`, since the last call. The device must be synchronised."""
        marks, self._marks = self._marks, []
        steps, self._since = max(1, self.step - self._since), self.step
        total: dict[str, float] = {}
        for name, start, end in marks:
            total[f"seconds_{name}"] = total.get(f"seconds_{name}", 0.0) + seconds_between(start, end) / steps
        return total

    def watch(self, limit: float) -> None:
        """End the process when a phase with collectives takes longer than `limit` seconds."""
        self._watcher = threading.Thread(target=self._watch, args=(limit,), daemon=True)
        self._watcher.start()

    def close(self) -> None:
        self._ended.set()

    def _watch(self, limit: float) -> None:
        while not self._ended.wait(min(1.0, limit / 4)):
            for name, since in list(self._open.values()):
                if name in self._watched and time.monotonic() - since > limit:
                    print(
                        f"rank {self.rank}: step {self.step}, phase '{name}': waited {limit:g} s for the other ranks "
                        f"(train.collective_timeout); look at what they were doing, or raise it",
                        file=sys.stderr,
                        flush=True,
                    )
                    os._exit(1)
