"""A page that stands alone: no other file, no network; light or dark by the reader's setting, made to be printed."""

from dataclasses import dataclass
from pathlib import Path

from xgram_dist.report.markup import Child, Markup, tag

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Section:
    key: str
    """Its anchor: letters, digits and dashes."""
    title: str
    body: Child


def page(title: str, subtitle: str, sections: list[Section]) -> str:
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        # Nothing may be fetched and no script run but the one that stands here.
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
    """Numbers to the right, the columns of `left` to the left; units stand in the header."""

    def line(kind: str, cells: list[Child]) -> Markup:
        return tag("tr", [tag(kind, c, class_=None if n in left else "number") for n, c in enumerate(cells)])

    made = tag(
        "table",
        tag("caption", caption) if caption else None,
        tag("thead", line("th", header)),
        tag("tbody", [line("td", row) for row in rows]),
    )
    return tag("div", made, class_="scroll")


def bar(share: float, colour: int = 0) -> Markup:
    """A share of a whole as a length."""
    return tag(
        "span",
        tag("span", class_=f"fill c{colour}", style=f"width:{100 * min(max(share, 0.0), 1.0):.1f}%"),
        class_="bar",
        title=f"{100 * share:.1f} %",
    )


def note(sentence: Child) -> Markup:
    return tag("p", sentence, class_="note")
