"""The starts of a run under Slurm, in RUN/slurm/attempts.json, and the cap on those that lead nowhere.

Written by the job's first process alone (`job.py`), aside and renamed. A start without an end was cut off: its node was
lost, or Slurm ended it. Standard library alone.
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
    """Of the newest checkpoint when it started."""
    started: float
    """Seconds since 1970, as the others."""
    signalled: float | None = None
    """When it was asked to stop."""
    ended: float | None = None
    outcome: str | None = None
    """STOPPED and saved, CRASHED, COMPLETE or REFUSED; None while it runs, or when it was cut off."""
    reason: str = ""

    def seconds_to_stop(self) -> float | None:
        """From the signal to saved and requeued."""
        return None if self.signalled is None or self.ended is None else round(self.ended - self.signalled, 1)

    def why(self) -> str:
        return self.reason if self.outcome is not None else CUT_OFF


class Attempts:
    """Of one job. Each change is made to what the file says now: an older start of the job may still be at its end."""

    def __init__(self, run: Path, job: str):
        self._run, self._job = run, job
        self._mine: Attempt | None = None

    def begin(self, restart: int, nodes: list[str], step: int) -> None:
        self._mine = Attempt(self._job, restart, nodes, step, time.time())
        self._write(self._mine)

    def signalled(self) -> None:
        assert self._mine is not None
        self._mine.signalled = time.time()
        self._write(self._mine)

    def end(self, outcome: str, reason: str) -> None:
        assert self._mine is not None
        self._mine.ended, self._mine.outcome, self._mine.reason = time.time(), outcome, reason
        self._write(self._mine)

    def without_progress(self, step: int, outcomes: tuple[str | None, ...] = (None, CRASHED)) -> list[Attempt]:
        """The last starts that left no newer checkpoint than `step` and ended so: crashed or cut off."""
        found: list[Attempt] = []
        for attempt in reversed(read_attempts(self._run)):
            if attempt.job != self._job or attempt.step < step:
                break
            if attempt.outcome in outcomes:
                found.append(attempt)
        return found[::-1]

    def _write(self, mine: Attempt) -> None:
        path = self._run / "slurm" / FILE
        others = [one for one in read_attempts(self._run) if (one.job, one.restart) != (mine.job, mine.restart)]
        attempts = sorted([*others, mine], key=lambda one: one.started)
        aside = path.with_name(f".{FILE}.{mine.restart}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps([asdict(one) for one in attempts], indent=1), encoding="utf-8")
            aside.replace(path)
        except OSError as error:  # a full disk does not keep the job from its end
            print(f"slurm: '{path}' could not be written: {error.strerror}", flush=True)


def read_attempts(run: Path) -> list[Attempt]:
    """In the order of their starts; none where the file is missing or damaged: it only counts."""
    try:
        return [Attempt(**one) for one in json.loads((run / "slurm" / FILE).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []
