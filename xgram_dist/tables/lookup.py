"""The retrieval equation: rows of a slab -> one vector a token, and its backward pass.

    e[q, j] = sum over accesses n of token q:  c[n] * sigmoid(a[row_n, j]) * B[row_n, columns of table j]

The owner of the rows evaluates it, for itself and for every rank that requests a token. A row's gate is the same for
all its readers, so each row is scaled once and the sum runs over whole slab rows. Forward and backward are written out
by hand: nothing of a slab's size is ever allocated, the gradient covers the rows that were read and no others, and sums
run in a fixed order, so results repeat bitwise.

`touch_rows` and `build_*_accesses` make the index tensors on the host, from token ids alone. No collectives.
Shapes: Q tokens requested from this owner, this rank's own first; N accesses, token by token; R distinct rows of them;
S rows of the shard; W slab width; J tables of a slab with `widths`.
"""

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.parallel.device import PlanningPool, index_to_device, pin_for, to_device

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

SORT_ABOVE = 4
"""Dedup sorts where the limit exceeds this many numbers a value, and marks a table otherwise."""


class Dedup:
    """Deduplicates integers below a limit. Several threads may use it: each has its own tables."""

    def __init__(self, limit: int):
        self._limit, self._thread = limit, threading.local()

    def __call__(self, values: Integers) -> tuple[Integers, Integers]:
        """(distinct values, ascending; the index of each value among them)."""
        distinct = self.distinct(values)
        return distinct, self.translate(distinct, np.arange(len(distinct), dtype=np.int32), values)

    def distinct(self, values: Integers) -> Integers:
        """Ascending."""
        if values.size * SORT_ABOVE < self._limit:
            ordered = np.sort(values, axis=None)
            is_first = np.ones(len(ordered), dtype=bool)
            np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
            return ordered[is_first].astype(np.int64)
        if not hasattr(self._thread, "seen"):
            self._thread.seen = np.zeros(self._limit, dtype=bool)
        seen: NDArray[np.bool_] = self._thread.seen
        seen[values] = True
        distinct = np.flatnonzero(seen)
        seen[distinct] = False
        return distinct

    def translate(self, distinct: Integers, names: Integers, values: Integers) -> Integers:
        """For each value, the name (int32) of the distinct value that it equals."""
        if not hasattr(self._thread, "names"):
            self._thread.names = np.empty(self._limit, dtype=np.int32)
        self._thread.names[distinct] = names
        return self._thread.names.take(values)

    def count(self, values: Integers) -> int:
        return len(self.distinct(values))


@dataclass(frozen=True)
class TouchedRows:
    """Distinct local rows of some accesses: those that remote ranks request first, then the rest, both ascending."""

    rows_R: Integers
    num_remote: int
    """How many of the rows remote ranks request."""
    index_N: Integers
    """Index of each access among the rows."""
    num_local_accesses: int
    """This rank's own accesses, which are the first."""
    by_row_N: Integers
    """The gathered accesses sorted by row: all, or with zero-copy reads those of remote ranks."""
    row_starts_R: Integers
    """First of these for each row that is gathered."""


def touch_rows(rows_N: Integers, num_local_accesses: int, dedup: Dedup, *, zero_copy: bool = False) -> TouchedRows:
    """The rows of some accesses, the first `num_local_accesses` of which are this rank's own."""
    rows_N = rows_N.astype(np.int64)  # numpy indexes with 64 bits
    remote_R = dedup.distinct(rows_N[num_local_accesses:])
    local_R = np.setdiff1d(dedup.distinct(rows_N[:num_local_accesses]), remote_R, assume_unique=True)
    rows_R = np.concatenate((remote_R, local_R))
    index_N = dedup.translate(rows_R, np.arange(len(rows_R), dtype=np.int32), rows_N)
    by_row_N, row_starts_R = _sort_by_row(index_N[num_local_accesses:] if zero_copy else index_N)
    return TouchedRows(rows_R, len(remote_R), index_N, num_local_accesses, by_row_N, row_starts_R)


ACCESSES_PER_RANGE = 1 << 18
"""Of `RowRanges`: their tables and sorts then stay in a core's cache."""


class RowRanges:
    """`touch_rows` where each rank reads its rows in ascending order: by ranges of rows, in parallel.

    Of a range, the rows that remote ranks request go to the first part of all rows, the others to the second; their
    accesses likewise.
    """

    def __init__(self, segments: list[Integers], num_rows: int, *, zero_copy: bool = False):
        """`segments`: the rows that each rank reads, this rank's own first."""
        self._segments, self._zero_copy = segments, zero_copy
        self._starts = np.cumsum([0, *(len(segment) for segment in segments)])
        """First access of each segment."""
        self._count = max(1, int(self._starts[-1]) // ACCESSES_PER_RANGE)
        self._width = -(-num_rows // self._count)
        self._dedup = Dedup(self._width)
        edges = np.arange(self._count + 1) * self._width
        self._cuts = np.array([np.searchsorted(one, edges.astype(one.dtype)) for one in segments])
        """[segment, range]: its first entry in each range."""

    def touch(self, pool: PlanningPool) -> TouchedRows:
        pieces = pool.map(self._touch_range, range(self._count))
        num_accesses = [len(piece.by_row_N) for piece in pieces]
        of_remote = [
            int(piece.row_starts_R[piece.num_remote]) if len(piece.row_starts_R) > piece.num_remote else count
            for piece, count in zip(pieces, num_accesses, strict=True)
        ]
        num_remote, num_rows = [piece.num_remote for piece in pieces], [len(piece.rows_R) for piece in pieces]
        gathered_rows = sum(num_remote) if self._zero_copy else sum(num_rows)
        sizes = (sum(num_rows), int(self._starts[-1]), sum(num_accesses), gathered_rows)
        rows_R, index_N, by_row_N, row_starts_R = (np.empty(size, np.int32) for size in sizes)
        first_rows, first_accesses = _parts(num_remote, num_rows), _parts(of_remote, num_accesses)

        def merge(number: int) -> None:
            piece, num_remote = pieces[number], pieces[number].num_remote
            remote_row, local_row = first_rows[number]
            rows = piece.rows_R + number * self._width
            _put(rows_R, remote_row, rows[:num_remote])
            _put(rows_R, local_row, rows[num_remote:])
            is_local = piece.index_N >= num_remote
            index = piece.index_N + np.where(is_local, local_row - num_remote, remote_row)
            self._put_by_segment(index_N, number, index)
            remote_access, local_access = first_accesses[number]
            by_row, split = self._access_numbers(number)[piece.by_row_N], of_remote[number]
            _put(by_row_N, remote_access, by_row[:split])
            _put(by_row_N, local_access, by_row[split:])
            _put(row_starts_R, remote_row, piece.row_starts_R[:num_remote] + remote_access)
            _put(row_starts_R, local_row, piece.row_starts_R[num_remote:] + local_access - split)

        pool.map(merge, range(self._count))
        return TouchedRows(rows_R, sum(num_remote), index_N, len(self._segments[0]), by_row_N, row_starts_R)

    def _touch_range(self, number: int) -> TouchedRows:
        cuts = self._cuts[:, number : number + 2].tolist()
        parts = [segment[start:end] for segment, (start, end) in zip(self._segments, cuts, strict=True)]
        rows_N = np.concatenate(parts) - number * self._width
        return touch_rows(rows_N, len(parts[0]), self._dedup, zero_copy=self._zero_copy)

    def _put_by_segment(self, out_N: Integers, number: int, values: Integers) -> None:
        """From the accesses of a range to those of all."""
        done = 0
        for first, (start, end) in zip(
            self._starts.tolist(), self._cuts[:, number : number + 2].tolist(), strict=False
        ):
            out_N[first + start : first + end] = values[done : done + end - start]
            done += end - start

    def _access_numbers(self, number: int) -> Integers:
        """Of the gathered accesses of a range, among those of all."""
        start, end = self._cuts[:, number], self._cuts[:, number + 1]
        first = self._starts[:-1] + start
        if self._zero_copy:
            first, counts = first[1:] - len(self._segments[0]), (end - start)[1:]
        else:
            counts = end - start
        return np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)


def _parts(of_remote: list[int], of_all: list[int]) -> list[tuple[int, int]]:
    """Where each range begins in the first and in the second part."""
    remote, local = np.array(of_remote), np.array(of_all) - of_remote
    seconds = remote.sum() + np.cumsum(local) - local
    return list(zip((np.cumsum(remote) - remote).tolist(), seconds.tolist(), strict=True))


def _put(out: Integers, start: int, values: Integers) -> None:
    out[start : start + len(values)] = values


def build_gathered_accesses(
    touched: TouchedRows,
    counts_Q: Integers | None,
    coefficients_N: NDArray[Any] | None,
    num_local: int,
    device: torch.device,
) -> GatheredAccesses:
    """Accesses token by token, `counts_Q` for each token (None: one each, without coefficients). The first `num_local`
    tokens are this rank's own."""
    index_N, num_local_accesses, by_row_N = touched.index_N, touched.num_local_accesses, touched.by_row_N
    token_N = None if counts_Q is None else np.repeat(np.arange(len(counts_Q)), counts_Q)

    def reads(tokens: slice, accesses: slice) -> Reads:
        if counts_Q is None or coefficients_N is None:
            return _one_row_reads(index_N[accesses], device)
        counts = counts_Q[tokens]
        return ReadWeightedRows(
            count=len(counts),
            row_N=index_to_device(index_N[accesses], device),
            starts_Q=index_to_device(np.cumsum(counts) - counts, device),
            coefficients_N=to_device(torch.from_numpy(coefficients_N[accesses]), device),
        )

    return GatheredAccesses(
        touched_R=index_to_device(touched.rows_R, device),
        num_remote=touched.num_remote,
        remote=reads(slice(num_local, None), slice(num_local_accesses, None)),
        local=reads(slice(num_local), slice(num_local_accesses)),
        token_N=index_to_device(by_row_N if token_N is None else token_N[by_row_N], device),
        row_starts_R=index_to_device(touched.row_starts_R, device),
        row_coefficients_N=None
        if coefficients_N is None
        else to_device(torch.from_numpy(coefficients_N[by_row_N]), device),
    )


def build_zero_copy_accesses(touched: TouchedRows, device: torch.device) -> ZeroCopyAccesses:
    """One row a token; this rank's own tokens read the touched rows in place."""
    index_N = touched.index_N[touched.num_local_accesses :]
    return ZeroCopyAccesses(
        touched_R=index_to_device(touched.rows_R, device),
        num_remote=touched.num_remote,
        remote=_one_row_reads(index_N, device),
        remote_token_N=None if _is_arange(index_N) else index_to_device(touched.by_row_N, device),
        row_starts_R=index_to_device(touched.row_starts_R, device),
    )


def _one_row_reads(index_N: Integers, device: torch.device) -> Reads:
    if _is_arange(index_N):
        return ReadFirstRows(len(index_N))
    return ReadOneRow(len(index_N), index_to_device(index_N, device))


def _sort_by_row(index_N: Integers) -> tuple[Integers, Integers]:
    """(accesses sorted by row, stable; first of them for each row). Every row up to the last has an access.

    Sorts pairs (row, access) as single integers, which numpy does several times as fast as `argsort`.
    """
    bits = len(index_N).bit_length()
    pairs_N = index_N.astype(np.int64)
    pairs_N <<= bits
    pairs_N |= np.arange(len(index_N))
    pairs_N.sort()
    is_first = np.ones(len(index_N), dtype=bool)
    row_N = (pairs_N >> bits).astype(np.int32)
    np.not_equal(row_N[1:], row_N[:-1], out=is_first[1:])
    pairs_N &= (1 << bits) - 1
    return pairs_N, np.flatnonzero(is_first)


def _is_arange(index_N: Integers) -> bool:
    ends_match = len(index_N) == 0 or (index_N[0] == 0 and index_N[-1] == len(index_N) - 1)
    return bool(ends_match) and np.array_equal(index_N, np.arange(len(index_N)))
