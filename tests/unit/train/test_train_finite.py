"""NaN hunting: the first module that is not finite is named, and the step done again from the newest checkpoint."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train_helpers import read_metrics, saved_weights, small_config

from xgram_dist.model.layers import SwiGLU
from xgram_dist.optim.clip import SpikeGuard
from xgram_dist.train import trainer as loop
from xgram_dist.train.trainer import Trainer, train_run

BAD_STEP = 5


def settings(data: Path, **train: Any) -> Any:
    train = {"steps": 7, "check_finite": "layers", "global_batch": 8, "micro_batch": 4, **train}
    return small_config(data, train=train, checkpoint={"every": 3})


def run(config: Any, folder: Path) -> int:
    return train_run(config, folder, fresh=False)


def spoil(patch: pytest.MonkeyPatch, times: int, how: Callable[[Tensor], Tensor]) -> None:
    """The output of the feed-forward of the last layer, in the second micro-batch of a step, the first so many times
    that the step is done."""
    step, micro_batch, left = 0, 0, times
    train_step, forward = loop.train_step, SwiGLU.forward
    modules: list[SwiGLU] = []

    def count(*arguments: Any, **keywords: Any) -> Any:
        nonlocal step, micro_batch
        step, micro_batch = arguments[5], 0
        return train_step(*arguments, **keywords)

    def spoiled(self: SwiGLU, *arguments: Any) -> Tensor:
        nonlocal micro_batch, left
        out = forward(self, *arguments)
        if self not in modules[-2:]:
            modules.append(self)  # of this start: two layers
        if self is modules[-1]:
            micro_batch += 1
            if step == BAD_STEP and micro_batch == 2 and left and torch.is_grad_enabled():
                left -= 1
                return how(out)
        return out

    patch.setattr(loop, "train_step", count)
    patch.setattr(SwiGLU, "forward", spoiled)


def bad_gradient(out: Tensor) -> Tensor:
    out = out + 0
    out.register_hook(lambda gradient: gradient * math.inf)
    return out


@pytest.mark.parametrize(("direction", "times", "cause"), [("forward", 1, "device"), ("backward", 9, "data or recipe")])
def test_the_module_and_the_cause_are_named(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    direction: str,
    times: int,
    cause: str,
) -> None:
    with monkeypatch.context() as patch:
        spoil(patch, times, (lambda out: out * math.nan) if direction == "forward" else bad_gradient)
        assert run(settings(data), tmp_path / "run") == 0
    (record,) = read_metrics(tmp_path / "run", "not_finite")
    found = {name: record[name] for name in ("step", "direction", "micro_batch", "rank", "cause", "checkpoint")}
    assert found == {
        "step": BAD_STEP,
        "direction": direction,
        "micro_batch": 1,
        "rank": 0,
        "cause": cause,
        "checkpoint": 3,
    }
    assert record["module"] == "blocks.1.ffn"
    assert record["repeats"] is (times > 1)
    assert [one["step"] for one in read_metrics(tmp_path / "run", "train")] == list(range(1, 8))
    skipped = [one["step"] for one in read_metrics(tmp_path / "run", "skipped")]
    assert skipped == ([BAD_STEP] if times > 1 else [])
    said = capsys.readouterr().out
    assert f"step {BAD_STEP}: is done again from the checkpoint of step 3" in said
    assert f"not finite: the {'output' if direction == 'forward' else 'gradient of the output'} of blocks.1.ffn" in said
    if times == 1:  # nothing is left of the fault
        assert run(settings(data, check_finite="step"), tmp_path / "undisturbed") == 0
        ours, theirs = saved_weights(tmp_path / "run"), saved_weights(tmp_path / "undisturbed")
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_without_a_checkpoint_the_module_is_named_and_the_step_skipped(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, 1, lambda out: out * math.nan)
    config = small_config(data, train={"steps": 6, "check_finite": "layers"})
    assert run(config, tmp_path / "run") == 0
    (record,) = read_metrics(tmp_path / "run", "not_finite")
    assert (record["module"], record["repeats"]) == ("blocks.1.ffn", None)
    assert "is not done again" in capsys.readouterr().out


def test_watching_changes_no_bit(data: Path, tmp_path: Path) -> None:
    for name in ("step", "layers"):
        assert run(settings(data, check_finite=name), tmp_path / name) == 0
    ours, theirs = (saved_weights(tmp_path / name) for name in ("layers", "step"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_spike_leaves_a_record_with_the_documents_of_its_batch(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(small_config(data, train={"steps": 2, "micro_batch": 2}), tmp_path / "run", fresh=False)
    for n in range(SpikeGuard.MEMORY // 2):  # losses far below a real one
        trainer.spikes.is_spike(0.01 + 1e-4 * (n % 3))
    batches = [trainer.loader.batch_at(position) for position in (0, 8)]
    assert trainer.run() == 0
    first = read_metrics(tmp_path / "run", "spike")[0]
    assert (first["step"], first["position"]) == (1, 0)
    assert "is far above those before" in capsys.readouterr().out
    assert read_metrics(tmp_path / "run", "train")[0]["skipped"] == 0  # it is recorded, and trained on
    record = json.loads((tmp_path / "run" / first["documents"]).read_text())
    losses = [one["loss"] for one in record["micro_batches"]]
    assert losses == sorted(losses, reverse=True)
    assert sum(losses) / len(losses) == pytest.approx(first["loss"])
    found = {
        (one["micro_batch"], number): (sequence["chunk"], sequence["sequence"])
        for one in record["micro_batches"]
        for number, sequence in enumerate(one["sequences"])
    }
    samples = batches[0].samples
    expected = {divmod(number, 2): (int(samples.chunk[number]), int(samples.sequence[number])) for number in range(8)}
    assert found == expected
    assert all(sequence["documents"][0]["text"] for one in record["micro_batches"] for sequence in one["sequences"])


def test_a_skipped_step_names_its_documents(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, 1, lambda out: out * math.nan)
    assert run(settings(data, check_finite="step"), tmp_path / "run") == 0
    (skipped,) = read_metrics(tmp_path / "run", "skipped")
    assert skipped["position"] == 8 * (BAD_STEP - 1)
    record = json.loads((tmp_path / "run" / skipped["documents"]).read_text())
    assert [(one["micro_batch"], one["loss"] is None) for one in record["micro_batches"]] == [(1, True), (0, False)]
