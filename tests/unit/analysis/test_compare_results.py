"""Comparison, state and table of a comparison, on run folders made by hand."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from run_folders import FIGURES, MEMORY, MODEL, Parsed, add_figures, records

from xgram_dist.analysis.compare.page import average_curve
from xgram_dist.analysis.compare.results import as_json, markdown, read_results, table_rows, tokens_to_reach
from xgram_dist.analysis.compare.runs import Comparison, ComparisonState, parse_seeds, plan_runs
from xgram_dist.cli.main import main
from xgram_dist.config import dump_config
from xgram_dist.errors import UserError


def write_recipe(folder: Path, method: str, **keys: object) -> str:
    tree = {"name": f"hand-{method}", "model": MODEL, "memory": MEMORY[method], **keys}
    file = folder / f"{method}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return str(file)


@pytest.fixture
def recipes(tmp_path: Path) -> list[str]:
    return [write_recipe(tmp_path, "xgram"), write_recipe(tmp_path, "vanilla")]


def train_by_hand(plan: Comparison, state: ComparisonState, shifts: dict[tuple[str, int], float]) -> None:
    for run in plan.runs:
        shift = shifts.get((run.label, run.seed))
        if shift is None:
            continue
        folder = state.folder(run)
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(dump_config(run.config))
        lines = records(run.config.memory.method, run.config.train.steps, shift)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))


def test_every_recipe_with_every_seed(recipes: list[str]) -> None:
    plan = plan_runs(recipes, ["optimizer.learning_rate=1e-4"], (0, 7), 100, None)
    assert [run.key for run in plan.runs] == [
        "hand-xgram-seed-0",
        "hand-vanilla-seed-0",
        "hand-xgram-seed-7",
        "hand-vanilla-seed-7",
    ]
    assert plan.baseline == "hand-vanilla"
    last = plan.runs[-1].config
    assert (last.train.seed, last.train.steps, last.train.validate_every) == (7, 100, 5)
    assert last.optimizer.learning_rate == 1e-4
    assert last.checkpoint.minutes == 5


def test_a_recipes_own_checkpoints_and_given_validations_stay(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "vanilla", checkpoint={"every": 10})
    config = plan_runs([recipe], ["train.validate_every=50"], (0,), None, None).runs[0].config
    assert (config.checkpoint.minutes, config.train.validate_every, config.train.steps) == (0, 50, 1000)


@pytest.mark.parametrize(
    ("overrides", "steps", "baseline", "expected"),
    [
        (["train.seed=3"], 5, None, "train.seed comes from --seeds"),
        (["train.steps=3"], 5, None, "train.steps comes from --steps"),
        (["name=x"], None, None, "comes from the recipe's own name"),
        ([], 0, None, "--steps 0 is not at least 1"),
        ([], 5, "other", "--baseline other is none of the recipes: hand-xgram, hand-vanilla"),
    ],
)
def test_refused(
    recipes: list[str], overrides: list[str], steps: int | None, baseline: str | None, expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        plan_runs(recipes, overrides, (0,), steps, baseline)


def test_two_recipes_of_one_name_are_refused(recipes: list[str]) -> None:
    with pytest.raises(UserError, match="two recipes are named 'hand-xgram'"):
        plan_runs([recipes[0], recipes[0]], [], (0,), None, None)


@pytest.mark.parametrize("text", ["", "1,1", "a", "-1", "1,,2"])
def test_seeds_are_different_whole_numbers(text: str) -> None:
    with pytest.raises(UserError, match="--seeds"):
        parse_seeds(text)


def test_tokens_to_a_loss_lie_on_the_line_between_validations() -> None:
    points = [(10.0, 8.0), (20.0, 6.0), (30.0, 6.5), (40.0, 2.0)]

    def walked(target: float) -> float | None:
        """In tiny steps along the curve."""
        for (x0, y0), (x1, y1) in pairwise(points):
            for part in range(10_001):
                if y0 + (y1 - y0) * part / 10_000 <= target + 1e-9:
                    return x0 + (x1 - x0) * part / 10_000
        return None

    for target in (7.9, 7.0, 6.0, 5.0, 2.0):
        assert tokens_to_reach(points, target) == pytest.approx(walked(target), abs=2e-3)
    assert tokens_to_reach(points, 1.9) is None
    assert tokens_to_reach(points, 9.0) == 10.0
    assert tokens_to_reach([], 9.0) is None


def test_the_table_has_means_and_standard_errors_over_seeds(recipes: list[str], tmp_path: Path) -> None:
    plan = plan_runs(recipes, [], (0, 1, 2), 100, None)
    state = ComparisonState(tmp_path / "out")
    shifts = {("hand-vanilla", 0): 0.0, ("hand-vanilla", 1): 0.1, ("hand-vanilla", 2): 0.2}
    shifts |= {("hand-xgram", 0): -1.0, ("hand-xgram", 1): -0.8, ("hand-xgram", 2): -1.2}
    train_by_hand(plan, state, shifts)
    results = read_results(plan, state)
    tree = as_json(results)
    xgram, vanilla = tree["recipes"]
    perplexities = [2.0 ** (4.0 + shift) for shift in (-1.0, -0.8, -1.2)]
    mean = sum(perplexities) / 3
    error = math.sqrt(sum((p - mean) ** 2 for p in perplexities) / 2 / 3)
    assert xgram["validation_perplexity"]["mean"] == pytest.approx(mean)
    assert xgram["validation_perplexity"]["standard_error"] == pytest.approx(error)
    # Paired by seed: -1.0, -0.9, -1.4.
    assert xgram["loss_against_baseline"]["mean"] == pytest.approx(-1.1)
    # The baseline's loss is 4.1. The curves fall by 4 over 25.6 M tokens... of 1024 sequences of 256.
    tokens = 100 * 1024 * 256
    expected = [tokens * (8.0 + shift - 4.1) / 4.0 for shift in (-1.0, -0.8, -1.2)]
    assert xgram["tokens_to_baseline_loss"]["mean"] == pytest.approx(sum(expected) / 3)
    assert xgram["tokens_to_baseline_loss"]["share"] == pytest.approx(sum(expected) / 3 / tokens)
    assert vanilla["tokens_to_baseline_loss"]["reached"] == 2  # seeds 0 and 1 get to the mean, 2 does not
    assert xgram["table_parameters"] == 4 * 2 * 2048 * 64
    assert vanilla["table_parameters"] == 0
    assert xgram["peak_bytes"] == 401 << 20
    rows = table_rows(results)
    assert rows[0][1] == f"{mean:.3f} ± {error:.3f}"
    assert rows[1][0] == "hand-vanilla (baseline)"
    assert rows[1][4:6] == ["none", "none"]
    assert rows[1][6:8] == ["26.21 M", "100.0 %"]
    text = markdown(results, "<b>title</b>")
    assert "<b>" not in text
    assert len([line for line in text.splitlines() if line.startswith("|")]) == 4


def test_a_loss_that_is_not_reached_is_said(recipes: list[str], tmp_path: Path) -> None:
    plan = plan_runs(recipes, [], (0, 1), 100, None)
    state = ComparisonState(tmp_path / "out")
    shifts = {("hand-vanilla", 0): 0.0, ("hand-vanilla", 1): 0.0, ("hand-xgram", 0): -0.5, ("hand-xgram", 1): 0.5}
    train_by_hand(plan, state, shifts)
    assert table_rows(read_results(plan, state))[0][6:8] == ["not reached by 1 of 2", "-"]


def test_runs_that_are_not_there_are_missing_and_not_guessed(recipes: list[str], tmp_path: Path) -> None:
    plan = plan_runs(recipes, [], (0, 1), 100, None)
    state = ComparisonState(tmp_path / "out")
    train_by_hand(plan, state, {("hand-vanilla", 0): 0.0})
    state.set_failure(plan.runs_of("hand-xgram")[0], "out of <memory>")
    tree = as_json(read_results(plan, state))
    xgram, vanilla = tree["recipes"]
    assert xgram["validation_perplexity"] == {"mean": None, "standard_error": None}
    assert [seed["status"] for seed in xgram["seeds"]] == ["failed: out of <memory>", "not started"]
    assert vanilla["complete"] == 1
    row = table_rows(read_results(plan, state))[0]
    assert row[1] == row[2] == row[6] == row[8] == row[9] == "missing"


def test_the_page_from_the_command_line(recipes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "<script>out"
    plan = plan_runs(recipes, [], (0, 1), 100, None)
    state = ComparisonState(out)
    train_by_hand(plan, state, {(label, seed): 0.1 * seed for label in plan.labels for seed in (0, 1)})
    for run in plan.runs:
        add_figures(state.folder(run), {**FIGURES, "run": run.key})
    words = [*recipes, "--seeds", "0,1", "--steps", "100", "--out", str(out), "--no-train"]
    assert main(["compare", *words]) == 0
    printed = capsys.readouterr().out
    assert "hand-vanilla (baseline)" in printed
    text = (out / "compare.html").read_text(encoding="utf-8")
    found = Parsed(text)
    assert found.ids == ["summary", "curves", "throughput", "diagnostics", "runs", "recipes"]
    assert found.stands_alone()
    for part in ("4 of 4 runs complete", "memory.method", "Cosine: Hidden states", "0.159", "2 of 2", "<script>out"):
        assert part in found.text, part
    assert (out / "compare.md").read_text().startswith("# Comparison of hand-xgram, hand-vanilla")
    assert main(["compare", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((out / "results.json").read_text())


def test_a_folder_with_another_run_is_refused(recipes: list[str], tmp_path: Path) -> None:
    state = ComparisonState(tmp_path / "out")
    train_by_hand(plan := plan_runs(recipes, [], (0,), 100, None), state, {("hand-xgram", 0): 0.0})
    state.check(plan)
    with pytest.raises(UserError, match=r"hand-xgram-seed-0' holds a run with train.steps = 100, but 200 is requested"):
        state.check(plan_runs(recipes, ["train.validate_every=5"], (0,), 200, None))


def test_curves_are_averaged_where_all_have_a_value() -> None:
    assert average_curve([[(1.0, 2.0), (2.0, 4.0)], [(1.0, 4.0)], []]) == [(1.0, 3.0)]
    assert average_curve([[], []]) == []
