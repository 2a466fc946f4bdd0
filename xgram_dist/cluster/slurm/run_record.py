"""What `submit` writes into a run folder: RUN/slurm/.

config.yaml     the resolved recipe that the job trains
code/           a copy of the package, so that a job that restarts days later runs the same code
job.sbatch      the script; eval.sbatch if an evaluation follows
jobs.json       ids of the submitted jobs
nodes.jsonl     nodes that failed or were slow
stop            through which the job's first process asks the ranks to save and end
log.txt         output of the job, over all its starts
attempts.json   its starts and how each ended
cancelled       present after `xgram-dist cancel`
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import xgram_dist
from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.cluster.slurm.commands import ENDED
from xgram_dist.cluster.slurm.job import CANCELLED
from xgram_dist.cluster.slurm.successor import FOLDER, JOBS, current_job
from xgram_dist.config import Config, dump_config, is_saved_as
from xgram_dist.errors import UserError
from xgram_dist.files import write_atomically

CONFIG, LOG, SCRIPT, EVAL = "config.yaml", "log.txt", "job.sbatch", "eval.sbatch"
METRICS, LOCK = "metrics.jsonl", ".submitting"


@contextmanager
def submitting(runs: list[Path]) -> Iterator[None]:
    """Between looking at run folders and writing down their jobs: one `submit` at a time."""
    with ExitStack() as held:
        for run in runs:
            try:
                (run / FOLDER).mkdir(parents=True, exist_ok=True)
                lock = held.enter_context(open(run / FOLDER / LOCK, "w", opener=_open_lock))
                _lock(lock)
            except BlockingIOError:
                raise UserError(
                    f"another `xgram-dist submit` of '{run}' is under way; `xgram-dist status {run}` shows its job"
                ) from None
            except OSError as error:
                raise UserError(
                    f"cannot write '{run}': {error.strerror}; choose another folder with --folder"
                ) from error
        yield


def _open_lock(path: str, flags: int) -> int:
    """Not through a link, which would empty another file."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _lock(file: IO[str]) -> None:
    """Some file systems have no locks; there the lease of the run folder still keeps the second job out."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise


def write_snapshot(run: Path, config: Config) -> None:
    """Code and config. An earlier submission's are replaced; its log is kept and appended to."""
    folder = run / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CANCELLED).unlink(missing_ok=True)
        write_atomically(folder / CONFIG, dump_config(config))
        package, copy = Path(xgram_dist.__file__).parent, folder / f".code.{os.getpid()}"
        shutil.copytree(package, copy / "xgram_dist", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.rmtree(folder / "code", ignore_errors=True)
        copy.rename(folder / "code")
    except OSError as error:
        raise UserError(f"cannot write '{folder}': {error.strerror}; choose another folder with --folder") from error


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
    job, facts = current_job(run)
    state = None if facts is None else facts["JobState"]
    if state is not None and state not in ENDED:
        raise UserError(
            f"'{run}' already has job {job}, {state}; look at it with `xgram-dist status {run}`, or end it with "
            f"`xgram-dist cancel {run}` first"
        )
