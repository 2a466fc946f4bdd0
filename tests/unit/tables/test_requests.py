"""If these fail, a rank reads rows of other n-grams, or ranks send each other vectors nobody asked for."""

import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_ranks import Meeting, MeetingGroup
from slow_plan import listed_keys, slow_keys, slow_plans

from xgram_dist.tables.exchange_plan import ExchangePlanner, Window, WindowRule
from xgram_dist.tables.lookup import GatheredAccesses, ReadFirstRows, Reads, ZeroCopyAccesses
from xgram_dist.tables.ngrams import NgramHash, NgramKeys, plan_ngram_hash, primes_from
from xgram_dist.tables.row_sharding import plan_row_sharding

CPU = torch.device("cpu")


@st.composite
def hashings(draw: st.DrawFn) -> NgramHash:
    orders = draw(st.sampled_from([(2,), (2, 3), (1, 3), (4, 1, 2)]))
    heads, minimum = draw(st.integers(1, 3)), draw(st.sampled_from([2, 5, 40, 600]))
    vocabulary = draw(st.sampled_from([2, 7, 150]))
    layers, count = (0, 3)[: draw(st.integers(1, 2))], heads * len(orders)
    primes = primes_from(minimum, 2 * count)
    rows = [primes[:count], primes[draw(st.sampled_from([0, count])) :][:count]]  # in both layers, or differing
    pad = draw(st.sampled_from([None, 0, 1]))
    return plan_ngram_hash(vocabulary, orders, layers, rows[: len(layers)], pad)


def draw_tokens(hashing: NgramHash, seed: int, *shape: int) -> np.ndarray:
    """Few of them are frequent."""
    return (np.random.default_rng(seed).random(shape) ** 3 * hashing.outside).astype(np.int64)


@settings(max_examples=60, deadline=None)
@given(hashings(), st.integers(0, 99), st.sampled_from([None, 0, 1]), st.sampled_from([(3, 9), (2, 2, 1), (1, 30)]))
def test_keys_of_distinct_n_grams_are_those_of_every_position(
    hashing: NgramHash, seed: int, end: int | None, shape: tuple[int, ...]
) -> None:
    folding = np.random.default_rng(seed).integers(0, hashing.outside, hashing.outside)
    tokens = draw_tokens(hashing, seed, *shape)
    found = listed_keys(NgramKeys(hashing, folding, end), tokens)
    np.testing.assert_array_equal(found, slow_keys(hashing, folding, tokens, end))


def test_an_n_gram_is_hashed_once() -> None:
    """Planning's work follows the distinct n-grams, not the positions."""
    hashing = plan_ngram_hash(50, (2, 3), (0, 1), [primes_from(100, 4)] * 2)
    tokens = np.tile([7, 8, 9, 10], (4, 64))
    grams = NgramKeys(hashing, np.arange(50)).grams(tokens)
    assert [len(of_order.ids[0]) for of_order in grams] == [5, 6]  # with those that begin before the sequence
    for of_order in grams:
        assert of_order.index.shape == tokens.shape


def plan_all(hashing: NgramHash, keys: NgramKeys, tokens: list[np.ndarray], size: int, zero_copy: bool) -> Any:
    """Every rank's windows. `size`: micro-batches of a window."""
    ranks = len(tokens)
    num_rows = sum(rows for of_layer in hashing.rows for heads in of_layer for rows in heads)
    meeting, sharding = Meeting(ranks), plan_row_sharding(None, num_rows, ranks)
    planned: list[Any] = [None] * ranks

    def plan(rank: int) -> None:
        rule, group = WindowRule(size, None, "", 0), MeetingGroup(rank, meeting)
        slabs: Any = (None,)
        planner = ExchangePlanner(None, slabs, sharding, num_rows, rule, group, (CPU, CPU), keys, zero_copy)
        planner.plan(torch.from_numpy(tokens[rank][:, ::-1].copy()))  # another step before: nothing of it remains
        planned[rank] = planner.plan(torch.from_numpy(tokens[rank]))
        planner.close()

    threads = [threading.Thread(target=plan, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return planned


def fields(window: Window) -> dict[str, Any]:
    (slab,) = window.slabs
    accesses, part = slab.accesses, slab.part
    if isinstance(accesses, GatheredAccesses):
        local, token = read_rows(accesses.local), accesses.token_N
    else:
        assert isinstance(accesses, ZeroCopyAccesses)
        local, token = None, accesses.remote_token_N
        if token is None:
            token = torch.arange(accesses.remote.count)
    tensors = [window.slots, accesses.touched_R, token, accesses.row_starts_R]
    tensors += [] if part is None else [part.step_rows, part.index_R]
    assert all(tensor.dtype == torch.int64 for tensor in tensors)
    return {
        "keys": window.keys.tolist(),
        "slots": window.slots.tolist(),
        "num_distinct": window.num_distinct,
        "requested": slab.requested,
        "served": slab.served,
        "num_local": slab.num_local,
        "num_remote_tokens": slab.num_remote_tokens,
        "touched": accesses.touched_R.tolist(),
        "num_remote": accesses.num_remote,
        "remote": read_rows(accesses.remote),
        "local": local,
        "token": token.tolist(),
        "row_starts": accesses.row_starts_R.tolist(),
        "step_rows": None if part is None else part.step_rows.tolist(),
        "index": None if part is None else part.index_R.tolist(),
    }


def read_rows(reads: Reads) -> list[int]:
    if isinstance(reads, ReadFirstRows):
        return list(range(reads.count))
    row_N: torch.Tensor = reads.row_N  # type: ignore[attr-defined]
    assert row_N.dtype == torch.int64
    return row_N.tolist()


@settings(max_examples=80, deadline=None)
@given(
    hashings(),
    st.integers(0, 99),
    st.sampled_from([None, 0]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([(1, False), (2, False), (3, False), (3, True)]),
    st.sampled_from([3, 1 << 18]),
)
def test_plans_of_n_grams_are_those_of_plain_loops(
    hashing: NgramHash, seed: int, end: int | None, ranks: int, window: tuple[int, bool], accesses: int
) -> None:
    """Some owners are asked for nothing: heads have few rows, ranks few tokens. `accesses`: of a range of rows."""
    size, zero_copy = window
    folding = np.arange(hashing.outside)
    tokens = [draw_tokens(hashing, seed + rank, 3, 1, 4) for rank in range(ranks)]
    with mock.patch("xgram_dist.tables.touched_rows.ACCESSES_PER_RANGE", accesses):
        found = plan_all(hashing, NgramKeys(hashing, folding, end), tokens, size, zero_copy)
    windows = [slice(start, start + size) for start in range(0, 3, size)]
    keys = [[slow_keys(hashing, folding, of_rank, end)[w] for w in windows] for of_rank in tokens]
    expected = slow_plans(keys, zero_copy)
    for rank in range(ranks):
        assert [window.micro_batches for window in found[rank]] == [slice(w.start, min(w.stop, 3)) for w in windows]
        assert [fields(window) for window in found[rank]] == expected[rank]


@pytest.mark.parametrize("ranks", [1, 4])
def test_as_many_threads_as_there_are_change_no_plan(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hashing = plan_ngram_hash(150, (2, 3), (0, 1, 2), [primes_from(600, 6)] * 3)
    tokens = [draw_tokens(hashing, rank, 4, 2, 200) for rank in range(ranks)]
    found = []
    for threads in (1, 8):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, threads=threads: range(threads))
        keys = NgramKeys(hashing, np.arange(150), 3)
        found.append([[fields(window) for window in of_rank] for of_rank in plan_all(hashing, keys, tokens, 1, False)])
    assert found[0] == found[1]


def test_a_rank_that_owns_no_row_is_asked_for_none() -> None:
    hashing = plan_ngram_hash(5, (2,), (0,), [(2,)])
    tokens = [np.full((1, 1, 3), rank) for rank in range(4)]
    found = plan_all(hashing, NgramKeys(hashing, np.arange(5)), tokens, 1, False)
    keys = [[slow_keys(hashing, np.arange(5), of_rank)] for of_rank in tokens]
    assert [[fields(window) for window in of_rank] for of_rank in found] == slow_plans(keys, False)
    assert found[3][0].slabs[0].served == [0, 0, 0, 0]
