"""Rows in blocks that stay in a CPU's cache while several operations pass over them."""

from collections.abc import Iterator

import torch
from torch import Tensor

# One buffer of a block. Larger ones fall out of the cache, smaller ones cost more calls.
BLOCK_BYTES = 512 * 1024


class Blocks:
    """Parts of a set of rows, and buffers to gather them into. On a device other than a CPU all rows are one part."""

    def __init__(self, values: Tensor):
        row_bytes = max(1, values.shape[1] * values.element_size())
        self._most_rows = max(1, BLOCK_BYTES // row_bytes) if values.device.type == "cpu" else None
        self._like, self._buffers = values, list[Tensor]()

    def parts(self, rows_R: Tensor) -> Iterator[slice]:
        size = self._most_rows or max(1, rows_R.numel())
        return (slice(start, start + size) for start in range(0, rows_R.numel(), size))

    def buffers(self, rows_B: Tensor, count: int) -> list[Tensor]:
        """Tensors [B, W] of arbitrary content. The next call gives the same ones."""
        if len(self._buffers) < count or self._buffers[0].shape[0] < rows_B.numel():
            rows = self._most_rows or rows_B.numel()
            self._buffers = [self._like.new_empty(rows, self._like.shape[1]) for _ in range(count)]
        return [buffer[: rows_B.numel()] for buffer in self._buffers[:count]]


def gather_parts(values: Tensor, rows_R: Tensor, parts: list[slice], out_RW: Tensor) -> Iterator[None]:
    """These rows of the values, part after part."""
    for part in parts:
        torch.index_select(values, 0, rows_R[part], out=out_RW[part])
        yield


def row_rates(rows_R: Tensor, cut: int, rates: tuple[float, float], dtype: torch.dtype) -> Tensor:
    """[R, 1]: the learning rate of each row, the first for rows < cut."""
    rate_R = torch.full(rows_R.shape, rates[1], dtype=dtype, device=rows_R.device)
    return rate_R.masked_fill_(rows_R < cut, rates[0])[:, None]
