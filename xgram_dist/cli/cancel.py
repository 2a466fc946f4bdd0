"""`xgram-dist cancel`."""

import argparse
from pathlib import Path

EXAMPLES = """
  xgram-dist cancel runs/0.73b-xgram-2x-50
  xgram-dist cancel runs/0.73b-xgram-2x-50 --now
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--now", action="store_true", help="at once, without a checkpoint")


def run(args: argparse.Namespace) -> int:
    from xgram_dist.slurm.commands import ENDED, job_state, run_command
    from xgram_dist.slurm.job import CANCELLED
    from xgram_dist.slurm.record import FOLDER, read_jobs

    for folder in map(Path, args.runs):
        jobs = read_jobs(folder)
        job, state = jobs["train"], job_state(jobs["train"])
        for after in (one for what, one in jobs.items() if what != "train"):
            if (job_state(after) or "COMPLETED") not in ENDED:
                run_command(["scancel", after])
        if state is None or state in ENDED:
            print(f"job {job} has ended already ({state or 'no longer known to Slurm'})")
            continue
        (folder / FOLDER / CANCELLED).touch()  # a start that is asked to stop does not requeue
        if state == "RUNNING" and not args.now:
            run_command(["scancel", "--signal=USR1", "--batch", job])
            print(f"job {job}: saves a checkpoint and ends; `xgram-dist status {folder}` shows when")
        else:
            run_command(["scancel", job])
            print(f"job {job}: cancelled")
    return 0
