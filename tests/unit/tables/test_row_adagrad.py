"""RowAdagrad against its textbook form, written row by row and table by table."""

import pytest
import torch
from optimizer_states import load_state, saved_state
from torch import Tensor

from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.optimizers.adagrad import RowAdagrad

ROWS, WIDTHS, EPS = 6, [2, 3, 1], 1e-8
RATES = (0.3, 0.1)


def start() -> Tensor:
    return torch.randn(ROWS, sum(WIDTHS), dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def steps(count: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(2)
    hits = [torch.randperm(ROWS, generator=random)[: step % (ROWS + 1)].sort().values for step in range(1, count + 1)]
    return [(rows, torch.randn(rows.numel(), sum(WIDTHS), dtype=torch.float64, generator=random)) for rows in hits]


@pytest.mark.parametrize("cut", [0, 2, ROWS])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_each_table_of_a_row_has_its_own_step_size(cut: int, decay: float) -> None:
    values, true = start(), start()
    optimizer = RowAdagrad(values, cut, WIDTHS, EPS, decay, ProcessGroup())
    sums = torch.zeros(ROWS, len(WIDTHS), dtype=torch.float64)
    for rows_R, gradient_RW in steps(15):
        optimizer.catch_up(rows_R)
        optimizer.update(rows_R, gradient_RW, RATES)
        for row, gradient in zip(rows_R.tolist(), gradient_RW, strict=True):
            rate = RATES[0] if row < cut else RATES[1]
            column = 0
            for j, width in enumerate(WIDTHS):
                columns = slice(column, column + width)
                g = gradient[columns]
                sums[row, j] += (g * g).mean()
                true[row, columns] *= 1 - rate * decay
                true[row, columns] -= rate * g / (sums[row, j].sqrt() + EPS)
                column += width
    torch.testing.assert_close(values, true, rtol=0, atol=1e-13)
    torch.testing.assert_close(optimizer.state().tables["accumulator"], sums)


def test_a_row_without_a_gradient_does_not_move() -> None:
    """All zeros leave the accumulator at 0: nothing may be divided by it."""
    values = start()
    optimizer = RowAdagrad(values, 0, WIDTHS, EPS, 0.0, ProcessGroup())
    optimizer.update(torch.arange(ROWS), torch.zeros_like(values), RATES)
    assert torch.equal(values, start())


def test_resuming_from_a_state_is_bitwise_the_same() -> None:
    optimizer = RowAdagrad(start(), 2, WIDTHS, EPS, 0.1, ProcessGroup())
    for rows_R, gradient_RW in steps(5):
        optimizer.update(rows_R, gradient_RW, RATES)
    loaded = RowAdagrad(optimizer.values.clone(), 2, WIDTHS, EPS, 0.1, ProcessGroup())
    load_state(loaded, saved_state(optimizer))
    optimizer.catch_up_all()
    for rows_R, gradient_RW in steps(10)[5:]:
        optimizer.update(rows_R, gradient_RW, RATES)
        loaded.update(rows_R, gradient_RW, RATES)
    assert torch.equal(loaded.values, optimizer.values)
