"""All shards of a rank, one a slab: built by the recipe, updated together.

Collectives: those of `StepRows` (shard.py); where the tables have replicas, an all-reduce of the gradients of a step.
With `memory.placement: disk`, one when they are built, which tells each rank how many share the memory of its node.
"""

import socket
from collections.abc import Iterator

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.parallel.device import advise_huge_pages
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.tables.exchange_plan import SlotSource
from xgram_dist.tables.initial_rows import InitialValues
from xgram_dist.tables.layout import Slab
from xgram_dist.tables.optimizers.build import TableOptimizerSettings, TableRates
from xgram_dist.tables.records import StorageSettings
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.row_sharding import RowSharding
from xgram_dist.tables.shard import Shard
from xgram_dist.tables.staged_shard import StagedShard
from xgram_dist.tables.touched_shard import TouchedShard


class TableShards:
    """All shards of this rank, one a slab."""

    def __init__(
        self,
        config: Config,
        slabs: tuple[Slab, ...],
        routing: Routing | None,
        device: torch.device,
        sharding: RowSharding,
        mesh: Mesh,
        settings: TableOptimizerSettings,
        *,
        touched: bool = False,
        staged_on: torch.device | None = None,
    ):
        """`device`: of the rows. `touched`: keep records of touched rows only. `staged_on`: those of a step are copied
        to this device."""
        assert (routing is None) == (config.memory.compression == 1)
        self.rank = rank = mesh.rows.rank
        """Among those over which the rows are sharded."""
        num_vip = sharding.count_below(rank, routing.vip_rows) if routing is not None else 0
        self.sharding, self.settings, self.num_vip = sharding, settings, num_vip
        self.num_rows, self.counts_updates = sharding.num_rows, config.memory.count_updates
        self._tensor_size, self._replicas = mesh.tensor.size, mesh.replicas.for_device(staged_on or device)
        gated = config.memory.row_gates and config.memory.compression < 1
        tensor_group, counted = mesh.tensor.for_device(staged_on or device), config.memory.count_updates
        self._shards: list[Shard] = []
        if touched:
            sharers = len(slabs)
            if config.memory.placement == "disk":
                nodes = mesh.world.all_gather_object(socket.gethostname())
                sharers *= nodes.count(nodes[mesh.world.rank])
            for slab in slabs:
                initial = InitialValues(config, slab, mesh.tensor.rank)
                where = StorageSettings.of(config, device, mesh.world.rank, sharers), tensor_group
                arguments = slab, sharding, rank, initial, *where, settings, num_vip
                if staged_on is None:
                    self._shards.append(TouchedShard(*arguments, gated=gated, count_updates=counted))
                else:
                    shard = StagedShard(*arguments, gated=gated, count_updates=counted, staged_on=staged_on)
                    self._shards.append(shard)
            return
        row_ids = torch.tensor(sharding.rows_of(rank), device=device, dtype=torch.int64)
        for slab in slabs:
            initial = InitialValues(config, slab, mesh.tensor.rank)
            rows = advise_huge_pages(torch.empty(len(row_ids), slab.width, device=device, dtype=settings.rows_dtype))
            initial.fill_rows(rows, row_ids)
            gates = torch.empty(len(row_ids), len(slab.tables), device=device) if gated else None
            if gates is not None:
                initial.fill_gates(gates, row_ids)
            held = row_ids, rows, gates, tensor_group, settings, num_vip
            self._shards.append(Shard(slab, *held, count_updates=counted, initial=initial))

    @property
    def touched(self) -> bool:
        """Whether records of touched rows alone are kept."""
        return isinstance(self._shards[0], TouchedShard)

    def num_created(self) -> int:
        """Records of all shards."""
        return sum(len(shard.row_ids) for shard in self._touched())

    def disk_bytes(self) -> int:
        """Of records that lie on a disk."""
        return sum(shard.records.nbytes for shard in self._touched() if shard.records.storage.on_disk)

    def num_changed(self) -> int:
        return sum(shard.num_changed() for shard in self._touched())

    def mark_saved(self) -> None:
        for shard in self._touched():
            shard.mark_saved()

    def verify(self) -> None:
        """Raise if a record is damaged, before all of them are saved."""
        for shard in self._touched():
            shard.verify()

    def _touched(self) -> Iterator[TouchedShard]:
        return (shard for shard in self._shards if isinstance(shard, TouchedShard))

    def __iter__(self) -> Iterator[Shard]:
        return iter(self._shards)

    def __getitem__(self, index: int) -> Shard:
        return self._shards[index]

    def __len__(self) -> int:
        return len(self._shards)

    def sum_over_replicas(self) -> None:
        """The gradients of the step, each over all replicas of its row. They have the same rows in all replicas."""
        if self._replicas.size > 1:
            for gradient in (shard.gradient for shard in self._shards):
                assert gradient is not None
                self._replicas.all_reduce_sum(gradient.rows_RW)
                if gradient.gates_RJ is not None:
                    self._replicas.all_reduce_sum(gradient.gates_RJ)

    def gradient_square_sum(self) -> Tensor:
        """This rank's share of the squared norm of all table gradients: the sum over all ranks is the norm's."""
        total = self._shards[0].rows.new_zeros((), dtype=self._shards[0].dtype)
        for shard in self._shards if self._replicas.first else ():
            gradient = shard.gradient
            if gradient is not None:
                squares = torch.linalg.vector_norm(gradient.rows_RW).square()
                if gradient.gates_RJ is not None:
                    squares = squares + torch.linalg.vector_norm(gradient.gates_RJ).square() / self._tensor_size
                total = total + squares * gradient.factor**2
        return total

    def apply(self, rates: TableRates, clip: float = 1.0) -> None:
        """One optimizer step of all shards. `clip`: factor of the gradients by joint clipping."""
        for shard in self._shards:
            if shard.step is not None:
                if shard.step.gradient is not None and clip < 1:
                    shard.step.gradient.factor *= clip
                shard.step.apply(rates)

    def abandon(self) -> None:
        """Skip the step under way."""
        for shard in self._shards:
            if shard.step is not None:
                shard.step.abandon()

    def rows_hit(self) -> tuple[int, int]:
        """(distinct rows that training has touched so far, rows owned by this rank), over all tables. Of the first
        replica of the tables alone."""
        if not self._replicas.first:
            return 0, 0
        hit = sum(shard.num_hit() * len(shard.slab.tables) for shard in self._shards)
        return hit, sum(shard.num_local_rows * len(shard.slab.tables) for shard in self._shards)

    @property
    def slot_sources(self) -> list[SlotSource] | None:
        """The shards, if they keep touched rows only."""
        touched: list[SlotSource] = [shard for shard in self._shards if isinstance(shard, TouchedShard)]
        return touched or None

    def close(self) -> None:
        for shard in self._shards:
            if isinstance(shard, TouchedShard):
                shard.close()
