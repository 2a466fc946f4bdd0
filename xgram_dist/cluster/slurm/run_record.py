"""What `submit` writes into a run folder: RUN/slurm/.

config.yaml     the resolved recipe that the job trains
code/           a copy of the package, so that a job that restarts days later runs the same code
job.sbatch      the script; eval.sbatch if an evaluation follows
jobs.json       ids of the submitted jobs
log.txt         output of the job, over all its starts
attempts.json   its starts and how each ended
cancelled       present after `xgram-dist cancel`
"""

import json
import os
import shutil
from pathlib import Path

import xgram_dist
from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.cluster.slurm.commands import ENDED, job_state
from xgram_dist.cluster.slurm.job import CANCELLED
from xgram_dist.config import Config, dump_config, is_saved_as
from xgram_dist.errors import UserError

FOLDER, CONFIG, JOBS, LOG, SCRIPT, EVAL = "slurm", "config.yaml", "jobs.json", "log.txt", "job.sbatch", "eval.sbatch"
METRICS = "metrics.jsonl"


def write_snapshot(run: Path, config: Config) -> None:
    """Code and config. An earlier submission's are replaced; its log is kept and appended to."""
    folder = run / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CANCELLED).unlink(missing_ok=True)
        (folder / CONFIG).write_text(dump_config(config), encoding="utf-8")
        package, copy = Path(xgram_dist.__file__).parent, folder / f".code.{os.getpid()}"
        shutil.copytree(package, copy / "xgram_dist", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.rmtree(folder / "code", ignore_errors=True)
        copy.rename(folder / "code")
    except OSError as error:
        raise UserError(f"cannot write '{folder}': {error.strerror}; choose another folder with --folder") from error


def write_jobs(run: Path, jobs: dict[str, str]) -> None:
    (run / FOLDER / JOBS).write_text(json.dumps(jobs, indent=1) + "\n", encoding="utf-8")


def read_jobs(run: Path) -> dict[str, str]:
    """Ids by purpose: train, eval."""
    path = run / FOLDER / JOBS
    try:
        jobs = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"'{run}' has no job of `xgram-dist submit` (no {FOLDER}/{JOBS})") from None
    except ValueError:
        jobs = None
    if not isinstance(jobs, dict) or not all(isinstance(job, str) for job in jobs.values()):
        raise UserError(f"'{path}' is damaged; ask Slurm itself with `squeue --me`")
    return jobs


def check_folder(run: Path, config: Config) -> None:
    """Refuse a folder whose job is queued or running, and one with another recipe's run that cannot be resumed."""
    same = is_saved_as(config, run / FOLDER / CONFIG)
    if (run / METRICS).exists() and not list_steps(run) and not same:
        raise UserError(
            f"'{run}' already holds a run without a checkpoint to resume from; choose another folder with --folder, "
            f"or remove it"
        )
    if not (run / FOLDER / JOBS).exists():
        return
    job = read_jobs(run)["train"]
    state = job_state(job)
    if state is not None and state not in ENDED:
        raise UserError(
            f"'{run}' already has job {job}, {state}; look at it with `xgram-dist status {run}`, or end it with "
            f"`xgram-dist cancel {run}` first"
        )
