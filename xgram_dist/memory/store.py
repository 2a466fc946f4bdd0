"""The rows one rank owns, their gates, and the gradient of those that were hit.

A gradient covers the rows that were hit in a step and no others, so that norm and clipping cost what was hit and not
what there is. Rows an optimizer is behind with are brought up to date before they are read (`settle`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.memory.initial import initial_rows
from xgram_dist.memory.layout import Slab, plan_slabs
from xgram_dist.memory.placement import Placement
from xgram_dist.memory.plan import SlabPlan
from xgram_dist.memory.retrieval import (
    RowGradient,
    give_back,
    give_back_in_place,
    retrieve,
    retrieve_into,
    scale_rows,
)
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.parallel.device import large_pages
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.parallel.ranks import Ranks

INIT_ELEMENTS = 1 << 20
"""Elements initialised at a time; bounds the temporary memory."""


@dataclass
class SlabState:
    """A slab's rows owned here, their gates and gradients."""

    slab: Slab
    owned: Tensor
    """Global number of each row held here, ascending."""
    rows: Tensor
    gates: Tensor | None
    tensor: Ranks
    """Who holds the other columns of the same rows; gates are the same with all of them."""
    hit: Tensor
    gradient: RowGradient | None = None
    settle: Callable[[Tensor, bool], None] = lambda rows, moments: None
    """Set by the optimizer: bring these rows up to date (and its moments, where no update follows)."""
    settle_all: Callable[[], None] = lambda: None
    opening: Callable[[Tensor, list[slice], Tensor, Tensor | None], Iterator[None]] | None = None
    """Set by the optimizer: rows and gates up to date, as copies in the memory given, part after part; it may keep them
    for the update."""
    opened: Callable[[Tensor], tuple[Tensor, Tensor | None]] | None = None
    """Set by the optimizer: what `opening` gave, once more."""

    @property
    def widths(self) -> list[int]:
        return [table.width for table in self.slab.tables]

    @property
    def names(self) -> list[str]:
        return [table.name for table in self.slab.tables]

    def read(self, plan: SlabPlan, training: bool, own_QW: Tensor) -> Iterator[Tensor]:
        """One vector [Q, W] for each token asked of this owner. First those for the other ranks; resumed when these are
        on their way, those for this rank, in the memory given, from rows that were not needed before."""
        accesses = plan.accesses
        rows_R = accesses.touched_R
        parts = [slice(0, accesses.for_others), slice(accesses.for_others, rows_R.numel())]
        update_follows = training and plan.place_R is None  # of these very rows
        if not update_follows:
            self.settle(rows_R, not training)
        opening = self.opening if update_follows and self.opening is not None else self._gather_parts
        rows_RW = own_QW if accesses.own is None else self.rows.new_empty(rows_R.numel(), self.rows.shape[1])
        gates_RJ = None if self.gates is None else self.gates.new_empty(rows_R.numel(), self.gates.shape[1])
        scaled_RW = rows_RW if gates_RJ is None else torch.empty_like(rows_RW)
        filled = opening(rows_R, parts, rows_RW, gates_RJ)
        for part, reads in zip(parts, (accesses.others, accesses.own), strict=True):
            next(filled)
            if gates_RJ is not None:
                scale_rows(scaled_RW[part], rows_RW[part], gates_RJ[part], self.widths)
            if reads is accesses.others:
                yield retrieve(scaled_RW, reads)
            elif reads is not None:
                retrieve_into(own_QW, scaled_RW, reads)

    def _gather_parts(
        self, rows_R: Tensor, parts: list[slice], out_RW: Tensor, gates_RJ: Tensor | None
    ) -> Iterator[None]:
        for part in parts:
            torch.index_select(self.rows, 0, rows_R[part], out=out_RW[part])
            if self.gates is not None and gates_RJ is not None:
                torch.index_select(self.gates, 0, rows_R[part], out=gates_RJ[part])
            yield

    def _gather(self, rows_R: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.rows.index_select(0, rows_R), None if self.gates is None else self.gates.index_select(0, rows_R)

    def add_gradient(self, grads_QW: Tensor, own_RW: Tensor, plan: SlabPlan, mean_over: int) -> None:
        """The gradient of what was read, to the rows and gates it came from, as the mean over so many ranks. `own_RW`:
        that of this rank where it reads its rows where they are; it is used up."""

        def read_again() -> tuple[Tensor, Tensor]:
            again = self.opened if plan.place_R is None and self.opened is not None else self._gather
            rows_RW, gates_RJ = again(plan.accesses.touched_R)
            assert gates_RJ is not None
            return rows_RW, gates_RJ

        rows_of = None if self.gates is None else read_again
        if plan.accesses.own is None:
            new = give_back_in_place(own_RW, grads_QW, plan.accesses, mean_over)
        else:
            new = give_back(grads_QW, rows_of, plan.accesses, self.widths, mean_over)
        if new.gates is not None:
            self.tensor.all_reduce_sum(new.gates)  # a gate scales all columns
        self.hit.index_fill_(0, new.touched, True)
        if plan.place_R is None:
            self.gradient = new
            return
        assert new.factor == 1, "in place is for a window that is the whole step"
        if self.gradient is None:
            touched = plan.step_touched
            gates = None if new.gates is None else new.gates.new_zeros(touched.numel(), new.gates.shape[1])
            rows = new.rows.new_zeros(touched.numel(), new.rows.shape[1])
            self.gradient = RowGradient(touched, rows, gates)
        self.gradient.rows.index_add_(0, plan.place_R, new.rows)
        if self.gradient.gates is not None and new.gates is not None:
            self.gradient.gates.index_add_(0, plan.place_R, new.gates)


class Store:
    def __init__(self, config: Config, routing: Routing | None, device: torch.device, placement: Placement, mesh: Mesh):
        assert (routing is None) == (config.memory.compression == 1)
        owned = torch.tensor(placement.rows_of(mesh.data.rank), device=device, dtype=torch.int64)
        self.vip_rows = int((owned < routing.vip_rows).sum()) if routing is not None else 0
        self.has_vip = routing is not None and routing.vip_rows > 0
        """Here or on other ranks."""
        self.placement = placement
        self.states: list[SlabState] = []
        gated = config.memory.row_gates and config.memory.compression < 1
        self.tensor = mesh.tensor
        for slab in plan_slabs(config, self.tensor.size):
            gates = torch.full((len(owned), len(slab.tables)), config.memory.row_gate_init, device=device)
            self.states.append(
                SlabState(
                    slab=slab,
                    owned=owned,
                    rows=_initial_slab(slab, owned, config, device, self.tensor.rank),
                    gates=gates if gated else None,
                    tensor=self.tensor,
                    hit=torch.zeros(len(owned), dtype=torch.bool, device=device),
                )
            )

    def gradient_square_sum(self) -> Tensor:
        """This rank's part of the sum of squares of all gradients: parts of all ranks add up to the joint norm's."""
        total = self.states[0].rows.new_zeros(())
        for state in self.states:
            if state.gradient is not None:
                squares = torch.linalg.vector_norm(state.gradient.rows).square()
                if state.gradient.gates is not None:
                    squares = squares + torch.linalg.vector_norm(state.gradient.gates).square() / self.tensor.size
                total = total + squares * state.gradient.factor**2
        return total

    def scale_gradients(self, factor: float) -> None:
        for state in self.states:
            if state.gradient is not None:
                state.gradient.factor *= factor

    def clear_gradients(self) -> None:
        for state in self.states:
            state.gradient = None

    def rows_hit(self) -> tuple[int, int]:
        """(distinct rows read in training so far, rows held here), over all tables."""
        hit = sum(int(state.hit.sum()) * len(state.slab.tables) for state in self.states)
        return hit, sum(len(state.owned) * len(state.slab.tables) for state in self.states)

    def named_tensors(self) -> dict[str, Tensor]:
        """The rows held here, up to date, and their gates: `NAME.rows` [S, width], `NAME.gates` [S]."""
        found = {}
        for state in self.states:
            state.settle_all()
            for number, (name, columns) in enumerate(state.slab.columns().items()):
                found[f"{name}.rows"] = state.rows[:, columns]
                if state.gates is not None:
                    found[f"{name}.gates"] = state.gates[:, number]
        return found


def _initial_slab(slab: Slab, owned: Tensor, config: Config, device: torch.device, part: int) -> Tensor:
    values = large_pages(torch.empty(len(owned), slab.width, device=device))
    for table in slab.tables:
        columns = slab.columns()[table.name]
        step = max(1, INIT_ELEMENTS // table.width)
        for start in range(0, len(owned), step):
            rows = owned[start : start + step]
            values[start : start + step, columns] = initial_rows(
                rows, table.width, config.model.init_std, config.train.seed, table.name, part * table.width
            )
    return values
