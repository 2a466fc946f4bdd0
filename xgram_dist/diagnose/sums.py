"""Named sums that add up over batches, and over ranks in one message.

A figure is a pure function of such sums, so it does not depend on how the batches were spread over ranks. Every rank
must have added under the same names, in any order; a rank that only goes along with the others adds with `counts` off.
"""

import torch
from torch import Tensor

from xgram_dist.parallel.ranks import Ranks

Totals = dict[str, Tensor]
"""Sums over all batches and ranks, in host memory, fp64."""


class Sums:
    def __init__(self) -> None:
        self.counts = True
        """Off: what is added counts nothing."""
        self._parts: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        if not self.counts:
            value = torch.zeros_like(value)
        self._parts[name] = self._parts[name] + value if name in self._parts else value

    def over(self, ranks: Ranks) -> Totals:
        """All of them, on every rank."""
        names = sorted(self._parts)
        if not names:
            return {}
        flat = torch.cat([self._parts[name].reshape(-1).cpu() for name in names])
        flat = ranks.host.all_reduce_sum(flat)
        parts = flat.split([self._parts[name].numel() for name in names])
        return {name: part.view(self._parts[name].shape) for name, part in zip(names, parts, strict=True)}


def mean_of(totals: Totals, name: str) -> float | None:
    """Of a pair (sum, count); None where nothing was counted."""
    if name not in totals or not totals[name][1]:
        return None
    return float(totals[name][0] / totals[name][1])
