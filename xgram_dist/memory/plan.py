"""Planning: from the token ids of a step to who sends which rows to whom.

Runs in host memory, on ids alone, so it can be done for the next step while this one computes; what comes out are
index tensors, on the device, and message sizes, on the host: fetching and returning need no look at device memory.

    distinct tokens of each window, ordered by owner          local: this rank first, then the others in rank order
    number of vectors asked of each owner                     1 all-to-all of a few integers
    ids asked of each owner                                   1 small all-to-all
    the rows an owner reads for them                          local

A token whose rows lie with several owners is asked of each; the reader adds up what they send, in that order. Where
keys are not tokens but hashed n-grams, a position has several, each the number of a row; the rest is the same.

Where a vector is a row as it stands (no hashing), a rank's own need not be copied: the working set begins with all rows
that are read here, whoever reads them ("in place"). So it holds some keys that no position of this rank has.
Shapes: U distinct tokens of a window, P (token, owner) pairs of a slab, Q tokens asked of this owner, N accesses.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.memory.accesses import Distinct, Touched, make_accesses, make_accesses_in_place
from xgram_dist.memory.layout import Slab
from xgram_dist.memory.placement import Placement, owners_of_tokens
from xgram_dist.memory.retrieval import Accesses
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.memory.windows import WindowRule
from xgram_dist.parallel.device import to_device
from xgram_dist.parallel.ranks import Ranks

Integers = NDArray[Any]


@dataclass(frozen=True)
class SlabPlan:
    """Who sends how many vectors of a slab to whom, for one window."""

    asked: list[int]
    """Vectors this rank asks of each owner, itself among them."""
    answered: list[int]
    """Vectors this owner sends to each rank."""
    own: int
    """Vectors that come first and are made here; the others' follow."""
    key_P: Tensor | None
    """The distinct token of each vector asked for; None: they come in the order of the tokens, one each."""
    by_key_P: Tensor | None
    """The vectors asked for, token by token, those of this rank first."""
    key_starts_U: Tensor | None
    """First of them for each token."""
    accesses: Accesses
    """Rows read here for the tokens asked for: by this rank itself, then by the others in rank order."""
    step_touched: Tensor
    """Rows read here in the whole step: distinct."""
    place_R: Tensor | None
    """Index of the window's rows among them; None where the window is the whole step."""
    off_rank: int
    """Distinct tokens with a row on another rank: no exchange can move fewer vectors."""


@dataclass(frozen=True)
class Window:
    """Some consecutive micro-batches of a step."""

    micro_batches: slice
    slots: Tensor
    """For each token, its row in the working set; or its rows, along one more axis."""
    distinct: int
    """Distinct tokens of this rank."""
    slabs: list[SlabPlan]
    keys: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    """The token of each of the working set's rows: distinct; stays in host memory."""


class RowMap:
    """One view's token -> (local row, coefficient) lists of the rows owned here."""

    def __init__(self, routing: Routing, view: int, placement: Placement, rank: int):
        lists = routing.views[view]
        mine = placement.owner[lists.rows] == rank
        before = np.concatenate(([0], np.cumsum(mine)))  # accesses kept before each entry
        self.offsets: Integers = before[lists.offsets]
        self.rows: Integers = placement.local[lists.rows[mine]]
        self.coefficients: NDArray[Any] = lists.coefficients[mine].astype(np.float32)


class OwnerOrder:
    """Owners as a rank asks them: itself first, then the others in rank order."""

    def __init__(self, ranks: Ranks):
        self.size = ranks.size
        self.owner: Integers = np.array([ranks.rank, *(r for r in range(ranks.size) if r != ranks.rank)])
        """The owner at each place."""
        self.place: Integers = np.argsort(self.owner)


class TokenNumbers:
    """Tokens numbered anew by (place of their first row's owner, id), so that distinct tokens in ascending order are
    already grouped by owner."""

    def __init__(self, owners: list[tuple[Integers, Integers]], order: OwnerOrder):
        """For each slab, the owners of each token's rows (CSR)."""
        self._owners, self._order = owners, order
        offsets, of_rows = owners[0]
        self.limit = len(offsets) - 1
        self._token_of = np.argsort(order.place[of_rows[offsets[:-1]]], kind="stable")
        self._number_of = np.empty(self.limit, np.int32)
        self._number_of[self._token_of] = np.arange(self.limit, dtype=np.int32)

    def of(self, tokens: Integers) -> Integers:
        return self._number_of[tokens]

    def keys(self, numbers_U: Integers) -> Integers:
        return self._token_of[numbers_U]

    def pairs(self, slab: int, keys_U: Integers) -> tuple[Integers, Integers]:
        """(index into the keys of each vector to ask for, by owner; number of them for each rank)."""
        offsets, owners = self._owners[slab]
        start, end = offsets[keys_U], offsets[keys_U + 1]
        key_P, entry_P = _expand(start, end - start)
        owner_P = owners[entry_P]
        counts = np.bincount(owner_P, minlength=self._order.size)
        return key_P[np.argsort(self._order.place[owner_P], kind="stable")], counts


class RowNumbers:
    """The same where a key is a row, and rows are dealt to the ranks in turn: by arithmetic, since there may be very
    many."""

    def __init__(self, rows: int, order: OwnerOrder):
        self._order, self._share = order, -(-rows // order.size)
        self.limit = order.size * self._share

    def of(self, keys: Integers) -> Integers:
        return self._order.place[keys % self._order.size] * self._share + keys // self._order.size

    def keys(self, numbers_U: Integers) -> Integers:
        return numbers_U % self._share * self._order.size + self._order.owner[numbers_U // self._share]

    def pairs(self, slab: int, keys_U: Integers) -> tuple[Integers, Integers]:
        return np.arange(len(keys_U)), np.bincount(keys_U % self._order.size, minlength=self._order.size)


class Planner:
    def __init__(
        self,
        routing: Routing | None,
        slabs: tuple[Slab, ...],
        placement: Placement,
        vocabulary: int,
        rule: WindowRule,
        ranks: Ranks,
        devices: tuple[torch.device, torch.device],
        keys_of: Callable[[Integers], Integers] | None = None,
        in_place: bool = False,
    ):
        """`vocabulary`: how many keys there are. `devices`: where the working set lives, and where the rows do.
        `keys_of`: the keys of each token; without it, the token itself. `in_place`: vectors that are rows stay where
        they are read."""
        self.ranks, self.rule, self._keys_of = ranks, rule, keys_of
        self._order = OwnerOrder(ranks)
        self.device, self.store_device = devices
        self.maps = [RowMap(routing, slab.view, placement, ranks.rank) if routing else None for slab in slabs]
        assert not in_place or routing is None
        self._in_place = in_place
        self._rows = len(placement.rows_of(ranks.rank))
        self._numbers: TokenNumbers | RowNumbers
        if keys_of is None and routing is not None:
            owners = [owners_of_tokens(routing, slab.view, placement, vocabulary) for slab in slabs]
            self._numbers = TokenNumbers(owners, self._order)
        else:
            self._numbers = RowNumbers(vocabulary, self._order)
        self._of_tokens, self._of_rows = Distinct(self._numbers.limit), Distinct(self._rows)

    def plan(self, tokens: Tensor, *, whole: bool = False) -> list[Window]:
        """The windows of these tokens; `whole`: one window, whatever the rule."""
        numbers = self._numbers.of(tokens.numpy() if self._keys_of is None else self._keys_of(tokens.numpy()))
        count = self._of_tokens.count
        slices = [slice(0, len(tokens))] if whole else self.rule.cut(numbers, count, self.ranks)
        found = [self._of_tokens(numbers[part]) for part in slices]
        keys = [self._numbers.keys(distinct) for distinct, _ in found]
        slabs = range(len(self.maps))
        pairs = [[self._numbers.pairs(s, k) for s in slabs] for k in keys]  # [window][slab]
        asked = np.array([[counts for _, counts in of_slab] for of_slab in pairs])  # [window, slab, owner]
        answered, wanted = self._exchange_ids(keys, pairs, asked)
        windows = []
        rank = self.ranks.rank
        read = [[self._accesses(s, wanted[w][s], int(asked[w, s, rank])) for s in slabs] for w in range(len(keys))]
        union = [self._union([of_slab[s][0] for of_slab in read]) for s in slabs]
        for w, part in enumerate(slices):
            plans = []
            for s in slabs:
                (here, accesses), (touched, places) = read[w][s], union[s]
                key_P, by_key_P, starts_U = self._combination(pairs[w][s][0], len(keys[w]))
                plans.append(
                    SlabPlan(
                        asked=asked[w, s].tolist(),
                        answered=answered[w, s].tolist(),
                        own=len(here.rows_R) if self._in_place else int(asked[w, s, rank]),
                        key_P=key_P,
                        by_key_P=by_key_P,
                        key_starts_U=starts_U,
                        accesses=accesses,
                        step_touched=accesses.touched_R if touched is None else touched,
                        place_R=places[w],
                        off_rank=self._off_rank(pairs[w][s]),
                    )
                )
            slots, of_rows = found[w][1], keys[w]
            if self._in_place:
                slots, of_rows = self._among_rows(slots, of_rows, read[w][0][0])
            windows.append(Window(part, to_device(torch.from_numpy(slots), self.device), len(keys[w]), plans, of_rows))
        return windows

    def _exchange_ids(
        self, keys: list[Integers], pairs: list[list[tuple[Integers, Integers]]], asked: Integers
    ) -> tuple[Integers, list[list[Integers]]]:
        """(vectors each rank asks of this owner [window, slab, rank], the tokens asked for [window][slab])."""
        windows, slabs, size = asked.shape
        to_owner = np.ascontiguousarray(np.moveaxis(asked, 2, 0))  # [owner, window, slab]
        flight, handle = self.ranks.exchange(torch.from_numpy(to_owner), [1] * size, [1] * size)
        owners, place = self._order.owner, self._order.place
        parts = [
            [np.split(keys[w][pairs[w][s][0]], np.cumsum(asked[w, s, owners])[:-1]) for s in range(slabs)]
            for w in range(windows)
        ]
        ids = [parts[w][s][place[owner]] for owner in range(size) for w in range(windows) for s in range(slabs)]
        handle.wait()
        from_rank = flight.numpy()  # [rank, window, slab]
        received, handle = self.ranks.exchange(
            torch.from_numpy(np.concatenate(ids).astype(np.int32)),
            to_owner.sum(axis=(1, 2)).tolist(),
            from_rank.sum(axis=(1, 2)).tolist(),
        )
        handle.wait()
        pieces = np.split(received.numpy(), np.cumsum(from_rank.reshape(-1))[:-1])
        wanted = [
            [np.concatenate([pieces[(r * windows + w) * slabs + s] for r in owners]) for s in range(slabs)]
            for w in range(windows)
        ]
        return np.moveaxis(from_rank, 0, 2), wanted

    def _accesses(self, slab: int, keys_Q: Integers, own: int) -> tuple[Touched, Accesses]:
        """The rows owned here that these tokens read, and how; this rank itself asks for the first `own`."""
        row_map = self.maps[slab]
        if row_map is None:
            rows_Q = keys_Q // self.ranks.size
            touched = Touched(rows_Q, own, self._of_rows)
            if self._in_place:
                return touched, make_accesses_in_place(touched, self.store_device)
            return touched, make_accesses(touched, None, None, own, self.store_device)
        start = row_map.offsets[keys_Q]
        counts = row_map.offsets[keys_Q + 1] - start
        _, entry_N = _expand(start, counts)
        touched = Touched(row_map.rows[entry_N], int(counts[:own].sum()), self._of_rows)
        return touched, make_accesses(touched, counts, row_map.coefficients[entry_N], own, self.store_device)

    def _among_rows(self, index: Integers, keys_U: Integers, touched: Touched) -> tuple[Integers, Integers]:
        """Places among the distinct tokens -> places in a working set that begins with the rows read here; and the
        tokens of that."""
        own, rows = touched.of_own, len(touched.rows_R)
        slot_U = np.concatenate((touched.place_N[:own], rows + np.arange(len(keys_U) - own)))
        here_R = touched.rows_R * self.ranks.size + self.ranks.rank
        return slot_U[index], np.concatenate((here_R, keys_U[own:]))

    def _union(self, of_windows: list[Touched]) -> tuple[Tensor | None, list[Tensor | None]]:
        """The rows of all windows, and where each window's rows are among them; None: there is one window."""
        if len(of_windows) == 1:
            return None, [None]
        parts = [one.rows_R for one in of_windows]
        touched, places = self._of_rows(np.concatenate(parts))
        return self._place(touched), [self._place(p) for p in np.split(places, np.cumsum([len(p) for p in parts])[:-1])]

    def _combination(self, key_P: Integers, keys: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if len(key_P) == keys and np.array_equal(key_P, np.arange(keys)):
            return None, None, None
        counts = np.bincount(key_P, minlength=keys)
        made = key_P, np.argsort(key_P, kind="stable"), np.cumsum(counts) - counts
        one, two, three = (to_device(torch.from_numpy(array), self.device) for array in made)
        return one, two, three

    def _off_rank(self, pairs: tuple[Integers, Integers]) -> int:
        key_P, counts = pairs
        return len(np.unique(key_P[counts[self.ranks.rank] :]))

    def _place(self, array: NDArray[Any]) -> Tensor:
        return to_device(torch.from_numpy(array), self.store_device)


def _expand(start: Integers, counts: Integers) -> tuple[Integers, Integers]:
    """Ranges [start, start + count) one after the other: (number of the range, entry) of each element."""
    number = np.repeat(np.arange(len(counts)), counts)
    return number, np.arange(len(number)) + np.repeat(start - (np.cumsum(counts) - counts), counts)
