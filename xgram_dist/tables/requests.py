"""Requests: from the tokens of a window to the keys a rank asks for, and whom it asks.

In: the tokens of the windows of a step. Out: for each window, its distinct keys sorted by owner (this rank first, then
the others in rank order), how many vectors of each slab every owner is asked for, and for each position where its
vectors lie among those. All on the host, without collectives.

    TokenRequests   a key is a token; its rows may have several owners
    NgramRequests   a position has many keys, each the row of an n-gram in a hash head; rows are owned round-robin

Engram has some 200 keys a position: tens of millions a step. They are never listed. Equal n-grams have equal keys, so
keys are computed for the distinct n-grams of a window. Each hash head has rows of its own, so the heads of a (layer,
order) are hashed and deduplicated by themselves, in parallel, in tables of the size of a head. What positions read is
put together on the device: the slots of the distinct n-grams, and the n-gram of each position.
Shapes: U distinct keys of a window, P (token, owner) pairs of a slab, G distinct n-grams of an order, K keys of a
position, D distinct rows of a head.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xgram_dist.parallel.context_parallel import WHOLE_SEQUENCES, ContextAxis
from xgram_dist.parallel.device import PlanningPool, index_to_device, to_device
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.lookup import segment_sums
from xgram_dist.tables.ngrams import Grams, NgramKeys
from xgram_dist.tables.touched_rows import MAX_INT32, Dedup, Integers

# What is requested.


class OneOwnerPerToken:
    """Vectors arrive in the order of the distinct tokens, one each."""

    def combine(self, received_PW: Tensor) -> Tensor:
        return received_PW

    def expand(self, grads_UW: Tensor) -> Tensor:
        return grads_UW


@dataclass(frozen=True)
class SeveralOwnersPerToken:
    """Some tokens have rows with several owners: their vectors are partial sums."""

    token_P: Tensor
    """The distinct token of each vector."""
    by_token_P: Tensor
    """The vectors sorted by token, this rank's first."""
    token_starts_U: Tensor
    """First of these for each token."""

    def combine(self, received_PW: Tensor) -> Tensor:
        """Partial sums -> one vector a token [U, W]."""
        return segment_sums(received_PW.contiguous(), self.by_token_P, self.token_starts_U, None)

    def expand(self, grads_UW: Tensor) -> Tensor:
        """Backward of `combine`: every owner gets the token's gradient [P, W]."""
        return grads_UW.index_select(0, self.token_P)


@dataclass(frozen=True)
class SlabRequest:
    """The vectors of a slab that a window requests."""

    keys_P: Integers
    """The key of each vector, sorted by owner."""
    counts: Integers
    """How many for each rank."""
    num_remote_tokens: int
    """Distinct tokens with a row on another rank: no exchange can move fewer vectors."""
    combination: OneOwnerPerToken | SeveralOwnersPerToken


class PositionIndex(ABC):
    """Where the vectors of each position lie among those of the distinct keys."""

    @property
    @abstractmethod
    def arrays(self) -> list[Integers]:
        """What is uploaded."""

    @abstractmethod
    def slots(self, device: torch.device) -> Tensor:
        """On the device; shaped like the tokens, and with several keys a token, one more dim."""

    @abstractmethod
    def renamed(self, slot_U: Integers) -> "PositionIndex":
        """The same, where the vector of a distinct key lies at `slot_U`."""


@dataclass(frozen=True)
class WindowRequest:
    keys_U: Integers
    """Distinct keys, sorted by the owner of their first row."""
    index: PositionIndex
    slabs: list[SlabRequest]


class OwnerOrder:
    """Owners in the order a rank requests from them: itself first, then the others in rank order."""

    def __init__(self, group: ProcessGroup):
        self.rank, self.size = group.rank, group.size
        self.owner: Integers = np.array([group.rank, *(r for r in range(group.size) if r != group.rank)])
        """The owner at each position."""
        self.position: Integers = np.argsort(self.owner)


class Requests(ABC):
    """Plans what windows request."""

    @abstractmethod
    def plan(self, windows: list[Integers]) -> list[WindowRequest]:
        """`windows`: the tokens of each, in whole sequences."""

    @abstractmethod
    def count(self, tokens: Integers) -> int:
        """Distinct keys of these tokens."""


def _one_owner_request(keys_U: Integers, counts: Integers, order: OwnerOrder) -> SlabRequest:
    return SlabRequest(keys_U, counts, len(keys_U) - int(counts[order.rank]), OneOwnerPerToken())


# Tokens: numbered so that distinct tokens in ascending order are already grouped by owner.


class TokenNumbering:
    """Tokens numbered by (position of their first row's owner, id), for routed tables."""

    def __init__(self, owners: list[tuple[Integers, Integers]], order: OwnerOrder, device: torch.device):
        """`owners`: for each slab, the owners of each token's rows (CSR)."""
        self._owners, self._order, self._device = owners, order, device
        offsets, of_rows = owners[0]
        self.limit = len(offsets) - 1
        self._token_of = np.argsort(order.position[of_rows[offsets[:-1]]], kind="stable")
        self._number_of = np.empty(self.limit, np.int32)
        self._number_of[self._token_of] = np.arange(self.limit, dtype=np.int32)

    def numbers(self, tokens: Integers) -> Integers:
        return self._number_of[tokens]

    def keys(self, numbers_U: Integers) -> Integers:
        return self._token_of[numbers_U]

    def request(self, slab: int, keys_U: Integers) -> SlabRequest:
        offsets, owners = self._owners[slab]
        start, end = offsets[keys_U], offsets[keys_U + 1]
        key_P, entry_P = expand_ranges(start, end - start)
        owner_P = owners[entry_P]
        counts = np.bincount(owner_P, minlength=self._order.size)
        key_P = key_P[np.argsort(self._order.position[owner_P], kind="stable")]
        num_remote = len(np.unique(key_P[counts[self._order.rank] :]))
        return SlabRequest(keys_U[key_P], counts, num_remote, self._combination(key_P, len(keys_U)))

    def _combination(self, key_P: Integers, num_keys: int) -> OneOwnerPerToken | SeveralOwnersPerToken:
        if len(key_P) == num_keys and np.array_equal(key_P, np.arange(num_keys)):
            return OneOwnerPerToken()
        counts = np.bincount(key_P, minlength=num_keys)
        arrays = key_P, np.argsort(key_P, kind="stable"), np.cumsum(counts) - counts
        return SeveralOwnersPerToken(*(index_to_device(array, self._device) for array in arrays))


class RowNumbering:
    """The same where a key is a global row and rows are owned round-robin: by arithmetic."""

    def __init__(self, num_rows: int, order: OwnerOrder):
        self._order, self._share = order, -(-num_rows // order.size)
        self.limit = order.size * self._share

    def numbers(self, keys: Integers) -> Integers:
        return self._order.position[keys % self._order.size] * self._share + keys // self._order.size

    def keys(self, numbers_U: Integers) -> Integers:
        return numbers_U % self._share * self._order.size + self._order.owner[numbers_U // self._share]

    def request(self, slab: int, keys_U: Integers) -> SlabRequest:
        counts = np.bincount(keys_U % self._order.size, minlength=self._order.size)
        return _one_owner_request(keys_U, counts, self._order)


@dataclass(frozen=True)
class TokenIndex(PositionIndex):
    index: Integers
    """The distinct token of each position."""

    @property
    def arrays(self) -> list[Integers]:
        return [self.index]

    def slots(self, device: torch.device) -> Tensor:
        return index_to_device(self.index, device)

    def renamed(self, slot_U: Integers) -> "TokenIndex":
        return TokenIndex(slot_U[self.index])


class TokenRequests(Requests):
    def __init__(
        self, numbering: TokenNumbering | RowNumbering, num_slabs: int, context: ContextAxis = WHOLE_SEQUENCES
    ):
        self._numbering, self._slabs, self._context = numbering, range(num_slabs), context
        self._dedup = Dedup(numbering.limit)

    def plan(self, windows: list[Integers]) -> list[WindowRequest]:
        return [self._plan_window(tokens) for tokens in windows]

    def _plan_window(self, tokens: Integers) -> WindowRequest:
        tokens = self._context.select_read_on_host(tokens)
        numbers_U, index = self._dedup(self._numbering.numbers(tokens))
        keys_U = self._numbering.keys(numbers_U)
        return WindowRequest(keys_U, TokenIndex(index), [self._numbering.request(s, keys_U) for s in self._slabs])

    def count(self, tokens: Integers) -> int:
        return self._dedup.count(self._numbering.numbers(self._context.select_read_on_host(tokens)))


# N-grams: the heads of each (layer, order) by themselves.


@dataclass(frozen=True)
class NgramIndex(PositionIndex):
    grams: list[Integers]
    """For each order, the n-gram of each position."""
    slots_KG: list[Integers]
    """For each order, the slots of its n-grams; keys by layer and head."""
    num_layers: int

    @property
    def arrays(self) -> list[Integers]:
        return [*self.grams, *self.slots_KG]

    def slots(self, device: torch.device) -> Tensor:
        """Keys by layer, order and head."""
        by_order = []
        for gram, slots_KG in zip(self.grams, self.slots_KG, strict=True):
            slots_GK = to_device(torch.from_numpy(slots_KG), device).t().contiguous()
            of_positions = slots_GK.index_select(0, to_device(torch.from_numpy(gram), device).flatten())
            by_order.append(of_positions.view(gram.size, self.num_layers, -1))
        return torch.stack(by_order, dim=2).view(*self.grams[0].shape, -1).long()

    def renamed(self, slot_U: Integers) -> "NgramIndex":
        slot_U = slot_U.astype(np.int32)
        return NgramIndex(self.grams, [slot_U[slots_KG] for slots_KG in self.slots_KG], self.num_layers)


@dataclass(frozen=True)
class HeadRows:
    """The rows of a hash head that a window reads. A cell is a row of the head, numbered by (position of its owner,
    row): ascending cells are grouped by owner."""

    cell_G: Integers
    """The cell of each n-gram."""
    cell_D: Integers
    """The distinct cells, ascending."""
    counts: Integers
    """How many of them each owner has, in the owners' order."""


class NgramRequests(Requests):
    def __init__(
        self,
        keys: NgramKeys,
        order: OwnerOrder,
        num_slabs: int,
        pool: PlanningPool,
        context: ContextAxis = WHOLE_SEQUENCES,
    ):
        self._keys, self._order, self._num_slabs, self._pool = keys, order, num_slabs, pool
        self._context = context
        hashing = keys.hash
        self._groups = [(layer, o) for layer in range(len(hashing.multipliers)) for o in range(len(hashing.orders))]
        """(layer, order) of each group of heads."""
        rows = [of_head for layer, o in self._groups for of_head in hashing.rows[layer][o]]
        self._first_rows = keys.first_rows
        self._owned = -(-max(rows) // order.size) + 1
        """No rank owns more rows of a head."""
        self._dedup = Dedup(order.size * self._owned)
        self._cell_type: Any = np.int32 if order.size * self._owned <= MAX_INT32 else np.int64
        self._key_type = np.int32 if keys.num_rows <= MAX_INT32 else np.int64
        self._position = order.position.astype(self._cell_type)

    def plan(self, windows: list[Integers]) -> list[WindowRequest]:
        grams = self._pool.map(self._grams, windows)
        return [self._plan_window(of_window) for of_window in grams]

    def count(self, tokens: Integers) -> int:
        return sum(len(head.cell_D) for head in self._heads(self._grams(tokens)))

    def _grams(self, tokens: Integers) -> list[Grams]:
        """Of the positions that are read; they reach over all tokens before these."""
        return [grams.select(self._context.select_read_on_host) for grams in self._keys.grams(tokens)]

    def _heads(self, grams: list[Grams]) -> list[HeadRows]:
        """All heads, by layer and order."""
        groups = range(len(self._groups))
        return [head for heads in self._pool.map(lambda g: self._hash_group(g, grams), groups) for head in heads]

    def _heads_of(self, group: int) -> range:
        heads = len(self._keys.hash.rows[0][0])
        return range(group * heads, (group + 1) * heads)

    def _hash_group(self, group: int, grams: list[Grams]) -> list[HeadRows]:
        layer, order = self._groups[group]
        rows = self._keys.head_rows(layer, order, grams[order])
        return [self._head_rows(head, row_G) for head, row_G in zip(self._heads_of(group), rows, strict=True)]

    def _head_rows(self, head: int, row_G: Integers) -> HeadRows:
        number, size, first = self._cell_type, self._order.size, self._first_rows[head]
        row_G = row_G.astype(number, copy=False) + number(first % size)  # so that row % size is the owner
        local_G = row_G // number(size)
        cell_G = self._position.take(row_G - local_G * number(size)) * number(self._owned) + local_G
        cell_D = self._dedup.distinct(cell_G)
        edges = np.searchsorted(cell_D, np.arange(size + 1) * self._owned)
        return HeadRows(cell_G, cell_D.astype(number), np.diff(edges))

    def _plan_window(self, grams: list[Grams]) -> WindowRequest:
        heads = self._heads(grams)
        counts = np.array([head.counts for head in heads])  # [head, position of the owner]
        # Distinct keys lie by owner, then by head.
        ends = np.cumsum(counts.T).reshape(counts.T.shape).T
        keys_U = np.empty(int(counts.sum()), self._key_type)
        hashing = self._keys.hash
        num_layers, num_heads = len(hashing.multipliers), len(hashing.rows[0][0])
        slots_KG = [np.empty((num_layers * num_heads, len(of_order.ids[0])), np.int32) for of_order in grams]

        def place(group: int) -> None:
            layer, order = self._groups[group]
            for number, head in enumerate(self._heads_of(group)):
                slot_D = self._place_keys(keys_U, head, heads[head], ends[head] - counts[head])
                out = slots_KG[order][layer * num_heads + number]
                out[:] = self._dedup.translate(heads[head].cell_D, slot_D, heads[head].cell_G)

        self._pool.map(place, range(len(self._groups)))
        by_owner = counts.sum(0)[self._order.position]
        slabs = [_one_owner_request(keys_U, by_owner, self._order)] * self._num_slabs
        return WindowRequest(keys_U, NgramIndex([of_order.index for of_order in grams], slots_KG, num_layers), slabs)

    def _place_keys(self, keys_U: Integers, head: int, rows: HeadRows, starts: Integers) -> Integers:
        """Writes the keys of a head among those of all. `starts`: the first slot of each owner's. Returns the slots."""
        size, first, counts = self._order.size, self._first_rows[head], rows.counts
        slot_D = np.arange(len(rows.cell_D)) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
        first_key = first - first % size + self._order.owner - np.arange(size) * self._owned * size
        keys_U[slot_D] = rows.cell_D.astype(np.int64) * size + np.repeat(first_key, counts)
        return slot_D


def expand_ranges(start: Integers, counts: Integers) -> tuple[Integers, Integers]:
    """Ranges [start, start + count) one after the other: (number of the range, entry) of each element."""
    number = np.repeat(np.arange(len(counts)), counts)
    return number, np.arange(len(number)) + np.repeat(start - (np.cumsum(counts) - counts), counts)
