"""Slurm's commands and the environment it gives its processes.

Commands run without a shell. `srun` tells each process its rank but not where to meet: the rendezvous is the first node
of the job, at a port derived from the job's id, so that jobs on one node do not collide. Standard library only: the
first process of a job uses this with the host's Python.
"""

import math
import os
import re
import subprocess
from collections.abc import Mapping

from xgram_dist.environment import NODES, launcher_variables, whole_number
from xgram_dist.errors import UserError, one_line

ENDED = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"}
)
TIMEOUT_SECONDS = 60.0
MAX_SAID = 300
"""Characters of what a command of Slurm says when it fails."""
FIRST_PORT, NUM_PORTS = 12_000, 10_000
"""Below the system's ephemeral ports (from 32768)."""
_DURATION = re.compile(r"(?:([0-9]{1,6})-)?([0-9]{1,9}(?::[0-9]{1,6}){0,2})", re.ASCII)


def run_command(words: list[str], environment: Mapping[str, str] | None = None) -> str:
    """The output of a command; a failure is a `UserError`."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_SECONDS, env=environment
        )
    except FileNotFoundError:
        raise UserError(f"'{words[0]}' is not on this machine; run this where Slurm's commands are") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"'{words[0]}' did not answer in {TIMEOUT_SECONDS:g} s; is Slurm's controller up?") from None
    if done.returncode != 0:
        said = " / ".join(line.strip() for line in done.stderr.splitlines() if line.strip())
        raise UserError(f"{words[0]}: {one_line(said, MAX_SAID) or f'exit code {done.returncode}'}")
    return done.stdout


def submit_script(options: list[str], script: str) -> str:
    """`sbatch OPTIONS SCRIPT`; the job's id."""
    return run_command(["sbatch", "--parsable", *options, script], job_environment()).strip().split(";")[0]


def job_environment() -> dict[str, str]:
    """For `sbatch`, also within a job: without what Slurm has told that job about itself."""
    return {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith("SLURM_")}


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


def was_cancelled(facts: Mapping[str, str]) -> bool:
    """Whether a person has ended the job with `scancel`. It is COMPLETING while its processes end; so is a job that
    preemption, its time limit or a lost node ends, but those are named."""
    named = facts.get("Reason", "None") != "None" or facts.get("PreemptTime", "None") != "None"
    state = facts.get("JobState")
    return state == "CANCELLED" or (state == "COMPLETING" and not named)


def seconds_of(text: str) -> float | None:
    """A duration as Slurm writes it (M, M:S, H:M:S, D-H, D-H:M, D-H:M:S); infinite: UNLIMITED; None: another word."""
    if text == "UNLIMITED":
        return math.inf
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    days, parts = match[1], [int(part) for part in match[2].split(":")]
    if days is None and len(parts) < 3:
        parts.insert(0, 0)  # a number alone is of minutes, without days
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return 86400.0 * int(days or 0) + 3600 * hours + 60 * minutes + seconds


def rendezvous(job: int, nodes: list[str], suffix: str = "") -> dict[str, str]:
    """Environment variables that tell ranks where to meet."""
    return {
        "MASTER_ADDR": nodes[0] + suffix,
        "MASTER_PORT": str(FIRST_PORT + 2 * (job % NUM_PORTS)),  # the next port is the preflight's
        NODES: ",".join(nodes),
    }


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK and the rendezvous, for a process that `srun` or `mpirun` started as one of several;
    else nothing."""
    variables = launcher_variables(environment)
    if variables and ("MASTER_ADDR" not in environment or "MASTER_PORT" not in environment):
        if "SLURM_STEP_NODELIST" not in environment:
            raise UserError(
                "MASTER_ADDR or MASTER_PORT is not set in the environment, and neither is SLURM_STEP_NODELIST, from "
                "which they would follow; set the host of rank 0 and a free port there"
            )
        nodes = hostnames(environment["SLURM_STEP_NODELIST"])
        variables = rendezvous(whole_number(environment, "SLURM_JOB_ID"), nodes) | variables
    return variables


def set_rank_environment() -> None:
    """Under `srun` or `mpirun`, give this process the environment of torchrun. Call it before anything reads RANK."""
    os.environ.update(rank_environment(os.environ))
