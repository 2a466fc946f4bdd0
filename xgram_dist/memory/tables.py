"""Tables whose rows are spread over ranks (or lie all in one): one exchange each way around a window of tokens.

    plan    (plan.py) who owns the rows of the distinct tokens; in a thread, ahead of time
    fetch   each owner combines its rows into one vector a token and sends it             1 all-to-all a slab
    return  gradients of those vectors to the owners, which add them in a fixed order     1 all-to-all a slab

What a rank owns itself stays there: it is read while the rest is on its way.

Owners do the same arithmetic over the rows they hold however many ranks there are, so results do not depend on their
number, up to the order of additions; for a given number of ranks they repeat bitwise.

Shapes: U distinct tokens here, P (token, owner) pairs of a slab, Q tokens asked of this owner, W slab width.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.memory.gradients import SlabGradients
from xgram_dist.memory.layout import RESIDUAL_SITES, Table, plan_slabs, reads_in_place, residual_gradients_are_partial
from xgram_dist.memory.ngrams.folding import Folding
from xgram_dist.memory.ngrams.hashing import NgramKeys, plan_ngram_hash
from xgram_dist.memory.placement import plan_placement
from xgram_dist.memory.plan import Planner, SlabPlan, Window
from xgram_dist.memory.retrieval import segment_sums
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.memory.store import SlabState, Store
from xgram_dist.memory.windows import WindowRule
from xgram_dist.memory.working_set import Lookup, WorkingSet
from xgram_dist.parallel.device import step_aside
from xgram_dist.parallel.mesh import Mesh, single_mesh
from xgram_dist.parallel.ranks import Done


class Tables:
    """Implements `Lookup` (working_set.py)."""

    def __init__(
        self,
        config: Config,
        routing: Routing | None,
        device: torch.device,
        mesh: Mesh | None = None,
        keys_of: NgramKeys | None = None,
    ):
        """`keys_of`: for engram, without which tokens are not folded."""
        mesh = mesh or single_mesh()
        vocabulary = config.model.vocabulary
        if config.memory.method == "engram" and keys_of is None:
            keys_of = NgramKeys(plan_ngram_hash(config), Folding.identity(vocabulary).ids)
        self.ranks, self.tensor = mesh.data, mesh.tensor
        self.device = device
        slabs = plan_slabs(config, self.tensor.size)
        placement = plan_placement(routing, slabs[0].rows, self.ranks.size)
        self._partial = residual_gradients_are_partial(config)
        store_device = torch.device("cpu") if config.memory.placement == "host" else device
        self.wire = torch.bfloat16 if config.memory.wire == "bf16" else None
        self.store = Store(config, routing, store_device, placement, mesh)
        self.planner = Planner(
            routing,
            slabs,
            placement,
            vocabulary if keys_of is None else slabs[0].rows,
            WindowRule.of(config),
            self.ranks.host,
            (device, store_device),
            keys_of,
            in_place=reads_in_place(config, same_device=store_device == device),
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plan", initializer=step_aside)

    def plan(self, tokens: Tensor, *, whole: bool = False) -> "Future[list[Window]]":
        return self._thread.submit(self._plan, tokens, whole)

    def _plan(self, tokens: Tensor, whole: bool) -> list[Window]:
        with self.ranks.phases("plan"):
            return self.planner.plan(tokens, whole=whole)

    @torch.no_grad()
    def fetch(self, window: Window, *, training: bool = True) -> WorkingSet:
        states, phases = self.store.states, self.ranks.phases
        working = WorkingSet(window, {})
        flights = []
        with phases("fetch"):
            for state, plan in zip(states, window.slabs, strict=True):
                received_PW = self._empty(plan.own + self._of_others(plan.asked), state)
                own_PW, others_PW = received_PW[: plan.own], received_PW[plan.own :]
                reading = state.read(plan, training, own_PW)
                vectors_QW = self._on_wire(next(reading))
                handle = self.ranks.exchange_with_others(others_PW, vectors_QW, plan.answered, plan.asked)
                flights.append((received_PW, handle, reading))
            for *_, reading in flights:
                next(reading, None)
        with phases("wait"):
            for state, plan, (received_PW, handle, _) in zip(states, window.slabs, flights, strict=True):
                handle.wait()
                whole_UW = _combined(received_PW.to(state.rows.dtype), plan)
                gradients, columns = SlabGradients(whole_UW), state.slab.columns()
                for table in state.slab.tables:
                    piece = whole_UW[:, columns[table.name]]
                    if self._gathered(table):
                        piece = self.tensor.gather_along(piece, 1)
                    leaf = working.values[table.name] = piece.detach().requires_grad_(training)
                    if training and not self._gathered(table):
                        gradients.follow(leaf, columns[table.name])
                working.slabs.append(whole_UW.detach())
                working.gradients.append(gradients)
        return working

    @torch.no_grad()
    def give_back(self, working: WorkingSet) -> None:
        states, plans = self.store.states, working.window.slabs
        with self.ranks.phases("return"):
            flights = []
            for state, plan, slab_UW, gradients in zip(states, plans, working.slabs, working.gradients, strict=True):
                grads_UW = slab_UW.grad  # of who read all at once
                if grads_UW is None:
                    for table in state.slab.tables:
                        own = self._own_columns(table, working.values[table.name].grad)
                        gradients.put(state.slab.columns()[table.name], own)
                    grads_UW = gradients.whole()
                sent_PW = grads_UW if plan.key_P is None else grads_UW.index_select(0, plan.key_P)
                flights.append(self._return(sent_PW, state, plan))
            for state, plan, (received_QW, own_PW, handle) in zip(states, plans, flights, strict=True):
                handle.wait()
                received_QW = received_QW.to(state.rows.device, state.rows.dtype)
                state.add_gradient(received_QW, own_PW, plan, self.ranks.size)

    def _return(self, sent_PW: Tensor, state: SlabState, plan: SlabPlan) -> tuple[Tensor, Tensor, Any]:
        """(gradients as they come in, those of this rank before the others'; those of this rank; a handle)."""
        own_PW, others_PW = sent_PW[: plan.own], sent_PW[plan.own :]
        copied = 0 if plan.accesses.own is None else plan.own
        if self.ranks.size == 1:
            return self._on_wire(own_PW[:copied]), own_PW, Done()
        received_QW = self._empty(copied + self._of_others(plan.answered), state)
        handle = self.ranks.exchange_with_others(
            received_QW[copied:], self._on_wire(others_PW), plan.asked, plan.answered
        )
        received_QW[:copied].copy_(own_PW[:copied])
        return received_QW, own_PW, handle

    def _of_others(self, counts: list[int]) -> int:
        return sum(counts) - counts[self.ranks.rank]

    def _gathered(self, table: Table) -> bool:
        """Whether a rank's vectors have the columns of all ranks of the tensor axis."""
        return table.site in RESIDUAL_SITES and self.tensor.size > 1

    def _own_columns(self, table: Table, gradient: Tensor | None) -> Tensor | None:
        """The gradient of a table's columns held here."""
        if gradient is None or not self._gathered(table):
            return gradient
        if self._partial:
            self.tensor.all_reduce_sum(gradient)
        return gradient[:, self.tensor.rank * table.width : (self.tensor.rank + 1) * table.width]

    def close(self) -> None:
        self._thread.shutdown()

    def _empty(self, count: int, state: SlabState) -> Tensor:
        """Memory for so many vectors as they come from the wire."""
        dtype = self.wire or state.rows.dtype
        return torch.empty(count, state.rows.shape[1], dtype=dtype, device=self.device)

    def _on_wire(self, vectors_QW: Tensor) -> Tensor:
        return vectors_QW.to(self.device, self.wire or vectors_QW.dtype, non_blocking=True)


def _combined(received_PW: Tensor, plan: SlabPlan) -> Tensor:
    """Partial sums of a token's owners added up, those of this rank first."""
    if plan.by_key_P is None or plan.key_starts_U is None:
        return received_PW
    return segment_sums(received_PW, plan.by_key_P, plan.key_starts_U, None)


def store_of(lookup: Lookup) -> Store | None:
    """The rows this process holds and updates; None for a model without tables."""
    return lookup.store if isinstance(lookup, Tables) else None
