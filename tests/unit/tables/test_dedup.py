"""If these fail, a step fetches tokens twice or mixes up whose rows it got."""

import numpy as np
import pytest

from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.requests import OwnerOrder, RowNumbering
from xgram_dist.tables.touched_rows import SORT_ABOVE, Dedup


@pytest.mark.parametrize("limit", [1, 7, 40, 40 * SORT_ABOVE, 1000 * SORT_ABOVE])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_distinct_values_and_places_are_those_of_a_sort_whatever_the_limit(limit, dtype):
    distinct, random = Dedup(limit), np.random.default_rng(limit)
    for shape in ((3, 13), (1,), (40,)):  # the same object serves step after step
        values = random.integers(0, limit, shape).astype(dtype)
        found, places = distinct(values)
        assert found.dtype == np.int64
        assert found.tolist() == sorted(set(values.ravel().tolist()))
        assert np.array_equal(found[places], values)
        assert distinct.count(values) == len(found)


@pytest.mark.parametrize(("rows", "ranks", "rank"), [(1, 1, 0), (10, 3, 0), (10, 3, 1), (12, 4, 3), (5, 8, 6)])
def test_numbers_of_rows_ascend_by_owner_this_rank_first_and_lead_back_to_the_row(rows, ranks, rank):
    numbers, keys = RowNumbering(rows, OwnerOrder(ProcessGroup(rank, ranks))), np.arange(rows)
    made = numbers.numbers(keys)
    assert np.array_equal(numbers.keys(made), keys)
    assert len(set(made.tolist())) == rows
    assert made.max() < numbers.limit
    owners = (numbers.keys(np.sort(made)) % ranks).tolist()
    assert owners == sorted(owners, key=lambda owner: (owner != rank, owner))
