"""DenseAdamW is torch.optim.AdamW; LazyAdamW is its textbook form on hit rows alone."""

import pytest
import torch
from optimizer_states import load_state, saved_state
from torch import Tensor

from xgram_dist.tables.optimizers.adamw import AdamW, DenseAdamW, GatheredAdamW, LazyAdamW
from xgram_dist.tables.optimizers.adamw_catchup import CatchUpAdamW
from xgram_dist.tables.optimizers.base import RowOptimizer

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1
ROWS, WIDTH = 7, 3
RATES = (0.03, 0.01)
ADAMW = AdamW(BETAS, EPS, DECAY)


def steps(count: int) -> list[tuple[Tensor, Tensor]]:
    """Rows and gradients: from one row to all of them, and once none."""
    random = torch.Generator().manual_seed(2)
    hits = [torch.randperm(ROWS, generator=random)[: step % (ROWS + 1)].sort().values for step in range(1, count + 1)]
    return [(rows, torch.randn(rows.numel(), WIDTH, dtype=torch.float64, generator=random)) for rows in hits]


def start() -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("cut", [0, 3, ROWS])
def test_dense_is_adamw_of_torch(cut: int) -> None:
    values = start()
    optimizer = DenseAdamW(values, cut, ADAMW)
    true = start()
    parts = [true[:cut].requires_grad_(), true[cut:].requires_grad_()]
    groups = [{"params": [part], "lr": rate} for part, rate in zip(parts, RATES, strict=True)]
    adamw = torch.optim.AdamW(groups, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for rows_R, gradient_RW in steps(20):
        optimizer.update(rows_R, gradient_RW, RATES)
        dense = torch.zeros_like(values).index_copy(0, rows_R, gradient_RW)
        parts[0].grad, parts[1].grad = dense[:cut], dense[cut:]
        adamw.step()
    torch.testing.assert_close(values, true.detach(), rtol=0, atol=1e-14)


def lazy_by_hand(values: Tensor, cut: int, count: int) -> Tensor:
    first, second = torch.zeros_like(values), torch.zeros_like(values)
    for step, (rows_R, gradient_RW) in enumerate(steps(count), start=1):
        for row, g in zip(rows_R.tolist(), gradient_RW, strict=True):
            rate = RATES[0] if row < cut else RATES[1]
            first[row] = BETAS[0] * first[row] + (1 - BETAS[0]) * g
            second[row] = BETAS[1] * second[row] + (1 - BETAS[1]) * g * g
            m, v = first[row] / (1 - BETAS[0] ** step), second[row] / (1 - BETAS[1] ** step)
            values[row] = values[row] * (1 - rate * DECAY) - rate * m / (v.sqrt() + EPS)
    return values


@pytest.mark.parametrize("cut", [0, 3, ROWS])
def test_lazy_moves_hit_rows_alone(cut: int) -> None:
    values = start()
    optimizer = LazyAdamW(values, cut, ADAMW)
    for rows_R, gradient_RW in steps(20):
        optimizer.catch_up(rows_R)
        others = torch.ones(ROWS, dtype=torch.bool).index_fill(0, rows_R, False)
        before = values[others].clone()
        optimizer.update(rows_R, gradient_RW, RATES)
        assert torch.equal(values[others], before)
    torch.testing.assert_close(values, lazy_by_hand(start(), cut, 20), rtol=0, atol=1e-14)


def test_blocks_of_rows_are_all_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a step go through buffers of a few rows; the last block is not full."""
    monkeypatch.setattr("xgram_dist.tables.optimizers.base.BLOCK_BYTES", 2 * WIDTH * 8)
    values = start()
    optimizer = LazyAdamW(values, 3, ADAMW)
    for rows_R, gradient_RW in steps(20):
        optimizer.update(rows_R, gradient_RW, RATES)
    torch.testing.assert_close(values, lazy_by_hand(start(), 3, 20), rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", [DenseAdamW, LazyAdamW])
def test_resuming_from_a_state_is_bitwise_the_same(kind: type[DenseAdamW] | type[LazyAdamW]) -> None:
    optimizer = kind(start(), 3, ADAMW)
    for rows_R, gradient_RW in steps(10):
        optimizer.update(rows_R, gradient_RW, RATES)
    loaded = kind(optimizer.values.clone(), 3, ADAMW)
    load_state(loaded, saved_state(optimizer))
    for rows_R, gradient_RW in steps(20)[10:]:
        optimizer.update(rows_R, gradient_RW, RATES)
        loaded.update(rows_R, gradient_RW, RATES)
    assert torch.equal(loaded.values, optimizer.values)


@pytest.mark.parametrize("first_kind", [DenseAdamW, CatchUpAdamW])
@pytest.mark.parametrize("then_kind", [DenseAdamW, CatchUpAdamW])
def test_dense_and_catch_up_resume_from_each_other(
    first_kind: type[DenseAdamW] | type[CatchUpAdamW], then_kind: type[DenseAdamW] | type[CatchUpAdamW]
) -> None:
    whole = DenseAdamW(start(), 3, ADAMW)
    first = first_kind(start(), 3, ADAMW)
    for rows_R, gradient_RW in steps(10):
        whole.update(rows_R, gradient_RW, RATES)
        first.update(rows_R, gradient_RW, RATES)
    state = saved_state(first, caught_up=True)
    then = then_kind(first.values, 3, ADAMW)
    load_state(then, state)
    for rows_R, gradient_RW in steps(20)[10:]:
        whole.update(rows_R, gradient_RW, RATES)
        then.update(rows_R, gradient_RW, RATES)
    then.catch_up_all()
    torch.testing.assert_close(then.values, whole.values, rtol=0, atol=1e-12)


def test_all_are_row_optimizers() -> None:
    """The type checker's word that they follow the protocol."""
    optimizers: list[RowOptimizer] = [kind(start(), 3, ADAMW) for kind in (DenseAdamW, CatchUpAdamW, LazyAdamW)]
    assert [isinstance(optimizer, GatheredAdamW) for optimizer in optimizers] == [False, True, True]
