"""A run that ends before its time and goes on is the run that never ended."""

import json
import shutil

import numpy as np
import pytest
import torch
from ranks_helper import run_ranks
from train_helpers import read_metrics, saved_weights, small_config

from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.checkpoint.manifest import manifest_checksum
from xgram_dist.errors import UserError
from xgram_dist.train import trainer as loop
from xgram_dist.train.trainer import Trainer

MEMORY = {"routing": {"vip": 10, "buckets": 4}, "sites": {"v": {"views": 2, "kernels": [3, 5]}}, "method": "xgram"}


def settings(data, **memory):
    train = {"steps": 8, "micro_batch": 1, "validation_sequences": 4}
    return small_config(
        data, memory={**MEMORY, "compression": 0.5, **memory}, train={**small_train(), **train}, checkpoint={"every": 3}
    )


def small_train():
    return {"global_batch": 4, "precision": "fp32", "log_every": 1}


class LostError(Exception):
    """Stands for a machine that is gone."""


def run_until(config, folder, lost_at, monkeypatch, ranks=None):
    original = loop.train_step

    def step(*arguments, **keywords):
        if arguments[-1] == lost_at:
            raise LostError
        return original(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", step)
        trainer = Trainer(config, folder, fresh=False, ranks=ranks)
        with pytest.raises(LostError):
            trainer.run()


def outcome(folder):
    losses = {record["step"]: record["loss"] for record in read_metrics(folder, "train")}
    return losses, saved_weights(folder)


@pytest.mark.parametrize(
    "memory", [{"optimizer": "dense"}, {"optimizer": "catch_up"}, {"optimizer": "adagrad"}, {"compression": 1.0}]
)
def test_a_lost_run_goes_on_to_the_last_bit(data, tmp_path, monkeypatch, memory):
    config = settings(data, **memory)
    assert Trainer(config, tmp_path / "whole", fresh=False).run() == 0
    for lost_at in (4, 5, 8):
        folder = tmp_path / f"lost-{lost_at}"
        run_until(config, folder, lost_at, monkeypatch)
        assert Trainer(config, folder, fresh=False).run() == 0
        losses, weights = outcome(folder)
        expected, expected_weights = outcome(tmp_path / "whole")
        assert losses == expected
        assert list(weights) == list(expected_weights)
        assert all(np.array_equal(weights[name], expected_weights[name]) for name in weights)


def test_the_newest_two_checkpoints_stay(data, tmp_path):
    assert Trainer(settings(data), tmp_path / "run", fresh=False).run() == 0
    assert list_steps(tmp_path / "run") == [6, 8]


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "manifest", "outside", "newer"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(data, tmp_path, capsys, damage):
    config = settings(data)
    assert Trainer(config, tmp_path / "run", fresh=False).run() == 0
    expected = outcome(tmp_path / "run")[1]
    newest = tmp_path / "run" / "checkpoints" / "step-00000008"
    file, manifest = newest / "rank-00000.safetensors", newest / "manifest.json"
    if damage == "flip":
        content = bytearray(file.read_bytes())
        content[-1000] ^= 1
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    elif damage == "missing":
        file.unlink()
    else:
        tree = json.loads(manifest.read_text())
        if damage == "outside":
            tree["files"]["../../../config.yaml"] = 1
        elif damage == "newer":
            tree["version"] = 99
        tree["checksum"] = manifest_checksum(tree)
        manifest.write_text("{" if damage == "manifest" else json.dumps(tree))
    capsys.readouterr()
    assert Trainer(config, tmp_path / "run", fresh=False).run() == 0
    said = capsys.readouterr().out
    assert "checkpoint of step 8 is refused" in said
    assert "resuming after step 6" in said
    weights = outcome(tmp_path / "run")[1]
    assert all(np.array_equal(weights[name], expected[name]) for name in weights)


def test_a_run_without_a_whole_checkpoint_is_refused(data, tmp_path):
    config = settings(data)
    assert Trainer(config, tmp_path / "run", fresh=False).run() == 0
    for step in (6, 8):
        (tmp_path / "run" / "checkpoints" / f"step-{step:08d}" / "manifest.json").write_text("[]")
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        Trainer(config, tmp_path / "run", fresh=False)


def on_ranks(ranks, config, folder):
    torch.set_num_threads(1)
    assert Trainer(config, folder, fresh=False, ranks=ranks).run() == 0


def test_rows_of_two_ranks_go_on_as_columns_of_two(data, finished, two_ranks, tmp_path):
    """And replicated parameters under DeepSpeed's second stage."""
    shutil.copytree(two_ranks[0], tmp_path / "run")
    config = settings(data, optimizer="catch_up")
    parallel = {"engine": "deepspeed", "zero_stage": 2, "tensor": 2}
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})
    run_ranks(on_ranks, 2, config, tmp_path / "run")
    losses, expected = outcome(tmp_path / "run")[0], outcome(finished)[0]
    assert list(losses) == list(expected)
    np.testing.assert_allclose(list(losses.values()), list(expected.values()), rtol=1e-5)
