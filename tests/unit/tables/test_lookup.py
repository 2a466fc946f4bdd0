"""Stage 1: rows to vectors, and gradients back to rows and gates."""

import numpy as np
import pytest
import tiny_models as tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xgram_dist.tables.lookup import build_gathered_accesses, build_zero_copy_accesses
from xgram_dist.tables.touched_rows import Dedup, touch_rows

F64 = torch.float64


@pytest.mark.parametrize(
    "memory",
    [{}, {"compression": 1.0}, {"row_gates": False}, {"routing": {"vip": 4, "buckets": 4, "copies": 0}}],
)
def test_every_table_gives_every_token_the_vector_of_the_formula(memory):
    settings = tiny.config(memory={"sites": {"v": {"views": 2}, "h": {"views": 1, "layers": [0, 2]}}, **memory})
    made = tiny.tables(settings, F64)
    asked = torch.arange(settings.model.vocabulary)
    working = tiny.fetch(made, asked)
    assert len(working.values) == 3 * 2 + 2
    for name, values in working.values.items():
        for token in range(0, settings.model.vocabulary, 7):
            expected = tiny.literal_retrieval(made, name, token)
            torch.testing.assert_close(values[working.slots[token]], expected, rtol=1e-12, atol=1e-14)


def test_vip_token_counts_its_base_row_twice_as_often_as_a_single_path():
    """All hash paths of a VIP slot are the same row: its coefficients sum to the number of paths, weights 0.8^c."""
    settings = tiny.config()
    row_map = tiny.tables(settings).planner.access_lists[0]
    token = int(np.argmin(np.arange(120) * 7 % 120))  # the most frequent token of the test frequencies
    begin, end = int(row_map.offsets[token]), int(row_map.offsets[token + 1])
    weights = np.array([1, 0.8, 0.64, 0.512])
    np.testing.assert_allclose(row_map.coefficients[begin:end], 2 * weights / weights.sum(), rtol=1e-6)
    assert row_map.rows[begin:end].tolist() == [0, 4, 5, 6]


def test_distinct_tokens_are_fetched_once_and_slots_lead_back_to_them():
    settings = tiny.config()
    asked = torch.tensor([[5, 5, 7], [7, 5, 119]])
    working = tiny.fetch(tiny.tables(settings), asked)
    assert working.window.keys.tolist() == [5, 7, 119]
    assert np.array_equal(working.window.keys[working.slots], asked)


@pytest.mark.parametrize("compression", [0.5, 1.0])
def test_gradients_of_rows_and_gates_equal_those_of_autograd_over_the_formula(compression):
    settings = tiny.config(memory={"compression": compression})
    made = tiny.tables(settings, F64)
    asked = tiny.tokens(settings, 2, 9)
    working = tiny.fetch(made, asked)
    generator = torch.Generator().manual_seed(3)
    upstream = {n: torch.randn(v.shape, dtype=F64, generator=generator) for n, v in working.values.items()}
    for name, leaf in working.values.items():
        leaf.grad = upstream[name].clone()
    made.give_back(working)

    for state in made.shards:
        state.rows.requires_grad_()
        if state.gates is not None:
            state.gates.requires_grad_()
    total = sum(
        (tiny.literal_retrieval(made, name, int(token)) * upstream[name][slot]).sum()
        for name in working.values
        for slot, token in enumerate(working.window.keys)
    )
    total.backward()
    for state in made.shards:
        rows_grad, gates_grad = tiny.dense_gradients(state)
        torch.testing.assert_close(rows_grad, state.rows.grad, rtol=1e-10, atol=1e-12)
        if state.gates is not None:
            torch.testing.assert_close(gates_grad, state.gates.grad, rtol=1e-10, atol=1e-12)
        hit = state.rows.grad.abs().sum(1) > 0
        assert set(hit.nonzero()[:, 0].tolist()) <= set(state.gradient.touched_R.tolist())


def test_gradients_of_two_windows_add_up():
    settings = tiny.config(memory={"window": 1})
    made = tiny.tables(settings, F64)
    asked = torch.stack((tiny.tokens(settings, 6, seed=1), tiny.tokens(settings, 6, seed=2)))
    windows = made.plan(asked).result()
    assert [window.micro_batches for window in windows] == [slice(0, 1), slice(1, 2)]
    for window in windows:
        working = made.fetch(window)
        for leaf in working.values.values():
            leaf.grad = torch.ones_like(leaf)
        made.give_back(working)
    both = tiny.dense_gradients(made.shards[0])[0]
    norm = made.shards.gradient_square_sum()
    tiny.drop_gradients(made.shards)
    assert made.shards[0].gradient is None
    parts = []
    for asked in (tiny.tokens(settings, 6, seed=1), tiny.tokens(settings, 6, seed=2)):
        working = tiny.fetch(made, asked)
        for leaf in working.values.values():
            leaf.grad = torch.ones_like(leaf)
        made.give_back(working)
        parts.append(tiny.dense_gradients(made.shards[0])[0])
        tiny.drop_gradients(made.shards)
    torch.testing.assert_close(both, parts[0] + parts[1])
    assert norm > 0


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=0, max_size=6),
    own=st.integers(0, 6),
)
def test_return_is_the_transpose_of_fetch_for_any_access_list(rows, own):
    """<retrieve(B), G> = <B, row_gradient(G)> when gates are absent: the map is linear and its adjoint is used."""
    own = min(own, len(rows))
    generator = torch.Generator().manual_seed(len(rows))
    flat = np.array([row for of_token in rows for row in of_token], dtype=np.int64)
    counts = np.array([len(of_token) for of_token in rows], dtype=np.int64)
    slab = torch.randn(10, 5, dtype=F64, generator=generator)
    coefficients = torch.rand(len(flat), dtype=F64, generator=generator)
    touched = touch_rows(flat, int(counts[:own].sum()), Dedup(10))
    accesses = build_gathered_accesses(touched, counts, coefficients.numpy(), own, tiny.CPU)
    read = slab[accesses.touched_R]
    out = torch.cat((accesses.local.retrieve(read), accesses.remote.retrieve(read[: accesses.num_remote])))
    expected = [
        sum((coefficients[n] * slab[flat[n]] for n in range(end - count, end)), torch.zeros(5, dtype=F64))
        for end, count in zip(counts.cumsum().tolist(), counts.tolist(), strict=True)
    ]
    torch.testing.assert_close(out, torch.stack(expected) if expected else out)
    upstream = torch.randn(out.shape, dtype=F64, generator=generator)
    gradient = accesses.row_gradient(upstream, None, [2, 3], 1)
    grad = torch.zeros_like(slab)
    grad[gradient.touched_R] = gradient.rows_RW
    torch.testing.assert_close((out * upstream).sum(), (slab * grad).sum())


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.integers(0, 9), max_size=12), own=st.integers(0, 12), dtype=st.sampled_from([F64, torch.float32])
)
def test_one_row_a_token_comes_as_it_is_asked_for_and_others_need_the_first_rows_alone(rows, own, dtype):
    flat, slab = np.array(rows, dtype=np.int64), torch.arange(20, dtype=F64).reshape(10, 2)
    own = min(own, len(rows))
    accesses = build_gathered_accesses(touch_rows(flat, own, Dedup(10)), None, None, own, tiny.CPU)
    read = slab[accesses.touched_R]
    assert sorted(accesses.touched_R[: accesses.num_remote].tolist()) == sorted(set(rows[own:]))
    assert torch.equal(accesses.remote.retrieve(read[: accesses.num_remote]), slab[flat[own:]])
    out = torch.full((own, 2), -1.0, dtype=dtype)
    accesses.local.retrieve_into(out, read)
    assert torch.equal(out, slab[flat[:own]].to(dtype))


@settings(max_examples=50, deadline=None)
@given(own=st.sets(st.integers(0, 9)), others=st.lists(st.integers(0, 9), max_size=12))
def test_rows_read_in_place_get_the_gradients_of_all_their_readers(own, others):
    flat, slab = np.array([*sorted(own), *others], dtype=np.int64), torch.arange(20, dtype=F64).reshape(10, 2)
    touched = touch_rows(flat, len(own), Dedup(10), zero_copy=True)
    accesses = build_zero_copy_accesses(touched, tiny.CPU)
    read = slab[accesses.touched_R]
    assert torch.equal(read[touched.index_N[: len(own)]], slab[flat[: len(own)]])
    assert torch.equal(accesses.remote.retrieve(read[: accesses.num_remote]), slab[flat[len(own) :]])
    generator = torch.Generator().manual_seed(len(flat))
    upstream = torch.randn(len(flat), 2, dtype=F64, generator=generator)
    expected = torch.zeros_like(slab).index_add_(0, torch.from_numpy(flat), upstream)
    own_RW = torch.zeros_like(read)  # what autograd gives: nothing for rows that only others read
    own_RW[touched.index_N[: len(own)]] = upstream[: len(own)]
    gradient = accesses.row_gradient(own_RW, upstream[len(own) :], 1)
    torch.testing.assert_close(torch.zeros_like(slab).index_copy_(0, gradient.touched_R, gradient.rows_RW), expected)


def test_gradients_of_all_tables_add_up_in_one_tensor_that_is_sent_as_it_is():
    settings = tiny.config(memory={"compression": 1.0})
    made = tiny.tables(settings, F64)
    asked = torch.stack((tiny.tokens(settings, 6, seed=1), tiny.tokens(settings, 6, seed=2)))
    working = made.fetch(made.plan(asked, whole=True).result()[0])
    *used, unused = working.values
    expected = {name: torch.zeros_like(leaf) for name, leaf in working.values.items()}
    for number, slots in enumerate(working.slots, 1):
        sum((number * working.values[name][slots]).square().sum() for name in used).backward()
        for name in used:
            leaf = working.values[name].detach()
            expected[name].index_add_(0, slots, 2 * number**2 * leaf[slots])
    assert working.values[unused].grad is None
    memory = {working.values[name].grad.untyped_storage().data_ptr() for name in used}
    assert len(memory) == 1
    made.give_back(working)
    (state,) = made.shards
    assert state.gradient.rows_RW.untyped_storage().data_ptr() in memory
    assert working.values[used[0]].grad.untyped_storage().nbytes() == working.slabs[0].untyped_storage().nbytes()
    joined = torch.cat([expected[table.name] for table in state.slab.tables], dim=1)
    torch.testing.assert_close(state.gradient.rows_RW, joined)
