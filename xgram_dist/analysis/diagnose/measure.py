"""All figures of a checkpoint, from one pass over its table rows and one over some text.

In: a checkpoint, prepared data, any number of ranks. Out: plain numbers, the same on every rank and for every number of
ranks. A figure that does not apply to the memory method says why: {"not_applicable": reason}.

Each rank holds the backbone and the rows it owns; there is no optimizer and nothing is gathered. Rows start with the
run's initial values, which follow from the seed and the global row, and are replaced chunk by chunk with the
checkpoint's: at that moment both are known, and their distance is the movement.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.analysis.diagnose.row_statistics import (
    RowMovement,
    counted_update_shares,
    expected_update_shares,
    hit_concentration,
)
from xgram_dist.checkpoint.folder import checkpoints_at
from xgram_dist.checkpoint.reader import CheckpointReader
from xgram_dist.config import Config
from xgram_dist.config.schema import ParallelConfig
from xgram_dist.console import Progress
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.loader import validation_batches
from xgram_dist.eval.activations import (
    LayerCosines,
    RunningSums,
    TokenNorms,
    Totals,
    ViewCosines,
    activation_magnitudes,
    injection_sites,
    layer_cosines,
    magnitude_by_frequency,
    observe_forward,
    view_cosines,
)
from xgram_dist.model.build import build_lookup, build_model
from xgram_dist.model.methods.base import method_of
from xgram_dist.model.transformer import Transformer
from xgram_dist.optim.schedule import warmup_factor
from xgram_dist.parallel.mesh import Mesh, single_mesh
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.exchange import shards_of
from xgram_dist.tables.frequencies import load_frequencies
from xgram_dist.tables.initial_rows import InitialValues
from xgram_dist.tables.layout import Slab
from xgram_dist.tables.optimizers.build import FROZEN
from xgram_dist.tables.table_shards import TableShards
from xgram_dist.tables.touched_shard import TouchedShard
from xgram_dist.tables.working_set import Lookup, WorkingSet

CHUNK_ELEMENTS = 1 << 22
"""Elements of a table that are read at a time."""
SAMPLE = "the text that was read"
"""Source of frequencies if there are no token counts."""

Figures = dict[str, Any]
RowChunk = Callable[[str, Tensor, Tensor, Tensor], None]
"""(table, global rows, initial values, values in the checkpoint)"""


# ---- the checkpoint's network and tables on the ranks


@dataclass
class LoadedCheckpoint:
    saved: CheckpointReader
    config: Config
    mesh: Mesh
    device: torch.device
    model: Transformer
    lookup: Lookup

    @property
    def step(self) -> int:
        return int(self.saved.facts["step"])

    @property
    def shards(self) -> TableShards | None:
        return shards_of(self.lookup)

    @torch.no_grad()
    def forward(self, tokens_BT: Tensor) -> WorkingSet:
        """A forward pass over tokens in host memory. Every rank must make the same number of calls."""
        working = self.lookup.fetch(self.lookup.plan(tokens_BT, whole=True).result()[0], training=False)
        warmup = torch.tensor(warmup_factor(self.config, self.step), device=self.device, dtype=torch.float64)
        self.model(tokens_BT.to(self.device), working.slots, working.values, warmup)
        return working

    def load_rows(self, on_chunk: RowChunk, progress: Callable[[int], Any]) -> None:
        """Replace initial rows with the checkpoint's. `on_chunk` sees both; `progress` is told the bytes read.

        Of shards of touched rows it sees those that are saved; a row is read when the text touches it."""
        for shard in self.shards if self.shards is not None else ():
            if isinstance(shard, TouchedShard):
                self._compare_saved_rows(shard, on_chunk, progress)
                shard.read_from(SavedValues(self.config, shard.slab, self.saved))
                continue
            for number, (name, columns) in enumerate(shard.slab.columns().items()):
                step = max(1, CHUNK_ELEMENTS // (columns.stop - columns.start))
                for start in range(0, len(shard.row_ids), step):
                    rows = shard.row_ids[start : start + step]
                    saved = self.saved.table_rows(f"tables.{name}.rows", rows.cpu().numpy())
                    values = shard.rows[start : start + step, columns]
                    on_chunk(name, rows.cpu(), values.cpu(), saved)
                    values.copy_(saved)
                    progress(saved.nbytes)
                if shard.gates is not None:
                    gates = self.saved.table_rows(f"tables.{name}.gates", shard.row_ids.cpu().numpy())
                    shard.gates[:, number] = gates.to(shard.gates.device)

    def _compare_saved_rows(self, shard: TouchedShard, on_chunk: RowChunk, progress: Callable[[int], Any]) -> None:
        initial = InitialValues(self.config, shard.slab, 0)
        ids = torch.from_numpy(shard.owned_rows(self.saved.saved_rows_of(shard.names[0]).rows))
        for rows in ids.split(max(1, CHUNK_ELEMENTS // shard.slab.width)):
            values = torch.empty(len(rows), shard.slab.width)
            initial.fill_rows(values, rows)
            for name, columns in shard.slab.columns().items():
                saved = self.saved.table_rows(f"tables.{name}.rows", rows.numpy())
                on_chunk(name, rows, values[:, columns], saved)
                progress(saved.nbytes)

    def row_bytes(self) -> int:
        """What `load_rows` reads on this rank."""
        total = 0
        for shard in self.shards if self.shards is not None else ():
            if isinstance(shard, TouchedShard):
                saved = self.saved.saved_rows_of(shard.names[0]).rows
                total += len(shard.owned_rows(saved)) * shard.slab.width * shard.rows.element_size()
            else:
                total += shard.rows.nbytes
        return total


class SavedValues(InitialValues):
    """The values that rows and gates of a slab have in a checkpoint."""

    def __init__(self, config: Config, slab: Slab, saved: CheckpointReader):
        super().__init__(config, slab, 0)
        self._saved = saved

    def fill_rows(self, rows_SW: Tensor, row_ids_S: Tensor) -> None:
        for name, columns in self._slab.columns().items():
            rows_SW[:, columns] = self._saved.table_rows(f"tables.{name}.rows", row_ids_S.cpu().numpy()).to(rows_SW)

    def fill_gates(self, gates_SJ: Tensor, row_ids_S: Tensor) -> None:
        for number, name in enumerate(self._slab.columns()):
            gates = self._saved.table_rows(f"tables.{name}.gates", row_ids_S.cpu().numpy())
            gates_SJ[:, number] = gates.to(gates_SJ)


def open_checkpoint(
    path: Path, ranks: ProcessGroup, device: torch.device, end_of_text: int, precision: str | None = None
) -> LoadedCheckpoint:
    """A checkpoint, or a run's newest, with the backbone loaded and the tables still at their initial values.

    `end_of_text`: the token that ends a document. `precision`: of the computation, instead of the run's."""
    # A run may save meanwhile, so that ranks see different newest checkpoints: all take the first rank's.
    folder = Path(ranks.all_gather_object(str(checkpoints_at(path)[-1]))[0])
    saved = CheckpointReader(folder)
    config = _inference_config(saved.config, precision)
    mesh = single_mesh(ranks)
    model = build_model(config, device, end_of_text, mesh)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved.weight(f"backbone.{name}"))
    lookup = build_lookup(config, saved.routing, device, mesh, **_ngram_keys(saved, end_of_text), optimizer=FROZEN)
    return LoadedCheckpoint(saved, config, mesh, device, model.eval(), lookup)


def _ngram_keys(saved: CheckpointReader, end_of_text: int) -> dict[str, Any]:
    """Arguments of `build_lookup` for a method that looks up n-grams; none for the others."""
    return {} if saved.ngram_keys is None else {"keys": saved.ngram_keys, "end_of_text": end_of_text}


def _inference_config(config: Config, precision: str | None) -> Config:
    """The same network without compilation, activation checkpointing and the run's engine."""
    train = {"compile": False, "activation_checkpointing": False, "precision": precision or config.train.precision}
    return config.model_copy(
        update={
            "parallel": ParallelConfig(engine="replicated"),
            "train": config.train.model_copy(update=train),
        }
    )


# ---- the figures


def measure(
    checkpoint: LoadedCheckpoint, data: PreparedData, sequences: int, batch: int, thresholds: list[int]
) -> Figures:
    """Figures over `sequences` of the data, `batch` at a time. `thresholds`: N of "rows with more than N updates"."""
    config = checkpoint.config
    movement = _load_rows(checkpoint)
    totals, views = _read_text(checkpoint, data, sequences, batch)
    frequencies, source = _frequencies(checkpoint, data, totals)
    figures: Figures = {
        "activation": _activation(checkpoint, totals, frequencies, source),
        "layers": layer_cosines(totals, config.model.layers),
        "views": _views(checkpoint, totals, views),
        "row_hits": _row_hits(checkpoint, frequencies, source),
        "updates": _updates(checkpoint, frequencies, source, thresholds),
        "movement": movement,
    }
    return {
        "run": config.name,
        "method": config.memory.method,
        "step": checkpoint.step,
        "split": data.split,
        "positions": int(totals["occurrences"].sum()),
        "figures": figures,
    }


def not_applicable(reason: str) -> Figures:
    return {"not_applicable": reason}


def _load_rows(checkpoint: LoadedCheckpoint) -> Figures:
    """Load the rows; the figures of their movement."""
    reachable = _reachable_rows(checkpoint)
    movement = RowMovement(list(reachable))

    def on_chunk(table: str, rows: Tensor, initial: Tensor, saved: Tensor) -> None:
        if reachable[table] is not None:
            mask = torch.from_numpy(reachable[table][rows.numpy()])
            initial, saved = initial[mask], saved[mask]
        movement.add(table, initial, saved)

    with _progress(checkpoint, checkpoint.row_bytes() / 1e6, "MB", "table rows") as advance:
        checkpoint.load_rows(on_chunk, lambda size: advance(size / 1e6))
    if checkpoint.shards is None:
        return not_applicable(f"{checkpoint.config.memory.method} trains no tables")
    source = checkpoint.saved.facts["started_from"]
    if source is not None:
        return not_applicable(
            f"the run started from another's checkpoint ({source['name']}, step {source['step']}), not from rows of "
            "its own seed"
        )
    figures = movement.figures(checkpoint.mesh.world)
    if not figures["tables"]:
        return not_applicable(f"the rows of {checkpoint.config.memory.method} start at zero")
    return figures


def _reachable_rows(checkpoint: LoadedCheckpoint) -> dict[str, Any]:
    """For each table, a mask of the rows that some token reads; None: all."""
    masks: dict[str, Any] = {}
    routing = checkpoint.saved.routing
    for shard in checkpoint.shards if checkpoint.shards is not None else ():
        mask = None
        if routing is not None and shard.slab.rows == routing.num_rows:
            mask = np.zeros(routing.num_rows, dtype=bool)
            mask[routing.views[shard.slab.view].rows] = True
        masks |= dict.fromkeys(shard.slab.columns(), mask)
    return masks


def _read_text(
    checkpoint: LoadedCheckpoint, data: PreparedData, sequences: int, batch: int
) -> tuple[Totals, ViewCosines]:
    """Observed forward passes; batches are dealt to the ranks in turn."""
    shards, config = checkpoint.shards, checkpoint.config
    sums = RunningSums()
    tables = [name for shard in (shards or ()) for name in shard.slab.columns()]
    norms = TokenNorms(sums, config.model.vocabulary)
    views = ViewCosines(sums, tables)
    batches = validation_batches(data, config.model.sequence_length, batch, sequences)
    ranks = checkpoint.mesh.data
    with (
        _progress(checkpoint, sum(len(one) for one in batches), "sequences", "figures") as advance,
        observe_forward(checkpoint.model, [LayerCosines(sums), norms, views]),
    ):
        for first in range(0, len(batches), ranks.size):
            mine = first + ranks.rank
            # A rank without a batch in the last round repeats the first one and adds zeros: collectives need all ranks.
            tokens_BT = batches[mine] if mine < len(batches) else batches[0]
            sums.enabled = mine < len(batches)
            norms.begin_batch(tokens_BT.to(checkpoint.device))
            working = checkpoint.forward(tokens_BT)
            views.add_retrieved(working.values, working.slots)
            advance(sum(len(one) for one in batches[first : first + ranks.size]))
    return sums.all_reduce(checkpoint.mesh.world), views


def _frequencies(checkpoint: LoadedCheckpoint, data: PreparedData, totals: Totals) -> tuple[NDArray[np.float64], str]:
    """(token frequencies, where they come from): of the training text if its counts exist, else of the text read."""
    config = checkpoint.config
    candidates = [
        (config.memory.routing.frequencies, "the run's frequency file"),
        (str(data.folder / "counts.npz"), "the data set's token counts"),
        (None if config.data.path is None else f"{config.data.path}/counts.npz", "the data set's token counts"),
    ]
    for file, source in candidates:
        if file is not None and Path(file).is_file():
            return np.asarray(load_frequencies(file, vocabulary=config.model.vocabulary)), source
    counts = totals["occurrences"].numpy()
    return counts / counts.sum(), SAMPLE


def _activation(checkpoint: LoadedCheckpoint, totals: Totals, frequencies: NDArray[np.float64], source: str) -> Figures:
    sites = {site: layers for site, layers in injection_sites(checkpoint.model).items() if f"norms.{site}" in totals}
    if not sites:
        return not_applicable(f"{checkpoint.config.memory.method} adds no vector at a site")
    occurrences = totals["occurrences"].numpy()
    magnitudes = activation_magnitudes(totals, sites)
    return {
        "frequencies": source,
        **magnitude_by_frequency(magnitudes.pop("all"), frequencies, occurrences),
        "sites": {site: magnitude_by_frequency(one, frequencies, occurrences) for site, one in magnitudes.items()},
    }


def _views(checkpoint: LoadedCheckpoint, totals: Totals, views: ViewCosines) -> Figures:
    figures = view_cosines(totals, views.groups)
    return figures or not_applicable(f"{checkpoint.config.memory.method} has no two views at a site")


def _row_hits(checkpoint: LoadedCheckpoint, frequencies: NDArray[np.float64], source: str) -> Figures:
    refused = _not_read_by_token(checkpoint)
    if refused is not None:
        return refused
    return {"frequencies": source, **hit_concentration(frequencies, checkpoint.saved.routing)}


def _updates(
    checkpoint: LoadedCheckpoint, frequencies: NDArray[np.float64], source: str, thresholds: list[int]
) -> Figures:
    """`more_than`: counted if the run counted, else `expected`, which only rows read by token have."""
    if checkpoint.shards is None:
        return not_applicable(f"{checkpoint.config.memory.method} trains no tables")
    tokens = checkpoint.saved.facts["loader"]["position"] * checkpoint.config.model.sequence_length
    rows = checkpoint.shards[0].slab.rows
    figures: Figures = {"counted": checkpoint.config.memory.count_updates, "tokens": tokens, "rows": rows}
    refused = _not_read_by_token(checkpoint)
    if refused is None and source == SAMPLE:
        refused = not_applicable("the data set has no token counts (counts.npz)")
    if refused is None:
        expected = expected_update_shares(frequencies, checkpoint.saved.routing, rows, tokens, thresholds)
        figures |= {"frequencies": source, "expected": expected}
    if figures["counted"]:
        counts = [checkpoint.saved.tensor(f"tables.view-{shard.slab.view}.updates") for shard in checkpoint.shards]
        return figures | {"more_than": counted_update_shares(counts, rows, thresholds)}
    return refused or figures | {"more_than": figures["expected"]}


def _not_read_by_token(checkpoint: LoadedCheckpoint) -> Figures | None:
    """Why token frequencies do not predict row reads; None: they do."""
    method = method_of(checkpoint.config)
    if checkpoint.shards is None:
        return not_applicable(f"{method.name} trains no tables")
    routing = checkpoint.saved.routing
    expected = checkpoint.config.model.vocabulary if routing is None else routing.num_rows
    if method.looks_up_ngrams or any(shard.slab.rows != expected for shard in checkpoint.shards):
        return not_applicable(f"rows of {method.name} are not read by token")
    return None


@contextmanager
def _progress(checkpoint: LoadedCheckpoint, total: float, unit: str, title: str) -> Iterator[Callable[[float], None]]:
    """A progress bar on the first rank."""
    if not checkpoint.mesh.world.first or not total:
        yield lambda amount: None
        return
    with Progress(total, unit, title) as progress:
        yield progress.update
