"""The retrieval equation: rows of a slab -> one vector a token, and its backward pass.

    e[q, j] = sum over accesses n of token q:  c[n] * sigmoid(a[row_n, j]) * B[row_n, columns of table j]

The owner of the rows evaluates it, for itself and for every rank that requests a token. A row's gate is the same for
all its readers, so each row is scaled once and the sum runs over whole slab rows. Forward and backward are written out
by hand: nothing of a slab's size is ever allocated, the gradient covers the rows that were read and no others, and sums
run in a fixed order, so results repeat bitwise.

`Dedup` and `build_*_accesses` make the index tensors on the host, from token ids alone. No collectives.
Shapes: Q tokens requested from this owner, this rank's own first; N accesses, token by token; R distinct rows of them;
S rows of the shard; W slab width; J tables of a slab with `widths`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.parallel.device import pin_for, to_device

Integers = NDArray[Any]

# Forward: which rows some tokens read.


class Reads(ABC):
    """What `count` tokens read, as indices into the touched rows R."""

    count: int

    @abstractmethod
    def retrieve(self, scaled_RW: Tensor) -> Tensor:
        """One vector [Q, W] a token, the columns of all tables side by side. May be a view of the rows."""

    def retrieve_into(self, out_QW: Tensor, scaled_RW: Tensor) -> None:
        """The same into existing memory, which may have another dtype or device."""
        out_QW.copy_(pin_for(out_QW.device, self.retrieve(scaled_RW)), non_blocking=True)


@dataclass(frozen=True)
class ReadFirstRows(Reads):
    """Token q reads touched row q, with coefficient 1: a view, no copy."""

    count: int

    def retrieve(self, scaled_RW: Tensor) -> Tensor:
        return scaled_RW[: self.count]


@dataclass(frozen=True)
class ReadOneRow(Reads):
    """Each token reads one row, with coefficient 1."""

    count: int
    row_N: Tensor

    def retrieve(self, scaled_RW: Tensor) -> Tensor:
        return scaled_RW.index_select(0, self.row_N)

    def retrieve_into(self, out_QW: Tensor, scaled_RW: Tensor) -> None:
        if out_QW.dtype == scaled_RW.dtype and out_QW.device == scaled_RW.device:
            torch.index_select(scaled_RW, 0, self.row_N, out=out_QW)
        else:
            super().retrieve_into(out_QW, scaled_RW)


@dataclass(frozen=True)
class ReadWeightedRows(Reads):
    """Each token reads several rows and sums them with coefficients."""

    count: int
    row_N: Tensor
    starts_Q: Tensor
    """First access of each token."""
    coefficients_N: Tensor

    def retrieve(self, scaled_RW: Tensor) -> Tensor:
        return segment_sums(scaled_RW, self.row_N, self.starts_Q, self.coefficients_N)


def scale_rows(out_RW: Tensor, rows_RW: Tensor, gates_RJ: Tensor, widths: list[int]) -> None:
    """Rows times the sigmoid of their gates, table by table."""
    factors_RJ = torch.sigmoid(gates_RJ)
    for j, (out, rows) in enumerate(zip(out_RW.split(widths, dim=1), rows_RW.split(widths, dim=1), strict=True)):
        torch.mul(rows, factors_RJ[:, j : j + 1], out=out)


def segment_sums(values: Tensor, index_N: Tensor, starts: Tensor, coefficients_N: Tensor | None) -> Tensor:
    """For each segment of consecutive indices, the weighted sum of those rows of `values`. Coefficients default to
    1."""
    if index_N.numel() == 0:
        return values.new_zeros(starts.numel(), values.shape[1])
    weights = None if coefficients_N is None else coefficients_N.to(values.dtype)
    return F.embedding_bag(index_N, values, starts, mode="sum", per_sample_weights=weights)


# Both directions: all that a window reads from one shard.


@dataclass
class RowGradient:
    """Gradient of the rows (and gates) that were read, and of no others. `touched_R` holds distinct local rows."""

    touched_R: Tensor
    rows_RW: Tensor
    gates_RJ: Tensor | None
    """None: the table has no gates."""
    factor: float = 1.0
    """The gradient is `factor` times the stored numbers. The next reader multiplies."""


@dataclass(frozen=True)
class Accesses(ABC):
    """All reads of a window from one shard, known before any row is."""

    touched_R: Tensor
    """Distinct local rows that are read: those remote ranks request, ascending, then the rest, ascending."""
    num_remote: int
    """How many of them remote ranks request."""
    remote: Reads
    """Reads for the tokens that remote ranks request."""


@dataclass(frozen=True)
class GatheredAccesses(Accesses):
    """Local tokens are gathered like remote ones."""

    local: Reads
    """Reads for this rank's own tokens."""
    token_N: Tensor
    """The token of each access, sorted by row and then by token."""
    row_starts_R: Tensor
    """First of these accesses for each row."""
    row_coefficients_N: Tensor | None
    """Coefficients in the same order. None: all are 1."""

    def row_gradient(
        self, grads_QW: Tensor, gated: tuple[Tensor, Tensor] | None, widths: list[int], num_ranks: int
    ) -> RowGradient:
        """Gradient of the retrieved vectors -> mean over ranks of the gradient of rows and gates.

        `gated`: for tables with gates, the rows and gates that the forward pass read.
        """
        weights_N = self.row_coefficients_N
        if num_ranks > 1:  # the mean is taken inside the sum: no extra pass
            ones_N = torch.ones_like(self.token_N) if weights_N is None else weights_N
            weights_N = ones_N.to(grads_QW.dtype) / num_ranks
        rows_RW = segment_sums(grads_QW, self.token_N, self.row_starts_R, weights_N)
        if gated is None:
            return RowGradient(self.touched_R, rows_RW, None)
        read_RW, gates_RJ = gated
        scale_rows(rows_RW, rows_RW, gates_RJ, widths)
        pairs = zip(read_RW.split(widths, dim=1), rows_RW.split(widths, dim=1), strict=True)
        inner_RJ = torch.stack([(read * gradient).sum(1) for read, gradient in pairs], dim=1)
        return RowGradient(self.touched_R, rows_RW, inner_RJ * (1 - torch.sigmoid(gates_RJ)))


@dataclass(frozen=True)
class ZeroCopyAccesses(Accesses):
    """Zero-copy read of local rows: the working set begins with the touched rows themselves. A token reads one row,
    without coefficient or gate."""

    remote_token_N: Tensor | None
    """The remote token of each access, sorted by row. None: remote tokens already come in row order, one each."""
    row_starts_R: Tensor
    """First of these accesses for each row that remote ranks request."""

    def row_gradient(self, local_RW: Tensor, remote_QW: Tensor, num_ranks: int) -> RowGradient:
        """Adds the remote gradients to the local one in place. The mean over ranks becomes the gradient's factor."""
        if self.remote_token_N is not None:
            remote_QW = segment_sums(remote_QW, self.remote_token_N, self.row_starts_R, None)
        local_RW[: self.num_remote].add_(remote_QW)
        return RowGradient(self.touched_R, local_RW, None, 1 / num_ranks)


# Index tensors, made on the host.

SORT_ABOVE = 96
"""Dedup sorts where the limit exceeds this many numbers a value, and marks a table otherwise. 4,096 values take 0.08 ms
by marking and 0.16 ms by sorting below a limit of 75,968; 0.39 ms and 0.17 ms below a limit of 1.2 million."""


class Dedup:
    """Deduplicates integers below a limit: distinct values, ascending, and the index of each value among them."""

    def __init__(self, limit: int):
        self._limit = limit
        self._seen = np.zeros(limit, dtype=bool)
        self._index = np.empty(limit, dtype=np.int64)

    def __call__(self, values: Integers) -> tuple[Integers, Integers]:
        if values.size * SORT_ABOVE < self._limit:
            distinct, index = np.unique(values, return_inverse=True)
            return distinct.astype(np.int64), index.reshape(values.shape)
        self._seen[values] = True
        distinct = np.flatnonzero(self._seen)
        self._seen[distinct] = False
        self._index[distinct] = np.arange(len(distinct))
        return distinct, self._index[values]

    def count(self, values: Integers) -> int:
        return len(self(values)[0])


class TouchedRows:
    """Distinct local rows of some accesses: those that remote ranks request first, then the rest, both ascending."""

    def __init__(self, rows_N: Integers, num_local_accesses: int, dedup: Dedup):
        """The first `num_local_accesses` accesses are this rank's own."""
        rows_R, index_N = dedup(rows_N)
        requested_R = np.zeros(len(rows_R), dtype=bool)
        requested_R[index_N[num_local_accesses:]] = True
        order_R = np.concatenate((np.flatnonzero(requested_R), np.flatnonzero(~requested_R)))
        self.num_local_accesses, self.num_remote = num_local_accesses, int(requested_R.sum())
        self.rows_R: Integers = rows_R[order_R]
        self.index_N: Integers = np.argsort(order_R)[index_N]
        """Index of each access among the rows."""


def build_gathered_accesses(
    touched: TouchedRows,
    counts_Q: Integers | None,
    coefficients_N: NDArray[Any] | None,
    num_local: int,
    device: torch.device,
) -> GatheredAccesses:
    """Accesses token by token, `counts_Q` for each token (None: one each, without coefficients). The first `num_local`
    tokens are this rank's own."""
    index_N, num_local_accesses = touched.index_N, touched.num_local_accesses
    by_row_N, starts_R = _sort_by_row(index_N, len(touched.rows_R))
    token_N = None if counts_Q is None else np.repeat(np.arange(len(counts_Q)), counts_Q)

    def reads(tokens: slice, accesses: slice) -> Reads:
        if counts_Q is None or coefficients_N is None:
            return _one_row_reads(index_N[accesses], device)
        counts = counts_Q[tokens]
        return ReadWeightedRows(
            count=len(counts),
            row_N=_upload(index_N[accesses], device),
            starts_Q=_upload(np.cumsum(counts) - counts, device),
            coefficients_N=_upload(coefficients_N[accesses], device),
        )

    return GatheredAccesses(
        touched_R=_upload(touched.rows_R, device),
        num_remote=touched.num_remote,
        remote=reads(slice(num_local, None), slice(num_local_accesses, None)),
        local=reads(slice(num_local), slice(num_local_accesses)),
        token_N=_upload(by_row_N if token_N is None else token_N[by_row_N], device),
        row_starts_R=_upload(starts_R, device),
        row_coefficients_N=None if coefficients_N is None else _upload(coefficients_N[by_row_N], device),
    )


def build_zero_copy_accesses(touched: TouchedRows, device: torch.device) -> ZeroCopyAccesses:
    """One row a token; this rank's own tokens read the touched rows in place."""
    index_N = touched.index_N[touched.num_local_accesses :]
    by_row_N, starts_R = _sort_by_row(index_N, touched.num_remote)
    return ZeroCopyAccesses(
        touched_R=_upload(touched.rows_R, device),
        num_remote=touched.num_remote,
        remote=_one_row_reads(index_N, device),
        remote_token_N=None if _is_arange(index_N) else _upload(by_row_N, device),
        row_starts_R=_upload(starts_R, device),
    )


def _one_row_reads(index_N: Integers, device: torch.device) -> Reads:
    if _is_arange(index_N):
        return ReadFirstRows(len(index_N))
    return ReadOneRow(len(index_N), _upload(index_N, device))


def _sort_by_row(index_N: Integers, num_rows: int) -> tuple[Integers, Integers]:
    """(accesses sorted by row, first of them for each row)."""
    readers_R = np.bincount(index_N, minlength=num_rows)
    return np.argsort(index_N, kind="stable"), np.cumsum(readers_R) - readers_R


def _is_arange(index_N: Integers) -> bool:
    return np.array_equal(index_N, np.arange(len(index_N)))


def _upload(array: NDArray[Any], device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(array), device)
