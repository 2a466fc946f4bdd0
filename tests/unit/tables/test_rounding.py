"""Numbers in bf16 are rounded without bias, by bits that depend on seed, step, row and column alone."""

import math

import numpy as np
import pytest
import torch

from xgram_dist.tables.optimizers.adamw import AdamW, LazyAdamW
from xgram_dist.tables.optimizers.adamw_catchup import CatchUpAdamW
from xgram_dist.tables.optimizers.base import OwnMemory
from xgram_dist.tables.optimizers.rounding import FIRST, VALUES, column_keys, element_noise, round_to_bf16, row_keys

CPU = torch.device("cpu")
BF16, FP32 = torch.bfloat16, torch.float32


def neighbours(numbers):
    """The bf16 numbers below and above in magnitude, by cutting mantissas in numpy."""
    bits = numbers.numpy().view(np.uint32)
    low = bits & np.uint32(0xFFFF0000)
    return low.view(np.float32), (low + np.uint32(0x10000)).view(np.float32)


def test_rounding_is_to_a_neighbour_and_without_bias():
    numbers = torch.randn(40, 50, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(-25, 25)
    keys, columns = row_keys(torch.arange(40)), column_keys(0, ["t"], [50], 0, CPU)
    low, high = (torch.from_numpy(one) for one in neighbours(numbers))
    ups, draws = torch.zeros(40, 50), 4000
    for step in range(draws):
        found = round_to_bf16(numbers, element_noise(keys, step, VALUES), columns).float()
        assert bool(((found == low) | (found == high)).all())
        ups += found == high
    chance = ((numbers.double() - low) / (high.double() - low)).float()
    deviation = (ups / draws - chance) / (chance * (1 - chance) / draws + 1e-9).sqrt()
    assert float(deviation.abs().max()) < 5.5
    assert abs(float(deviation.mean())) < 5 / math.sqrt(deviation.numel())
    assert float(deviation.std()) == pytest.approx(1, abs=0.1)


def test_what_bf16_can_hold_never_changes():
    numbers = torch.randn(200, 30).to(BF16).float()
    numbers[0, :4] = torch.tensor([0.0, -0.0, float("inf"), -float("inf")])
    for step in range(20):
        noise = element_noise(row_keys(torch.arange(200)), step, FIRST)
        assert torch.equal(round_to_bf16(numbers, noise, column_keys(0, ["t"], [30], 0, CPU)).float(), numbers)


def test_bits_of_rows_columns_steps_and_kinds_are_not_related():
    keys, columns = row_keys(torch.arange(300)), column_keys(0, ["a", "b"], [30, 30], 0, CPU)
    half = torch.full((300, 60), 1 + 2.0**-8)  # half way between two numbers of bf16
    is_up = [round_to_bf16(half, element_noise(keys, step, kind), columns) > 1 for step in range(4) for kind in (0, 1)]
    is_up = torch.stack(is_up).double() * 2 - 1
    for shifted in (is_up.roll(1, dim) for dim in range(3)):
        assert abs(float((is_up * shifted).mean())) < 5 / math.sqrt(is_up.numel())
    assert abs(float((is_up[..., :30] * is_up[..., 30:]).mean())) < 5 / math.sqrt(is_up.numel() / 2)
    assert not torch.equal(columns, column_keys(1, ["a", "b"], [30, 30], 0, CPU))


def test_a_compiled_pass_rounds_to_the_same_bits():
    numbers, noise = torch.randn(77, 48), element_noise(row_keys(torch.arange(77)), 3, VALUES)
    columns = column_keys(0, ["t"], [48], 0, CPU)
    assert torch.equal(
        torch.compile(round_to_bf16, fullgraph=True)(numbers, noise, columns), round_to_bf16(numbers, noise, columns)
    )


def build(kind, values, ids, columns, rows=BF16, moments=BF16, **options):
    stored = values.to(rows, copy=True)
    optimizer = kind(
        stored,
        0,
        AdamW((0.9, 0.95), 1e-8, 0.1),
        memory=OwnMemory(stored, moments),
        column_keys_W=columns,
        **options,
    )
    optimizer.name_rows(torch.arange(len(ids)), ids)
    return optimizer


def train(optimizer, ids, columns, steps, rate=1e-3):
    """The same gradients of the same global rows and columns, whatever the optimizer holds of them."""
    random = torch.Generator().manual_seed(5)
    for _ in range(steps):
        hit, gradient = torch.rand(64, generator=random) < 0.3, torch.randn(64, 32, generator=random)
        rows = hit[ids].nonzero().flatten()
        if len(rows):
            pending = optimizer.begin(rows)
            out = torch.empty(len(rows), gradient[:, columns].shape[1])
            pending.gather(slice(None), out)
            optimizer.update_pending(pending, gradient[ids[rows]][:, columns].contiguous(), (rate, rate), 1.0)
        else:
            optimizer.update(rows, gradient[:0, columns].contiguous(), (rate, rate))
    optimizer.catch_up_all()
    return optimizer


@pytest.mark.parametrize("kind", [CatchUpAdamW, LazyAdamW])
def test_parts_of_a_table_are_rounded_as_the_whole(kind):
    values, ids = torch.randn(64, 32, generator=torch.Generator().manual_seed(2)) * 0.02, torch.arange(64)
    every = slice(0, 32)
    whole = train(build(kind, values, ids, column_keys(7, ["t"], [32], 0, CPU)), ids, every, 12)
    for first in (0, 1):  # rows of two data ranks
        mine = ids[first::2]
        part = train(build(kind, values[mine], mine, column_keys(7, ["t"], [32], 0, CPU)), mine, every, 12)
        assert torch.equal(part.values, whole.values[mine])
        assert torch.equal(part.moments.second, whole.moments.second[mine])
    for rank in (0, 1):  # columns of two tensor ranks
        columns = slice(16 * rank, 16 * rank + 16)
        keys = column_keys(7, ["t"], [16], rank, CPU)
        part = train(build(kind, values[:, columns].contiguous(), ids, keys), ids, columns, 12)
        assert torch.equal(part.values, whole.values[:, columns])


@pytest.mark.parametrize("options", [{}, {"compiled": True}])
@pytest.mark.parametrize(("rows", "moments"), [(BF16, FP32), (FP32, BF16), (BF16, BF16)])
def test_rounded_runs_scatter_around_fp32(rows, moments, options):
    """Updates of a hundredth of what bf16 resolves are not lost: over 300 steps rows move as in fp32, on average."""
    values, ids = torch.full((64, 32), 1.0), torch.arange(64)
    exact = train(build(CatchUpAdamW, values, ids, None, FP32, FP32), ids, slice(0, 32), 300, 5e-5).values
    mean, seeds = torch.zeros(64, 32), 6
    for seed in range(seeds):
        keys = column_keys(seed, ["t"], [32], 0, CPU)
        optimizer = build(CatchUpAdamW, values, ids, keys, rows, moments, **options)
        found = train(optimizer, ids, slice(0, 32), 300, 5e-5)
        assert (found.values.dtype, found.moments.first.dtype) == (rows, moments)
        mean += found.values.float() / seeds
    movement = float((exact - values).pow(2).mean().sqrt())
    error = mean - exact
    assert abs(float(error.mean())) < 0.05 * movement
    assert float(error.std()) < (0.05 * movement if rows == FP32 else 2.0**-8)
