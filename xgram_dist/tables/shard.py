"""A shard: what one rank owns of a slab. Rows, gates, and their optimizer state.

    window = shard.begin(plan, local_QW)      the rows a window reads; the first window of a step begins `shard.step`
    window.gather_remote()                    vectors for the ranks that requested them
    window.gather_local()                     this rank's own vectors, while the remote ones are in flight
    shard.step.add_gradient(...)              gradient of the vectors -> gradient of rows and gates
    shard.step.apply(rates) or .abandon()     the update; or the step is skipped

A gradient covers the rows that a step touched and no others, so norm and clipping cost what was touched. Rows of an
optimizer that defers work (catch-up AdamW) are current whenever they are read.

A `Shard` holds all its rows. A `TouchedShard` holds records (records.py) of the rows that were read at least once: its
local rows are slots, and the plan says how many there are. A row that was never read is a formula: its initial values,
and what the optimizer does to a row without a gradient. Reading it creates its record, which is then what a `Shard`
would hold, bit for bit.

Collectives: an all-reduce of the gate gradients on the tensor axis, since a gate scales all columns of its row.
Shapes: S rows held here, R touched rows, Q vectors, W slab width, J tables of the slab.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.parallel.device import advise_huge_pages, to_device
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.exchange_plan import PartOfStep, SlabPlan, SlotSource
from xgram_dist.tables.initial_rows import initial_rows
from xgram_dist.tables.layout import Slab
from xgram_dist.tables.lookup import GatheredAccesses, RowGradient, ZeroCopyAccesses, scale_rows
from xgram_dist.tables.optimizers.base import PendingRows, RecordMemory, RowOptimizer
from xgram_dist.tables.optimizers.build import TableOptimizerSettings, TableRates
from xgram_dist.tables.records import Records, StorageSettings
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.row_sharding import RowSharding

INIT_ELEMENTS = 1 << 20
"""Elements initialised at a time; bounds the temporary memory."""
FP32_BYTES = 4


@dataclass
class ShardState:
    """All state of a shard as live tensors, to be saved or overwritten. Rows come in the order of `row_ids`."""

    row_ids: Tensor
    """Global row ids [S]."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """TABLE.rows and what the optimizer keeps for each element [S, width]; cut by columns over the tensor axis."""
    tables: dict[str, Tensor] = field(default_factory=dict)
    """TABLE.gates and other numbers for each row and table [S]; the same on all ranks of the tensor axis."""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """view-V.NAME: a number for each row, shared by all tables of the view [S]."""
    replicated: dict[str, Tensor] = field(default_factory=dict)
    """view-V.NAME: small tensors that are the same on every rank."""


class Shard:
    """Rows [S, W] of one slab held by this rank, their gates [S, J], and their optimizers."""

    def __init__(
        self,
        slab: Slab,
        row_ids: Tensor,
        rows: Tensor,
        gates: Tensor | None,
        tensor_group: ProcessGroup,
        settings: TableOptimizerSettings,
        num_vip: int,
        *,
        count_updates: bool = False,
        initial: "InitialValues | None" = None,
    ):
        """`row_ids`: global id of each row, ascending. `initial`: what the rows hold; by default unknown, so that they
        cannot start over. `tensor_group`: the ranks that hold the other columns of these
        rows, for tensors on the device of the rows; gates are the same on all of them. `num_vip`: how many of the first
        rows are VIP rows."""
        self.slab, self.row_ids, self.rows, self.gates, self.tensor_group = slab, row_ids, rows, gates, tensor_group
        self._initial = initial
        self.hit = torch.zeros(len(row_ids), dtype=torch.bool, device=rows.device)
        """Rows that training has touched so far."""
        self.updates = torch.zeros(len(row_ids), dtype=torch.int32, device=rows.device) if count_updates else None
        """Steps that updated each row."""
        self.row_optimizer: RowOptimizer = settings.build(rows, self.widths, num_vip, tensor_group)
        self.gate_optimizer = None if gates is None else settings.build_for_gates(gates)
        self.step: StepRows | None = None
        """Rows of the training step under way."""

    def create(self, num_slots: int) -> None:
        """Of a `TouchedShard`: the first so many slots are about to be read."""
        return

    def restart_rows(self, local_R: Tensor) -> None:
        """Make these local rows what they are if no step touches them. Their state may be anything before."""
        assert self._initial is not None
        if not local_R.numel():
            return
        state, values_RW = self.state_dict(), self.rows.new_empty(local_R.numel(), self.rows.shape[1])
        for tensor in (state.columns | state.tables | state.rows).values():
            tensor.index_fill_(0, local_R, 0)
        ids_R = self.row_ids.to(local_R.device)[local_R]
        self._initial.fill_rows(values_RW, ids_R)
        self.rows.index_copy_(0, local_R, values_RW)
        if self.gates is not None:
            gates_RJ = self.gates.new_empty(local_R.numel(), self.gates.shape[1])
            self._initial.fill_gates(gates_RJ, ids_R)
            self.gates.index_copy_(0, local_R, gates_RJ)
        for optimizer in self.optimizers:
            optimizer.start_rows(local_R)

    @property
    def num_local_rows(self) -> int:
        """Rows that this rank owns, whether they have been touched or not."""
        return len(self.row_ids)

    def num_hit(self) -> int:
        """Distinct rows that training has touched so far."""
        return int(self.hit.sum())

    def value_bytes(self) -> int:
        """Of rows and gates."""
        return self.rows.nbytes + (0 if self.gates is None else self.gates.nbytes)

    def optimizer_bytes(self) -> int:
        return sum(optimizer.nbytes() for optimizer in self.optimizers)

    @property
    def widths(self) -> list[int]:
        return [table.width for table in self.slab.tables]

    @property
    def names(self) -> list[str]:
        return [table.name for table in self.slab.tables]

    @property
    def optimizers(self) -> list[RowOptimizer]:
        return [self.row_optimizer] if self.gate_optimizer is None else [self.row_optimizer, self.gate_optimizer]

    @property
    def gradient(self) -> RowGradient | None:
        return None if self.step is None else self.step.gradient

    def begin(self, plan: SlabPlan, local_QW: Tensor, *, training: bool = True) -> "WindowRows":
        """The rows that a window reads. `local_QW`: memory for this rank's own vectors."""
        self.create(plan.num_slots)
        rows_R = plan.accesses.touched_R
        if not training:
            with self.writing(rows_R):
                self.catch_up(rows_R, moments=True)
            return WindowRows(self, plan, local_QW, *self._table_rows(rows_R))
        if plan.part is None:
            self.step = WholeStepRows(self, rows_R)
            return WindowRows(self, plan, local_QW, self.step.rows, self.step.gates)
        if not isinstance(self.step, WindowedStepRows):
            self.step = WindowedStepRows(self, plan.part)
        with self.writing(rows_R):
            self.catch_up(rows_R, moments=False)
        return WindowRows(self, plan, local_QW, *self._table_rows(rows_R))

    def _table_rows(self, rows_R: Tensor) -> tuple[PendingRows, PendingRows | None]:
        """Rows whose current values are in the table."""
        return PendingRows(self.rows, rows_R), None if self.gates is None else PendingRows(self.gates, rows_R)

    def writing(self, rows_R: Tensor | None) -> AbstractContextManager[None]:
        """Every write to existing rows and their state happens within such a block, which names the rows; None: all."""
        return nullcontext()

    def catch_up(self, rows_R: Tensor, *, moments: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.catch_up(rows_R, moments=moments)

    def catch_up_all(self) -> None:
        with self.writing(None):
            for optimizer in self.optimizers:
                optimizer.catch_up_all()

    def sweep_if_due(self) -> None:
        """Of a `TouchedShard`: what the update of a `Shard` does by itself."""
        return

    def state_dict(self) -> ShardState:
        """The whole state, with the global row ids. Nothing is copied or caught up."""
        state = ShardState(self.row_ids)
        view = f"view-{self.slab.view}"
        tensors = [("rows", self.rows, self.row_optimizer)]
        if self.gates is not None and self.gate_optimizer is not None:
            tensors.append(("gates", self.gates, self.gate_optimizer))
        for kind, values, optimizer in tensors:
            kept = optimizer.state()
            for suffix, tensor in {"": values, **{f".{key}": one for key, one in kept.columns.items()}}.items():
                for number, (name, columns) in enumerate(self.slab.columns().items()):
                    if kind == "rows":
                        state.columns[f"{name}.{kind}{suffix}"] = tensor[:, columns]
                    else:
                        state.tables[f"{name}.{kind}{suffix}"] = tensor[:, number]
            for key, tensor in kept.tables.items():
                state.tables |= {f"{name}.{kind}.{key}": tensor[:, j] for j, name in enumerate(self.names)}
            state.rows |= {f"{view}.{kind}.{key}": tensor for key, tensor in kept.rows.items()}
            state.replicated |= {f"{view}.{kind}.{key}": tensor for key, tensor in kept.replicated.items()}
        state.rows[f"{view}.hit"] = self.hit
        if self.updates is not None:
            state.rows[f"{view}.updates"] = self.updates
        return state

    def load_replicated(self, saved: dict[str, Tensor]) -> None:
        """After the other tensors of `state_dict` were overwritten: its saved `replicated`."""
        for kind, optimizer in zip(("rows", "gates"), self.optimizers, strict=False):
            prefix = f"view-{self.slab.view}.{kind}."
            optimizer.load_replicated(
                {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}
            )


class InitialValues:
    """The values that rows and gates of a slab have before training."""

    def __init__(self, config: Config, slab: Slab, tensor_rank: int):
        self._slab, self._tensor_rank = slab, tensor_rank
        self._std, self._seed, self._gate = config.model.init_std, config.train.seed, config.memory.row_gate_init

    def fill_gates(self, gates_SJ: Tensor, row_ids_S: Tensor) -> None:
        gates_SJ.fill_(self._gate)

    def fill_rows(self, rows_SW: Tensor, row_ids_S: Tensor) -> None:
        """`row_ids_S`: the global id of each row."""
        for table in self._slab.tables:
            columns = self._slab.columns()[table.name]
            step = max(1, INIT_ELEMENTS // table.width)
            for start in range(0, len(row_ids_S), step):
                rows_SW[start : start + step, columns] = initial_rows(
                    row_ids_S[start : start + step],
                    table.width,
                    self._std,
                    self._seed,
                    table.name,
                    self._tensor_rank * table.width,
                )


class TouchedShard(Shard):
    """The rows of a slab that were touched, as records. What a `Shard` calls a local row is a slot here."""

    def __init__(
        self,
        slab: Slab,
        sharding: RowSharding,
        rank: int,
        initial: InitialValues,
        storage: StorageSettings,
        tensor_group: ProcessGroup,
        settings: TableOptimizerSettings,
        num_vip: int,
        *,
        gated: bool,
        count_updates: bool = False,
    ):
        """`rank`: of the data axis. The other arguments as in `Shard`."""
        self.slab, self.tensor_group = slab, tensor_group
        self._sharding, self._rank = sharding, rank
        self._initial: InitialValues = initial
        fields = settings.record_fields(slab.width, len(slab.tables), gated=gated, counted=count_updates)
        self.records = Records(fields, sharding.count(rank), storage, f"view-{slab.view}")
        self._changed = torch.zeros(0, dtype=torch.bool, device=self.records.storage.records.device)
        """Slots that were written since the last checkpoint. Grows ahead of the records."""
        self.rows = self.records.field("rows")
        self.gates = self.records.field("gates") if gated else None
        self.hit = self.records.field("hit")
        self.updates = self.records.field("updates") if count_updates else None
        memory = RecordMemory(self.records, "rows")
        self.row_optimizer = settings.build(self.rows, self.widths, num_vip, tensor_group, memory)
        self.gate_optimizer = None
        if self.gates is not None:
            self.gate_optimizer = settings.build_for_gates(self.gates, RecordMemory(self.records, "gates"))
        self.step = None
        for optimizer in self.optimizers:
            optimizer.num_rows, optimizer.sweeps = 0, False
        self._prepared: deque[tuple[slice, Tensor]] = deque()
        """Slots that planning has given to rows, and the initial values of these."""
        # VIP rows are the first local rows, and the most frequent ones: as the first slots, they are still the first.
        self.records.slots.lookup(np.arange(self.row_optimizer.num_vip))
        self.create(self.row_optimizer.num_vip)

    @property
    def row_ids(self) -> Tensor:  # type: ignore[override]
        """Global id of each slot's row, in host memory."""
        return torch.from_numpy(self._global_ids(slice(0, self.records.num_created)))

    @property
    def num_local_rows(self) -> int:
        return self.records.max_rows

    def num_hit(self) -> int:
        return int(self.hit[: self.records.num_created].sum())

    def value_bytes(self) -> int:
        return (
            FP32_BYTES
            * self.records.num_created
            * (self.slab.width + (len(self.names) if self.gates is not None else 0))
        )

    def optimizer_bytes(self) -> int:
        return self.records.nbytes - self.value_bytes()

    def _global_ids(self, slots: slice) -> NDArray[np.int64]:
        return self._sharding.global_rows(self._rank, self.records.slots.rows_of(slots))

    def create(self, num_slots: int) -> None:
        """Initialise the records of slots that are new, up to `num_slots`. Plans may be read in another order than
        they were made, so those of a plan that is still to be read may be among them."""
        first = self.records.num_created
        if num_slots <= first:
            return
        self.records.ensure(num_slots)
        while first < num_slots:
            new, values = slice(first, num_slots), None
            if self._prepared and self._prepared[0][0].start == first:
                new, values = self._prepared.popleft()
            elif self._prepared:
                new = slice(first, min(num_slots, self._prepared[0][0].start))
            self._create(new, values)
            first = new.stop

    def _create(self, new: slice, values: Tensor | None) -> None:
        slots_R = torch.arange(new.start, new.stop, device=self.rows.device)
        with self.writing(slots_R):
            if values is None:
                self._initial.fill_rows(self.rows[new], self._global_ids_on_device(new))
            else:
                self.rows[new] = values
            if self.gates is not None:
                self._initial.fill_gates(self.gates[new], self._global_ids_on_device(new))
            for optimizer in self.optimizers:
                optimizer.num_rows = new.stop
                optimizer.start_rows(slots_R)
        self.records.num_created = new.stop

    @contextmanager
    def writing(self, rows_R: Tensor | None) -> Iterator[None]:
        if rows_R is None:
            rows_R = torch.arange(self.records.num_created, device=self.rows.device)
        if len(self._changed) < len(self.records.slots):
            larger = self._changed.new_zeros(2 * len(self.records.slots))
            larger[: len(self._changed)] = self._changed
            self._changed = larger
        self._changed.index_fill_(0, rows_R, True)
        with self.records.writing(rows_R):
            yield

    def sweep_if_due(self) -> None:
        for optimizer in self.optimizers:
            if optimizer.sweep_due:
                with self.writing(None):
                    optimizer.catch_up_all()

    def _global_ids_on_device(self, slots: slice) -> Tensor:
        return to_device(torch.from_numpy(self._global_ids(slots)), self.rows.device)

    @property
    def num_slots(self) -> int:
        return len(self.records.slots)

    def slots_of(self, rows_R: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots of distinct local rows that the next step reads, for planning, in its thread. A row that has none
        gets one; its initial values are computed here, ahead of the step."""
        records, first = self.records, len(self.records.slots)
        slots_R = records.slots.lookup(rows_R)
        records.storage.prefetch(slots_R[slots_R < records.num_created])
        new = slice(first, len(records.slots))
        if new.stop > first:
            values = torch.empty(new.stop - first, self.slab.width, device=self.rows.device)
            self._initial.fill_rows(values, self._global_ids_on_device(new))
            self._prepared.append((new, values))
        return slots_R

    def read_from(self, source: InitialValues) -> None:
        """Rows have these values instead of the initial ones: for rows that are only read."""
        self._initial = source
        with self.writing(None):
            self.restart_rows(torch.arange(self.records.num_created, device=self.rows.device))

    def owned_rows(self, row_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of these global rows that this rank owns."""
        return row_ids[self._sharding.owners_of(row_ids) == self._rank]

    def every_row(self) -> NDArray[np.int64]:
        """All rows that this rank owns: for tables of the vocabulary's size."""
        return self._sharding.rows_of(self._rank)

    def adopt(self, row_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Make room for these rows, whose state is about to be overwritten. Returns their slots."""
        slots = self.records.slots.lookup(self._sharding.local_rows(row_ids))
        self.create(len(self.records.slots))
        return slots

    def num_changed(self) -> int:
        """Rows that were written since the last checkpoint."""
        return int(self._changed[: self.records.num_created].sum())

    def mark_saved(self) -> None:
        """The state is saved, or being saved from a copy: changes count from now."""
        self._changed.zero_()

    def changed_state(self) -> ShardState:
        """Of the rows that were written since the last checkpoint; copies."""
        slots_R = self._changed[: self.records.num_created].nonzero().flatten()
        self.records.verify(slots_R)
        state = self.state_dict()
        for tensors in (state.columns, state.tables, state.rows):
            for name in tensors:
                tensors[name] = tensors[name].index_select(0, slots_R)
        return replace(state, row_ids=state.row_ids.index_select(0, slots_R.cpu()))

    def state_dict(self) -> ShardState:
        """Of the rows that were touched."""
        state, count = super().state_dict(), self.records.num_created
        for tensors in (state.columns, state.tables, state.rows):
            for name in tensors:
                tensors[name] = tensors[name][:count]
        return state


class WindowRows:
    """The rows that one window reads from a shard: the segment that remote ranks request first, then the rest."""

    def __init__(self, shard: Shard, plan: SlabPlan, local_QW: Tensor, rows: PendingRows, gates: PendingRows | None):
        self._shard, self._plan, self._local_QW = shard, plan, local_QW
        self._pending, self._pending_gates = rows, gates
        accesses, num_rows = plan.accesses, plan.accesses.touched_R.numel()
        self._segments = slice(0, accesses.num_remote), slice(accesses.num_remote, num_rows)
        # Zero-copy: the working set's memory is where the rows are gathered.
        zero_copy = isinstance(accesses, ZeroCopyAccesses)
        self._rows_RW = local_QW if zero_copy else shard.rows.new_empty(num_rows, shard.rows.shape[1])
        self._gates_RJ = None if shard.gates is None else shard.gates.new_empty(num_rows, shard.gates.shape[1])
        self._scaled_RW = self._rows_RW if self._gates_RJ is None else torch.empty_like(self._rows_RW)

    def gather_remote(self) -> Tensor:
        """One vector for each token that remote ranks request."""
        self._gather(self._segments[0])
        return self._plan.accesses.remote.retrieve(self._scaled_RW)

    def gather_local(self) -> None:
        """This rank's own vectors, into the memory given to `begin`. Call after `gather_remote`."""
        self._gather(self._segments[1])
        accesses = self._plan.accesses
        if isinstance(accesses, GatheredAccesses):
            accesses.local.retrieve_into(self._local_QW, self._scaled_RW)

    def _gather(self, segment: slice) -> None:
        self._pending.gather(segment, self._rows_RW)
        if self._pending_gates is not None and self._gates_RJ is not None:
            self._pending_gates.gather(segment, self._gates_RJ)
            rows_RW, gates_RJ = self._rows_RW[segment], self._gates_RJ[segment]
            scale_rows(self._scaled_RW[segment], rows_RW, gates_RJ, self._shard.widths)


class StepRows(ABC):
    """The rows of a shard that one training step touches, from the first fetch to the update."""

    gradient: RowGradient | None = None

    def __init__(self, shard: Shard):
        self.shard = shard

    def add_gradient(self, plan: SlabPlan, remote_QW: Tensor, local_RW: Tensor, num_ranks: int) -> None:
        """The gradient of a window's vectors, as the mean over the ranks. `remote_QW`: as received; for gathered reads
        this rank's own come first. `local_RW`: this rank's own, overwritten; used by zero-copy reads alone."""
        shard, accesses = self.shard, plan.accesses
        if isinstance(accesses, ZeroCopyAccesses):
            new = accesses.row_gradient(local_RW, remote_QW, num_ranks)
        else:
            assert isinstance(accesses, GatheredAccesses)
            gated = None if shard.gates is None else self._values_read(plan)
            new = accesses.row_gradient(remote_QW, gated, shard.widths, num_ranks)
        if new.gates_RJ is not None:
            shard.tensor_group.all_reduce_sum(new.gates_RJ)
        self._accumulate(plan, new)

    @abstractmethod
    def _values_read(self, plan: SlabPlan) -> tuple[Tensor, Tensor]:
        """Rows and gates that the window's forward pass read."""

    @abstractmethod
    def _accumulate(self, plan: SlabPlan, new: RowGradient) -> None: ...

    def apply(self, rates: TableRates) -> None:
        """One optimizer step on the touched rows and gates."""
        if self.gradient is not None:
            shard, touched_R = self.shard, self.gradient.touched_R
            with shard.writing(touched_R):
                self._apply(self.gradient, rates)
                shard.hit.index_fill_(0, touched_R, True)
                if shard.updates is not None:  # touched rows are distinct
                    shard.updates.index_add_(0, touched_R, shard.updates.new_ones(()).expand(len(touched_R)))
            shard.sweep_if_due()
        self.shard.step = None

    @abstractmethod
    def _apply(self, gradient: RowGradient, rates: TableRates) -> None: ...

    def abandon(self) -> None:
        """Skip the step: the rows are caught up as if they had not been read for an update."""
        if self.gradient is not None:
            with self.shard.writing(self.gradient.touched_R):
                self.shard.catch_up(self.gradient.touched_R, moments=True)
                self.shard.hit.index_fill_(0, self.gradient.touched_R, True)
        self.shard.step = None


class WholeStepRows(StepRows):
    """One window is the whole step: the copies made for the fetch serve the update too."""

    def __init__(self, shard: Shard, rows_R: Tensor):
        super().__init__(shard)
        self.rows = shard.row_optimizer.begin(rows_R)
        self.gates = None if shard.gate_optimizer is None else shard.gate_optimizer.begin(rows_R)

    def _values_read(self, plan: SlabPlan) -> tuple[Tensor, Tensor]:
        assert self.gates is not None
        return self.rows.values(), self.gates.values()

    def _accumulate(self, plan: SlabPlan, new: RowGradient) -> None:
        self.gradient = new

    def _apply(self, gradient: RowGradient, rates: TableRates) -> None:
        shard, factor = self.shard, gradient.factor
        shard.row_optimizer.update_pending(self.rows, gradient.rows_RW, (rates.vip, rates.body), factor)
        if shard.gate_optimizer is not None and self.gates is not None and gradient.gates_RJ is not None:
            shard.gate_optimizer.update_pending(self.gates, gradient.gates_RJ, (rates.gates, rates.gates), factor)


class WindowedStepRows(StepRows):
    """Several windows: rows are caught up in place for each, and their gradients add up over the step."""

    def __init__(self, shard: Shard, part: PartOfStep):
        super().__init__(shard)
        self._touched_R = part.step_rows

    def _values_read(self, plan: SlabPlan) -> tuple[Tensor, Tensor]:
        assert self.shard.gates is not None
        rows_R = plan.accesses.touched_R
        return self.shard.rows.index_select(0, rows_R), self.shard.gates.index_select(0, rows_R)

    def _accumulate(self, plan: SlabPlan, new: RowGradient) -> None:
        assert plan.part is not None
        assert new.factor == 1, "zero-copy reads are for a window that is the whole step"
        if self.gradient is None:
            count = self._touched_R.numel()
            gates = None if new.gates_RJ is None else new.gates_RJ.new_zeros(count, new.gates_RJ.shape[1])
            rows = new.rows_RW.new_zeros(count, new.rows_RW.shape[1])
            self.gradient = RowGradient(self._touched_R, rows, gates)
        self.gradient.rows_RW.index_add_(0, plan.part.index_R, new.rows_RW)
        if self.gradient.gates_RJ is not None and new.gates_RJ is not None:
            self.gradient.gates_RJ.index_add_(0, plan.part.index_R, new.gates_RJ)

    def _apply(self, gradient: RowGradient, rates: TableRates) -> None:
        shard, rows_R, factor = self.shard, gradient.touched_R, gradient.factor
        shard.row_optimizer.update(rows_R, gradient.rows_RW, (rates.vip, rates.body), factor)
        if shard.gate_optimizer is not None and gradient.gates_RJ is not None:
            shard.gate_optimizer.update(rows_R, gradient.gates_RJ, (rates.gates, rates.gates), factor)


class TableShards:
    """All shards of this rank, one a slab."""

    def __init__(
        self,
        config: Config,
        slabs: tuple[Slab, ...],
        routing: Routing | None,
        device: torch.device,
        sharding: RowSharding,
        mesh: Mesh,
        settings: TableOptimizerSettings,
        *,
        touched: bool = False,
    ):
        """`touched`: keep records of touched rows only."""
        assert (routing is None) == (config.memory.compression == 1)
        rank = mesh.data.rank
        num_vip = sharding.count_below(rank, routing.vip_rows) if routing is not None else 0
        self.sharding, self.settings, self.num_vip = sharding, settings, num_vip
        self.num_rows, self.counts_updates = sharding.num_rows, config.memory.count_updates
        self._tensor_size = mesh.tensor.size
        gated = config.memory.row_gates and config.memory.compression < 1
        tensor_group, counted = mesh.tensor.for_device(device), config.memory.count_updates
        self._shards: list[Shard] = []
        if touched:
            for slab in slabs:
                initial = InitialValues(config, slab, mesh.tensor.rank)
                where = StorageSettings.of(config, device, mesh.world.rank), tensor_group
                self._shards.append(
                    TouchedShard(
                        slab, sharding, rank, initial, *where, settings, num_vip, gated=gated, count_updates=counted
                    )
                )
            return
        row_ids = torch.tensor(sharding.rows_of(rank), device=device, dtype=torch.int64)
        for slab in slabs:
            initial = InitialValues(config, slab, mesh.tensor.rank)
            rows = advise_huge_pages(torch.empty(len(row_ids), slab.width, device=device))
            initial.fill_rows(rows, row_ids)
            gates = torch.empty(len(row_ids), len(slab.tables), device=device) if gated else None
            if gates is not None:
                initial.fill_gates(gates, row_ids)
            shard = Shard(
                slab, row_ids, rows, gates, tensor_group, settings, num_vip, count_updates=counted, initial=initial
            )
            self._shards.append(shard)

    @property
    def touched(self) -> bool:
        """Whether records of touched rows alone are kept."""
        return isinstance(self._shards[0], TouchedShard)

    def num_created(self) -> int:
        """Records of all shards."""
        return sum(len(shard.row_ids) for shard in self._touched())

    def num_changed(self) -> int:
        return sum(shard.num_changed() for shard in self._touched())

    def mark_saved(self) -> None:
        for shard in self._touched():
            shard.mark_saved()

    def verify(self) -> None:
        """Raise if a record is damaged, before all of them are saved."""
        for shard in self._touched():
            shard.records.verify(torch.arange(shard.records.num_created))

    def _touched(self) -> Iterator[TouchedShard]:
        return (shard for shard in self._shards if isinstance(shard, TouchedShard))

    def __iter__(self) -> Iterator[Shard]:
        return iter(self._shards)

    def __getitem__(self, index: int) -> Shard:
        return self._shards[index]

    def __len__(self) -> int:
        return len(self._shards)

    def gradient_square_sum(self) -> Tensor:
        """This rank's share of the squared norm of all table gradients: the sum over all ranks is the norm's."""
        total = self._shards[0].rows.new_zeros(())
        for shard in self._shards:
            gradient = shard.gradient
            if gradient is not None:
                squares = torch.linalg.vector_norm(gradient.rows_RW).square()
                if gradient.gates_RJ is not None:
                    squares = squares + torch.linalg.vector_norm(gradient.gates_RJ).square() / self._tensor_size
                total = total + squares * gradient.factor**2
        return total

    def apply(self, rates: TableRates, clip: float = 1.0) -> None:
        """One optimizer step of all shards. `clip`: factor of the gradients by joint clipping."""
        for shard in self._shards:
            if shard.step is not None:
                if shard.step.gradient is not None and clip < 1:
                    shard.step.gradient.factor *= clip
                shard.step.apply(rates)

    def abandon(self) -> None:
        """Skip the step under way."""
        for shard in self._shards:
            if shard.step is not None:
                shard.step.abandon()

    def rows_hit(self) -> tuple[int, int]:
        """(distinct rows that training has touched so far, rows owned by this rank), over all tables."""
        hit = sum(shard.num_hit() * len(shard.slab.tables) for shard in self._shards)
        return hit, sum(shard.num_local_rows * len(shard.slab.tables) for shard in self._shards)

    @property
    def slot_sources(self) -> list[SlotSource] | None:
        """The shards, if they keep touched rows only."""
        touched: list[SlotSource] = [shard for shard in self._shards if isinstance(shard, TouchedShard)]
        return touched or None

    def close(self) -> None:
        for shard in self._shards:
            if isinstance(shard, TouchedShard):
                shard.records.storage.close()
