"""The value of a key that suits each recipe best, by runs on one seed, so that all are compared as tuned alike.

    OUT/tune/              a comparison of its own: every recipe with every value
    OUT/tune/tuned.json    the losses, and the best value of each recipe

A recipe that does not have the key is not tuned.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xgram_dist.analysis.compare.runs import Comparison, ComparisonState, PlannedRun, plan_run
from xgram_dist.analysis.report import runs as figures
from xgram_dist.errors import UserError
from xgram_dist.files import write_atomically
from xgram_dist.model.methods.base import load_recipe, method_of

FOLDER = "tune"
FILE = "tuned.json"


@dataclass(frozen=True)
class Tuning:
    key: str
    values: tuple[str, ...]

    def override(self, value: str) -> str:
        return f"{self.key}={value}"


@dataclass(frozen=True)
class Tuned:
    """The outcome of a recipe."""

    losses: Mapping[str, float]
    """By value; runs that failed have none."""

    @property
    def best(self) -> str:
        return min(self.losses, key=lambda value: self.losses[value])


def parse_tuning(text: str) -> Tuning:
    """KEY=VALUE,VALUE,..."""
    key, _, rest = text.partition("=")
    values = tuple(value.strip() for value in rest.split(","))
    plain = re.fullmatch(r"[a-z_.]+", key) and all(re.fullmatch(r"[\w.+-]{1,40}", value) for value in values)
    if not plain or len(set(values)) != len(values) or len(values) < 2:
        raise UserError(
            f"--tune {text} is not a key and at least two different values, such as "
            "memory.learning_rate.multiplier=1,3,10,30"
        )
    return Tuning(key, values)


def plan_tuning(
    recipes: list[str], overrides: list[str], tuning: Tuning, seed: int, steps: int | None, scale: str | None
) -> Comparison:
    """A run for each value of every recipe that has the key."""
    runs: list[PlannedRun] = []
    refused: UserError | None = None
    for recipe in recipes:
        config = load_recipe(recipe, overrides, scale)
        if method_of(config).backbone_only and tuning.key.startswith("memory."):
            continue
        try:
            for value in tuning.values:
                label, tuned = f"{config.name}-{value}", [*overrides, tuning.override(value)]
                runs.append(plan_run(recipe, label, tuned, seed, steps, scale))
        except UserError as error:  # without the override the recipe is good
            refused = error
    if not runs:
        raise UserError(f"--tune {tuning.key}: no recipe takes it" + (f": {refused}" if refused else ""))
    labels = tuple(run.label for run in runs)
    return Comparison(tuple(runs), labels, (seed,), labels[0])


def read_tuned(
    recipes: list[str],
    overrides: list[str],
    tuning: Tuning,
    plan: Comparison,
    state: ComparisonState,
    scale: str | None,
) -> dict[str, Tuned]:
    """By recipe; also written to a file. Every recipe that was tuned must have a complete run."""
    losses = {run.label: figures.final_validation(run_records) for run, run_records in _complete(plan, state)}
    tuned: dict[str, Tuned] = {}
    for recipe in recipes:
        name = load_recipe(recipe, overrides, scale).name
        known = {value: losses.get(f"{name}-{value}") for value in tuning.values if f"{name}-{value}" in plan.labels}
        if not known:
            continue
        found = {value: loss for value, loss in known.items() if loss is not None and loss == loss}
        if not found:
            raise UserError(f"{name}: no run with a value of {tuning.key} was completed; see '{state.out}/logs'")
        tuned[name] = Tuned(found)
    write_atomically(state.out / FILE, json.dumps(as_json(tuning, tuned), indent=1) + "\n")
    return tuned


def _complete(plan: Comparison, state: ComparisonState) -> list[tuple[PlannedRun, figures.Run]]:
    records = [(run, state.read(run)) for run in plan.runs]
    return [(run, one) for run, one in records if one is not None and one.complete]


def as_json(tuning: Tuning, tuned: dict[str, Tuned]) -> dict[str, Any]:
    return {
        "key": tuning.key,
        "recipes": {name: {"best": one.best, "losses": dict(one.losses)} for name, one in tuned.items()},
    }


def table(tuning: Tuning, tuned: dict[str, Tuned]) -> tuple[list[str], list[list[str]]]:
    """(header, rows): validation loss by value, the best one marked."""

    def cell(one: Tuned, value: str) -> str:
        if value not in one.losses:
            return "failed"
        return f"{one.losses[value]:.4f}" + (" *" if value == one.best else "")

    rows = [[name, *(cell(one, value) for value in tuning.values)] for name, one in tuned.items()]
    return [f"loss by {tuning.key}", *tuning.values], rows
