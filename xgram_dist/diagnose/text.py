"""The figures in short, for a terminal and for tables beside each other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MISSING = "-"


def number(value: float) -> str:
    return f"{value:.3f}"


def share(value: float) -> str:
    return f"{100 * value:.2f} %"


@dataclass(frozen=True)
class Line:
    name: str
    values: list[float | None]
    """One, or those of the first and the last layer or band."""
    form: Callable[[float], str] = number
    reason: str | None = None
    """Why it does not apply."""

    def __str__(self) -> str:
        if self.reason is not None:
            return f"not applicable: {self.reason}"
        return " ... ".join(MISSING if value is None else self.form(value) for value in self.values)


LAYERS = {
    "attention": "cosine of attention outputs with the input, first ... last layer",
    "ffn": "cosine of feed-forward outputs with the input",
    "hidden": "cosine of hidden states with the input",
    "first_state": "cosine of hidden states with the first layer's",
}
UPDATES = "rows with more than {} updates"
ANY = UPDATES.format("N")
"""Stands for all thresholds where none apply."""
HOTTEST = ("0.001", "0.01", "0.1")


def lines_of(tree: dict[str, Any]) -> list[Line]:
    figures, found = tree["figures"], []

    def add(key: str, name: str, values: Callable[[Any], list[float | None]], form: Callable[[float], str]) -> None:
        one = figures.get(key)
        if one is None:
            found.append(Line(name, [None]))
        elif "not_applicable" in one:
            found.append(Line(name, [], form, one["not_applicable"]))
        else:
            found.append(Line(name, values(one), form))

    add("activation", "activation magnitude, rarest ... most frequent tokens", _ends, number)
    add("activation", "correlation of magnitude and log frequency", lambda one: [one["correlation"]], number)
    for part, name in LAYERS.items():
        add("layers", name, lambda one, part=part: [one[part][0], one[part][-1]], number)  # type: ignore[misc]
    add("views", "pairwise cosine of views, retrieved", lambda one: [one["retrieved"]["mean"]], number)
    if "retrieved" in figures.get("views", {}) and "extracted" not in figures["views"]:
        found.append(Line("pairwise cosine of views, extracted", [], number, "the views have no extractors"))
    else:
        add("views", "pairwise cosine of views, extracted", lambda one: [one["extracted"]["mean"]], number)
    for part in HOTTEST:
        name = f"hits of the hottest {100 * float(part):g} % of rows"
        add("row_hits", name, lambda one, part=part: [one["hottest"][part]], share)  # type: ignore[misc]
    for n in figures.get("updates", {}).get("more_than", ("N",)):
        add("updates", UPDATES.format(n), lambda one, n=n: [one["more_than"][n]], share)  # type: ignore[misc]
    add("movement", "row movement, CV (median of tables)", lambda one: [one["cv"]], number)
    add("movement", "row movement, p75 / p25 (median of tables)", lambda one: [one["gap"]], number)
    return found


def _ends(one: dict[str, Any]) -> list[float | None]:
    bands = one["bands"]
    return [bands[0]["magnitude"], bands[-1]["magnitude"]] if bands else [None]
