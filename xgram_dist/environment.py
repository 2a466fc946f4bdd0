"""What the environment says about this process: its rank, where the ranks meet, whose child it is.

Every variable is read and checked here. A mistake is one sentence with the variable, its value and what was expected.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT    of torchrun, of `--ranks`, or set by hand
    SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID         of srun    } `launcher_variables` translates them
    SLURM_JOB_ID, SLURM_RESTART_COUNT and others              of a job: `read_slurm_job`
    OMPI_COMM_WORLD_*, PMI_*                                  of mpirun  }
    XGRAM_DIST_TOKEN                                          a secret that all ranks of a run share
    XGRAM_DIST_PARENT, XGRAM_DIST_LISTEN_FD                   of `--ranks` alone: see parallel/launch.py
    XGRAM_DIST_JOB, XGRAM_DIST_STOP_FILE, XGRAM_DIST_NODES    of a job's first process: which start of which run this
                                                              is; a file that asks to save and end; names of nodes

Standard library only: the first process of a Slurm job uses this with the host's Python.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from xgram_dist.errors import UserError, one_line

TOKEN, PARENT, LISTEN_FD = "XGRAM_DIST_TOKEN", "XGRAM_DIST_PARENT", "XGRAM_DIST_LISTEN_FD"
JOB, STOP_FILE, NODES = "XGRAM_DIST_JOB", "XGRAM_DIST_STOP_FILE", "XGRAM_DIST_NODES"
MOST_RANKS = 1 << 20
_JOB = re.compile(r"([0-9]{1,20}):([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})", re.ASCII)
_CPUS = re.compile(r"([0-9]{1,6})(?:\(x[0-9]{1,6}\))?", re.ASCII)
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_MPI = (
    {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    },
    {"RANK": "PMI_RANK", "WORLD_SIZE": "PMI_SIZE", "LOCAL_RANK": "MPI_LOCALRANKID"},
)


@dataclass(frozen=True)
class Place:
    """This process among the ranks of a run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Number on its machine, which chooses its GPU."""
    address: str = ""
    """Of the machine of rank 0; empty for a single process."""
    port: int = 0
    attempt: int = 0
    """How often torchrun has restarted the ranks."""
    agent_store: bool = False
    """Whether torchrun's agent hosts the store at `address`; else rank 0 does."""
    token: str = ""
    launched: bool = False
    """Whether `--ranks` started this rank."""
    listen_fd: int | None = None
    """On rank 0 of `--ranks`: the socket that the launcher has opened at `address` and `port`."""


def read_place(environment: Mapping[str, str] = os.environ) -> Place:
    """From RANK and its companions; a single process where neither RANK nor WORLD_SIZE is set."""
    local_rank = whole_number(environment, "LOCAL_RANK", below=MOST_RANKS, default=0)
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return Place(local_rank=local_rank)
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in environment:
            raise UserError(
                f"{other} = '{_shown(environment[other])}' is set in the environment, but {name} is not; set both "
                f"(torchrun, srun and --ranks do), or neither for a single process"
            )
    size = whole_number(environment, "WORLD_SIZE", least=1, below=MOST_RANKS)
    rank = whole_number(environment, "RANK")
    if rank >= size:
        raise UserError(f"RANK = {rank} is not below WORLD_SIZE = {size}; ranks count from 0 to {size - 1}")
    if size == 1:
        return Place(local_rank=local_rank)
    if local_rank >= size:
        raise UserError(f"LOCAL_RANK = {local_rank} is not below WORLD_SIZE = {size}; it counts the ranks of a machine")
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        address=_address(environment),
        port=whole_number(environment, "MASTER_PORT", least=1, below=1 << 16),
        attempt=whole_number(environment, "TORCHELASTIC_RESTART_COUNT", default=0),
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        token=environment.get(TOKEN, ""),
        launched=PARENT in environment,
        listen_fd=whole_number(environment, LISTEN_FD) if rank == 0 and LISTEN_FD in environment else None,
    )


def launcher_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE and LOCAL_RANK of a process that srun or mpirun started as one of several, as torchrun would set
    them; else nothing."""
    if "RANK" in environment:
        return {}
    slurm = _translate(environment, _SLURM)
    for names in _MPI:
        variables = _translate(environment, names)
        # srun may set PMI_* beside its own variables. mpirun may have been started by srun, one process a node.
        if variables and variables != slurm:
            if "MASTER_ADDR" not in environment:
                raise UserError(
                    f"{names['RANK']} = {variables['RANK']} is set, but MASTER_ADDR is not: mpirun does not say where "
                    f"the ranks meet; pass MASTER_ADDR, the host of rank 0, and MASTER_PORT, a free port there"
                )
            return variables
    return slurm


def _translate(environment: Mapping[str, str], names: dict[str, str]) -> dict[str, str]:
    if whole_number(environment, names["WORLD_SIZE"], least=1, below=MOST_RANKS, default=1) == 1:
        return {}
    size = int(environment[names["WORLD_SIZE"]])
    rank = whole_number(environment, names["RANK"])
    if rank >= size:
        raise UserError(f"{names['RANK']} = {rank} is not below {names['WORLD_SIZE']} = {size}")
    local_rank = whole_number(environment, names["LOCAL_RANK"])
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local_rank)}


@dataclass(frozen=True)
class SlurmJob:
    """Where this process runs under Slurm."""

    number: int
    id: str
    """As Slurm's commands take it: ARRAY_TASK for a task of an array, whose last task has the number of the array."""
    restart: int
    """How often Slurm has started the job again."""
    nodelist: str
    """Its nodes, as Slurm writes lists."""


def read_slurm_job(environment: Mapping[str, str] = os.environ) -> SlurmJob:
    number = whole_number(environment, "SLURM_JOB_ID", least=1)
    job = str(number)
    if environment.get("SLURM_ARRAY_JOB_ID"):
        array = whole_number(environment, "SLURM_ARRAY_JOB_ID", least=1)
        job = f"{array}_{whole_number(environment, 'SLURM_ARRAY_TASK_ID')}"
    nodelist = environment.get("SLURM_JOB_NODELIST", "")
    if not nodelist or nodelist.startswith("-") or not nodelist.isprintable():
        raise UserError(
            f"SLURM_JOB_NODELIST = '{_shown(nodelist)}' in the environment: must be a list of nodes such as n[1-2,7]; "
            f"run this within a job of Slurm"
        )
    return SlurmJob(number, job, whole_number(environment, "SLURM_RESTART_COUNT", default=0), nodelist)


def slurm_cpus(environment: Mapping[str, str] = os.environ) -> int:
    """CPUs that the ranks of a node share: those asked for, else what the job has on its smallest node; 0: unknown."""
    if asked := whole_number(environment, "SLURM_CPUS_PER_TASK", default=0):
        return asked
    given = environment.get("SLURM_JOB_CPUS_PER_NODE", "")  # such as 96(x2),64
    matches = [_CPUS.fullmatch(part) for part in given.split(",") if part]
    if None in matches:
        raise UserError(
            f"SLURM_JOB_CPUS_PER_NODE = '{_shown(given)}' in the environment: must be numbers such as 96(x2),64"
        )
    return min((int(match[1]) for match in matches if match is not None), default=0)


def node_names(size: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the nodes of `size` ranks in their order, as many ranks on each; none where they are not known."""
    nodes = [node for node in environment.get(NODES, "").split(",") if node]
    if nodes and (size % len(nodes) or not all(map(str.isprintable, nodes))):
        raise UserError(
            f"{NODES} = '{_shown(environment[NODES])}' in the environment: must name the nodes of {size} ranks, which "
            f"have as many ranks each; leave it out if that is not known"
        )
    return nodes


def start_of_job(environment: Mapping[str, str]) -> tuple[str, list[int]] | None:
    """(the first job of the run, which start this is: successor, restart, start of the ranks) within a Slurm job."""
    match = _JOB.fullmatch(environment.get(JOB, ""))
    return None if match is None else (match[1], [int(match[number]) for number in (2, 3, 4)])


def whole_number(
    environment: Mapping[str, str], name: str, least: int = 0, below: int = 1 << 63, default: int | None = None
) -> int:
    """The variable `name`, from `least` to below `below`; `default` where it is not set."""
    text = environment.get(name)
    if not text and default is not None:
        return default
    if text is None:
        raise UserError(f"{name} is not set in the environment; it must be a whole number of at least {least}")
    digits = text.strip()
    if digits.isascii() and digits.isdigit() and len(digits) < 20 and least <= int(digits) < below:
        return int(digits)
    limit = f"from {least} to {below - 1}" if below < 1 << 63 else f"of at least {least}"
    raise UserError(f"{name} = '{_shown(text)}' in the environment: must be a whole number {limit}")


def _address(environment: Mapping[str, str]) -> str:
    address = environment.get("MASTER_ADDR")
    if address is None:
        raise UserError("MASTER_ADDR is not set in the environment; it must be the host name or address of rank 0")
    if not address or len(address) > 255 or not all(c.isascii() and (c.isalnum() or c in ".:-_%") for c in address):
        raise UserError(f"MASTER_ADDR = '{_shown(address)}' in the environment: must be a host name or an IP address")
    return address


def _shown(text: str) -> str:
    return one_line(text, 80)
