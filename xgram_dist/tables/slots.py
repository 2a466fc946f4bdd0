"""Slots: which record of a shard holds which row, for shards that keep records of touched rows only.

`SlotMap` numbers rows in the order in which they are first looked up, ascending within a call, so that the numbers
repeat from run to run. It is a hash table with open addressing in numpy, in host memory: a lookup costs what is looked
up, and the table what was ever touched, however many rows there are.
"""

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

_EMPTY = -1
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_FIRST_BITS = 10
MAX_SLOTS = 2**31 - 1
"""Slots are int32."""


class SlotMap:
    """Rows (int64, at least 0) -> slots 0, 1, 2, .. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._rows = np.empty(1 << (_FIRST_BITS - 1), np.int64)
        """The row of each slot."""
        self._bits = _FIRST_BITS
        self._table = np.full(1 << _FIRST_BITS, _EMPTY, np.int32)
        """Slots by hash. At most half of the entries are in use."""

    def __len__(self) -> int:
        return self._count

    def rows_of(self, slots: slice | NDArray[Any]) -> NDArray[np.int64]:
        """The row of each slot; a copy."""
        rows = self._rows
        return rows[slots].copy() if isinstance(slots, slice) else rows[slots]

    def lookup(self, rows: NDArray[Any]) -> NDArray[np.int64]:
        """The slots of distinct rows. A row that has none gets the next one."""
        keys = rows.astype(np.int64, copy=False)
        with self._lock:
            slots, entries = self._search(keys)
            is_new = slots == _EMPTY
            if is_new.any():
                new = np.flatnonzero(is_new)
                new = new[np.argsort(keys[new], kind="stable")]
                first = self._count
                slots[new] = np.arange(first, first + len(new))
                self._append(keys[new], entries[new])
            return slots

    def find(self, rows: NDArray[Any]) -> NDArray[np.int64]:
        """The slots of rows, -1 for those that have none."""
        with self._lock:
            return self._search(rows.astype(np.int64, copy=False))[0]

    def _hash(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        mixed = keys.astype(np.uint64)
        mixed ^= mixed >> np.uint64(32)
        mixed *= _MULTIPLIER
        return (mixed >> np.uint64(64 - self._bits)).astype(np.int64)

    def _search(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(slots, -1 for none; the entry where the search of each key ended)."""
        mask = len(self._table) - 1
        entries = self._hash(keys)
        slots = self._table[entries].astype(np.int64)
        open_ = np.flatnonzero((slots != _EMPTY) & (self._rows[slots] != keys))
        while len(open_):
            entries[open_] = (entries[open_] + 1) & mask
            found = self._table[entries[open_]]
            slots[open_] = found
            open_ = open_[(found != _EMPTY) & (self._rows[found] != keys[open_])]
        return slots, entries

    def _append(self, keys: NDArray[np.int64], entries: NDArray[np.int64]) -> None:
        """`entries`: where the search of each key ended."""
        first, self._count = self._count, self._count + len(keys)
        assert self._count <= MAX_SLOTS, "more rows were touched than slots can number"
        if self._count > len(self._rows):
            rows = np.empty(max(self._count, 2 * len(self._rows)), np.int64)
            rows[:first] = self._rows[:first]
            self._rows = rows
        self._rows[first : self._count] = keys
        if 2 * self._count <= len(self._table):
            self._insert(keys, np.arange(first, self._count, dtype=np.int32), entries)
            return
        while 2 * self._count > 1 << self._bits:
            self._bits += 1
        self._table = np.full(1 << self._bits, _EMPTY, np.int32)
        all_keys = self._rows[: self._count]
        self._insert(all_keys, np.arange(self._count, dtype=np.int32), self._hash(all_keys))

    def _insert(self, keys: NDArray[np.int64], slots: NDArray[np.int32], entries: NDArray[np.int64]) -> None:
        """Keys that are not in the table. Of several that want one empty entry the last takes it; the others go on."""
        mask = len(self._table) - 1
        while len(slots):
            is_free = self._table[entries] == _EMPTY
            self._table[entries[is_free]] = slots[is_free]
            missed = np.flatnonzero(self._table[entries] != slots)
            slots, entries = slots[missed], (entries[missed] + 1) & mask
