"""Show a job's log as it grows, until the job has ended."""

import time
from pathlib import Path

from xgram_dist.slurm.commands import ENDED, job_state

LOOK_SECONDS, ASK_SECONDS = 0.5, 3.0


def follow(job: str, log: Path) -> str:
    """The state the job ended in. A requeued job goes on writing to the same log."""
    shown = log.stat().st_size if log.exists() else 0  # of an earlier submission
    state: str | None = "PENDING"
    asked = 0.0
    while True:
        if time.monotonic() - asked >= ASK_SECONDS:
            asked, before = time.monotonic(), state
            state = job_state(job)
            if state != before:
                print(f"job {job}: {state or 'no longer known to Slurm'}", flush=True)
        shown = _show(log, shown)
        if state is None or state in ENDED:
            return state or "unknown"
        time.sleep(LOOK_SECONDS)


def _show(log: Path, start: int) -> int:
    """Print what was added; how far it was read."""
    if not log.exists():
        return start
    with log.open("rb") as file:
        file.seek(start)
        data = file.read()
    if data:
        print(data.decode("utf-8", errors="replace"), end="", flush=True)
    return start + len(data)
