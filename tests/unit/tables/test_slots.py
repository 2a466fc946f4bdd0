"""Slots of rows are as in a dictionary that is filled in order of first touch, for any rows."""

import numpy as np
import pytest

from xgram_dist.tables.slots import SlotMap


def batches(kind, chooser):
    if kind == "clustered":
        return [chooser.choice(500, 100, replace=False) for _ in range(40)]
    if kind == "equal low bits":
        return [np.unique(chooser.integers(0, 1 << 20, 300)) << 32 for _ in range(20)]
    return [np.unique(chooser.integers(0, 10**11, size)) for size in (1, 0, 5000, 3, 20000, 7)]


@pytest.mark.parametrize("kind", ["clustered", "equal low bits", "huge"])
def test_slots_are_in_order_of_first_touch(kind):
    slots, expected = SlotMap(), {}
    for rows in batches(kind, np.random.default_rng(3)):
        for row in sorted(rows.tolist()):
            expected.setdefault(row, len(expected))
        np.random.default_rng(1).shuffle(rows)
        assert slots.lookup(rows).tolist() == [expected[row] for row in rows.tolist()]
        assert len(slots) == len(expected)
    assert slots.rows_of(slice(0, len(slots))).tolist() == list(expected)
    chosen = np.arange(0, len(slots), 3)
    assert slots.rows_of(chosen).tolist() == [list(expected)[slot] for slot in chosen]


def test_find_assigns_nothing():
    slots = SlotMap()
    slots.lookup(np.array([5, 3, 2**62]))
    assert slots.find(np.array([3, 4, 2**62, 5, 3])).tolist() == [0, -1, 2, 1, 0]
    assert len(slots) == 3
