"""Where the ranks of a job meet, from what Slurm tells its processes.

`srun` gives each process its number, not a place to meet: that is the first node of the job, at a port made from the
job's number, so that jobs which share a node do not meet each other. Standard library alone.
"""

import os
from collections.abc import Mapping

from xgram_dist.slurm.commands import hostnames

FIRST_PORT, PORTS = 12_000, 10_000
"""Below the ports the system hands out by itself (from 32768)."""
NODES = "XGRAM_DIST_NODES"
"""Names of the nodes in the order of their ranks, for sentences that name one."""


def meeting_place(job: int, nodes: list[str], suffix: str = "") -> dict[str, str]:
    return {
        "MASTER_ADDR": nodes[0] + suffix,
        "MASTER_PORT": str(FIRST_PORT + 2 * (job % PORTS)),  # the next one is the roll call's
        NODES: ",".join(nodes),
    }


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK and its like for a process that `srun` started as one of several; nothing for any other."""
    size = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in environment or size == "1":
        return {}
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
    }
    if "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
        nodes = hostnames(environment["SLURM_STEP_NODELIST"])
        found = meeting_place(int(environment["SLURM_JOB_ID"]), nodes) | found
    return found


def adopt() -> None:
    """Before anything reads RANK: under `srun` the environment becomes that of torchrun."""
    os.environ.update(rank_environment(os.environ))
