"""The diagnostics section of a page: figures of `xgram-dist diagnose` as a table, a column a run, and as charts."""

from xgram_dist.analysis.diagnose.figures import ANY_UPDATES, UPDATES, SummaryLine, Tree, summary_lines
from xgram_dist.analysis.report.chart import Point, Series, chart
from xgram_dist.analysis.report.html import MISSING, Child, Markup, note, table, tag, with_error

LAYERS = {
    "attention": "Attention outputs with the input embedding",
    "ffn": "Feed-forward outputs with the input embedding",
    "hidden": "Hidden states with the input embedding",
    "first_state": "Hidden states with the first layer's state",
}


Groups = dict[str, list[Tree]]
"""By name, the figures of one run, or of the runs of several seeds, which are averaged."""


def diagnostics(groups: Groups) -> list[Child]:
    measured = {name: trees for name, trees in groups.items() if trees}
    if not measured:
        return [note("No figures in the run's files; `xgram-dist diagnose RUN` makes them.")]
    return [_summary(groups), tag("div", _charts(measured), class_="charts")]


def _summary(groups: Groups) -> Markup:
    columns = [[{line.name: line for line in summary_lines(tree)} for tree in trees] for trees in groups.values()]
    names = list(dict.fromkeys(name for column in columns for lines in column for name in lines))
    first, last = UPDATES.split("{}")
    thresholds = [name for name in names if name != ANY_UPDATES and name.startswith(first) and name.endswith(last)]
    rows: list[list[Child]] = []
    for name in names:
        if name == ANY_UPDATES and thresholds:
            continue
        fallback = ANY_UPDATES if name in thresholds else name
        by_run = [[lines.get(name, lines.get(fallback)) for lines in column] for column in columns]
        rows.append([name, *(_cell([line for line in column if line is not None]) for column in by_run)])
    steps = {f"step {tree['step']:,}, {tree['positions']:,} positions" for trees in groups.values() for tree in trees}
    seeds = " Mean ± standard error over seeds." if any(len(trees) > 1 for trees in groups.values()) else ""
    return table(["figure", *groups], rows, caption=f"Figures of the paper, {'; '.join(sorted(steps))}.{seeds}")


def _cell(lines: list[SummaryLine]) -> Child:
    """Mean and standard error over seeds; `lines` has one for each."""
    if not lines:
        return MISSING
    if lines[0].reason is not None:
        return tag("span", "n/a", class_="note", title=str(lines[0]))
    cell: list[Child] = []
    for values in zip(*(line.values for line in lines if line.reason is None), strict=False):
        known = [value for value in values if value is not None]
        cell += [" ... " if cell else "", with_error(known, lines[0].format) or MISSING]
    return cell


def _charts(groups: Groups) -> list[Markup]:
    charts = []
    for part, title in LAYERS.items():
        series = [
            Series(name, _mean([_by_layer(tree, part) for tree in trees]), colour, "dots")
            for colour, (name, trees) in enumerate(groups.items())
        ]
        charts.append(chart(f"Cosine: {title}", "layer", "cosine", series))
    charts.append(
        chart(
            "Activation magnitude against token frequency",
            "token frequency (share of the text)",
            "mean L2 norm of the injected vector",
            [
                Series(name, _mean([_activation(tree) for tree in trees]), colour, "dots")
                for colour, (name, trees) in enumerate(groups.items())
            ],
            log_x=True,
            from_zero=True,
        )
    )
    charts.append(chart("Pairwise cosine of views", "layer", "cosine", _views(groups)))
    return charts


def _by_layer(tree: Tree, part: str) -> list[Point]:
    values = tree["figures"]["layers"].get(part, [])
    return [(float(layer), float(value)) for layer, value in enumerate(values) if value is not None]


def _activation(tree: Tree) -> list[Point]:
    bands = tree["figures"].get("activation", {}).get("bands", [])
    return [((band["from"] * band["to"]) ** 0.5, float(band["magnitude"])) for band in bands]


def _views(groups: Groups) -> list[Series]:
    series = []
    for colour, (name, trees) in enumerate(groups.items()):
        for stage, style in (("retrieved", "dots"), ("extracted", "dashed")):
            curves = [_view_curve(tree, stage) for tree in trees]
            if any(curves):
                series.append(Series(f"{name}, {stage}", _mean(curves), colour, style))
    return series


def _view_curve(tree: Tree, stage: str) -> list[Point]:
    """Mean over the sites of a layer."""
    sites = tree["figures"].get("views", {}).get(stage, {}).get("sites", {})
    by_layer: dict[int, list[float]] = {}
    for group, one in sites.items():
        words = group.split(".")
        if len(words) > 1 and words[1].isdigit():
            by_layer.setdefault(int(words[1]), []).append(one["mean"])
    return [(float(layer), sum(values) / len(values)) for layer, values in sorted(by_layer.items())]


def _mean(curves: list[list[Point]]) -> list[Point]:
    """Over seeds, at each x that any of them has."""
    values_at: dict[float, list[float]] = {}
    for points in curves:
        for x, y in points:
            values_at.setdefault(x, []).append(y)
    return [(x, sum(values) / len(values)) for x, values in sorted(values_at.items())]
