"""Row sharding: which rank owns which row.

In: the routing (None: row = key) and the number of ranks. Out: the owner of a row and its index there, the same on
every rank, from the routing alone. Without a routing rows are owned round-robin, by arithmetic: nothing is kept of a
row, so there may be any number. With one, rows that are read together get one owner:

- The rows of a dense bucket are shared by its tokens. One rank owns them all, unless they exceed half of a rank's rows.
- A row that serves a single token follows that token's first row.

Buckets are assigned first, each to the rank with the most free rows. The remaining groups follow round-robin in row
order, which is frequency order, skipping full ranks. So a token has one owner (where buckets are too large: a frequent
token has), tokens of similar frequency are spread over the ranks, and all ranks own equally many rows.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.tables.routing import Routing

POLICIES = ("bucket", "token", "strided", "contiguous")
"""`bucket` is the one in use. `token` deals dense buckets row by row, as older checkpoints do. The others are baselines
for comparison."""
WHOLE_BELOW = 0.5
"""Largest share of a rank's rows that a bucket with one owner may take. Above it, ranks that own such a bucket own too
few frequent tokens."""


class RowSharding(ABC):
    """Which rank of the data axis owns which row. A rank's rows are kept in ascending order."""

    ranks: int
    """Ranks of the data axis."""
    num_rows: int
    policy: str

    @property
    def owner(self) -> NDArray[Any]:
        """Rank of each row. An array of all rows, as `local` is: not for tables of n-grams."""
        return self.owners_of(np.arange(self.num_rows))

    @property
    def local(self) -> NDArray[Any]:
        """Index of each row among its owner's rows."""
        return self.local_rows(np.arange(self.num_rows))

    @abstractmethod
    def owners_of(self, rows: NDArray[Any]) -> NDArray[Any]:
        """The rank of each of these rows."""

    @abstractmethod
    def local_rows(self, rows: NDArray[Any]) -> NDArray[Any]:
        """The index of each of these rows among its owner's rows."""

    @abstractmethod
    def global_rows(self, rank: int, local: NDArray[Any]) -> NDArray[Any]:
        """The rows that have these indices among a rank's rows."""

    @abstractmethod
    def count_below(self, rank: int, row: int) -> int:
        """Rows before `row` that a rank owns."""

    def count(self, rank: int) -> int:
        """Rows that a rank owns."""
        return self.count_below(rank, self.num_rows)

    def rows_of(self, rank: int) -> NDArray[Any]:
        """Global ids of the rows that a rank owns, ascending."""
        return self.global_rows(rank, np.arange(self.count(rank)))


@dataclass(frozen=True)
class RoundRobin(RowSharding):
    """Row r belongs to rank r mod ranks: by arithmetic, for any number of rows."""

    ranks: int
    num_rows: int
    policy: str = POLICIES[0]

    def owners_of(self, rows: NDArray[Any]) -> NDArray[Any]:
        return (rows % self.ranks).astype(np.int32)

    def local_rows(self, rows: NDArray[Any]) -> NDArray[Any]:
        return rows // self.ranks

    def global_rows(self, rank: int, local: NDArray[Any]) -> NDArray[Any]:
        return local * self.ranks + rank

    def count_below(self, rank: int, row: int) -> int:
        return max(0, -(-(row - rank) // self.ranks))


class AssignedRows(RowSharding):
    """The rank of each row is listed."""

    def __init__(self, ranks: int, owner: NDArray[Any], policy: str):
        self.ranks, self.num_rows, self.policy = ranks, len(owner), policy
        self._owner = owner.astype(np.int32)
        self._rows = [np.flatnonzero(self._owner == rank) for rank in range(ranks)]
        self._local = np.empty(len(owner), dtype=np.int64)
        for rows in self._rows:
            self._local[rows] = np.arange(len(rows))

    def owners_of(self, rows: NDArray[Any]) -> NDArray[Any]:
        return self._owner[rows]

    def local_rows(self, rows: NDArray[Any]) -> NDArray[Any]:
        return self._local[rows]

    def global_rows(self, rank: int, local: NDArray[Any]) -> NDArray[Any]:
        return self._rows[rank][local]

    def count_below(self, rank: int, row: int) -> int:
        return int(np.searchsorted(self._rows[rank], row))


def plan_row_sharding(routing: Routing | None, num_rows: int, ranks: int, policy: str = POLICIES[0]) -> RowSharding:
    if policy == "contiguous":
        owner = np.arange(num_rows, dtype=np.int64) * ranks // num_rows
    elif policy == "strided" or routing is None:
        return RoundRobin(ranks, num_rows, policy)
    elif policy == "token":
        owner = _leading_rows(routing, num_rows) % ranks
    else:
        assert policy == "bucket", policy
        owner = _assign_by_bucket(routing, num_rows, ranks)
    return AssignedRows(ranks, owner, policy)


def _assign_by_bucket(routing: Routing, num_rows: int, ranks: int) -> NDArray[Any]:
    leader = _leading_rows(routing, num_rows)
    room = [num_rows // ranks + (rank < num_rows % ranks) for rank in range(ranks)]
    last = [-1] * ranks
    owner_of: dict[int, int] = {}
    regions = zip(routing.bucket_start.tolist(), routing.bucket_rows.tolist(), routing.bucket_sparse, strict=True)
    for start, rows, sparse in regions:
        if not sparse and 0 < rows <= WHOLE_BELOW * num_rows / ranks:
            leader[start : start + rows] = start
            # Buckets come in order of frequency: among equally free ranks, the one whose last bucket is least frequent.
            rank = max(range(ranks), key=lambda r: (room[r], last[r], -r))
            owner_of[start], last[rank] = rank, start
            room[rank] -= rows
    leaders, sizes = np.unique(leader, return_counts=True)
    turn = 0
    for first, rows in zip(leaders.tolist(), sizes.tolist(), strict=True):
        if first in owner_of:
            continue
        fits = (r for r in chain(range(turn, ranks), range(turn)) if room[r] >= rows)
        rank = next(fits, -1)
        if rank < 0:
            rank = room.index(max(room))
        owner_of[first] = rank
        room[rank] -= rows
        turn = (rank + 1) % ranks
    owners: NDArray[Any] = np.array([owner_of[first] for first in leaders.tolist()], dtype=np.int64)
    return owners[np.searchsorted(leaders, leader)]


def _leading_rows(routing: Routing, num_rows: int) -> NDArray[Any]:
    """For each row, the row whose owner it shares: the first row of the only token that reads it, else itself."""
    leader = np.arange(num_rows, dtype=np.int64)
    reader = np.full(num_rows, -1, dtype=np.int64)
    shared = np.zeros(num_rows, dtype=bool)
    for view in routing.views:
        tokens = np.repeat(np.arange(routing.vocabulary), np.diff(view.offsets))
        order = np.argsort(view.rows, kind="stable")
        rows, readers = view.rows[order], tokens[order]
        shared[rows[1:][(rows[1:] == rows[:-1]) & (readers[1:] != readers[:-1])]] = True
        shared[rows[(reader[rows] >= 0) & (reader[rows] != readers)]] = True
        reader[rows] = readers
    view = routing.views[0]
    has = np.diff(view.offsets) > 0
    first = np.full(routing.vocabulary, -1, dtype=np.int64)
    first[has] = np.minimum.reduceat(view.rows, view.offsets[:-1][has])
    alone = (reader >= 0) & ~shared
    leader[alone] = first[reader[alone]]
    return leader


def owners_of_tokens(routing: Routing | None, view: int, placement: RowSharding, vocabulary: int) -> tuple[Any, Any]:
    """CSR (offsets [V+1], owners): the distinct owners of each token's rows in one view, ascending."""
    if routing is None:
        return np.arange(vocabulary + 1, dtype=np.int64), placement.owners_of(np.arange(vocabulary)).astype(np.int64)
    lists = routing.views[view]
    tokens = np.repeat(np.arange(vocabulary, dtype=np.int64), np.diff(lists.offsets))
    pairs = np.unique(tokens * placement.ranks + placement.owners_of(lists.rows))
    counts = np.bincount(pairs // placement.ranks, minlength=vocabulary)
    return np.concatenate(([0], np.cumsum(counts))), pairs % placement.ranks
