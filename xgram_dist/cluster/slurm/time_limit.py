"""When a job's time ends, kept by the job itself: Slurm's signal before the limit may not reach it.

A wrapper of `sbatch` may drop `--signal`, and a shell around the job may take the signal and pass on nothing. So the
first process of a job reads the limit and counts its own seconds. It also notices that it was suspended, because the
seconds of a suspended job do not count. Standard library only.
"""

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from xgram_dist.cluster.slurm.commands import job_facts, seconds_of
from xgram_dist.errors import UserError

TICK_SECONDS = 1.0
SUSPENDED_SECONDS = 5.0
"""A longer gap between two ticks: this process was suspended."""
RESUMED_SECONDS = 120.0
"""After it, ranks may still fail because of it."""


class TimeLimit:
    """Calls `near` once, `margin` seconds before the limit."""

    def __init__(self, job: str, fallback: str, margin: float, near: Callable[[], Any], say: Callable[[str], Any]):
        """`fallback`: the limit that was asked for, where Slurm does not tell; empty: not known."""
        self._job, self._margin, self._near, self._say = job, margin, near, say
        self._resumed = -math.inf
        self._closed = threading.Event()
        left = remaining_seconds(job)
        if left is None:
            left = seconds_of(fallback)
            said = f"taken as {fallback}, as the site asks for" if left is not None else "the run waits for its signal"
            say(f"the time limit of job {job} cannot be read; {said}")
        self._left = math.inf if left is None else left
        threading.Thread(target=self._count, name="time limit", daemon=True).start()

    def just_resumed(self) -> bool:
        """Whether the job was suspended until a moment ago; true once each time."""
        recent = time.monotonic() - self._resumed < RESUMED_SECONDS
        self._resumed = -math.inf
        return recent

    def close(self) -> None:
        self._closed.set()

    def _count(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(TICK_SECONDS):
            passed, last = time.monotonic() - last, time.monotonic()
            if passed > SUSPENDED_SECONDS:
                self._resumed = last
                self._say(f"this job was suspended for {passed:.0f} s")
                continue
            self._left -= passed
            if self._left <= self._margin:
                left = remaining_seconds(self._job)  # it may have been changed
                if left is not None and left > self._margin + TICK_SECONDS:
                    self._left = left
                    continue
                self._near()
                return


def remaining_seconds(job: str) -> float | None:
    """Until the limit; infinite: there is none; None: Slurm does not tell."""
    try:
        facts = job_facts(job) or {}
    except UserError:
        return None
    limit, passed = seconds_of(facts.get("TimeLimit", "")), seconds_of(facts.get("RunTime", ""))
    return None if limit is None or passed is None else limit - passed
