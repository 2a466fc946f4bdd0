"""Records in a sparse memory-mapped file on the node's local disk.

The system's page cache keeps the records in use. There is no cache of our own, so nothing can go stale: a write to
`records` is a write to the page cache. Around it, two threads:

    read ahead   asks for the pages of the next step's records (`madvise(WILLNEED)`, many ranges a call, so that the
                 disk gets them all at once), maps them for writing, and passes over the records to check them
    write back   when DIRTY_SHARE of memory is dirty, or after WRITE_BACK_SECONDS: computes checksums and writes dirty
                 pages to the disk, a piece of the file at a time, so that the system never has to stop a step for it

Records that were not written back since their last update are in memory, and readahead leaves them out. So where
everything fits, both threads have next to nothing to do. A page that was written back is mapped read-only: the next
write to it faults, which takes a microsecond or two. Readahead has the fault in its thread, unless a page is written
back between the two. So few rows are written back at a time, right after their checksums, and none too often; and pages
of rows that two passes in a row had to write are mapped for writing again at once.

Write-back in the background is also what keeps a run within the memory limit of its cgroup: the system can drop clean
pages at any time, and dirty ones only after they were written.
"""

import mmap
import threading
import time
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
"""Of memory: bytes that begin a pass of write-back when they are dirty, of all storages of this node together. Training
waits for the disk at twice as many."""
MAX_DIRTY_BYTES = 1 << 30
WRITE_BACK_SECONDS = 20.0
"""Between two passes at the most. The system writes pages on its own that have been dirty for 30 seconds."""
WRITE_BACK_BYTES = 32 << 20
"""A piece of the file. Between pieces, other readers and writers of the disk get their turn."""
WAIT_SECONDS = 0.1
"""After which a step that waits for the disk looks again."""
ALLOCATE_BYTES = 64 << 20
"""Blocks are allocated this far ahead: few calls, and few extents."""
MAX_PADDING = 1.25
NAMED = 3
"""Damaged slots that an error names."""


class DiskStorage(RecordStorage):
    on_disk = True
    reads_ahead = True
    """False: `prefetch` does nothing, so that a benchmark can show what it hides."""

    def __init__(self, record_width: int, max_slots: int, folder: Path, name: str, sharers: int = 1):
        """`sharers`: storages of this node, which share its memory."""
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
        self._dirty_limit = min(MAX_DIRTY_BYTES, int(memory_limit() * DIRTY_SHARE / sharers))
        self._last_pass = time.monotonic()
        self._prefetches = 0
        self._failure: UserError | None = None
        """Found by a thread; raised by the next call."""
        self._lock = threading.Lock()
        self._reader = ThreadPoolExecutor(1, "rows-read")
        self._writer = ThreadPoolExecutor(1, "rows-write", lower_thread_priority)
        self._pass: Future[None] | None = None
        """The latest pass of write-back."""
        self._pass_number = 1
        self._piece_written = threading.Condition()
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
        if not self.reads_ahead:
            return
        with self._lock:
            self._prefetches += 1
            self._reader.submit(self._read_ahead, slots, self._prefetches)

    def _read_ahead(self, slots: Slots, number: int) -> None:
        if self._closing.is_set():
            return
        slots = self._checksums.at_rest(np.unique(slots))
        if not len(slots):
            return
        pages = self._page_ranges(slots)
        self._pages.will_need(*pages)
        self._pages.will_write(*pages)
        self._note_damage(self._checksums.check(slots, number))

    def _page_ranges(self, slots: Slots) -> tuple[Slots, Slots]:
        """(starts, sizes) in bytes of the pages of these ascending slots. Ranges that touch are one range."""
        starts = slots * self._record_bytes // PAGE
        ends = -(-(slots + 1) * self._record_bytes // PAGE)
        first = np.concatenate(([True], starts[1:] > ends[:-1]))
        starts, ends = starts[first], ends[np.concatenate((first[1:], [True]))]
        return starts * PAGE, (ends - starts) * PAGE

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
        self._wait_for_disk()
        self._note_damage(self._checksums.begin_write(slots, self._prefetches))
        self._raise_failure()
        try:
            yield
        finally:
            self._checksums.end_write(slots)
            is_late = time.monotonic() > self._last_pass + WRITE_BACK_SECONDS
            if (self._dirty_bytes() > self._dirty_limit or is_late) and not self._is_writing_back():
                self._last_pass = time.monotonic()
                self._pass = self._writer.submit(self._write_back)

    def _dirty_bytes(self) -> int:
        return self._checksums.num_written * self._record_bytes

    def _is_writing_back(self) -> bool:
        return self._pass is not None and not self._pass.done()

    def _wait_for_disk(self) -> None:
        """While twice as many pages are dirty as may be: the disk is slower than the run."""
        with self._piece_written:
            while self._dirty_bytes() > 2 * self._dirty_limit and self._is_writing_back():
                self._piece_written.wait(WAIT_SECONDS)

    def _write_back(self) -> None:
        self._pass_number += 1
        step = max(1, WRITE_BACK_BYTES // self._record_bytes)
        for first in range(0, self._num_slots, step):
            if self._closing.is_set():
                return
            count, again = self._checksums.add(slice(first, first + step), self._pass_number)
            if not count:
                continue
            try:
                write_back(self._file.descriptor, first * self._record_bytes, step * self._record_bytes)
            except OSError as error:
                self._failure = DamagedRecordsError(
                    f"table rows cannot be written to '{self._file.path}': {error.strerror}; resume from the last "
                    "checkpoint, and check the disk or choose another memory.folder"
                )
            with self._piece_written:
                self._piece_written.notify_all()
            if len(again):  # they are written all the time
                self._pages.will_write(*self._page_ranges(again))

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
