"""The exchange: tables row-sharded over a mesh axis, all-to-alls each way around a window of tokens.

    plan    (exchange_plan.py) who owns the rows of the distinct tokens; in a thread, ahead of time
    fetch   each owner combines its rows into one vector a token and sends it            all-to-all
    return  gradients of those vectors to the owners, which sum them in a fixed order    all-to-all

A rank's own segment never travels: it is read while the remote ones are in flight. A slab is one message each way, or,
to overlap with the network, one for each of some groups of layers (exchange_messages.py). Where columns are cut over
the tensor axis, residual-site vectors are gathered over it after the fetch (1 all-gather a table).

Owners do the same arithmetic on the rows they hold however many ranks there are, so results depend on the number of
ranks only through the order of additions. For a given number of ranks they repeat bitwise.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.parallel.context_parallel import WHOLE_SEQUENCES, ContextAxis
from xgram_dist.parallel.device import begin_planning_thread
from xgram_dist.parallel.mesh import Mesh, single_mesh
from xgram_dist.tables.exchange_messages import ShardedWorkingSet, SlabExchange, Wire
from xgram_dist.tables.exchange_plan import ExchangePlanner, Window, WindowRule
from xgram_dist.tables.layout import TableLayout, plan_layer_groups, reads_in_place, residual_gradients_are_partial
from xgram_dist.tables.ngrams import NgramKeys
from xgram_dist.tables.optimizers.build import (
    ALL_ROWS,
    TableOptimizerSettings,
    choose_optimizer,
    keeps_touched_rows,
    stages_records,
)
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.row_sharding import plan_row_sharding
from xgram_dist.tables.table_shards import TableShards
from xgram_dist.tables.working_set import Lookup, WorkingSet


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
        context: ContextAxis = WHOLE_SEQUENCES,
    ):
        """`layout`: with the columns of all ranks of the tensor axis. `keys_of`: for tables of n-grams; without it keys
        are tokens. `optimizer`: the kind (optimizers/build.py); by default what the recipe says.
        `context`: the ranks that share each sequence."""
        mesh = mesh or single_mesh()
        vocabulary = config.model.vocabulary
        self._ranks = mesh.rows
        slabs, num_rows = layout.divide(mesh.tensor.size).slabs, layout.num_rows
        sharding = plan_row_sharding(routing, num_rows, mesh.rows.size)
        wire_dtype = torch.bfloat16 if config.memory.wire == "bf16" else None
        partial = residual_gradients_are_partial(config)
        self._wire = Wire(mesh.exchange, mesh.tensor, device, wire_dtype, partial, mesh.data.size)
        self.overlap = config.memory.overlap and mesh.rows.size > 1
        self._groups = plan_layer_groups(config, layout, mesh.rows.size)
        """The layers of each message."""
        # Of a table that is kept by touched rows, a step hits few.
        kind = optimizer or choose_optimizer(config, None if num_rows <= ALL_ROWS else 0.0)
        settings = TableOptimizerSettings.of(config, routing, num_rows, kind)
        touched = keeps_touched_rows(config, num_rows, kind)
        kept_on = device if config.memory.placement == "device" else torch.device("cpu")
        staged_on = device if touched and stages_records(config, kind, device) else None
        shard_device = staged_on or kept_on
        self.shards = TableShards(
            config, slabs, routing, kept_on, sharding, mesh, settings, touched=touched, staged_on=staged_on
        )
        self.planner = ExchangePlanner(
            routing,
            slabs,
            sharding,
            vocabulary if keys_of is None else num_rows,
            WindowRule.of(config, layout.width),
            mesh.rows.host,
            (device, shard_device),
            keys_of,
            zero_copy=reads_in_place(config, same_device=shard_device == device, replicas=mesh.replicas.size),
            slots=self.shards.slot_sources,
            replicas=mesh.replicas.host,
            context=context,
        )
        self._thread = ThreadPoolExecutor(1, "plan", begin_planning_thread, (device,))

    def plan(self, tokens: Tensor, *, whole: bool = False) -> "Future[list[Window]]":
        windows = self._thread.submit(self._plan, tokens, whole)
        if not whole:
            for number, shard in enumerate(self.shards):
                shard.stage_ahead(windows, number)
        return windows

    def _plan(self, tokens: Tensor, whole: bool) -> list[Window]:
        with self._ranks.phases("plan"):
            return self.planner.plan(tokens, whole=whole)

    @torch.no_grad()
    def fetch(self, window: Window, *, training: bool = True) -> ShardedWorkingSet:
        """The all-to-all of rows: remote vectors first, local ones while they travel."""
        num_groups, slabs = len(self._groups), list[SlabExchange]()
        with self._ranks.phases("fetch"):
            for group in range(num_groups):
                for number, (shard, plan) in enumerate(zip(self.shards, window.slabs, strict=True)):
                    if group == 0:  # the first message leaves before the next slab is gathered
                        slabs.append(SlabExchange(self._wire, shard, plan, self._groups, len(window.keys), training))
                    slabs[number].send_vectors(group)
            for slab in slabs:
                slab.gather_local()
        return ShardedWorkingSet(window, slabs, num_groups, self._ranks.phases, training=training, overlap=self.overlap)

    def give_back(self, working: WorkingSet) -> None:
        """The all-to-all of gradients. Owners add them to the gradient of the step's rows."""
        assert isinstance(working, ShardedWorkingSet)
        with self._ranks.phases("return"):
            working.end_return()

    def close(self) -> None:
        self._thread.shutdown()
        self.planner.close()
        self.shards.close()


def shards_of(lookup: Lookup) -> TableShards | None:
    """The shards that this process holds and updates; None for a model without tables."""
    return lookup.shards if isinstance(lookup, ShardedTables) else None
