"""The starts of a run under Slurm, in RUN/slurm/attempts.json, and the cap on those that lead nowhere.

Written by the job's first process alone (`job.py`), aside and renamed. A start without an end was cut off: its node was
lost, or Slurm ended it. Standard library alone.
"""

import json
import os
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

    def why(self) -> str:
        return self.reason if self.outcome is not None else CUT_OFF


class Attempts:
    def __init__(self, run: Path):
        self._path = run / "slurm" / FILE
        self.all = read_attempts(run)

    def begin(self, job: str, restart: int, nodes: list[str], step: int) -> Attempt:
        self.all.append(Attempt(job, restart, nodes, step, time.time()))
        self._write()
        return self.all[-1]

    def end(self, outcome: str, reason: str) -> None:
        last = self.all[-1]
        last.ended, last.outcome, last.reason = time.time(), outcome, reason
        self._write()

    def signalled(self) -> None:
        self.all[-1].signalled = time.time()
        self._write()

    def without_progress(self, job: str, step: int) -> list[Attempt]:
        """This job's last starts in a row that crashed or were cut off and left no newer checkpoint than `step`."""
        found: list[Attempt] = []
        for attempt in reversed(self.all):
            if attempt.job != job or attempt.step < step:
                break
            if attempt.outcome in (None, CRASHED):
                found.append(attempt)
        return found[::-1]

    def _write(self) -> None:
        aside = self._path.with_name(f".{FILE}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps([asdict(one) for one in self.all], indent=1), encoding="utf-8")
            aside.replace(self._path)
        except OSError as error:  # a full disk: the job decides by what it remembers
            print(f"slurm: '{self._path}' could not be written: {error.strerror}", flush=True)


def read_attempts(run: Path) -> list[Attempt]:
    """In the order of their starts; none where the file is missing or damaged: it only counts."""
    try:
        return [Attempt(**one) for one in json.loads((run / "slurm" / FILE).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []
