"""Numbers of rows in 16 bits: read as fp32, and rounded at random when they are written.

A number between two neighbours of bf16 becomes the upper one with the probability of its distance from the lower one,
so that its expectation is exact, and small updates are not lost. The random bits are a function of (seed, step, global
row, table, column) and of what is rounded. So a run repeats bit for bit, and they do not depend on ranks, on resuming,
or on which rows are kept. A number that bf16 can hold is never changed.

    RowNoise    the random bits
    Numbers     one tensor of all rows: values, or a moment
Shapes: S rows, R rows of a step, W columns.
"""

import torch
from torch import Tensor

from xgram_dist.tables.initial_rows import hash_numbers, stream_key

KEY = "key"
"""The name of what is kept of a row for this: a hash of its global id. It is not saved."""
VALUES, FIRST, SECOND = range(3)
"""What is rounded."""
_LOW_BITS = 0xFFFF
_MIX_1, _MIX_2 = 0x7FEB352D, 0x846CA68B - (1 << 32)  # of the 32-bit finaliser lowbias32


def compute_dtype(stored: torch.dtype) -> torch.dtype:
    """The type in which numbers of this stored type are computed."""
    return torch.float32 if stored == torch.bfloat16 else stored


def column_keys(seed: int, names: list[str], widths: list[int], tensor_rank: int, device: torch.device) -> Tensor:
    """int32 [W]: a key of each column of tables side by side. `widths`: the columns held here, of `tensor_rank`."""
    keys = []
    for name, width in zip(names, widths, strict=True):
        numbers = torch.arange(tensor_rank * width, (tensor_rank + 1) * width, device=device)
        keys.append(_to_int32(hash_numbers(numbers, stream_key(seed, f"rounding/{name}"))))
    return torch.cat(keys)


def _to_int32(hashed: Tensor) -> Tensor:
    return (hashed >> 32).to(torch.int32)


class RowNoise:
    """Random bits for the numbers of a shard's rows."""

    def __init__(self, columns_W: Tensor, rows_S: Tensor):
        """`columns_W`: of `column_keys`. `rows_S`: int32, for the keys of the rows; see `name_rows`."""
        self.columns_W, self._rows_S = columns_W, rows_S

    def name_rows(self, rows_R: Tensor, ids_R: Tensor) -> None:
        """These local rows have these global ids."""
        self._rows_S.index_copy_(0, rows_R, row_keys(ids_R))

    def of(self, rows_R: Tensor, step: Tensor | int, kind: int) -> Tensor:
        """int32 [R, 1]: with a column's key, the random bits of an element. `kind`: what is rounded."""
        return element_noise(self._rows_S.index_select(0, rows_R), step, kind)


def row_keys(ids_R: Tensor) -> Tensor:
    return _to_int32(hash_numbers(ids_R, 0))


def element_noise(rows_R: Tensor, step: Tensor | int, kind: int) -> Tensor:
    """As `RowNoise.of`, of `row_keys`."""
    steps = step.to(torch.int64) if isinstance(step, Tensor) else step
    return _to_int32(hash_numbers(rows_R.to(torch.int64), 4 * steps + kind))[:, None]


def round_to_bf16(numbers_RW: Tensor, noise_R1: Tensor, columns_W: Tensor) -> Tensor:
    """fp32 to bf16, rounded at random. Plain operations on each element: a compiled pass can contain them."""
    bits = (noise_R1 ^ columns_W) * _MIX_1
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _MIX_2
    upper = numbers_RW.view(torch.int32) + ((bits >> 16) & _LOW_BITS)
    return (upper & ~_LOW_BITS).view(torch.float32).to(torch.bfloat16)


class Numbers:
    """One tensor of all rows [S, W], read and written in the type in which it is computed."""

    def __init__(self, stored_SW: Tensor, noise: RowNoise | None, kind: int):
        """`noise`: for numbers in bf16."""
        assert stored_SW.dtype != torch.bfloat16 or noise is not None
        self.stored, self._noise, self._kind = stored_SW, noise, kind
        self._rounds = stored_SW.dtype == torch.bfloat16

    def read(self, rows_R: Tensor, out_RW: Tensor) -> None:
        gather_rows(self.stored, rows_R, out_RW)

    def write(self, rows_R: Tensor, numbers_RW: Tensor, step: Tensor | int) -> None:
        """`step`: that the numbers belong to."""
        self.stored.index_copy_(0, rows_R, self.rounded(rows_R, numbers_RW, step))

    def rounded(self, rows_R: Tensor, numbers_RW: Tensor, step: Tensor | int) -> Tensor:
        """As they are stored."""
        if not self._rounds or self._noise is None:
            return numbers_RW
        return round_to_bf16(numbers_RW, self._noise.of(rows_R, step, self._kind), self._noise.columns_W)


def gather_rows(stored_SW: Tensor, rows_R: Tensor, out_RW: Tensor) -> None:
    """Rows of a tensor into one of its own type, or of a wider one."""
    if stored_SW.dtype == out_RW.dtype:
        torch.index_select(stored_SW, 0, rows_R, out=out_RW)
    else:
        out_RW.copy_(stored_SW.index_select(0, rows_R))
