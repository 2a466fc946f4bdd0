"""Tables that lie whole in one process: the reference that every other layout must equal.

Retrieval, for every table and token t (stage 1):  e(t) = sum_j c[t, j] * sigmoid(a[row_j]) * B[row_j]
with the rows and coefficients of the routing and one learnable gate a per row and table. At compression 1 it is
e(t) = B[t]. Gradients reach the tables by autograd and are dense.

Shapes: U distinct tokens, N accesses (token, row) of those tokens, S rows, W width of a slab, J tables of a slab.
"""

import torch
from torch import Tensor, nn

from xgram_dist.config import Config
from xgram_dist.memory.initial import initial_rows
from xgram_dist.memory.layout import Slab, plan_slabs
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.memory.working_set import WorkingSet

INIT_ELEMENTS = 1 << 24
"""Elements initialised at a time; bounds the temporary memory."""


class RowMap:
    """One view's token -> (row, coefficient) lists, on the device."""

    def __init__(self, routing: Routing, view: int, device: torch.device):
        lists = routing.views[view]
        self.offsets = torch.as_tensor(lists.offsets, device=device, dtype=torch.int64)
        self.rows = torch.as_tensor(lists.rows, device=device, dtype=torch.int64)
        self.coefficients = torch.as_tensor(lists.coefficients, device=device, dtype=torch.float32)

    def accesses(self, keys_U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rows [N], coefficients [N], index into keys [N]) of all accesses of the tokens, token by token."""
        start = self.offsets[keys_U]
        counts = self.offsets[keys_U + 1] - start
        token_N = torch.repeat_interleave(counts)
        first_N = (torch.cumsum(counts, 0) - counts)[token_N]
        entry_N = start[token_N] + torch.arange(token_N.numel(), device=keys_U.device) - first_N
        return self.rows[entry_N], self.coefficients[entry_N], token_N


class LocalTables:
    """Implements `Lookup` (working_set.py)."""

    def __init__(self, config: Config, routing: Routing | None, device: torch.device):
        self.slabs: tuple[Slab, ...] = plan_slabs(config)
        self.maps: list[RowMap | None] = []
        self.rows: list[nn.Parameter] = []
        self.gates: list[nn.Parameter | None] = []
        self.hit: list[Tensor] = []
        self.vip_rows = routing.vip_rows if routing is not None else 0
        gated = config.memory.row_gates and config.memory.compression < 1
        for slab in self.slabs:
            self.maps.append(RowMap(routing, slab.view, device) if routing is not None else None)
            self.rows.append(nn.Parameter(_initial_slab(slab, config, device)))
            gates = torch.full((slab.rows, len(slab.tables)), config.memory.row_gate_init, device=device)
            self.gates.append(nn.Parameter(gates) if gated else None)
            self.hit.append(torch.zeros(slab.rows, dtype=torch.bool, device=device))

    def fetch(self, tokens: Tensor, *, training: bool = True) -> WorkingSet:
        keys, slots = torch.unique(tokens, return_inverse=True)
        outputs: list[Tensor] = []
        names: list[str] = []
        with torch.set_grad_enabled(training):
            for number, slab in enumerate(self.slabs):
                outputs += self._retrieve(number, keys, training)
                names += [table.name for table in slab.tables]
        values = {name: out.detach().requires_grad_(training) for name, out in zip(names, outputs, strict=True)}
        return WorkingSet(keys, slots, values, {"outputs": outputs})

    def give_back(self, working: WorkingSet) -> None:
        outputs: list[Tensor] = working.context["outputs"]
        pairs = [
            (out, leaf.grad)
            for out, leaf in zip(outputs, working.values.values(), strict=True)
            if leaf.grad is not None
        ]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])

    def _retrieve(self, number: int, keys_U: Tensor, training: bool) -> list[Tensor]:
        slab, row_map, gates = self.slabs[number], self.maps[number], self.gates[number]
        widths = [table.width for table in slab.tables]
        if row_map is None:
            rows_N = keys_U
        else:
            rows_N, coefficients_N, token_N = row_map.accesses(keys_U)
        if training:
            self.hit[number][rows_N] = True
        pieces = self.rows[number].index_select(0, rows_N).split(widths, dim=1)
        if row_map is None:
            return list(pieces)
        weights_NJ = coefficients_N.to(pieces[0].dtype)[:, None].expand(-1, len(widths))
        if gates is not None:
            weights_NJ = weights_NJ * torch.sigmoid(gates.index_select(0, rows_N))
        zeros = [piece.new_zeros(keys_U.numel(), piece.shape[1]) for piece in pieces]
        return [
            zero.index_add(0, token_N, piece * weight_N)
            for zero, piece, weight_N in zip(zeros, pieces, weights_NJ.split(1, dim=1), strict=True)
        ]

    def rows_hit(self) -> tuple[int, int]:
        """(distinct rows read in training so far, rows), over all tables."""
        hit = sum(int(mask.sum()) * len(slab.tables) for mask, slab in zip(self.hit, self.slabs, strict=True))
        return hit, sum(slab.rows * len(slab.tables) for slab in self.slabs)


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
