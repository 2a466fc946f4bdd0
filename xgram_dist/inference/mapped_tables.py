"""Table vectors at inference, gathered from the files of a checkpoint.

The files are memory-mapped. A token's vector depends on its id alone, so a lookup reads the pages of a few rows; no
table is loaded, and processes on one machine share the pages. Rows are found whatever the layout of the run that saved
them, and are caught up when they are read (checkpoint/reader.py).
Shapes: U distinct tokens, N accesses, R distinct rows, W width of a table, J tables of a view.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.checkpoint.reader import CheckpointReader, FoundRows
from xgram_dist.inference.hf.decoder_tables import RowFormat, accesses_of, combined
from xgram_dist.model.methods.base import ComputedTables, table_layout
from xgram_dist.tables.layout import Slab

RECENT_BYTES = 64 << 20
FEW_TOKENS = 64
"""A lookup of at most so many tokens, as of a step of generation, is remembered."""


class MappedTables:
    """All trained tables of a checkpoint."""

    def __init__(self, reader: CheckpointReader, row_format: str = "fp32"):
        """`row_format`: of `decoder_tables.RowFormat`; rows are read as if they had been exported with it."""
        self._routed = reader.routing is not None
        self._views = [_ViewLookup(reader, slab, row_format) for slab in table_layout(reader.config).slabs]
        self._widths = {table.name: table.width for slab in table_layout(reader.config).slabs for table in slab.tables}
        self._most_recent = max(FEW_TOKENS, RECENT_BYTES // (4 * sum(self._widths.values())))
        self._recent: dict[int, Tensor] = {}
        """The vectors [sum of W] of tokens looked up lately; texts repeat their tokens. The oldest comes first."""

    @torch.no_grad()
    def vectors(self, tokens_U: Tensor) -> dict[str, Tensor]:
        """One fp32 vector for each token and table [U, W]; tokens are in host memory."""
        tokens: list[int] = tokens_U.tolist()
        if not 0 < len(tokens) <= FEW_TOKENS:
            return self._looked_up(tokens_U)
        new = [token for token in tokens if token not in self._recent]
        if new:
            found = self._looked_up(torch.tensor(new))
            side_by_side = torch.cat([found[name] for name in self._widths], 1)
            # Each of its own memory, which is free again when the token is forgotten.
            self._recent |= {token: row.clone() for token, row in zip(new, side_by_side, strict=True)}
        rows_UW = torch.stack([self._recent[token] for token in tokens])
        while len(self._recent) > self._most_recent:
            del self._recent[next(iter(self._recent))]
        return dict(zip(self._widths, rows_UW.split(list(self._widths.values()), 1), strict=True))

    def _looked_up(self, tokens_U: Tensor) -> dict[str, Tensor]:
        vectors: dict[str, Tensor] = {}
        if self._routed:
            for view in self._views:
                vectors |= view.routed_vectors(tokens_U)
        else:
            for view in self._views:
                vectors |= view.token_rows(tokens_U.numpy())
        return vectors


class StoredTables:
    """Computed tables, with vectors as if they had been exported with a row format."""

    def __init__(self, computed: ComputedTables, row_format: str):
        self.shapes = computed.shapes
        self._computed = computed
        self._stored = RowFormat(row_format, tuple(width for _, width in computed.shapes.values()))

    @torch.no_grad()
    def vectors(self, keys_U: Tensor) -> dict[str, Tensor]:
        vectors = self._computed.vectors(keys_U)
        rows_UW = torch.cat([vectors[name] for name in self.shapes], 1)
        decoded = self._stored.decode(self._stored.encode(rows_UW)).split(list(self._stored.widths), 1)
        return dict(zip(self.shapes, decoded, strict=True))


class _ViewLookup:
    """The tables of one view: their tokens read the same rows."""

    def __init__(self, reader: CheckpointReader, slab: Slab, row_format: str):
        self._tables = [table.name for table in slab.tables]
        self._widths = [table.width for table in slab.tables]
        self._widths_J = torch.tensor(self._widths)
        self._stored = None if row_format == "fp32" else RowFormat(row_format, tuple(self._widths))
        # Unverified: verification would read every row.
        self._saved = reader.saved_view(slab.view, verify=False)
        self._gated = f"tables.{self._tables[0]}.gates" in reader.manifest.tensors
        if reader.routing is not None:
            view = reader.routing.views[slab.view]
            self._offsets = torch.from_numpy(view.offsets.copy())
            self._rows_of_accesses = view.rows.astype(np.int64)
            self._coefficients = torch.from_numpy(view.coefficients.copy())

    def token_rows(self, rows_U: NDArray[Any]) -> dict[str, Tensor]:
        """Without routing a token's vector is its own row."""
        rows_R, index_U = np.unique(rows_U, return_inverse=True)
        index = torch.from_numpy(index_U)
        values = self._values("rows", self._saved.find(rows_R))
        if self._stored is not None:
            values = list(self._as_stored(torch.cat(values, 1)).split(self._widths, 1))
        return {name: rows_RW.index_select(0, index) for name, rows_RW in zip(self._tables, values, strict=True)}

    def routed_vectors(self, tokens_U: Tensor) -> dict[str, Tensor]:
        """The retrieval equation: gated rows, combined by the coefficients of the token's accesses."""
        accesses_N, starts_U = accesses_of(tokens_U, self._offsets)
        rows_R, inverse = np.unique(self._rows_of_accesses[accesses_N.numpy()], return_inverse=True)
        found = self._saved.find(rows_R)
        index_N, coefficients_N = torch.from_numpy(inverse), self._coefficients[accesses_N]
        rows_RW = torch.cat(self._values("rows", found), 1)
        if self._gated:
            gates_RJ = torch.stack(self._values("gates", found), 1)
            rows_RW *= torch.sigmoid(gates_RJ).repeat_interleave(self._widths_J, dim=1, output_size=rows_RW.shape[1])
        rows_RW = self._as_stored(rows_RW)
        vectors_UW = combined(rows_RW, index_N, starts_U, coefficients_N)
        return dict(zip(self._tables, vectors_UW.split(self._widths, dim=1), strict=True))

    def _as_stored(self, rows_RW: Tensor) -> Tensor:
        return rows_RW if self._stored is None else self._stored.decode(self._stored.encode(rows_RW))

    def _values(self, kind: str, found: FoundRows) -> list[Tensor]:
        """Rows [R, W] or gates [R] of each table, caught up."""
        missed = self._saved.missed(kind, found)
        return [self._saved.values(kind, name, found, missed) for name in self._tables]
