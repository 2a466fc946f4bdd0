"""The axes of a run as numbers: how many ranks share what, and how far apart they are.

world = data x tensor          tensor is innermost
data  = replicate x shard      shard is the inner of the two; without replicas it is the data axis
"""

from dataclasses import asdict, dataclass
from typing import Literal

from xgram_dist.config.schema import Config
from xgram_dist.parallel.degrees import check_degrees

Axis = Literal["world", "data", "tensor", "replicate", "shard"]


@dataclass(frozen=True)
class Axes:
    data: int
    tensor: int = 1
    replicate: int = 1

    @staticmethod
    def of(config: Config, ranks: int) -> "Axes":
        check_degrees(config, ranks)
        return Axes(ranks // config.parallel.tensor, config.parallel.tensor, config.parallel.replicate)

    @property
    def shard(self) -> int:
        return self.data // self.replicate

    @property
    def world(self) -> int:
        return self.data * self.tensor

    def size(self, axis: Axis) -> int:
        sizes = {"world": self.world, "shard": self.shard, **asdict(self)}
        return int(sizes[axis])

    def span(self, axis: Axis) -> int:
        """Consecutive ranks among which a group of the axis lies; if few enough, they are of one node."""
        return {"tensor": self.tensor, "shard": self.shard * self.tensor}.get(axis, self.world)
