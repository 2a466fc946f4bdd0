"""Line charts as inline SVG, coloured by the page's style sheet so that they follow light, dark and print.

The figure also carries the values of all points as JSON; the page's script shows those under the pointer.
"""

import json
import math
from dataclasses import dataclass

from xgram_dist.analysis.report.html import Markup, short, tag

WIDTH, HEIGHT = 560, 290
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 44
MAX_POINTS = 1200
"""Of a curve. A longer one keeps the minimum and maximum of each group of points."""
COLOURS = 12
"""In the style sheet."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    label: str
    points: list[Point]
    colour: int = 0
    style: str = "line"
    """line, thin, dots (a line with a mark at each point), dashed"""
    listed: bool = True
    """Whether the legend shows it."""


@dataclass(frozen=True)
class Axis:
    """Maps values to coordinates."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def position(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first <= 2 else (1,)
            candidates = [m * 10.0**e for e in range(first, last + 1) for m in steps]
            return [v for v in candidates if self.low * 0.999 <= v <= self.high * 1.001]
        step = round_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def round_step(step: float) -> float:
    """1, 2 or 5 times a power of ten, at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * 0.999)


def chart(
    title: str, x_label: str, y_label: str, series: list[Series], *, log_x: bool = False, from_zero: bool = False
) -> Markup:
    """A figure; a sentence instead if no series has a point."""
    drawn = [Series(s.label, thin_points(_finite(s.points, log_x)), s.colour, s.style, s.listed) for s in series]
    drawn = [one for one in drawn if one.points]
    if not drawn:
        empty = tag("p", "No values in the run's files.", class_="missing")
        return tag("figure", tag("figcaption", title), empty, class_="chart")
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points] + ([0.0] if from_zero else [])
    x_axis = _axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, log=log_x, margin=0.0)
    y_axis = _axis(min(ys), max(ys), HEIGHT - BOTTOM, TOP, log=False, margin=0.0 if from_zero else 0.04)
    svg = tag(
        "svg",
        tag("title", f"{title}: {', '.join(one.label for one in drawn if one.listed)}"),
        _frame(x_axis, y_axis, x_label, y_label),
        [_curve(one, x_axis, y_axis) for one in drawn],
        tag("line", class_="cursor", x1=0, x2=0, y1=TOP, y2=HEIGHT - BOTTOM, visibility="hidden"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=title,
    )
    values = [{"label": s.label, "colour": s.colour % COLOURS, "points": s.points} for s in drawn]
    scale = {"low": x_axis.low, "high": x_axis.high, "start": x_axis.start, "end": x_axis.end, "log": x_axis.log}
    data = json.dumps({"series": values, "x": scale, "label": x_label, "width": WIDTH})
    legend = [
        tag("li", tag("span", class_=f"key {one.style} c{one.colour % COLOURS}"), one.label)
        for one in drawn
        if one.listed
    ]
    return tag(
        "figure",
        tag("figcaption", title),
        tag("div", svg, tag("div", class_="tip", hidden=True), class_="plot"),
        tag("ul", legend, class_="legend"),
        class_="chart",
        data_chart=data,
    )


def thin_points(points: list[Point]) -> list[Point]:
    if len(points) <= MAX_POINTS:
        return points
    group = math.ceil(2 * len(points) / MAX_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), group):
        part = points[start : start + group]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def _finite(points: list[Point], log_x: bool) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x)]


def _axis(low: float, high: float, start: float, end: float, *, log: bool, margin: float) -> Axis:
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2)
    elif not log:
        low, high = low - margin * (high - low), high + margin * (high - low)
    return Axis(low, high, start, end, log)


def _frame(x_axis: Axis, y_axis: Axis, x_label: str, y_label: str) -> list[Markup]:
    elements = []
    for value in y_axis.ticks():
        y = f"{y_axis.position(value):.1f}"
        elements.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
        elements.append(
            tag("text", short(_clean(value)), class_="tick", x=LEFT - 8, y=y, dy="0.35em", text_anchor="end")
        )
    for value in x_axis.ticks():
        x = f"{x_axis.position(value):.1f}"
        elements.append(tag("line", class_="grid", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM))
        elements.append(
            tag("text", short(_clean(value)), class_="tick", x=x, y=HEIGHT - BOTTOM + 16, text_anchor="middle")
        )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    elements.append(
        tag("text", x_label, class_="axis", x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 6, text_anchor="middle")
    )
    rotation = f"rotate(-90 14 {middle})"
    elements.append(tag("text", y_label, class_="axis", x=14, y=middle, text_anchor="middle", transform=rotation))
    return elements


def _clean(value: float) -> float:
    """Without the rounding error of adding up steps."""
    return float(f"{value:.10g}")


def _curve(one: Series, x_axis: Axis, y_axis: Axis) -> list[Markup]:
    positions = [(x_axis.position(x), y_axis.position(y)) for x, y in one.points]
    colour = f"c{one.colour % COLOURS}"
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
    elements = [tag("polyline", points=path, class_=f"curve {one.style} {colour}")]
    if one.style == "dots" or len(positions) == 1:
        elements += [tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3.2, class_=f"dot {colour}") for x, y in positions]
    return elements
