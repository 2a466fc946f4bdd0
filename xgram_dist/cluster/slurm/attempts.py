"""The starts of a run under Slurm, in RUN/slurm/attempts.json; used to limit restarts without progress.

Written by the job's first process only (`job.py`), atomically. A start without an end was cut off: its node was lost,
or Slurm ended it. Standard library only.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from xgram_dist.errors import BadFileError
from xgram_dist.untrusted import read_json

FILE = "attempts.json"
MAX_BYTES = 16 << 20
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
    again: int = 0
    """How often the ranks had been started within this start of the job."""
    successor: str = ""
    """The job that was submitted to carry on the run after this one, where Slurm does not start a job again."""

    @property
    def number(self) -> tuple[str, int, int]:
        return self.job, self.restart, self.again

    def seconds_to_stop(self) -> float | None:
        """From the signal to the end: saving and requeueing."""
        return None if self.signalled is None or self.ended is None else round(self.ended - self.signalled, 1)

    def explain(self) -> str:
        return self.reason if self.outcome is not None else CUT_OFF


class AttemptLog:
    """The attempts of a job and of those it succeeds. Each change is applied to the file's current content, because an
    older start may still be ending."""

    def __init__(self, run: Path, job: str):
        self._run = run
        self.jobs = predecessors(read_attempts(run), job)
        """The first job of the run, those that succeeded it, this one."""
        self._current: Attempt | None = None

    def begin(self, restart: int, nodes: list[str], step: int) -> None:
        before = self._current
        again = before.again + 1 if before is not None and before.restart == restart else 0
        successor = before.successor if before is not None else ""
        self._current = Attempt(self.jobs[-1], restart, nodes, step, time.time(), again=again, successor=successor)
        self._write(self._current)

    def signalled(self) -> None:
        assert self._current is not None
        self._current.signalled = time.time()
        self._write(self._current)

    def succeeded_by(self, job: str) -> None:
        assert self._current is not None
        self._current.successor = job
        self._write(self._current)

    def before(self) -> Attempt | None:
        """The attempt before the current one, of this run's jobs."""
        others = [one for one in read_attempts(self._run) if one.job in self.jobs]
        others = [one for one in others if self._current is None or one.number != self._current.number]
        return others[-1] if others else None

    @property
    def current(self) -> Attempt:
        assert self._current is not None
        return self._current

    def end(self, outcome: str, reason: str) -> None:
        assert self._current is not None
        self._current.ended, self._current.outcome, self._current.reason = time.time(), outcome, reason
        self._write(self._current)

    def without_progress(self, step: int, outcomes: tuple[str | None, ...] = (None, CRASHED)) -> list[Attempt]:
        """The latest starts, oldest first, that left no checkpoint newer than `step` and had one of these outcomes;
        by default those that crashed or were cut off."""
        attempts: list[Attempt] = []
        for attempt in reversed(read_attempts(self._run)):
            if attempt.job not in self.jobs or attempt.step < step:
                break
            if attempt.outcome in outcomes:
                attempts.append(attempt)
        return attempts[::-1]

    def _write(self, current: Attempt) -> None:
        path = self._run / "slurm" / FILE
        others = [one for one in read_attempts(self._run) if one.number != current.number]
        attempts = sorted([*others, current], key=lambda one: one.started)
        temporary = path.with_name(f".{FILE}.{current.restart}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)  # a link is not followed
            temporary.write_text(json.dumps([asdict(one) for one in attempts], indent=1), encoding="utf-8")
            temporary.replace(path)
        except OSError as error:  # the job must end or requeue even if the disk is full
            print(f"slurm: '{path}' could not be written: {error.strerror}", flush=True)


def predecessors(attempts: list[Attempt], job: str) -> list[str]:
    """`job`, and before it the jobs that it carries on, from the first."""
    jobs = [job]
    while before := [one.job for one in attempts if one.successor == jobs[0] and one.job not in jobs]:
        jobs.insert(0, before[-1])
    return jobs


def read_attempts(run: Path) -> list[Attempt]:
    """In the order of their starts; none if the file is missing or damaged, because it only counts restarts."""
    try:
        found = [Attempt(**one) for one in read_json(run / "slurm" / FILE, limit=MAX_BYTES)]
    except (FileNotFoundError, BadFileError, TypeError):
        return []
    return found if all(map(_is_sound, found)) else []


def _is_sound(one: Attempt) -> bool:
    times = (one.started, one.signalled or 0, one.ended or 0)
    return (
        isinstance(one.nodes, list)
        and all(isinstance(value, str) for value in (one.job, one.reason, one.outcome or "", one.successor, *one.nodes))
        and all(isinstance(value, int) and 0 <= value < 10**12 for value in (one.restart, one.step))
        and all(isinstance(value, int | float) and 0 <= value < 1e11 for value in times)
    )
