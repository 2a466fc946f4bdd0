"""The exchange plan: from the token ids of a step to who sends which vectors to whom.

Planning runs on the host, on ids alone, a step ahead of the compute. It produces index tensors on the device and
message sizes on the host, so fetch and return never read device memory. For each window (some micro-batches of the
step):

    request   distinct keys, sorted by owner: this rank first, then the others (requests.py)    local
    counts    number of vectors requested from each owner                                      1 all-to-all, integers
    ids       the keys requested from each owner                                               1 small all-to-all
    read      the rows an owner reads for them (touched_rows.py)                               local
    unite     the rows of a step in all replicas of the tables, if there are several             2 small all-to-alls
    upload    index tensors to the device                                                      local

All-to-alls run on host groups: of the ranks that hold the tables together, and of those that hold the same rows. With a
byte budget, the ranks first agree on the windows: one small all-reduce a window. Local work is divided among threads.

A token whose rows have several owners is requested from each; the requester sums the partial vectors in that order.
Keys are token ids, or hashed n-gram ids (several keys a position, each a global row); the rest is the same.

Without hashing a vector is a row, and local rows need no copy: the working set then begins with all rows that are read
from this rank, whoever reads them ("zero-copy"). It holds some keys that no position of this rank has.
Shapes: U distinct tokens of a window, P (token, owner) pairs of a slab, Q tokens requested from this owner, N accesses,
R touched rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.config.schema import parse_bytes
from xgram_dist.errors import UserError
from xgram_dist.parallel.context_parallel import WHOLE_SEQUENCES, ContextAxis
from xgram_dist.parallel.device import PlanningPool, index_to_device
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.layout import Slab
from xgram_dist.tables.lookup import Accesses, build_gathered_accesses, build_zero_copy_accesses
from xgram_dist.tables.ngrams import NgramKeys
from xgram_dist.tables.requests import (
    NgramRequests,
    OneOwnerPerToken,
    OwnerOrder,
    Requests,
    RowNumbering,
    SeveralOwnersPerToken,
    TokenNumbering,
    TokenRequests,
    WindowRequest,
    expand_ranges,
)
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.row_sharding import RowSharding, owners_of_tokens
from xgram_dist.tables.touched_rows import MAX_INT32, Dedup, Integers, RowRanges, TouchedRows, touch_rows

# What a plan holds.


@dataclass(frozen=True)
class PartOfStep:
    """The window is one of several of its optimizer step, or one replica of the tables of several reads it."""

    step_rows: Tensor
    """Distinct local rows that the whole step touches, in all replicas; ascending."""
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
    num_slots: int = 0
    """Where shards keep touched rows only, so that local rows are slots: how many there are with this plan's."""
    staged_slots: Integers | None = None
    """Where the records of a step are staged: the slots of the step, ascending, in host memory. Plans then name their
    positions instead of slots."""


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


def id_bytes(num_keys: int) -> int:
    """Of a key on the wire: those of n-grams may need int64."""
    return ID_BYTES if num_keys <= MAX_INT32 else 2 * ID_BYTES


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


# Planning.


class LocalAccessLists:
    """One view's token -> (local row, coefficient) lists, restricted to the rows owned here."""

    def __init__(self, routing: Routing, view: int, sharding: RowSharding, rank: int):
        lists = routing.views[view]
        is_local = sharding.owners_of(lists.rows) == rank
        before = np.concatenate(([0], np.cumsum(is_local)))  # accesses kept before each entry
        self.offsets: Integers = before[lists.offsets]
        self.rows: Integers = sharding.local_rows(lists.rows[is_local])
        self.coefficients: NDArray[Any] = lists.coefficients[is_local].astype(np.float32)


@dataclass(frozen=True)
class LocalReads:
    """The local rows that the tokens requested from this owner read; in host memory."""

    touched: TouchedRows
    counts_Q: Integers | None
    """Rows of each token. None: one, with coefficient 1."""
    coefficients_N: NDArray[Any] | None


class SlotSource(Protocol):
    """A shard that keeps touched rows only."""

    staged: bool
    """Whether the records of a step are copied before it (storage/staging.py)."""

    @property
    def num_slots(self) -> int: ...

    def slots_of(self, rows_R: Integers) -> Integers:
        """The slots of distinct local rows that the next step reads. A row that has none gets one."""


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
        keys_of: NgramKeys | None = None,
        zero_copy: bool = False,
        slots: list[SlotSource] | None = None,
        replicas: ProcessGroup | None = None,
        context: ContextAxis = WHOLE_SEQUENCES,
    ):
        """`group`: the host group of the ranks that hold the tables together; `replicas`: of those that hold the same
        rows. `devices`: of the working set, and of the rows. `keys_of`: the keys of
        each position; without it, the token itself. `zero_copy`: local rows are read in place. `slots`: the shards,
        where they keep touched rows only: plans then name slots instead of local rows.
        `context`: the ranks that share each sequence: tokens are those of whole sequences, slots those of the positions
        that this rank reads."""
        self.group, self.replicas, self.rule = group, replicas or ProcessGroup(), rule
        self._order = OwnerOrder(group)
        self.device, self.shard_device = devices
        self.access_lists = [
            LocalAccessLists(routing, slab.view, sharding, group.rank) if routing else None for slab in slabs
        ]
        assert not zero_copy or routing is None
        self._zero_copy, self._slots = zero_copy, slots
        self._pool = PlanningPool()
        self._requests: Requests
        if keys_of is not None:
            self._requests = NgramRequests(keys_of, self._order, len(slabs), self._pool, context)
        elif routing is not None:
            owners = [owners_of_tokens(routing, slab.view, sharding, num_keys) for slab in slabs]
            self._requests = TokenRequests(TokenNumbering(owners, self._order, self.device), len(slabs), context)
        else:
            self._requests = TokenRequests(RowNumbering(num_keys, self._order), len(slabs), context)
        self._id_type = np.dtype(f"i{id_bytes(num_keys)}")
        self._num_rows = sharding.count(group.rank)
        self._dedup_rows = Dedup(self._num_rows)

    def plan(self, tokens: Tensor, *, whole: bool = False) -> list[Window]:
        """The windows of these tokens. `whole`: one window, whatever the rule."""
        slices, requests = self.request(tokens, whole=whole)
        served, wanted = self.exchange_ids(requests)
        reads = self.read(wanted)
        return self.upload(slices, requests, served, reads, self.unite(reads))

    def close(self) -> None:
        self._pool.close()

    def request(self, tokens: Tensor, *, whole: bool = False) -> tuple[list[slice], list[WindowRequest]]:
        """(the micro-batches of each window, what it requests)."""
        on_host, count = tokens.numpy(), self._requests.count
        slices = [slice(0, len(tokens))] if whole else self.rule.cut(on_host, count, self.group)
        return slices, self._requests.plan([on_host[micro_batches] for micro_batches in slices])

    def exchange_ids(self, requests: list[WindowRequest]) -> tuple[Integers, list[list[list[Integers]]]]:
        """(vectors that each rank requests from this owner [window, slab, rank]; the keys of these [window][slab], for
        each rank, this one first)."""
        requested = np.array([[slab.counts for slab in request.slabs] for request in requests])  # [window, slab, owner]
        windows, slabs, size = requested.shape
        to_owner = np.ascontiguousarray(np.moveaxis(requested, 2, 0))  # [owner, window, slab]
        received_counts, work = self.group.all_to_all(torch.from_numpy(to_owner), [1] * size, [1] * size)
        owners, position = self._order.owner, self._order.position
        segments = [
            [np.split(slab.keys_P, np.cumsum(slab.counts[owners])[:-1]) for slab in request.slabs]
            for request in requests
        ]
        ids = [segments[w][s][position[owner]] for owner in range(size) for w in range(windows) for s in range(slabs)]
        work.wait()
        from_rank = received_counts.numpy()  # [rank, window, slab]
        received_ids, work = self.group.all_to_all(
            torch.from_numpy(np.concatenate(ids).astype(self._id_type, copy=False)),
            to_owner.sum(axis=(1, 2)).tolist(),
            from_rank.sum(axis=(1, 2)).tolist(),
        )
        work.wait()
        pieces = np.split(received_ids.numpy(), np.cumsum(from_rank.reshape(-1))[:-1])
        wanted = [
            [[pieces[(r * windows + w) * slabs + s] for r in owners] for s in range(slabs)] for w in range(windows)
        ]
        return np.moveaxis(from_rank, 0, 2), wanted

    def read(self, wanted: list[list[list[Integers]]]) -> list[list[LocalReads]]:
        """The local rows that the requested tokens read [window][slab]."""
        return [[self._local_reads(s, keys) for s, keys in enumerate(of_window)] for of_window in wanted]

    def _local_reads(self, slab: int, keys: list[Integers]) -> LocalReads:
        """`keys`: those that each rank requests, this rank's own first."""
        lists = self.access_lists[slab]
        if lists is None:
            segments = [of_rank // self.group.size for of_rank in keys]
            ranges = RowRanges(segments, self._num_rows, zero_copy=self._zero_copy)
            return LocalReads(ranges.touch(self._pool), None, None)
        keys_Q = np.concatenate(keys)
        start = lists.offsets[keys_Q]
        counts_Q = lists.offsets[keys_Q + 1] - start
        _, entry_N = expand_ranges(start, counts_Q)
        num_local_accesses = int(counts_Q[: len(keys[0])].sum())
        touched = touch_rows(lists.rows[entry_N], num_local_accesses, self._dedup_rows)
        return LocalReads(touched, counts_Q, lists.coefficients[entry_N])

    def unite(self, reads: list[list[LocalReads]]) -> list[Integers] | None:
        """For each slab, the distinct rows that the step touches in any replica of the tables; None: there is one."""
        replicas = self.replicas
        if replicas.size == 1:
            return None
        slabs = range(len(self.access_lists))
        own = [
            self._dedup_rows.distinct(np.concatenate([of_slab[s].touched.rows_R for of_slab in reads])) for s in slabs
        ]
        counts = torch.tensor([[len(rows_R) for rows_R in own]] * replicas.size)
        received_counts, work = replicas.all_to_all(counts, [1] * replicas.size, [1] * replicas.size)
        sent = np.concatenate(own).astype(np.int32 if self._num_rows <= MAX_INT32 else np.int64)
        work.wait()
        from_replica = received_counts.numpy()  # [replica, slab]
        received, work = replicas.all_to_all(
            torch.from_numpy(np.tile(sent, replicas.size)),
            [len(sent)] * replicas.size,
            from_replica.sum(axis=1).tolist(),
        )
        work.wait()
        pieces = np.split(received.numpy(), np.cumsum(from_replica.reshape(-1))[:-1])
        return [self._dedup_rows.distinct(np.concatenate(pieces[s :: len(slabs)])) for s in slabs]

    def upload(
        self,
        slices: list[slice],
        requests: list[WindowRequest],
        served: Integers,
        reads: list[list[LocalReads]],
        united: list[Integers] | None = None,
    ) -> list[Window]:
        """The windows, with their index tensors on the device. `united`: as `unite` has found."""
        slabs, rank = range(len(self.access_lists)), self.group.rank
        named = [
            self._name_rows(s, [of_slab[s].touched for of_slab in reads], None if united is None else united[s])
            for s in slabs
        ]
        windows = []
        for w, (micro_batches, request) in enumerate(zip(slices, requests, strict=True)):
            plans = []
            for s, slab in enumerate(request.slabs):
                num_local, touched = int(slab.counts[rank]), reads[w][s].touched
                names, parts, staged_slots = named[s]
                plans.append(
                    SlabPlan(
                        requested=slab.counts.tolist(),
                        served=served[w, s].tolist(),
                        num_local=len(touched.rows_R) if self._zero_copy else num_local,
                        combination=slab.combination,
                        accesses=self._accesses(reads[w][s], names[w], num_local),
                        part=parts[w],
                        num_remote_tokens=slab.num_remote_tokens,
                        num_slots=0 if self._slots is None else self._slots[s].num_slots,
                        staged_slots=staged_slots,
                    )
                )
            index, keys_of_rows = request.index, request.keys_U
            if self._zero_copy:
                slot_U, keys_of_rows = self._zero_copy_slots(request.keys_U, reads[w][0].touched)
                index = index.renamed(slot_U)
            windows.append(Window(micro_batches, index.slots(self.device), len(request.keys_U), plans, keys_of_rows))
        return windows

    def _accesses(self, reads: LocalReads, names_R: Integers, num_local: int) -> Accesses:
        touched = replace(reads.touched, rows_R=names_R)
        if self._zero_copy:
            return build_zero_copy_accesses(touched, self.shard_device)
        return build_gathered_accesses(touched, reads.counts_Q, reads.coefficients_N, num_local, self.shard_device)

    def _zero_copy_slots(self, keys_U: Integers, touched: TouchedRows) -> tuple[Integers, Integers]:
        """(where the vector of each distinct key lies in a working set that begins with the touched rows; its keys)."""
        num_local, num_rows = touched.num_local_accesses, len(touched.rows_R)
        slot_U = np.concatenate((touched.index_N[:num_local], num_rows + np.arange(len(keys_U) - num_local)))
        global_R = touched.rows_R.astype(np.int64) * self.group.size + self.group.rank
        return slot_U, np.concatenate((global_R, keys_U[num_local:]))

    def _name_rows(
        self, slab: int, windows: list[TouchedRows], united: Integers | None
    ) -> tuple[list[Integers], list[PartOfStep] | list[None], Integers | None]:
        """What the shard calls the rows of each window; each window's share of the rows that the step touches; the
        slots of the step, if they are staged."""
        rows = [touched.rows_R for touched in windows]
        distinct, index = (rows[0], None) if len(rows) == 1 else self._dedup_rows(np.concatenate(rows))
        if united is not None:
            every = np.concatenate(rows)
            distinct, index = united, self._dedup_rows.translate(united, np.arange(len(united), dtype=np.int32), every)
        names, staged_slots = distinct, None
        if self._slots is not None:
            names = self._slots[slab].slots_of(distinct)
            if self._slots[slab].staged:
                order = np.argsort(names)
                staged_slots, names = names[order], np.empty_like(names)
                names[order] = np.arange(len(order))
        if index is None:
            return [names], [None], staged_slots
        indices = np.split(index, np.cumsum([len(rows_R) for rows_R in rows])[:-1])
        step_rows = index_to_device(names, self.shard_device)
        parts = [PartOfStep(step_rows, index_to_device(index_R, self.shard_device)) for index_R in indices]
        return [names[index_R] for index_R in indices], parts, staged_slots
