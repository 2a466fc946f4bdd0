"""The HTML page of a comparison: summary, loss curves, throughput, diagnostics, runs, differences of the recipes."""

import time
from pathlib import Path
from typing import Any

from xgram_dist.analysis.compare.results import HEADER, NOTE, RecipeResult, Results, table_rows
from xgram_dist.analysis.compare.runs import Comparison, flatten
from xgram_dist.analysis.report import runs as figures
from xgram_dist.analysis.report.chart import Point, Series, chart
from xgram_dist.analysis.report.diagnostics import diagnostics
from xgram_dist.analysis.report.html import (
    MISSING,
    MISSING_TEXT,
    Child,
    Markup,
    Section,
    format_or_missing,
    mean,
    no_decimals,
    note,
    page,
    size,
    table,
    tag,
    three_decimals,
)
from xgram_dist.analysis.report.run_page import newest_figures_of

MAX_DIFFERENCES = 60


def compare_page(comparison: Comparison, results: Results, out: Path) -> str:
    done = sum(len(one.values("loss")) for one in results.recipes)
    seeds = ", ".join(map(str, comparison.seeds))
    subtitle = (
        f"{out} · seeds {seeds} · {done} of {len(comparison.runs)} runs complete · {time.strftime('%Y-%m-%d %H:%M')}"
    )
    return page(
        title_of(results),
        subtitle,
        [
            Section("summary", "Summary", _summary(results)),
            Section("curves", "Loss curves", tag("div", _curves(results), class_="charts")),
            Section("throughput", "Throughput and phases", _throughput(results)),
            Section("diagnostics", "Diagnostics side by side", _diagnostics(results)),
            Section("runs", "Runs", _runs(results, out)),
            Section("recipes", "How the recipes differ", _differences(comparison)),
        ],
    )


def title_of(results: Results) -> str:
    return f"Comparison of {', '.join(one.label for one in results.recipes)}"


def _summary(results: Results) -> list[Child]:
    parts: list[Child] = []
    for title, columns in (("What it learns", (0, 1, 2, 6, 7, 11)), ("What it costs", (0, 3, 4, 5, 8, 9, 10))):
        rows: list[list[Child]] = [[_cell(row[n]) for n in columns] for row in table_rows(results)]
        parts += [tag("h3", title), table([HEADER[n] for n in columns], rows)]
    return [*parts, note(NOTE)]


def _cell(cell: str) -> Child:
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
    """The mean at each x that all non-empty curves have."""
    started = [dict(points) for points in curves if points]
    if not started:
        return []
    common = sorted(set.intersection(*(set(points) for points in started)))
    return [(x, sum(points[x] for points in started) / len(started)) for x in common]


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
        of_seeds = [figures.phases(seed.run) for seed in one.seeds if seed.run is not None]
        by_name: dict[str, list[float]] = {}
        for phases in of_seeds:
            for name, value in phases.items():
                by_name.setdefault(name, []).append(value)
                names[name] = None
        columns.append(by_name)
    rows: list[list[Child]] = [[name, *(_milliseconds(column, name) for column in columns)] for name in names]
    labels = [one.label for one in results.recipes]
    phase_table = (
        table(["phase of a step (ms, first rank)", *labels], rows) if rows else note("No phases in the files.")
    )
    return [phase_table, chart("Tokens a second", "step", "tokens/s", series, from_zero=True)]


def _milliseconds(column: dict[str, list[float]], name: str) -> Child:
    """The word none if the run has other phases but not this one: without tables, nothing is fetched."""
    if column and name not in column:
        return "none"
    return format_or_missing(mean(column.get(name, [])), lambda value: f"{1000 * value:,.2f}")


def _diagnostics(results: Results) -> list[Child]:
    groups: dict[str, list[dict[str, Any]]] = {
        one.label: [tree for seed in one.seeds if seed.run is not None for tree in newest_figures_of(seed.run)]
        for one in results.recipes
    }
    return diagnostics(groups)


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
                    format_or_missing(seed.perplexity, three_decimals),
                    format_or_missing(None if run is None else figures.tokens_per_second(run), no_decimals),
                    format_or_missing(None if run is None else figures.peak_memory(run), size),
                    format_or_missing(seed.wire_bytes, size) if one.table_parameters else "none",
                    MISSING if run is None else len(figures.restarts(run)),
                    MISSING if run is None else _within(run.folder, out),
                ]
            )
    header = ["recipe", "seed", "state", "validation perplexity", "tokens/s", "peak memory", "table bytes a step"]
    return table([*header, "restarts", "folder"], rows, left=(0, 2, 8))


def _differences(comparison: Comparison) -> list[Child]:
    """The keys in which recipes differ, except names and seeds."""
    trees = [flatten(comparison.runs_of(label)[0].config) for label in comparison.labels]
    keys = [key for key in dict.fromkeys(k for tree in trees for k in tree) if key not in ("name", "train.seed")]
    differing = [key for key in keys if len({repr(tree.get(key, _ABSENT)) for tree in trees}) > 1]
    rows: list[list[Child]] = [[key, *(_value(tree.get(key, _ABSENT)) for tree in trees)] for key in differing]
    if not rows:
        return [note("The recipes do not differ.")]
    more = [note(f"{len(rows) - MAX_DIFFERENCES} more keys.")] if len(rows) > MAX_DIFFERENCES else []
    return [
        table(["key", *comparison.labels], rows[:MAX_DIFFERENCES], left=tuple(range(len(comparison.labels) + 1))),
        *more,
    ]


_ABSENT = object()


def _value(value: Any) -> str:
    return "-" if value is _ABSENT else str(value)
