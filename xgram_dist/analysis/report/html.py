"""HTML pages: tags, numbers, tables, and the frame of a page.

Text is escaped unless it is `Markup`, so that nothing in a run's files can become code of the page. A page stands
alone: no other file, no network. It follows the reader's light or dark setting and can be printed.
"""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Markup(str):
    """Text that already is HTML."""


Child = Any
"""Text, markup, a list of them, or None."""


def text(value: Child) -> Markup:
    """As HTML, escaped."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return Markup()
    if isinstance(value, list | tuple):
        return Markup("".join(text(one) for one in value))
    return Markup(html.escape(str(value), quote=True))


def tag(name: str, /, *children: Child, **attributes: Any) -> Markup:
    """`tag("td", 5, class_="number")`. An attribute that is None or False is left out; True gives its name alone."""
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{html.escape(str(value), quote=True)}"')
    opening = f"<{' '.join(words)}>"
    return Markup(opening) if name in VOID else Markup(f"{opening}{text(list(children))}</{name}>")


VOID = frozenset({"br", "hr", "meta"})
"""Without a closing tag."""


# ---- numbers; a value that a run's files do not hold is `MISSING`, never a guess


MISSING = tag("span", "missing", class_="missing", title="not in the run's files")
MISSING_TEXT = "missing"


def format_or_missing(value: Any, form: Callable[[Any], str]) -> Markup | str:
    absent = value is None or (isinstance(value, float) and not math.isfinite(value))
    return MISSING if absent else form(value)


def no_decimals(value: float) -> str:
    return f"{value:,.0f}"


def three_decimals(value: float) -> str:
    return f"{value:,.3f}"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def parameters(value: float) -> str:
    """In millions or billions."""
    return f"{value / 1e9:,.3f} B" if value >= 1e9 else f"{value / 1e6:,.2f} M"


def thousands(value: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return no_decimals(value)


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
    """For axis ticks."""
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
    """Of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    middle = sum(values) / len(values)
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1) / len(values))


def with_error(values: Sequence[float], form: Callable[[float], str]) -> str | None:
    """`mean ± standard error`; None without values. The error is left out if it is zero or unknown."""
    middle, error = mean(values), standard_error(values)
    if middle is None:
        return None
    return form(middle) + (f" ± {form(error).lstrip('+')}" if error else "")


# ---- the page


HERE = Path(__file__).parent


@dataclass(frozen=True)
class Section:
    key: str
    """Anchor: letters, digits and dashes."""
    title: str
    body: Child


def page(title: str, subtitle: str, sections: list[Section]) -> str:
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        # Nothing may be fetched, and only inline style and script may run.
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", title),
        tag("style", Markup((HERE / "style.css").read_text(encoding="utf-8"))),
    ]
    links = [tag("a", one.title, href=f"#{one.key}") for one in sections]
    body = [
        tag("header", tag("h1", title), tag("p", subtitle, class_="subtitle"), tag("nav", links)),
        tag("main", [tag("section", tag("h2", one.title), one.body, id=one.key) for one in sections]),
        tag("script", Markup((HERE / "hover.js").read_text(encoding="utf-8"))),
    ]
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', body), lang='en')}\n"


POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def table(header: list[Child], rows: list[list[Child]], left: tuple[int, ...] = (0,), caption: str = "") -> Markup:
    """Columns in `left` are aligned left, the others right. Units belong in the header."""

    def line(kind: str, cells: list[Child]) -> Markup:
        return tag("tr", [tag(kind, c, class_=None if n in left else "number") for n, c in enumerate(cells)])

    body = tag(
        "table",
        tag("caption", caption) if caption else None,
        tag("thead", line("th", header)),
        tag("tbody", [line("td", row) for row in rows]),
    )
    return tag("div", body, class_="scroll")


def bar(share: float, colour: int = 0) -> Markup:
    """A share as a horizontal bar."""
    return tag(
        "span",
        tag("span", class_=f"fill c{colour}", style=f"width:{100 * min(max(share, 0.0), 1.0):.1f}%"),
        class_="bar",
        title=f"{100 * share:.1f} %",
    )


def note(sentence: Child) -> Markup:
    return tag("p", sentence, class_="note")
