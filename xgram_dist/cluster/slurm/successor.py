"""The successor of a job, which carries its run on where Slurm does not start a job again; and RUN/slurm/jobs.json.

Slurm starts a job again under the same id, unless the site forbids it (`Requeue=0`) or preemption ends jobs for good
(`PreemptMode=CANCEL`). There each job submits its successor as soon as it starts, with `--dependency=afternotok:JOB`:
Slurm holds it until the job has ended with anything but 0, and drops it otherwise. So a job may end without notice.
The successor is the same run: the same folder, log, limits of restarts and history (`Attempt.successor`).

    {"train": the job, "next": its successor, "eval": the evaluation that follows, which waits for either}

Standard library only.
"""

import json
import re
import time
from pathlib import Path

from xgram_dist.cluster.slurm.commands import ENDED, job_facts, run_command, submit_script
from xgram_dist.errors import BadFileError, UserError
from xgram_dist.untrusted import open_itself, read_json

FOLDER, JOBS, NEXT = "slurm", "jobs.json", "next"
MAX_JOBS_BYTES = 1 << 16
JOB_ID = re.compile(r"[0-9]{1,20}(_[0-9]{1,20})?", re.ASCII)


def starts_again(facts: dict[str, str]) -> bool:
    """Whether Slurm starts this job again when it is requeued, is preempted, or has lost a node."""
    if facts.get("Requeue") == "0":
        return False
    try:
        text = run_command(["scontrol", "show", "partition", "-o", facts.get("Partition", "")])
    except UserError:
        return True
    return re.search(r"\bPreemptMode=\S*CANCEL", text) is None


def submit_successor(run: Path, script: Path, job: str, exclude: str) -> str:
    """Of `job`, which is running; its id. `exclude`: nodes it is not to get, as Slurm writes lists."""
    _, _, task = job.partition("_")
    options = [f"--dependency=afternotok:{job}", "--kill-on-invalid-dep=yes"]
    options += [f"--array={task}"] if task else []  # the script asks for all tasks
    options += [f"--exclude={exclude}"] if exclude else []
    successor = submit_script(options, str(script)) + (f"_{task}" if task else "")
    _wait_until_submitted(run, job)
    write_jobs(run, {**read_jobs(run), "train": job, NEXT: successor})
    return successor


def _wait_until_submitted(run: Path, job: str) -> None:
    """A job may start before `xgram-dist submit` has written down its id."""
    for _ in range(100):
        try:
            if job in read_jobs(run).values():
                return
        except UserError:
            pass
        time.sleep(0.1)


def move_evaluation(run: Path) -> None:
    """The evaluation that waits for the run's job waits for its successor as well: for whichever completes the run."""
    jobs = read_jobs(run)
    if "eval" in jobs and NEXT in jobs:
        dependency = f"afterok:{jobs['train']}?afterok:{jobs[NEXT]}"
        run_command(["scontrol", "update", f"JobId={jobs['eval']}", f"Dependency={dependency}"])


def current_job(run: Path) -> tuple[str, dict[str, str] | None]:
    """The job that trains the run, or that is to carry it on after that has ended; with its facts."""
    jobs = read_jobs(run)
    facts = job_facts(jobs["train"])
    if NEXT in jobs and (facts is None or facts["JobState"] in ENDED):
        after = job_facts(jobs[NEXT])
        if after is not None and after["JobState"] not in ENDED:
            return jobs[NEXT], after
    return jobs["train"], facts


def write_jobs(run: Path, jobs: dict[str, str]) -> None:
    temporary = run / FOLDER / f".{JOBS}"
    with open(temporary, "w", opener=open_itself) as file:
        file.write(json.dumps(jobs, indent=1) + "\n")
    temporary.replace(run / FOLDER / JOBS)


def read_jobs(run: Path) -> dict[str, str]:
    """Ids by purpose: train, next, eval."""
    path = run / FOLDER / JOBS
    try:
        jobs = read_json(path, limit=MAX_JOBS_BYTES)
    except FileNotFoundError:
        raise UserError(f"'{run}' has no job of `xgram-dist submit` (no {FOLDER}/{JOBS})") from None
    except BadFileError:
        jobs = None
    # An id is given to commands of Slurm as a word, so it must be one: 123, or 123_4 of an array.
    if (
        not isinstance(jobs, dict)
        or "train" not in jobs
        or not all(isinstance(job, str) and JOB_ID.fullmatch(job) for job in jobs.values())
    ):
        raise UserError(f"'{path}' is damaged; ask Slurm itself with `squeue --me`")
    return jobs
