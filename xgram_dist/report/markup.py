"""HTML from Python, escaped unless it says it is HTML: what a file holds cannot become part of the page's code."""

import html
from typing import Any


class Markup(str):
    """Text that is HTML already."""


Child = Any
"""Text, markup, a list of them, or None."""


def text(value: Child) -> Markup:
    if isinstance(value, Markup):
        return value
    if value is None:
        return Markup()
    if isinstance(value, list | tuple):
        return Markup("".join(text(one) for one in value))
    return Markup(html.escape(str(value), quote=True))


def tag(name: str, /, *children: Child, **attributes: Any) -> Markup:
    """`tag("td", 5, class_="number")`; an attribute that is None or False is left out, True stands alone."""
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
