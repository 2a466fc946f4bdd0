"""Warm start: a new run from the weights of another run's checkpoint (`train --from PATH --weights-only`).

Backbone weights are taken by name and shape. A table is taken if both runs have its layer, site and view:

    same token -> row map           rows and gates are copied
                                    (a row that is not saved, as it was never touched, keeps its initial values)
    another map (compression,       a token that shares no row with other tokens starts with rows that reproduce its
    routing)                        vector; rows that several tokens share keep their initial values

Everything else keeps its initial values; optimizer, step and data position start from zero. Each rank reads what its
own rows need. Collectives, on the world group: `CheckpointReader.verify` and one all-gather after the backbone.
Shapes: S rows of this rank, B rows or tokens of a block, N accesses, R distinct rows, W columns held here, V tokens.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.checkpoint.compatibility import check_model, check_tokenizer
from xgram_dist.checkpoint.load import load_shards
from xgram_dist.checkpoint.reader import CheckpointReader
from xgram_dist.checkpoint.sharded_tensor import MOMENT_SUFFIXES, ShardedTensor, backbone_state
from xgram_dist.engine.base import Engine
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.tables.lookup import segment_sums
from xgram_dist.tables.routing import Routing, View
from xgram_dist.tables.shard import Shard
from xgram_dist.tables.table_shards import TableShards
from xgram_dist.tables.touched_shard import TouchedShard

BLOCK_ROWS = 4096
INITIAL = "initial values"


@dataclass
class InitSummary:
    """For one component of the model: how many of its tensors were taken, and what happened to the others."""

    component: str
    taken: int = 0
    total: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, taken: bool, note: str | None = None) -> None:
        self.total += 1
        self.taken += taken
        if note is not None and note not in self.notes:
            self.notes.append(note)


class _Summaries(dict[str, InitSummary]):
    """Summaries by component."""

    def of(self, tensor: str) -> InitSummary:
        component = _component(tensor)
        return self.setdefault(component, InitSummary(component))


def merge_summaries(of_stage: list[InitSummary], mesh: Mesh) -> list[InitSummary]:
    """Those of all stages of a pipeline. One all-gather over its axis."""
    merged: dict[str, InitSummary] = {}
    for stage in mesh.pipeline.host.all_gather_object(of_stage):
        for one in stage:
            whole = merged.setdefault(one.component, InitSummary(one.component))
            whole.taken, whole.total = whole.taken + one.taken, whole.total + one.total
            whole.notes += [note for note in one.notes if note not in whole.notes]
    return list(merged.values())


def _component(tensor: str) -> str:
    words = tensor.split(".")
    if words[0] == "tables":
        return f"tables {words[3]}.{words[4]}"
    return f"extraction and gains at {words[4]}" if words[3:4] == ["sites"] else "backbone"


def summary_rows(summaries: list[InitSummary]) -> list[list[str]]:
    """For a printed table: component, taken, of, notes."""
    return [[one.component, f"{one.taken:,}", f"{one.total:,}", "; ".join(one.notes)] for one in summaries]


@torch.no_grad()
def init_from_checkpoint(
    folder: Path, engine: Engine, shards: TableShards | None, routing: Routing | None, mesh: Mesh, tokenizer: str
) -> tuple[dict[str, Any], list[InitSummary]]:
    """Overwrite the weights that both runs have; returns (facts of the checkpoint, summaries). All ranks call it."""
    reader = CheckpointReader(folder)
    check_model(folder, reader.facts, engine.config)
    check_tokenizer(folder, reader.facts, tokenizer)
    shapes = reader.weight_shapes()
    backbone = {
        name: tensor for name, tensor in backbone_state(engine, mesh).items() if not name.endswith(MOMENT_SUFFIXES)
    }
    same_shape = {name: tensor for name, tensor in backbone.items() if shapes.get(name) == list(tensor.shape)}
    gains = {name for name in backbone if name.endswith(".gain") and name in shapes and name not in same_shape}
    tables = [] if shards is None else [name for shard in shards for name in shard.names]
    shared_tables = [name for name in tables if f"tables.{name}.rows" in shapes]
    weights = [*same_shape, *gains, *(f"tables.{name}.{kind}" for name in shared_tables for kind in ("rows", "gates"))]
    needed = {tensor for name in weights if name in shapes for tensor in reader.tensors_of_weight(name)}
    reader.verify(mesh.world, sorted(set().union(*mesh.pipeline.host.all_gather_object(needed))))

    summaries = _Summaries()
    load_shards(reader, same_shape, mesh)
    for name, tensor in backbone.items():
        if name in same_shape:
            summaries.of(name).add(True)
        elif name in gains:
            summaries.of(name).add(True, _copy_gains(reader.weight(name), tensor))
        elif name in shapes:
            summaries.of(name).add(False, f"another shape ({shapes[name]}, here {list(tensor.shape)}): {INITIAL}")
        else:
            summaries.of(name).add(False, f"not in the checkpoint: {INITIAL}")
    engine.after_load()
    for shard in shards if shards is not None else ():
        initializer = _ShardInitializer(reader, shard, routing, mesh)
        for number, name in enumerate(shard.names):
            summary = summaries.of(f"tables.{name}.rows")
            if name in shared_tables:
                summary.add(True, initializer.fill(number, name))
            else:
                summary.add(False, f"not in the checkpoint: {INITIAL}")
    known = {*backbone, *(f"tables.{name}.rows" for name in tables)}
    known = set().union(*mesh.pipeline.host.all_gather_object(known))
    for name in (name for name in shapes if not name.endswith(".gates")):
        if mesh.pipeline.first and name not in known:
            summaries.of(name).add(False, "not in this model")
    return reader.facts, merge_summaries(list(summaries.values()), mesh)


def _copy_gains(values: Tensor, tensor: ShardedTensor) -> str:
    """Gains have one number per view: copy those of the views in both runs."""
    for shard in tensor.shards:
        (start,) = shard.offsets
        common = values[start : start + len(shard.tensor)]
        shard.tensor[: len(common)] = common.to(shard.tensor)
    return f"{len(values)} views there, {tensor.shape[0]} here: gains of those in both"


class _ShardInitializer:
    """Fills the tables of one shard, which share a token -> row map."""

    def __init__(self, reader: CheckpointReader, shard: Shard, routing: Routing | None, mesh: Mesh):
        self.reader, self.shard, self.mesh = reader, shard, mesh
        self.view = None if routing is None else routing.views[shard.slab.view]
        self._tokens_S: NDArray[Any] | None = None

    def fill(self, number: int, name: str) -> str | None:
        """Fill a table; returns a note for the summary."""
        width = self.shard.slab.tables[number].width
        columns = slice(self.mesh.tensor.rank * width, (self.mesh.tensor.rank + 1) * width)
        same_map = _same_map(self.reader.view_of_table(name), self.view)
        local_N, row_ids_N = self._rows_to_fill(name, same_map)
        state = self.shard.state_dict()
        values_SW, gates_S = state.columns[f"{name}.rows"], state.tables.get(f"{name}.gates")
        with self.shard.writing(None):
            copy = self._copy_rows if same_map else self._copy_token_vectors
            return copy(name, columns, values_SW, gates_S, local_N, row_ids_N)

    def _rows_to_fill(self, name: str, same_map: bool) -> tuple[NDArray[Any], NDArray[Any]]:
        """(local rows, their global ids): those that the checkpoint holds; where the map is another, all."""
        shard, saved = self.shard, self.reader.saved_rows_of(name)
        if isinstance(shard, TouchedShard):
            row_ids_N = shard.owned_rows(saved.rows) if same_map else shard.every_row()
            return shard.adopt(row_ids_N), row_ids_N
        row_ids_S = shard.row_ids.cpu().numpy()
        if saved.complete or not same_map:
            return np.arange(len(row_ids_S)), row_ids_S
        local_N = np.flatnonzero(saved.positions_of(row_ids_S) >= 0)
        return local_N, row_ids_S[local_N]

    def _copy_rows(
        self,
        name: str,
        columns: slice,
        values_SW: Tensor,
        gates_S: Tensor | None,
        local_N: NDArray[Any],
        row_ids_N: NDArray[Any],
    ) -> str | None:
        """Row by row. If only one of the runs has row gates, rows are scaled so that gated rows stay the same."""
        gated = f"tables.{name}.gates" in self.reader.manifest.tensors
        for block in _blocks(len(local_N)):
            rows_B, local_B = row_ids_N[block], torch.from_numpy(local_N[block]).to(values_SW.device)
            new_BW = self.reader.table_rows(f"tables.{name}.rows", rows_B, columns)
            if gated:
                gates_B = self.reader.table_rows(f"tables.{name}.gates", rows_B)
                if gates_S is None:
                    new_BW *= torch.sigmoid(gates_B)[:, None]
                else:
                    gates_S[local_B] = gates_B.to(gates_S)
            elif gates_S is not None:
                new_BW /= torch.sigmoid(gates_S[local_B].cpu())[:, None]
            values_SW[local_B] = new_BW.to(values_SW)
        if gated == (gates_S is not None):
            return None
        return "row gates folded into the rows" if gated else "rows divided by the initial row gates"

    def _copy_token_vectors(
        self,
        name: str,
        columns: slice,
        values_SW: Tensor,
        gates_S: Tensor | None,
        local_S: NDArray[Any],
        row_ids_S: NDArray[Any],
    ) -> str:
        """Set the rows of each token that has rows of its own so that it reads its saved vector."""
        tokens_S, vocabulary = self._tokens_of_rows(row_ids_S), self.reader.config.model.vocabulary
        coefficients_V = np.ones(vocabulary) if self.view is None else _coefficient_sums(self.view)
        alone = np.flatnonzero(tokens_S >= 0)
        for block in _blocks(len(alone)):
            local_B, tokens_B = local_S[alone[block]], tokens_S[alone[block]]
            vectors_BW = self._saved_vectors(name, tokens_B, columns)
            factor_B = torch.from_numpy(coefficients_V[tokens_B])
            if gates_S is not None:
                factor_B = factor_B * torch.sigmoid(gates_S[torch.from_numpy(local_B)].cpu().double())
            values_SW[torch.from_numpy(local_B)] = (vectors_BW.double() / factor_B[:, None]).to(values_SW)
        count = vocabulary if self.view is None else int(_has_unshared_rows(self.view).sum())
        if count == vocabulary:
            return "another map: every token starts with its vector"
        return f"another map: {count:,} of {vocabulary:,} tokens start with their vectors, shared rows with {INITIAL}"

    def _tokens_of_rows(self, row_ids_S: NDArray[Any]) -> NDArray[Any]:
        """The token that each row of this rank serves alone, or -1 [S]."""
        if self._tokens_S is None:
            tokens = None if self.view is None else _tokens_of_rows(self.view, self.shard.slab.rows)
            self._tokens_S = row_ids_S if tokens is None else tokens[row_ids_S]
        return self._tokens_S

    def _saved_vectors(self, name: str, tokens_B: NDArray[Any], columns: slice) -> Tensor:
        """The vectors that these tokens retrieve in the saved run [B, W]."""
        view = self.reader.view_of_table(name)
        if view is None:
            return self.reader.table_rows(f"tables.{name}.rows", tokens_B, columns)
        counts_B = view.offsets[tokens_B + 1] - view.offsets[tokens_B]
        ends_B = np.cumsum(counts_B)
        first_B = ends_B - counts_B
        accesses_N = np.repeat(view.offsets[tokens_B] - first_B, counts_B) + np.arange(counts_B.sum())
        rows_R, index_N = np.unique(view.rows[accesses_N], return_inverse=True)
        values_RW = self.reader.table_rows(f"tables.{name}.rows", rows_R, columns)
        if f"tables.{name}.gates" in self.reader.manifest.tensors:
            values_RW *= torch.sigmoid(self.reader.table_rows(f"tables.{name}.gates", rows_R))[:, None]
        coefficients_N = torch.from_numpy(view.coefficients[accesses_N])
        return segment_sums(values_RW, torch.from_numpy(index_N), torch.from_numpy(first_B), coefficients_N)


def _blocks(count: int) -> list[slice]:
    return [slice(start, min(start + BLOCK_ROWS, count)) for start in range(0, count, BLOCK_ROWS)]


def _same_map(first: View | None, second: View | None) -> bool:
    if first is None or second is None:
        return first is second
    pairs = ((first.offsets, second.offsets), (first.rows, second.rows), (first.coefficients, second.coefficients))
    return all(np.array_equal(a, b) for a, b in pairs)


def _coefficient_sums(view: View) -> NDArray[Any]:
    """The sum of each token's coefficients [V]."""
    return np.bincount(view.tokens(), weights=view.coefficients, minlength=view.vocabulary)


def _has_unshared_rows(view: View) -> NDArray[Any]:
    """Whether a token has rows and shares none of them [V]. Equal rows of one token are one access."""
    shared_N = np.bincount(view.rows)[view.rows] > 1
    with_shared = np.bincount(view.tokens(), weights=shared_N, minlength=view.vocabulary) > 0
    return (np.diff(view.offsets) > 0) & ~with_shared


def _tokens_of_rows(view: View, num_rows: int) -> NDArray[Any]:
    """The token that each row serves alone, if that token shares no row; else -1."""
    tokens_N = view.tokens()
    tokens = np.full(num_rows, -1, dtype=np.int64)
    unshared_N = _has_unshared_rows(view)[tokens_N]
    tokens[view.rows[unshared_N]] = tokens_N[unshared_N]
    return tokens
