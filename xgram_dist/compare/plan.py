"""Which runs a comparison has: every recipe with every seed."""

import re
from dataclasses import dataclass

from xgram_dist.config import Config, load_config
from xgram_dist.errors import UserError

VALIDATIONS = 20
"""In the course of a run: how closely the tokens to a loss can be told."""
CHECKPOINT_MINUTES = 5
"""Where a recipe saves nothing in between, so that an interrupted run goes on."""
SET_HERE = {"train.seed": "--seeds", "train.steps": "--steps", "name": "the recipe's own name"}


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
class Plan:
    runs: tuple[PlannedRun, ...]
    """Seed by seed, so that all recipes can be compared on the first before any is trained on the second."""
    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    baseline: str

    def of(self, label: str) -> list[PlannedRun]:
        return [run for run in self.runs if run.label == label]


def parse_seeds(text: str) -> tuple[int, ...]:
    found = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"\d{1,9}", word) for word in found) or len(set(found)) != len(found):
        raise UserError(f"--seeds {text} is not a list of different whole numbers such as 0,1,2")
    return tuple(int(word) for word in found)


def plan_runs(
    recipes: list[str], overrides: list[str], seeds: tuple[int, ...], steps: int | None, baseline: str | None
) -> Plan:
    """`steps`: of every run; without it, each recipe's own. `baseline`: a recipe's name; without it, the first that
    has no tables, else the first."""
    if not recipes:
        raise UserError("give at least one recipe, for example recipes/tiny/vanilla.yaml recipes/tiny/xgram.yaml")
    if steps is not None and steps < 1:
        raise UserError(f"--steps {steps} is not at least 1")
    for override in overrides:
        key = override.partition("=")[0]
        if key in SET_HERE and (key != "train.steps" or steps is not None):
            raise UserError(f"override '{override}': in a comparison {key} comes from {SET_HERE[key]}; take it out")
    configs = [load_config(recipe, overrides) for recipe in recipes]
    labels = [config.name for config in configs]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"two recipes are named '{label}'; give each a `name` of its own")
    if baseline is None:
        baseline = next((c.name for c in configs if c.memory.method == "vanilla"), labels[0])
    if baseline not in labels:
        raise UserError(f"--baseline {baseline} is none of the recipes: {', '.join(labels)}")
    runs = [
        PlannedRun(config.name, seed, _config(recipe, config, overrides, seed, steps))
        for seed in seeds
        for recipe, config in zip(recipes, configs, strict=True)
    ]
    return Plan(tuple(runs), tuple(labels), seeds, baseline)


def _config(recipe: str, config: Config, overrides: list[str], seed: int, steps: int | None) -> Config:
    steps = steps or config.train.steps
    ours = [f"name={config.name}-seed-{seed}", f"train.seed={seed}", f"train.steps={steps}"]
    given = {override.partition("=")[0] for override in overrides}
    if "train.validate_every" not in given:
        ours.append(f"train.validate_every={max(1, steps // VALIDATIONS)}")
    saves = config.checkpoint.every or config.checkpoint.minutes
    if not saves and not given & {"checkpoint.every", "checkpoint.minutes"}:
        ours.append(f"checkpoint.minutes={float(CHECKPOINT_MINUTES)}")
    return load_config(recipe, [*overrides, *ours])
