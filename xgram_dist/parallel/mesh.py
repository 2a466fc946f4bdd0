"""The mesh: which ranks share what. Every process group of a run is made in this file.

    world = pipeline x data x tensor   tensor is the innermost axis: neighbouring ranks share a layer
    data  = batch x context            context is the inner of the two: neighbours share a sequence
    data  = replicate x shard          of a sharded backbone (HSDP); shard is the inner of the two
    data  = replicas x rows            of the tables (`memory.shard`); rows is the inner of the two

Each rank of the pipeline axis has some of the layers (a stage), and their tables. Sequences are dealt to the batch
axis, and a sequence is cut over the context axis, so that each rank of the data axis has tokens of its own: gradients
are averaged, and the backbone is sharded, over the data axis. Table rows are sharded over the rows axis, which is all
of the data axis of a stage unless tables have replicas; columns of matrices and tables over the tensor axis. Every rank
makes all groups of the world's backend, in the same order; the members of a group make its gloo twin. Any number of
ranks works that the degrees divide.

    init_world           the world and its gloo twin, from the environment that torchrun, srun or `train --ranks` set:
                         RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    wrap_group           a group that somebody else made, and its gloo twin
    build_mesh           the groups of each axis and their gloo twins
    new_host_group       one more gloo group of the world, for a thread that runs collectives of its own
    EngineGroups         torch's groups as FSDP2 and DeepSpeed want them: also for an axis of one rank
    build_device_mesh    the data axis as FSDP2's device mesh
"""

import socket
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

from xgram_dist.config import Config
from xgram_dist.config.validate import check_degrees
from xgram_dist.environment import read_place
from xgram_dist.errors import UserError
from xgram_dist.parallel.device import collective_options, gpu_id
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.parallel.rendezvous import START_SECONDS, RendezvousError, meet, open_store


@dataclass(frozen=True)
class Mesh:
    world: ProcessGroup
    data: ProcessGroup
    """The ranks of a stage that have tokens of their own: batch x context."""
    tensor: ProcessGroup
    replicate: ProcessGroup
    shard: ProcessGroup
    rows: ProcessGroup
    """The ranks that together hold the tables once."""
    replicas: ProcessGroup
    """The ranks that hold the same rows."""
    exchange: ProcessGroup
    """The ranks of the rows axis, for the exchange of the tables. Where exchange and backbone overlap
    (`memory.overlap`), a group of its own: its messages are under way while the engine uses `data`."""
    batch: ProcessGroup
    """The ranks with different sequences: the data axis without its context ranks."""
    context: ProcessGroup
    """The ranks that share each sequence."""
    pipeline: ProcessGroup
    """The stages: ranks with the same tokens and other layers."""
    stages: ProcessGroup
    """pipeline x data: the ranks over which a table that serves all layers is row-sharded."""

    def __str__(self) -> str:
        axes = f"{self.world.size} ranks = {self.data.size} data x {self.tensor.size} tensor"
        if self.pipeline.size > 1:
            axes = axes.replace("=", f"= {self.pipeline.size} pipeline x")
        if self.context.size > 1:
            axes += f" (data = {self.batch.size} batch x {self.context.size} context)"
        if self.is_hybrid:
            axes += f" (data = {self.replicate.size} replicate x {self.shard.size} shard)"
        if self.replicas.size > 1:
            axes += f" ({self.replicas.size} replicas of the tables on {self.rows.size} each)"
        return axes

    @property
    def is_hybrid(self) -> bool:
        """Whether the backbone is sharded within groups of ranks and replicated across them (HSDP)."""
        return self.replicate.size > 1


# The world and its axes


def init_world(device: torch.device, timeout: float = 600.0) -> ProcessGroup:
    """Joins the ranks that the environment describes. `timeout`: seconds a collective may take.

    torch's own limit is higher than `timeout`. `Phases.watch` enforces `timeout`, because it can name step and phase,
    and because ranks may start at different times.
    """
    place = read_place()
    if place.size == 1:
        return ProcessGroup()
    rank, size = place.rank, place.size
    limit = timedelta(seconds=timeout + START_SECONDS)
    # torchrun keeps one store over its restarts: without a prefix, ranks would find addresses of the last attempt.
    store = PrefixStore(f"attempt-{place.attempt}", open_store(place, timeout))
    meet(store, place, limit.total_seconds())
    gpu = gpu_id(device)
    if gpu is not None and store.add(f"ranks-of-gpu-{gpu}", 1) > 1:
        raise UserError(
            f"rank {rank} shares a GPU with another rank; start one rank per GPU, give each rank its own "
            f"(srun --gpus-per-task=1), or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    try:
        dist.init_process_group(**collective_options(device), store=store, rank=rank, world_size=size, timeout=limit)
        host = ProcessGroup(rank, size, dist.new_group(backend="gloo", timeout=limit), timeout=limit)
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {rank} met the other ranks but cannot connect to them ({str(error).splitlines()[0][:160]}); check "
            f"GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME: `xgram-dist doctor` shows the interfaces"
        ) from error
    return ProcessGroup(rank, size, dist.group.WORLD, host, limit)


def single_mesh(ranks: ProcessGroup | None = None) -> Mesh:
    """All ranks on the data axis."""
    world = ranks or ProcessGroup()
    one = ProcessGroup()
    return Mesh(
        world=world,
        data=world,
        tensor=one,
        replicate=one,
        shard=world,
        rows=world,
        replicas=one,
        exchange=world,
        batch=world,
        context=one,
        pipeline=one,
        stages=world,
    )


def wrap_group(group: Any = None) -> ProcessGroup:
    """A process group of torch's that somebody else has made, by default the world, and a gloo twin of it. One rank if
    torch.distributed is not initialised. All ranks of the group call it."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return ProcessGroup()
    if dist.get_rank(group) < 0:
        raise UserError("this rank is not in the group that it was given; only members of a group call this")
    group = group or dist.group.WORLD
    rank, size, members = dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)
    host = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    return ProcessGroup(rank, size, group, ProcessGroup(rank, size, host))


def build_mesh(config: Config, world: ProcessGroup) -> Mesh:
    check_degrees(config, world.size)
    parallel = config.parallel
    pipeline, tensor, context, replicate = parallel.pipeline, parallel.tensor, parallel.context, parallel.replicate
    data = world.size // (pipeline * tensor)
    rows = _ranks_of_a_replica(config, world)
    overlap = config.memory.overlap
    if data == world.size and replicate == 1 and context == 1 and rows == data:
        mesh = single_mesh(world)
        return replace(mesh, exchange=_build_axis(world, [list(range(world.size))])) if overlap else mesh
    grid = torch.arange(world.size).view(pipeline, data, tensor)
    stages = [grid[p, :, t] for p in range(pipeline) for t in range(tensor)]
    """The data axes of the world."""

    def build_data_axis(outer: int, inner: int, *, is_inner: bool) -> ProcessGroup:
        """One of the two axes that the data axis is the product of."""
        parts = [stage.view(outer, inner) for stage in stages]
        return _build_axis(world, [ranks for part in parts for ranks in (part if is_inner else part.t()).tolist()])

    data_group = _build_axis(world, [stage.tolist() for stage in stages])
    rows_group = build_data_axis(data // rows, rows, is_inner=True) if rows < data else data_group
    shard = data // replicate
    return Mesh(
        world=world,
        data=data_group,
        tensor=_build_axis(world, grid.view(-1, tensor).tolist()),
        replicate=build_data_axis(replicate, shard, is_inner=False),
        shard=build_data_axis(replicate, shard, is_inner=True) if replicate > 1 else data_group,
        rows=rows_group,
        replicas=build_data_axis(data // rows, rows, is_inner=False),
        exchange=build_data_axis(data // rows, rows, is_inner=True) if overlap else rows_group,
        batch=build_data_axis(data // context, context, is_inner=False) if context > 1 else data_group,
        context=build_data_axis(data // context, context, is_inner=True),
        pipeline=_build_axis(world, grid.view(pipeline, -1).t().tolist()),
        stages=_build_axis(world, grid.view(-1, tensor).t().tolist()) if pipeline > 1 else data_group,
    )


def _ranks_of_a_replica(config: Config, world: ProcessGroup) -> int:
    """Ranks of the data axis that hold the tables once (`memory.shard`)."""
    data, shard = world.size // (config.parallel.tensor * config.parallel.pipeline), config.memory.shard
    if shard != "node":
        return data if shard == "world" else shard
    nodes = world.host.all_gather_object(socket.gethostname())
    sizes = [len(list(ranks)) for _, ranks in groupby(nodes)]
    per_node, rest = divmod(sizes[0], config.parallel.tensor)
    if len(set(nodes)) != len(sizes) or len(set(sizes)) > 1 or rest:
        counts = ", ".join(f"{name} {count}" for name, count in list(Counter(nodes).items())[:4])
        raise UserError(
            f"memory.shard = node needs nodes of equally many consecutive ranks, a multiple of parallel.tensor = "
            f"{config.parallel.tensor}, but they have: {counts}; start as many ranks on each node, or give "
            f"memory.shard a number of ranks"
        )
    return per_node


def _build_axis(world: ProcessGroup, groups: list[list[int]]) -> ProcessGroup:
    """This rank's group of one axis. `groups`: the ranks of every group of the axis; each rank makes all of them."""
    own = ProcessGroup()
    for members in groups:
        if len(members) == 1:
            continue
        group = dist.new_group(members, timeout=world.timeout)
        if world.rank in members:
            # Members alone make the gloo twin: beside an NCCL world, torch would make the others wait for a split of
            # its communicator that gloo never asks for.
            host_group = dist.new_group(members, backend="gloo", timeout=world.timeout, use_local_synchronization=True)
            rank, size = members.index(world.rank), len(members)
            host = ProcessGroup(rank, size, host_group, timeout=world.timeout)
            own = ProcessGroup(rank, size, group, host, world.timeout, world.phases)
    return own


def new_host_group(world: ProcessGroup) -> ProcessGroup:
    """One more gloo group of all ranks, for a thread whose collectives must not mix with others. All ranks call it."""
    if world.size == 1:
        return ProcessGroup()
    group = dist.new_group(backend="gloo", timeout=world.timeout)
    return ProcessGroup(world.rank, world.size, group, timeout=world.timeout)


# Groups for FSDP2 and DeepSpeed


class EngineGroups:
    """torch's process group of each axis. FSDP2 and DeepSpeed want one for an axis of one rank, too, and for a run of
    one process; `close` destroys what was made for the latter."""

    def __init__(self, device: torch.device):
        self._owns_world = not dist.is_initialized()
        if self._owns_world:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(**collective_options(device), store=store, rank=0, world_size=1)
        self._single_rank: Any = None

    def group_of(self, axis: ProcessGroup) -> Any:
        if axis.size > 1:
            return axis.group
        if dist.get_world_size() == 1:
            return dist.group.WORLD
        if self._single_rank is None:
            self._single_rank = dist.new_group([dist.get_rank()], timeout=axis.timeout, use_local_synchronization=True)
        return self._single_rank

    def close(self) -> None:
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()


def build_device_mesh(mesh: Mesh, groups: EngineGroups, device: torch.device) -> DeviceMesh:
    """The data axis for FSDP2: (shard), or (replicate, shard)."""
    shard = groups.group_of(mesh.shard)
    if not mesh.is_hybrid:
        return DeviceMesh.from_group(shard, device.type, mesh_dim_names=("shard",))
    ranks = torch.tensor(dist.get_process_group_ranks(groups.group_of(mesh.data)))
    return DeviceMesh.from_group(
        [groups.group_of(mesh.replicate), shard],
        device.type,
        mesh=ranks.view(mesh.replicate.size, mesh.shard.size),
        mesh_dim_names=("replicate", "shard"),
    )
