"""Initial table rows: each element is a function of (seed, table, global row, column) alone.

A rank generates just the rows it owns, and a table is the same however it is sharded. Counter-based: every element
hashes its own position (splitmix64 finaliser), so there is no generator state and any device can do it.
"""

import hashlib
import math

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.tables.layout import Slab

INIT_ELEMENTS = 1 << 20
"""Elements initialised at a time; bounds the temporary memory."""
CUT = 3.0
"""Standard deviations at which the normal is truncated."""

_STEP = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def stream_key(seed: int, name: str) -> int:
    """A signed 64-bit key that differs between seeds and names."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def hash_numbers(numbers: Tensor, key: Tensor | int) -> Tensor:
    """int64, of int64: different streams of bits for different keys."""
    return _mix(numbers * _STEP + key)


def initial_rows(rows: Tensor, width: int, std: float, seed: int, name: str, first_column: int = 0) -> Tensor:
    """Truncated normal vectors [len(rows), width] in fp32 for the given global row numbers (int64)."""
    row_key = hash_numbers(rows.to(torch.int64)[:, None], stream_key(seed, name))
    column = first_column + torch.arange(1, width + 1, device=rows.device, dtype=torch.int64)[None, :]
    bits = _shift_right(_mix(row_key + column * _STEP), 40)  # 24 bits: exact in fp32
    uniform = (bits.float() + 0.5) / (1 << 24)
    # Inverse of the normal distribution function, restricted to +-CUT.
    low = 0.5 * (1 + math.erf(-CUT / math.sqrt(2)))
    centred = 2 * (low + uniform * (1 - 2 * low)) - 1
    return (torch.erfinv(centred) * math.sqrt(2)).clamp_(-CUT, CUT) * std


class InitialValues:
    """The values that rows and gates of a slab have before training."""

    def __init__(self, config: Config, slab: Slab, tensor_rank: int):
        self._slab, self._tensor_rank = slab, tensor_rank
        self._std, self._seed, self._gate = config.model.init_std, config.train.seed, config.memory.row_gate_init

    def fill_gates(self, gates_SJ: Tensor, row_ids_S: Tensor) -> None:
        gates_SJ.fill_(self._gate)

    def fill_rows(self, rows_SW: Tensor, row_ids_S: Tensor) -> None:
        """`row_ids_S`: the global id of each row."""
        for table in self._slab.tables:
            columns = self._slab.columns()[table.name]
            step = max(1, INIT_ELEMENTS // table.width)
            for start in range(0, len(row_ids_S), step):
                rows_SW[start : start + step, columns] = initial_rows(
                    row_ids_S[start : start + step],
                    table.width,
                    self._std,
                    self._seed,
                    table.name,
                    self._tensor_rank * table.width,
                )
