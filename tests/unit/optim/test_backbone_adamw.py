"""If these fail, parameters of the backbone learn at another rate, or decay, where they should not."""

import math

import method_models as methods
import pytest
import tiny_models as tiny

from xgram_dist.optim.backbone_adamw import build_adamw, set_learning_rate


def rates_and_decays(method: str, scales: str = "backbone") -> dict[str, tuple[float, float]]:
    rule = {"memory": {"learning_rate": {"scales": scales}}}
    settings = methods.config(method, **rule)
    made = tiny.model(settings)
    adamw = build_adamw(settings, made.named_parameters())
    set_learning_rate(adamw, 1e-3)
    of = {id(p): (group["lr"], group["weight_decay"]) for group in adamw.param_groups for p in group["params"]}
    return {name: of[id(parameter)] for name, parameter in made.named_parameters()}


@pytest.mark.parametrize("method", ["retoken", "mort"])
def test_what_lets_the_tables_in_may_learn_at_their_rate(method):
    settings = methods.config(method)
    tables = 1e-3 * math.sqrt(settings.model.vocabulary / settings.model.width)
    found = rates_and_decays(method, "tables")
    opening = {name for name in found if ".scale" in name}
    assert opening
    assert all(found[name] == (pytest.approx(tables), 0.0) for name in opening)
    assert all(rate == 1e-3 for name, (rate, _) in found.items() if name not in opening)


@pytest.mark.parametrize("method", ["retoken", "mort", "engram", "mole", "scone", "stem"])
def test_otherwise_all_parameters_learn_at_one_rate_and_only_matrices_decay(method):
    made = dict(tiny.model(methods.config(method)).named_parameters())
    for name, (rate, decay) in rates_and_decays(method).items():
        assert rate == 1e-3
        assert (decay > 0) == (made[name].dim() >= 2), name
