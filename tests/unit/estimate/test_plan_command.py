"""The paper's sizes come out of its recipes, and planning stays light."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from config_helpers import RECIPES, small_tree

from xgram_dist.config import build_config, load_config
from xgram_dist.estimate.comm import Axes
from xgram_dist.estimate.flops import plan_budget
from xgram_dist.estimate.layout import plan_layout
from xgram_dist.estimate.step_time import Machine
from xgram_dist.estimate.traffic import zipf_traffic
from xgram_dist.model.methods.base import load_recipe, method_of
from xgram_dist.optim.schedule import warmup_steps
from xgram_dist.tables.optimizers.build import table_multipliers

VOCABULARY = 151_936
# Layers, width, key/value width, FFN width.
SIZES = {"0.73b": (10, 1536, 768, 4096), "1.15b": (12, 2048, 1024, 5120)}
# What the paper prints, in billions, at (100 %, 50 %).
PRINTED = {
    "0.73b": {"1x": (2.334, 1.167), "2x": (4.667, 2.334), "4x": (9.335, 4.667)},
    "1.15b": {"1x": (3.734, 1.867), "2x": (7.468, 3.734), "4x": (14.936, 7.468)},
}
# Views of the value site and of the residual site; kernels of each view.
VIEWS = {"1x": (2, 0), "2x": (2, 1), "4x": (2, 3)}
KERNELS = {"v": (3, 5), "h": (3, 5, 7)}

PAPER = [(size, "vanilla", None) for size in SIZES] + [
    (size, scale, share) for size in SIZES for scale in VIEWS for share in (100, 50)
]


def of_size(size: str) -> list[Path]:
    longer = ("32k", "128k")
    found = [path for path in sorted((RECIPES / size).glob("*.yaml")) if not path.stem.endswith(("base", *longer))]
    # Vanilla and X-gram; Retoken, MoRT, Engram, PLE; the first two at the tables' learning rate; STEM, MoLE, SCONE.
    assert len(found) == 7 + 3 * 4 + 3 * 2 + 3
    return found


@pytest.mark.parametrize(("size", "parameters"), [("0.73b", 726_325_248), ("1.15b", 1_150_900_224)])
def test_the_backbones_have_the_papers_size(size: str, parameters: int) -> None:
    layers, width, kv, ffn = SIZES[size]
    block = (
        width * width + 2 * width * kv + width * width  # q, k and v, o
        + 3 * width * ffn  # gate, up, down
        + 2 * width + width + kv  # norms: before attention, before the FFN, of q, of k
    )  # fmt: skip
    assert 2 * VOCABULARY * width + layers * block + width == parameters
    for path in of_size(size):
        replaced = len(range(1, layers, 3)) * width * ffn if path.stem == "stem" else 0
        assert plan_budget(load_config(path)).backbone_parameters == parameters - replaced


@pytest.mark.parametrize(("size", "scale", "share"), PAPER, ids=lambda value: str(value))
def test_a_paper_recipe_has_the_papers_tables(size: str, scale: str, share: int | None) -> None:
    budget = plan_budget(
        load_config(RECIPES / size / ("vanilla.yaml" if share is None else f"xgram-{scale}-{share}.yaml"))
    )
    layers, width, kv, _ = SIZES[size]
    if share is None:
        assert (budget.table_parameters, budget.gate_parameters, budget.tables, budget.rows_per_table) == (0, 0, 0, 0)
        assert (budget.extractor_parameters, budget.extra_flops_per_token, budget.relative_flops) == (0, 0, 1.0)
        return
    value_views, residual_views = VIEWS[scale]
    rows = VOCABULARY * share // 100
    tables = layers * (value_views + residual_views)
    width_per_token = layers * (value_views * kv + residual_views * width)
    assert budget.rows_per_table == rows
    assert budget.tables == tables
    assert budget.activation_width == width_per_token
    assert budget.table_parameters == rows * width_per_token
    assert budget.gate_parameters == (rows * tables if share < 100 else 0)
    printed = PRINTED[size][scale][0 if share == 100 else 1] * 1e9
    assert budget.table_parameters == pytest.approx(printed, rel=1e-3)
    # Content kernel, gate kernel and gate bias of each view, and its gain.
    views = [(kv, k) for k in KERNELS["v"][:value_views]] + [(width, k) for k in KERNELS["h"][:residual_views]]
    assert budget.extractor_parameters == layers * sum(w * (2 * k + 1) + 1 for w, k in views)
    retrieved = 4 if share < 100 else 1
    assert budget.extra_flops_per_token == 2 * layers * sum((retrieved + 2 * k + 1) * w for w, k in views)
    assert 1.0 < budget.relative_flops < 1.02


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", VIEWS)
@pytest.mark.parametrize("method", ["retoken", "mort", "engram", "ple"])
def test_a_baseline_has_the_papers_table_parameters(size: str, scale: str, method: str) -> None:
    budget = plan_budget(load_config(RECIPES / size / f"{method}-{scale}.yaml"))
    assert budget.table_parameters == pytest.approx(PRINTED[size][scale][0] * 1e9, rel=5e-3)
    layers, width, _, _ = SIZES[size]
    if method == "engram":
        assert budget.activation_width == layers * 2 * width
        # Two matrices a layer, three norms, four taps.
        assert budget.extractor_parameters == layers * (2 * 2 * width * width + 3 * width + 4 * width)
    else:
        assert budget.activation_width == layers * width * int(scale[0])
        assert 1.0 < budget.relative_flops < 1.02


@pytest.mark.parametrize("size", SIZES)
def test_stem_saves_its_up_projections_and_the_side_networks_become_tables(size: str) -> None:
    layers, width, _, ffn = SIZES[size]
    stem, mole, scone = (
        plan_budget(load_config(RECIPES / size / f"{name}.yaml")) for name in ("stem", "mole", "scone")
    )
    replaced = len(range(1, layers, 3))
    assert stem.table_parameters == replaced * VOCABULARY * ffn
    assert stem.extra_flops_per_token == -2 * replaced * width * ffn
    assert mole.table_parameters == scone.table_parameters == 0
    assert mole.activation_width == layers * 2 * width
    assert mole.extractor_parameters == layers * (2 * 3 * width * width + 2 * width + width)


ABLATIONS = {
    "overall/full": 4.667,
    "overall/no-extraction": 4.667,
    "hashing/vip-only": 2.334,
    "hashing/hybrid-1x": 1.167,
    "hashing/no-row-gates": 1.167,
    "hashing/no-copies": 1.167,
    "hashing/hybrid-2x": 2.334,
    "shortconv/shared-3": 2.334,
    "shortconv/kernels-3-5-7-9": 2.334,
    "layers/2v-0": 0.2334,
    "layers/2h-9": 0.4667,
    "sites/h": 2.334,
    "sites/qk": 2.334,
    "mixes/3h2v": 9.335,
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_has_its_table_parameters(name: str) -> None:
    budget = plan_budget(load_config(RECIPES / "ablations" / f"{name}.yaml"))
    assert budget.table_parameters == pytest.approx(ABLATIONS[name] * 1e9, rel=1e-3)


def test_the_ablations_are_those_of_the_paper() -> None:
    count = {
        folder.name: len([path for path in folder.glob("*.yaml") if path.stem != "base"])
        for folder in (RECIPES / "ablations").iterdir()
        if folder.is_dir()
    }
    assert count == {"overall": 7, "hashing": 5, "shortconv": 6, "sites": 7, "layers": 20, "mixes": 13}
    load = {path.stem: load_config(path) for path in (RECIPES / "ablations").rglob("*.yaml") if path.stem != "base"}
    assert not load["no-copies"].memory.routing.copies
    assert not load["no-row-gates"].memory.row_gates
    assert load["no-lr-scaling"].memory.learning_rate.multiplier == 1.0
    assert not load["no-depth-scaling-and-warmup"].memory.injection.warmup
    assert load["shared-3"].memory.extraction.shared
    assert load["2h-4"].memory.sites["h"].layers == (4,)


def test_one_times_at_fifty_percent_to_the_last_parameter() -> None:
    budget = plan_budget(load_config(RECIPES / "0.73b" / "xgram-1x-50.yaml"))
    assert budget.table_parameters == 1_166_868_480
    assert budget.gate_parameters == 1_519_360
    assert budget.tokens_per_step == 8_388_608
    assert budget.training_tokens == pytest.approx(41e9, rel=0.01)


@pytest.mark.parametrize("folder", [*SIZES, "extend"])
def test_recipes_of_longer_sequences_fit_a_gpu_and_keep_the_tokens_of_a_step(folder: str) -> None:
    paths = sorted((RECIPES / folder).glob("*k.yaml"))
    assert len(paths) == (4 if folder == "extend" else 2)
    for path in paths:
        config = load_recipe(path)
        length, degree = (32_768, 2) if path.stem.endswith("-32k") else (131_072, 4)
        assert (config.model.sequence_length, config.parallel.context) == (length, degree)
        assert plan_budget(config).tokens_per_step == 8_388_608
        for stage in config.data.stages:
            assert stage.from_tokens % plan_budget(config).tokens_per_step == 0
        axes = Axes.of(config, 16)
        assert plan_layout(config, axes, Machine(), zipf_traffic(config)(16)).device_bytes < 40e9


@pytest.mark.parametrize("size", SIZES)
def test_the_paper_recipes_train_as_the_paper_did(size: str) -> None:
    for path in of_size(size):
        config = load_config(path)
        assert config.optimizer.learning_rate == {"0.73b": 1e-3, "1.15b": 7e-4}[size]
        assert config.optimizer.betas == (0.9, 0.95)
        assert (config.optimizer.eps, config.optimizer.weight_decay, config.optimizer.clip_norm) == (1e-8, 0.1, 1.0)
        assert config.optimizer.final_share == 0.1
        assert (config.train.steps, warmup_steps(config)) == (4936, 247)
        assert config.model.init_std == {"0.73b": 0.016, "1.15b": 0.014}[size]
        assert config.optimizer.decay_vectors
        multiplier = table_multipliers(config, config.model.vocabulary)[1]
        if config.memory.method in ("xgram", "engram") or config.name.endswith("-matched"):
            assert multiplier == pytest.approx({"0.73b": 9.946, "1.15b": 8.613}[size], abs=1e-3)
        elif config.memory.method in ("retoken", "mort"):
            assert multiplier == 1
        if method_of(config).trains_tables:
            assert not config.memory.learning_rate.warmup
        assert (config.train.global_batch, config.train.micro_batch, config.model.sequence_length) == (1024, 8, 8192)
        assert (config.train.precision, config.model.z_loss, config.model.rope_theta) == ("bf16", 1e-5, 500_000)
        routing = config.memory.routing
        assert (routing.vip, routing.buckets, routing.paths, routing.copies) == (200, 32, 2, 3)
        assert (routing.alpha, routing.decay, config.memory.row_gate_init) == (0.5, 0.8, 4.0)


@pytest.mark.parametrize(
    ("extraction", "per_layer"),
    [
        ({}, 32 * (2 * 3 + 1) + 32 * (2 * 5 + 1) + 2),
        ({"gate": False}, 32 * 3 + 32 * 5 + 2),
        ({"enabled": False}, 2),
    ],
)
def test_switches_of_the_extraction_change_its_parameters(extraction: dict[str, bool], per_layer: int) -> None:
    tree = small_tree()
    tree["memory"]["extraction"] = extraction
    assert plan_budget(build_config(tree)).extractor_parameters == 4 * per_layer


def test_shared_extraction_counts_one_convolution_a_site() -> None:
    tree = small_tree()
    tree["memory"]["extraction"] = {"shared": True}
    tree["memory"]["sites"]["v"] = {"views": 3, "kernels": [3], "layers": [1, 2]}
    assert plan_budget(build_config(tree)).extractor_parameters == 2 * (32 * 7 + 3)


def test_row_gates_off_have_no_parameters() -> None:
    tree = small_tree()
    tree["memory"]["row_gates"] = False
    assert plan_budget(build_config(tree)).gate_parameters == 0
    tree["memory"]["row_gates"] = True
    assert plan_budget(build_config(tree)).gate_parameters == 500 * 8


def test_planning_imports_nothing_heavy() -> None:
    script = """
import json, sys
from xgram_dist.cli.main import main
code = main(["plan", sys.argv[1], "--json"])
print(json.dumps([code, sorted(sys.modules)]))
"""
    recipe = RECIPES / "1.15b" / "xgram-4x-50.yaml"
    done = subprocess.run(
        [sys.executable, "-c", script, str(recipe)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    )
    code, modules = json.loads(done.stdout.splitlines()[-1])
    assert code == 0
    assert {"xgram_dist.estimate.flops", "pydantic"} <= set(modules)  # the command did run in that process
    heavy = {
        "deepspeed",
        "streaming",
        "tokenizers",
        "sentencepiece",
        "pyarrow",
        "matplotlib",
        "tensorboard",
        "safetensors",
    }
    assert heavy & set(modules) == set()


def test_replicas_of_the_tables_are_compared_and_the_fastest_that_fits_is_picked(capsys):
    from xgram_dist.cli.main import main

    arguments = ["plan", str(RECIPES / "0.73b" / "xgram-4x-50.yaml"), "--shards", "--json"]
    assert main([*arguments, "--memory-per-rank", "35GB"]) == 0
    limited = json.loads(capsys.readouterr().out)
    by_ranks = {}
    for one in limited:
        assert one["shard"] * one["replicas"] == one["ranks"]
        assert one["fits"] == (one["device_bytes"] <= 35e9)
        by_ranks.setdefault(one["ranks"], []).append(one)
    assert set(by_ranks) >= {16, 32, 64, 128}
    for choices in by_ranks.values():
        picked = [one for one in choices if one["picked"]]
        fitting = [one for one in choices if one["fits"]]
        assert len(picked) == bool(fitting)
        assert all(picked[0]["seconds"] <= one["seconds"] for one in fitting)
    node, world = by_ranks[64][0], by_ranks[64][-1]
    assert node["between_bytes"] < 0.5 * world["between_bytes"]


def test_replicas_need_tables_and_whole_groups(capsys):
    from xgram_dist.cli.main import main

    assert main(["plan", str(RECIPES / "0.73b" / "vanilla.yaml"), "--shards"]) == 2
    assert "memory.method = vanilla has none" in capsys.readouterr().err
    assert main(["plan", str(RECIPES / "0.73b" / "xgram-1x-50.yaml"), "--ranks", "16", "memory.shard=3"]) == 2
    assert "memory.shard = 3 does not divide the 16 rank(s)" in capsys.readouterr().err
