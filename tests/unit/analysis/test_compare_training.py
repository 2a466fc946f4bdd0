"""A comparison that is interrupted and goes on ends with the table of one that was not."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from train_helpers import small_tree

from xgram_dist.analysis.compare.execute import diagnose_all, train_all
from xgram_dist.analysis.compare.results import as_json, read_results
from xgram_dist.analysis.compare.runs import Comparison, ComparisonState, plan_runs
from xgram_dist.cli.main import main
from xgram_dist.console import Progress
from xgram_dist.model.methods.base import load_recipe
from xgram_dist.train.metrics import Metrics

STEPS = 4


@pytest.fixture
def recipes(data: Path, tmp_path: Path) -> list[str]:
    found = []
    for method in ("vanilla", "xgram"):
        file = tmp_path / f"{method}.yaml"
        file.write_text(yaml.safe_dump(small_tree(data, method)))
        found.append(str(file))
    return found


def in_this_process(words: list[str], log: Path, on_line: Callable[[str], None]) -> tuple[int, str]:
    """Instead of a process for each run."""
    return main(words), ""


def figures(plan: Comparison, state: ComparisonState) -> dict[str, Any]:
    """All but what depends on the clock, and on where it was written."""
    tree = as_json(read_results(plan, state))
    for one in tree["recipes"]:
        del one["tokens_per_second"], one["peak_bytes"]
        for seed in one["seeds"]:
            del seed["folder"]
    return tree


def test_interrupted_and_resumed_gives_the_same_table(
    recipes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_runs(recipes, [], (0, 1), STEPS, None)
    whole, broken = ComparisonState(tmp_path / "whole"), ComparisonState(tmp_path / "broken")
    assert train_all(plan, whole, 1, print, lambda: None, in_this_process) == 0
    trained: list[str] = []
    write = Metrics.write

    def stop_in_the_third_run(self: Metrics, kind: str, step: int, **values: Any) -> None:
        write(self, kind, step, **values)
        if len(trained) == 3 and kind == "train" and step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    def noted(words: list[str], log: Path, on_line: Callable[[str], None]) -> tuple[int, str]:
        trained.append(Path(words[1]).stem)
        return in_this_process(words, log, on_line)

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "write", stop_in_the_third_run)
        assert train_all(plan, broken, 1, print, lambda: None, noted) == 130
    between = figures(plan, broken)["recipes"]
    assert [one["complete"] for one in between] == [1, 1]
    assert between[0]["seeds"][1]["status"] == f"step 2 of {STEPS}"
    assert train_all(plan, ComparisonState(tmp_path / "broken"), 1, print, lambda: None, noted) == 0
    # Two complete runs are not repeated; the third goes on; the fourth is trained.
    keys = [run.key for run in plan.runs]
    assert trained == [*keys[:3], *keys[2:]]
    assert figures(plan, broken) == figures(plan, whole)


def test_a_run_that_fails_is_noted_and_the_others_go_on(recipes: list[str], tmp_path: Path) -> None:
    plan = plan_runs(recipes, [], (0,), STEPS, None)
    state = ComparisonState(tmp_path / "out")
    pages: list[int] = []

    def failing(words: list[str], log: Path, on_line: Callable[[str], None]) -> tuple[int, str]:
        return (1, "the disk is full") if "vanilla" in words[1] else in_this_process(words, log, on_line)

    assert train_all(plan, state, 1, print, lambda: pages.append(1), failing) == 1
    assert len(pages) == 2
    again = ComparisonState(tmp_path / "out")
    assert again.failure(plan.runs[0]) == "the disk is full"
    assert again.complete(plan.runs[1])
    assert train_all(plan, again, 1, print, lambda: None, in_this_process) == 0
    assert ComparisonState(tmp_path / "out").failure(plan.runs[0]) is None


def test_complete_runs_are_diagnosed_once(recipes: list[str], tmp_path: Path) -> None:
    plan = plan_runs(recipes, [], (0,), STEPS, None)
    state = ComparisonState(tmp_path / "out")
    asked: list[str] = []

    def noted(words: list[str], log: Path, on_line: Callable[[str], None]) -> tuple[int, str]:
        asked.append(words[0])
        return in_this_process(words, log, on_line)

    assert train_all(plan, state, 1, print, lambda: None, noted) == 0
    assert diagnose_all(plan, state, 1, 4, print, noted) == 0
    assert diagnose_all(plan, state, 1, 4, print, noted) == 0
    assert asked == ["train", "train", "diagnose", "diagnose"]
    file = state.folder(plan.runs[1]) / "diagnose" / f"step-{STEPS:08d}" / "figures.json"
    assert json.loads(file.read_text())["figures"]["movement"]["cv"] > 0


def test_the_whole_command_on_two_ranks(recipes: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["compare", recipes[1], "--seeds", "3", "--steps", "2", "--ranks", "2", "--sequences", "4"]
    assert main([*words, "--out", str(out), "train.log_every=1"]) == 0
    said = capfd.readouterr()
    assert "1 runs, 0 of them complete" in said.err
    assert "small-xgram (baseline)" in said.out
    (recipe,) = json.loads((out / "results.json").read_text())["recipes"]
    assert recipe["complete"] == 1
    assert recipe["wire_bytes_a_step"]["mean"] > 0
    assert (out / "logs" / "small-xgram-seed-3.txt").read_text().count("== xgram-dist") == 2
    assert (out / "runs" / "small-xgram-seed-3" / "diagnose" / "step-00000002" / "figures.json").is_file()


def test_runs_at_once_end_as_one_after_the_other(recipes: list[str], tmp_path: Path) -> None:
    plan = plan_runs(recipes, [], (0, 1), STEPS, None)
    both, each = ComparisonState(tmp_path / "both"), ComparisonState(tmp_path / "each")
    assert train_all(plan, both, 1, print, lambda: None, at_once=2) == 0
    assert train_all(plan, each, 1, print, lambda: None, in_this_process) == 0
    assert figures(plan, both) == figures(plan, each)


def test_a_signal_stops_all_runs_at_once_and_starts_no_other(
    recipes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_runs(recipes, ["train.log_every=1"], (0, 1), 4000, None)
    state = ComparisonState(tmp_path / "out")

    def stop(self: Progress, amount: float = 1.0, **fields: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Progress, "update", stop)
    assert train_all(plan, state, 1, print, lambda: None, at_once=2) == 130
    started = sorted(path.name for path in (tmp_path / "out" / "runs").iterdir())
    assert started == sorted(run.key for run in plan.runs[:2])
    assert not any(state.complete(run) for run in plan.runs)


def test_tuned_recipes_train_with_the_value_of_the_lowest_loss(
    recipes: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["compare", *recipes, "--steps", "6", "--no-diagnose", "--out", str(out)]
    assert main([*words, "--tune", "memory.learning_rate.multiplier=1,30", "--tune-steps", "3"]) == 0
    assert "loss by memory.learning_rate.multiplier" in capfd.readouterr().out
    tuned = json.loads((out / "tune" / "tuned.json").read_text())["recipes"]
    assert list(tuned) == ["small-xgram"]  # vanilla has no tables
    losses = tuned["small-xgram"]["losses"]
    for value, loss in losses.items():
        records = (out / "tune" / "runs" / f"small-xgram-{value}-seed-0" / "metrics.jsonl").read_text().splitlines()
        validations = [record for record in map(json.loads, records) if record["kind"] == "validation"]
        assert loss == validations[-1]["loss"]
    best = min(losses, key=losses.__getitem__)
    assert tuned["small-xgram"]["best"] == best
    config = yaml.safe_load((out / "runs" / "small-xgram-seed-0" / "config.yaml").read_text())
    assert config["memory"]["learning_rate"]["multiplier"] == float(best)
    assert config["train"]["steps"] == 6


@pytest.mark.parametrize("text", ["memory.window", "memory.window=1", "memory.window=1,1", "memory.window=1,$(x)"])
def test_a_tuning_that_is_none(recipes: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", recipes[1], "--tune", text]) == 2
    assert "is not a key and at least two different values" in capsys.readouterr().err


def test_tuning_a_key_that_no_recipe_has(recipes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *recipes, "--tune", "memory.mort.top=1,7"]) == 2
    assert "no recipe takes it" in capsys.readouterr().err


def test_a_scale_replaces_all_but_name_and_memory(recipes: list[str]) -> None:
    scale = Path(__file__).parents[3] / "recipes" / "text" / "scale.yaml"
    config, original = load_recipe(recipes[1], [], scale), load_recipe(recipes[1])
    assert config.name == original.name
    assert (config.model.width, config.train.steps) == (96, 480)
    routing = original.memory.routing.model_copy(update={"vip": 50, "buckets": 16})
    assert config.memory == original.memory.model_copy(update={"routing": routing, "count_updates": True})
