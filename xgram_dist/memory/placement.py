"""Which rank owns which row.

In: the routing (None: row = token id) and the number of ranks. Out: the owner of every row and its index there, the
same on every rank, by arithmetic alone. A row that serves one token alone follows that token's first row; first rows
and shared rows are dealt to the ranks in turn. So the rows of a frequent token lie together and it has one owner,
while neighbours in frequency are spread.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.memory.routing.routing import Routing

POLICIES = ("token", "strided", "contiguous")


@dataclass(frozen=True)
class Placement:
    ranks: int
    owner: NDArray[Any]
    """Rank of each row."""
    local: NDArray[Any]
    """Index of each row among its owner's rows, which are kept in ascending order."""
    policy: str = "token"

    def rows_of(self, rank: int) -> NDArray[Any]:
        return np.flatnonzero(self.owner == rank)


def plan_placement(routing: Routing | None, num_rows: int, ranks: int, policy: str = "token") -> Placement:
    rows = np.arange(num_rows, dtype=np.int64)
    if policy == "contiguous":
        owner = rows * ranks // num_rows
    elif policy == "strided" or routing is None:
        owner = rows % ranks
    else:
        assert policy == "token", policy
        owner = _leaders(routing, num_rows) % ranks
    local = np.empty(num_rows, dtype=np.int64)
    for rank in range(ranks):
        mine = owner == rank
        local[mine] = np.arange(int(mine.sum()))
    return Placement(ranks, owner.astype(np.int32), local, policy)


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
