"""What every table optimizer shares: its interface, rows between fetch and update, blocks that fit a cache.

A row optimizer updates one tensor `values` [S, W] in place: S rows of this rank, W columns. It gets the gradients of
the rows that a step touched, and of no others. Shapes in this folder: R rows of a step (distinct), B rows of a block, J
tables side by side.

    pending = optimizer.begin(rows_R)         rows are about to be read, and updated afterwards
    pending.gather(segment, out_RW)           current values, segment by segment
    optimizer.update_pending(pending, ...)    the step; or nothing, if the step is skipped

Where a step has several windows the rows are caught up in place (`catch_up`), read, and updated once (`update`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xgram_dist.parallel.device import advise_huge_pages, writes_in_any_order
from xgram_dist.tables.optimizers.rounding import compute_dtype, gather_rows
from xgram_dist.tables.records import Records


@dataclass
class OptimizerState:
    """Everything needed, beside the values, to resume bit for bit; live tensors by name."""

    columns: dict[str, Tensor] = field(default_factory=dict)
    """Shaped like the values [S, W]."""
    tables: dict[str, Tensor] = field(default_factory=dict)
    """One number a row and table [S, J]."""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """One number a row [S]."""
    replicated: dict[str, Tensor] = field(default_factory=dict)
    """Small, and the same on every rank."""


class StateMemory(ABC):
    """Where an optimizer keeps its state of each row: zeros at the start."""

    max_rows: int
    """Rows of the shard, whether they exist already or not."""

    @abstractmethod
    def columns(self, name: str) -> Tensor:
        """Shaped like the values [S, W]."""

    @abstractmethod
    def tables(self, name: str, count: int) -> Tensor:
        """One number a row and table [S, J]."""

    @abstractmethod
    def steps(self, name: str) -> Tensor:
        """One int32 a row [S]."""


class OwnMemory(StateMemory):
    """Tensors of their own, beside the values."""

    def __init__(self, values_SW: Tensor, dtype: torch.dtype | None = None):
        """`dtype`: of numbers shaped like the values; by default the type in which those are computed."""
        self._values, self.max_rows = values_SW, values_SW.shape[0]
        self._dtype = dtype or compute_dtype(values_SW.dtype)

    def columns(self, name: str) -> Tensor:
        return advise_huge_pages(torch.empty_like(self._values, dtype=self._dtype)).zero_()

    def tables(self, name: str, count: int) -> Tensor:
        return self._values.new_zeros(self._values.shape[0], count)

    def steps(self, name: str) -> Tensor:
        return torch.zeros(self._values.shape[0], dtype=torch.int32, device=self._values.device)


class RecordMemory(StateMemory):
    """Fields of the records that hold the values, too."""

    def __init__(self, records: Records, values: str):
        """`values`: the field of the values."""
        self._records, self._values, self.max_rows = records, values, records.max_rows

    def columns(self, name: str) -> Tensor:
        return self._records.field(f"{self._values}.{name}")

    def tables(self, name: str, count: int) -> Tensor:
        return self.columns(name)

    def steps(self, name: str) -> Tensor:
        return self.columns(name)


class PendingRows:
    """Rows between fetch and update. The table holds their current values."""

    def __init__(self, values_SW: Tensor, rows_R: Tensor):
        self._values_SW, self.rows_R = values_SW, rows_R

    def gather(self, segment: slice, out_RW: Tensor) -> None:
        """Current values of `rows_R[segment]` into `out_RW[segment]`."""
        gather_rows(self._values_SW, self.rows_R[segment], out_RW[segment])

    def values(self) -> Tensor:
        """Current values of all rows [R, W]; read only."""
        return self._values_SW.index_select(0, self.rows_R).to(compute_dtype(self._values_SW.dtype))


class RowOptimizer(ABC):
    """An optimizer whose rows are always current in the table overrides `update`, `nbytes` and `state` alone."""

    def __init__(self, values_SW: Tensor, num_vip: int):
        """The first `num_vip` local rows are VIP rows, with a learning rate of their own."""
        self.values, self.num_vip = values_SW, num_vip
        self.num_rows = values_SW.shape[0]
        """Rows that exist: the first ones. Fewer than the values have room for where rows are created when touched."""
        self.sweeps = True
        """Whether an update calls `catch_up_all` when it is due. Otherwise the caller does, when `sweep_due`."""

    def name_rows(self, rows_R: Tensor, ids_R: Tensor) -> None:
        """These local rows have these global ids. Called once for each row, before anything is written."""
        return

    @property
    def sweep_due(self) -> bool:
        return False

    def start_(self, values_RW: Tensor, is_vip_R: Tensor, ids_R: Tensor) -> dict[str, int]:
        """Apply to initial values, in place, what their rows missed since the first step, as far as `catch_up` will
        not. Returns what is then kept of each row: numbers by the names of `state().rows`, zeros for all else.
        `ids_R`: global row ids. The values may be on another device than those of the optimizer."""
        return {}

    def begin(self, rows_R: Tensor) -> PendingRows:
        """Rows that are read now and updated by the next `update_pending`. Nothing changes until then."""
        return PendingRows(self.values, rows_R)

    def update_pending(
        self, pending: PendingRows, gradient_RW: Tensor, rates: tuple[float, float], factor: float
    ) -> None:
        """One optimizer step on rows of `begin`. Arguments as in `update`."""
        self.update(pending.rows_R, gradient_RW, rates, factor)

    @abstractmethod
    def update(self, rows_R: Tensor, gradient_RW: Tensor, rates: tuple[float, float], factor: float = 1.0) -> None:
        """One optimizer step. `rates`: learning rate of VIP rows, and of the others. The gradient is `factor` times
        `gradient_RW`, which is overwritten. Every row caught up without moments since the last update is among
        `rows_R`."""

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held beside the values."""

    @abstractmethod
    def state(self) -> OptimizerState:
        """For a checkpoint; nothing changes."""

    def load_replicated(self, saved: dict[str, Tensor]) -> dict[str, int]:
        """The other tensors of `state` have been overwritten with saved ones; these are its saved `replicated`. Returns
        numbers by the names of `state().rows` that the caller writes for all rows, where another optimizer did not save
        them."""
        return {}

    def catch_up(self, rows_R: Tensor, *, moments: bool = False) -> None:
        """Apply the steps that these rows missed, in place: to their values, and with `moments` (no update follows) to
        their moments."""
        return

    def catch_up_all(self) -> None:
        """Apply all missed steps to all rows and moments."""
        return

    def start_over(self) -> None:
        """The caller has caught up all rows and moments: missed steps count from now."""
        return


class FrozenRows(RowOptimizer):
    """Rows that are only read: no state, no update."""

    def update(self, rows_R: Tensor, gradient_RW: Tensor, rates: tuple[float, float], factor: float = 1.0) -> None:
        raise AssertionError("frozen tables are not updated")

    def nbytes(self) -> int:
        return 0

    def state(self) -> OptimizerState:
        return OptimizerState()


def row_rates(rows_R: Tensor, num_vip: int, rates: tuple[float, float], dtype: torch.dtype) -> Tensor:
    """[R, 1]: the learning rate of each row; the first rate for VIP rows."""
    rate_R = torch.full(rows_R.shape, rates[1], dtype=dtype, device=rows_R.device)
    return rate_R.masked_fill_(rows_R < num_vip, rates[0])[:, None]


# Blocks of rows

BLOCK_BYTES = 512 * 1024
"""One buffer of a block. Larger ones fall out of a CPU's cache, smaller ones cost more calls."""


class RowBlocks:
    """Cuts rows into blocks that stay in a CPU's cache while several operations pass over them, and holds the buffers
    to gather a block into. On other devices all rows are one block."""

    def __init__(self, values_SW: Tensor):
        self._like, self._buffers = values_SW.new_empty(0, dtype=compute_dtype(values_SW.dtype)), list[Tensor]()
        self._width = values_SW.shape[1]
        row_bytes = max(1, self._width * self._like.element_size())
        self._max_rows = max(1, BLOCK_BYTES // row_bytes) if values_SW.device.type == "cpu" else None

    def slices(self, rows_R: Tensor) -> Iterator[slice]:
        size = self._max_rows or max(1, rows_R.numel())
        return (slice(start, start + size) for start in range(0, rows_R.numel(), size))

    def buffers(self, rows_B: Tensor, count: int) -> list[Tensor]:
        """Uninitialised tensors [B, W]. The next call returns the same memory."""
        if len(self._buffers) < count or self._buffers[0].shape[0] < rows_B.numel():
            rows = self._max_rows or rows_B.numel()
            self._buffers = [self._like.new_empty(rows, self._width) for _ in range(count)]
        return [buffer[: rows_B.numel()] for buffer in self._buffers[:count]]


# Compiled passes over gathered rows: one loop for any number of rows.


def compile_pass(function: Callable[..., Any]) -> Callable[..., Any]:
    # Fused multiply-add: on a CPU these passes are as much arithmetic as memory traffic.
    options: dict[str, str | int | bool | Callable[..., Any]] = {"cpp.enable_floating_point_contract_flag": "fast"}
    compiled = torch.compile(function, fullgraph=True, options=options)

    def run(*arguments: Any) -> Any:
        # Rows are distinct, so that writing them repeats bitwise. Inductor cannot know: in deterministic mode it would
        # write to temporaries, and scatter them by operations of their own.
        with writes_in_any_order(arguments[0].device):
            return compiled(*arguments)

    return run


def mark_rows_dynamic(*tensors: Tensor) -> None:
    """The first dim is the number of rows: no recompilation when it changes."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def alias(tensor: Tensor) -> Tensor:
    """The same memory as a tensor that the compiler takes for another one. A pass that reads distinct rows and then
    writes them never reads a row after writing it, but the compiler cannot know that: without the alias it would write
    to a temporary first."""
    return torch.utils.dlpack.from_dlpack(tensor)
