"""From run folders to the figures of a comparison. A run that has not got there counts nothing, and says so."""

from dataclasses import dataclass
from typing import Any

from xgram_dist.compare.plan import Plan, PlannedRun
from xgram_dist.compare.state import State
from xgram_dist.plan.budget import plan_budget
from xgram_dist.report import figures
from xgram_dist.report.chart import Point
from xgram_dist.report.numbers import mean, standard_error
from xgram_dist.report.runs import Run


@dataclass(frozen=True)
class SeedResult:
    """One run."""

    planned: PlannedRun
    run: Run | None
    failure: str | None

    @property
    def status(self) -> str:
        if self.run is not None and self.run.complete:
            return "complete"
        if self.failure is not None:
            return f"failed: {self.failure}"
        if self.run is None:
            return "not started"
        steps = [record["step"] for record in (*self.run.train, *self.run.validation)]
        return f"step {max(steps, default=0):,} of {self.planned.config.train.steps:,}"

    @property
    def loss(self) -> float | None:
        """Of the last validation."""
        return None if self.run is None else figures.final_validation(self.run)

    @property
    def perplexity(self) -> float | None:
        return self.run.validation[-1]["perplexity"] if self.run is not None and self.loss is not None else None

    def validation(self) -> list[Point]:
        """(tokens, loss)"""
        if self.run is None:
            return []
        points = figures.curve(self.run, "validation", "loss", by_tokens=False)
        return [(step * self.run.tokens_per_step, loss) for step, loss in points]

    def wire_bytes(self) -> float | None:
        return None if self.run is None else figures.average(self.run, "bytes_sent")


@dataclass(frozen=True)
class RecipeResult:
    label: str
    method: str
    backbone_parameters: int
    table_parameters: int
    other_parameters: int
    """Of extractors, gates and side networks."""
    tokens: int
    """Of a whole run."""
    seeds: list[SeedResult]

    def values(self, what: str) -> list[float]:
        """Of the complete runs that have it."""
        made = [getattr(one, what) for one in self.seeds if one.run is not None and one.run.complete]
        made = [value() if callable(value) else value for value in made]
        return [float(value) for value in made if value is not None]

    def rates(self) -> list[float]:
        found = [figures.tokens_per_second(one.run) for one in self.seeds if one.run is not None and one.run.complete]
        return [rate for rate in found if rate is not None]

    def peaks(self) -> list[float]:
        found = [figures.peak_memory(one.run) for one in self.seeds if one.run is not None and one.run.complete]
        return [float(peak) for peak in found if peak is not None]


@dataclass(frozen=True)
class Results:
    recipes: list[RecipeResult]
    baseline: str

    def recipe(self, label: str) -> RecipeResult:
        return next(one for one in self.recipes if one.label == label)

    @property
    def target(self) -> float | None:
        """The baseline's loss: mean over its seeds."""
        return mean(self.recipe(self.baseline).values("loss"))

    def tokens_to_target(self, label: str) -> list[float | None]:
        """Of each complete run: None where it did not get there."""
        target = self.target
        complete = [one for one in self.recipe(label).seeds if one.loss is not None]
        return [] if target is None else [tokens_to_reach(one.validation(), target) for one in complete]

    def against_baseline(self, label: str) -> list[float]:
        """Difference of the loss to the baseline's with the same seed; below 0 is better."""
        theirs = {one.planned.seed: one.loss for one in self.recipe(self.baseline).seeds}
        pairs = [(one.loss, theirs.get(one.planned.seed)) for one in self.recipe(label).seeds]
        return [mine - other for mine, other in pairs if mine is not None and other is not None]


def read_results(plan: Plan, state: State) -> Results:
    recipes = []
    for label in plan.labels:
        planned = plan.of(label)
        budget = plan_budget(planned[0].config)
        recipes.append(
            RecipeResult(
                label=label,
                method=planned[0].config.memory.method,
                backbone_parameters=budget.backbone_parameters,
                table_parameters=budget.table_parameters,
                other_parameters=budget.extractor_parameters + budget.gate_parameters,
                tokens=budget.training_tokens,
                seeds=[SeedResult(one, state.read(one), state.failure(one)) for one in planned],
            )
        )
    return Results(recipes, plan.baseline)


def tokens_to_reach(points: list[Point], target: float) -> float | None:
    """Where a curve of (tokens, loss) first comes down to a loss, on the straight line between two validations."""
    before: Point | None = None
    for tokens, loss in points:
        if loss <= target:
            if before is None or loss == before[1]:
                return tokens
            return before[0] + (before[1] - target) / (before[1] - loss) * (tokens - before[0])
        before = (tokens, loss)
    return None


def as_json(results: Results) -> dict[str, Any]:
    """All figures, plain."""
    found = []
    for one in results.recipes:
        reached = results.tokens_to_target(one.label)
        known = [value for value in reached if value is not None]
        found.append(
            {
                "recipe": one.label,
                "method": one.method,
                "backbone_parameters": one.backbone_parameters,
                "table_parameters": one.table_parameters,
                "other_parameters": one.other_parameters,
                "tokens": one.tokens,
                "runs": len(one.seeds),
                "complete": len(one.values("loss")),
                "validation_perplexity": _figure(one.values("perplexity")),
                "validation_loss": _figure(one.values("loss")),
                "loss_against_baseline": _figure(results.against_baseline(one.label)),
                "tokens_to_baseline_loss": {
                    **_figure(known),
                    "reached": len(known),
                    "share": mean(known) / results.recipe(results.baseline).tokens if known else None,  # type: ignore[operator]
                },
                "tokens_per_second": _figure(one.rates()),
                "peak_bytes": max(one.peaks(), default=None),
                "wire_bytes_a_step": _figure(one.values("wire_bytes")),
                "seeds": [
                    {
                        "seed": seed.planned.seed,
                        "folder": None if seed.run is None else str(seed.run.folder),
                        "status": seed.status,
                        "validation_perplexity": seed.perplexity,
                    }
                    for seed in one.seeds
                ],
            }
        )
    return {"baseline": results.baseline, "baseline_loss": results.target, "recipes": found}


def _figure(values: list[float]) -> dict[str, Any]:
    return {"mean": mean(values), "standard_error": standard_error(values)}
