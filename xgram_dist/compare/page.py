"""The page of a comparison."""

import time
from pathlib import Path
from typing import Any

from xgram_dist.compare.plan import Plan
from xgram_dist.compare.results import RecipeResult, Results
from xgram_dist.compare.state import flat
from xgram_dist.compare.table import HEADER, NOTE, rows_of
from xgram_dist.report import figures
from xgram_dist.report.chart import Point, Series, chart
from xgram_dist.report.diagnosed import diagnosed
from xgram_dist.report.markup import Child, Markup, tag
from xgram_dist.report.numbers import MISSING, MISSING_TEXT, mean, shown, size, three, whole
from xgram_dist.report.page import Section, note, page, table
from xgram_dist.report.run_page import figures_of

SHOWN_DIFFERENCES = 60


def compare_page(plan: Plan, results: Results, out: Path) -> str:
    done = sum(len(one.values("loss")) for one in results.recipes)
    seeds = ", ".join(map(str, plan.seeds))
    subtitle = f"{out} · seeds {seeds} · {done} of {len(plan.runs)} runs complete · {time.strftime('%Y-%m-%d %H:%M')}"
    return page(
        title_of(results),
        subtitle,
        [
            Section("summary", "Summary", _summary(results)),
            Section("curves", "Loss curves", tag("div", _curves(results), class_="charts")),
            Section("throughput", "Throughput and phases", _throughput(results)),
            Section("diagnostics", "Diagnostics side by side", _diagnostics(results)),
            Section("runs", "Runs", _runs(results, out)),
            Section("recipes", "What sets the recipes apart", _differences(plan)),
        ],
    )


def title_of(results: Results) -> str:
    return f"Comparison of {', '.join(one.label for one in results.recipes)}"


def _summary(results: Results) -> list[Child]:
    made: list[Child] = []
    for title, columns in (("What it learns", (0, 1, 2, 6, 7, 11)), ("What it costs", (0, 3, 4, 5, 8, 9, 10))):
        rows: list[list[Child]] = [[_shown(row[n]) for n in columns] for row in rows_of(results)]
        made += [tag("h3", title), table([HEADER[n] for n in columns], rows)]
    return [*made, note(NOTE)]


def _shown(cell: str) -> Child:
    return MISSING if cell == MISSING_TEXT else cell


def _curves(results: Results) -> list[Markup]:
    validation, training = [], []
    for colour, one in enumerate(results.recipes):
        curves = [[(x / 1e6, y) for x, y in seed.validation()] for seed in one.seeds]
        if len(curves) > 1:
            validation += [
                Series(_seed(one, n), points, colour, "thin", listed=False) for n, points in enumerate(curves)
            ]
        validation.append(Series(one.label, average_curve(curves), colour, "dots"))
        for number, seed in enumerate(one.seeds):
            if seed.run is not None:
                points = figures.curve(seed.run, "train", "cross_entropy")
                training.append(Series(_seed(one, number), points, colour, "thin"))
    label = "cross-entropy (nats a token)"
    return [
        chart("Validation loss, mean over seeds (thin: each seed)", "million tokens", label, validation),
        chart("Training loss, each seed", "million tokens", label, training),
    ]


def _seed(one: RecipeResult, number: int) -> str:
    return f"{one.label}, seed {one.seeds[number].planned.seed}"


def average_curve(curves: list[list[Point]]) -> list[Point]:
    """The mean where all curves that have begun have a value."""
    begun = [dict(points) for points in curves if points]
    if not begun:
        return []
    common = sorted(set.intersection(*(set(points) for points in begun)))
    return [(x, sum(points[x] for points in begun) / len(begun)) for x in common]


def _throughput(results: Results) -> list[Child]:
    series = [
        Series(_seed(one, n), figures.curve(seed.run, "train", "tokens_per_second", by_tokens=False), colour, "thin")
        for colour, one in enumerate(results.recipes)
        for n, seed in enumerate(one.seeds)
        if seed.run is not None
    ]
    names: dict[str, None] = {}
    columns = []
    for one in results.recipes:
        found = [figures.phases(seed.run) for seed in one.seeds if seed.run is not None]
        by_name: dict[str, list[float]] = {}
        for phases in found:
            for name, value in phases.items():
                by_name.setdefault(name, []).append(value)
                names[name] = None
        columns.append(by_name)
    rows: list[list[Child]] = [[name, *(_milliseconds(column, name) for column in columns)] for name in names]
    labels = [one.label for one in results.recipes]
    shown_phases = (
        table(["phase of a step (ms, first rank)", *labels], rows) if rows else note("No phases in the files.")
    )
    return [shown_phases, chart("Tokens a second", "step", "tokens/s", series, from_zero=True)]


def _milliseconds(column: dict[str, list[float]], name: str) -> Child:
    """A run that has other phases does not have this one: no tables, nothing to fetch."""
    return "none" if column and name not in column else shown(mean(column.get(name, [])), lambda v: f"{1000 * v:,.2f}")


def _diagnostics(results: Results) -> list[Child]:
    groups: dict[str, list[dict[str, Any]]] = {
        one.label: [tree for seed in one.seeds if seed.run is not None for tree in figures_of(seed.run)]
        for one in results.recipes
    }
    return diagnosed(groups)


def _within(folder: Path, out: Path) -> str:
    return str(folder.relative_to(out)) if folder.is_relative_to(out) else str(folder)


def _runs(results: Results, out: Path) -> Markup:
    rows: list[list[Child]] = []
    for one in results.recipes:
        for seed in one.seeds:
            run = seed.run
            rows.append(
                [
                    one.label,
                    seed.planned.seed,
                    seed.status,
                    shown(seed.perplexity, three),
                    shown(None if run is None else figures.tokens_per_second(run), whole),
                    shown(None if run is None else figures.peak_memory(run), size),
                    shown(seed.wire_bytes(), size) if one.table_parameters else "none",
                    MISSING if run is None else len(figures.starts(run)),
                    MISSING if run is None else _within(run.folder, out),
                ]
            )
    header = ["recipe", "seed", "state", "validation perplexity", "tokens/s", "peak memory", "table bytes a step"]
    return table([*header, "restarts", "folder"], rows, left=(0, 2, 8))


def _differences(plan: Plan) -> list[Child]:
    """The keys in which recipes differ, seeds and names aside."""
    trees = [flat(plan.of(label)[0].config) for label in plan.labels]
    keys = [key for key in dict.fromkeys(k for tree in trees for k in tree) if key not in ("name", "train.seed")]
    differing = [key for key in keys if len({repr(tree.get(key, _ABSENT)) for tree in trees}) > 1]
    rows: list[list[Child]] = [[key, *(_value(tree.get(key, _ABSENT)) for tree in trees)] for key in differing]
    if not rows:
        return [note("The recipes do not differ.")]
    more = [note(f"{len(rows) - SHOWN_DIFFERENCES} more keys.")] if len(rows) > SHOWN_DIFFERENCES else []
    return [table(["key", *plan.labels], rows[:SHOWN_DIFFERENCES], left=tuple(range(len(plan.labels) + 1))), *more]


_ABSENT = object()


def _value(value: Any) -> str:
    return "-" if value is _ABSENT else str(value)
