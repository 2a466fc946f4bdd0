"""How far rows have moved from where they started: m = |row - initial row| / |initial row|.

Of each table the coefficient of variation (std / mean) and the gap between strong and weak rows (p75 / p25), over the
rows that some token reads; of all tables the median, as in the paper. Each rank has its own rows' m and nothing else;
means come from sums, and percentiles, exact, from counting the rows below a value that is halved in on.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xgram_dist.parallel.ranks import Ranks

PERCENTILES = (5, 25, 50, 75, 95)
LARGEST = 0x7F800000  # the bits of infinity


class Movement:
    def __init__(self, tables: list[str]) -> None:
        """`tables`: all there are, of which this rank may own no row."""
        self._parts: dict[str, list[Tensor]] = {name: [torch.empty(0)] for name in tables}
        self._from_zero = dict.fromkeys(tables, 0)

    def add(self, table: str, initial_RW: Tensor, now_RW: Tensor) -> None:
        """Some rows of a table, owned here."""
        start = initial_RW.double().norm(dim=1)
        moved = (now_RW.double() - initial_RW.double()).norm(dim=1)
        self._from_zero[table] += int((start == 0).sum())
        self._parts[table].append((moved / start.clamp_min(1e-30)).float().cpu())

    def figures(self, ranks: Ranks) -> dict[str, Any]:
        """Every rank calls it."""
        names = list(self._parts)
        values = [torch.cat(self._parts[name]).sort().values for name in names]
        wide = [v.double() for v in values]
        sums = torch.tensor([[len(v), float(v.sum()), float(v.square().sum())] for v in wide], dtype=torch.float64)
        sums = ranks.host.all_reduce_sum(sums)
        zeros = ranks.host.all_reduce_sum(torch.tensor([self._from_zero[name] for name in names]))
        percentiles = exact_percentiles(values, sums[:, 0].long(), PERCENTILES, ranks.host.all_reduce_sum)
        tables: dict[str, Any] = {}
        for name, (count, total, squares), zero, found in zip(
            names, sums.tolist(), zeros.tolist(), percentiles, strict=True
        ):
            if zero or not count:
                continue  # a row that starts at nothing has moved by no multiple of it
            mean = total / count
            of = {f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}
            spread = max(squares / count - mean * mean, 0.0) ** 0.5
            tables[name] = {
                "rows": int(count),
                "mean": mean,
                "cv": spread / mean if mean else None,
                "gap": of["p75"] / of["p25"] if of["p25"] else None,
                **of,
            }
        return {
            **{key: _median([one[key] for one in tables.values()]) for key in ("cv", "gap", "mean")},
            "tables": tables,
            "from_zero": [name for name, zero in zip(names, zeros.tolist(), strict=True) if zero],
        }


def exact_percentiles(
    values: list[Tensor], counts: Tensor, percentiles: tuple[int, ...], total: Callable[[Tensor], Tensor]
) -> list[list[float]]:
    """Of several lists of floats that are not negative, spread over ranks, as numpy's, with linear interpolation.

    `values`: what this rank has of each list, sorted. `counts`: how many all have. `total` adds up over ranks.

    Floats of one sign are ordered as their bits are, so halving an interval of bits finds a value in 31 rounds."""
    position = counts[:, None].double().sub(1).clamp_min(0) * torch.tensor(percentiles, dtype=torch.float64) / 100
    lower = position.floor().long()
    wanted = torch.cat((lower, torch.minimum(lower + 1, (counts[:, None] - 1).clamp_min(0))), dim=1)
    bits = [one.contiguous().view(torch.int32) for one in values]
    low, high = torch.zeros_like(wanted), torch.full_like(wanted, LARGEST)
    for _ in range(31):
        middle = (low + high) // 2
        below = torch.stack(
            [torch.searchsorted(b, m.to(torch.int32), right=True) for b, m in zip(bits, middle, strict=True)]
        )
        enough = total(below) > wanted
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle + 1)
    found = high.to(torch.int32).view(torch.float32).double()
    first, second = found.split(len(percentiles), dim=1)
    return (first + (position - lower) * (second - first)).tolist()


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None
