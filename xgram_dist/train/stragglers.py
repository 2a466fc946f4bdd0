"""The straggler report: which rank, and which node, takes longest in each phase.

In: (host, seconds a step by phase) of every rank, gathered at each status line. Out: a `stragglers` record, and its
lines for `status`, the page and the screen. A rank that is slow spends its time in its own work; the others spend it in
phases that wait for it. So the straggler is named by own work alone (OWN_WORK), and every phase has its slowest rank.
"""

from statistics import median
from typing import Any

OWN_WORK = ("data", "compute")
"""Phases in which a rank waits for others least."""

RankSeconds = tuple[str, dict[str, float]]


def straggler_report(ranks: list[RankSeconds]) -> dict[str, Any]:
    """{straggler, phases: {name: slowest}, nodes: {name: slowest}}; a slowest has rank or node, seconds and median."""
    names = sorted({name for _, seconds in ranks for name in seconds})
    phases = {name: _slowest_rank(ranks, (name,)) for name in names}
    own = [name for name in names if name.removeprefix("seconds_") in OWN_WORK]
    return {
        "straggler": _slowest_rank(ranks, own),
        "phases": {name.removeprefix("seconds_"): one for name, one in phases.items()},
        "nodes": {name.removeprefix("seconds_"): one for name in names if (one := _slowest_node(ranks, (name,)))},
    }


def _slowest_rank(ranks: list[RankSeconds], names: "list[str] | tuple[str, ...]") -> dict[str, Any]:
    totals = [sum(seconds.get(name, 0.0) for name in names) for _, seconds in ranks]
    rank = max(range(len(totals)), key=totals.__getitem__)
    return {
        "rank": rank,
        "node": ranks[rank][0],
        "seconds": round(totals[rank], 6),
        "median": round(median(totals), 6),
    }


def _slowest_node(ranks: list[RankSeconds], names: tuple[str, ...]) -> dict[str, Any] | None:
    """By the mean of its ranks; None on one node."""
    by_node: dict[str, list[float]] = {}
    for node, seconds in ranks:
        by_node.setdefault(node, []).append(sum(seconds.get(name, 0.0) for name in names))
    if len(by_node) == 1:
        return None
    means = {node: sum(values) / len(values) for node, values in by_node.items()}
    node = max(means, key=means.__getitem__)
    return {"node": node, "seconds": round(means[node], 6), "median": round(median(means.values()), 6)}


def straggler_rows(record: dict[str, Any]) -> list[list[str]]:
    """Of a record: (phase, slowest rank, its node, ms a step, median of the ranks, slowest node); longest first."""
    rows = []
    nodes = record.get("nodes") or {}
    phases = sorted((record.get("phases") or {}).items(), key=lambda item: -item[1]["seconds"])
    for name, one in [("own work", record["straggler"]), *phases]:
        node = nodes.get(name)
        slowest = "" if node is None else f"{node['node']} {1000 * node['seconds']:,.1f}"
        cells = (f"{1000 * one['seconds']:,.1f}", f"{1000 * one['median']:,.1f}")
        rows.append([name, str(one["rank"]), one["node"], *cells, slowest])
    return rows


STRAGGLER_HEADER = ["phase", "slowest rank", "node", "ms a step", "median", "slowest node, ms"]
