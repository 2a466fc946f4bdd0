"""The state of a run by global name: what is saved, and where a saved one is written to.

    backbone.NAME                          fp32 master weights; .first_moment and .second_moment beside them
    tables.layers.L.SITE.V.rows, .gates    and .first, .second, .accumulator of their optimizer
    tables.slab-V.rows.last                what an optimizer keeps for each row of a slab, or for all
    rng.rank-R                             torch's generator of a rank

Rows of tables stand in the order of the saving ranks: all rows of the first, then of the second. Which rows those are
follows from the placement, which the manifest names.
"""

import torch
from torch import Tensor

from xgram_dist.checkpoint.boxes import Box, Spread, State
from xgram_dist.engine.protocol import Engine
from xgram_dist.memory.placement import Placement
from xgram_dist.memory.store import SlabState
from xgram_dist.optim.tables import TableOptimizer
from xgram_dist.parallel.mesh import Mesh

SUFFIX = {"weight": "", "first_moment": ".first_moment", "second_moment": ".second_moment"}


def backbone_state(engine: Engine, mesh: Mesh) -> State:
    state: State = {}
    for piece in engine.pieces():
        shape, shift = list(piece.shape), [0] * len(piece.shape)
        if piece.tensor_dim is not None:
            shift[piece.tensor_dim] = mesh.tensor.rank * shape[piece.tensor_dim]
            shape[piece.tensor_dim] *= mesh.tensor.size
        boxes = [
            Box(tuple(o + s for o, s in zip(offsets, shift, strict=True)), tensor) for offsets, tensor in piece.boxes
        ]
        state[f"backbone.{piece.name}{SUFFIX[piece.kind]}"] = Spread(tuple(shape), torch.float32, boxes)
    return state


def table_state(optimizer: TableOptimizer, mesh: Mesh) -> tuple[State, State]:
    """(tensors with a row for each row of the tables, small ones that are whole on every rank)."""
    rows: State = {}
    whole: State = {}
    placement = optimizer.store.placement
    for number, slab in enumerate(optimizer.store.states):
        add = _Adder(rows, slab, placement, mesh)
        for name, values, one in (
            ("rows", slab.rows, optimizer.rows[number]),
            ("gates", slab.gates, optimizer.gates[number]),
        ):
            if values is None or one is None:
                continue
            by_columns = name == "rows"
            add.tables(name, values, by_columns)
            kept = one.exact()
            for key, tensor in kept.columns.items():
                add.tables(f"{name}.{key}", tensor, by_columns)
            for key, tensor in kept.tables.items():
                add.tables(f"{name}.{key}", tensor, False)
            for key, tensor in kept.rows.items():
                add.tensor(f"tables.slab-{number}.{name}.{key}", tensor, tensor.shape[1:], 0)
            whole |= {f"tables.slab-{number}.{name}.{key}": Spread.whole(t) for key, t in kept.whole.items()}
        add.tensor(f"tables.slab-{number}.hit", slab.hit, (), 0)
    return rows, whole


class _Adder:
    """Puts tensors of this rank's rows into the state."""

    def __init__(self, state: State, slab: SlabState, placement: Placement, mesh: Mesh):
        self.state, self.slab, self.mesh = state, slab, mesh
        counts = [len(placement.rows_of(rank)) for rank in range(placement.ranks)]
        self.start, self.total = sum(counts[: mesh.data.rank]), sum(counts)

    def tables(self, suffix: str, tensor: Tensor, by_columns: bool) -> None:
        """Table by table: ranges of columns, cut over the tensor axis; or one number each, alike on it."""
        for number, (name, columns) in enumerate(self.slab.slab.columns().items()):
            full = f"tables.{name}.{suffix}"
            if by_columns:
                part = tensor[:, columns]
                width = part.shape[1]
                self.tensor(full, part, (width * self.mesh.tensor.size,), self.mesh.tensor.rank * width)
            else:
                self.tensor(full, tensor[:, number], (), 0)

    def tensor(self, name: str, tensor: Tensor, rest: tuple[int, ...], column: int) -> None:
        offsets = (self.start, *([column] if rest else []))
        self.state[name] = Spread((self.total, *rest), tensor.dtype, [Box(offsets, tensor)])
