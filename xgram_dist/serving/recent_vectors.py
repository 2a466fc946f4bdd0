"""Vectors of the tokens read lately: those before a position have been read for an earlier one, and texts repeat.

The buffer is on the device of the network. When it is full, it starts again from nothing; the tokens of a batch have to
fit, or are read for that batch alone.
Shapes: T positions, K tokens of a position, U vectors, W columns of all tables, J tables.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.inference.hf.decoder_layers import CONV_EPS
from xgram_dist.parallel.device import index_to_device, to_device
from xgram_dist.serving.mapped_rows import RowReader

BUFFER_BYTES = 64 << 20


class RecentVectors:
    def __init__(self, reader: RowReader, num_tokens: int, normalised: bool):
        """`normalised`: whether convolutions read normalised vectors."""
        self._reader, self._normalised = reader, normalised
        tables, device = reader.tables, reader.copies.device
        capacity = max(2, min(num_tokens + 1, BUFFER_BYTES // (4 * tables.width)))
        widths = torch.tensor([table["width"] for table in tables.tables])
        members = torch.eye(len(widths)).repeat_interleave(widths, 0)
        self._means_WJ = to_device(members / widths, device)
        self._vectors = torch.zeros(capacity, tables.width, device=device)
        self._scales = torch.zeros(capacity, len(widths), device=device)
        # Rows by token; the last is that of token -1, none, whose vector is the zero in row 0.
        self._row_of = np.full(num_tokens + 1, -1, dtype=np.int64)
        self._row_of[-1] = 0
        self._used = 1

    def find(self, tokens_TK: NDArray[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """(the rows [T, K] of the tokens' vectors, vectors [U, W], scales [U, J]); -1 stands for no token."""
        rows_TK = self._row_of[tokens_TK]
        if rows_TK.min() < 0:
            new = np.unique(tokens_TK[rows_TK < 0])
            if self._used + len(new) > len(self._vectors):
                self._row_of[:-1] = -1
                self._used = 1
                new = np.unique(tokens_TK[tokens_TK >= 0])
            if 1 + len(new) > len(self._vectors):
                return self._for_this_batch(tokens_TK, new)
            end = self._used + len(new)
            self._read(torch.from_numpy(new), self._vectors[self._used : end], self._scales[self._used : end])
            self._row_of[new] = np.arange(self._used, end)
            self._used = end
            rows_TK = self._row_of[tokens_TK]
        return index_to_device(rows_TK, self._vectors.device), self._vectors, self._scales

    def _for_this_batch(self, tokens_TK: NDArray[Any], tokens_U: NDArray[Any]) -> tuple[Tensor, Tensor, Tensor]:
        vectors = self._vectors.new_zeros(1 + len(tokens_U), self._vectors.shape[1])
        scales = self._scales.new_zeros(1 + len(tokens_U), self._scales.shape[1])
        self._read(torch.from_numpy(tokens_U), vectors[1:], scales[1:])
        rows_TK = np.where(tokens_TK < 0, 0, np.searchsorted(tokens_U, tokens_TK) + 1)
        return index_to_device(rows_TK, vectors.device), vectors, scales

    def _read(self, tokens_U: Tensor, vectors_UW: Tensor, scales_UJ: Tensor) -> None:
        self._reader.read(tokens_U, vectors_UW)
        if self._normalised:
            torch.rsqrt(vectors_UW.square() @ self._means_WJ + CONV_EPS, out=scales_UJ)
