"""The figures in short, for a terminal and for tables beside each other."""

from typing import Any

MISSING = "-"


def rows_of(tree: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, value); what does not apply says so."""
    figures = tree["figures"]
    found: list[tuple[str, str]] = []

    def add(key: str, name: str, value: Any) -> None:
        one = figures.get(key)
        if one is None:
            found.append((name, MISSING))
        elif "not_applicable" in one:
            found.append((name, f"not applicable: {one['not_applicable']}"))
        else:
            found.append((name, value(one)))

    add("activation", "activation magnitude, rarest to most frequent tokens", _ends)
    add("activation", "correlation of magnitude and log frequency", lambda one: number(one["correlation"]))
    for part, name in LAYERS.items():
        add("layers", name, lambda one, part=part: f"{number(one[part][0])} ... {number(one[part][-1])}")
    for stage in ("retrieved", "extracted"):
        add("views", f"pairwise cosine of views, {stage}", lambda one, s=stage: number(one.get(s, {}).get("mean")))
    for part in ("0.001", "0.01", "0.1"):
        add(
            "row_hits",
            f"hits of the hottest {100 * float(part):g} % of rows",
            lambda one, p=part: share(one["hottest"][p]),
        )
    thresholds = figures.get("updates", {}).get("more_than", {})
    for threshold in thresholds or ("N",):
        add("updates", f"rows with more than {threshold} updates", lambda one, t=threshold: share(one["more_than"][t]))
    add("movement", "row movement, CV (median of tables)", lambda one: number(one["cv"]))
    add("movement", "row movement, p75 / p25 (median of tables)", lambda one: number(one["gap"]))
    return found


LAYERS = {
    "attention": "cosine of attention outputs with the input, first ... last layer",
    "ffn": "cosine of feed-forward outputs with the input",
    "hidden": "cosine of hidden states with the input",
    "first_state": "cosine of hidden states with the first layer's",
}


def number(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"


def share(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:.2f} %"


def _ends(one: dict[str, Any]) -> str:
    bands = one["bands"]
    return f"{number(bands[0]['magnitude'])} ... {number(bands[-1]['magnitude'])}" if bands else MISSING
