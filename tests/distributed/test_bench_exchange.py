"""If these fail, the exchange benchmark measures something else than training of the tables."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from xgram_dist.bench.common import run_on_ranks
from xgram_dist.bench.exchange import WARM, draw_tokens, run_optimizers, step_times, workload
from xgram_dist.model.methods.base import table_layout
from xgram_dist.optim.schedule import learning_rate, warmup_factor
from xgram_dist.tables.initial_rows import initial_rows

ROWS, WIDTH, STEPS = 300, 4, WARM + 4


def dense_losses(tokens):
    """Of the first rank: all tables side by side, whole, under torch.optim.AdamW."""
    config = workload(ROWS, WIDTH)
    (slab,) = table_layout(config).slabs
    std, seed = config.model.init_std, config.train.seed
    made = [initial_rows(torch.arange(ROWS), WIDTH, std, seed, table.name) for table in slab.tables]
    rows = torch.cat(made, dim=1).double().requires_grad_()
    settings = config.optimizer
    adamw = torch.optim.AdamW([rows], betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
    losses = []
    for step, of_ranks in enumerate(torch.from_numpy(tokens), 1):
        of_rank = [0.5 * F.embedding(one, rows).square().mean() for one in of_ranks]
        losses.append(of_rank[0].item())
        adamw.zero_grad()
        torch.stack(of_rank).mean().backward()
        multiplier = math.sqrt(ROWS / WIDTH) * warmup_factor(config, step)
        adamw.param_groups[0]["lr"] = learning_rate(config, step) * multiplier
        adamw.step()
    return losses


@pytest.mark.parametrize("optimizer", ["catch_up", "dense"])
def test_its_steps_are_those_of_adamw_on_whole_tables(tmp_path, optimizer):
    tokens = draw_tokens(STEPS, 2, ROWS)[:, :, :200]
    np.savez(tmp_path / "tokens.npz", tokens=tokens)
    first, _ = run_on_ranks(step_times, 2, str(tmp_path / "tokens.npz"), ROWS, WIDTH, optimizer)
    np.testing.assert_allclose(first["losses"], dense_losses(tokens), rtol=2e-5)
    assert len(first["ms"]) == STEPS - WARM
    assert first["exchanged"]["bytes_sent"] >= first["exchanged"]["bytes_bound"] > 0


def test_spread_tokens_are_other_rows_of_the_same_owners():
    near, far = draw_tokens(3, 2, 500), draw_tokens(3, 2, 500, spread=16)
    assert far.max() < 16 * 500
    assert len(np.unique(far)) == len(np.unique(near))
    assert np.array_equal(far % 2, near % 2)


def test_both_forms_of_exact_adamw_are_timed_for_every_share():
    found = run_optimizers((0.1, 1.0), width=8, rows=50)["catch_up_over_dense_by_share"]
    assert set(found) == {"0.1", "1.0"}
    assert all(ratio > 0 for ratio in found.values())
