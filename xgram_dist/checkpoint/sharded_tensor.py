"""The state of a run as sharded tensors: what is saved, and the buffers that a saved state is loaded into.

A tensor has one name and one global shape in every layout; a rank holds shards of it (offsets and a local tensor). A
state saved as one set of shards loads into any other: torch.distributed.checkpoint works out the overlaps.

    backbone.NAME                          fp32 master weights; .first_moment and .second_moment beside them
    tables.layers.L.SITE.V.rows, .gates    [num_rows, width] and [num_rows]; beside them .first, .second or .accumulator
    tables.view-V.rows.last                what the optimizer keeps for each row of a view, or once for all rows
    row_ids.SET.data-R                     global ids of the rows of data rank R, where ranges do not compress them
    rng.rank-R                             torch's random generator of a rank

Rows of table tensors stand in the order of the data ranks (where the tables have replicas, of the ranks of a replica,
one of which writes each row); the row ids (row_ids.py) say which global rows those are.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from xgram_dist.checkpoint.manifest import TABLE_ROWS
from xgram_dist.checkpoint.row_ids import RowIdSegment, describe_row_ids
from xgram_dist.engine.base import Engine
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.tables.table_shards import TableShards
from xgram_dist.tables.touched_shard import TouchedShard

MOMENT_SUFFIXES = (".first_moment", ".second_moment")


@dataclass(frozen=True)
class LocalShard:
    offsets: tuple[int, ...]
    tensor: Tensor
    is_copy: bool = False
    """Whether nothing else holds the tensor, so that saving it in the background needs no copy."""

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)


@dataclass
class ShardedTensor:
    """One tensor of the checkpoint, as this rank holds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: list[LocalShard] = field(default_factory=list)
    row_ids: str | None = None
    """The row-id set of dimension 0; None: the tensor is no table tensor."""

    @staticmethod
    def replicated(tensor: Tensor) -> "ShardedTensor":
        """A tensor that every rank naming it holds whole."""
        return ShardedTensor(tuple(tensor.shape), tensor.dtype, [LocalShard((0,) * tensor.dim(), tensor)])


Tensors = dict[str, ShardedTensor]


@dataclass
class LocalRowIds:
    """This rank's part of a row-id set."""

    data_rank: int
    segment: RowIdSegment
    table_rows: int | None = None
    """As in `RowIdSet`. If it is set, row offsets count from this rank's first row until `place_rows`: how many rows
    the other ranks have touched is not known before."""


@dataclass
class CheckpointState:
    """What this rank holds of a run's state."""

    tensors: Tensors
    row_ids: dict[str, LocalRowIds] = field(default_factory=dict)

    def row_tensors(self) -> Tensors:
        """The tensors with one row for each row of the tables."""
        return {name: tensor for name, tensor in self.tensors.items() if tensor.row_ids is not None}


def training_state(
    engine: Engine, tables: TableShards | None, mesh: Mesh, *, changed_rows: bool = False
) -> CheckpointState:
    """Everything a checkpoint saves: backbone, tables, and this rank's random generator. `changed_rows`: of touched
    rows, those that were written since the last checkpoint."""
    state = CheckpointState(backbone_state(engine, mesh))
    if tables is not None:
        if not changed_rows:  # changed rows are verified as they are copied
            tables.verify()
        table = table_state(tables, mesh, changed_rows=changed_rows)
        state.tensors |= table.tensors
        state.row_ids |= table.row_ids
    state.tensors[f"rng.rank-{mesh.world.rank}"] = ShardedTensor.replicated(torch.get_rng_state())
    return state


def backbone_state(engine: Engine, mesh: Mesh) -> Tensors:
    tensors: Tensors = {}
    for parameter in engine.parameter_shards():
        shape, shift = list(parameter.shape), [0] * len(parameter.shape)
        if parameter.tensor_dim is not None:
            shift[parameter.tensor_dim] = mesh.tensor.rank * shape[parameter.tensor_dim]
            shape[parameter.tensor_dim] *= mesh.tensor.size
        shards = [
            LocalShard(tuple(o + s for o, s in zip(offsets, shift, strict=True)), tensor)
            for offsets, tensor in parameter.chunks
        ]
        suffix = "" if parameter.kind == "weight" else f".{parameter.kind}"
        tensors[f"backbone.{parameter.name}{suffix}"] = ShardedTensor(tuple(shape), torch.float32, shards)
    return tensors


def shapes_of_all_stages(tensors: Tensors, mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """The tensors of all stages of a pipeline. One all-gather over the pipeline axis."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return {name: shape for stage in mesh.pipeline.host.all_gather_object(shapes) for name, shape in stage.items()}


def table_state(shards: TableShards, mesh: Mesh, *, changed_rows: bool = False) -> CheckpointState:
    """Rows, gates and optimizer state of all tables. Columns are sharded over the tensor axis; all else is replicated
    over it. `changed_rows`: as in `training_state`."""
    sharding, rank, num_rows = shards.sharding, shards.rank, shards.num_rows
    tensors: Tensors = {}
    row_ids: dict[str, LocalRowIds] = {}
    for shard in shards:
        touched = isinstance(shard, TouchedShard)
        copies = touched and changed_rows
        state = shard.changed_state() if isinstance(shard, TouchedShard) and changed_rows else shard.state_dict()
        row_set = f"{TABLE_ROWS}.view-{shard.slab.view}" if touched else TABLE_ROWS
        first_row = 0 if touched else sum(sharding.count(lower) for lower in range(rank))
        for name, tensor in state.columns.items():
            width = tensor.shape[1]
            local = LocalShard((first_row, mesh.tensor.rank * width), tensor, copies)
            shape = (num_rows, width * mesh.tensor.size)
            tensors[f"tables.{name}"] = ShardedTensor(shape, tensor.dtype, [local], row_set)
        for name, tensor in (state.tables | state.rows).items():
            local = LocalShard((first_row,), tensor, copies)
            tensors[f"tables.{name}"] = ShardedTensor((num_rows,), tensor.dtype, [local], row_set)
        for name, tensor in state.replicated.items():
            tensors[f"tables.{name}"] = ShardedTensor.replicated(tensor)
        if row_set not in row_ids:  # shards that hold all rows share one set
            ids = state.row_ids.cpu().numpy()
            segment = describe_row_ids(ids, f"row_ids.{row_set}.data-{rank}")
            if segment.tensor is not None:
                tensors[segment.tensor] = ShardedTensor.replicated(_smallest_integers(ids, num_rows))
            row_ids[row_set] = LocalRowIds(rank, segment, num_rows if touched else None)
    return CheckpointState(tensors, row_ids)


RowCounts = dict[str, int]
"""Row-id set -> rows."""


def count_rows(state: CheckpointState) -> tuple[int, RowCounts]:
    """(data rank, this rank's rows of each set that `place_rows` has to place)."""
    ranks = [local.data_rank for local in state.row_ids.values()]
    touched = {name: one.segment.count for name, one in state.row_ids.items() if one.table_rows is not None}
    return max(ranks, default=0), touched


def rows_by_rank(counts: list[tuple[int, RowCounts]]) -> dict[int, RowCounts]:
    """`count_rows` of all ranks, by data rank. Stages of a pipeline have tables of other views, or of the same."""
    found: dict[int, RowCounts] = {}
    for rank, of_rank in counts:
        found.setdefault(rank, {}).update(of_rank)
    return found


def place_rows(state: CheckpointState, counts: dict[int, RowCounts]) -> CheckpointState:
    """The state with the touched rows of the data ranks one after the other. `counts`: of each data rank."""
    tensors: Tensors = {}
    for name, tensor in state.tensors.items():
        local = None if tensor.row_ids is None else state.row_ids[tensor.row_ids]
        if local is None or local.table_rows is None:
            tensors[name] = tensor
            continue
        of_ranks = [counts[rank][str(tensor.row_ids)] for rank in range(len(counts))]
        first, total = sum(of_ranks[: local.data_rank]), sum(of_ranks)
        # A rank without rows has no shard, or its offsets would be those of the next rank's.
        holds = of_ranks[local.data_rank] > 0 or (total == 0 and local.data_rank == 0)
        shards = [replace(one, offsets=(first + one.offsets[0], *one.offsets[1:])) for one in tensor.shards if holds]
        tensors[name] = ShardedTensor((total, *tensor.shape[1:]), tensor.dtype, shards, tensor.row_ids)
    return CheckpointState(tensors, state.row_ids)


def _smallest_integers(ids: NDArray[Any], num_rows: int) -> Tensor:
    return torch.from_numpy(ids.astype(np.int32 if num_rows < 1 << 31 else np.int64))
