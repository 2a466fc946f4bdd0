"""The figures of a checkpoint do not depend on how many ranks compute them."""

import math
from pathlib import Path

import pytest
import torch
from inference_helpers import recipe, trained
from ranks_helper import run_ranks
from train_helpers import read_metrics

from xgram_dist.analysis.diagnose.measure import measure, open_checkpoint
from xgram_dist.data.dataset import PreparedData
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.train.trainer import Trainer


def figures(ranks, run, data):
    prepared = PreparedData.open(data, "validation")
    opened = open_checkpoint(Path(run), ranks, torch.device("cpu"), prepared.manifest.end_of_text)
    try:
        held = sum(state.rows.shape[0] for state in opened.shards)
        return measure(opened, prepared, 6, 2, [1, 10]), held
    finally:
        opened.lookup.close()


def same(one, other, path="", tolerance=1e-6):
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            same(one[key], other[key], f"{path}.{key}", tolerance)
    elif isinstance(one, list):
        assert len(one) == len(other), path
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{path}.{number}", tolerance)
    elif isinstance(one, float):
        assert math.isclose(one, other, rel_tol=10 * tolerance, abs_tol=tolerance), (path, one, other)
    else:
        assert one == other, path


@pytest.mark.parametrize("optimizer", ["dense", "catch_up"])
def test_two_ranks_give_the_figures_of_one(data, tmp_path, optimizer):
    """Three batches on two ranks: one of them only goes along in the last round."""
    trained(recipe(data, "all", memory={"optimizer": optimizer}), tmp_path / "run")
    expected, all_rows = figures(ProcessGroup(), tmp_path / "run", data)
    found = run_ranks(figures, 2, str(tmp_path / "run"), str(data))
    for tree, held in found:
        same(expected, tree)
        assert held < all_rows  # no rank has a whole table
    assert sum(held for _, held in found) == all_rows


def logged(ranks, config, folder):
    assert Trainer(config, Path(folder), False, ranks).run() == 0
    return read_metrics(Path(folder), "diagnose") if ranks.first else None


@pytest.mark.parametrize(
    "parallel",
    [
        {"engine": "hsdp"},
        {"engine": "deepspeed", "zero_stage": 3},
        {"engine": "replicated", "tensor": 2, "sequence_parallel": True},
        {"engine": "replicated", "context": 2},
    ],
    ids=["hsdp", "zero-3", "tensor", "context"],
)
def test_a_run_logs_the_same_figures_on_any_layout(data, tmp_path, parallel):
    """train.diagnose_every: batches on the data axis; columns and positions on the tensor axis."""

    def config(**parallel):
        return recipe(data, "all", train={"diagnose_every": 2, "steps": 2, "micro_batch": 2}, parallel=parallel)

    (expected,) = logged(ProcessGroup(), config(engine="replicated"), tmp_path / "one")
    (found,) = run_ranks(logged, 2, config(**parallel), str(tmp_path / "two"))[0]
    timing = ("seconds",)
    same(*({k: v for k, v in one.items() if k not in timing} for one in (expected, found)), tolerance=2e-3)
