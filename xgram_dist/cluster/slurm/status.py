"""The state of a run's job, from Slurm and from the run folder; and its log, followed as it grows."""

import time
from pathlib import Path
from typing import Any

from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.cluster.slurm.attempts import read_attempts
from xgram_dist.cluster.slurm.bad_nodes import excluded_nodes
from xgram_dist.cluster.slurm.commands import ENDED, job_facts, job_state
from xgram_dist.cluster.slurm.run_record import CONFIG, LOG
from xgram_dist.cluster.slurm.successor import FOLDER, JOBS, current_job, read_jobs
from xgram_dist.console import format_duration
from xgram_dist.errors import BadFileError
from xgram_dist.train.metrics_file import number, read_metrics
from xgram_dist.train.starts import KINDS, PARTS, goodput, read_starts

TAIL_BYTES = 1 << 16
"""Read from the end of metrics.jsonl."""
LOG_SECONDS, STATE_SECONDS = 0.5, 3.0
"""Between looks at the log, and at the job's state."""


def status(run: Path) -> dict[str, Any]:
    """State, nodes and progress; None for what is not known. A run that no Slurm job trains has a state, too."""
    jobs = {} if _is_local(run) else read_jobs(run)
    job, facts = current_job(run) if jobs else (None, None)
    after = job_facts(jobs["eval"]) if "eval" in jobs else None
    last = _last_records(run / "metrics.jsonl")
    train, end = last.get("train"), last.get("end")
    return {
        "run": str(run),
        "job": job,
        "state": None if facts is None else facts["JobState"],
        "reason": None if facts is None or facts["Reason"] == "None" else facts["Reason"],
        "nodes": None if facts is None or facts["NodeList"] == "(null)" else facts["NodeList"],
        "run_time": None if facts is None else facts["RunTime"],
        "time_limit": None if facts is None else facts["TimeLimit"],
        "complete": bool(end and end.get("complete")),
        "step": None if train is None else train["step"],
        "loss": None if train is None else number(train, "loss"),
        "tokens_per_second": None if train is None else number(train, "tokens_per_second"),
        "checkpoint": max(list_steps(run), default=None),
        "starts": _starts(run),
        "goodput": goodput(run, submitted_at(run) if jobs else None),
        "excluded": {node: vars(one) for node, one in excluded_nodes(run, time.time()).items()},
        "stragglers": last.get("stragglers"),
        "eval_job": jobs.get("eval"),
        "eval_state": None if after is None else after["JobState"],
        "log": str(run / FOLDER / LOG) if jobs else None,
    }


def _is_local(run: Path) -> bool:
    return not (run / FOLDER / JOBS).exists() and (run / "metrics.jsonl").exists()


def submitted_at(run: Path) -> float | None:
    """When the job was submitted: its recipe is written then."""
    path = run / FOLDER / CONFIG
    return path.stat().st_mtime if path.exists() and not read_starts(run)[1:] else None


def goodput_rows(figures: dict[str, Any]) -> list[list[str]]:
    """Of `goodput`, for a table of two columns."""
    share, last = figures["goodput"], figures["starts"][-1]
    spent = ", ".join(f"{kind} {format_duration(figures[kind])}" for kind in KINDS if figures[kind] >= 0.5)
    parts = ", ".join(f"{PARTS.get(name, name)} {seconds:.1f} s" for name, seconds in last["parts"].items())
    return [
        ["goodput", "-" if share is None else f"{100 * share:.1f} % of {format_duration(figures['total'])}"],
        ["time", spent],
        ["last start", f"{last['to_first_step']:.1f} s to the first step: {parts}"],
    ]


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


def _last_records(metrics: Path) -> dict[str, dict[str, Any]]:
    """The last record of each kind. The file may be long, and its last line unfinished."""
    try:
        return {record["kind"]: record for record in read_metrics(metrics, TAIL_BYTES).records}
    except (FileNotFoundError, BadFileError):
        return {}


def follow(job: str, run: Path) -> str:
    """Print the log as it grows until the job ends; its final state. A requeued job appends to the same log, and so
    does the job that carries on its run."""
    log = run / FOLDER / LOG
    printed = log.stat().st_size if log.exists() else 0  # skip what an earlier submission wrote
    state: str | None = "PENDING"
    checked = 0.0
    while True:
        if time.monotonic() - checked >= STATE_SECONDS:
            checked, before = time.monotonic(), state
            state = job_state(job)
            if (state is None or state in ENDED) and (after := current_job(run))[0] != job and after[1] is not None:
                job, state = after[0], after[1]["JobState"]
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
