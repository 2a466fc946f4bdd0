"""Planning of every method: its parameters are the real ones, its FLOPs those that torch counts."""

import json
from pathlib import Path
from types import SimpleNamespace

import method_models as methods
import pytest
import tiny_models as tiny

from xgram_dist.cli.main import main
from xgram_dist.config import load_config
from xgram_dist.estimate.comm import Axes
from xgram_dist.estimate.flop_counter import check_flops
from xgram_dist.estimate.flops import plan_budget
from xgram_dist.estimate.layout import plan_layout
from xgram_dist.estimate.shapes import parameter_shapes
from xgram_dist.estimate.step_time import Machine
from xgram_dist.estimate.traffic import zipf_traffic

RECIPES = Path(__file__).resolve().parents[3] / "recipes"


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("method", methods.MEMORY)
def test_shapes_are_those_of_the_real_model(method, tensor):
    config = methods.config(method)
    ranks = SimpleNamespace(rank=0, size=tensor, group=SimpleNamespace(group_name=""))
    made = tiny.model(config, tensor=ranks)
    shapes = parameter_shapes(config, tensor)
    assert sorted(shapes.all) == sorted(tuple(p.shape) for p in made.parameters())
    for planned, block in zip(shapes.blocks, made.blocks, strict=True):
        assert sorted(planned) == sorted(tuple(p.shape) for p in block.parameters())


@pytest.mark.parametrize("method", methods.MEMORY)
def test_every_method_has_a_layout(method):
    config = methods.config(method, train={"global_batch": 8, "micro_batch": 2})
    layout = plan_layout(config, Axes(4), Machine(), zipf_traffic(config)(4))
    assert (layout.tables is not None) == (method in methods.WITH_TABLES)
    assert layout.device_bytes > 0


# Of 10 layers of width 1536, with keys and values of 768 and a feed-forward of 4096.
ATTENTION = 2 * 1536 * 1536 + 2 * 1536 * 768 + 1536 + 768
ADDED_PARAMETERS = {
    "vanilla": 0,
    "ple-4x": 10 * (2 + 3),  # gains
    "retoken-4x": 10 * 4 * 1536,  # scales
    "mort-4x": 10 * (4 * 1536 + 4 + 1536),  # router, its bias, scales
    "engram-1x": 10 * (2 * 1536 * 3072 + (3 + 4) * 1536),  # two projections, three norms, four taps
    "stem": 0,
    "mole": 10 * (2 * 3 * 1536 * 1536 + 2 * 1536 + 1536),  # experts, router, norm
    "scone": 2 * (ATTENTION + 3 * 1536 * 4096 + 2 * 1536),  # two blocks
}


@pytest.mark.parametrize("name", ADDED_PARAMETERS)
def test_parameters_beside_the_tables_are_those_counted_by_hand(name):
    budget = plan_budget(load_config(RECIPES / "0.73b" / f"{name}.yaml"))
    assert budget.extractor_parameters == ADDED_PARAMETERS[name]
    replaced = 3 * 1536 * 4096 if name == "stem" else 0
    assert budget.backbone_parameters == 726_325_248 - replaced


NAMES = [
    "vanilla",
    "xgram-1x-50",
    "xgram-1x-100",
    "xgram-2x-50",
    "xgram-4x-100",
    "ple-4x",
    "retoken-4x",
    "mort-4x",
    "engram-1x",
    "stem",
    "mole",
    "scone",
]


@pytest.mark.parametrize("name", NAMES)
def test_added_flops_are_within_five_percent_of_what_torch_counts(name):
    flops = check_flops(load_config(RECIPES / "0.73b" / f"{name}.yaml"))
    assert flops.counted == pytest.approx(flops.formula, rel=0.05)
    assert (flops.formula == 0) == (name == "vanilla")
    assert (flops.formula < 0) == (name == "stem")


def test_the_table_has_a_line_for_each_named_recipe(capsys):
    files = [str(RECIPES / "0.73b" / f"{name}.yaml") for name in ("base", "vanilla", "retoken-2x", "xgram-1x-50")]
    assert main(["plan", "--table", *files, "model.sequence_length=4096", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found] == ["0.73b-vanilla", "0.73b-retoken-2x", "0.73b-xgram-1x-50"]
    assert found[1]["table_parameters"] == 2 * 10 * 151_936 * 1536
    assert main(["plan", "--table", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("0.73b-retoken-2x" in line and "4.667 B" in line for line in lines)


@pytest.mark.parametrize("method", ["engram", "mole", "retoken"])
def test_the_command_plans_a_method(method, capsys):
    assert main(["plan", str(RECIPES / "tiny" / f"{method}.yaml"), "--ranks", "2"]) == 0
    assert "relative FLOPs" in capsys.readouterr().out
