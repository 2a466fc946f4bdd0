"""Which rank owns which row.

In: the routing (None: row = token id) and the number of ranks. Out: the owner of every row and its index there, the
same on every rank, from the routing alone. Rows that are read together stay together:

- A dense bucket's rows are shared by its tokens. They go to one rank, unless they would fill more than half of it.
- A row that serves one token alone follows that token's first row.

What stays together is dealt out: the buckets first, to the rank with the most room left; then the rest in turn, in the
order of the rows, which is that of frequency, until a rank is full. So a token has one owner, or, where buckets do not
fit, its frequent ones do; neighbours in frequency are spread; and all ranks hold as many rows.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.memory.routing.routing import Routing

POLICIES = ("bucket", "token", "strided", "contiguous")
"""The first is the one that is used; by `token`, dense buckets are dealt out row by row, as they were in older
checkpoints. The others are there to be compared with."""
WHOLE_BELOW = 0.5
"""Part of a rank's rows that a bucket may fill. With more, ranks that have one have too few frequent tokens."""


@dataclass(frozen=True)
class Placement:
    ranks: int
    owner: NDArray[Any]
    """Rank of each row."""
    local: NDArray[Any]
    """Index of each row among its owner's rows, which are kept in ascending order."""
    policy: str = POLICIES[0]

    def rows_of(self, rank: int) -> NDArray[Any]:
        return np.flatnonzero(self.owner == rank)


def plan_placement(routing: Routing | None, num_rows: int, ranks: int, policy: str = POLICIES[0]) -> Placement:
    rows = np.arange(num_rows, dtype=np.int64)
    if policy == "contiguous":
        owner = rows * ranks // num_rows
    elif policy == "strided" or routing is None:
        owner = rows % ranks
    elif policy == "token":
        owner = _leaders(routing, num_rows) % ranks
    else:
        assert policy == "bucket", policy
        owner = _dealt_out(routing, num_rows, ranks)
    local = np.empty(num_rows, dtype=np.int64)
    for rank in range(ranks):
        mine = owner == rank
        local[mine] = np.arange(int(mine.sum()))
    return Placement(ranks, owner.astype(np.int32), local, policy)


def _dealt_out(routing: Routing, num_rows: int, ranks: int) -> NDArray[Any]:
    leader = _leaders(routing, num_rows)
    room = [num_rows // ranks + (rank < num_rows % ranks) for rank in range(ranks)]
    last = [-1] * ranks
    owner_of: dict[int, int] = {}
    regions = zip(routing.bucket_start.tolist(), routing.bucket_rows.tolist(), routing.bucket_sparse, strict=True)
    for start, rows, sparse in regions:
        if not sparse and 0 < rows <= WHOLE_BELOW * num_rows / ranks:
            leader[start : start + rows] = start
            # Buckets come by frequency: of ranks with as much room, the one whose last bucket is the least frequent.
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


def _leaders(routing: Routing, num_rows: int) -> NDArray[Any]:
    """For each row, the row it follows: the first row of the one token that reads it, else itself."""
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


def owners_of_tokens(routing: Routing | None, view: int, placement: Placement, vocabulary: int) -> tuple[Any, Any]:
    """CSR (offsets [V+1], owners): the distinct owners of each token's rows in one view, ascending."""
    if routing is None:
        return np.arange(vocabulary + 1, dtype=np.int64), placement.owner[:vocabulary].astype(np.int64)
    lists = routing.views[view]
    tokens = np.repeat(np.arange(vocabulary, dtype=np.int64), np.diff(lists.offsets))
    pairs = np.unique(tokens * placement.ranks + placement.owner[lists.rows])
    counts = np.bincount(pairs // placement.ranks, minlength=vocabulary)
    return np.concatenate(([0], np.cumsum(counts))), pairs % placement.ranks
