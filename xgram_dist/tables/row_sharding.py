"""Row sharding: which rank owns which row.

In: the routing (None: row = token id) and the number of ranks. Out: the owner of every row and its index there, the
same on every rank, from the routing alone. Rows that are read together get one owner:

- The rows of a dense bucket are shared by its tokens. One rank owns them all, unless they exceed half of a rank's rows.
- A row that serves a single token follows that token's first row.

Buckets are assigned first, each to the rank with the most free rows. The remaining groups follow round-robin in row
order, which is frequency order, skipping full ranks. So a token has one owner (where buckets are too large: a frequent
token has), tokens of similar frequency are spread over the ranks, and all ranks own equally many rows.
"""

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


@dataclass(frozen=True)
class RowSharding:
    ranks: int
    """Ranks of the data axis."""
    owner: NDArray[Any]
    """Rank of each row."""
    local: NDArray[Any]
    """Index of each row among its owner's rows, which are kept in ascending order."""
    policy: str = POLICIES[0]

    def rows_of(self, rank: int) -> NDArray[Any]:
        """Global ids of the rows that a rank owns, ascending."""
        return np.flatnonzero(self.owner == rank)


def plan_row_sharding(routing: Routing | None, num_rows: int, ranks: int, policy: str = POLICIES[0]) -> RowSharding:
    rows = np.arange(num_rows, dtype=np.int64)
    if policy == "contiguous":
        owner = rows * ranks // num_rows
    elif policy == "strided" or routing is None:
        return RowSharding(ranks, (rows % ranks).astype(np.int32), rows // ranks, policy)
    elif policy == "token":
        owner = _leading_rows(routing, num_rows) % ranks
    else:
        assert policy == "bucket", policy
        owner = _assign_by_bucket(routing, num_rows, ranks)
    local = np.empty(num_rows, dtype=np.int64)
    for rank in range(ranks):
        is_owned = owner == rank
        local[is_owned] = np.arange(int(is_owned.sum()))
    return RowSharding(ranks, owner.astype(np.int32), local, policy)


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
        return np.arange(vocabulary + 1, dtype=np.int64), placement.owner[:vocabulary].astype(np.int64)
    lists = routing.views[view]
    tokens = np.repeat(np.arange(vocabulary, dtype=np.int64), np.diff(lists.offsets))
    pairs = np.unique(tokens * placement.ranks + placement.owner[lists.rows])
    counts = np.bincount(pairs // placement.ranks, minlength=vocabulary)
    return np.concatenate(([0], np.cumsum(counts))), pairs % placement.ranks
