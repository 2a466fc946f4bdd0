"""CatchUpAdamW touches hit rows only and still is AdamW over the whole table."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_states import load_state, saved_state, tensors
from torch import Tensor

from xgram_dist.errors import UserError
from xgram_dist.parallel.device import advise_huge_pages
from xgram_dist.tables.optimizers.adamw import AdamW
from xgram_dist.tables.optimizers.adamw_catchup import CatchUpAdamW
from xgram_dist.tables.optimizers.catchup_math import fit

BETAS, EPS = (0.9, 0.95), 1e-8


class Reference:
    """torch.optim.AdamW in fp64 on the dense table."""

    def __init__(self, values_SW: Tensor, cut: int, weight_decay: float, betas: tuple[float, float] = BETAS):
        self.values, self.cut = values_SW.double().clone(), cut
        self.parts = [self.values[:cut].requires_grad_(), self.values[cut:].requires_grad_()]
        groups = [{"params": [part]} for part in self.parts]
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=EPS, weight_decay=weight_decay)

    def update(self, rows_R: Tensor, gradient_RW: Tensor, rates: tuple[float, float]) -> None:
        dense = torch.zeros_like(self.values).index_copy(0, rows_R, gradient_RW.double())
        for part, gradient, rate, group in zip(
            self.parts, (dense[: self.cut], dense[self.cut :]), rates, self.adamw.param_groups, strict=True
        ):
            part.grad, group["lr"] = gradient, rate
        self.adamw.step()


def schedule(step: int, steps: int) -> tuple[float, float]:
    """Warm-up, then a cosine; rows below the cut learn three times as fast."""
    warm = steps // 10
    rate = step / warm if step <= warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))
    return 3e-3 * rate, 1e-3 * rate


class Run:
    """The same hits, of Zipf's distribution, for an optimizer and its reference. Scales of gradients differ from
    row to row and from column to column, from 1e-9, below eps, to 1e-2."""

    def __init__(self, dtype: torch.dtype, weight_decay: float, history: int, compiled: bool = False):
        rows, width = 300, 24
        self.random = torch.Generator().manual_seed(1)
        self.start = torch.randn(rows, width, generator=self.random).to(dtype) * 0.02
        cut = rows // 3
        self.optimizer = CatchUpAdamW(
            self.start.clone(), cut, AdamW(BETAS, EPS, weight_decay), history, compiled=compiled
        )
        self.reference = Reference(self.start, cut, weight_decay)
        self.scale_SW = 10 ** (-5.5 + 1.75 * self._uniform(rows, 1) + 1.75 * self._uniform(1, width))
        self.chance_S = 1 / torch.arange(1.0, rows + 1)[torch.randperm(rows, generator=self.random)]

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.random) * 2 - 1

    def hits(self) -> Tensor:
        return torch.multinomial(self.chance_S, 20, replacement=True, generator=self.random).unique()

    def step(self, rates: tuple[float, float], caught_up: bool = True, pending: bool = False) -> None:
        rows_R = self.hits()
        shape = rows_R.numel(), self.start.shape[1]
        gradient_RW = torch.randn(shape, generator=self.random) * self.scale_SW[rows_R]
        if pending:
            half, count = rows_R.numel() // 2, rows_R.numel()
            at_once, in_two = (self.optimizer.values.new_zeros(shape) for _ in range(2))
            self.optimizer.begin(rows_R).gather(slice(0, count), at_once)  # no update follows: nothing has happened
            rows = self.optimizer.begin(rows_R)
            rows.gather(slice(0, half), in_two)
            assert torch.equal(in_two[:half], at_once[:half])
            assert not in_two[half:].any()
            rows.gather(slice(half, count), in_two)
            assert torch.equal(in_two, at_once)
            assert torch.equal(rows.values(), at_once)
            self.optimizer.update_pending(rows, gradient_RW.to(self.start.dtype), rates, 1.0)
        else:
            if caught_up:
                self.optimizer.catch_up(rows_R)
            self.optimizer.update(rows_R, gradient_RW.to(self.start.dtype), rates)
        self.reference.update(rows_R, gradient_RW, rates)

    def error(self, rows_R: Tensor | None = None) -> float:
        """The largest error of a row, as a share of how far it has moved."""
        rows_R = torch.arange(self.start.shape[0]) if rows_R is None else rows_R
        true_RW = self.reference.values[rows_R]
        miss_R = (self.optimizer.values[rows_R] - true_RW).norm(dim=1)
        return float((miss_R / (true_RW - self.start[rows_R]).norm(dim=1).clamp(min=1e-30)).nan_to_num(0).max())


FP32, FP64 = (torch.float32, 1e-5), (torch.float64, 1e-10)


@pytest.mark.parametrize(
    ("precision", "weight_decay", "history"),
    [(FP32, 0.1, 4096), (FP32, 0.0, 4096), (FP32, 0.1, 50), (FP64, 0.1, 4096), (FP64, 0.0, 50)],
)
def test_a_thousand_steps_are_those_of_dense_adamw(
    precision: tuple[torch.dtype, float], weight_decay: float, history: int
) -> None:
    """Also where the table of missed steps starts anew many times, and where rows are not settled before an update."""
    dtype, bound = precision
    run = Run(dtype, weight_decay, history)
    for step in range(1, 1001):
        run.step(schedule(step, 1000), caught_up=step % 7 != 0, pending=step % 2 == 0)
    run.optimizer.catch_up_all()
    assert run.error() <= bound


def test_so_are_those_of_the_compiled_passes() -> None:
    run = Run(torch.float32, 0.1, 4096, compiled=True)
    for step in range(1, 1001):
        run.step(schedule(step, 1000), pending=True)
    run.optimizer.catch_up_all()
    assert run.error() <= 1e-5


def test_rows_that_are_read_have_the_dense_values_at_any_time() -> None:
    run = Run(torch.float64, 0.1, history=40)
    for step in range(1, 151):
        run.step(schedule(step, 150))
        rows_R = run.hits()
        run.optimizer.catch_up(rows_R, moments=True)
        assert run.error(rows_R) < 1e-10, f"step {step}"


@pytest.mark.parametrize("betas", [(0.0, 0.95), (0.8, 0.9), (0.9, 0.999), (0.95, 0.98)])
def test_other_betas(betas: tuple[float, float]) -> None:
    values = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    optimizer, reference = CatchUpAdamW(values.clone(), 4, AdamW(betas, EPS, 0.1)), Reference(values, 4, 0.1, betas)
    for step in range(60):
        rows_R = torch.tensor([step % 8]) if step % 3 == 0 or step < 8 else torch.tensor([0, 7])
        update_both(optimizer, reference, rows_R, step)
    optimizer.catch_up_all()
    torch.testing.assert_close(optimizer.values, reference.values.detach(), rtol=0, atol=1e-12)


def update_both(optimizer: CatchUpAdamW, reference: Reference, rows_R: Tensor, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    shape = rows_R.numel(), optimizer.values.shape[1]
    gradient_RW = torch.randn(shape, dtype=torch.float64, generator=random)
    gradient_RW *= 10 ** (-12 * torch.rand(shape, dtype=torch.float64, generator=random))
    rates = (0.01 + 0.001 * (seed % 5), 0.002 * (seed % 3))
    optimizer.update(rows_R, gradient_RW.to(optimizer.values.dtype), rates)
    reference.update(rows_R, gradient_RW, rates)


def small(cut: int = 4, weight_decay: float = 0.1, history: int = 4096) -> tuple[CatchUpAdamW, Reference]:
    values = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return CatchUpAdamW(values.clone(), cut, AdamW(BETAS, EPS, weight_decay), history), Reference(
        values, cut, weight_decay
    )


def assert_same(optimizer: CatchUpAdamW, reference: Reference, rows: list[int] | None = None) -> None:
    rows = list(range(8)) if rows is None else rows
    torch.testing.assert_close(optimizer.values[rows], reference.values[rows].detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cut", [0, 3, 8])
def test_rows_below_the_cut_have_the_first_rate(cut: int) -> None:
    optimizer, reference = small(cut)
    for step in range(20):
        update_both(optimizer, reference, torch.tensor([step % 8]), step)
    optimizer.catch_up_all()
    assert_same(optimizer, reference)


def test_settling_twice_moves_a_row_once() -> None:
    optimizer, reference = small()
    for step in range(10):
        update_both(optimizer, reference, torch.tensor([step % 8]), step)
    for rows in ([0, 1, 2, 5], [1, 2, 6], [0, 5, 6]):
        optimizer.catch_up(torch.tensor(rows))
        assert_same(optimizer, reference, rows)
    update_both(optimizer, reference, torch.tensor([0, 1, 2, 5, 6]), 11)
    optimizer.catch_up_all()
    assert_same(optimizer, reference)


def test_rows_settled_with_moments_go_on_through_a_gap() -> None:
    """Read without an update to follow, as in validation: what they missed after that must start from there."""
    optimizer, reference = small()
    update_both(optimizer, reference, torch.arange(8), 0)
    for step in range(1, 30):
        update_both(optimizer, reference, torch.tensor([0]), step)
        if step % 4 == 0:
            optimizer.catch_up(torch.tensor([0, 3, 5]))
            optimizer.catch_up(torch.tensor([3, 5, 6]), moments=True)
            assert_same(optimizer, reference, [0, 3, 5, 6])
    optimizer.catch_up_all()
    assert_same(optimizer, reference)


def test_a_step_without_hits_still_counts() -> None:
    optimizer, reference = small()
    update_both(optimizer, reference, torch.arange(8), 0)
    for step in range(1, 4):
        update_both(optimizer, reference, torch.tensor([], dtype=torch.long), step)
    optimizer.catch_up(torch.tensor([], dtype=torch.long))
    optimizer.catch_up(torch.tensor([7]))
    assert_same(optimizer, reference, [7])
    update_both(optimizer, reference, torch.tensor([7]), 4)
    optimizer.catch_up_all()
    assert_same(optimizer, reference)


def test_a_decay_that_leaves_nothing_of_a_row() -> None:
    """The product of all decays gets smaller than fp32 can hold; the table must start anew before that."""
    values = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    optimizer, reference = CatchUpAdamW(values.clone(), 4, AdamW(BETAS, EPS, 40.0)), Reference(values, 4, 40.0)
    for step in range(200):
        update_both(optimizer, reference, torch.tensor([step % 8]), step)
    optimizer.catch_up_all()
    torch.testing.assert_close(optimizer.values.double(), reference.values.detach(), rtol=1e-5, atol=1e-7)


def test_the_way_without_skipping_rows_is_the_same_bitwise() -> None:
    """Devices other than a CPU do not look which rows are stale."""
    one, other = small(history=25)[0], small(history=25)[0]
    other._skips_current_rows = False
    for optimizer in (one, other):
        reference = small()[1]
        for step in range(60):
            rows_R = torch.tensor([0, 2 + step % 3, 5 + step % 2])
            optimizer.catch_up(rows_R[:2])
            update_both(optimizer, reference, rows_R, step)
            optimizer.catch_up(torch.tensor([0, 5, 7]), moments=True)
    assert torch.equal(one.values, other.values)
    assert all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def test_resuming_from_a_state_is_bitwise_the_same() -> None:
    optimizer, reference = small()
    for step in range(30):
        update_both(optimizer, reference, torch.tensor([step % 8]), step)
    state = saved_state(optimizer)
    loaded = CatchUpAdamW(optimizer.values.clone(), 4, AdamW(BETAS, EPS, 0.1))
    load_state(loaded, state)
    for one in (optimizer, loaded):
        for step in range(30, 60):
            update_both(one, reference, torch.tensor([step % 7]), step)
        one.catch_up_all()
    assert torch.equal(loaded.values, optimizer.values)
    assert all(torch.equal(a, b) for a, b in zip(tensors(loaded), tensors(optimizer), strict=True))


def test_moments_are_up_to_date_in_a_state() -> None:
    optimizer, reference = small()
    for step in range(30):
        update_both(optimizer, reference, torch.tensor([step % 8]), step)
    optimizer.catch_up_all()
    state = optimizer.state()
    for name, key in (("first", "exp_avg"), ("second", "exp_avg_sq")):
        true = torch.cat([reference.adamw.state[part][key] for part in reference.parts])
        torch.testing.assert_close(state.columns[name], true, rtol=1e-12, atol=0)
    assert state.replicated["step"] == 30


@pytest.mark.parametrize("betas", [(0.95, 0.9), (0.99, 0.95)])
def test_betas_that_no_polynomial_fits_are_refused(betas: tuple[float, float]) -> None:
    with pytest.raises(UserError, match=r"optimizer\.betas.*memory\.optimizer=dense"):
        CatchUpAdamW(torch.zeros(4, 2), 0, AdamW(betas, EPS, 0.1))


def test_a_decay_of_all_of_a_row_in_one_step_is_refused() -> None:
    optimizer, _ = small(weight_decay=10.0)
    before = optimizer.values.clone()
    with pytest.raises(UserError, match="weight decay"):
        optimizer.update(torch.tensor([1]), torch.ones(1, 3, dtype=torch.float64), (0.01, 0.1))
    assert torch.equal(optimizer.values, before)
    assert optimizer.state().replicated["step"] == 0


def test_the_polynomial_of_the_paper_s_betas_stays_short() -> None:
    """Each degree is one more pass over the rows."""
    assert fit(BETAS, torch.float32).degree <= 12


rows_of_8 = st.sets(st.integers(0, 7)).map(lambda rows: torch.tensor(sorted(rows), dtype=torch.long))
operations = st.one_of(
    st.tuples(st.just("update"), rows_of_8),
    st.tuples(st.just("catch up and update"), rows_of_8),
    st.tuples(st.just("read"), rows_of_8),
    st.tuples(st.just("catch up all"), rows_of_8),
    st.tuples(st.just("save and load"), rows_of_8),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(operations, max_size=25), st.sampled_from([0, 4, 8]), st.sampled_from([0.0, 0.1]), st.integers(1, 30))
def test_any_sequence_of_operations_gives_the_dense_values(
    sequence: list[tuple[str, Tensor]], cut: int, weight_decay: float, history: int
) -> None:
    optimizer, reference = small(cut, weight_decay, history)
    for seed, (operation, rows_R) in enumerate(sequence):
        if operation == "update":
            update_both(optimizer, reference, rows_R, seed)
        elif operation == "catch up and update":
            optimizer.catch_up(rows_R)
            assert_same(optimizer, reference, rows_R.tolist())
            update_both(optimizer, reference, rows_R, seed)
            assert_same(optimizer, reference, rows_R.tolist())
        elif operation == "read":
            optimizer.catch_up(rows_R, moments=True)
            assert_same(optimizer, reference, rows_R.tolist())
        elif operation == "catch up all":
            optimizer.catch_up_all()
            assert_same(optimizer, reference)
        else:
            state = saved_state(optimizer)
            optimizer = CatchUpAdamW(optimizer.values, cut, AdamW(BETAS, EPS, weight_decay), history)
            load_state(optimizer, state)
    optimizer.catch_up_all()
    assert_same(optimizer, reference)


def test_tables_in_advise_huge_pages_start_at_zero_and_small_ones_are_left_alone():
    large = advise_huge_pages(torch.empty(3, 1 << 20))
    assert torch.equal(large.zero_(), torch.zeros(3, 1 << 20))
    small = torch.arange(5.0)
    assert advise_huge_pages(small) is small
    assert small.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
