"""Slurm's commands and the environment it gives its processes.

Commands run without a shell. `srun` tells each process its rank but not where to meet: the rendezvous is the first node
of the job, at a port derived from the job's id, so that jobs on one node do not collide. Standard library only: the
first process of a job uses this with the host's Python.
"""

import os
import re
import subprocess
from collections.abc import Mapping

from xgram_dist.errors import UserError

ENDED = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
)
TIMEOUT_SECONDS = 60.0
FIRST_PORT, NUM_PORTS = 12_000, 10_000
"""Below the system's ephemeral ports (from 32768)."""
NODES = "XGRAM_DIST_NODES"
"""Environment variable: node names in rank order, for error messages."""


def run_command(words: list[str]) -> str:
    """The output of a command; a failure is a `UserError`."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except FileNotFoundError:
        raise UserError(f"'{words[0]}' is not on this machine; run this where Slurm's commands are") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"'{words[0]}' did not answer in {TIMEOUT_SECONDS:g} s; is Slurm's controller up?") from None
    if done.returncode != 0:
        raise UserError(f"{words[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def submit_script(options: list[str], script: str) -> str:
    """`sbatch OPTIONS SCRIPT`; the job's id."""
    return run_command(["sbatch", "--parsable", *options, script]).strip().split(";")[0]


def hostnames(nodelist: str) -> list[str]:
    """`n[1-2,7]` as a list of names."""
    return run_command(["scontrol", "show", "hostnames", nodelist]).split()


def job_facts(job: str) -> dict[str, str] | None:
    """Fields of `scontrol show job`; None if Slurm no longer knows the job."""
    try:
        text = run_command(["scontrol", "show", "job", "-o", job])
    except UserError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    # KEY=VALUE words. A value may contain spaces, so a key is a capitalised word before "=". If a key seems to occur
    # twice, the first counts: state and restart count come before paths, which users choose.
    pairs = re.findall(r"(?:^| )([A-Z][\w/:]*)=(.*?)(?= [A-Z][\w/:]*=|\s*$)", text.splitlines()[0])
    return dict(reversed(pairs))


def job_state(job: str) -> str | None:
    """PENDING, RUNNING, ..., or None if Slurm no longer knows the job."""
    facts = job_facts(job)
    return None if facts is None else facts["JobState"]


def rendezvous(job: int, nodes: list[str], suffix: str = "") -> dict[str, str]:
    """Environment variables that tell ranks where to meet."""
    return {
        "MASTER_ADDR": nodes[0] + suffix,
        "MASTER_PORT": str(FIRST_PORT + 2 * (job % NUM_PORTS)),  # the next port is the preflight's
        NODES: ",".join(nodes),
    }


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK and the rendezvous, for a process that `srun` started as one of several; else
    nothing."""
    size = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in environment or size == "1":
        return {}
    variables = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
    }
    if "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
        nodes = hostnames(environment["SLURM_STEP_NODELIST"])
        variables = rendezvous(int(environment["SLURM_JOB_ID"]), nodes) | variables
    return variables


def set_rank_environment() -> None:
    """Under `srun`, give this process the environment torchrun would. Call it before anything reads RANK."""
    os.environ.update(rank_environment(os.environ))
