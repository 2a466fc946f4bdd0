"""A shard that holds records (records.py) of the rows that were read at least once.

Its local rows are slots, and the plan says how many there are. A row that was never read is a formula: its initial
values, and what the optimizer does to a row without a gradient. Reading it creates its record, which is then what a
`Shard` would hold, bit for bit.
Shapes: S slots, R touched rows, W slab width, J tables of the slab.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.parallel.device import to_device
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.exchange_plan import SlabPlan
from xgram_dist.tables.initial_rows import InitialValues
from xgram_dist.tables.layout import Slab
from xgram_dist.tables.optimizers.base import RecordMemory, RowOptimizer
from xgram_dist.tables.optimizers.build import TableOptimizerSettings
from xgram_dist.tables.optimizers.rounding import KEY, row_keys
from xgram_dist.tables.records import Records, StorageSettings
from xgram_dist.tables.row_sharding import RowSharding
from xgram_dist.tables.shard import Shard, ShardState

FP32_BYTES = 4


class TouchedShard(Shard):
    """The rows of a slab that were touched, as records. What a `Shard` calls a local row is a slot here."""

    staged = False

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
        staged_on: torch.device | None = None,
    ):
        """`rank`: of the data axis. `staged_on`: as in `Records`. The other arguments as in `Shard`."""
        self.slab, self.tensor_group = slab, tensor_group
        self._sharding, self._rank = sharding, rank
        self._initial: InitialValues = initial
        fields = settings.record_fields(slab.width, len(slab.tables), gated=gated, counted=count_updates)
        self.records = Records(fields, sharding.count(rank), storage, f"view-{slab.view}", staged_on)
        self._changed = self.records.at_rest("hit").new_zeros(0, dtype=torch.bool)
        """Slots that were written since the last checkpoint. Grows ahead of the records."""
        self.rows = self.records.field("rows")
        self.gates = self.records.field("gates") if gated else None
        self.hit = self.records.field("hit")
        self.updates = self.records.field("updates") if count_updates else None
        memory = RecordMemory(self.records, "rows")
        self.row_optimizer = settings.build(self.rows, slab, num_vip, tensor_group, memory)
        self.gate_optimizer = None
        if self.gates is not None:
            self.gate_optimizer = settings.build_for_gates(self.gates, RecordMemory(self.records, "gates"))
        self.step = None
        for optimizer in self.optimizers:
            optimizer.num_rows, optimizer.sweeps = 0, False
        self._prepared: deque[tuple[slice, Tensor]] = deque()
        """Slots that planning has given to rows, and the initial values of these."""
        # VIP rows are the first local rows, and the most frequent ones: as the first slots, they are still the first.
        self.num_vip = self.row_optimizer.num_vip
        self.records.slots.lookup(np.arange(self.num_vip))
        self.create(self.num_vip)

    @property
    def row_ids(self) -> Tensor:  # type: ignore[override]
        """Global id of each slot's row, in host memory."""
        return torch.from_numpy(self._global_ids(slice(0, self.records.num_created)))

    @property
    def num_local_rows(self) -> int:
        return self.records.max_rows

    def num_hit(self) -> int:
        return int(self._kept("hit", self.hit).sum())

    def value_bytes(self) -> int:
        gate_bytes = FP32_BYTES * len(self.names) if self.gates is not None else 0
        return self.records.num_created * (self.rows.element_size() * self.slab.width + gate_bytes)

    def optimizer_bytes(self) -> int:
        return self.records.nbytes - self.value_bytes()

    def _global_ids(self, slots: slice) -> NDArray[np.int64]:
        return self._sharding.global_rows(self._rank, self.records.slots.rows_of(slots))

    def open(self, plan: SlabPlan, *, training: bool) -> None:
        self.create(plan.num_slots)

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
        slots_R = torch.arange(new.start, new.stop, device=self._changed.device)
        with self._writing_at_rest(slots_R):
            if values is None:
                values = self._initial_values(new)
            ids_R = to_device(torch.from_numpy(self._global_ids(new)), slots_R.device)
            self._start(new, "rows", values, self.row_optimizer, slots_R < self.num_vip, ids_R)
            if f"rows.{KEY}" in self.records:
                self.records.at_rest(f"rows.{KEY}")[new] = row_keys(ids_R)
            if self.gate_optimizer is not None:
                gates = values.new_empty(len(slots_R), len(self.names))
                self._initial.fill_gates(gates, slots_R)
                is_vip_R = torch.zeros_like(slots_R, dtype=torch.bool)
                self._start(new, "gates", gates, self.gate_optimizer, is_vip_R, ids_R)
        self.records.num_created = new.stop
        self._note_created()

    def _start(
        self, new: slice, kind: str, values: Tensor, optimizer: RowOptimizer, is_vip_R: Tensor, ids_R: Tensor
    ) -> None:
        kept = self.records.at_rest(kind)
        values = values.to(kept.dtype).to(values.dtype)  # as they are stored
        for name, number in optimizer.start_(values, is_vip_R, ids_R).items():
            self.records.at_rest(f"{kind}.{name}")[new] = number
        kept[new] = values

    def _note_created(self) -> None:
        for optimizer in self.optimizers:
            optimizer.num_rows = self.records.num_created

    def writing(self, rows_R: Tensor | None) -> AbstractContextManager[None]:
        if rows_R is None:
            rows_R = torch.arange(self.records.num_created, device=self._changed.device)
        return self._writing_at_rest(rows_R)

    @contextmanager
    def _writing_at_rest(self, rows_R: Tensor) -> Iterator[None]:
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

    def _initial_values(self, slots: slice) -> Tensor:
        """Of rows, where they are kept."""
        values_RW = torch.empty(slots.stop - slots.start, self.slab.width, device=self._changed.device)
        self._initial.fill_rows(values_RW, to_device(torch.from_numpy(self._global_ids(slots)), values_RW.device))
        return values_RW

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
            self._prepared.append((new, self._initial_values(new)))
        return slots_R

    def read_from(self, source: InitialValues) -> None:
        """Rows have these values instead of the initial ones: for rows that are only read."""
        self._initial = source
        with self.writing(None):
            self.restart_rows(torch.arange(self.records.num_created))

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

    def verify(self) -> None:
        """Raise if a record is damaged."""
        self.records.verify(torch.arange(self.records.num_created))

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

    def _kept(self, name: str, tensor: Tensor) -> Tensor:
        """Of the rows that were touched."""
        return self.records.at_rest(name)[: self.records.num_created]

    def close(self) -> None:
        self.records.storage.close()
