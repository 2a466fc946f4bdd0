"""The runs of a comparison (every recipe with every seed) and their progress.

    OUT/compare.json      folders of runs outside runs/, and why runs failed
    OUT/recipes/          the resolved recipe of each run
    OUT/runs/             a run folder each; array-N/ holds runs that were submitted together
    OUT/logs/             the output of each run
    OUT/tune/             with --tune: runs that choose a value for each recipe
    OUT/compare.html, compare.md, results.json

A run is complete when its metrics say so, and is then never repeated. An incomplete run resumes from its checkpoint.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xgram_dist.analysis.report.runs import Run, read_run
from xgram_dist.config import Config, dump_config, load_config
from xgram_dist.errors import BadFileError, UserError
from xgram_dist.files import write_atomically
from xgram_dist.model.methods.base import load_recipe, method_of
from xgram_dist.untrusted import read_json

VALIDATIONS = 20
"""During a run. They set the resolution of the tokens needed to reach a loss."""
CHECKPOINT_MINUTES = 5
"""For recipes that save only at the end, so that an interrupted run can resume."""
SET_BY_COMPARE = {"train.seed": "--seeds", "train.steps": "--steps", "name": "the recipe's own name"}


@dataclass(frozen=True)
class PlannedRun:
    label: str
    """The recipe's name."""
    seed: int
    config: Config

    @property
    def key(self) -> str:
        return self.config.name


@dataclass(frozen=True)
class Comparison:
    runs: tuple[PlannedRun, ...]
    """Seed by seed, so that all recipes can be compared on one seed before any is trained on the next."""
    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    baseline: str

    def runs_of(self, label: str) -> list[PlannedRun]:
        return [run for run in self.runs if run.label == label]


def parse_seeds(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{1,9}", word) for word in words) or len(set(words)) != len(words):
        raise UserError(f"--seeds {text} is not a list of different whole numbers such as 0,1,2")
    return tuple(int(word) for word in words)


def plan_runs(
    recipes: list[str],
    overrides: list[str],
    seeds: tuple[int, ...],
    steps: int | None,
    baseline: str | None,
    scale: str | None = None,
    tuned: Mapping[str, str] | None = None,
) -> Comparison:
    """`steps`: of every run; None: each recipe's own. `baseline`: a recipe's name; None: the first recipe without
    tables, else the first. `scale`: a recipe that replaces everything but name and memory. `tuned`: an override for
    some recipes, by name."""
    if not recipes:
        raise UserError("give at least one recipe, for example recipes/tiny/vanilla.yaml recipes/tiny/xgram.yaml")
    if steps is not None and steps < 1:
        raise UserError(f"--steps {steps} is not at least 1")
    for override in overrides:
        key = override.partition("=")[0]
        if key in SET_BY_COMPARE and (key != "train.steps" or steps is not None):
            raise UserError(
                f"override '{override}': in a comparison {key} comes from {SET_BY_COMPARE[key]}; remove the override"
            )
    configs = [load_recipe(recipe, overrides, scale) for recipe in recipes]
    labels = [config.name for config in configs]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"two recipes are named '{label}'; give each a `name` of its own")
    if baseline is None:
        baseline = next((c.name for c in configs if method_of(c).backbone_only), labels[0])
    if baseline not in labels:
        raise UserError(f"--baseline {baseline} is none of the recipes: {', '.join(labels)}")
    tuned = tuned or {}
    runs = [
        plan_run(recipe, label, [*overrides, *([tuned[label]] if label in tuned else [])], seed, steps, scale)
        for seed in seeds
        for recipe, label in zip(recipes, labels, strict=True)
    ]
    return Comparison(tuple(runs), tuple(labels), seeds, baseline)


def plan_run(
    recipe: str, label: str, overrides: list[str], seed: int, steps: int | None, scale: str | None
) -> PlannedRun:
    config = load_recipe(recipe, overrides, scale)
    steps = steps or config.train.steps
    ours = [f"name={label}-seed-{seed}", f"train.seed={seed}", f"train.steps={steps}"]
    given = {override.partition("=")[0] for override in overrides}
    if "train.validate_every" not in given:
        ours.append(f"train.validate_every={max(1, steps // VALIDATIONS)}")
    saves = config.checkpoint.every or config.checkpoint.minutes
    if not saves and not given & {"checkpoint.every", "checkpoint.minutes"}:
        ours.append(f"checkpoint.minutes={float(CHECKPOINT_MINUTES)}")
    return PlannedRun(label, seed, load_recipe(recipe, [*overrides, *ours], scale))


FILE = "compare.json"


def _is_inside(folder: object) -> bool:
    """Whether it is the path of a folder below the comparison's."""
    if not isinstance(folder, str) or not 0 < len(folder) <= 255 or not folder.isprintable():
        return False
    return not Path(folder).is_absolute() and ".." not in Path(folder).parts


class ComparisonState:
    """Progress of a comparison: OUT/compare.json and the run folders."""

    def __init__(self, out: Path):
        self.out = out
        self._tree: dict[str, Any] = {"folders": {}, "failures": {}}
        file = out / FILE
        if file.exists():
            try:
                tree = read_json(file)
                self._tree = {key: dict(tree[key]) for key in self._tree}
                if not all(map(_is_inside, self._tree["folders"].values())):
                    raise ValueError
            except (OSError, BadFileError, ValueError, KeyError, TypeError):
                raise UserError(f"'{file}' is not the state of a comparison; choose another --out") from None

    def folder(self, run: PlannedRun) -> Path:
        return self.out / self._tree["folders"].get(run.key, f"runs/{run.key}")

    def has_folder(self, run: PlannedRun) -> bool:
        """Whether `set_folder` was called for it."""
        return run.key in self._tree["folders"]

    def set_folder(self, run: PlannedRun, folder: Path) -> None:
        self._tree["folders"][run.key] = str(folder.absolute().relative_to(self.out.absolute()))
        self._write()

    def failure(self, run: PlannedRun) -> str | None:
        reason = self._tree["failures"].get(run.key)
        return None if reason is None else str(reason)

    def set_failure(self, run: PlannedRun, reason: str | None) -> None:
        """None clears an earlier failure."""
        if reason is None and run.key not in self._tree["failures"]:
            return
        self._tree["failures"].pop(run.key, None)
        if reason is not None:
            self._tree["failures"][run.key] = reason
        self._write()

    def write_recipe(self, run: PlannedRun) -> Path:
        """Write the resolved recipe; its file."""
        file = self.out / "recipes" / f"{run.key}.yaml"
        write_atomically(file, dump_config(run.config))
        return file

    def log(self, run: PlannedRun) -> Path:
        return self.out / "logs" / f"{run.key}.txt"

    def read(self, run: PlannedRun) -> Run | None:
        """Its records so far; None if it has not started."""
        folder = self.folder(run)
        return read_run(folder) if (folder / "metrics.jsonl").is_file() else None

    def complete(self, run: PlannedRun) -> bool:
        records = self.read(run)
        return records is not None and records.complete

    def check(self, comparison: Comparison) -> None:
        """Refuse folders that hold a run of another recipe."""
        for run in comparison.runs:
            file = self.folder(run) / "config.yaml"
            if not file.is_file():
                continue
            difference = _first_difference(load_config(file), run.config)
            if difference is not None:
                raise UserError(
                    f"'{self.folder(run)}' holds a run with {difference}; choose another --out, or remove that folder"
                )

    def _write(self) -> None:
        write_atomically(self.out / FILE, json.dumps(self._tree, indent=1) + "\n")


def _first_difference(existing: Config, planned: Config) -> str | None:
    """The first key in which they differ, as a phrase."""
    old, new = flatten(existing), flatten(planned)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            return f"{key} = {old.get(key)}, but {new.get(key)} is requested now"
    return None


def flatten(config: Config) -> dict[str, Any]:
    """Every key in dotted form, and its value."""

    def walk(tree: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(tree, dict) or not tree:
            return {prefix: tree}
        return {k: v for name, below in tree.items() for k, v in walk(below, f"{prefix}.{name}".lstrip(".")).items()}

    return walk(config.model_dump(mode="json"), "")
