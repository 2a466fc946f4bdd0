"""Numbers as people read them. A value that a run's files do not hold is `MISSING`, never a guess."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from xgram_dist.report.markup import Markup, tag

MISSING = tag("span", "missing", class_="missing", title="not in the run's files")
MISSING_TEXT = "missing"


def shown(value: Any, form: Callable[[Any], str]) -> Markup | str:
    """For a page."""
    return MISSING if _absent(value) else form(value)


def plain(value: Any, form: Callable[[Any], str]) -> str:
    """For a text file."""
    return MISSING_TEXT if _absent(value) else form(value)


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def whole(value: float) -> str:
    return f"{value:,.0f}"


def three(value: float) -> str:
    return f"{value:,.3f}"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def parameters(value: float) -> str:
    """Always with a decimal or two, in millions or billions."""
    return f"{value / 1e9:,.3f} B" if value >= 1e9 else f"{value / 1e6:,.2f} M"


def thousands(value: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return whole(value)


def size(value: float) -> str:
    """Bytes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:,.0f} B" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.2f} TiB"


def seconds(value: float) -> str:
    return f"{1000 * value:,.1f} ms" if value < 1 else f"{value:,.2f} s"


def short(value: float) -> str:
    """For the ticks of an axis."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if magnitude >= limit:
            return f"{value / limit:g}{unit}"
    return f"{value:g}" if magnitude >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None of fewer than two."""
    if len(values) < 2:
        return None
    middle = sum(values) / len(values)
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1) / len(values))


def with_error(values: Sequence[float], form: Callable[[float], str]) -> str | None:
    """`mean ± standard error`; None of no values. Values that are all the same have no error to speak of."""
    middle, error = mean(values), standard_error(values)
    if middle is None:
        return None
    return form(middle) + (f" ± {form(error).lstrip('+')}" if error else "")
