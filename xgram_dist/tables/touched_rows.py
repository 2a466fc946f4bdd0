"""Touched rows: the distinct rows of a shard that some accesses read, and the accesses of each row.

In: the local rows that the tokens requested from an owner read, this rank's own first, then those of the other ranks.
Out: `TouchedRows`, index arrays in host memory. A part of planning: no device, no collectives.

    touch_rows   accesses in any order
    RowRanges    each rank's rows ascend, as where a key is a row: millions of accesses, in parallel

`Dedup` finds distinct integers, for tokens and n-grams as well (requests.py).
Shapes: N accesses, R distinct rows of them.
"""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.parallel.device import PlanningPool

Integers = NDArray[Any]

SORT_ABOVE = 4
"""Dedup sorts where the limit exceeds this many numbers a value, and marks a table otherwise. 50,000 values below
600,000 take 0.15 ms by sorting and 0.7 ms by marking; 10 million below 3.6 million take 13 ms by marking."""


LARGEST_TABLE = 1 << 26
"""Dedup has no tables for limits above, as n-grams may have: names are found by bisection."""
MAX_INT32 = 2**31 - 1


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
        if values.size * SORT_ABOVE < self._limit or self._limit > LARGEST_TABLE:
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
        if self._limit > LARGEST_TABLE:
            order = np.argsort(distinct, kind="stable")
            return names.astype(np.int32, copy=False)[order][np.searchsorted(distinct[order], values)]
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
        self._cuts = np.array([np.searchsorted(one, _clipped(edges, one.dtype)) for one in segments])
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
        sizes = (int(self._starts[-1]), sum(num_accesses), gathered_rows)
        index_N, by_row_N, row_starts_R = (np.empty(size, np.int32) for size in sizes)
        rows_R = np.empty(sum(num_rows), np.int32 if self._width * self._count <= MAX_INT32 else np.int64)
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
        cuts = self._cuts[:, number : number + 2].tolist()
        for first, (start, end) in zip(self._starts[:-1].tolist(), cuts, strict=True):
            out_N[first + start : first + end] = values[done : done + end - start]
            done += end - start

    def _access_numbers(self, number: int) -> Integers:
        """Of the gathered accesses of a range, among those of all."""
        start, end = self._cuts[:, number], self._cuts[:, number + 1]
        skipped = 1 if self._zero_copy else 0
        first, counts = (self._starts[:-1] + start)[skipped:] - self._starts[skipped], (end - start)[skipped:]
        return np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)


def _clipped(edges: Integers, dtype: Any) -> Integers:
    """As integers of this type; the last edge may lie beyond its range."""
    return np.minimum(edges, np.iinfo(dtype).max).astype(dtype)


def _parts(of_remote: list[int], of_all: list[int]) -> list[tuple[int, int]]:
    """Where each range begins in the first and in the second part."""
    remote, local = np.array(of_remote), np.array(of_all) - of_remote
    seconds = remote.sum() + np.cumsum(local) - local
    return list(zip((np.cumsum(remote) - remote).tolist(), seconds.tolist(), strict=True))


def _put(out: Integers, start: int, values: Integers) -> None:
    out[start : start + len(values)] = values


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
