"""The update of a step: the joint norm, and steps that are not finite."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import table_tensors
from train_helpers import apply_step, read_metrics, saved_weights, small_config

from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.cli.main import main
from xgram_dist.config import Config, dump_config
from xgram_dist.errors import UserError
from xgram_dist.optim.clip import SpikeGuard
from xgram_dist.tables.exchange import ShardedTables
from xgram_dist.train.step import JointOptimizer
from xgram_dist.train.trainer import Trainer


def ready(config: Config, folder: Path) -> Trainer:
    trainer = Trainer(config, folder, fresh=False)
    trainer.metrics.close()
    return trainer


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    found = {name: value.detach().clone() for name, value in trainer.engine.model.named_parameters()}
    if isinstance(trainer.lookup, ShardedTables):
        found |= {name: value.clone() for name, value in table_tensors(trainer.lookup.shards).items()}
    return found


def backward(trainer: Trainer) -> None:
    """The gradients of one micro-batch, given back to the tables."""
    with trainer.loader:
        tokens = next(trainer.loader).tokens[0]
    working = trainer.lookup.fetch(trainer.lookup.plan(tokens, whole=True).result()[0])
    loss, _ = trainer.engine.model.loss(tokens, working.slots, working.values, torch.tensor(1.0))
    loss.backward()  # type: ignore[no-untyped-call]
    trainer.lookup.give_back(working)


def gradients_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    assert isinstance(trainer.lookup, ShardedTables)
    found = {}
    for name, value in trainer.engine.model.named_parameters():
        assert value.grad is not None
        found[name] = value.grad.clone()
    for state in trainer.lookup.shards:
        assert state.gradient is not None
        assert state.gates is not None
        assert state.gradient.gates_RJ is not None
        rows, gates = torch.zeros_like(state.rows), torch.zeros_like(state.gates)
        rows[state.gradient.touched_R] = state.gradient.rows_RW
        gates[state.gradient.touched_R] = state.gradient.gates_RJ
        for number, (name, columns) in enumerate(state.slab.columns().items()):
            found[f"{name}.rows"] = rows[:, columns].clone()
            found[f"{name}.gates"] = gates[:, number].clone()
    return found


@pytest.mark.parametrize("limit", [0.05, 0.0, 1e6])
def test_the_update_is_clipped_by_the_joint_norm_of_backbone_and_tables(
    data: Path, tmp_path: Path, limit: float
) -> None:
    # With eps 1, no decay and a constant rate the first AdamW update of a gradient g is -rate * g / (|g| + 1): unlike
    # with a small eps, it shows how g was scaled.
    rate = 0.5
    config = small_config(
        data,
        memory={
            **small_config(data).memory.model_dump(mode="json"),
            "learning_rate": {"multiplier": 1.0},
            "row_gate_init": 0.0,  # half open, so that the gates' gradients count too
        },
        optimizer={
            "learning_rate": rate,
            "eps": 1.0,
            "weight_decay": 0.0,
            "warmup_share": 0.0,
            "final_share": 1.0,
            "clip_norm": limit,
        },
    )
    trainer = ready(config, tmp_path / "run")
    backward(trainer)
    gradients, before = gradients_of(trainer), weights_of(trainer)
    assert gradients.keys() == before.keys()
    squares = {name: float(value.double().square().sum()) for name, value in gradients.items()}
    joint = math.sqrt(sum(squares.values()))
    backbone = math.sqrt(sum(square for name, square in squares.items() if not name.startswith("layers.")))
    assert joint > 1.002 * backbone  # or the test could not tell the two apart
    norm, _, counted, _ = apply_step(trainer.optimizer, 1, torch.zeros(()))
    assert counted
    assert float(norm) == pytest.approx(joint, rel=1e-5)
    factor = min(1.0, limit / joint) if limit else 1.0
    after = weights_of(trainer)
    for name, gradient in gradients.items():
        clipped = gradient.double() * factor
        expected = -rate * clipped / (clipped.abs() + 1)
        moved = after[name].double() - before[name].double()
        # The tolerance is the rounding of the weight itself; it is far below what another factor would move.
        assert torch.allclose(moved, expected, rtol=3e-4, atol=2.5e-7 * max(1.0, float(before[name].abs().max()))), name


def test_a_step_leaves_no_gradient_behind(data: Path, tmp_path: Path) -> None:
    trainer = ready(small_config(data), tmp_path / "run")
    backward(trainer)
    apply_step(trainer.optimizer, 1, torch.zeros(()))
    assert isinstance(trainer.lookup, ShardedTables)
    assert all(value.grad is None for value in trainer.engine.model.parameters())
    assert all(state.gradient is None for state in trainer.lookup.shards)


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int], where: str, value: float) -> list[tuple[int, bool]]:
    """Put `value` into one gradient of these steps; returns (step, did any weight change) as it goes."""
    clip_jointly, update_last = JointOptimizer.clip, JointOptimizer.update_backbone
    seen: list[tuple[int, bool]] = []
    before: list[torch.Tensor] = []

    def tensors_of(optimizer: JointOptimizer) -> list[torch.Tensor]:
        tables = [] if optimizer.shards is None else list(table_tensors(optimizer.shards).values())
        return [*optimizer.engine.model.parameters(), *tables]

    def clip(self: JointOptimizer, loss: torch.Tensor) -> Any:
        if len(seen) + 1 in steps:
            if where == "backbone":
                gradient = next(self.engine.model.parameters()).grad
                assert gradient is not None
                gradient.view(-1)[7] = value
            else:
                assert self.shards is not None
                state = self.shards[1]
                assert state.gradient is not None
                target = state.gradient.rows_RW if where == "rows" else state.gradient.gates_RJ
                assert target is not None
                target[2, 1] = value
        before[:] = [tensor.detach().clone() for tensor in tensors_of(self)]
        return clip_jointly(self, loss)

    def update_backbone(self: JointOptimizer, number: int, outcome: Any) -> None:
        update_last(self, number, outcome)
        same = all(torch.equal(old, new.detach()) for old, new in zip(before, tensors_of(self), strict=True))
        seen.append((number, not same))

    monkeypatch.setattr(JointOptimizer, "clip", clip)
    monkeypatch.setattr(JointOptimizer, "update_backbone", update_backbone)
    return seen


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["backbone", "rows", "gates"])
def test_a_step_that_is_not_finite_is_skipped_counted_and_changes_no_weight(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, value: float
) -> None:
    changed = poison(monkeypatch, {2, 4}, where, value)
    trainer = Trainer(small_config(data, train={"steps": 5, "max_skipped": 1}), tmp_path / "run", fresh=False)
    assert trainer.run() == 0
    assert changed == [(1, True), (2, False), (3, True), (4, False), (5, True)]
    run = tmp_path / "run"
    assert [record["step"] for record in read_metrics(run, "skipped")] == [2, 4]
    assert [record["skipped"] for record in read_metrics(run, "train")] == [0, 1, 1, 2, 2]
    end = read_metrics(run, "end")[0]
    assert (end["skipped"], end["complete"]) == (2, True)
    assert math.isfinite(end["validation_loss"])
    assert all(bool(tensor.isfinite().all()) for tensor in weights_of(trainer).values())


def test_a_skipped_step_leaves_the_optimizer_as_it_was(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {1}, "rows", math.nan)
    trainer = ready(small_config(data), tmp_path / "run")
    backward(trainer)
    norm, _, counted, _ = apply_step(trainer.optimizer, 1, torch.zeros(()))
    assert math.isnan(float(norm))
    assert not counted
    assert trainer.engine.step_count == 0
    assert not any(bool(v.any()) for p in trainer.engine.parameter_shards() if p.kind != "weight" for _, v in p.chunks)
    assert isinstance(trainer.lookup, ShardedTables)
    assert all(value.grad is None for value in trainer.engine.model.parameters())
    assert all(state.gradient is None for state in trainer.lookup.shards)


def test_a_loss_that_is_not_finite_is_skipped_even_when_every_gradient_is(data: Path, tmp_path: Path) -> None:
    trainer = ready(small_config(data), tmp_path / "run")
    backward(trainer)
    before = weights_of(trainer)
    norm, _, counted, _ = apply_step(trainer.optimizer, 1, torch.tensor(math.inf))
    assert math.isfinite(float(norm))
    assert not counted
    after = weights_of(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_spike_is_skipped_and_the_memory_of_earlier_steps_survives_a_resume(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(data, train={"steps": 2, "spike_sigmas": 6.0})
    trainer = Trainer(config, tmp_path / "run", fresh=False)
    calm = [(0.01 + 1e-4 * (n % 3), 1e3) for n in range(SpikeGuard.MEMORY // 2)]  # losses far below a real one
    trainer.engine.spike_guard.recent.extend(calm)
    before = weights_of(trainer)
    trainer.run()
    assert "step 1: skipped (a spike of more than 6 sigmas)" in capsys.readouterr().out
    assert trainer.state.skipped == 2 - trainer.engine.step_count > 0
    if trainer.engine.step_count == 0:
        assert all(torch.equal(before[name], value) for name, value in weights_of(trainer).items())
    resumed = Trainer(small_config(data, train={"steps": 3, "spike_sigmas": 6.0}), tmp_path / "run", fresh=False)
    assert list(resumed.engine.spike_guard.recent) == list(trainer.engine.spike_guard.recent)
    assert len(resumed.engine.spike_guard.recent) == len(calm) + 2


def test_the_guard_skips_what_exceeds_mean_and_sigmas_of_the_steps_before() -> None:
    guard, generator = SpikeGuard(3.0), torch.Generator().manual_seed(0)
    seen: list[tuple[float, float]] = []
    for step in range(400):
        loss, norm = (2 + 0.1 * torch.randn(2, generator=generator)).tolist()
        loss, norm = (loss + 5 * (step in (40, 150)), norm + 5 * (step == 300))
        recent = torch.tensor(seen[-128:], dtype=torch.float64)
        expected = len(seen) >= 64 and bool(
            (torch.tensor([loss, norm]).double() > recent.mean(0) + 3 * recent.std(0)).any()
        )
        assert guard.is_spike(loss, norm) == expected, step
        assert expected or step not in (150, 300)
        seen.append((loss, norm))
    calm = SpikeGuard(None)
    assert not any(calm.is_spike(10.0**n, 1.0) for n in range(200))


def test_too_many_skipped_steps_in_a_row_end_the_run_with_the_reason(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch, {1, 2, 4, 5, 6, 7}, "backbone", math.nan)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(small_config(data, "vanilla", train={"steps": 20, "max_skipped": 2})))
    assert main(["train", str(recipe), "--folder", str(tmp_path / "run")]) == 2
    captured = capsys.readouterr()
    assert "step 4: skipped (not finite), gradient norm nan" in captured.out
    assert captured.err.startswith(
        "xgram-dist train: loss or gradient was not finite in 3 steps in a row, up to step 6"
    )
    assert "train.max_skipped = 2" in captured.err
    assert captured.err.count("\n") == 1
    skipped = read_metrics(tmp_path / "run", "skipped")
    assert [record["step"] for record in skipped] == [1, 2, 4, 5, 6]
    assert skipped[0]["gradient_norm"] is None
    assert list_steps(tmp_path / "run") == [6]  # with the weights before them: to look at, or to go on from
    assert all(bool(value.isfinite().all()) for value in saved_weights(tmp_path / "run").values())
    assert not read_metrics(tmp_path / "run", "end")[0]["complete"]


def test_no_skipped_step_is_tolerated_when_none_is_allowed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {1}, "backbone", math.inf)
    trainer = Trainer(small_config(data, "vanilla", train={"max_skipped": 0}), tmp_path / "run", fresh=False)
    with pytest.raises(UserError, match=r"in 1 steps? in a row, up to step 1 \(train\.max_skipped = 0\)"):
        trainer.run()


def test_a_weight_that_is_not_finite_ends_the_run_and_the_metrics_stay_json(data: Path, tmp_path: Path) -> None:
    trainer = Trainer(small_config(data, train={"max_skipped": 1}), tmp_path / "run", fresh=False)
    with torch.no_grad():
        trainer.engine.model.norm.weight[0] = math.nan
    with pytest.raises(UserError, match="not finite in 2 steps in a row"):
        trainer.run()
    records = read_metrics(tmp_path / "run")  # would refuse NaN
    assert [(record["kind"], record.get("loss")) for record in records] == [
        ("skipped", None),
        ("train", None),
        ("memory", None),
        ("skipped", None),
        ("checkpoint", None),
        ("end", None),
    ]
