"""Learning rate and warm-up against the paper's rules, by hand."""

import math
from pathlib import Path

import pytest
import tiny_models as tiny
import torch

from xgram_dist.optim.schedule import learning_rate, table_multipliers, warmup_factor, warmup_steps


def run(steps=200, **optimizer):
    return tiny.config(train={**tiny.BASE["train"], "steps": steps}, optimizer={"learning_rate": 1e-3, **optimizer})


def test_warm_up_is_linear_to_the_peak_over_five_percent_of_the_steps():
    settings = run()
    assert warmup_steps(settings) == 10
    assert [learning_rate(settings, u) for u in (1, 5, 10)] == pytest.approx([1e-4, 5e-4, 1e-3])
    assert [warmup_factor(settings, u) for u in (1, 5, 10, 11, 200)] == pytest.approx([0.1, 0.5, 1, 1, 1])


def test_cosine_ends_at_a_tenth_of_the_peak_and_is_half_way_in_the_middle():
    settings = run()
    assert learning_rate(settings, 105) == pytest.approx(0.55e-3)
    assert learning_rate(settings, 200) == pytest.approx(1e-4)
    quarter = 1e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert learning_rate(settings, 10 + 47) == pytest.approx(quarter, rel=0.01)


def test_no_warm_up_starts_at_the_peak():
    settings = run(warmup_share=0.0)
    assert warmup_factor(settings, 1) == 1.0
    assert learning_rate(settings, 1) == pytest.approx(1e-3, rel=1e-3)


def test_multiplier_of_the_small_model_is_the_authors():
    from xgram_dist.config import load_config

    recipe = Path(__file__).resolve().parents[3] / "recipes" / "0.73b" / "xgram-1x-50.yaml"
    assert table_multipliers(load_config(recipe), 75968) == pytest.approx((9.945, 9.945), rel=1e-3)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"multiplier": "sqrt_rows"}, (math.sqrt(60 / 16),) * 2),
        ({"multiplier": 3.0}, (3.0, 3.0)),
        ({"multiplier": 3.0, "vip_multiplier": 1.5}, (1.5, 3.0)),
    ],
)
def test_multipliers_of_vip_and_body_rows(rule, expected):
    settings = tiny.config(memory={"learning_rate": rule})
    assert table_multipliers(settings, 60) == pytest.approx(expected)


def rates_of_torch(steps, *schedulers):
    """What torch's schedulers, one after the other, give for steps 1, 2, ..."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1e-3)
    made = [make(optimizer) for make, _ in schedulers]
    ends = [end for _, end in schedulers][:-1]
    chain = torch.optim.lr_scheduler.SequentialLR(optimizer, made, ends)
    rates = []
    for _ in range(steps):
        optimizer.step()
        chain.step()
        rates.append(chain.get_last_lr()[0])
    return rates


def test_linear_wsd_and_constant_are_torchs_schedulers():
    lr = torch.optim.lr_scheduler
    warmup = (lambda o: lr.LinearLR(o, 1e-12, 1.0, 10), 10)
    constant = (lambda o: lr.ConstantLR(o, 1.0), None)
    falling = (lambda o: lr.LinearLR(o, 1.0, 0.1, 190), None)
    for schedule, *rest in (("linear", falling), ("constant", constant)):
        settings = run(schedule=schedule)
        expected = rates_of_torch(200, warmup, *rest)
        assert [learning_rate(settings, u) for u in range(1, 201)] == pytest.approx(expected, rel=1e-6, abs=1e-12)
    settings = run(schedule="wsd", decay_share=0.3)
    plateau, decay = (lambda o: lr.ConstantLR(o, 1.0), 140), (lambda o: lr.LinearLR(o, 1.0, 0.1, 60), None)
    expected = rates_of_torch(200, warmup, plateau, decay)
    assert [learning_rate(settings, u) for u in range(1, 201)] == pytest.approx(expected, rel=1e-6, abs=1e-12)
