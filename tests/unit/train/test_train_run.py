"""A whole run: what it leaves behind, that it repeats, and how it ends early."""

import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import table_tensors
from train_helpers import (
    FFN,
    KV_WIDTH,
    LAYERS,
    LENGTH,
    ROWS,
    VIEWS,
    VOCABULARY,
    WIDTH,
    read_metrics,
    saved_weights,
    small_config,
)

from xgram_dist.checkpoint.folder import list_steps
from xgram_dist.cli.main import main
from xgram_dist.config import Config, dump_config, load_config
from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.loader import validation_batches
from xgram_dist.errors import UserError
from xgram_dist.estimate.flops import plan_budget
from xgram_dist.model.build import build_model
from xgram_dist.tables.routing_io import load_routing
from xgram_dist.train import trainer as loop
from xgram_dist.train.step import train_step
from xgram_dist.train.trainer import Trainer


def train(config: Config, folder: Path, fresh: bool = False) -> Path:
    assert Trainer(config, folder, fresh).run() == 0
    return folder


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder, "train")]


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config(data, train={"steps": 5, "validate_every": 2})
    return train(config, tmp_path_factory.mktemp("runs") / "finished")


def expected_backbone() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (VOCABULARY, WIDTH),
        "head.weight": (VOCABULARY, WIDTH),
        "norm.weight": (WIDTH,),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"blocks.{layer}.attention_norm.weight": (WIDTH,),
            f"blocks.{layer}.attention.query.weight": (WIDTH, WIDTH),
            f"blocks.{layer}.attention.key.weight": (KV_WIDTH, WIDTH),
            f"blocks.{layer}.attention.value.weight": (KV_WIDTH, WIDTH),
            f"blocks.{layer}.attention.output.weight": (WIDTH, WIDTH),
            f"blocks.{layer}.attention.query_norm.weight": (WIDTH,),
            f"blocks.{layer}.attention.key_norm.weight": (KV_WIDTH,),
            f"blocks.{layer}.ffn_norm.weight": (WIDTH,),
            f"blocks.{layer}.ffn.gate.weight": (FFN, WIDTH),
            f"blocks.{layer}.ffn.up.weight": (FFN, WIDTH),
            f"blocks.{layer}.ffn.down.weight": (WIDTH, FFN),
            f"blocks.{layer}.sites.v.gain": (VIEWS,),
        }
        for view, taps in enumerate((3, 5)):
            shapes |= {
                f"blocks.{layer}.sites.v.extractors.{view}.content": (taps, KV_WIDTH),
                f"blocks.{layer}.sites.v.extractors.{view}.gate": (taps, KV_WIDTH),
                f"blocks.{layer}.sites.v.extractors.{view}.gate_bias": (KV_WIDTH,),
            }
    return shapes


def test_the_folder_holds_what_it_should_and_nothing_else(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "run_id", "starts", "tensorboard", "routing.npz", "checkpoints"}
    assert len(list((finished / "tensorboard").glob("events.out.tfevents.*"))) == 1


def test_the_config_in_the_folder_is_the_runs(finished: Path, data: Path) -> None:
    assert load_config(finished / "config.yaml") == small_config(data, train={"steps": 5, "validate_every": 2})


def test_the_routing_in_the_folder_is_the_runs(finished: Path) -> None:
    routing = load_routing(finished / "routing.npz")
    assert (routing.vocabulary, routing.num_rows, routing.num_views) == (VOCABULARY, ROWS, VIEWS)


def test_the_checkpoint_holds_every_parameter_and_table_by_name(finished: Path) -> None:
    shapes = {name: tuple(value.shape) for name, value in saved_weights(finished).items()}
    expected = {f"backbone.{name}": shape for name, shape in expected_backbone().items()}
    for layer in range(LAYERS):
        for view in range(VIEWS):
            expected[f"tables.layers.{layer}.v.{view}.rows"] = (ROWS, KV_WIDTH)
            expected[f"tables.layers.{layer}.v.{view}.gates"] = (ROWS,)
    assert shapes == expected
    assert list_steps(finished) == [5]


def test_plan_counts_what_training_saves(finished: Path) -> None:
    sizes = {name: value.numel() for name, value in saved_weights(finished).items()}
    budget = plan_budget(load_config(finished / "config.yaml"))
    backbone = sum(size for name, size in sizes.items() if name.startswith("backbone."))
    assert backbone == budget.backbone_parameters + budget.extractor_parameters
    assert sum(size for name, size in sizes.items() if name.endswith(".rows")) == budget.table_parameters
    assert sum(size for name, size in sizes.items() if name.endswith(".gates")) == budget.gate_parameters


PHASES = ("data", "plan", "fetch", "wait", "compute", "return", "update")
MEMORY_PARTS = ("backbone", "backbone_optimizer", "tables", "tables_optimizer", "working_set", "peak")


def test_the_metrics_are_json_lines_with_the_expected_keys(finished: Path) -> None:
    common = {"kind", "step", "seconds"}
    expected = {
        "train": {
            "loss",
            "cross_entropy",
            "perplexity",
            "learning_rate",
            "gradient_norm",
            "tokens_per_second",
            "step_seconds",
            "skipped",
            "tokens_per_second_rank",
            "model_tflops",
            "distinct_tokens",
            "windows",
            "vectors_received",
            "vectors_sent",
            "bytes_sent",
            "bytes_received",
            "bytes_bound",
            "bytes_replicas",
            "imbalance",
            *(f"seconds_{phase}" for phase in PHASES),
        },
        "memory": {"rank", *(f"bytes_{part}" for part in MEMORY_PARTS)},
        "validation": {"loss", "perplexity"},
        "checkpoint": {"written", "bytes", "seconds_saving", "seconds_blocked"},
        "end": {
            "complete",
            "validation_loss",
            "validation_perplexity",
            "tokens",
            "tokens_per_second",
            "skipped",
            "rows_hit",
            "rows",
        },
    }
    records = read_metrics(finished)
    assert [record["kind"] for record in records] == [
        "train", "memory", "train", "validation", "train", "train", "validation", "train", "validation", "checkpoint",
        "end",
    ]  # fmt: skip
    for record in records:
        assert set(record) - {"seconds_agree"} == common | expected[record["kind"]]  # the first step comes before it
    end = records[-1]
    assert (end["step"], end["complete"], end["skipped"]) == (5, True, 0)
    assert end["tokens"] == 5 * 8 * LENGTH
    assert end["rows"] == ROWS * LAYERS * VIEWS
    assert 0 < end["rows_hit"] <= end["rows"]
    for record in read_metrics(finished, "train"):
        assert record["perplexity"] == pytest.approx(math.exp(record["cross_entropy"]))
        assert record["loss"] > record["cross_entropy"]  # the z-loss is part of the loss alone


def test_training_lowers_the_loss(data: Path, tmp_path: Path) -> None:
    config = small_config(data, train={"steps": 30, "log_every": 29}, optimizer={"learning_rate": 0.01})
    run = train(config, tmp_path / "run")
    first, *_, last = [record["cross_entropy"] for record in read_metrics(run, "train")]
    assert first == pytest.approx(math.log(VOCABULARY), rel=0.05)  # knows nothing yet
    assert last < first - 1


def test_log_every_thins_the_records(data: Path, tmp_path: Path) -> None:
    run = train(small_config(data, "vanilla", train={"steps": 7, "log_every": 3}), tmp_path / "run")
    assert [record["step"] for record in read_metrics(run, "train")] == [1, 3, 6, 7]


def test_validation_comes_at_intervals_and_at_the_end(finished: Path) -> None:
    checks = read_metrics(finished, "validation")
    assert [record["step"] for record in checks] == [2, 4, 5]
    for record in checks:
        assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
    end = read_metrics(finished, "end")[0]
    assert (end["validation_loss"], end["validation_perplexity"]) == (checks[-1]["loss"], checks[-1]["perplexity"])


def test_the_last_step_is_validated_once(data: Path, tmp_path: Path) -> None:
    run = train(small_config(data, "vanilla", train={"steps": 4, "validate_every": 2}), tmp_path / "run")
    assert [record["step"] for record in read_metrics(run, "validation")] == [2, 4]


def test_the_validation_loss_is_the_cross_entropy_of_the_saved_weights(data: Path, tmp_path: Path) -> None:
    config = small_config(data, "vanilla", train={"steps": 3})
    run = train(config, tmp_path / "run")
    model = build_model(config, torch.device("cpu"))
    saved = saved_weights(run)
    model.load_state_dict({name.removeprefix("backbone."): value for name, value in saved.items()})
    tokens = torch.cat(validation_batches(PreparedData.open(data, "validation"), LENGTH, 4, 8))
    assert tokens.shape == (8, LENGTH)
    with torch.no_grad():
        hidden = model(tokens, torch.zeros_like(tokens), {}, torch.tensor(1.0))
        logits = hidden @ saved["backbone.head.weight"].T
        expected = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
    assert read_metrics(run, "end")[0]["validation_loss"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("method", ["vanilla", "xgram"])
def test_the_same_seed_gives_the_same_losses_and_weights_to_the_bit(data: Path, tmp_path: Path, method: str) -> None:
    first = train(small_config(data, method), tmp_path / "first")
    again = train(small_config(data, method), tmp_path / "again")
    assert losses(first) == losses(again)
    assert len(losses(first)) == 4
    one, two = saved_weights(first), saved_weights(again)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name


def test_another_seed_gives_other_weights_and_other_batches(data: Path, tmp_path: Path) -> None:
    trainers = [Trainer(small_config(data, train={"seed": seed}), tmp_path / str(seed), fresh=False) for seed in (0, 1)]
    tokens = []
    for trainer in trainers:
        trainer.metrics.close()
        with trainer.loader:
            tokens.append(next(trainer.loader).tokens)
    assert not torch.equal(tokens[0], tokens[1])
    assert not torch.equal(trainers[0].engine.model.embedding, trainers[1].engine.model.embedding)
    one, two = (table_tensors(trainer.lookup.shards)["layers.0.v.0.rows"] for trainer in trainers)  # type: ignore[attr-defined]
    assert not torch.equal(one, two)


def test_vanilla_and_xgram_start_alike_and_see_the_same_batches(data: Path, tmp_path: Path) -> None:
    trainers = {m: Trainer(small_config(data, m), tmp_path / m, fresh=False) for m in ("vanilla", "xgram")}
    weights = {m: dict(trainer.engine.model.named_parameters()) for m, trainer in trainers.items()}
    assert set(weights["vanilla"]) < set(weights["xgram"])
    assert all(".sites." in name for name in set(weights["xgram"]) - set(weights["vanilla"]))
    for name, value in weights["vanilla"].items():
        assert torch.equal(value, weights["xgram"][name]), name
    batches = {}
    for method, trainer in trainers.items():
        trainer.metrics.close()
        with trainer.loader:
            batches[method] = [next(trainer.loader).tokens for _ in range(3)]
    for vanilla, xgram in zip(batches["vanilla"], batches["xgram"], strict=True):
        assert vanilla.shape == (2, 4, LENGTH)
        assert torch.equal(vanilla, xgram)
    assert not torch.equal(batches["vanilla"][0], batches["vanilla"][1])


def test_accumulation_does_not_change_the_first_losses(data: Path, tmp_path: Path) -> None:
    whole = train(small_config(data, train={"micro_batch": 8}), tmp_path / "whole")
    parts = train(small_config(data, train={"micro_batch": 2}), tmp_path / "parts")
    assert losses(whole) == pytest.approx(losses(parts), rel=1e-5)


def test_a_folder_that_holds_a_run_without_a_checkpoint_is_refused_and_left_alone(data: Path, tmp_path: Path) -> None:
    config = small_config(data, "vanilla", train={"steps": 1})
    run = train(config, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=rf"'{run}' already holds a run without a checkpoint .*--folder DIR.*--fresh"):
        Trainer(config, run, fresh=False)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_fresh_starts_over_and_keeps_what_is_not_the_runs(data: Path, tmp_path: Path) -> None:
    run = train(small_config(data, train={"steps": 3}), tmp_path / "run")
    (run / "notes.txt").write_text("mine")
    train(small_config(data, "vanilla", train={"steps": 2}), run, fresh=True)
    assert [record["step"] for record in read_metrics(run, "train")] == [1, 2]
    assert load_config(run / "config.yaml").memory.method == "vanilla"
    assert not (run / "routing.npz").exists()  # of the run before
    assert len(list((run / "tensorboard").iterdir())) == 1
    assert (run / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_one_sentence(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the run folder .*Not a directory; choose another with --folder"):
        Trainer(small_config(data, "vanilla"), tmp_path / "file" / "run", fresh=False)


def test_bf16_trains_with_finite_losses_and_fp32_weights(data: Path, tmp_path: Path) -> None:
    run = train(small_config(data, train={"precision": "bf16"}), tmp_path / "bf16")
    exact = train(small_config(data), tmp_path / "fp32")
    assert losses(run) == pytest.approx(losses(exact), rel=0.02)
    assert losses(run) != losses(exact)  # it did compute in another precision
    assert {value.dtype for value in saved_weights(run).values()} == {torch.float32}


def test_ctrl_c_ends_after_the_step_with_weights_and_exit_code_130(data: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(small_config(data, train={"steps": 1_000_000})))
    command = [sys.executable, "-m", "xgram_dist", "train", str(recipe), "--folder", str(tmp_path / "run")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.split()[1].startswith("3/"):
                process.send_signal(signal.SIGINT)
                break
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == "stopping after this step (press Ctrl-C again to stop now)\n"
    end = read_metrics(tmp_path / "run")[-1]
    assert (end["kind"], end["complete"], end["validation_perplexity"]) == ("end", False, None)
    assert 3 <= end["step"] < 1_000_000
    assert f"stopped after step {end['step']}" in rest.splitlines()[-1]
    assert end["step"] == read_metrics(tmp_path / "run", "train")[-1]["step"]
    assert list_steps(tmp_path / "run") == [end["step"]]


def signals_in_step(monkeypatch: pytest.MonkeyPatch, at: int, *numbers: signal.Signals) -> None:
    original = train_step

    def step(*arguments: Any, **keywords: Any) -> Any:
        if arguments[-1] == at:
            for number in numbers:
                signal.raise_signal(number)
        return original(*arguments, **keywords)

    monkeypatch.setattr(loop, "train_step", step)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_step_end_and_gives_the_handlers_back(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    signals_in_step(monkeypatch, 2, number)
    assert Trainer(small_config(data, "vanilla"), tmp_path / "run", fresh=False).run() == 130
    assert [record["step"] for record in read_metrics(tmp_path / "run", "train")] == [1, 2]
    assert signal.getsignal(number) is before


def test_a_second_signal_ends_at_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(small_config(data, "vanilla")))
    signals_in_step(monkeypatch, 2, signal.SIGINT, signal.SIGINT)
    assert main(["train", str(recipe), "--folder", str(tmp_path / "run")]) == 130
    assert "stopped by Ctrl-C" in capsys.readouterr().err
    assert [record["step"] for record in read_metrics(tmp_path / "run", "train")] == [1]
    assert list_steps(tmp_path / "run") == []


def test_bf16_follows_fp32_within_two_percent_over_200_steps(data: Path, tmp_path: Path) -> None:
    curves = {}
    for precision in ("fp32", "bf16"):
        folder = tmp_path / precision
        train = {"steps": 200, "precision": precision, "validation_sequences": 4}
        assert Trainer(small_config(data, train=train), folder, fresh=False).run() == 0
        curves[precision] = torch.tensor([record["loss"] for record in read_metrics(folder, "train")])
    assert len(curves["fp32"]) == 200
    assert float(((curves["bf16"] - curves["fp32"]) / curves["fp32"]).abs().max()) < 0.02
    assert curves["fp32"][-1] < 0.8 * curves["fp32"][0]  # it learned, so there was something to lose
