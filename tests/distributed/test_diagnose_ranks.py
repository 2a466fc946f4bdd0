"""The figures of a checkpoint do not depend on how many ranks compute them."""

import math
from pathlib import Path

import pytest
import torch
from inference_helpers import recipe, trained
from ranks_helper import run_ranks

from xgram_dist.data.dataset import PreparedData
from xgram_dist.diagnose.measure import measure
from xgram_dist.diagnose.open import open_checkpoint
from xgram_dist.parallel.ranks import Ranks


def figures(ranks, run, data):
    prepared = PreparedData.open(data, "validation")
    opened = open_checkpoint(Path(run), ranks, torch.device("cpu"), prepared.manifest.end_of_text)
    try:
        held = sum(state.rows.shape[0] for state in opened.store.states)
        return measure(opened, prepared, 6, 2, [1, 10]), held
    finally:
        opened.lookup.close()


def same(one, other, path=""):
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), path
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{path}.{number}")
    elif isinstance(one, float):
        assert math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-6), (path, one, other)
    else:
        assert one == other, path


@pytest.mark.parametrize("optimizer", ["dense", "catch_up"])
def test_two_ranks_give_the_figures_of_one(data, tmp_path, optimizer):
    """Three batches on two ranks: one of them only goes along in the last round."""
    trained(recipe(data, "all", memory={"optimizer": optimizer}), tmp_path / "run")
    expected, all_rows = figures(Ranks(), tmp_path / "run", data)
    found = run_ranks(figures, 2, str(tmp_path / "run"), str(data))
    for tree, held in found:
        same(expected, tree)
        assert held < all_rows  # no rank has a whole table
    assert sum(held for _, held in found) == all_rows
