"""A site file: what is particular to a cluster, in YAML (slurm/sites/).

Values that stand in `#SBATCH` lines or in the environment are plain words; `setup` alone is shell, taken as it is.
"""

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
    """A cluster."""

    partition: Word | None = None
    """Where jobs are queued; without it, the cluster's default."""
    account: Word | None = None
    """Who is charged."""
    qos: Word | None = None
    """Quality of service."""
    time: Annotated[str, Field(pattern=TIME)] = "24:00:00"
    """Time limit of one start; a run that needs longer saves, requeues and goes on."""
    gpus_per_node: NotNegative = 8
    """0: train on CPUs."""
    gpu_type: Word | None = None
    """As in --gres=gpu:TYPE:8, where the cluster has several."""
    ranks_per_node: Positive | None = None
    """Without it, one a GPU."""
    cpus_per_node: Positive | None = None
    """Shared out over the ranks of a node."""
    memory_per_node: Word | None = None
    """Host memory, as --mem takes it; 0 is all of it."""
    memory_per_gpu: Bytes | None = None
    """80GB or 80GiB: a plan that needs more is refused."""
    bandwidth: Annotated[float, Field(gt=0)] = 50.0
    """Of the network, for each rank, in GB/s; the preflight is held against it."""
    save_seconds: Annotated[int, Field(ge=10)] = 300
    """How long before the time limit a run is asked to save and requeue."""
    restarts: NotNegative = 3
    """Restarts in a row without a new checkpoint, after which a run stops."""
    restart_wait: Annotated[float, Field(ge=0)] = 60.0
    """Seconds before the second of them, four times as many before each further one."""
    modules: tuple[Word, ...] = ()
    """Loaded with `module load`."""
    environment: dict[Variable, Line] = Field(default_factory=dict)
    """Variables of the job."""
    setup: tuple[Line, ...] = ()
    """Shell lines before the start, taken as they are, such as `source /opt/env.sh`."""
    sbatch: tuple[Option, ...] = ()
    """More options of the job, such as --exclusive."""
    srun: tuple[Option, ...] = ()
    """More options of the ranks' start, such as --container-image=..."""
    container: tuple[Line, ...] = ()
    """Words before a rank's command, such as [apptainer, exec, --nv, image.sif]."""
    python: Line | None = None
    """The interpreter of the ranks; without it, the one that runs `submit`."""
    launcher: Literal["srun", "torchrun"] = "srun"
    """Who starts the ranks of a node: Slurm, or a torchrun on each node."""
    interface: Word | None = None
    """Network interface of NCCL and gloo, such as ib0."""
    node_suffix: Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]*$")] = ""
    """Added to a node's name to reach it over that interface, such as -ib0."""

    @property
    def ranks(self) -> int:
        """Of a node."""
        return self.ranks_per_node or self.gpus_per_node


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
    if site.cpus_per_node is not None and site.cpus_per_node < site.ranks:
        raise UserError(
            f"site file '{file}': cpus_per_node = {site.cpus_per_node} leaves less than one for each of {site.ranks} "
            f"ranks"
        )
    return site
