"""Records in a sparse memory-mapped file on the node's local disk.

The system's page cache keeps the records in use. There is no cache of our own, so nothing can go stale: a write to
`records` is a write to the page cache. Around it, two threads:

    read ahead   asks for the pages of the next step's records (`madvise(WILLNEED)`, many ranges a call, so that the
                 disk gets them all at once), passes over the records to check them, and maps their pages for writing
    write back   after DIRTY_SHARE of memory was written, or WRITE_BACK_SECONDS: computes checksums, then writes dirty
                 pages to the disk, a piece at a time, so that the system never has to stop a step for it

Records that were not written back since their last update are in memory, and readahead leaves them out. So where
everything fits, both threads have next to nothing to do.

Write-back in the background is also what keeps a run within the memory limit of its cgroup: the system can drop clean
pages at any time, and dirty ones only after they were written.
"""

import mmap
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from xgram_dist.errors import UserError
from xgram_dist.parallel.device import lower_thread_priority
from xgram_dist.tables.storage.base import DamagedRecordsError, RecordStorage, Slots
from xgram_dist.tables.storage.checksums import RecordChecksums
from xgram_dist.tables.storage.scratch import ScratchFile
from xgram_dist.tables.storage.system import PAGE, MappedFile, memory_limit, write_back

DIRTY_SHARE = 1 / 16
"""Bytes written between two passes of write-back, as a share of the memory that this process may use."""
MAX_DIRTY_BYTES = 1 << 30
WRITE_BACK_SECONDS = 10.0
"""Between two passes at the most. The system writes pages on its own that have been dirty for 30 seconds."""
WRITE_BACK_BYTES = 32 << 20
"""A piece of the file. Between pieces, other readers and writers of the disk get their turn."""
ALLOCATE_BYTES = 64 << 20
"""Blocks are allocated this far ahead: few calls, and few extents."""
MAX_PADDING = 1.25
NAMED = 3
"""Damaged slots that an error names."""


class DiskStorage(RecordStorage):
    on_disk = True

    def __init__(self, record_width: int, max_slots: int, folder: Path, name: str):
        self._record_bytes = _padded(4 * record_width)
        self._file = ScratchFile(folder, name)
        capacity = self._file.reserve(max(1, max_slots) * self._record_bytes) // self._record_bytes
        if not capacity:
            error = self._file.full(self._record_bytes)
            self._file.close()
            raise error
        memory = mmap.mmap(self._file.descriptor, capacity * self._record_bytes)
        memory.madvise(mmap.MADV_RANDOM)  # a fault reads its own page, not those around it
        records_SN = np.frombuffer(memory, np.float32).reshape(capacity, self._record_bytes // 4)
        self.records = torch.from_numpy(records_SN)[:, :record_width]
        self._num_slots, self._max_slots = 0, max_slots
        self._checksums = RecordChecksums(records_SN)
        self._pages = MappedFile(self._file.descriptor, records_SN.ctypes.data)
        self._dirty_limit = min(MAX_DIRTY_BYTES, int(memory_limit() * DIRTY_SHARE))
        self._dirty, self._last_pass = 0, time.monotonic()
        self._prefetches = 0
        self._failure: UserError | None = None
        """Found by a thread; raised by the next call."""
        self._lock = threading.Lock()
        self._reader = ThreadPoolExecutor(1, "rows-read")
        self._writer = ThreadPoolExecutor(1, "rows-write", lower_thread_priority)
        self._passes: deque[Future[None]] = deque()
        """Of write-back, under way or to come."""
        self._closing = threading.Event()

    def ensure(self, num_slots: int) -> bool:
        self._raise_failure()
        assert num_slots <= self._max_slots, (num_slots, self._max_slots)
        if num_slots > self._num_slots:
            wanted = num_slots * self._record_bytes
            if num_slots > len(self.records):
                raise self._file.full(wanted)
            rest = len(self.records) * self._record_bytes - wanted
            self._file.allocate(wanted, min(ALLOCATE_BYTES, rest))
            self._checksums.ensure(num_slots)
            self._num_slots = num_slots
        return False

    # Reading

    def prefetch(self, slots: Slots) -> None:
        self._raise_failure()
        with self._lock:
            self._prefetches += 1
            self._reader.submit(self._read_ahead, slots, self._prefetches)

    def _read_ahead(self, slots: Slots, number: int) -> None:
        if self._closing.is_set():
            return
        slots = self._checksums.at_rest(np.unique(slots))
        if not len(slots):
            return
        starts = slots * self._record_bytes // PAGE
        ends = -(-(slots + 1) * self._record_bytes // PAGE)
        # Ranges that touch are one range.
        first = np.concatenate(([True], starts[1:] > ends[:-1]))
        starts, ends = starts[first], ends[np.concatenate((first[1:], [True]))]
        self._pages.will_need(starts * PAGE, (ends - starts) * PAGE)
        self._note_damage(self._checksums.check(slots, number))
        self._pages.will_write(starts * PAGE, (ends - starts) * PAGE)

    def verify(self, slots: Slots) -> None:
        self._note_damage(self._checksums.check(slots))
        self._raise_failure()

    def _note_damage(self, slots: Slots) -> None:
        if len(slots):
            named = ", ".join(f"{slot} (byte {slot * self._record_bytes:,})" for slot in slots[:NAMED].tolist())
            more = f" and {len(slots) - NAMED:,} more" if len(slots) > NAMED else ""
            self._failure = DamagedRecordsError(
                f"the disk has damaged table rows: in '{self._file.path}', the checksum of record {named}{more} does "
                "not match; resume from the last checkpoint, and check the disk or choose another memory.folder"
            )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # Writing

    @contextmanager
    def writing(self, slots: Slots) -> Iterator[None]:
        self._note_damage(self._checksums.begin_write(slots, self._prefetches))
        self._raise_failure()
        while len(self._passes) > 1:  # the disk is slower than the run
            self._passes.popleft().result()
        try:
            yield
        finally:
            self._checksums.end_write(slots)
            self._dirty += len(slots) * self._record_bytes
            now = time.monotonic()
            if self._dirty > self._dirty_limit or now > self._last_pass + WRITE_BACK_SECONDS:
                self._dirty, self._last_pass = 0, now
                self._passes.append(self._writer.submit(self._write_back))

    def _write_back(self) -> None:
        self._checksums.add()
        for start in range(0, self._num_slots * self._record_bytes, WRITE_BACK_BYTES):
            if self._closing.is_set():
                return
            try:
                write_back(self._file.descriptor, start, WRITE_BACK_BYTES)
            except OSError as error:
                self._failure = DamagedRecordsError(
                    f"table rows cannot be written to '{self._file.path}': {error.strerror}; resume from the last "
                    "checkpoint, and check the disk or choose another memory.folder"
                )

    def close(self) -> None:
        self._closing.set()
        self._reader.shutdown()
        self._writer.shutdown()
        self._pages.close()
        self._file.close()
        # The disk's blocks are free once nothing refers to the mapping.
        self.records = torch.empty(0, self.records.shape[1])
        del self._checksums


def _padded(record_bytes: int) -> int:
    """Bytes from one record to the next: where a little padding does it, no record begins in the middle of a page and
    takes one page more than it must."""
    unit = PAGE
    while unit // 2 >= record_bytes:
        unit //= 2
    padded = -(-record_bytes // unit) * unit
    return padded if padded <= MAX_PADDING * record_bytes else record_bytes
