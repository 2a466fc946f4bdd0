"""From a checkpoint to the training network and its tables, spread over any number of ranks, to look into.

Each rank has the backbone and the rows it owns; nothing is gathered, and there is no optimizer. Rows start as the run's
did, by seed and global number, and are replaced piece by piece by what the checkpoint has: in between, both are known.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xgram_dist.checkpoint.folder import checkpoints_at
from xgram_dist.checkpoint.weights import SavedWeights
from xgram_dist.config import Config
from xgram_dist.config.schema import ParallelConfig
from xgram_dist.inference.open import Checkpoint
from xgram_dist.memory.store import Store
from xgram_dist.memory.tables import store_of
from xgram_dist.memory.working_set import Lookup, WorkingSet
from xgram_dist.model.build import build_lookup, build_model
from xgram_dist.model.transformer import Transformer
from xgram_dist.optim.schedule import warmup_factor
from xgram_dist.parallel.mesh import Mesh, single_mesh
from xgram_dist.parallel.ranks import Ranks

PIECE_ELEMENTS = 1 << 22
"""Of a table, read at a time."""

Moved = Callable[[str, Tensor, Tensor, Tensor], None]
"""(table, global rows, initial rows, rows now)"""


@dataclass
class Opened:
    """A checkpoint's network and tables on the ranks."""

    saved: SavedWeights
    config: Config
    mesh: Mesh
    device: torch.device
    model: Transformer
    lookup: Lookup

    @property
    def step(self) -> int:
        return int(self.saved.facts["step"])

    @property
    def store(self) -> Store | None:
        return store_of(self.lookup)

    @torch.no_grad()
    def forward(self, tokens_BT: Tensor) -> WorkingSet:
        """Of tokens in host memory. Every rank must call it as often."""
        working = self.lookup.fetch(self.lookup.plan(tokens_BT, whole=True).result()[0], training=False)
        warmup = torch.tensor(warmup_factor(self.config, self.step), device=self.device, dtype=torch.float64)
        self.model(tokens_BT.to(self.device), working.slots, working.values, warmup)
        return working

    def read_rows(self, moved: Moved, progress: Callable[[int], Any]) -> None:
        """The checkpoint's rows in place of the initial ones; `progress` is told the bytes."""
        for state in self.store.states if self.store is not None else ():
            for number, (name, columns) in enumerate(state.slab.columns().items()):
                step = max(1, PIECE_ELEMENTS // (columns.stop - columns.start))
                for start in range(0, len(state.owned), step):
                    rows = state.owned[start : start + step]
                    now = self.saved.rows(f"tables.{name}.rows", rows.cpu().numpy())
                    place = state.rows[start : start + step, columns]
                    moved(name, rows.cpu(), place.cpu(), now)
                    place.copy_(now)
                    progress(now.nbytes)
                if state.gates is not None:
                    gates = self.saved.rows(f"tables.{name}.gates", state.owned.cpu().numpy())
                    state.gates[:, number] = gates.to(state.gates.device)

    def row_bytes(self) -> int:
        """What `read_rows` will read here."""
        return 0 if self.store is None else sum(state.rows.nbytes for state in self.store.states)


def open_checkpoint(
    path: Path, ranks: Ranks, device: torch.device, end_of_text: int, precision: str | None = None
) -> Opened:
    """A checkpoint, or a run's newest; table rows are still those the run started from.

    `end_of_text`: the token that ends a document. `precision`: of the computation, instead of the run's."""
    # A run may save while ranks look for it: the first one's choice is everyone's.
    folder = Path(ranks.gather_objects(str(checkpoints_at(path)[-1]))[0])
    saved = SavedWeights(folder)
    config = _alone(saved.config, precision)
    mesh = single_mesh(ranks)
    model = build_model(config, device, end_of_text, mesh.tensor)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved.whole(f"backbone.{name}"))
    lookup = build_lookup(config, saved.routing, device, mesh, **_keys(saved, end_of_text))
    return Opened(saved, config, mesh, device, model.eval(), lookup)


def _keys(saved: SavedWeights, end_of_text: int) -> dict[str, Any]:
    """What a method that looks up n-grams has saved of them; nothing of the others."""
    if saved.facts.get("keys") is None:
        return {}
    return {"keys": Checkpoint.find(saved.folder).keys(), "end_of_text": end_of_text}


def _alone(config: Config, precision: str | None) -> Config:
    """The same network without what only training needs."""
    train = {"compile": False, "activation_checkpointing": False, "precision": precision or config.train.precision}
    return config.model_copy(
        update={
            "parallel": ParallelConfig(engine="replicated"),
            "train": config.train.model_copy(update=train),
        }
    )
