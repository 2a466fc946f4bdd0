"""A shard whose records lie in host memory or on disk, while its rows are read and updated on the device.

The records of a step are copied to the device while the former step computes, and back after its update
(storage/staging.py). What a `Shard` calls a local row is a position among the slots of the step, ascending, so that VIP
rows are still the first. Fields of records, and with them the optimizers, are those of the step's records.

Whatever else reads or writes records finds them in the storage: a checkpoint after `flush`, and a load after `_drain`,
after which steps are staged again. Validation stages its rows as a step does. Results are bit for bit those of a shard
whose records are not staged.
Shapes: S slots, R rows of a step.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.tables.exchange_plan import SlabPlan, Window
from xgram_dist.tables.optimizers.base import RowOptimizer
from xgram_dist.tables.shard import ShardState
from xgram_dist.tables.storage.base import Slots
from xgram_dist.tables.storage.staging import RowStaging, StagedRecords
from xgram_dist.tables.touched_shard import TouchedShard

STEPS_AHEAD = 2
"""Steps that are staged and not begun: the next one, and while that is about to begin, the one after it."""
CATCH_UP_BYTES = 64 << 20
"""Records that `catch_up_all` stages at a time."""


@dataclass
class _StepAhead:
    """A step that has not begun."""

    windows: "Future[list[Window]]"
    number: int
    """Of the slab."""
    staged: StagedRecords | None
    """None: other records were written since it was staged."""

    def is_of(self, plan: SlabPlan) -> bool:
        planned = self.windows.done() and self.windows.exception() is None
        return planned and self.windows.result()[0].slabs[self.number] is plan


class StagedShard(TouchedShard):
    staged = True

    def __init__(self, *arguments: Any, staged_on: torch.device, **options: Any):
        """As `TouchedShard`. `staged_on`: the device that computes."""
        super().__init__(*arguments, staged_on=staged_on, **options)
        self._staging = RowStaging(self.records.storage, staged_on, self._writing_slots)
        self._ahead: deque[_StepAhead] = deque()
        self._in_use: StagedRecords | None = None
        """Between `open` and `release`."""

    # A step

    def stage_ahead(self, windows: "Future[list[Window]]", number: int) -> None:
        if len(self._ahead) < STEPS_AHEAD:
            self._ahead.append(_StepAhead(windows, number, None))
            # A step before it that has to be staged again comes first (`open`).
            if all(one.staged is not None for one in list(self._ahead)[:-1]):
                self._stage(self._ahead[-1])

    def _stage(self, ahead: _StepAhead) -> None:
        # In the thread of `RowStaging`, which waits for the plan.
        ahead.staged = self._staging.stage(lambda: self._created(ahead.windows.result()[0].slabs[ahead.number]))

    def _created(self, plan: SlabPlan) -> Slots:
        """The slots of a step, whose records exist from then on."""
        assert plan.staged_slots is not None
        self.create(plan.num_slots)
        return plan.staged_slots

    def open(self, plan: SlabPlan, *, training: bool) -> None:
        if self._in_use is not None:
            return  # another window of the step
        if any(one.is_of(plan) for one in self._ahead):
            while not self._ahead[0].is_of(plan):  # planned, and not trained on
                self._ahead.popleft()
                self._void()
            staged = self._ahead.popleft().staged
        else:
            staged = None
        if staged is None:
            self._drain()
            staged = self._staging.stage(partial(self._created, plan))
        self._use(staged, plan.staged_slots)
        if training:
            for one in self._ahead:
                if one.staged is None:
                    self._stage(one)

    def _void(self) -> None:
        for one in self._ahead:
            one.staged = None

    def _use(self, staged: StagedRecords, slots: Slots | None) -> None:
        assert slots is not None
        self.records.use(self._staging.records(staged))
        self._in_use = staged
        for optimizer in self.optimizers:
            optimizer.num_rows = len(slots)
        self.row_optimizer.num_vip = int(np.searchsorted(slots, self.num_vip))

    def release(self) -> None:
        if self._in_use is not None:
            self._staging.end(self._in_use)
            self._in_use = None

    def writing(self, rows_R: Tensor | None) -> AbstractContextManager[None]:
        """Rows of a step are written to its records, which `release` brings back."""
        if rows_R is not None:
            return nullcontext()
        self._drain()
        return super().writing(None)

    @contextmanager
    def _writing_slots(self, slots: Slots) -> Iterator[None]:
        with self._writing_at_rest(torch.from_numpy(slots)):
            yield

    def _note_created(self) -> None:
        """Optimizers count the rows in use."""

    # All records

    def flush(self) -> None:
        """Wait until the storage holds what all steps that have ended have written."""
        self._staging.flush()

    def _drain(self) -> None:
        """`flush`, and forget what was staged ahead: records are about to be written."""
        assert self._in_use is None, "a step is under way"
        self._staging.drain()
        self._void()

    def catch_up_all(self) -> None:
        self._catch_up_all(self.optimizers)

    def _catch_up_all(self, optimizers: list[RowOptimizer]) -> None:
        self._drain()
        size = max(1, CATCH_UP_BYTES // (4 * self.records.width))
        for start in range(0, self.records.num_created, size):
            slots = np.arange(start, min(start + size, self.records.num_created))
            self._use(self._staging.stage(slots.copy), slots)
            for optimizer in optimizers:
                optimizer.catch_up(torch.arange(len(slots), device=self.rows.device), moments=True)
            self.release()
        self._drain()
        for optimizer in optimizers:
            optimizer.start_over()

    def sweep_if_due(self) -> None:
        due = [optimizer for optimizer in self.optimizers if optimizer.sweep_due]
        if due:
            self._catch_up_all(due)

    def adopt(self, row_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        self._drain()
        return super().adopt(row_ids)

    @property
    def row_ids(self) -> Tensor:  # type: ignore[override]
        self.flush()
        return super().row_ids

    def num_hit(self) -> int:
        self.flush()
        return super().num_hit()

    def verify(self) -> None:
        self.flush()
        super().verify()

    def num_changed(self) -> int:
        self.flush()
        return super().num_changed()

    def mark_saved(self) -> None:
        self.flush()
        super().mark_saved()

    def changed_state(self) -> ShardState:
        self.flush()
        return super().changed_state()

    def state_dict(self) -> ShardState:
        self.flush()
        return super().state_dict()

    def close(self) -> None:
        self._staging.close()
        super().close()
