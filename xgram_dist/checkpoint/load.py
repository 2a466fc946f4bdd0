"""Going on from a checkpoint, whatever layout it was saved with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from xgram_dist.checkpoint.boxes import State
from xgram_dist.checkpoint.fits import check_model, check_state, check_tables
from xgram_dist.checkpoint.folder import FOLDER, found_steps, name_of
from xgram_dist.checkpoint.manifest import Manifest
from xgram_dist.checkpoint.raw import DamagedFileError
from xgram_dist.checkpoint.rows import read_rows, saved_placement, saved_positions
from xgram_dist.checkpoint.state import backbone_state, table_state
from xgram_dist.checkpoint.storage import BoxLoadPlanner, FolderReader, allow_one_process
from xgram_dist.engine.protocol import Engine
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.optim.tables import TableOptimizer
from xgram_dist.parallel.mesh import Mesh

Facts = dict[str, Any]


def load_newest(
    run: Path,
    engine: Engine,
    tables: TableOptimizer | None,
    routing: Routing | None,
    mesh: Mesh,
    accept: Callable[[Facts], None] = lambda facts: None,
) -> Any:
    """(facts of the newest checkpoint that is whole or None, sentences about those that are not). One that is whole but
    does not fit this run is an error: an older one would fit no better."""
    complaints: list[str] = []
    for step in reversed(found_steps(run)):
        facts, error = None, None
        try:
            facts = load_checkpoint(run / FOLDER / name_of(step), engine, tables, routing, mesh, accept)
        except DamagedFileError as refused:
            error = str(refused)
        errors = [one for one in mesh.world.gather_objects(error) if one is not None]
        if not errors:
            return facts, complaints
        complaints.append(f"checkpoint of step {step} is refused: {errors[0]}")
    return None, complaints


@torch.no_grad()
def load_checkpoint(
    folder: Path,
    engine: Engine,
    tables: TableOptimizer | None,
    routing: Routing | None,
    mesh: Mesh,
    accept: Callable[[Facts], None] = lambda facts: None,
) -> Facts:
    """Fill engine and tables in place; the facts that were saved with them. `accept` refuses facts before anything is
    read."""
    manifest = Manifest.read(folder)
    facts = manifest.run
    check_model(folder, facts, engine.config)
    check_tables(folder, facts, tables, routing)
    accept(facts)
    backbone = backbone_state(engine, mesh)
    rows = {} if tables is None else table_state(tables, mesh)[0]
    check_state(folder, manifest, backbone | rows)
    reader = FolderReader(folder, manifest)
    if not _same_layout(facts, engine, tables, mesh):
        reader.verify(mesh.world)  # each part by one rank: many will read some of it
    load_boxes(reader, backbone, mesh)
    engine.step_count = facts["updates"]
    engine.loaded()
    if tables is not None:
        placement = tables.store.placement
        saved = saved_placement(folder, facts, routing, len(placement.owner))
        read_rows(reader, rows, saved_positions(saved)[placement.rows_of(mesh.data.rank)])
        for number, (one, gates) in enumerate(zip(tables.rows, tables.gates, strict=True)):
            one.restore(whole_tensors(reader, f"tables.slab-{number}.rows."))
            if gates is not None:
                gates.restore(whole_tensors(reader, f"tables.slab-{number}.gates."))
    if facts["ranks"] == mesh.world.size:
        torch.set_rng_state(whole_tensors(reader, f"rng.rank-{mesh.world.rank}")[""])
    return facts


def _same_layout(facts: Facts, engine: Engine, tables: TableOptimizer | None, mesh: Mesh) -> bool:
    """Whether every rank holds just what a rank saved: then each part is read once, and checked on the way."""
    saved = facts["ranks"], facts["data_ranks"], facts["tensor"], facts["engine"]
    here = mesh.world.size, mesh.data.size, mesh.tensor.size, engine.config.parallel.engine
    return saved == here and (tables is None or facts["placement"] == tables.store.placement.policy)


def load_boxes(reader: FolderReader, state: State, mesh: Mesh) -> None:
    """Fill the boxes of a state in place. All ranks call it, and all fail where one does."""
    allow_one_process()
    failed: BaseException | None = None
    try:  # what a rank reads follows from what it holds: nothing is to be agreed on
        load(state, storage_reader=reader, planner=BoxLoadPlanner(), no_dist=True)
    except CheckpointException as error:
        failed = next(iter(error.failures.values()))[0]
        if not isinstance(failed, DamagedFileError):
            raise failed from error
    causes = mesh.world.host.gather_objects(None if failed is None else str(failed))
    complaints = [f"rank {rank}: {cause}" for rank, cause in enumerate(causes) if cause is not None]
    if complaints:
        raise DamagedFileError("; ".join(complaints))


def whole_tensors(reader: FolderReader, prefix: str) -> dict[str, torch.Tensor]:
    """Small tensors by the end of their name."""
    return {
        name.removeprefix(prefix): reader.chunk(entry.chunks[0], entry.dtype).clone()
        for name, entry in reader.manifest.tensors.items()
        if name.startswith(prefix) and len(entry.chunks) == 1 and entry.chunks[0].sizes == entry.shape
    }
