"""Reads of the working set: each row's gradient is the sum over the positions that read it."""

import pytest
import torch
import torch.nn.functional as F

from xgram_dist.model.gather import Slots, _sorted_slots, gather_rows, sort_slots

ROWS = 40


def zipf(count):
    weights = 1 / torch.arange(1.0, ROWS + 1)
    return torch.multinomial(weights, count, replacement=True, generator=torch.Generator().manual_seed(count))


def index_of(kind, count):
    by_kind = {
        "zipf": lambda: zipf(count),
        "one row": lambda: torch.full((count,), 7),
        "last row": lambda: torch.full((count,), ROWS - 1),
        "each once": lambda: torch.randperm(ROWS, generator=torch.Generator().manual_seed(0)),
    }
    return by_kind[kind]().view(2, -1)


def gradients(slots, dtype=torch.float64):
    """By gather_rows, and by torch's own embedding."""
    values = torch.randn(ROWS, 3, dtype=dtype, generator=torch.Generator().manual_seed(1))
    weights = torch.randn(*slots.rows.shape, 3, dtype=dtype, generator=torch.Generator().manual_seed(2))
    found = []
    for read in (lambda v: gather_rows(v, slots), lambda v: F.embedding(slots.rows, v)):
        leaf = values.clone().requires_grad_()
        out = read(leaf)
        assert torch.equal(out, values[slots.rows])
        out.backward(weights)
        found.append(leaf.grad)
    return found


@pytest.mark.parametrize("kind", ["zipf", "one row", "last row", "each once"])
@pytest.mark.parametrize("piece", [1, 7, 64, 400])
def test_a_row_cut_into_pieces_gets_the_sum_over_all_its_positions(kind, piece):
    got, expected = gradients(_sorted_slots(index_of(kind, 400), ROWS, piece))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_pieces_are_no_longer_than_told_and_cover_every_position_once():
    slots = _sorted_slots(index_of("zipf", 400), ROWS, 7)
    assert slots.long is not None
    starts = torch.cat((slots.starts_U, slots.long.piece_starts_P, torch.tensor([400])))
    lengths = starts.diff()
    assert lengths.min() >= 0
    assert lengths.max() == 7
    assert slots.order_N.sort().values.equal(torch.arange(400))
    assert (slots.long.row_starts_P.diff() >= 0).all()


def test_on_a_cpu_positions_are_added_in_the_order_in_which_they_occur():
    """So that a number does not depend on whether torch's own embedding or this reads the working set."""
    got, expected = gradients(sort_slots(index_of("zipf", 400), ROWS), torch.float32)
    assert torch.equal(got, expected)


def test_without_a_backward_pass_nothing_is_sorted():
    index = index_of("zipf", 400)
    with torch.no_grad():
        assert sort_slots(index, ROWS) == Slots(index)


def test_some_positions_of_each_sequence_read_the_same_rows():
    slots = sort_slots(index_of("zipf", 400), ROWS)
    part = slots.select(slice(50, 90))
    assert part.rows.equal(slots.rows[:, 50:90])
    got, expected = gradients(part)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_compiled_and_eager_gradients_agree_for_any_number_of_rows():
    read = torch.compile(lambda values, slots: gather_rows(values, slots).sin(), fullgraph=True, backend="aot_eager")
    for rows in (ROWS, ROWS + 3, ROWS + 9):
        slots = _sorted_slots(index_of("zipf", 400), rows, 7)
        values = torch.randn(rows, 3, dtype=torch.float64)
        found = []
        for one in (read, lambda v, s: F.embedding(s.rows, v).sin()):
            leaf = values.clone().requires_grad_()
            one(leaf, slots).sum().backward()
            found.append(leaf.grad)
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
