"""The weights of a checkpoint, read without the run that saved it: tables in global row order, rows up to date.

    backbone.NAME                           fp32 master weights
    tables.layers.LAYER.SITE.VIEW.rows      [S, width]; .gates [S]

What an optimizer that catches up has still to do for a row is done on the way. Reading is by boxes and rows, so that
nothing has to be whole in memory.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.checkpoint.boxes import Box, Spread
from xgram_dist.checkpoint.files import NAMES
from xgram_dist.checkpoint.fits import saved_config
from xgram_dist.checkpoint.load import whole_tensors
from xgram_dist.checkpoint.manifest import Manifest
from xgram_dist.checkpoint.raw import DamagedFileError
from xgram_dist.checkpoint.rows import read_rows, saved_placement, saved_positions
from xgram_dist.checkpoint.state import SUFFIX
from xgram_dist.checkpoint.storage import FolderReader
from xgram_dist.memory.layout import plan_slabs
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.memory.routing.views import View
from xgram_dist.optim.rows.catch_up import SavedCatchUp

ROUTING = "routing.npz"
PIECE_BYTES = 32 << 20
"""Of one piece of a tensor that is read in pieces."""


class SavedWeights:
    def __init__(self, folder: Path):
        self.folder, self.manifest = folder, Manifest.read(folder)
        self.facts = self.manifest.run
        self.config = saved_config(folder, self.facts)
        self.reader = FolderReader(folder, self.manifest)
        self.routing = None if self.facts["routing"] is None else self._routing(self.facts["routing"])
        self._slabs: dict[str, int] = {}
        slabs = plan_slabs(self.config)
        for number, slab in enumerate(slabs):
            self._slabs |= dict.fromkeys(slab.columns(), number)
        self._positions: NDArray[Any] = np.empty(0, dtype=np.int64)
        if slabs:
            placement = saved_placement(folder, self.facts, self.routing, slabs[0].rows)
            self._positions = saved_positions(placement)
        self._catching_up: dict[tuple[int, str], SavedCatchUp] = {}

    def _routing(self, expected: str) -> Routing:
        if ROUTING not in self.manifest.files:
            raise DamagedFileError(f"'{self.folder}' has no {ROUTING}")
        routing = Routing.load(self.folder / ROUTING)
        if routing.sha256() != expected:
            raise DamagedFileError(f"'{self.folder / ROUTING}' is not the routing the checkpoint was saved with")
        return routing

    def shapes(self) -> dict[str, list[int]]:
        """Every weight by name: the backbone's, then the tables'."""
        moments = tuple(suffix for suffix in SUFFIX.values() if suffix)
        entries = self.manifest.tensors
        names = [name for name in entries if name.startswith("backbone.") and not name.endswith(moments)]
        names += [f"tables.{name}.{what}" for name in self._slabs for what in ("rows", "gates")]
        return {name: entries[name].shape for name in names if name in entries}

    def needed(self, name: str) -> list[str]:
        """The tensors of the checkpoint that are read for a weight."""
        if name.startswith("backbone."):
            return [name]
        table, what = name.removeprefix("tables.").rsplit(".", 1)
        prefix = f"tables.slab-{self._slabs[table]}.{what}."
        beside = [one for one in self.manifest.tensors if one.startswith(prefix)]
        return [name, *(f"{name}.{key}" for key in ("first", "second") if beside and self._catches_up), *beside]

    @property
    def _catches_up(self) -> bool:
        return bool(self.facts["table_optimizer"] == "catch_up")

    def view_of(self, table: str) -> View | None:
        """The token -> row map of a table; None: row = token id."""
        return None if self.routing is None else self.routing.views[int(table.rsplit(".", 1)[1])]

    def whole(self, name: str) -> Tensor:
        return torch.cat(list(self.pieces(name))).view(self.manifest.tensors[name].shape)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """The weight from its first row to its last, some rows at a time."""
        entry = self.manifest.tensors[name]
        if not entry.shape:
            yield self._box(name, [], [])[None]
            return
        row_bytes = max(1, self.manifest.bytes_of(name) // max(1, entry.shape[0]))
        step = max(1, PIECE_BYTES // row_bytes)
        for start in range(0, entry.shape[0], step):
            stop = min(start + step, entry.shape[0])
            if name.startswith("tables."):
                yield self.rows(name, np.arange(start, stop))
            else:
                rest = entry.shape[1:]
                yield self._box(name, [start, *(0 for _ in rest)], [stop - start, *rest])

    def _box(self, name: str, offsets: list[int], sizes: list[int]) -> Tensor:
        entry = self.manifest.tensors[name]
        box, filled = torch.empty(sizes, dtype=NAMES[entry.dtype]), 0
        for chunk in entry.chunks:
            first = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
            ends = zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            last = [min(a + m, b + n) for a, m, b, n in ends]
            if all(a < b for a, b in zip(first, last, strict=True)):
                here = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, offsets, strict=True))
                there = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, chunk.offsets, strict=True))
                box[here] = self.reader.chunk(chunk, entry.dtype)[there]
                filled += box[here].numel()
        if filled < box.numel():
            raise DamagedFileError(f"the checkpoint '{self.folder}' does not hold all of '{name}'")
        return box

    def rows(self, name: str, rows_R: NDArray[Any], columns: slice | None = None) -> Tensor:
        """These global rows of a table, or of its gates, up to date: [R, columns], or [R]."""
        table, what = name.removeprefix("tables.").rsplit(".", 1)
        positions_R = self._positions[rows_R]
        values = self._gather(name, positions_R, columns)
        slab = self._slabs[table]
        if self._catches_up:
            steps_R = self._gather(f"tables.slab-{slab}.{what}.current", positions_R, None)
            moments = [self._gather(f"{name}.{key}", positions_R, columns) for key in ("first", "second")]
            vip = torch.from_numpy(rows_R < (self.routing.vip_rows if self.routing is not None else 0))
            as_rows = [one.view(len(rows_R), -1) for one in (values, *moments)]
            catch_up = self._catch_up(slab, what)
            catch_up.settle_(as_rows[0], as_rows[1], as_rows[2], catch_up.since(steps_R, vip))
        return values

    def _catch_up(self, slab: int, what: str) -> SavedCatchUp:
        if (slab, what) not in self._catching_up:
            saved = whole_tensors(self.reader, f"tables.slab-{slab}.{what}.")
            optimizer = self.config.optimizer
            self._catching_up[slab, what] = SavedCatchUp(optimizer.betas, optimizer.eps, saved)
        return self._catching_up[slab, what]

    def _gather(self, name: str, positions_R: NDArray[Any], columns: slice | None) -> Tensor:
        if name not in self.manifest.tensors:
            raise DamagedFileError(f"the checkpoint '{self.folder}' has no '{name}'")
        entry = self.manifest.tensors[name]
        sizes, offsets = [len(positions_R), *entry.shape[1:]], [0] * len(entry.shape)
        if columns is not None and len(sizes) == 2:
            sizes[1], offsets[1] = columns.stop - columns.start, columns.start
        values = torch.empty(sizes, dtype=NAMES[entry.dtype])
        spread = Spread(tuple(entry.shape), values.dtype, [Box(tuple(offsets), values)])
        read_rows(self.reader, {name: spread}, positions_R)
        return values
