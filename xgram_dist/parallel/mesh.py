"""The axes of a run: who shares what with whom.

    world = data x tensor          tensor is innermost: neighbours share a layer
    data  = replicate x shard      where the backbone is sharded (HSDP); shard is the inner of the two

Batches and table rows are spread over the data axis; columns of matrices and tables over the tensor axis. Groups are
made once, here, in the same order on every rank. Any number of ranks will do, as long as the degrees divide it.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from xgram_dist.config import Config
from xgram_dist.parallel.degrees import check_degrees
from xgram_dist.parallel.ranks import Ranks


@dataclass(frozen=True)
class Mesh:
    world: Ranks
    data: Ranks
    tensor: Ranks
    replicate: Ranks
    shard: Ranks

    def __str__(self) -> str:
        parts = f"{self.world.size} ranks = {self.data.size} data x {self.tensor.size} tensor"
        return parts + (f" (data = {self.replicate.size} replicate x {self.shard.size} shard)" if self.split else "")

    @property
    def split(self) -> bool:
        return self.replicate.size > 1


def single_mesh(ranks: Ranks | None = None) -> Mesh:
    """All ranks on the data axis."""
    world = ranks or Ranks()
    return Mesh(world, world, Ranks(), Ranks(), world)


def build_mesh(config: Config, world: Ranks) -> Mesh:
    check_degrees(config, world.size)
    tensor, replicate = config.parallel.tensor, config.parallel.replicate
    if tensor == 1 and replicate == 1:
        return single_mesh(world)
    data = world.size // tensor
    shard = data // replicate
    grid = torch.arange(world.size).view(replicate, shard, tensor)
    return Mesh(
        world=world,
        data=_axis(world, [grid[:, :, t].reshape(-1).tolist() for t in range(tensor)]),
        tensor=_axis(world, grid.view(data, tensor).tolist()),
        replicate=_axis(world, [grid[:, s, t].tolist() for s in range(shard) for t in range(tensor)]),
        shard=_axis(world, [grid[r, :, t].tolist() for r in range(replicate) for t in range(tensor)]),
    )


def _axis(world: Ranks, groups: list[list[int]]) -> Ranks:
    """This rank's group of one axis; every rank makes all of them, in the same order."""
    mine = Ranks()
    for members in groups:
        if len(members) == 1:
            continue
        group = dist.new_group(members, timeout=world.timeout)
        host = dist.new_group(members, backend="gloo", timeout=world.timeout)
        if world.rank in members:
            place = members.index(world.rank)
            mine = Ranks(place, len(members), group, Ranks(place, len(members), host))
            mine.timeout, mine.phases = world.timeout, world.phases
    return mine
