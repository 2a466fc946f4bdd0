"""Results of a comparison: figures from run folders, as JSON, as table rows and as Markdown.

Figures of a recipe are means over its complete runs; an incomplete run does not count, and its status says why.
"""

from dataclasses import dataclass
from typing import Any

from xgram_dist.analysis.compare.runs import Comparison, ComparisonState, PlannedRun
from xgram_dist.analysis.report import runs as figures
from xgram_dist.analysis.report.chart import Point
from xgram_dist.analysis.report.html import (
    MISSING_TEXT,
    mean,
    no_decimals,
    parameters,
    percent,
    size,
    standard_error,
    thousands,
    three_decimals,
    with_error,
)
from xgram_dist.analysis.report.runs import Run
from xgram_dist.estimate.flops import plan_budget


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

    @property
    def wire_bytes(self) -> float | None:
        """Of the first rank's table exchange, mean over steps."""
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
    """Of a complete run."""
    seeds: list[SeedResult]

    def values(self, what: str) -> list[float]:
        """An attribute of `SeedResult` for the complete runs that have it."""
        values = [getattr(one, what) for one in self.seeds if one.run is not None and one.run.complete]
        return [float(value) for value in values if value is not None]

    def rates(self) -> list[float]:
        rates = [figures.tokens_per_second(one.run) for one in self.seeds if one.run is not None and one.run.complete]
        return [rate for rate in rates if rate is not None]

    def peaks(self) -> list[float]:
        peaks = [figures.peak_memory(one.run) for one in self.seeds if one.run is not None and one.run.complete]
        return [float(peak) for peak in peaks if peak is not None]


@dataclass(frozen=True)
class Results:
    recipes: list[RecipeResult]
    baseline: str

    def recipe(self, label: str) -> RecipeResult:
        return next(one for one in self.recipes if one.label == label)

    @property
    def target(self) -> float | None:
        """The baseline's final loss: mean over its seeds."""
        return mean(self.recipe(self.baseline).values("loss"))

    def tokens_to_target(self, label: str) -> list[float | None]:
        """Of each complete run; None if it did not reach the baseline's loss."""
        target = self.target
        complete = [one for one in self.recipe(label).seeds if one.loss is not None]
        return [] if target is None else [tokens_to_reach(one.validation(), target) for one in complete]

    def against_baseline(self, label: str) -> list[float]:
        """Loss minus the baseline's with the same seed; below 0 is better."""
        theirs = {one.planned.seed: one.loss for one in self.recipe(self.baseline).seeds}
        pairs = [(one.loss, theirs.get(one.planned.seed)) for one in self.recipe(label).seeds]
        return [mine - other for mine, other in pairs if mine is not None and other is not None]


def read_results(comparison: Comparison, state: ComparisonState) -> Results:
    recipes = []
    for label in comparison.labels:
        planned = comparison.runs_of(label)
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
    return Results(recipes, comparison.baseline)


def tokens_to_reach(points: list[Point], target: float) -> float | None:
    """Where a curve of (tokens, loss) first reaches a loss, interpolated linearly between validations."""
    before: Point | None = None
    for tokens, loss in points:
        if loss <= target:
            if before is None or loss == before[1]:
                return tokens
            return before[0] + (before[1] - target) / (before[1] - loss) * (tokens - before[0])
        before = (tokens, loss)
    return None


def as_json(results: Results) -> dict[str, Any]:
    """All figures as plain values."""
    recipes = []
    for one in results.recipes:
        reached = results.tokens_to_target(one.label)
        known = [value for value in reached if value is not None]
        recipes.append(
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
    return {"baseline": results.baseline, "baseline_loss": results.target, "recipes": recipes}


def _figure(values: list[float]) -> dict[str, Any]:
    return {"mean": mean(values), "standard_error": standard_error(values)}


# ---- the table: one row a recipe


HEADER = [
    "recipe",
    "validation perplexity",
    "loss against the baseline (nats)",
    "backbone (parameters)",
    "tables",
    "others",
    "tokens to the baseline's loss",
    "of its tokens",
    "tokens/s",
    "peak memory of a rank",
    "table bytes sent a step",
    "complete runs",
]
NOTE = (
    "Means over seeds ± standard error of the mean. Parameters of tables and of others: extractors, gates, side "
    "networks. The loss against the baseline is the difference to the run with the same seed. Tokens to the baseline's "
    "loss: where the validation loss first reaches the baseline's final one (mean over its seeds), interpolated "
    "linearly between validations. Table bytes: the first rank's part of the exchange."
)


def table_rows(results: Results) -> list[list[str]]:
    return [_row(results, one) for one in results.recipes]


def _row(results: Results, one: RecipeResult) -> list[str]:
    baseline = one.label == results.baseline
    wire = one.values("wire_bytes")
    return [
        one.label + (" (baseline)" if baseline else ""),
        with_error(one.values("perplexity"), three_decimals) or MISSING_TEXT,
        "0" if baseline else with_error(results.against_baseline(one.label), _signed) or MISSING_TEXT,
        parameters(one.backbone_parameters),
        parameters(one.table_parameters) if one.table_parameters else "none",
        thousands(one.other_parameters) if one.other_parameters else "none",
        *_reached(results, one),
        with_error(one.rates(), no_decimals) or MISSING_TEXT,
        size(max(one.peaks())) if one.peaks() else MISSING_TEXT,
        with_error(wire, size) or (MISSING_TEXT if one.table_parameters or not one.values("loss") else "none"),
        f"{len(one.values('loss'))} of {len(one.seeds)}",
    ]


def _reached(results: Results, one: RecipeResult) -> tuple[str, str]:
    reached = results.tokens_to_target(one.label)
    known = [value for value in reached if value is not None]
    if not reached:
        return MISSING_TEXT, MISSING_TEXT
    if one.label == results.baseline:
        return thousands(one.tokens), percent(1.0)  # it reaches its final loss at its end
    if len(known) < len(reached):
        return f"not reached by {len(reached) - len(known)} of {len(reached)}", "-"
    share = [value / results.recipe(results.baseline).tokens for value in known]
    return with_error(known, thousands) or MISSING_TEXT, with_error(share, percent) or MISSING_TEXT


def _signed(value: float) -> str:
    return f"{value:+.4f}"


def markdown(results: Results, title: str) -> str:
    rows = table_rows(results)
    lines = [
        f"# {_cell(title)}",
        "",
        f"| {' | '.join(HEADER)} |",
        f"|{'|'.join(['---', *['---:'] * (len(HEADER) - 1)])}|",
        *(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows),
        "",
        NOTE,
        "",
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Escaped for a Markdown table, which may contain HTML."""
    for plain, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|"), ("\n", " ")):
        text = text.replace(plain, safe)
    return text
