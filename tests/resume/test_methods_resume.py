"""Every method is saved and goes on: to the last bit as it was, and on another number of ranks."""

import shutil

import numpy as np
import pytest
import torch
from ranks_helper import run_ranks
from test_resume import run_until
from train_helpers import read_metrics, saved_weights, small_tree

from xgram_dist.config import build_config
from xgram_dist.errors import UserError
from xgram_dist.train.trainer import Trainer

MEMORY = {
    "ple": {"compression": 1.0, "sites": {"h": {"views": 2}, "v": {"views": 1}}},
    "retoken": {"compression": 1.0, "retoken": {"views": 2}},
    "mort": {"compression": 1.0, "mort": {"views": 3, "top": 2, "balance": 0.01}},
    "stem": {"compression": 1.0, "stem": {"layers": [1]}},
    "engram": {"compression": 1.0, "engram": {"heads": 2, "rows": 200}, "optimizer": "catch_up"},
    "mole": {"mole": {"experts": 2, "width": 24}},
    "scone": {"scone": {"grams": 50, "longest": 3, "layers": 1}},
}


def settings(data, method, **sections):
    tree = small_tree(data, method)
    tree["memory"] |= MEMORY[method]
    tree["train"] |= {"steps": 5, "global_batch": 4, "micro_batch": 1, "validation_sequences": 4}
    tree["checkpoint"] = {"every": 3}
    tree["parallel"] = {"engine": "replicated", **sections.pop("parallel", {})}
    for section, keys in sections.items():
        tree[section] |= keys
    return build_config(tree)


def losses(folder):
    return [record["loss"] for record in read_metrics(folder, "train")]


def lost_on_ranks(ranks, cases):
    for config, folder in cases:
        with pytest.MonkeyPatch.context() as patch:
            run_until(config, folder, 4, patch, ranks)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    for method in MEMORY:
        assert Trainer(settings(data, method), folder / method, fresh=False).run() == 0
    return folder


@pytest.mark.parametrize("method", MEMORY)
def test_a_lost_run_goes_on_to_the_last_bit(data, whole, tmp_path, monkeypatch, method):
    config = settings(data, method)
    run_until(config, tmp_path / "run", 5, monkeypatch)
    assert Trainer(config, tmp_path / "run", fresh=False).run() == 0
    assert losses(tmp_path / "run") == losses(whole / method)
    expected = saved_weights(whole / method)
    for name, value in saved_weights(tmp_path / "run").items():
        assert torch.equal(value, expected[name]), name


def test_two_ranks_go_on_with_one(data, whole, tmp_path):
    layouts = [{"engine": "replicated", "tensor": 2}, {"engine": "hsdp"}]
    cases = [
        (method, settings(data, method, parallel=layouts[number % 2]), tmp_path / method)
        for number, method in enumerate(MEMORY)
    ]
    run_ranks(lost_on_ranks, 2, [(config, folder) for _, config, folder in cases])
    for method, _, folder in cases:
        assert Trainer(settings(data, method), folder, fresh=False).run() == 0
        np.testing.assert_allclose(losses(folder), losses(whole / method), rtol=1e-5, err_msg=method)


def test_other_n_gram_keys_are_refused(data, whole, tmp_path):
    shutil.copytree(whole / "engram", tmp_path / "run")
    config = settings(data, "engram", train={"steps": 6})
    config = config.model_copy(
        update={
            "memory": config.memory.model_copy(
                update={"engram": config.memory.engram.model_copy(update={"fold": False})}
            )
        }
    )
    with pytest.raises(UserError, match="other n-gram keys"):
        Trainer(config, tmp_path / "run", fresh=False)
