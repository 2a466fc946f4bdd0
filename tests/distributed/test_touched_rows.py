"""Shards that keep touched rows only train as shards that keep all rows, bit for bit."""

import pytest
import touched_helper as touched
from ranks_helper import run_ranks

STEPS = 14


@pytest.mark.parametrize("case", touched.CASES)
def test_touched_rows_train_as_all_rows(case):
    from xgram_dist.parallel.process_group import ProcessGroup

    every, some = (touched.train(ProcessGroup(), case, rows, STEPS) for rows in ("all", "touched"))
    touched.compare(case, every, some)


@pytest.mark.parametrize(("size", "parallel"), [(2, {}), (4, {"tensor": 2})])
def test_touched_rows_over_ranks_train_as_all_rows(size, parallel):
    cases = ["xgram, catch-up", "xgram, catch-up, windows", "engram", "engram, windows, overlap"]
    every, some = (run_ranks(touched.run_cases, size, cases, rows, STEPS, parallel) for rows in ("all", "touched"))
    for number, case in enumerate(cases):
        for rank in range(size):
            touched.compare(case, every[rank][number], some[rank][number])
