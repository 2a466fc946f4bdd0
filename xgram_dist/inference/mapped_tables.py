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
from xgram_dist.inference.hf.decoder import accesses_of, combined
from xgram_dist.model.methods.base import table_layout
from xgram_dist.tables.layout import Slab


class MappedTables:
    """All trained tables of a checkpoint."""

    def __init__(self, reader: CheckpointReader):
        self._routed = reader.routing is not None
        self._views = [_ViewLookup(reader, slab) for slab in table_layout(reader.config).slabs]

    @torch.no_grad()
    def vectors(self, tokens_U: Tensor) -> dict[str, Tensor]:
        """One fp32 vector for each token and table [U, W]; tokens are in host memory."""
        vectors: dict[str, Tensor] = {}
        if self._routed:
            for view in self._views:
                vectors |= view.routed_vectors(tokens_U)
        else:
            for view in self._views:
                vectors |= view.token_rows(tokens_U.numpy())
        return vectors


class _ViewLookup:
    """The tables of one view: their tokens read the same rows."""

    def __init__(self, reader: CheckpointReader, slab: Slab):
        self._tables = [table.name for table in slab.tables]
        self._widths = [table.width for table in slab.tables]
        self._widths_J = torch.tensor(self._widths)
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
        return {
            name: values_RW.index_select(0, index)
            for name, values_RW in zip(self._tables, self._values("rows", self._saved.find(rows_R)), strict=True)
        }

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
        vectors_UW = combined(rows_RW, index_N, starts_U, coefficients_N)
        return dict(zip(self._tables, vectors_UW.split(self._widths, dim=1), strict=True))

    def _values(self, kind: str, found: FoundRows) -> list[Tensor]:
        """Rows [R, W] or gates [R] of each table, caught up."""
        missed = self._saved.missed(kind, found)
        return [self._saved.values(kind, name, found, missed) for name in self._tables]
