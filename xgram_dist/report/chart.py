"""Curves as inline SVG, coloured by the page's style sheet so that they follow light, dark and print.

The values of each point are in the figure too; the page's script shows those under the pointer.
"""

import json
import math
from dataclasses import dataclass

from xgram_dist.report.markup import Markup, tag
from xgram_dist.report.numbers import short

WIDTH, HEIGHT = 560, 290
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 44
MOST_POINTS = 1200
"""Of a curve; of more, the least and the greatest of each group stay."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    label: str
    points: list[Point]
    colour: int = 0
    style: str = "line"
    """line, thin, dots (a line with a mark at each value), dashed"""
    listed: bool = True
    """In the legend."""


@dataclass(frozen=True)
class Axis:
    """From values to places."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first <= 2 else (1,)
            found = [m * 10.0**e for e in range(first, last + 1) for m in steps]
            return [v for v in found if self.low * 0.999 <= v <= self.high * 1.001]
        step = nice((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def nice(step: float) -> float:
    """1, 2 or 5 times a power of ten, at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * 0.999)


def chart(
    title: str, x_label: str, y_label: str, series: list[Series], *, log_x: bool = False, from_zero: bool = False
) -> Markup:
    """A figure; where no series has a point, a sentence in its place."""
    drawn = [Series(s.label, thinned(_finite(s.points, log_x)), s.colour, s.style, s.listed) for s in series]
    drawn = [one for one in drawn if one.points]
    if not drawn:
        gone = tag("p", "No values in the run's files.", class_="missing")
        return tag("figure", tag("figcaption", title), gone, class_="chart")
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points] + ([0.0] if from_zero else [])
    across = _axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, log=log_x, room=0.0)
    up = _axis(min(ys), max(ys), HEIGHT - BOTTOM, TOP, log=False, room=0.0 if from_zero else 0.04)
    svg = tag(
        "svg",
        tag("title", f"{title}: {', '.join(one.label for one in drawn if one.listed)}"),
        _frame(across, up, x_label, y_label),
        [_curve(one, across, up) for one in drawn],
        tag("line", class_="cursor", x1=0, x2=0, y1=TOP, y2=HEIGHT - BOTTOM, visibility="hidden"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=title,
    )
    values = [{"label": s.label, "colour": s.colour % COLOURS, "points": s.points} for s in drawn]
    scale = {"low": across.low, "high": across.high, "start": across.start, "end": across.end, "log": across.log}
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


COLOURS = 12
"""That the style sheet has."""


def thinned(points: list[Point]) -> list[Point]:
    if len(points) <= MOST_POINTS:
        return points
    group = math.ceil(2 * len(points) / MOST_POINTS)
    found: list[Point] = []
    for start in range(0, len(points), group):
        part = points[start : start + group]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        found += sorted(ends)
    if found[-1] != points[-1]:
        found.append(points[-1])
    return found


def _finite(points: list[Point], log_x: bool) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x)]


def _axis(low: float, high: float, start: float, end: float, *, log: bool, room: float) -> Axis:
    if low == high:
        low, high = (low / 2, high * 2) if log else (low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2)
    elif not log:
        low, high = low - room * (high - low), high + room * (high - low)
    return Axis(low, high, start, end, log)


def _frame(across: Axis, up: Axis, x_label: str, y_label: str) -> list[Markup]:
    made = []
    for value in up.ticks():
        y = f"{up.place(value):.1f}"
        made.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
        made.append(tag("text", short(_clean(value)), class_="tick", x=LEFT - 8, y=y, dy="0.35em", text_anchor="end"))
    for value in across.ticks():
        x = f"{across.place(value):.1f}"
        made.append(tag("line", class_="grid", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM))
        made.append(tag("text", short(_clean(value)), class_="tick", x=x, y=HEIGHT - BOTTOM + 16, text_anchor="middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    made.append(tag("text", x_label, class_="axis", x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 6, text_anchor="middle"))
    turned = f"rotate(-90 14 {middle})"
    made.append(tag("text", y_label, class_="axis", x=14, y=middle, text_anchor="middle", transform=turned))
    return made


def _clean(value: float) -> float:
    """Without the last digits that adding up steps leaves."""
    return float(f"{value:.10g}")


def _curve(one: Series, across: Axis, up: Axis) -> list[Markup]:
    places = [(across.place(x), up.place(y)) for x, y in one.points]
    colour = f"c{one.colour % COLOURS}"
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    made = [tag("polyline", points=path, class_=f"curve {one.style} {colour}")]
    if one.style == "dots" or len(places) == 1:
        made += [tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3.2, class_=f"dot {colour}") for x, y in places]
    return made
