"""Curves in a terminal: braille dots, two columns and four rows in a character."""

import math
from collections.abc import Iterable

from rich.console import RenderableType
from rich.text import Text

from xgram_dist.analysis.report.chart import Point, thin_points

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def plot(curves: list[tuple[str, list[Point], str]], width: int, height: int) -> RenderableType:
    """(name, points, colour) each; the scale of the values on the left, that of the steps below."""
    finite = [(name, [p for p in points if math.isfinite(p[1])], colour) for name, points, colour in curves]
    drawn = [(name, thin_points(points), colour) for name, points, colour in finite if points]
    if not drawn:
        return Text("no steps yet", "dim")
    every = [point for _, points, _ in drawn for point in points]
    left, right = min(x for x, _ in every), max(x for x, _ in every)
    low, high = min(y for _, y in every), max(y for _, y in every)
    label = max(len(_short(low)), len(_short(high)))
    columns = max(8, width - label - 1)
    cells = [[0] * columns for _ in range(height)]
    colours = [[""] * columns for _ in range(height)]
    for _, points, colour in drawn:
        for x, y in _filled(points, 2 * columns, left, right):
            row = round((high - y) / ((high - low) or 1.0) * (4 * height - 1))
            cells[row // 4][x // 2] |= DOTS[row % 4][x % 2]
            colours[row // 4][x // 2] = colour
    text = Text()
    for n, (row_cells, row_colours) in enumerate(zip(cells, colours, strict=True)):
        scale = _short(high) if n == 0 else _short(low) if n == height - 1 else ""
        text.append(f"{scale:>{label}} ", "dim")
        for cell, colour in zip(row_cells, row_colours, strict=True):
            text.append(chr(0x2800 + cell) if cell else " ", colour)
        text.append("\n")
    ends = f"{left:,.0f}", f"step {right:,.0f}"
    text.append(" " * (label + 1) + ends[0] + ends[1].rjust(max(0, columns - len(ends[0]))), "dim")
    for name, points, colour in drawn if len(drawn) > 1 else ():
        text.append(f"\n{' ' * (label + 1)}── {name}: {_short(points[-1][1])}", colour)
    return text


def _filled(points: list[Point], columns: int, left: float, right: float) -> Iterable[tuple[int, float]]:
    """Each column of dots between the first and the last point, with the value of the line there."""
    scale = (columns - 1) / ((right - left) or 1.0)
    before: tuple[int, float] | None = None
    for x, y in points:
        column = round((x - left) * scale)
        if before is not None:
            for between in range(before[0] + 1, column):
                yield between, before[1] + (y - before[1]) * (between - before[0]) / (column - before[0])
        yield column, y
        before = column, y


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
