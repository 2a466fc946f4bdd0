"""Whether parallel views hold different things: pairwise cosines, mean over positions.

Of the vectors as they are retrieved (the paper's figure), and as they come out of the extractors, where there are any.
Views are tables whose names differ in their last number alone.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from xgram_dist.diagnose.sums import Sums, Totals, mean_of
from xgram_dist.parallel.ranks import Ranks

STAGES = ("retrieved", "extracted")


class ViewCosines:
    def __init__(self, sums: Sums, names: list[str], cut: tuple[str, ...] = (), tensor: Ranks | None = None):
        """`names`: of all tables. `tensor`: the ranks that share a vector's columns at the sites `cut`."""
        self._sums, self._cut, self._tensor = sums, cut, tensor or Ranks()
        self.groups = {site: views for site, views in _groups(names).items() if len(views) > 1}
        self._waiting: dict[str, list[Tensor]] = {}

    def retrieved(self, values: Mapping[str, Tensor], slots: Tensor) -> None:
        """The vectors of the distinct tokens, and where each position finds its own."""
        for group, names in self.groups.items():
            vectors = [values[name] for name in names]
            if len({tuple(one.shape) for one in vectors}) > 1:
                continue
            counts = torch.bincount(slots.reshape(-1), minlength=len(vectors[0]))
            self._add("retrieved", group, vectors, counts)

    def see(self, what: str, layer: int, name: str, value: Tensor) -> None:
        group = f"layers.{layer}.{name}"
        if what == "extracted" and group in self.groups:
            self._waiting.setdefault(group, []).append(value)
        elif what == "injected" and group in self._waiting:
            outs = self._waiting.pop(group)
            if len(outs) == len(self.groups[group]):
                self._add("extracted", group, outs, None)

    def _add(self, stage: str, group: str, vectors: list[Tensor], counts: Tensor | None) -> None:
        pairs = list(combinations(range(len(vectors)), 2))
        wide = [one.double().flatten(0, -2) for one in vectors]
        squares = [one.square().sum(-1) for one in wide]
        products = torch.stack([*squares, *((wide[i] * wide[j]).sum(-1) for i, j in pairs)])
        if group.rsplit(".", 1)[1] in self._cut:
            self._tensor.all_reduce_sum(products)
        norms = products[: len(vectors)].sqrt().clamp_min(1e-30)
        for number, (i, j) in enumerate(pairs):
            cosines = products[len(vectors) + number] / (norms[i] * norms[j])
            weights = torch.ones_like(cosines) if counts is None else counts.double()
            self._sums.add(f"views.{stage}.{group}.{i}-{j}", torch.stack(((cosines * weights).sum(), weights.sum())))


def view_cosines(totals: Totals, groups: dict[str, list[str]]) -> dict[str, Any]:
    """By stage: the mean over all pairs of all sites, and the pairs of each; a stage that did not occur is left out."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        sites: dict[str, Any] = {}
        for group, names in groups.items():
            pairs = {
                f"{i}-{j}": mean_of(totals, f"views.{stage}.{group}.{i}-{j}")
                for i, j in combinations(range(len(names)), 2)
            }
            values = [value for value in pairs.values() if value is not None]
            if values:
                sites[group] = {"mean": sum(values) / len(values), "pairs": pairs}
        if sites:
            each = [value for site in sites.values() for value in site["pairs"].values()]
            found[stage] = {"mean": sum(each) / len(each), "sites": sites}
    return found


def _groups(names: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        group, _, view = name.rpartition(".")
        if group and view.isdigit():
            found.setdefault(group, []).append(name)
    return found
