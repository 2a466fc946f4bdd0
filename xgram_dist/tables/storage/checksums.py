"""Checksums of records: a record that the disk has damaged is found before it is used.

    begin_write(slots)    the caller is about to write them; returns damaged ones
    end_write(slots)      written
    add(slots)            checksums of records of a range that were written, before they are written back
    check(slots)          returns the damaged ones among those that have a checksum

Covered: bytes that change, vanish (a lost write, a page of zeros) or move to another record, between write-back and the
moment the record is read again. A record that `prefetch` announced is checked in the background before the step
overwrites it, any other by `begin_write`, all by `verify`. A step that reads a damaged record before the check is done
raises before it writes its update. Not covered: a record in memory that was not written back since its update, which
is no longer than WRITE_BACK_SECONDS (disk.py), and a disk that reports an error instead of wrong bytes: the system then
ends the process by SIGBUS, and the run resumes from the last checkpoint, too.

A checksum is the sum of the record's words modulo 2^64. Any damage to one word changes it, other damage with
probability 1 - 2^-64 (moving words within the record is not seen). It is computed once for each write-back and not for
each update, by a pass over memory at the speed of a gather; 13 bytes a record are kept.
"""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.tables.storage.base import Slots

BLOCK_BYTES = 1 << 20
"""Records summed at a time; they stay in the cache between gather and sum."""
EMPTY, WRITING, WRITTEN, SUMMING, SUMMED = range(5)
"""What is known of a record. EMPTY: it was never written. SUMMED: it has a checksum, and was not written since."""


class RecordChecksums:
    def __init__(self, records_SN: NDArray[np.float32]):
        width = records_SN.shape[1]
        self._words_SN = records_SN.view(np.int64 if width % 2 == 0 else np.int32)
        self._block = max(1, BLOCK_BYTES // (4 * width))
        self._sums_S = np.zeros(0, np.int64)
        self._states_S = np.zeros(0, np.uint8)
        self._checks_S = np.zeros(0, np.uint32)
        """The number of the prefetch that last checked each record."""
        self._passes_S = np.zeros(0, np.uint32)
        """The number of the latest `add` of each record."""
        self._lock = threading.Lock()
        self.num_written = 0
        """Records that were written since they last had a checksum, or are being written."""

    def ensure(self, num_slots: int) -> None:
        """Room for these slots."""
        if num_slots > len(self._sums_S):
            size = max(num_slots, 2 * len(self._sums_S))
            with self._lock:
                self._sums_S = _lengthened(self._sums_S, size)
                self._states_S = _lengthened(self._states_S, size)
                self._checks_S = _lengthened(self._checks_S, size)
                self._passes_S = _lengthened(self._passes_S, size)

    def begin_write(self, slots: Slots, number: int) -> Slots:
        """`number`: of the latest prefetch. Returns the damaged slots among those that it and the one before it did not
        check; if there are none, all may be written now."""
        damaged = self.check(slots[self._checks_S[slots] < max(1, number - 1)])
        with self._lock:
            self.num_written += len(slots) - int(np.count_nonzero(self._states_S[slots] == WRITTEN))
            self._states_S[slots] = WRITING
        return damaged

    def end_write(self, slots: Slots) -> None:
        with self._lock:
            self._states_S[slots] = WRITTEN

    def add(self, slots: slice, number: int) -> tuple[int, Slots]:
        """Checksums of written records. Those that are being written again are left to the next call. `number`: of the
        pass over all records. Returns how many there are, and those among them that the pass before had, too."""
        count, again = 0, [np.zeros(0, np.int64)]
        for block in self._blocks(np.flatnonzero(self._states_S[slots] == WRITTEN) + slots.start):
            with self._lock:
                block = block[self._states_S[block] == WRITTEN]
                self._states_S[block] = SUMMING
                self.num_written -= len(block)
            count += len(block)
            sums = self._sum(block)
            with self._lock:
                still = self._states_S[block] == SUMMING
                self._sums_S[block[still]] = sums[still]
                self._states_S[block[still]] = SUMMED
            again.append(block[self._passes_S[block] == number - 1])
            self._passes_S[block] = number
        return count, np.concatenate(again)

    def at_rest(self, slots: Slots) -> Slots:
        """Those that may not be in memory: all but the ones written since the last `add`."""
        states = self._states_S[slots]
        return slots[(states == SUMMED) | (states == EMPTY)]

    def _summed(self, slots: Slots) -> Slots:
        return slots[self._states_S[slots] == SUMMED]

    def check(self, slots: Slots, number: int = 0) -> Slots:
        """The damaged slots among these. `number`: of the prefetch that asks, if one does."""
        found = [slots[:0]]
        for block in self._blocks(self._summed(slots)):
            with self._lock:
                block = self._summed(block)
                expected = self._sums_S[block]
            wrong = self._sum(block) != expected
            with self._lock:  # a record written meanwhile has another state or sum
                same = (self._states_S[block] == SUMMED) & (self._sums_S[block] == expected)
                if number:
                    self._checks_S[block] = number
            found.append(block[wrong & same])
        return np.concatenate(found)

    def _blocks(self, slots: Slots) -> Iterator[Slots]:
        return (slots[start : start + self._block] for start in range(0, len(slots), self._block))

    def _sum(self, slots: Slots) -> NDArray[np.int64]:
        gathered_RN = np.take(self._words_SN, slots, axis=0, mode="clip")
        return gathered_RN.sum(axis=1, dtype=np.int64)


def _lengthened(numbers_S: NDArray[Any], size: int) -> NDArray[Any]:
    return np.concatenate((numbers_S, np.zeros(size - len(numbers_S), numbers_S.dtype)))
