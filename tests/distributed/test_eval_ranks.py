"""Evaluation on several ranks, and in the course of training, finds what one process finds."""

import json
from pathlib import Path

import pytest
import torch
from eval_helpers import make_benchmarks
from inference_helpers import recipe
from ranks_helper import run_ranks
from train_helpers import read_metrics

from xgram_dist.cli.main import main
from xgram_dist.eval.scoring import CheckpointScorer, EngineScorer, ScoringInput
from xgram_dist.inference.model import Checkpoint
from xgram_dist.train.trainer import Trainer

INPUTS = [
    ScoringInput([5, 6, 7, 8, 9], [[8, 9, 11], [40]]),
    ScoringInput([30, 31], [[31, 2]]),
    ScoringInput(list(range(31)), [[30, 4]]),
]


def _train_and_score(ranks, config, folder: Path) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(config, folder, fresh=False, ranks=ranks)
    close, trainer.lookup.close = trainer.lookup.close, lambda: None
    assert trainer.run() == 0
    found = EngineScorer(config, trainer.engine, trainer.lookup).score(INPUTS)
    close()
    if ranks.first:
        (folder / "scores.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("size", "parallel"),
    [
        (4, {"engine": "hsdp", "tensor": 2, "sequence_parallel": True}),
        (2, {"engine": "deepspeed", "zero_stage": 3}),
        (4, {"engine": "hsdp", "context": 2}),
        (2, {"engine": "replicated", "pipeline": 2}),
    ],
    ids=["hsdp-tensor", "zero-3", "context", "pipeline"],
)
def test_scores_in_training_are_those_of_the_checkpoint(data: Path, tmp_path: Path, size: int, parallel: dict) -> None:
    benchmarks = make_benchmarks(tmp_path / "benchmarks", 5)
    settings = {"every": 3, "tasks": ("piqa", "boolq"), "limit": 5, "data": str(benchmarks)}
    config = recipe(data, "all", eval=settings, train={"steps": 5})
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})
    folder = tmp_path / "run"
    run_ranks(_train_and_score, size, config, folder)
    scorer = CheckpointScorer(Checkpoint.find(folder).load(torch.device("cpu")))
    expected = scorer.score(INPUTS)
    found = json.loads((folder / "scores.json").read_text())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(
            torch.tensor([s[0] for s in ours]), torch.tensor([s[0] for s in theirs]), rtol=1e-4, atol=1e-4
        )
        assert [s[1] for s in ours] == [s[1] for s in theirs]
    records = read_metrics(folder, "eval")
    assert [record["step"] for record in records] == [3, 5]
    assert all(0 <= record[task] <= 100 for record in records for task in settings["tasks"])


def test_two_ranks_find_what_one_finds(data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    benchmarks = make_benchmarks(tmp_path / "benchmarks", 7)
    assert Trainer(recipe(data), tmp_path / "run", fresh=False).run() == 0
    words = ["eval", str(tmp_path / "run"), "--tasks", "sciq,boolq", "--data", str(benchmarks), "--batch-tokens", "90"]
    assert main([*words, "--out", str(tmp_path / "one.json")]) == 0
    assert main([*words, "--ranks", "2", "--out", str(tmp_path / "two.json")]) == 0
    one, two = (json.loads((tmp_path / f"{name}.json").read_text())["results"] for name in ("one", "two"))
    assert one == two
    capfd.readouterr()
    assert main([*words[:3], "winogrande", *words[4:], "--ranks", "2"]) == 2
    assert "the data of task 'winogrande' is missing" in capfd.readouterr().err


def test_tasks_are_checked_before_training_starts(data: Path, tmp_path: Path) -> None:
    from xgram_dist.errors import UserError

    config = recipe(data, eval={"every": 1, "tasks": ("piqa",), "data": str(tmp_path / "nowhere")})
    with pytest.raises(UserError, match="is not a folder"):
        Trainer(config, tmp_path / "run", fresh=False)
    assert not (tmp_path / "run").exists()
