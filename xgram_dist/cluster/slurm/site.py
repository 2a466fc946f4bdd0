"""A site file: the settings of one cluster, in YAML (slurm/sites/).

Values for `#SBATCH` lines and for the environment are restricted to plain words. Only `setup` is shell code, copied
into the script as it is.
"""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from xgram_dist.config.load import build_section, read_tree
from xgram_dist.config.schema import Bytes, NotNegative, Positive, Section
from xgram_dist.errors import UserError

DEFAULT = Path("slurm/sites/default.yaml")

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,:@%+=/\[\]-]+$")]
Line = Annotated[str, Field(pattern=r"^[^\x00-\x08\x0a-\x1f\x7f]+$")]
Option = Annotated[str, Field(pattern=r"^--?[A-Za-z][^\x00-\x1f\x7f]*$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
TIME = r"^(\d+-)?\d+(:\d\d){0,2}$"


class Site(Section):
    """Settings of one cluster."""

    partition: Word | None = None
    """Partition of the jobs. Default: the cluster's."""
    account: Word | None = None
    """Account to charge."""
    qos: Word | None = None
    """Quality of service."""
    time: Annotated[str, Field(pattern=TIME)] = "24:00:00"
    """Time limit of one start. A run that needs longer saves, requeues and resumes."""
    gpus_per_node: NotNegative = 8
    """GPUs of a node. 0: train on CPUs."""
    gpu_type: Word | None = None
    """As in --gres=gpu:TYPE:8, for a cluster with several types."""
    ranks_per_node: Positive | None = None
    """Ranks on a node. Default: one per GPU."""
    cpus_per_node: Positive | None = None
    """CPUs of a node, divided among its ranks. Default with --exclusive: all of them; on CPU nodes: one per rank."""
    memory_per_node: Word | None = None
    """Host memory, as for --mem; 0: all of it."""
    memory_per_gpu: Bytes | None = None
    """80GB or 80GiB: a recipe whose estimate exceeds it is refused."""
    bandwidth: Annotated[float, Field(gt=0)] = 50.0
    """Network bandwidth per rank, in GB/s. The preflight compares the links with it."""
    save_seconds: Annotated[int, Field(ge=10)] = 300
    """Seconds before the time limit at which a run is asked to save and requeue."""
    restarts: NotNegative = 3
    """Restarts in a row without a new checkpoint, after which a run gives up."""
    restart_wait: Annotated[float, Field(ge=0)] = 60.0
    """Seconds to wait before the second of them; four times as long before each further one."""
    modules: tuple[Word, ...] = ()
    """Modules to load with `module load`."""
    environment: dict[Variable, Line] = Field(default_factory=dict)
    """Environment variables of the job."""
    setup: tuple[Line, ...] = ()
    """Shell lines to run before the start, verbatim, such as `source /opt/env.sh`."""
    sbatch: tuple[Option, ...] = ()
    """More options for sbatch, such as --exclusive."""
    srun: tuple[Option, ...] = ()
    """More options for srun, such as --container-image=..."""
    container: tuple[Line, ...] = ()
    """Prefix of a rank's command, such as [apptainer, exec, --nv, image.sif]."""
    python: Line | None = None
    """Python interpreter of the ranks. Default: the one that runs `submit`."""
    launcher: Literal["srun", "torchrun"] = "srun"
    """What starts the ranks of a node: srun, or torchrun on each node."""
    interface: Word | None = None
    """Network interface for NCCL and gloo, such as ib0."""
    node_suffix: Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]*$")] = ""
    """Suffix of a node's name that reaches it over that interface, such as -ib0."""

    @property
    def ranks(self) -> int:
        """Ranks of a node."""
        return self.ranks_per_node or self.gpus_per_node

    @property
    def excluded(self) -> str:
        """Nodes that no job of the site gets, as Slurm writes lists of nodes."""
        words = " ".join(self.sbatch)
        return ",".join(re.findall(r"(?:^|\s)(?:--exclude[= ]|-x\s*)(\S+)", words))

    @property
    def exclusive(self) -> bool:
        """Whether jobs get whole nodes, with all their CPUs."""
        return "--exclusive" in self.sbatch


def load_site(path: str | None) -> Site:
    if path is None and not DEFAULT.exists():
        raise UserError(f"there is no '{DEFAULT}' here; name this cluster's file with --site FILE")
    file = Path(path) if path is not None else DEFAULT
    site = build_section(Site, read_tree(file, "site file"), "site file")
    if not site.ranks:
        raise UserError(f"site file '{file}': gpus_per_node = 0 needs ranks_per_node")
    if site.gpus_per_node and site.ranks > site.gpus_per_node:
        raise UserError(
            f"site file '{file}': ranks_per_node = {site.ranks} is more than gpus_per_node = {site.gpus_per_node}"
        )
    if site.gpus_per_node and site.cpus_per_node is None and not site.exclusive:
        raise UserError(
            f"site file '{file}': gpus_per_node = {site.gpus_per_node} needs cpus_per_node (`scontrol show node`), or "
            f"whole nodes with sbatch: [--exclusive]; otherwise each rank would get a single CPU"
        )
    if site.cpus_per_node is not None and site.cpus_per_node < site.ranks:
        raise UserError(
            f"site file '{file}': cpus_per_node = {site.cpus_per_node} leaves less than one for each of {site.ranks} "
            f"ranks"
        )
    return site
