"""The figures of `xgram-dist diagnose`, on a page: a column a run, and curves of all of them."""

from typing import Any

from xgram_dist.diagnose.text import ANY, UPDATES, Line, lines_of
from xgram_dist.report.chart import Point, Series, chart
from xgram_dist.report.markup import Child, Markup, tag
from xgram_dist.report.numbers import MISSING, with_error
from xgram_dist.report.page import note, table

LAYERS = {
    "attention": "Attention outputs with the input embedding",
    "ffn": "Feed-forward outputs with the input embedding",
    "hidden": "Hidden states with the input embedding",
    "first_state": "Hidden states with the first layer's state",
}


def diagnosed(groups: dict[str, list[dict[str, Any]]]) -> list[Child]:
    """By name, the figures of one run, or of the runs of several seeds: then their mean."""
    known = {name: trees for name, trees in groups.items() if trees}
    if not known:
        return [note("No figures in the run's files; `xgram-dist diagnose RUN` makes them.")]
    return [_summary(groups), tag("div", _charts(known), class_="charts")]


def _summary(groups: dict[str, list[dict[str, Any]]]) -> Markup:
    columns = [[{line.name: line for line in lines_of(tree)} for tree in trees] for trees in groups.values()]
    names = list(dict.fromkeys(name for column in columns for lines in column for name in lines))
    first, last = UPDATES.split("{}")
    thresholds = [name for name in names if name != ANY and name.startswith(first) and name.endswith(last)]
    rows: list[list[Child]] = []
    for name in names:
        if name == ANY and thresholds:
            continue
        instead = ANY if name in thresholds else name
        found = [[lines.get(name, lines.get(instead)) for lines in column] for column in columns]
        rows.append([name, *(_cell([line for line in column if line is not None]) for column in found)])
    steps = {f"step {tree['step']:,}, {tree['positions']:,} positions" for trees in groups.values() for tree in trees}
    seeds = " Mean ± standard error over seeds." if any(len(trees) > 1 for trees in groups.values()) else ""
    return table(["figure", *groups], rows, caption=f"Figures of the paper, {'; '.join(sorted(steps))}.{seeds}")


def _cell(lines: list[Line]) -> Child:
    """The line of each seed as one."""
    if not lines:
        return MISSING
    if lines[0].reason is not None:
        return tag("span", "n/a", class_="note", title=str(lines[0]))
    found: list[Child] = []
    for values in zip(*(line.values for line in lines if line.reason is None), strict=False):
        known = [value for value in values if value is not None]
        found += [" ... " if found else "", with_error(known, lines[0].form) or MISSING]
    return found


def _charts(groups: dict[str, list[dict[str, Any]]]) -> list[Markup]:
    made = []
    for part, title in LAYERS.items():
        series = [
            Series(name, _mean([_by_layer(tree, part) for tree in trees]), colour, "dots")
            for colour, (name, trees) in enumerate(groups.items())
        ]
        made.append(chart(f"Cosine: {title}", "layer", "cosine", series))
    made.append(
        chart(
            "Activation magnitude against token frequency",
            "token frequency (share of the text)",
            "mean L2 norm of what is injected",
            [
                Series(name, _mean([_activation(tree) for tree in trees]), colour, "dots")
                for colour, (name, trees) in enumerate(groups.items())
            ],
            log_x=True,
            from_zero=True,
        )
    )
    made.append(chart("Pairwise cosine of views", "layer", "cosine", _views(groups)))
    return made


def _by_layer(tree: dict[str, Any], part: str) -> list[Point]:
    values = tree["figures"]["layers"].get(part, [])
    return [(float(layer), float(value)) for layer, value in enumerate(values) if value is not None]


def _activation(tree: dict[str, Any]) -> list[Point]:
    bands = tree["figures"].get("activation", {}).get("bands", [])
    return [((band["from"] * band["to"]) ** 0.5, float(band["magnitude"])) for band in bands]


def _views(groups: dict[str, list[dict[str, Any]]]) -> list[Series]:
    found = []
    for colour, (name, trees) in enumerate(groups.items()):
        for stage, style in (("retrieved", "dots"), ("extracted", "dashed")):
            curves = [_of_stage(tree, stage) for tree in trees]
            if any(curves):
                found.append(Series(f"{name}, {stage}", _mean(curves), colour, style))
    return found


def _of_stage(tree: dict[str, Any], stage: str) -> list[Point]:
    """Mean over the sites of a layer."""
    sites = tree["figures"].get("views", {}).get(stage, {}).get("sites", {})
    by_layer: dict[int, list[float]] = {}
    for group, one in sites.items():
        words = group.split(".")
        if len(words) > 1 and words[1].isdigit():
            by_layer.setdefault(int(words[1]), []).append(one["mean"])
    return [(float(layer), sum(values) / len(values)) for layer, values in sorted(by_layer.items())]


def _mean(curves: list[list[Point]]) -> list[Point]:
    """Over seeds, where several have a value at the same place."""
    found: dict[float, list[float]] = {}
    for points in curves:
        for x, y in points:
            found.setdefault(x, []).append(y)
    return [(x, sum(values) / len(values)) for x, values in sorted(found.items())]
