"""Records of a step on the device that computes, from records in host memory: gathered while the former step computes.

    staged = staging.stage(slots_of)       during step k: begin to gather and copy the records of step k + 1
    records_RW = staging.records(staged)   step k + 1, after step k has ended: on the device, to be read and updated
    staging.end(staged)                    updated: on their way back to the storage

Records that step k updates, too, are not gathered: they are copied on the device from those of step k, once it has
ended. One thread gathers and scatters in the order of the calls, so a gather sees what all steps before step k wrote.
So every step gets the bits that it would get without overlap.

Copies run on a stream of their own, through two pinned buffers that are used again, one each way. On the CPU the same
thread fills plain buffers.
Shapes: R records of a step, W record width.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.parallel.device import CopyStream, set_thread_device
from xgram_dist.tables.storage.base import RecordStorage, Slots

GROWTH = 1.25
"""A buffer that is too small is replaced by one of this many times the size needed."""


@dataclass
class _Gathered:
    """Records on their way to the device: first those that were gathered, then those that the former step has."""

    slots: Slots
    index: NDArray[np.int64]
    """For each slot, its place in `records_RW`."""
    index_R: Tensor
    records_RW: Tensor
    num_gathered: int
    former_index_R: Tensor
    """Where the former step has the others."""
    copied: Any


class StagedRecords:
    """The records of one step."""

    def __init__(self, gathered: "Future[_Gathered]", former: "StagedRecords | None"):
        self.gathered, self.former = gathered, former
        self.computed: Any = None
        """The point of the device's computing at which the step has ended."""
        self.ended = False

    @property
    def slots(self) -> Slots:
        return self.gathered.result().slots

    @property
    def index(self) -> Tensor:
        """For each slot, the place of its record [R], on the device."""
        return self.gathered.result().index_R


class _Buffer:
    """Host memory that is used again."""

    def __init__(self, stream: CopyStream, width: int):
        self._stream, self._memory = stream, stream.empty_on_host(0, width)
        self._copied: Any = None
        """When the device has done with it."""

    def take(self, rows: int) -> Tensor:
        """Waits until the former copy from it is done."""
        self._stream.wait_on_host(self._copied)
        if rows > len(self._memory):
            self._memory = self._stream.empty_on_host(int(GROWTH * rows), self._memory.shape[1])
        return self._memory[:rows]

    def release(self, copied: Any) -> None:
        self._copied = copied


class RowStaging:
    def __init__(self, storage: RecordStorage, device: torch.device):
        """`storage`: in host memory or on disk. Between `stage` and `drain` nothing else reads or writes its records,
        and it does not grow."""
        self._storage = storage
        self._stream = CopyStream(device)
        width = storage.records.shape[1]
        self._incoming, self._outgoing = _Buffer(self._stream, width), _Buffer(self._stream, width)
        self._thread = ThreadPoolExecutor(1, "stage", set_thread_device, (device,))
        self._latest: StagedRecords | None = None
        self._scattered: Future[None] | None = None

    def stage(self, slots_of: Callable[[], Slots]) -> StagedRecords:
        """Begin to bring the records of the next step to the device. `slots_of`: called in the thread, so that it may
        wait for a plan; the slots are distinct. The former step may be under way, but not the one before it."""
        former = self._latest
        assert former is None or former.former is None or former.former.ended, "two steps are under way"
        gathered = self._thread.submit(self._gather, slots_of, former)
        self._latest = StagedRecords(gathered, former)
        return self._latest

    def _gather(self, slots_of: Callable[[], Slots], former: StagedRecords | None) -> _Gathered:
        slots = slots_of()
        is_late = np.zeros(len(slots), np.bool_)
        former_index = np.zeros(0, np.int64)
        if former is not None:
            before = former.gathered.result()
            _, late, places = np.intersect1d(slots, before.slots, assume_unique=True, return_indices=True)
            is_late[late] = True
            former_index = before.index[places[np.argsort(late)]]
        early = np.flatnonzero(~is_late)
        index = np.empty(len(slots), np.int64)
        index[early] = np.arange(len(early))
        index[is_late] = np.arange(len(early), len(slots))
        records_RW = self._stream.empty_on_device(len(slots), self._storage.records.shape[1])
        buffer = self._incoming.take(len(early))
        torch.index_select(self._storage.records, 0, torch.from_numpy(slots[early]), out=buffer)
        index_R, former_index_R = self._stream.index_on_device(index), self._stream.index_on_device(former_index)
        copied = self._stream.copy(records_RW[: len(early)], buffer)
        self._incoming.release(copied)
        return _Gathered(slots, index, index_R, records_RW, len(early), former_index_R, copied)

    def records(self, staged: StagedRecords) -> Tensor:
        """The records of a step on the device [R, W], current; that of a slot is at `staged.index`. The host waits for
        the gather, if that is still under way, and not for copies."""
        gathered, former = staged.gathered.result(), staged.former
        self._stream.compute_after(gathered.copied)
        if former is not None:
            assert former.ended, "the former step has not ended"
            late_RW = gathered.records_RW[gathered.num_gathered :]
            torch.index_select(former.gathered.result().records_RW, 0, gathered.former_index_R, out=late_RW)
            staged.former = None  # frees its memory
        return gathered.records_RW

    def end(self, staged: StagedRecords) -> None:
        """The step has updated its records: bring them back. Also for a step that was skipped, whose records are as
        they were."""
        assert staged.former is None, "`end` before `records`"
        assert not staged.ended, "`end` twice"
        self._raise_failure()
        staged.computed, staged.ended = self._stream.computed(), True
        self._scattered = self._thread.submit(self._scatter, staged)

    def _scatter(self, staged: StagedRecords) -> None:
        gathered = staged.gathered.result()
        buffer = self._outgoing.take(len(gathered.slots))
        self._stream.wait_on_host(self._stream.copy(buffer, gathered.records_RW, after=staged.computed))
        order = np.empty_like(gathered.slots)
        order[gathered.index] = gathered.slots
        with self._storage.writing(order):
            self._storage.records.index_copy_(0, torch.from_numpy(order), buffer)

    def _raise_failure(self) -> None:
        if self._scattered is not None and self._scattered.done():
            self._scattered.result()

    def drain(self) -> None:
        """Wait until the storage holds all records. From then on it may be read, written and grown, until `stage`."""
        assert self._latest is None or self._latest.ended, "a step is under way"
        if self._scattered is not None:
            self._scattered.result()
        self._latest = None

    def close(self) -> None:
        self._thread.shutdown()
