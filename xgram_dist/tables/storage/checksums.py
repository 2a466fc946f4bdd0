"""Checksums of records: a record that the disk has damaged is found before it is used.

    begin_write(slots)    the caller is about to write them; damaged ones among them raise
    end_write(slots)      written: `add` may compute their checksums, in another thread
    check(slots)          raises if one of them is damaged; records without a checksum yet are skipped

Covered: bytes that change, vanish (a lost write, a page of zeros) or move to another record, between the moment a
record's checksum is computed, right after its update, and the moment the record is read again. A record that
`prefetch` announced is checked in the background before the step overwrites it, any other by `begin_write`, all by
`verify`. Not covered: the moments between an update and its checksum, memory errors while a record is being updated,
and a step that reads a damaged record before the check is done: it raises before the step's update is written.

A checksum is the sum of the record's words modulo 2^64. Any damage to one word changes it, other damage with
probability 1 - 2^-64 (moving words within the record is not seen). It is a single pass over memory at the speed of a
gather, and 13 bytes a record are kept.
"""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.tables.storage.base import Slots

BLOCK_BYTES = 1 << 20
"""Records summed at a time; they stay in the cache between gather and sum."""
UNSUMMED, SUMMED, WRITING, SUMMING = range(4)


class RecordChecksums:
    def __init__(self, records_SN: NDArray[np.float32]):
        width = records_SN.shape[1]
        self._words_SN = records_SN.view(np.int64 if width % 2 == 0 else np.int32)
        self._block = max(1, BLOCK_BYTES // (4 * width))
        self._sums_S = np.zeros(0, np.int64)
        self._states_S = np.zeros(0, np.uint8)
        self._checks_S = np.zeros(0, np.uint32)
        """The number of the prefetch that last checked each record."""
        self._lock = threading.Lock()

    def ensure(self, num_slots: int) -> None:
        """Room for these slots."""
        if num_slots > len(self._sums_S):
            size = max(num_slots, 2 * len(self._sums_S))
            with self._lock:
                self._sums_S = _lengthened(self._sums_S, size)
                self._states_S = _lengthened(self._states_S, size)
                self._checks_S = _lengthened(self._checks_S, size)

    def begin_write(self, slots: Slots, number: int) -> Slots:
        """`number`: of the latest prefetch. Returns the damaged slots among those that it and the one before it did not
        check; if there are none, all may be written now."""
        damaged = self.check(slots[self._checks_S[slots] < max(1, number - 1)])
        with self._lock:
            self._states_S[slots] = WRITING
        return damaged

    def end_write(self, slots: Slots) -> None:
        with self._lock:
            self._states_S[slots] = UNSUMMED

    def add(self, slots: Slots) -> None:
        """Compute the checksums of written records. Those that are being written again are left out: the next `add`
        covers them."""
        for block in self._blocks(slots):
            with self._lock:
                block = block[self._states_S[block] == UNSUMMED]
                self._states_S[block] = SUMMING
            sums = self._sum(block)
            with self._lock:
                still = self._states_S[block] == SUMMING
                self._sums_S[block[still]] = sums[still]
                self._states_S[block[still]] = SUMMED

    def check(self, slots: Slots, number: int = 0) -> Slots:
        """The damaged slots among these. `number`: of the prefetch that asks, if one does."""
        found = []
        for block in self._blocks(slots):
            with self._lock:
                summed = block[self._states_S[block] == SUMMED]
                expected = self._sums_S[summed]
            wrong = self._sum(summed) != expected
            with self._lock:  # a record written meanwhile has another state or sum
                same = (self._states_S[summed] == SUMMED) & (self._sums_S[summed] == expected)
                if number:
                    self._checks_S[block] = number
            found.append(summed[wrong & same])
        return np.concatenate(found) if found else slots[:0]

    def _blocks(self, slots: Slots) -> Iterator[Slots]:
        return (slots[start : start + self._block] for start in range(0, len(slots), self._block))

    def _sum(self, slots: Slots) -> NDArray[np.int64]:
        gathered_RN = np.take(self._words_SN, slots, axis=0, mode="clip")
        return gathered_RN.sum(axis=1, dtype=np.int64)


def _lengthened(numbers_S: NDArray[Any], size: int) -> NDArray[Any]:
    return np.concatenate((numbers_S, np.zeros(size - len(numbers_S), numbers_S.dtype)))
