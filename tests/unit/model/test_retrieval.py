"""Stage 1: rows to vectors, and gradients back to rows and gates."""

import numpy as np
import pytest
import tiny_models as tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xgram_dist.memory.retrieval import Accesses, give_back, retrieve

F64 = torch.float64


@pytest.mark.parametrize(
    "memory",
    [{}, {"compression": 1.0}, {"row_gates": False}, {"routing": {"vip": 4, "buckets": 4, "copies": 0}}],
)
def test_every_table_gives_every_token_the_vector_of_the_formula(memory):
    settings = tiny.config(memory={"sites": {"v": {"views": 2}, "h": {"views": 1, "layers": [0, 2]}}, **memory})
    made = tiny.tables(settings, F64)
    asked = torch.arange(settings.model.vocabulary)
    working = made.fetch(asked)
    assert len(working.values) == 3 * 2 + 2
    for name, values in working.values.items():
        for token in range(0, settings.model.vocabulary, 7):
            expected = tiny.literal_retrieval(made, name, token)
            torch.testing.assert_close(values[working.slots[token]], expected, rtol=1e-12, atol=1e-14)


def test_vip_token_counts_its_base_row_twice_as_often_as_a_single_path():
    """All hash paths of a VIP slot are the same row: its coefficients sum to the number of paths, weights 0.8^c."""
    settings = tiny.config()
    row_map = tiny.tables(settings).states[0].row_map
    token = int(np.argmin(np.arange(120) * 7 % 120))  # the most frequent token of the test frequencies
    begin, end = int(row_map.offsets[token]), int(row_map.offsets[token + 1])
    weights = np.array([1, 0.8, 0.64, 0.512])
    np.testing.assert_allclose(row_map.coefficients[begin:end], 2 * weights / weights.sum(), rtol=1e-6)
    assert row_map.rows[begin:end].tolist() == [0, 4, 5, 6]


def test_distinct_tokens_are_fetched_once_and_slots_lead_back_to_them():
    settings = tiny.config()
    asked = torch.tensor([[5, 5, 7], [7, 5, 119]])
    working = tiny.tables(settings).fetch(asked)
    assert working.keys.tolist() == [5, 7, 119]
    assert torch.equal(working.keys[working.slots], asked)


@pytest.mark.parametrize("compression", [0.5, 1.0])
def test_gradients_of_rows_and_gates_equal_those_of_autograd_over_the_formula(compression):
    settings = tiny.config(memory={"compression": compression})
    made = tiny.tables(settings, F64)
    asked = tiny.tokens(settings, 2, 9)
    working = made.fetch(asked)
    generator = torch.Generator().manual_seed(3)
    upstream = {n: torch.randn(v.shape, dtype=F64, generator=generator) for n, v in working.values.items()}
    for name, leaf in working.values.items():
        leaf.grad = upstream[name].clone()
    made.give_back(working)

    for state in made.states:
        state.rows.requires_grad_()
        if state.gates is not None:
            state.gates.requires_grad_()
    total = sum(
        (tiny.literal_retrieval(made, name, int(token)) * upstream[name][slot]).sum()
        for name in working.values
        for slot, token in enumerate(working.keys)
    )
    total.backward()
    for state in made.states:
        rows_grad, gates_grad = tiny.dense_gradients(state)
        torch.testing.assert_close(rows_grad, state.rows.grad, rtol=1e-10, atol=1e-12)
        if state.gates is not None:
            torch.testing.assert_close(gates_grad, state.gates.grad, rtol=1e-10, atol=1e-12)
        hit = state.rows.grad.abs().sum(1) > 0
        assert set(hit.nonzero()[:, 0].tolist()) <= set(state.gradient.touched.tolist())


def test_gradients_of_two_windows_add_up():
    settings = tiny.config()
    made = tiny.tables(settings, F64)
    for asked in (tiny.tokens(settings, 6, seed=1), tiny.tokens(settings, 6, seed=2)):
        working = made.fetch(asked)
        for leaf in working.values.values():
            leaf.grad = torch.ones_like(leaf)
        made.give_back(working)
    both = tiny.dense_gradients(made.states[0])[0]
    norm = made.gradient_square_sum()
    made.clear_gradients()
    assert made.states[0].gradient is None
    parts = []
    for asked in (tiny.tokens(settings, 6, seed=1), tiny.tokens(settings, 6, seed=2)):
        working = made.fetch(asked)
        for leaf in working.values.values():
            leaf.grad = torch.ones_like(leaf)
        made.give_back(working)
        parts.append(tiny.dense_gradients(made.states[0])[0])
        made.clear_gradients()
    torch.testing.assert_close(both, parts[0] + parts[1])
    assert norm > 0


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    tokens=st.integers(1, 5),
    data=st.data(),
)
def test_return_is_the_transpose_of_fetch_for_any_access_list(rows, tokens, data):
    """<retrieve(B), G> = <B, give_back(G)> when gates are absent: the map is linear and its adjoint is used."""
    owners = data.draw(st.lists(st.integers(0, tokens - 1), min_size=len(rows), max_size=len(rows)))
    generator = torch.Generator().manual_seed(len(rows) * 7 + tokens)
    slab = torch.randn(10, 5, dtype=F64, generator=generator)
    coefficients = torch.rand(len(rows), dtype=F64, generator=generator)
    accesses = Accesses(torch.tensor(rows), coefficients, torch.tensor(owners), tokens)
    out = retrieve(slab, None, accesses, [2, 3])
    upstream = [torch.randn(o.shape, dtype=F64, generator=generator) for o in out]
    gradient = give_back(upstream, slab, None, accesses, [2, 3])
    grad = torch.zeros_like(slab)
    grad[gradient.touched] = gradient.rows
    left = sum((o * g).sum() for o, g in zip(out, upstream, strict=True))
    torch.testing.assert_close(left, (slab * grad).sum())
