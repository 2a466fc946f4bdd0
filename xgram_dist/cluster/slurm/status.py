"""The state of a run's job, from Slurm and from the run folder; and its log, followed as it grows."""

import json
import time
from pathlib import Path
from typing import Any

from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.cluster.slurm.attempts import read_attempts
from xgram_dist.cluster.slurm.commands import ENDED, job_facts, job_state
from xgram_dist.cluster.slurm.run_record import FOLDER, LOG, read_jobs

TAIL_BYTES = 1 << 16
"""Read from the end of metrics.jsonl."""
LOG_SECONDS, STATE_SECONDS = 0.5, 3.0
"""Between looks at the log, and at the job's state."""


def status(run: Path) -> dict[str, Any]:
    """State, nodes and progress; None for what is not known."""
    jobs = read_jobs(run)
    facts = job_facts(jobs["train"])
    after = job_facts(jobs["eval"]) if "eval" in jobs else None
    train, end = _last_records(run / "metrics.jsonl")
    return {
        "run": str(run),
        "job": jobs["train"],
        "state": None if facts is None else facts["JobState"],
        "reason": None if facts is None or facts["Reason"] == "None" else facts["Reason"],
        "nodes": None if facts is None or facts["NodeList"] == "(null)" else facts["NodeList"],
        "run_time": None if facts is None else facts["RunTime"],
        "time_limit": None if facts is None else facts["TimeLimit"],
        "complete": bool(end and end.get("complete")),
        "step": None if train is None else train["step"],
        "loss": None if train is None else train.get("loss"),
        "tokens_per_second": None if train is None else train.get("tokens_per_second"),
        "checkpoint": max(list_steps(run), default=None),
        "starts": _starts(run),
        "eval_job": jobs.get("eval"),
        "eval_state": None if after is None else after["JobState"],
        "log": str(run / FOLDER / LOG),
    }


def _starts(run: Path) -> list[dict[str, Any]]:
    """The last start may be running; an earlier one without an end was cut off."""
    attempts = read_attempts(run)
    return [
        {
            "nodes": one.nodes,
            "after_step": one.step,
            "outcome": one.outcome,
            "reason": one.explain() if one.outcome or one is not attempts[-1] else "",
            "seconds_to_stop": one.seconds_to_stop(),
        }
        for one in attempts
    ]


def _last_records(metrics: Path) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The last `train` and `end` records. The file may be long, and its last line unfinished."""
    last: dict[str, dict[str, Any]] = {}
    if metrics.exists():
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()
        for line in lines:
            try:
                record = json.loads(line)
                last[record["kind"]] = record
            except (ValueError, KeyError, TypeError):
                continue
    return last.get("train"), last.get("end")


def follow(job: str, log: Path) -> str:
    """Print the log as it grows until the job ends; its final state. A requeued job appends to the same log."""
    printed = log.stat().st_size if log.exists() else 0  # skip what an earlier submission wrote
    state: str | None = "PENDING"
    checked = 0.0
    while True:
        if time.monotonic() - checked >= STATE_SECONDS:
            checked, before = time.monotonic(), state
            state = job_state(job)
            if state != before:
                print(f"job {job}: {state or 'no longer known to Slurm'}", flush=True)
        printed = _print_from(log, printed)
        if state is None or state in ENDED:
            return state or "unknown"
        time.sleep(LOG_SECONDS)


def _print_from(log: Path, start: int) -> int:
    """Print the log from an offset; the offset of its end."""
    if not log.exists():
        return start
    with log.open("rb") as file:
        file.seek(start)
        data = file.read()
    if data:
        print(data.decode("utf-8", errors="replace"), end="", flush=True)
    return start + len(data)
