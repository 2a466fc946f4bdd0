"""Shards that keep touched rows only train as shards that keep all rows, bit for bit."""

import numpy as np
import pytest
import touched_helper as touched
from ranks_helper import run_ranks

STEPS = 14


@pytest.mark.parametrize("case", touched.CASES)
def test_touched_rows_train_as_all_rows(case):
    from xgram_dist.parallel.process_group import ProcessGroup

    every, some = (touched.train(ProcessGroup(), case, rows, STEPS) for rows in ("all", "touched"))
    touched.compare(case, every, some)


def test_records_in_host_memory_are_staged_before_their_step(monkeypatch):
    from xgram_dist.parallel.process_group import ProcessGroup
    from xgram_dist.tables.staged_shard import StagedShard

    drains, drain = [], StagedShard._drain
    monkeypatch.setattr(StagedShard, "_drain", lambda shard: drains.append(drain(shard)))
    touched.train(ProcessGroup(), "ple, host", "touched", STEPS)
    sweeps, validated = STEPS // touched.HISTORY, STEPS // 3
    # Around a validation and the step after it, around a sweep twice and the step after it, and no other step.
    assert validated < len(drains) <= 2 * validated + 3 * sweeps < STEPS + validated


@pytest.mark.parametrize(("size", "parallel"), [(2, {}), (4, {"tensor": 2})])
def test_touched_rows_over_ranks_train_as_all_rows(size, parallel):
    cases = ["xgram, catch-up", "xgram, catch-up, windows", "engram", "engram, windows, overlap"]
    cases += ["xgram, windows, disk", "engram, overlap, disk", "xgram, bf16"]
    cases += ["xgram, catch-up, host", "xgram, windows, host", "engram, overlap, host"]
    every, some = (run_ranks(touched.run_cases, size, cases, rows, STEPS, parallel) for rows in ("all", "touched"))
    for number, case in enumerate(cases):
        for rank in range(size):
            touched.compare(case, every[rank][number], some[rank][number])


@pytest.mark.parametrize("engine", ["hsdp", "deepspeed"])
def test_tiers_train_as_all_rows_beside_every_engine(engine):
    cases = ["xgram, windows, disk", "engram, overlap, host", "mort, disk"]
    every, some = (
        run_ranks(touched.run_cases, 2, cases, rows, STEPS, {"engine": engine}) for rows in ("all", "touched")
    )
    for number, case in enumerate(cases):
        for rank in range(2):
            touched.compare(case, every[rank][number], some[rank][number])


@pytest.mark.parametrize("size", [1, 2])
def test_numbers_beyond_32_bits_give_the_same_run(size):
    """The arithmetic and the deduplication for any number of rows, on a table for which both kinds will do."""
    for case in ("engram", "engram, windows, overlap"):
        few, many = (run_ranks(touched.train_with_numbers, size, case, STEPS, wide) for wide in (False, True))
        assert few == many, case


def test_a_table_of_any_size_costs_what_is_touched():
    from xgram_dist.parallel.process_group import ProcessGroup

    for rows in (10**9, 10**11):
        losses, created, nbytes = touched.train_huge(ProcessGroup(), rows, 2)
        assert all(np.isfinite(losses))
        assert 0 < created < 4000
        assert nbytes < 4000 * 1024


def test_ranks_follow_one_process_in_a_table_of_any_size():
    from xgram_dist.parallel.process_group import ProcessGroup

    losses, created, _ = touched.train_huge(ProcessGroup(), 10**10, 6)
    results = run_ranks(touched.train_huge, 2, 10**10, 6)
    for of_rank, _, _ in results:
        np.testing.assert_allclose(of_rank, losses, rtol=1e-5)
    assert sum(of_rank for _, of_rank, _ in results) == created


def test_more_rows_than_keys_can_number_is_one_sentence():
    from xgram_dist.errors import UserError
    from xgram_dist.model.methods.base import check_method

    check_method(touched.huge_config(10**17))
    with pytest.raises(UserError, match="keys have 62 bits, so lower it"):
        check_method(touched.huge_config(10**18))


def test_a_sweep_over_touched_rows_is_one_sentence():
    from xgram_dist.errors import UserError
    from xgram_dist.parallel.process_group import ProcessGroup

    touched.CASES["swept"] = ("ple", {"optimizer": "dense"})
    with pytest.raises(UserError, match=r"memory\.optimizer=catch_up, which is the same AdamW, or memory\.rows=all"):
        touched.train(ProcessGroup(), "swept", "touched", 1)
    del touched.CASES["swept"]
