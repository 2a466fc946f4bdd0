"""The messages of an exchange: vectors on their way to a working set, gradients on their way back.

A slab's columns are cut by groups of layers, and each group is a message of its own:

    fetch    group 0 is sent first. A table's vectors are waited for when the network first reads it, so the first
             forward pass waits layer by layer
    return   the last group is sent first, as soon as the last backward pass has left its layers

The order is fixed, and the same on all ranks: groups ascending in the fetch and descending in the return, within a
group slab by slab. With one group, a slab is one message each way. However it is cut, the same numbers arrive at the
same places; whatever is computed of them is computed for the whole slab, or is separate for each column. So results do
not depend on the groups, bit for bit.

Collectives: on the wire's group, one all-to-all a slab and group each way; on the tensor axis, an all-gather of each
table at a residual site when its group arrives, and under sequence parallelism an all-reduce of its gradient.
Shapes: U vectors of the working set, P (token, owner) pairs of a slab, Q vectors requested from this owner, W slab
width.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from xgram_dist.parallel.device import pin_for
from xgram_dist.parallel.process_group import CompletedWork, ProcessGroup
from xgram_dist.parallel.watchdog import Phases
from xgram_dist.tables.exchange_plan import SlabPlan, Window
from xgram_dist.tables.layout import RESIDUAL_SITES, Table
from xgram_dist.tables.lookup import GatheredAccesses
from xgram_dist.tables.shard import Shard
from xgram_dist.tables.working_set import SlabGradient, WorkingSet


@dataclass(frozen=True)
class Message:
    """Columns of vectors under way from all ranks."""

    target: Tensor
    """Where they go."""
    received: Tensor
    """Where they arrive: `target` itself, or a contiguous buffer where that has gaps."""
    work: Any

    def wait(self) -> None:
        self.work.wait()
        if self.received is not self.target:
            # `data`: columns beside it may be in use, and autograd must not take this for a change of theirs.
            self.target.data.copy_(self.received)


@dataclass(frozen=True)
class Wire:
    """How vectors travel: over which ranks, in which type, from and to which device."""

    group: ProcessGroup
    tensor_group: ProcessGroup
    device: torch.device
    dtype: torch.dtype | None
    """None: that of the rows."""
    partial_gradients: bool
    """Whether gradients at residual sites are terms of a sum over the tensor axis."""
    num_ranks: int
    """Over which gradients are averaged: those of `group`, and of the other replicas of the tables."""

    def empty(self, count: int, shard: Shard) -> Tensor:
        """Memory for vectors of a slab, in the type in which they travel."""
        return torch.empty(count, shard.rows.shape[1], dtype=self.dtype or shard.dtype, device=self.device)

    def convert(self, vectors: Tensor) -> Tensor:
        """As they are sent."""
        vectors = vectors.to(self.dtype or vectors.dtype).contiguous()
        return pin_for(self.device, vectors).to(self.device, non_blocking=True)

    def send(self, target: Tensor, vectors: Tensor, sent_counts: list[int], received_counts: list[int]) -> Message:
        """Starts an all-to-all without this rank's own segment."""
        if not target.shape[1]:
            return Message(target, target, CompletedWork())
        received = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        work = self.group.all_to_all_remote(received, self.convert(vectors), sent_counts, received_counts)
        return Message(target, received, work)

    def num_remote(self, counts: list[int]) -> int:
        return sum(counts) - counts[self.group.rank]

    def is_gathered(self, table: Table) -> bool:
        """Whether a rank's vectors have the columns of all ranks of the tensor axis."""
        return table.site in RESIDUAL_SITES and self.tensor_group.size > 1

    def local_columns(self, table: Table, gradient: Tensor | None) -> Tensor | None:
        """The gradient of a table's columns held here."""
        if gradient is None or not self.is_gathered(table):
            return gradient
        if self.partial_gradients:
            self.tensor_group.all_reduce_sum(gradient)
        return gradient[:, self.tensor_group.rank * table.width : (self.tensor_group.rank + 1) * table.width]


class SlabExchange:
    """One slab of a working set: its vectors on their way here, then their gradients on their way back."""

    def __init__(
        self, wire: Wire, shard: Shard, plan: SlabPlan, groups: list[list[int]], num_vectors: int, training: bool
    ):
        """Gathers the vectors that remote ranks request. `groups`: the layers of each message. `num_vectors`: of the
        working set."""
        self._wire, self._shard, self._plan = wire, shard, plan
        self.tables = [[table for table in shard.slab.tables if table.layer in layers] for layers in groups]
        """Of each group."""
        self._columns = shard.slab.columns()
        self._vectors_PW = wire.empty(plan.num_local + wire.num_remote(plan.requested), shard)
        self._rows = shard.begin(plan, self._vectors_PW[: plan.num_local], training=training)
        self._gathered_QW = self._rows.gather_remote()
        self._messages: list[Message] = []
        like = torch.empty(0, dtype=shard.dtype, device=wire.device)
        self._gradient = SlabGradient(num_vectors, shard.rows.shape[1], like)
        self.whole_leaf: Tensor | None = None
        """With one group: all vectors [U, W], which may be used as one leaf instead of a leaf a table."""
        self._returned_QW: Tensor | None = None

    def group_columns(self, group: int) -> slice:
        tables = self.tables[group]
        return slice(self._columns[tables[0].name].start, self._columns[tables[-1].name].stop) if tables else slice(0)

    # Fetch

    def send_vectors(self, group: int) -> None:
        columns, plan = self.group_columns(group), self._plan
        target = self._vectors_PW[plan.num_local :, columns]
        self._messages.append(self._wire.send(target, self._gathered_QW[:, columns], plan.served, plan.requested))

    def gather_local(self) -> None:
        """This rank's own vectors, while the others travel."""
        self._rows.gather_local()
        del self._rows, self._gathered_QW

    def receive_vectors(self, group: int) -> dict[Table, Tensor]:
        """Waits for a group. The vectors of its tables [U, width]."""
        if not self.tables[group]:
            return {}
        self._messages[group].wait()
        columns = self.group_columns(group)
        part_UW = self._plan.combination.combine(self._vectors_PW[:, columns].to(self._shard.dtype))
        if len(self.tables) == 1:
            self.whole_leaf = part_UW.detach()
        found = {}
        for table in self.tables[group]:
            start = self._columns[table.name].start - columns.start
            vectors = part_UW[:, start : start + table.width]
            found[table] = self._wire.tensor_group.all_gather(vectors, 1) if self._wire.is_gathered(table) else vectors
        return found

    def end_fetch(self) -> None:
        """All groups have been received: what remains are the leaves."""
        self._messages = []
        del self._vectors_PW

    # Return

    def accumulate(self, table: Table, leaf: Tensor, *, final: bool) -> None:
        """A backward pass has accumulated the gradient of a leaf. `final`: it is complete."""
        columns = self._columns[table.name]
        if not self._wire.is_gathered(table):
            self._gradient.take(leaf, columns)
        elif final:
            self.put_gradient(table, leaf.grad)

    def put_gradient(self, table: Table, gradient: Tensor | None) -> None:
        """The complete gradient of a leaf."""
        if self.whole_leaf is not None and self.whole_leaf.grad is not None:
            return  # the whole slab was used as one leaf
        self._gradient.put(self._columns[table.name], self._wire.local_columns(table, gradient))

    def send_gradients(self, group: int) -> None:
        """Of a group whose gradients are complete."""
        plan, wire, columns = self._plan, self._wire, self.group_columns(group)
        sent_PW = plan.combination.expand(self._gradient_columns(columns))
        local_PW, remote_PW = sent_PW[: plan.num_local], sent_PW[plan.num_local :]
        copied = plan.num_local if isinstance(plan.accesses, GatheredAccesses) else 0
        if wire.group.size == 1:
            self._returned_QW = wire.convert(local_PW[:copied])
            return
        if self._returned_QW is None:
            self._returned_QW = wire.empty(copied + wire.num_remote(plan.served), self._shard)
        target = self._returned_QW[copied:, columns]
        self._messages.append(wire.send(target, remote_PW, plan.requested, plan.served))
        self._returned_QW[:copied, columns].copy_(local_PW[:copied])

    def receive_gradients(self) -> None:
        """Waits for all groups, and frees what was sent."""
        while self._messages:
            self._messages.pop(0).wait()

    def add_gradients(self) -> None:
        """To those of the step's rows, once all groups were received."""
        shard, plan = self._shard, self._plan
        assert shard.step is not None, "give_back without fetch"
        assert self._returned_QW is not None
        returned_QW, self._returned_QW = self._returned_QW.to(shard.rows.device, shard.dtype), None
        local_RW = self._gradient_columns(slice(None))[: plan.num_local]
        shard.step.add_gradient(plan, returned_QW, local_RW, self._wire.num_ranks)

    def _gradient_columns(self, columns: slice) -> Tensor:
        """[U, columns]"""
        if self.whole_leaf is not None and self.whole_leaf.grad is not None:
            return self.whole_leaf.grad[:, columns]
        return self._gradient.columns(columns)


class GradientReturn:
    """The return of a working set, group by group from the last. It holds no leaf, so that leaves can hold it."""

    def __init__(self, slabs: list[SlabExchange], num_groups: int, phases: Phases):
        self._slabs, self._phases = slabs, phases
        self._last_backward = False
        self._next = num_groups - 1
        """The group that is sent next; below 0: all were sent."""
        self._incomplete = [{table for slab in slabs for table in slab.tables[group]} for group in range(num_groups)]
        """Tables of each group whose gradient is not complete."""

    def begin(self) -> None:
        self._last_backward = True

    @torch.no_grad()
    def accumulated(self, slab: SlabExchange, table: Table, group: int, leaf: Tensor) -> None:
        """Autograd calls it for each leaf and backward pass."""
        slab.accumulate(table, leaf, final=self._last_backward)
        if self._last_backward:
            self._incomplete[group].discard(table)
            if group == self._next and not self._incomplete[group]:
                with self._phases("return"):
                    self._send_complete()

    @torch.no_grad()
    def end(self, leaves: Mapping[str, Tensor]) -> None:
        """Sends what was not sent, and waits for all."""
        for slab in self._slabs:
            for group, tables in enumerate(slab.tables):
                for table in tables:
                    if table in self._incomplete[group]:
                        slab.put_gradient(table, leaves[table.name].grad)
        self._incomplete = [set() for _ in self._incomplete]
        self._send_complete()
        for slab in self._slabs:
            slab.receive_gradients()
        for slab in self._slabs:
            slab.add_gradients()

    def _send_complete(self) -> None:
        while self._next >= 0 and not self._incomplete[self._next]:
            for slab in self._slabs:
                slab.send_gradients(self._next)
            self._next -= 1


class Leaves(Mapping[str, Tensor]):
    """The leaves of a working set, by table. Reading one waits for the group of its layer."""

    def __init__(self, slabs: list[SlabExchange], num_groups: int, phases: Phases, training: bool):
        self._slabs, self._phases, self._training = slabs, phases, training
        self.gradients = GradientReturn(slabs, num_groups, phases)
        self._group_of = {
            table.name: group for slab in slabs for group in range(num_groups) for table in slab.tables[group]
        }
        self._on_the_way = set(range(num_groups))
        self._leaves: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._leaves:
            self._receive(self._group_of[name])
        return self._leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group_of)

    def __len__(self) -> int:
        return len(self._group_of)

    def wait(self) -> None:
        for group in sorted(self._on_the_way):
            self._receive(group)

    @torch.no_grad()
    def _receive(self, group: int) -> None:
        with self._phases("wait"):
            for slab in self._slabs:
                for table, vectors in slab.receive_vectors(group).items():
                    leaf = self._leaves[table.name] = vectors.detach().requires_grad_(self._training)
                    if self._training:
                        hook = partial(self.gradients.accumulated, slab, table, group)
                        leaf.register_post_accumulate_grad_hook(hook)
            self._on_the_way.remove(group)
            if not self._on_the_way:
                for slab in self._slabs:
                    slab.end_fetch()


class ShardedWorkingSet(WorkingSet):
    def __init__(
        self,
        window: Window,
        slabs: list[SlabExchange],
        num_groups: int,
        phases: Phases,
        *,
        training: bool,
        overlap: bool,
    ):
        """`overlap`: vectors and gradients travel while the network computes."""
        self._leaves = Leaves(slabs, num_groups, phases, training)
        super().__init__(window, self._leaves)
        self._slabs, self._overlap = slabs, overlap
        if not overlap:
            self.wait()

    def wait(self) -> None:
        self._leaves.wait()

    def begin_return(self) -> None:
        if self._overlap:
            self._leaves.gradients.begin()

    def end_return(self) -> None:
        self._leaves.wait()
        self._leaves.gradients.end(self._leaves)

    @property
    def slabs(self) -> list[Tensor]:
        """Where a slab is one message: the same memory as the values, one tensor a slab [U, W]. A reader of all tables
        may use the whole slab as one leaf instead."""
        self.wait()
        return [slab.whole_leaf for slab in self._slabs if slab.whole_leaf is not None]
