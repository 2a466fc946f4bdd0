"""A shard: what one rank owns of a slab. Rows, gates, and their optimizer state.

    window = shard.begin(plan, local_QW)      the rows a window reads; the first window of a step begins `shard.step`
    window.gather_remote()                    vectors for the ranks that requested them
    window.gather_local()                     this rank's own vectors, while the remote ones are in flight
    shard.step.add_gradient(...)              gradient of the vectors -> gradient of rows and gates
    shard.step.apply(rates) or .abandon()     the update; or the step is skipped

A gradient covers the rows that a step touched and no others, so norm and clipping cost what was touched. Rows of an
optimizer that defers work (catch-up AdamW) are current whenever they are read.

A `Shard` holds all its rows, a `TouchedShard` (touched_shard.py) those that were read at least once.

Collectives: an all-reduce of the gate gradients on the tensor axis, since a gate scales all columns of its row.
Shapes: S rows held here, R touched rows, Q vectors, W slab width, J tables of the slab.
"""

from abc import ABC, abstractmethod
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.exchange_plan import PartOfStep, SlabPlan, Window
from xgram_dist.tables.initial_rows import InitialValues
from xgram_dist.tables.layout import Slab
from xgram_dist.tables.lookup import GatheredAccesses, RowGradient, ZeroCopyAccesses, scale_rows
from xgram_dist.tables.optimizers.base import PendingRows, RowOptimizer
from xgram_dist.tables.optimizers.build import TableOptimizerSettings, TableRates
from xgram_dist.tables.optimizers.rounding import compute_dtype


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
        initial: InitialValues | None = None,
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
        self.row_optimizer: RowOptimizer = settings.build(rows, slab, num_vip, tensor_group)
        self.row_optimizer.name_rows(torch.arange(len(row_ids), device=rows.device), row_ids.to(rows.device))
        self.gate_optimizer = None if gates is None else settings.build_for_gates(gates)
        self.num_vip = self.row_optimizer.num_vip
        """The first local rows, which have a learning rate of their own."""
        self.step: StepRows | None = None
        """Rows of the training step under way."""

    def open(self, plan: SlabPlan, *, training: bool) -> None:
        """The rows of this plan are about to be read. For a shard that does not hold all rows where it reads them."""
        return

    def release(self) -> None:
        """The rows of the latest `open` will not be written any more."""
        return

    def stage_ahead(self, windows: "Future[list[Window]]", number: int) -> None:
        """The next training step reads slab `number` of these windows: a hint."""
        return

    def restart_rows(self, local_R: Tensor) -> None:
        """Make these local rows what they are if no step touches them. Their state may be anything before."""
        assert self._initial is not None
        if not local_R.numel():
            return
        state, rows_SW = self.state_dict(), self._kept("rows", self.rows)
        local_R = local_R.to(rows_SW.device)
        for tensor in (state.columns | state.tables | state.rows).values():
            tensor.index_fill_(0, local_R, 0)
        ids_R = self.row_ids.to(local_R.device)[local_R]
        values_RW = rows_SW.new_empty(local_R.numel(), rows_SW.shape[1])
        self._initial.fill_rows(values_RW, ids_R)
        values_RW = values_RW.to(self.dtype)
        kinds = [("rows", rows_SW, values_RW, local_R < self.num_vip)]
        if self.gates is not None:
            gates_SJ = self._kept("gates", self.gates)
            gates_RJ = gates_SJ.new_empty(local_R.numel(), gates_SJ.shape[1])
            self._initial.fill_gates(gates_RJ, ids_R)
            kinds.append(("gates", gates_SJ, gates_RJ, torch.zeros_like(local_R, dtype=torch.bool)))
        for (kind, kept, values, is_vip_R), optimizer in zip(kinds, self.optimizers, strict=True):
            for name, number in optimizer.start_(values, is_vip_R, ids_R).items():
                state.rows[f"view-{self.slab.view}.{kind}.{name}"].index_fill_(0, local_R, number)
            kept.index_copy_(0, local_R, values.to(kept.dtype))

    def _kept(self, name: str, tensor: Tensor) -> Tensor:
        """Values, gates or state of all rows, by the name of their field in a record; for a shard that holds all rows
        where it reads them, the tensor itself."""
        return tensor

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
    def dtype(self) -> torch.dtype:
        """Of vectors and gradients; rows may be stored in a smaller type."""
        return compute_dtype(self.rows.dtype)

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
        self.open(plan, training=training)
        rows_R = plan.accesses.touched_R
        if not training and self.rows.dtype != self.dtype:  # writing would round them
            gates = None if self.gate_optimizer is None else self.gate_optimizer.begin(rows_R)
            rows = self.row_optimizer.begin(rows_R)
            self.release()
            return WindowRows(self, plan, local_QW, rows, gates)
        if not training:
            # Catching up rounds: rows that are read of another replica of the tables are caught up here as well.
            written_R = rows_R if plan.part is None else plan.part.step_rows
            with self.writing(written_R):
                self.catch_up(written_R, moments=True)
            self.release()
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
            for suffix, live in {"": values, **{f".{key}": one for key, one in kept.columns.items()}}.items():
                tensor = self._kept(f"{kind}{suffix}", live)
                for number, (name, columns) in enumerate(self.slab.columns().items()):
                    if kind == "rows":
                        state.columns[f"{name}.{kind}{suffix}"] = tensor[:, columns]
                    else:
                        state.tables[f"{name}.{kind}{suffix}"] = tensor[:, number]
            for key, live in kept.tables.items():
                tensor = self._kept(f"{kind}.{key}", live)
                state.tables |= {f"{name}.{kind}.{key}": tensor[:, j] for j, name in enumerate(self.names)}
            state.rows |= {f"{view}.{kind}.{key}": self._kept(f"{kind}.{key}", live) for key, live in kept.rows.items()}
            state.replicated |= {f"{view}.{kind}.{key}": tensor for key, tensor in kept.replicated.items()}
        state.rows[f"{view}.hit"] = self._kept("hit", self.hit)
        if self.updates is not None:
            state.rows[f"{view}.updates"] = self._kept("updates", self.updates)
        return state

    def load_replicated(self, saved: dict[str, Tensor]) -> None:
        """After the other tensors of `state_dict` were overwritten: its saved `replicated`."""
        for kind, optimizer in zip(("rows", "gates"), self.optimizers, strict=False):
            prefix = f"view-{self.slab.view}.{kind}."
            numbers = optimizer.load_replicated(
                {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}
            )
            for name, number in numbers.items():
                self._kept(f"{kind}.{name}", optimizer.state().rows[name]).fill_(number)


class WindowRows:
    """The rows that one window reads from a shard: the segment that remote ranks request first, then the rest."""

    def __init__(self, shard: Shard, plan: SlabPlan, local_QW: Tensor, rows: PendingRows, gates: PendingRows | None):
        self._shard, self._plan, self._local_QW = shard, plan, local_QW
        self._pending, self._pending_gates = rows, gates
        accesses, num_rows = plan.accesses, plan.accesses.touched_R.numel()
        self._segments = slice(0, accesses.num_remote), slice(accesses.num_remote, num_rows)
        # Zero-copy: the working set's memory is where the rows are gathered.
        zero_copy = isinstance(accesses, ZeroCopyAccesses)
        width, dtype = shard.rows.shape[1], shard.dtype
        self._rows_RW = local_QW if zero_copy else shard.rows.new_empty(num_rows, width, dtype=dtype)
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
        self.shard.release()
        self.shard.sweep_if_due()
        self.shard.step = None

    @abstractmethod
    def _apply(self, gradient: RowGradient, rates: TableRates) -> None: ...

    def abandon(self) -> None:
        """Skip the step: the rows are caught up as if they had not been read for an update."""
        if self.gradient is not None:
            with self.shard.writing(self.gradient.touched_R):
                self.shard.catch_up(self.gradient.touched_R, moments=True)
                self.shard.hit.index_fill_(0, self.gradient.touched_R, True)
        self.shard.release()
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
    """Several windows, or several replicas of the tables: rows are caught up in place for each window, and their
    gradients add up over the step."""

    def __init__(self, shard: Shard, part: PartOfStep):
        super().__init__(shard)
        self._touched_R = part.step_rows

    def _values_read(self, plan: SlabPlan) -> tuple[Tensor, Tensor]:
        assert self.shard.gates is not None
        rows_R = plan.accesses.touched_R
        rows_RW = self.shard.rows.index_select(0, rows_R).to(self.shard.dtype)
        return rows_RW, self.shard.gates.index_select(0, rows_R)

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
