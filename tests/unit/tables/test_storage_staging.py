"""Records of a step staged while the former step runs: the bits of no overlap, whatever the steps share."""

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xgram_dist.tables.storage.memory import DeviceStorage, HostStorage
from xgram_dist.tables.storage.staging import RowStaging

CPU = torch.device("cpu")
SLOTS, WIDTH = 40, 5


def filled(storage_class=HostStorage):
    storage = HostStorage(WIDTH, SLOTS) if storage_class is HostStorage else DeviceStorage(WIDTH, SLOTS, CPU)
    storage.ensure(SLOTS)
    storage.records[:SLOTS] = torch.randn(SLOTS, WIDTH, generator=torch.Generator().manual_seed(0))
    return storage


def update(records, number):
    """Depends on the former value and on the step, and is not exact: the order of updates shows in the bits."""
    records.mul_(1 + 0.1 * number).add_(0.3).sin_()


def plain(records, steps):
    """Without staging: what each step reads, and the records at the end."""
    read = []
    for number, (slots, applied) in enumerate(steps):
        index = torch.from_numpy(slots)
        rows = records.index_select(0, index)
        read.append(rows.clone())
        if applied:
            update(rows, number)
            records.index_copy_(0, index, rows)
    return read


def staged(storage, steps, *, overlap, delay=0.0):
    staging, read = RowStaging(storage, CPU), []

    def slots_of(number):
        def wait():
            time.sleep(delay)
            return steps[number][0]

        return wait

    following = staging.stage(slots_of(0))
    for number, (_, applied) in enumerate(steps):
        step = following
        records = staging.records(step)
        more = number + 1 < len(steps)
        if more and overlap[number]:
            following = staging.stage(slots_of(number + 1))
        read.append(records.clone())
        if applied:
            update(records, number)
        staging.end(step)
        if more and not overlap[number]:
            following = staging.stage(slots_of(number + 1))
    staging.drain()
    staging.close()
    return read


def assert_same(steps, overlap, delay=0.0):
    storage, expected = filled(), filled().records.clone()
    found = staged(storage, steps, overlap=overlap, delay=delay)
    for one, other in zip(found, plain(expected, steps), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(storage.records, expected)


one_step = st.tuples(
    st.lists(st.integers(0, SLOTS - 1), unique=True).map(lambda slots: np.array(sorted(slots), np.int64)),
    st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(one_step, st.booleans()), min_size=1, max_size=12))
def test_any_steps_give_the_bits_of_no_overlap(drawn):
    assert_same([step for step, _ in drawn], [overlap for _, overlap in drawn])


@pytest.mark.parametrize("delay", [0.0, 0.003])
def test_steps_that_share_most_records(delay):
    random = np.random.default_rng(0)
    steps = [(np.sort(random.choice(SLOTS, 30, replace=False)), number % 7 != 3) for number in range(60)]
    assert_same(steps, [True] * 60, delay)


def test_the_next_gather_runs_while_a_step_computes():
    storage, begun = filled(), threading.Event()
    staging = RowStaging(storage, CPU)
    step = staging.stage(lambda: np.arange(10))
    staging.records(step)
    following = staging.stage(lambda: begun.set() or np.arange(5, 20))
    assert begun.wait(10), "the gather waits for the step to end"
    assert len(following.gathered.result(10).early_EW) == 10
    with pytest.raises(AssertionError, match="has not ended"):
        staging.records(following)
    staging.end(step)
    staging.records(following)
    staging.end(following)
    staging.drain()
    staging.close()


def test_buffers_are_used_again():
    staging, seen = RowStaging(filled(), CPU), set()
    for _ in range(10):
        step = staging.stage(lambda: np.arange(20))
        staging.records(step)
        staging.end(step)
        staging.drain()
        seen.add((staging._incoming._memory.data_ptr(), staging._outgoing._memory.data_ptr()))
    staging.close()
    assert len(seen) == 1


def test_after_draining_the_storage_may_be_written_and_grown():
    storage = filled(DeviceStorage)
    staging = RowStaging(storage, CPU)
    step = staging.stage(lambda: np.arange(SLOTS))
    staging.records(step).fill_(1.0)
    staging.end(step)
    staging.drain()
    storage.records[3] = 7.0
    step = staging.stage(lambda: np.array([3, 4]))
    assert staging.records(step)[:, 0].tolist() == [7.0, 1.0]
    staging.end(step)
    staging.drain()
    staging.close()


def test_what_fails_in_the_thread_is_raised():
    staging = RowStaging(filled(), CPU)

    def fail():
        raise ValueError("no plan")

    with pytest.raises(ValueError, match="no plan"):
        staging.records(staging.stage(fail))
    staging.close()
