"""The exchange plan: from the token ids of a step to who sends which vectors to whom.

Planning runs on the host, on ids alone, a step ahead of the compute. It produces index tensors on the device and
message sizes on the host, so fetch and return never read device memory. For each window (some micro-batches of the
step):

    dedup     distinct tokens, sorted by owner: this rank first, then the others in rank order   local
    counts    number of vectors requested from each owner                                       1 all-to-all, integers
    ids       the token ids requested from each owner                                           1 small all-to-all
    accesses  the rows an owner reads for them (lookup.py)                                      local

Both all-to-alls run on the data axis's host group. With a byte budget, the ranks first agree on the windows: one small
all-reduce a window.

A token whose rows have several owners is requested from each; the requester sums the partial vectors in that order.
Keys are token ids, or hashed n-gram ids (several keys a position, each a global row); the rest is the same.

Without hashing a vector is a row, and local rows need no copy: the working set then begins with all rows that are read
from this rank, whoever reads them ("zero-copy"). It holds some keys that no position of this rank has.
Shapes: U distinct tokens of a window, P (token, owner) pairs of a slab, Q tokens requested from this owner, N accesses,
R touched rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.config.schema import parse_bytes
from xgram_dist.errors import UserError
from xgram_dist.parallel.device import to_device
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.layout import Slab
from xgram_dist.tables.lookup import (
    Accesses,
    Dedup,
    Integers,
    TouchedRows,
    build_gathered_accesses,
    build_zero_copy_accesses,
    segment_sums,
)
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.row_sharding import RowSharding, owners_of_tokens

# What a plan holds.


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
class PartOfStep:
    """The window is one of several of its optimizer step."""

    step_rows: Tensor
    """Distinct local rows that the whole step touches."""
    index_R: Tensor
    """Index of the window's rows among them."""


@dataclass(frozen=True)
class SlabPlan:
    """Who sends how many vectors of a slab to whom, for one window."""

    requested: list[int]
    """Vectors this rank requests from each owner, itself included."""
    served: list[int]
    """Vectors this owner sends to each rank, itself included."""
    num_local: int
    """Vectors at the start of the working set that this rank produces itself; the remote ones follow."""
    combination: OneOwnerPerToken | SeveralOwnersPerToken
    accesses: Accesses
    """Local rows read for the requested tokens: this rank's own tokens, then the remote ones in rank order."""
    part: PartOfStep | None
    """None: the window is the whole step."""
    num_remote_tokens: int
    """Distinct tokens with a row on another rank: no exchange can move fewer vectors."""


@dataclass(frozen=True)
class Window:
    """Some consecutive micro-batches of a step that share a working set."""

    micro_batches: slice
    slots: Tensor
    """For each token, its row in the working set; with several keys a token, one more dim."""
    num_distinct: int
    """Distinct tokens of this rank."""
    slabs: list[SlabPlan]
    keys: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    """The key of each row of the working set; distinct; in host memory."""


# Windows: how many micro-batches share a working set.

VECTOR_BYTES = 4
"""Vectors and their gradients are fp32 in the working set, whatever the wire type."""
ID_BYTES = 4
"""Of a token id on the wire: int32."""


@dataclass
class WindowRule:
    """`memory.window`: the whole step, a number of micro-batches, or as many as fit a byte budget."""

    micro_batches: int | None
    """Micro-batches a window. None: all of them."""
    budget: int | None
    """Most distinct tokens in a window. None: no limit."""
    text: str
    bytes_per_token: int

    @staticmethod
    def of(config: Config, width: int) -> "WindowRule":
        """`width`: columns of all tables."""
        window, per_token = config.memory.window, 2 * VECTOR_BYTES * width
        if isinstance(window, int):
            return WindowRule(window, None, str(window), per_token)
        if window == "step":
            return WindowRule(None, None, window, per_token)
        return WindowRule(None, parse_bytes(window) // max(1, per_token), window, per_token)

    def __post_init__(self) -> None:
        self._started = False

    def cut(self, tokens: Any, count_distinct: Callable[[Any], int], group: ProcessGroup) -> list[slice]:
        """Slices of the first dim of `tokens`, the same on every rank.

        A first window that exceeds the budget is refused. Later in a run a single micro-batch may exceed it: better
        than ending the run.
        """
        total = len(tokens)
        if self.budget is None:
            size = self.micro_batches or total
            return [slice(start, min(start + size, total)) for start in range(0, total, size)]
        slices, start = [], 0
        while start < total:
            counts = torch.tensor([count_distinct(tokens[start : end + 1]) for end in range(start, total)])
            fitting = int((group.all_reduce_max(counts) <= self.budget).sum())
            if fitting == 0 and not self._started:
                most = int(counts[0])
                raise UserError(
                    f"memory.window = {self.text} is too small for one micro-batch: {most:,} distinct tokens x "
                    f"{self.bytes_per_token:,} bytes are {most * self.bytes_per_token / 2**20:,.1f} MiB; give it at "
                    f"least that, or lower train.micro_batch"
                )
            slices.append(slice(start, start + max(1, fitting)))
            start += max(1, fitting)
        self._started = True
        return slices


# Keys: numbered so that distinct keys in ascending order are already grouped by owner.


class OwnerOrder:
    """Owners in the order a rank requests from them: itself first, then the others in rank order."""

    def __init__(self, group: ProcessGroup):
        self.size = group.size
        self.owner: Integers = np.array([group.rank, *(r for r in range(group.size) if r != group.rank)])
        """The owner at each position."""
        self.position: Integers = np.argsort(self.owner)


class TokenNumbering:
    """Tokens numbered by (position of their first row's owner, id), for routed tables."""

    def __init__(self, owners: list[tuple[Integers, Integers]], order: OwnerOrder):
        """`owners`: for each slab, the owners of each token's rows (CSR)."""
        self._owners, self._order = owners, order
        offsets, of_rows = owners[0]
        self.limit = len(offsets) - 1
        self._token_of = np.argsort(order.position[of_rows[offsets[:-1]]], kind="stable")
        self._number_of = np.empty(self.limit, np.int32)
        self._number_of[self._token_of] = np.arange(self.limit, dtype=np.int32)

    def numbers(self, tokens: Integers) -> Integers:
        return self._number_of[tokens]

    def keys(self, numbers_U: Integers) -> Integers:
        return self._token_of[numbers_U]

    def pairs(self, slab: int, keys_U: Integers) -> tuple[Integers, Integers]:
        """(index into the keys of each vector to request, sorted by owner; how many for each rank)."""
        offsets, owners = self._owners[slab]
        start, end = offsets[keys_U], offsets[keys_U + 1]
        key_P, entry_P = _expand_ranges(start, end - start)
        owner_P = owners[entry_P]
        counts = np.bincount(owner_P, minlength=self._order.size)
        return key_P[np.argsort(self._order.position[owner_P], kind="stable")], counts


class RowNumbering:
    """The same where a key is a global row and rows are owned round-robin: by arithmetic, since there may be very many
    rows."""

    def __init__(self, num_rows: int, order: OwnerOrder):
        self._order, self._share = order, -(-num_rows // order.size)
        self.limit = order.size * self._share

    def numbers(self, keys: Integers) -> Integers:
        return self._order.position[keys % self._order.size] * self._share + keys // self._order.size

    def keys(self, numbers_U: Integers) -> Integers:
        return numbers_U % self._share * self._order.size + self._order.owner[numbers_U // self._share]

    def pairs(self, slab: int, keys_U: Integers) -> tuple[Integers, Integers]:
        return np.arange(len(keys_U)), np.bincount(keys_U % self._order.size, minlength=self._order.size)


class LocalAccessLists:
    """One view's token -> (local row, coefficient) lists, restricted to the rows owned here."""

    def __init__(self, routing: Routing, view: int, sharding: RowSharding, rank: int):
        lists = routing.views[view]
        is_local = sharding.owner[lists.rows] == rank
        before = np.concatenate(([0], np.cumsum(is_local)))  # accesses kept before each entry
        self.offsets: Integers = before[lists.offsets]
        self.rows: Integers = sharding.local[lists.rows[is_local]]
        self.coefficients: NDArray[Any] = lists.coefficients[is_local].astype(np.float32)


class ExchangePlanner:
    """Plans the windows of a step. Every rank of the group must plan the same steps in the same order."""

    def __init__(
        self,
        routing: Routing | None,
        slabs: tuple[Slab, ...],
        sharding: RowSharding,
        num_keys: int,
        rule: WindowRule,
        group: ProcessGroup,
        devices: tuple[torch.device, torch.device],
        keys_of: Callable[[Integers], Integers] | None = None,
        zero_copy: bool = False,
    ):
        """`group`: the data axis's host group. `devices`: of the working set, and of the rows. `keys_of`: the keys of
        each token; without it, the token itself. `zero_copy`: local rows are read in place."""
        self.group, self.rule, self._keys_of = group, rule, keys_of
        self._order = OwnerOrder(group)
        self.device, self.shard_device = devices
        self.access_lists = [
            LocalAccessLists(routing, slab.view, sharding, group.rank) if routing else None for slab in slabs
        ]
        assert not zero_copy or routing is None
        self._zero_copy = zero_copy
        self._numbering: TokenNumbering | RowNumbering
        if keys_of is None and routing is not None:
            owners = [owners_of_tokens(routing, slab.view, sharding, num_keys) for slab in slabs]
            self._numbering = TokenNumbering(owners, self._order)
        else:
            self._numbering = RowNumbering(num_keys, self._order)
        self._dedup_keys = Dedup(self._numbering.limit)
        self._dedup_rows = Dedup(len(sharding.rows_of(group.rank)))

    def plan(self, tokens: Tensor, *, whole: bool = False) -> list[Window]:
        """The windows of these tokens. `whole`: one window, whatever the rule."""
        numbers = self._numbering.numbers(tokens.numpy() if self._keys_of is None else self._keys_of(tokens.numpy()))
        slices = [slice(0, len(tokens))] if whole else self.rule.cut(numbers, self._dedup_keys.count, self.group)
        distinct = [self._dedup_keys(numbers[micro_batches]) for micro_batches in slices]
        keys = [self._numbering.keys(numbers_U) for numbers_U, _ in distinct]
        slabs, rank = range(len(self.access_lists)), self.group.rank
        pairs = [[self._numbering.pairs(s, keys_U) for s in slabs] for keys_U in keys]  # [window][slab]
        requested = np.array([[counts for _, counts in of_slab] for of_slab in pairs])  # [window, slab, owner]
        served, wanted = self._exchange_ids(keys, pairs, requested)
        reads = [[self._accesses(s, wanted[w][s], int(requested[w, s, rank])) for s in slabs] for w in range(len(keys))]
        parts = [self._parts_of_step([of_slab[s][0] for of_slab in reads]) for s in slabs]
        windows = []
        for w, micro_batches in enumerate(slices):
            plans = []
            for s in slabs:
                touched, accesses = reads[w][s]
                plans.append(
                    SlabPlan(
                        requested=requested[w, s].tolist(),
                        served=served[w, s].tolist(),
                        num_local=len(touched.rows_R) if self._zero_copy else int(requested[w, s, rank]),
                        combination=self._combination(pairs[w][s][0], len(keys[w])),
                        accesses=accesses,
                        part=parts[s][w],
                        num_remote_tokens=self._num_remote_tokens(pairs[w][s]),
                    )
                )
            slots, keys_of_rows = distinct[w][1], keys[w]
            if self._zero_copy:
                slots, keys_of_rows = self._zero_copy_slots(slots, keys_of_rows, reads[w][0][0])
            slots_on_device = to_device(torch.from_numpy(slots), self.device)
            windows.append(Window(micro_batches, slots_on_device, len(keys[w]), plans, keys_of_rows))
        return windows

    def _exchange_ids(
        self, keys: list[Integers], pairs: list[list[tuple[Integers, Integers]]], requested: Integers
    ) -> tuple[Integers, list[list[Integers]]]:
        """(vectors each rank requests from this owner [window, slab, rank], the tokens requested [window][slab])."""
        windows, slabs, size = requested.shape
        to_owner = np.ascontiguousarray(np.moveaxis(requested, 2, 0))  # [owner, window, slab]
        received_counts, work = self.group.all_to_all(torch.from_numpy(to_owner), [1] * size, [1] * size)
        owners, position = self._order.owner, self._order.position
        segments = [
            [np.split(keys[w][pairs[w][s][0]], np.cumsum(requested[w, s, owners])[:-1]) for s in range(slabs)]
            for w in range(windows)
        ]
        ids = [segments[w][s][position[owner]] for owner in range(size) for w in range(windows) for s in range(slabs)]
        work.wait()
        from_rank = received_counts.numpy()  # [rank, window, slab]
        received_ids, work = self.group.all_to_all(
            torch.from_numpy(np.concatenate(ids).astype(np.int32)),
            to_owner.sum(axis=(1, 2)).tolist(),
            from_rank.sum(axis=(1, 2)).tolist(),
        )
        work.wait()
        pieces = np.split(received_ids.numpy(), np.cumsum(from_rank.reshape(-1))[:-1])
        wanted = [
            [np.concatenate([pieces[(r * windows + w) * slabs + s] for r in owners]) for s in range(slabs)]
            for w in range(windows)
        ]
        return np.moveaxis(from_rank, 0, 2), wanted

    def _accesses(self, slab: int, keys_Q: Integers, num_local: int) -> tuple[TouchedRows, Accesses]:
        """The local rows that these keys read. The first `num_local` keys are this rank's own."""
        lists = self.access_lists[slab]
        if lists is None:
            touched = TouchedRows(keys_Q // self.group.size, num_local, self._dedup_rows)
            if self._zero_copy:
                return touched, build_zero_copy_accesses(touched, self.shard_device)
            return touched, build_gathered_accesses(touched, None, None, num_local, self.shard_device)
        start = lists.offsets[keys_Q]
        counts = lists.offsets[keys_Q + 1] - start
        _, entry_N = _expand_ranges(start, counts)
        touched = TouchedRows(lists.rows[entry_N], int(counts[:num_local].sum()), self._dedup_rows)
        coefficients_N = lists.coefficients[entry_N]
        return touched, build_gathered_accesses(touched, counts, coefficients_N, num_local, self.shard_device)

    def _zero_copy_slots(self, index: Integers, keys_U: Integers, touched: TouchedRows) -> tuple[Integers, Integers]:
        """Indices into the distinct tokens -> rows of a working set that begins with the touched rows; and its keys."""
        num_local, num_rows = touched.num_local_accesses, len(touched.rows_R)
        slot_U = np.concatenate((touched.index_N[:num_local], num_rows + np.arange(len(keys_U) - num_local)))
        global_R = touched.rows_R * self.group.size + self.group.rank
        return slot_U[index], np.concatenate((global_R, keys_U[num_local:]))

    def _parts_of_step(self, windows: list[TouchedRows]) -> list[PartOfStep] | list[None]:
        """For each window, its share of the rows that the step touches."""
        if len(windows) == 1:
            return [None]
        rows = [touched.rows_R for touched in windows]
        distinct, index = self._dedup_rows(np.concatenate(rows))
        step_rows = self._upload(distinct)
        indices = np.split(index, np.cumsum([len(rows_R) for rows_R in rows])[:-1])
        return [PartOfStep(step_rows, self._upload(index_R)) for index_R in indices]

    def _combination(self, key_P: Integers, num_keys: int) -> OneOwnerPerToken | SeveralOwnersPerToken:
        if len(key_P) == num_keys and np.array_equal(key_P, np.arange(num_keys)):
            return OneOwnerPerToken()
        counts = np.bincount(key_P, minlength=num_keys)
        arrays = key_P, np.argsort(key_P, kind="stable"), np.cumsum(counts) - counts
        return SeveralOwnersPerToken(*(to_device(torch.from_numpy(array), self.device) for array in arrays))

    def _num_remote_tokens(self, pairs: tuple[Integers, Integers]) -> int:
        key_P, counts = pairs
        return len(np.unique(key_P[counts[self.group.rank] :]))

    def _upload(self, array: NDArray[Any]) -> Tensor:
        return to_device(torch.from_numpy(array), self.shard_device)


def _expand_ranges(start: Integers, counts: Integers) -> tuple[Integers, Integers]:
    """Ranges [start, start + count) one after the other: (number of the range, entry) of each element."""
    number = np.repeat(np.arange(len(counts)), counts)
    return number, np.arange(len(number)) + np.repeat(start - (np.cumsum(counts) - counts), counts)
