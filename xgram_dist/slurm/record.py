"""What `submit` leaves in a run folder: RUN/slurm/.

config.yaml     the resolved recipe that the job trains
code/           the package as it was, so that a job that starts again days later runs the same code
job.sbatch      the script; eval.sbatch where an evaluation follows
jobs.json       ids of the submitted jobs
log.txt         what the job says, over all its starts
attempts.json   its starts and how each ended
"""

import json
import os
import shutil
from pathlib import Path

import xgram_dist
from xgram_dist.checkpoint.folder import found_steps
from xgram_dist.config import Config, dump_config
from xgram_dist.errors import UserError
from xgram_dist.slurm.commands import ENDED, job_state
from xgram_dist.slurm.job import CANCELLED

FOLDER, CONFIG, JOBS, LOG, SCRIPT, EVAL = "slurm", "config.yaml", "jobs.json", "log.txt", "job.sbatch", "eval.sbatch"
METRICS = "metrics.jsonl"


def write_snapshot(run: Path, config: Config) -> None:
    """Code and config; what an earlier submission left is replaced, its log goes on."""
    folder = run / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CANCELLED).unlink(missing_ok=True)
        (folder / CONFIG).write_text(dump_config(config), encoding="utf-8")
        package, aside = Path(xgram_dist.__file__).parent, folder / f".code.{os.getpid()}"
        shutil.copytree(package, aside / "xgram_dist", ignore=lambda _, names: {n for n in names if n == "__pycache__"})
        shutil.rmtree(folder / "code", ignore_errors=True)
        aside.rename(folder / "code")
    except OSError as error:
        raise UserError(f"cannot write '{folder}': {error.strerror}; choose another folder with --folder") from error


def write_jobs(run: Path, jobs: dict[str, str]) -> None:
    (run / FOLDER / JOBS).write_text(json.dumps(jobs, indent=1) + "\n", encoding="utf-8")


def read_jobs(run: Path) -> dict[str, str]:
    """By what they do: train, eval."""
    path = run / FOLDER / JOBS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"'{run}' has no job of `xgram-dist submit` (no {FOLDER}/{JOBS})") from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise UserError(f"'{path}' is damaged; ask Slurm itself with `squeue --me`")
    return found


def check_folder(run: Path, config: Config) -> None:
    """Refuse a folder whose job is in the queue or running, and one with another run that nothing can go on from."""
    written = run / FOLDER / CONFIG
    same = written.exists() and written.read_text(encoding="utf-8") == dump_config(config)
    if (run / METRICS).exists() and not found_steps(run) and not same:
        raise UserError(
            f"'{run}' already holds a run, without a checkpoint to go on from; choose another folder with --folder, or "
            f"remove it"
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
