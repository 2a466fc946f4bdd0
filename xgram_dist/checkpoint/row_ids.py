"""Row ids: which global row stands at which position of the table tensors in a checkpoint.

A table tensor is saved data rank by data rank: first the rows of data rank 0, then those of data rank 1, and so on. The
*position* of a row is its index in that order. The manifest records, for each data rank, the global ids of its rows:

    ranges    [[start, stop, step], ...]: one range for a strided or contiguous row sharding
    tensor    the name of an integer tensor of the checkpoint, where more than MAX_RANGES ranges would be needed

and a digest of the ids. A run that keeps touched rows only saves those; the record then says how many rows the tables
have. Row ids have a name (a *row-id set*), and each table tensor refers to one, so that tables may
be sharded differently. Loading uses the recorded ids alone: how a release shards rows may change at any time.
Numpy only, no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import crc32c
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from xgram_dist.checkpoint.safetensors_io import DamagedFileError

Count = Annotated[int, Field(strict=True, ge=0, le=2**60)]
MAX_RANGES = 64
"""More ranges than this are stored as a tensor."""


@dataclass(frozen=True)
class RowIdSegment:
    """The global row ids of one data rank, in the order in which its rows are saved."""

    count: Count
    digest: Count
    """crc32c of the ids as little-endian int64."""
    ranges: list[Annotated[list[Count], Field(min_length=3, max_length=3)]] | None = None
    tensor: str | None = None


@dataclass(frozen=True)
class RowIdSet:
    """The row ids of all data ranks, in the order of the ranks."""

    num_rows: Count
    """Rows that are saved."""
    segments: list[RowIdSegment]
    table_rows: Count | None = None
    """Rows of the tables, where touched rows alone are saved. The others are a formula (reader.py)."""
    parts: list[Count] | None = None
    """Of a chain (chain.py): the segments of each part, the oldest part first. A row counts as in the last part that
    has it. None: one part, in which each row is there once."""

    @property
    def limit(self) -> int:
        """Row ids are below."""
        return self.num_rows if self.table_rows is None else self.table_rows


def describe_row_ids(ids: NDArray[Any], tensor: str) -> RowIdSegment:
    """The manifest's record of these ids; `tensor` names the tensor that stores them if ranges do not compress them."""
    ranges = arithmetic_ranges(ids)
    return RowIdSegment(len(ids), row_id_digest(ids), ranges, None if ranges is not None else tensor)


def row_id_digest(ids: NDArray[Any]) -> int:
    return int(crc32c.crc32c(np.ascontiguousarray(ids, dtype="<i8").data))


def arithmetic_ranges(ids: NDArray[Any]) -> list[list[int]] | None:
    """Ascending ids as [start, stop, step] ranges; None where that takes more than MAX_RANGES."""
    if len(ids) == 0:
        return []
    steps = np.diff(ids)
    if (steps <= 0).any():
        return None
    # steps[k:l] are equal between two neighbouring changes.
    changes = np.flatnonzero(steps[1:] != steps[:-1]) + 1
    if len(changes) > 2 * MAX_RANGES:
        return None
    ranges: list[list[int]] = []
    first = 0
    for last in [*changes.tolist(), len(steps)]:
        if first < last:
            ranges.append([int(ids[first]), int(ids[last]) + 1, int(steps[first])])
            first = last + 1
    if first == len(steps):  # a last id that fits no range
        ranges.append([int(ids[first]), int(ids[first]) + 1, 1])
    return ranges if len(ranges) <= MAX_RANGES else None


def check_row_id_set(where: str, name: str, row_ids: RowIdSet) -> None:
    """Refuse a record that is inconsistent in itself, before anything is read."""
    if row_ids.num_rows < 0 or sum(segment.count for segment in row_ids.segments) != row_ids.num_rows:
        raise DamagedFileError(f"{where}: the row ids '{name}' do not add up to {row_ids.num_rows:,} rows")
    if row_ids.parts is not None and (sum(row_ids.parts) != len(row_ids.segments) or min(row_ids.parts, default=0) < 1):
        raise DamagedFileError(f"{where}: the parts of the row ids '{name}' do not add up to its segments")
    for rank, segment in enumerate(row_ids.segments):
        if (segment.ranges is None) == (segment.tensor is None):
            raise DamagedFileError(f"{where}: the row ids '{name}' of data rank {rank} are neither ranges nor a tensor")
        # Before np.arange makes them, so that a forged range cannot fill the memory.
        if segment.ranges is not None and any(ends[2] < 1 for ends in segment.ranges):
            raise DamagedFileError(f"{where}: the row ids '{name}' of data rank {rank} have a range without a step")
        if segment.ranges is not None and sum(len(range(*ends)) for ends in segment.ranges) != segment.count:
            raise DamagedFileError(f"{where}: the row ids '{name}' of data rank {rank} are not {segment.count:,} rows")


def read_row_ids(
    where: str, name: str, row_ids: RowIdSet, read_tensor: Callable[[str], NDArray[Any]]
) -> list[NDArray[Any]]:
    """The ids of each data rank's rows in the saved order, after checking that no row is there twice.

    `where` names the checkpoint in errors; `read_tensor` gives an integer tensor of the checkpoint by name."""
    found: list[NDArray[Any]] = []
    for rank, segment in enumerate(row_ids.segments):
        if segment.ranges is not None:
            pieces = [np.arange(*ends, dtype=np.int64) for ends in segment.ranges]
            ids = np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)
        else:
            assert segment.tensor is not None
            ids = read_tensor(segment.tensor)
        if len(ids) != segment.count or row_id_digest(ids) != segment.digest:
            raise DamagedFileError(f"{where}: the row ids of data rank {rank} are damaged: their digest does not match")
        outside = ids[(ids < 0) | (ids >= row_ids.limit)]
        if len(outside):
            raise DamagedFileError(
                f"{where}: the row ids of data rank {rank} name row {outside[0]}, but '{name}' has "
                f"{row_ids.limit:,} rows"
            )
        found.append(ids.astype(np.int64, copy=False))
    first = 0
    for count in row_ids.parts or [len(found)]:
        part = found[first : first + count]
        ordered = np.sort(np.concatenate([np.empty(0, np.int64), *part]), kind="stable")
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            rank = max(rank for rank, ids in enumerate(part) if (ids == twice[0]).any())
            raise DamagedFileError(f"{where}: the row ids name row {twice[0]} twice (data rank {rank})")
        first += count
    return found


def row_positions(where: str, name: str, row_ids: RowIdSet, read_tensor: Callable[[str], NDArray[Any]]) -> NDArray[Any]:
    """The position of each global row [num_rows], where every row is saved. Arguments as in `read_row_ids`."""
    ids = np.concatenate([np.empty(0, np.int64), *read_row_ids(where, name, row_ids, read_tensor)])
    assert len(ids) == row_ids.limit  # all distinct and in range: no row is missing
    positions = np.empty(len(ids), dtype=np.int64)
    positions[ids] = np.arange(len(ids))
    return positions


class SavedRows:
    """Which rows a row-id set holds, and where they stand."""

    def __init__(self, segments: list[NDArray[Any]], table_rows: int):
        """`segments`: the ids of each data rank's rows. `table_rows`: rows of the tables."""
        self.segments, self.table_rows = segments, table_rows
        ids = np.concatenate([np.empty(0, np.int64), *segments])
        positions = np.argsort(ids, kind="stable")
        ids = ids[positions]
        last = np.concatenate((ids[1:] != ids[:-1], np.ones(min(1, len(ids)), bool)))  # a chain has rows several times
        self._positions, self.rows = positions[last], ids[last]
        """Where each saved row stands; the saved rows, ascending."""
        self.complete = len(self.rows) == table_rows
        """Whether every row is saved."""

    def positions_of(self, rows: NDArray[Any]) -> NDArray[Any]:
        """The position of each of these global rows; -1 where it is not saved."""
        if self.complete:
            return self._positions[rows]
        if len(self.rows) == 0:
            return np.full(len(rows), -1)
        place = np.searchsorted(self.rows, rows).clip(max=len(self.rows) - 1)
        return np.where(self.rows[place] == rows, self._positions[place], -1)
