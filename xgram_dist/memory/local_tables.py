"""The rows one process owns: all of them, or its share.

Implements `Lookup` (working_set.py) for a process that owns all rows: fetch distinct tokens, give their gradients
back. `sharded_tables.py` puts an exchange around it where rows are spread over ranks. A gradient covers the rows that
were hit and no others, so that norm and clipping cost what was hit and not what there is.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.memory.initial import initial_rows
from xgram_dist.memory.layout import Slab, plan_slabs
from xgram_dist.memory.placement import Placement, plan_placement
from xgram_dist.memory.retrieval import Accesses, RowGradient, add, give_back, retrieve
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.memory.working_set import WorkingSet

INIT_ELEMENTS = 1 << 24
"""Elements initialised at a time; bounds the temporary memory."""


class RowMap:
    """One view's token -> (local row, coefficient) lists of the rows owned here, on the device."""

    def __init__(self, routing: Routing, view: int, placement: Placement, rank: int, device: torch.device):
        lists = routing.views[view]
        mine = placement.owner[lists.rows] == rank
        before = np.concatenate(([0], np.cumsum(mine)))  # accesses kept before each entry
        self.offsets = torch.tensor(before[lists.offsets], device=device, dtype=torch.int64)
        self.rows = torch.tensor(placement.local[lists.rows[mine]], device=device, dtype=torch.int64)
        self.coefficients = torch.tensor(lists.coefficients[mine], device=device, dtype=torch.float32)

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
    owned: Tensor
    """Global number of each row held here, ascending."""
    to_local: Tensor | None
    """Without hashing and with several ranks: local row of each token."""
    rows: Tensor
    gates: Tensor | None
    hit: Tensor
    gradient: RowGradient | None = None

    @property
    def widths(self) -> list[int]:
        return [table.width for table in self.slab.tables]

    def accesses(self, keys_U: Tensor) -> Accesses:
        """The accesses of these tokens to rows owned here."""
        if self.row_map is not None:
            return self.row_map.accesses(keys_U)
        return Accesses(keys_U if self.to_local is None else self.to_local[keys_U], None, None, keys_U.numel())

    def add_gradients(self, grads: list[Tensor], accesses: Accesses) -> None:
        """Gradients of the retrieved vectors, one tensor a table, to the rows and gates they came from."""
        new = give_back(grads, self.rows, self.gates, accesses, self.widths)
        self.gradient = add(self.gradient, new)
        self.hit[new.touched] = True


class LocalTables:
    def __init__(
        self,
        config: Config,
        routing: Routing | None,
        device: torch.device,
        placement: Placement | None = None,
        rank: int = 0,
    ):
        assert (routing is None) == (config.memory.compression == 1)
        slabs = plan_slabs(config)
        placement = placement or plan_placement(routing, slabs[0].rows, 1)
        owned = torch.tensor(placement.rows_of(rank), device=device, dtype=torch.int64)
        self.vip_rows = int((owned < routing.vip_rows).sum()) if routing is not None else 0
        self.states: list[SlabState] = []
        gated = config.memory.row_gates and config.memory.compression < 1
        to_local = None
        if routing is None and placement.ranks > 1:
            to_local = torch.tensor(placement.local, device=device)
        for slab in slabs:
            rows = _initial_slab(slab, owned, config, device)
            gates = torch.full((len(owned), len(slab.tables)), config.memory.row_gate_init, device=device)
            row_map = RowMap(routing, slab.view, placement, rank, device) if routing is not None else None
            self.states.append(
                SlabState(
                    slab=slab,
                    row_map=row_map,
                    owned=owned,
                    to_local=to_local,
                    rows=rows,
                    gates=gates if gated else None,
                    hit=torch.zeros(len(owned), dtype=torch.bool, device=device),
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
            state.add_gradients(working.gradients(state.slab), accesses)

    def gradient_square_sum(self) -> Tensor:
        """Sum of the squared gradients of rows and gates, for the joint norm."""
        norms = [torch.linalg.vector_norm(gradient) for gradient in self._gradients()]
        return torch.stack(norms).square().sum() if norms else self.states[0].rows.new_zeros(())

    def scale_gradients(self, factor: float) -> None:
        for gradient in self._gradients():
            gradient.mul_(factor)

    def clear_gradients(self) -> None:
        for state in self.states:
            state.gradient = None

    def _gradients(self) -> list[Tensor]:
        found = []
        for state in self.states:
            if state.gradient is not None:
                found.append(state.gradient.rows)
                if state.gradient.gates is not None:
                    found.append(state.gradient.gates)
        return found

    def rows_hit(self) -> tuple[int, int]:
        """(distinct rows read in training so far, rows held here), over all tables."""
        hit = sum(int(state.hit.sum()) * len(state.slab.tables) for state in self.states)
        return hit, sum(len(state.owned) * len(state.slab.tables) for state in self.states)

    def named_tensors(self) -> dict[str, Tensor]:
        """The rows held here, and their gates, by table name: `NAME.rows` [S, width], `NAME.gates` [S]."""
        found = {}
        for state in self.states:
            for number, (name, columns) in enumerate(state.slab.columns().items()):
                found[f"{name}.rows"] = state.rows[:, columns]
                if state.gates is not None:
                    found[f"{name}.gates"] = state.gates[:, number]
        return found


def _initial_slab(slab: Slab, owned: Tensor, config: Config, device: torch.device) -> Tensor:
    values = torch.empty(len(owned), slab.width, device=device)
    for table in slab.tables:
        columns = slab.columns()[table.name]
        step = max(1, INIT_ELEMENTS // table.width)
        for start in range(0, len(owned), step):
            rows = owned[start : start + step]
            part = initial_rows(rows, table.width, config.model.init_std, config.train.seed, table.name)
            values[start : start + step, columns] = part
    return values
