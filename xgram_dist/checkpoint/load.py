"""Resuming from a checkpoint, in whatever layout it was saved.

`load_newest` tries the checkpoints of a run from the newest to the oldest; `load_checkpoint` fills engine and tables in
place from one. Collectives, on the world group and in this order: `CheckpointReader.verify` if the layout changed, one
all-gather of errors after the backbone, and one all-gather of errors per checkpoint tried by `load_newest`.

Backbone shards are read through torch.distributed.checkpoint. Table rows are read by `read_rows`: each rank finds its
global rows in the saved order, opens only the chunks that hold some of them, and copies a bounded number at a time. A
checkpoint of touched rows loads into a run that keeps all rows, and the other way round: every saved row is taken, and
a row that is not saved is its formula.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from xgram_dist.checkpoint.compatibility import check_model, check_state, check_tables
from xgram_dist.checkpoint.dcp_storage import FolderReader, ShardLoadPlanner, ignore_single_process_warning
from xgram_dist.checkpoint.folder import FOLDER, list_steps, name_of
from xgram_dist.checkpoint.manifest import Chunk
from xgram_dist.checkpoint.reader import CheckpointReader
from xgram_dist.checkpoint.safetensors_io import DamagedFileError
from xgram_dist.checkpoint.sharded_tensor import LocalShard, Tensors, backbone_state, shapes_of_all_stages, table_state
from xgram_dist.engine.base import Engine
from xgram_dist.errors import BadFileError
from xgram_dist.model.pipeline_stages import plan_stages
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.tables.optimizers.catchup_math import any_outside, saved_range
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.shard import Shard
from xgram_dist.tables.table_shards import TableShards
from xgram_dist.tables.touched_shard import TouchedShard

GATHER_BYTES = 16 << 20
"""Of rows that are gathered from a chunk before its pages are released."""

Facts = dict[str, Any]


def load_newest(
    run: Path,
    engine: Engine,
    tables: TableShards | None,
    routing: Routing | None,
    mesh: Mesh,
    accept: Callable[[Facts], None] = lambda facts: None,
) -> tuple[Facts | None, list[str]]:
    """Load the newest undamaged checkpoint of a run: (its facts or None, one sentence for each damaged one).

    A checkpoint that is undamaged but incompatible with this run is an error: an older one would be so too."""
    complaints: list[str] = []
    for step in reversed(list_steps(run)):
        facts, error = None, None
        try:
            facts = load_checkpoint(run / FOLDER / name_of(step), engine, tables, routing, mesh, accept)
        except DamagedFileError as damage:
            error = str(damage)
        errors = [one for one in mesh.world.all_gather_object(error) if one is not None]
        if not errors:
            return facts, complaints
        complaints.append(f"checkpoint of step {step} is refused: {errors[0]}")
    return None, complaints


@torch.no_grad()
def load_checkpoint(
    folder: Path,
    engine: Engine,
    tables: TableShards | None,
    routing: Routing | None,
    mesh: Mesh,
    accept: Callable[[Facts], None] = lambda facts: None,
) -> Facts:
    """Fill engine and tables in place; returns the facts saved with them. `accept` may refuse the facts by raising,
    before any tensor is read."""
    reader = CheckpointReader(folder)
    facts = reader.facts
    check_model(folder, facts, engine.config)
    check_tables(folder, facts, tables, routing)
    accept(facts)
    backbone = backbone_state(engine, mesh)
    rows = {} if tables is None else table_state(tables, mesh).row_tensors()
    check_state(folder, reader.manifest, shapes_of_all_stages(backbone | rows, mesh))
    if not _same_layout(reader, engine, tables, mesh):
        reader.verify(mesh.world)  # several ranks will read the same chunks: verify each on one rank
    load_shards(reader, backbone, mesh)
    engine.step_count = facts["updates"]
    engine.after_load()
    if tables is not None:
        _load_tables(reader, tables, mesh)
    if facts["ranks"] == mesh.world.size:
        name = f"rng.rank-{mesh.world.rank}"
        with damage_if_refused(folder, name):
            torch.set_rng_state(reader.tensor(name))
    return facts


@contextmanager
def damage_if_refused(folder: Path, what: str) -> Iterator[None]:
    """A part of a checkpoint whose form its owner alone knows: if the owner cannot take it, it is damaged."""
    try:
        yield
    except DamagedFileError:
        raise
    except BadFileError as error:
        raise DamagedFileError(f"'{folder}': '{what}': {error}") from error
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise DamagedFileError(f"'{folder}': '{what}' is not what a run saves ({type(error).__name__})") from error


def _same_layout(reader: CheckpointReader, engine: Engine, tables: TableShards | None, mesh: Mesh) -> bool:
    """Whether every rank holds just what a rank saved: then each chunk is read by one rank, and verified on the way.
    All ranks come to the same answer."""
    facts = reader.facts
    saved = facts["ranks"], facts["data_ranks"], facts["tensor"], facts["engine"], facts.get("stages", [])
    current = mesh.world.size, mesh.data.size, mesh.tensor.size, engine.config.parallel.engine, stage_layers(engine)
    if saved != current:
        return False
    if tables is None:
        return True
    if any(row_ids.parts is not None for row_ids in reader.manifest.row_ids.values()):
        return False  # parts of a chain may be of other layouts
    segments = [one for name in reader.row_id_sets() for one in enumerate(reader.saved_rows(name).segments)]
    return all((tables.sharding.owners_of(ids) == rank).all() for rank, ids in segments)


def stage_layers(engine: Engine) -> list[list[int]]:
    """The layers of each stage of a pipeline; empty without one. It decides which rank saves what."""
    if engine.mesh.pipeline.size == 1:
        return []
    return [list(stage.layers) for stage in plan_stages(engine.config)]


def _load_tables(reader: CheckpointReader, tables: TableShards, mesh: Mesh) -> None:
    """The rows of every shard: those of the checkpoint, and for those that it does not hold, the formula."""
    replicated = reader.replicated_tensors("tables.")
    found = [_adopt_rows(reader, shard, tables) for shard in tables]
    tensors = table_state(tables, mesh).row_tensors()
    for shard, (local_R, positions_R) in zip(tables, found, strict=True):
        of_shard = shard.state_dict()
        names = [f"tables.{name}" for name in of_shard.columns | of_shard.tables | of_shard.rows]
        with shard.writing(None):
            limits = _step_limits(reader, shard)
            read_rows(reader, {name: tensors[name] for name in names}, positions_R, local_R, limits)
            with damage_if_refused(reader.folder, f"tables.view-{shard.slab.view}"):
                shard.load_replicated(replicated)
            is_saved = np.zeros(len(shard.row_ids), dtype=bool)
            is_saved[local_R] = True
            shard.restart_rows(torch.from_numpy(np.flatnonzero(~is_saved)))


def _step_limits(reader: CheckpointReader, shard: Shard) -> dict[str, tuple[int, int]]:
    """By tensor: the steps to which rows that miss steps may belong, first and last."""
    limits: dict[str, tuple[int, int]] = {}
    for kind in ("rows", "gates"):
        prefix = f"tables.view-{shard.slab.view}.{kind}."
        saved = reader.replicated_tensors(prefix)
        if "sums" in saved:
            with damage_if_refused(reader.folder, prefix):
                base, entries = saved_range(saved)
            limits |= {f"{prefix}{name}": (base, base + entries - 1) for name in ("last", "current")}
    return limits


def _adopt_rows(reader: CheckpointReader, shard: Shard, tables: TableShards) -> tuple[NDArray[Any], NDArray[Any]]:
    """(local rows that the checkpoint holds, their saved positions). A shard of touched rows makes room for them."""
    saved, rank = reader.saved_rows_of(shard.names[0]), tables.rank
    if isinstance(shard, TouchedShard):
        ids = shard.owned_rows(saved.rows)
        return shard.adopt(ids), saved.positions_of(ids)
    positions = saved.positions_of(tables.sharding.rows_of(rank))
    local = np.flatnonzero(positions >= 0)
    return local, positions[local]


def load_shards(reader: CheckpointReader, tensors: Tensors, mesh: Mesh) -> None:
    """Fill the shards in place. All ranks call it, and all raise if one fails."""
    ignore_single_process_warning()
    failed: BaseException | None = None
    try:  # a rank reads what it holds: there is nothing to agree on, so no collectives
        load(tensors, storage_reader=FolderReader(reader), planner=ShardLoadPlanner(), no_dist=True)
    except CheckpointException as error:
        failed = next(iter(error.failures.values()))[0]
        if not isinstance(failed, DamagedFileError):
            raise failed from error
    causes = mesh.world.host.all_gather_object(None if failed is None else str(failed))
    complaints = [f"rank {rank}: {cause}" for rank, cause in enumerate(causes) if cause is not None]
    if complaints:
        raise DamagedFileError("; ".join(complaints))


def read_rows(
    reader: CheckpointReader,
    tensors: Tensors,
    positions_S: NDArray[Any],
    local_S: NDArray[Any],
    limits: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> None:
    """Fill local rows of table tensors; `positions_S`: the saved position of each of the rows `local_S`. `limits`:
    tensors of integers that must be from the first to the second number."""
    order_S = np.argsort(positions_S, kind="stable")
    ascending_S, local_S = positions_S[order_S], local_S[order_S]
    for name, tensor in tensors.items():
        entry = reader.manifest.tensors[name]
        (shard,) = tensor.shards
        covered = 0
        for chunk in entry.chunks:
            first, last = np.searchsorted(ascending_S, (chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]))
            target, columns = _overlapping_columns(chunk, shard)
            if first == last or target.numel() == 0:
                continue
            local_R = local_S[first:last]
            covered += len(local_R) * (target.numel() // len(target))
            contiguous = bool((np.diff(local_R) == 1).all())
            if len(local_R) == chunk.sizes[0] and contiguous and columns is None:
                read = target[local_R[0] : local_R[0] + len(local_R)]
                reader.read_chunk(chunk, entry.dtype, read)
                _check_limits(reader, name, read, limits)
            else:
                saved_R = ascending_S[first:last] - chunk.offsets[0]
                source = reader.chunk(chunk, entry.dtype)
                _check_limits(reader, name, source, limits)
                _gather_rows(reader, source, target, local_R, saved_R, columns)
        row_numel = math.prod(shard.tensor.shape[1:])
        if covered != len(local_S) * row_numel:
            raise DamagedFileError(f"the checkpoint '{reader.folder}' does not hold all of '{name}'")
        reader.bytes_read += covered * shard.tensor.element_size()


def _overlapping_columns(chunk: Chunk, shard: LocalShard) -> tuple[Tensor, slice | None]:
    """(the shard's columns that the chunk holds, which columns of the chunk those are; None: all)"""
    if len(chunk.sizes) == 1:
        return shard.tensor, None
    begin = max(chunk.offsets[1], shard.offsets[1])
    end = max(begin, min(chunk.offsets[1] + chunk.sizes[1], shard.offsets[1] + shard.tensor.shape[1]))
    target = shard.tensor[:, begin - shard.offsets[1] : end - shard.offsets[1]]
    return target, None if end - begin == chunk.sizes[1] else slice(begin - chunk.offsets[1], end - chunk.offsets[1])


def _check_limits(reader: CheckpointReader, name: str, values: Tensor, limits: Mapping[str, tuple[int, int]]) -> None:
    """Before training indexes by them: on a GPU that would end the process."""
    first, last = limits.get(name, (0, 0))
    if name in limits and any_outside(values, first, last):
        raise DamagedFileError(f"'{reader.folder}': '{name}' has steps that are not from {first:,} to {last:,}")


def _gather_rows(
    reader: CheckpointReader,
    source: Tensor,
    target: Tensor,
    local_R: NDArray[Any],
    saved_R: NDArray[Any],
    columns: slice | None,
) -> None:
    """Copy rows `saved_R` (ascending) of a chunk, `source`, to rows `local_R` of the target."""
    source = source if columns is None else source[:, columns]
    step = max(1, GATHER_BYTES // max(1, source.shape[-1] * source.element_size()))
    for start in range(0, len(local_R), step):
        block = slice(start, start + step)
        rows = source[torch.from_numpy(saved_R[block])]
        target[torch.from_numpy(local_R[block]).to(target.device)] = rows.to(target)
        reader.release_pages()
