"""Options of a run that change what it records or keeps, and not what it computes."""

import json
from pathlib import Path

import pytest
import torch
from train_helpers import read_metrics, saved_weights, small_config

from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.train.trainer import Trainer

STEPS = 5


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints in the background, two of them kept; no profile."""
    folder = tmp_path_factory.mktemp("options") / "plain"
    config = small_config(data, train={"steps": STEPS}, checkpoint={"every": 1})
    assert Trainer(config, folder, False).run() == 0
    assert torch.are_deterministic_algorithms_enabled()
    return folder


@pytest.fixture(scope="module")
def changed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with every option of this file set."""
    folder = tmp_path_factory.mktemp("options") / "changed"
    config = small_config(
        data,
        train={"steps": STEPS, "profile_from": 2, "profile_steps": 3, "peak_tflops": 0.25, "deterministic": False},
        checkpoint={"every": 1, "keep": 1, "keep_every": 2, "asynchronous": False},
    )
    assert Trainer(config, folder, False).run() == 0
    assert not torch.are_deterministic_algorithms_enabled()
    return folder


def test_the_options_change_neither_losses_nor_weights(plain: Path, changed: Path) -> None:
    # On the CPU the same algorithms run with and without train.deterministic.
    losses = [[record["loss"] for record in read_metrics(run, "train")] for run in (plain, changed)]
    assert losses[0] == losses[1]
    expected, weights = saved_weights(plain), saved_weights(changed)
    assert set(expected) == set(weights)
    for name, tensor in expected.items():
        assert torch.equal(tensor, weights[name]), name


def test_a_profile_holds_as_many_steps_as_asked_for(plain: Path, changed: Path) -> None:
    events = json.loads((changed / "trace.json").read_text())["traceEvents"]
    updates = [event for event in events if event.get("name", "").startswith("Optimizer.step#")]
    assert len(updates) == 3
    assert not (plain / "trace.json").exists()


def test_utilisation_is_measured_against_the_given_peak(plain: Path, changed: Path) -> None:
    for record in read_metrics(changed, "train"):
        assert record["utilisation"] == pytest.approx(record["model_tflops"] / 0.25)
    # The peak of a CPU is not known.
    assert all("utilisation" not in record for record in read_metrics(plain, "train"))


def test_the_newest_checkpoints_and_every_nth_are_kept(plain: Path, changed: Path) -> None:
    assert list_steps(plain) == [STEPS - 1, STEPS]
    assert list_steps(changed) == [2, 4, STEPS]


def test_a_synchronous_save_blocks_until_it_is_written(plain: Path, changed: Path) -> None:
    saves = read_metrics(changed, "checkpoint")
    assert [save["step"] for save in saves] == list(range(1, STEPS + 1))
    assert all(save["written"] and save["seconds_blocked"] == save["seconds_saving"] for save in saves)
    order = [(record["kind"], record["step"]) for record in read_metrics(changed)]
    for step in range(1, STEPS):
        assert order.index(("checkpoint", step)) < order.index(("train", step + 1))
    background = [save for save in read_metrics(plain, "checkpoint") if save["step"] < STEPS]
    assert all(save["seconds_blocked"] < save["seconds_saving"] for save in background)
