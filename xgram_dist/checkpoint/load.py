"""Going on from a checkpoint, whatever layout it was saved with."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from xgram_dist.checkpoint.folder import FOLDER, found_steps, name_of
from xgram_dist.checkpoint.manifest import Manifest
from xgram_dist.checkpoint.rows import read_rows, saved_positions
from xgram_dist.checkpoint.state import backbone_state, table_state
from xgram_dist.checkpoint.storage import BoxLoadPlanner, FolderReader
from xgram_dist.engine.protocol import Engine
from xgram_dist.errors import UserError
from xgram_dist.memory.placement import plan_placement
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.optim.tables import TableOptimizer
from xgram_dist.parallel.mesh import Mesh


def load_newest(run: Path, engine: Engine, tables: TableOptimizer | None, routing: Routing | None, mesh: Mesh) -> Any:
    """(facts of the newest checkpoint that is whole or None, sentences about those that are not)."""
    complaints: list[str] = []
    for step in reversed(found_steps(run)):
        folder = run / FOLDER / name_of(step)
        facts, error = None, None
        try:
            facts = load_checkpoint(folder, engine, tables, routing, mesh)
        except UserError as refused:
            error = str(refused)
        except CheckpointException as refused:
            error = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in refused.failures.items())
        errors = [one for one in mesh.world.gather_objects(error) if one is not None]
        if not errors:
            return facts, complaints
        complaints.append(f"checkpoint of step {step} is refused: {errors[0]}")
    return None, complaints


@torch.no_grad()
def load_checkpoint(
    folder: Path, engine: Engine, tables: TableOptimizer | None, routing: Routing | None, mesh: Mesh
) -> dict[str, Any]:
    """Fill engine and tables in place; the facts that were saved with them."""
    manifest = Manifest.read(folder)
    facts = manifest.run
    reader = FolderReader(folder, manifest)
    _check(folder, facts, tables, routing)
    load(
        backbone_state(engine, mesh),
        storage_reader=reader,
        planner=BoxLoadPlanner(),
        process_group=mesh.world.host.group,
        no_dist=mesh.world.size == 1,
    )
    engine.step_count = facts["updates"]
    engine.loaded()
    if tables is not None:
        placement = tables.store.placement
        saved = plan_placement(routing, len(placement.owner), facts["data_ranks"], facts["placement"])
        rows, _ = table_state(tables, mesh)
        read_rows(reader, rows, saved_positions(saved)[placement.rows_of(mesh.data.rank)])
        for number, (one, gates) in enumerate(zip(tables.rows, tables.gates, strict=True)):
            one.restore(_whole(reader, f"tables.slab-{number}.rows."))
            if gates is not None:
                gates.restore(_whole(reader, f"tables.slab-{number}.gates."))
    if facts["ranks"] == mesh.world.size:
        torch.set_rng_state(_whole(reader, f"rng.rank-{mesh.world.rank}")[""])
    return facts


def _whole(reader: FolderReader, prefix: str) -> dict[str, torch.Tensor]:
    """Small tensors by the end of their name."""
    return {
        name.removeprefix(prefix): reader.chunk(entry.chunks[0])
        for name, entry in reader.manifest.tensors.items()
        if name.startswith(prefix) and len(entry.chunks) == 1 and entry.chunks[0].sizes == entry.shape
    }


def _check(folder: Path, facts: dict[str, Any], tables: TableOptimizer | None, routing: Routing | None) -> None:
    mine = None if tables is None else tables.kind
    if facts.get("table_optimizer") != mine:
        raise UserError(
            f"'{folder}' was saved with the table optimizer '{facts.get('table_optimizer')}', this run has '{mine}'; "
            f"set memory.optimizer={facts.get('table_optimizer')}"
        )
    hashed = None if routing is None else routing.sha256()
    if facts.get("routing") != hashed:
        raise UserError(f"'{folder}' was saved with another routing; set memory.routing.file to its routing.npz")
