"""What a run's job is doing, from Slurm and from the run folder."""

import json
from pathlib import Path
from typing import Any

from xgram_dist.checkpoint.folder import found_steps
from xgram_dist.slurm.attempts import read_attempts
from xgram_dist.slurm.commands import job_facts
from xgram_dist.slurm.record import FOLDER, LOG, read_jobs

TAIL_BYTES = 1 << 16


def status(run: Path) -> dict[str, Any]:
    """State, place, progress; None where there is nothing to say."""
    jobs = read_jobs(run)
    facts = job_facts(jobs["train"])
    after = job_facts(jobs["eval"]) if "eval" in jobs else None
    last, end = _last_records(run / "metrics.jsonl")
    return {
        "run": str(run),
        "job": jobs["train"],
        "state": None if facts is None else facts["JobState"],
        "reason": None if facts is None or facts["Reason"] == "None" else facts["Reason"],
        "nodes": None if facts is None or facts["NodeList"] == "(null)" else facts["NodeList"],
        "run_time": None if facts is None else facts["RunTime"],
        "time_limit": None if facts is None else facts["TimeLimit"],
        "complete": bool(end and end.get("complete")),
        "step": None if last is None else last["step"],
        "loss": None if last is None else last.get("loss"),
        "tokens_per_second": None if last is None else last.get("tokens_per_second"),
        "checkpoint": max(found_steps(run), default=None),
        "starts": _starts(run),
        "eval_job": jobs.get("eval"),
        "eval_state": None if after is None else after["JobState"],
        "log": str(run / FOLDER / LOG),
    }


def _starts(run: Path) -> list[dict[str, Any]]:
    """The last one may be under way; one before it without an end was cut off."""
    attempts = read_attempts(run)
    return [
        {
            "nodes": one.nodes,
            "after_step": one.step,
            "outcome": one.outcome,
            "reason": one.why() if one.outcome or one is not attempts[-1] else "",
            "seconds_to_stop": one.seconds_to_stop(),
        }
        for one in attempts
    ]


def _last_records(metrics: Path) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The last `train` and `end` records; the file may be long, and its last line unfinished."""
    found: dict[str, dict[str, Any]] = {}
    if metrics.exists():
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()
        for line in lines:
            try:
                record = json.loads(line)
                found[record["kind"]] = record
            except (ValueError, KeyError, TypeError):
                continue
    return found.get("train"), found.get("end")
