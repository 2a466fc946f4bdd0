"""Records of a step on the device that computes, from records in host memory: gathered while the former step computes.

    staged = staging.stage(slots_of)       during step k: begin to gather and copy the records of step k + 1
    records_RW = staging.records(staged)   step k + 1, after step k has ended: on the device, to be read and updated
    staging.end(staged)                    updated: on their way back to the storage
    staging.flush() or .drain()            the storage holds what all steps have written

Records that step k updates, too, are not gathered: they are copied on the device from those of step k, once it has
ended. One thread gathers and scatters in the order of the calls, so a gather sees what all steps before step k wrote.
So every step gets the bits that it would get without overlap.

Copies run on a stream of their own, through two pinned buffers that are used again, one each way. On the CPU the same
thread fills plain buffers.
Shapes: R records of a step, W record width.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xgram_dist.parallel.device import CopyStream, set_thread_device
from xgram_dist.tables.storage.base import RecordStorage, Slots

GROWTH = 1.25
"""A buffer that is too small is replaced by one of this many times the size needed."""


@dataclass
class _Gathered:
    """Records on their way to the device: those that were gathered, and where the former step has the others."""

    slots: Slots
    early_EW: Tensor | None
    """None: taken."""
    early_index_E: Tensor
    """Their places among the slots."""
    late_index: Tensor
    former_index: Tensor
    """Where the former step has those."""
    copied: Any


class StagedRecords:
    """The records of one step."""

    def __init__(self, gathered: "Future[_Gathered]", former: "StagedRecords | None"):
        self.gathered, self.former = gathered, former
        self.records_RW: Tensor | None = None
        self.computed: Any = None
        """The point of the device's computing at which the step has ended."""
        self.ended = False


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
    def __init__(
        self,
        storage: RecordStorage,
        device: torch.device,
        writing: Callable[[Slots], AbstractContextManager[None]] | None = None,
    ):
        """`storage`: in host memory or on disk. Between `stage` and `drain` nothing else writes its records, `slots_of`
        excepted, and between `stage` and `flush` nothing else reads them. `writing`: the block in which they are
        written back, by default the storage's."""
        self._storage, self._writing = storage, writing or storage.writing
        self._stream = CopyStream(device)
        width = storage.records.shape[1]
        self._incoming, self._outgoing = _Buffer(self._stream, width), _Buffer(self._stream, width)
        self._thread = ThreadPoolExecutor(1, "stage", set_thread_device, (device,))
        self._latest: StagedRecords | None = None
        self._scattered: Future[None] | None = None

    def stage(self, slots_of: Callable[[], Slots]) -> StagedRecords:
        """Begin to bring the records of the next step to the device. `slots_of`: called in the thread, so that it may
        wait for a plan and create records; the slots are ascending. The former step may be under way, but not the one
        before it."""
        former = self._latest
        assert former is None or former.former is None or former.former.ended, "two steps are under way"
        gathered = self._thread.submit(self._gather, slots_of, former)
        self._latest = StagedRecords(gathered, former)
        return self._latest

    def _gather(self, slots_of: Callable[[], Slots], former: StagedRecords | None) -> _Gathered:
        slots = slots_of()
        late, former_index = np.zeros(0, np.int64), np.zeros(0, np.int64)
        if former is not None:
            before = former.gathered.result().slots
            _, late, former_index = np.intersect1d(slots, before, assume_unique=True, return_indices=True)
        early = np.delete(np.arange(len(slots)), late)
        early_EW = self._stream.empty_on_device(len(early), self._storage.records.shape[1])
        buffer = self._incoming.take(len(early))
        torch.index_select(self._storage.records, 0, torch.from_numpy(slots[early]), out=buffer)
        on_device = self._stream.index_on_device
        indices = on_device(early), on_device(late), on_device(former_index)
        copied = self._stream.copy(early_EW, buffer)
        self._incoming.release(copied)
        return _Gathered(slots, early_EW, *indices, copied)

    def records(self, staged: StagedRecords) -> Tensor:
        """The records of a step on the device [R, W], current, in the order of the slots. The host waits for the
        gather, if that is still under way, and not for copies."""
        gathered, former = staged.gathered.result(), staged.former
        assert gathered.early_EW is not None, "`records` twice"
        self._stream.compute_after(gathered.copied)
        if former is None:  # all are early
            records_RW = gathered.early_EW
        else:
            assert former.ended, "the former step has not ended"
            assert former.records_RW is not None
            records_RW = gathered.early_EW.new_empty(len(gathered.slots), gathered.early_EW.shape[1])
            records_RW.index_copy_(0, gathered.early_index_E, gathered.early_EW)
            late_RW = former.records_RW.index_select(0, gathered.former_index)
            records_RW.index_copy_(0, gathered.late_index, late_RW)
            staged.former = None  # frees its memory
        gathered.early_EW, staged.records_RW = None, records_RW
        return records_RW

    def end(self, staged: StagedRecords) -> None:
        """The step has updated its records: bring them back. Also for a step that was skipped, whose records are as
        they were."""
        assert staged.former is None, "`end` before `records`"
        assert not staged.ended, "`end` twice"
        self._raise_failure()
        staged.computed, staged.ended = self._stream.computed(), True
        self._scattered = self._thread.submit(self._scatter, staged)

    def _scatter(self, staged: StagedRecords) -> None:
        slots, records_RW = staged.gathered.result().slots, staged.records_RW
        assert records_RW is not None
        buffer = self._outgoing.take(len(slots))
        self._stream.wait_on_host(self._stream.copy(buffer, records_RW, after=staged.computed))
        with self._writing(slots):
            self._storage.records.index_copy_(0, torch.from_numpy(slots), buffer)

    def _raise_failure(self) -> None:
        if self._scattered is not None and self._scattered.done():
            self._scattered.result()

    def flush(self) -> None:
        """Wait until the storage holds the records of all steps that have ended, and until nothing is gathered."""
        self._thread.submit(int).result()
        if self._scattered is not None:
            self._scattered.result()

    def drain(self) -> None:
        """`flush`, and forget steps that were staged and not read. From then on the storage may be written and grown,
        until `stage`."""
        self.flush()
        self._latest = None

    def close(self) -> None:
        self._thread.shutdown()
