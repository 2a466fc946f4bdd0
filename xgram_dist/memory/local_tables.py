"""Tables that lie whole in one process: the reference that every other layout must equal.

Implements `Lookup` (working_set.py): fetch distinct tokens, give their gradients back. Rows, gates and their
gradients are dense tensors that stay allocated; `touched` names the rows whose gradient is not zero, so that norm,
clipping and clearing cost what was hit and not what there is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.memory.initial import initial_rows
from xgram_dist.memory.layout import Slab, plan_slabs
from xgram_dist.memory.retrieval import Accesses, give_back, retrieve
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.memory.working_set import WorkingSet

INIT_ELEMENTS = 1 << 24
"""Elements initialised at a time; bounds the temporary memory."""


class RowMap:
    """One view's token -> (row, coefficient) lists, on the device."""

    def __init__(self, routing: Routing, view: int, device: torch.device):
        lists = routing.views[view]
        self.offsets = torch.tensor(lists.offsets, device=device, dtype=torch.int64)
        self.rows = torch.tensor(lists.rows, device=device, dtype=torch.int64)
        self.coefficients = torch.tensor(lists.coefficients, device=device, dtype=torch.float32)

    def accesses(self, keys_U: Tensor) -> Accesses:
        """All accesses of the tokens, token by token."""
        start = self.offsets[keys_U]
        counts = self.offsets[keys_U + 1] - start
        token_N = torch.repeat_interleave(counts)
        first_N = (torch.cumsum(counts, 0) - counts)[token_N]
        entry_N = start[token_N] + torch.arange(token_N.numel(), device=keys_U.device) - first_N
        return Accesses(self.rows[entry_N], self.coefficients[entry_N], token_N, keys_U.numel())


@dataclass
class SlabState:
    """A slab's rows, gates and gradients."""

    slab: Slab
    row_map: RowMap | None
    rows: Tensor
    rows_grad: Tensor
    gates: Tensor | None
    gates_grad: Tensor | None
    hit: Tensor
    touched: Tensor | None = None

    @property
    def widths(self) -> list[int]:
        return [table.width for table in self.slab.tables]

    def accesses(self, keys_U: Tensor) -> Accesses:
        return Accesses(keys_U, None, None, keys_U.numel()) if self.row_map is None else self.row_map.accesses(keys_U)


class LocalTables:
    def __init__(self, config: Config, routing: Routing | None, device: torch.device):
        assert (routing is None) == (config.memory.compression == 1)
        self.vip_rows = routing.vip_rows if routing is not None else 0
        self.states: list[SlabState] = []
        gated = config.memory.row_gates and config.memory.compression < 1
        for slab in plan_slabs(config):
            rows = _initial_slab(slab, config, device)
            gates = torch.full((slab.rows, len(slab.tables)), config.memory.row_gate_init, device=device)
            self.states.append(
                SlabState(
                    slab=slab,
                    row_map=RowMap(routing, slab.view, device) if routing is not None else None,
                    rows=rows,
                    rows_grad=torch.zeros_like(rows),
                    gates=gates if gated else None,
                    gates_grad=torch.zeros_like(gates) if gated else None,
                    hit=torch.zeros(slab.rows, dtype=torch.bool, device=device),
                )
            )

    @torch.no_grad()
    def fetch(self, tokens: Tensor, *, training: bool = True) -> WorkingSet:
        keys, slots = torch.unique(tokens, return_inverse=True)
        values: dict[str, Tensor] = {}
        accesses = []
        for state in self.states:
            accesses.append(state.accesses(keys))
            pieces = retrieve(state.rows, state.gates, accesses[-1], state.widths)
            for table, piece in zip(state.slab.tables, pieces, strict=True):
                values[table.name] = piece.requires_grad_(training)
        return WorkingSet(keys, slots, values, {"accesses": accesses})

    @torch.no_grad()
    def give_back(self, working: WorkingSet) -> None:
        for state, accesses in zip(self.states, working.context["accesses"], strict=True):
            grads = [working.values[table.name].grad for table in state.slab.tables]
            give_back(grads, state.rows, state.gates, accesses, state.widths, state.rows_grad, state.gates_grad)
            state.hit[accesses.rows_N] = True
            before = state.touched if state.touched is not None else accesses.rows_N[:0]
            state.touched = torch.unique(torch.cat((before, accesses.rows_N)))

    def gradient_square_sum(self) -> Tensor:
        """Sum of the squared gradients of rows and gates, for the joint norm."""
        total = self.states[0].rows.new_zeros(())
        for gradient, touched in self._touched_gradients():
            total = total + gradient.index_select(0, touched).square().sum()
        return total

    def scale_gradients(self, factor: Tensor) -> None:
        for gradient, touched in self._touched_gradients():
            gradient.index_copy_(0, touched, gradient.index_select(0, touched) * factor)

    def clear_gradients(self) -> None:
        for gradient, touched in self._touched_gradients():
            gradient.index_fill_(0, touched, 0.0)
        for state in self.states:
            state.touched = None

    def _touched_gradients(self) -> list[tuple[Tensor, Tensor]]:
        found = []
        for state in self.states:
            if state.touched is not None:
                found.append((state.rows_grad, state.touched))
                if state.gates_grad is not None:
                    found.append((state.gates_grad, state.touched))
        return found

    def rows_hit(self) -> tuple[int, int]:
        """(distinct rows read in training so far, rows), over all tables."""
        hit = sum(int(state.hit.sum()) * len(state.slab.tables) for state in self.states)
        return hit, sum(state.slab.rows * len(state.slab.tables) for state in self.states)

    def named_tensors(self) -> dict[str, Tensor]:
        """Rows and gates by table name: `NAME.rows` [S, width], `NAME.gates` [S]."""
        found = {}
        for state in self.states:
            for number, (name, columns) in enumerate(state.slab.columns().items()):
                found[f"{name}.rows"] = state.rows[:, columns]
                if state.gates is not None:
                    found[f"{name}.gates"] = state.gates[:, number]
        return found


def _initial_slab(slab: Slab, config: Config, device: torch.device) -> Tensor:
    values = torch.empty(slab.rows, slab.width, device=device)
    for table in slab.tables:
        columns = slab.columns()[table.name]
        step = max(1, INIT_ELEMENTS // table.width)
        for start in range(0, slab.rows, step):
            rows = torch.arange(start, min(start + step, slab.rows), device=device)
            part = initial_rows(rows, table.width, config.model.init_std, config.train.seed, table.name)
            values[start : start + step, columns] = part
    return values
