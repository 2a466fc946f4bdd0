"""The starts of a run under Slurm, in RUN/slurm/attempts.json; used to limit restarts without progress.

Written by the job's first process only (`job.py`), atomically. A start without an end was cut off: its node was lost,
or Slurm ended it. Standard library only.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "attempts.json"
CUT_OFF = "ended without a word: its node was lost, or Slurm ended it"
STOPPED, CRASHED, COMPLETE, REFUSED = "stopped", "crashed", "complete", "refused"


@dataclass
class Attempt:
    job: str
    restart: int
    """SLURM_RESTART_COUNT: 0 for the first start."""
    nodes: list[str]
    step: int
    """Of the newest checkpoint at the start."""
    started: float
    """Unix time, as the others."""
    signalled: float | None = None
    """When it was asked to stop."""
    ended: float | None = None
    outcome: str | None = None
    """STOPPED (and saved), CRASHED, COMPLETE or REFUSED; None while it runs, or if it was cut off."""
    reason: str = ""

    def seconds_to_stop(self) -> float | None:
        """From the signal to the end: saving and requeueing."""
        return None if self.signalled is None or self.ended is None else round(self.ended - self.signalled, 1)

    def explain(self) -> str:
        return self.reason if self.outcome is not None else CUT_OFF


class AttemptLog:
    """The attempts of one job. Each change is applied to the file's current content, because an older start of the
    same job may still be ending."""

    def __init__(self, run: Path, job: str):
        self._run, self._job = run, job
        self._current: Attempt | None = None

    def begin(self, restart: int, nodes: list[str], step: int) -> None:
        self._current = Attempt(self._job, restart, nodes, step, time.time())
        self._write(self._current)

    def signalled(self) -> None:
        assert self._current is not None
        self._current.signalled = time.time()
        self._write(self._current)

    def end(self, outcome: str, reason: str) -> None:
        assert self._current is not None
        self._current.ended, self._current.outcome, self._current.reason = time.time(), outcome, reason
        self._write(self._current)

    def without_progress(self, step: int, outcomes: tuple[str | None, ...] = (None, CRASHED)) -> list[Attempt]:
        """The latest starts, oldest first, that left no checkpoint newer than `step` and had one of these outcomes;
        by default those that crashed or were cut off."""
        attempts: list[Attempt] = []
        for attempt in reversed(read_attempts(self._run)):
            if attempt.job != self._job or attempt.step < step:
                break
            if attempt.outcome in outcomes:
                attempts.append(attempt)
        return attempts[::-1]

    def _write(self, current: Attempt) -> None:
        path = self._run / "slurm" / FILE
        others = [one for one in read_attempts(self._run) if (one.job, one.restart) != (current.job, current.restart)]
        attempts = sorted([*others, current], key=lambda one: one.started)
        temporary = path.with_name(f".{FILE}.{current.restart}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps([asdict(one) for one in attempts], indent=1), encoding="utf-8")
            temporary.replace(path)
        except OSError as error:  # the job must end or requeue even if the disk is full
            print(f"slurm: '{path}' could not be written: {error.strerror}", flush=True)


def read_attempts(run: Path) -> list[Attempt]:
    """In the order of their starts; none if the file is missing or damaged, because it only counts restarts."""
    try:
        return [Attempt(**one) for one in json.loads((run / "slurm" / FILE).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []
