"""The exchange: tables row-sharded over the data axis, one all-to-all each way around a window of tokens.

    plan    (exchange_plan.py) who owns the rows of the distinct tokens; in a thread, ahead of time
    fetch   each owner combines its rows into one vector a token and sends it            1 all-to-all a slab
    return  gradients of those vectors to the owners, which sum them in a fixed order    1 all-to-all a slab

A rank's own segment never travels: it is read while the remote ones are in flight. Where columns are cut over the
tensor axis, residual-site vectors are gathered over it after the fetch (1 all-gather a table).

Owners do the same arithmetic on the rows they hold however many ranks there are, so results depend on the number of
ranks only through the order of additions. For a given number of ranks they repeat bitwise.

Shapes: U distinct tokens here, P (token, owner) pairs of a slab, Q tokens requested from this owner, W slab width.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.parallel.device import begin_planning_thread, pin_for
from xgram_dist.parallel.mesh import Mesh, single_mesh
from xgram_dist.parallel.process_group import CompletedWork
from xgram_dist.tables.exchange_plan import ExchangePlanner, SlabPlan, Window, WindowRule
from xgram_dist.tables.layout import RESIDUAL_SITES, Table, TableLayout, reads_in_place, residual_gradients_are_partial
from xgram_dist.tables.lookup import GatheredAccesses
from xgram_dist.tables.ngrams import NgramKeys
from xgram_dist.tables.optimizers.build import TableOptimizerSettings, choose_optimizer
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.row_sharding import plan_row_sharding
from xgram_dist.tables.shard import Shard, TableShards
from xgram_dist.tables.working_set import Lookup, SlabGradient, WorkingSet


class ShardedTables:
    """Implements `Lookup` (working_set.py)."""

    def __init__(
        self,
        config: Config,
        layout: TableLayout,
        routing: Routing | None,
        device: torch.device,
        mesh: Mesh | None = None,
        keys_of: NgramKeys | None = None,
        optimizer: str | None = None,
    ):
        """`layout`: with the columns of all ranks of the tensor axis. `keys_of`: for tables of n-grams; without it keys
        are tokens. `optimizer`: the kind (optimizers/build.py); by default what the recipe says."""
        mesh = mesh or single_mesh()
        vocabulary = config.model.vocabulary
        self.data_group, self.tensor_group = mesh.data, mesh.tensor
        self.device = device
        slabs, num_rows = layout.divide(self.tensor_group.size).slabs, layout.num_rows
        sharding = plan_row_sharding(routing, num_rows, self.data_group.size)
        self._partial_gradients = residual_gradients_are_partial(config)
        shard_device = torch.device("cpu") if config.memory.placement == "host" else device
        self.wire = torch.bfloat16 if config.memory.wire == "bf16" else None
        settings = TableOptimizerSettings.of(config, routing, num_rows, optimizer or choose_optimizer(config, None))
        self.shards = TableShards(config, slabs, routing, shard_device, sharding, mesh, settings)
        self.planner = ExchangePlanner(
            routing,
            slabs,
            sharding,
            vocabulary if keys_of is None else num_rows,
            WindowRule.of(config, layout.width),
            self.data_group.host,
            (device, shard_device),
            keys_of,
            zero_copy=reads_in_place(config, same_device=shard_device == device),
        )
        self._thread = ThreadPoolExecutor(1, "plan", begin_planning_thread, (device,))

    def plan(self, tokens: Tensor, *, whole: bool = False) -> "Future[list[Window]]":
        return self._thread.submit(self._plan, tokens, whole)

    def _plan(self, tokens: Tensor, whole: bool) -> list[Window]:
        with self.data_group.phases("plan"):
            return self.planner.plan(tokens, whole=whole)

    @torch.no_grad()
    def fetch(self, window: Window, *, training: bool = True) -> WorkingSet:
        """The all-to-all of rows: remote vectors first, local ones while they travel."""
        phases = self.data_group.phases
        working = WorkingSet(window, {})
        flights = []
        with phases("fetch"):
            for shard, plan in zip(self.shards, window.slabs, strict=True):
                received_PW = self._empty(plan.num_local + self._num_remote(plan.requested), shard)
                local_PW, remote_PW = received_PW[: plan.num_local], received_PW[plan.num_local :]
                rows = shard.begin(plan, local_PW, training=training)
                vectors_QW = self._to_wire(rows.gather_remote())
                work = self.data_group.all_to_all_remote(remote_PW, vectors_QW, plan.served, plan.requested)
                flights.append((received_PW, work, rows))
            for _, _, rows in flights:
                rows.gather_local()
        with phases("wait"):
            for shard, plan, (received_PW, work, _) in zip(self.shards, window.slabs, flights, strict=True):
                work.wait()
                slab_UW = plan.combination.combine(received_PW.to(shard.rows.dtype))
                self._add_leaves(working, shard, slab_UW, training)
        return working

    def _add_leaves(self, working: WorkingSet, shard: Shard, slab_UW: Tensor, training: bool) -> None:
        """One leaf a table, whose gradients accumulate side by side."""
        gradient, columns = SlabGradient(slab_UW), shard.slab.columns()
        for table in shard.slab.tables:
            vectors = slab_UW[:, columns[table.name]]
            if self._is_gathered(table):
                vectors = self.tensor_group.all_gather(vectors, 1)
            leaf = working.values[table.name] = vectors.detach().requires_grad_(training)
            if training and not self._is_gathered(table):
                gradient.accumulate_from(leaf, columns[table.name])
        working.slabs.append(slab_UW.detach())
        working.gradients.append(gradient)

    @torch.no_grad()
    def give_back(self, working: WorkingSet) -> None:
        """The all-to-all of gradients. Owners add them to the gradient of the step's rows."""
        plans = working.window.slabs
        with self.data_group.phases("return"):
            flights = []
            for number, (shard, plan) in enumerate(zip(self.shards, plans, strict=True)):
                grads_UW = self._slab_gradient(working, number, shard)
                flights.append(self._send_gradient(plan.combination.expand(grads_UW), shard, plan))
            for shard, plan, (received_QW, local_PW, work) in zip(self.shards, plans, flights, strict=True):
                work.wait()
                received_QW = received_QW.to(shard.rows.device, shard.rows.dtype)
                assert shard.step is not None, "give_back without fetch"
                shard.step.add_gradient(plan, received_QW, local_PW, self.data_group.size)

    def _slab_gradient(self, working: WorkingSet, number: int, shard: Shard) -> Tensor:
        """[U, W]"""
        whole = working.slabs[number].grad  # the whole slab was used as one leaf
        if whole is not None:
            return whole
        gradient, columns = working.gradients[number], shard.slab.columns()
        for table in shard.slab.tables:
            gradient.put(columns[table.name], self._local_columns(table, working.values[table.name].grad))
        return gradient.whole()

    def _send_gradient(self, sent_PW: Tensor, shard: Shard, plan: SlabPlan) -> tuple[Tensor, Tensor, Any]:
        """(buffer being filled, for gathered reads this rank's own gradients first; this rank's own; work handle)."""
        local_PW, remote_PW = sent_PW[: plan.num_local], sent_PW[plan.num_local :]
        copied = plan.num_local if isinstance(plan.accesses, GatheredAccesses) else 0
        if self.data_group.size == 1:
            return self._to_wire(local_PW[:copied]), local_PW, CompletedWork()
        received_QW = self._empty(copied + self._num_remote(plan.served), shard)
        work = self.data_group.all_to_all_remote(
            received_QW[copied:], self._to_wire(remote_PW), plan.requested, plan.served
        )
        received_QW[:copied].copy_(local_PW[:copied])
        return received_QW, local_PW, work

    def _num_remote(self, counts: list[int]) -> int:
        return sum(counts) - counts[self.data_group.rank]

    def _is_gathered(self, table: Table) -> bool:
        """Whether a rank's vectors have the columns of all ranks of the tensor axis."""
        return table.site in RESIDUAL_SITES and self.tensor_group.size > 1

    def _local_columns(self, table: Table, gradient: Tensor | None) -> Tensor | None:
        """The gradient of a table's columns held here."""
        if gradient is None or not self._is_gathered(table):
            return gradient
        if self._partial_gradients:
            self.tensor_group.all_reduce_sum(gradient)
        return gradient[:, self.tensor_group.rank * table.width : (self.tensor_group.rank + 1) * table.width]

    def close(self) -> None:
        self._thread.shutdown()
        self.planner.close()

    def _empty(self, count: int, shard: Shard) -> Tensor:
        """Memory for vectors in the wire type."""
        dtype = self.wire or shard.rows.dtype
        return torch.empty(count, shard.rows.shape[1], dtype=dtype, device=self.device)

    def _to_wire(self, vectors_QW: Tensor) -> Tensor:
        vectors_QW = vectors_QW.to(self.wire or vectors_QW.dtype)
        return pin_for(self.device, vectors_QW).to(self.device, non_blocking=True)


def shards_of(lookup: Lookup) -> TableShards | None:
    """The shards that this process holds and updates; None for a model without tables."""
    return lookup.shards if isinstance(lookup, ShardedTables) else None
