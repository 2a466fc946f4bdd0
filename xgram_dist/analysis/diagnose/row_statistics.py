"""Statistics of table rows: concentration of hits, rows with more than N updates, movement since initialisation.

Hits follow from token frequencies and routing alone. A hit is a read of a row by a path of a token
(tables/frequencies.py). Updates are counted where the run counted them (`memory.count_updates`): a step updates a row
once, however often it reads it. The expected updates of a row are, as in the paper, the tokens trained on times the
probability that a token reads the row: its hits.

The movement of a row is m = |row - initial row| / |initial row|. Of each table: the coefficient of variation
(std / mean) and the gap p75 / p25 between strong and weak rows, over the rows that some token reads; of all tables the
median, as in the paper. A rank holds m of its own rows only. Means come from all-reduced sums, percentiles, exactly,
from a bisection with one all-reduce of counts a round.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.frequencies import row_probabilities
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.routing_statistics import hits_per_row, row_hits


def hit_concentration(frequencies: NDArray[np.float64], routing: Routing | None) -> dict[str, Any]:
    """Share of hits on the hottest 0.1, 1 and 10 % of rows: mean over views, and of each view."""
    if routing is None:
        views = [row_hits(frequencies)]
    else:
        views = [row_hits(hits_per_row(routing, frequencies, view)) for view in range(routing.num_views)]
    return {"hottest": {part: float(np.mean([view[part] for view in views])) for part in views[0]}, "by_view": views}


def counted_update_shares(updates: list[Tensor], num_rows: int, thresholds: list[int]) -> dict[str, float]:
    """For each threshold N, the share of `num_rows` rows with more than N updates; mean over views. `updates`: of each
    view's rows; those that were never touched may be left out."""
    return {str(n): float(np.mean([int((one > n).sum()) / num_rows for one in updates])) for n in thresholds}


def expected_update_shares(
    frequencies: NDArray[np.float64], routing: Routing | None, num_rows: int, tokens: int, thresholds: list[int]
) -> dict[str, float]:
    """For each threshold N, the share of rows with more than N expected updates after `tokens`; mean over views."""
    views = range(1 if routing is None else routing.num_views)
    expected = [tokens * row_probabilities(frequencies, routing, view, num_rows) for view in views]
    return {str(n): float(np.mean([(one > n).mean() for one in expected])) for n in thresholds}


PERCENTILES = (5, 25, 50, 75, 95)
INFINITY_BITS = 0x7F800000
"""Of an fp32 infinity."""


class RowMovement:
    def __init__(self, tables: list[str]) -> None:
        """`tables`: names of all tables, also of those of which this rank owns no row."""
        self._movement: dict[str, list[Tensor]] = {name: [torch.empty(0)] for name in tables}
        self._zero_rows = dict.fromkeys(tables, 0)

    def add(self, table: str, initial_RW: Tensor, now_RW: Tensor) -> None:
        """Rows of a table that this rank owns: initial and current values."""
        start = initial_RW.double().norm(dim=1)
        moved = (now_RW.double() - initial_RW.double()).norm(dim=1)
        self._zero_rows[table] += int((start == 0).sum())
        self._movement[table].append((moved / start.clamp_min(1e-30)).float().cpu())

    def figures(self, ranks: ProcessGroup) -> dict[str, Any]:
        """Of all tables, on every rank. All ranks call it."""
        names = list(self._movement)
        values = [torch.cat(self._movement[name]).sort().values for name in names]
        wide = [v.double() for v in values]
        sums = torch.tensor([[len(v), float(v.sum()), float(v.square().sum())] for v in wide], dtype=torch.float64)
        sums = ranks.host.all_reduce_sum(sums)
        zeros = ranks.host.all_reduce_sum(torch.tensor([self._zero_rows[name] for name in names]))
        percentiles = exact_percentiles(values, sums[:, 0].long(), PERCENTILES, ranks.host.all_reduce_sum)
        tables: dict[str, Any] = {}
        for name, (count, total, squares), zero, of_table in zip(
            names, sums.tolist(), zeros.tolist(), percentiles, strict=True
        ):
            if zero or not count:
                continue  # movement relative to a zero row is undefined
            mean = total / count
            values_at = {f"p{p}": float(value) for p, value in zip(PERCENTILES, of_table, strict=True)}
            spread = max(squares / count - mean * mean, 0.0) ** 0.5
            tables[name] = {
                "rows": int(count),
                "mean": mean,
                "cv": spread / mean if mean else None,
                "gap": values_at["p75"] / values_at["p25"] if values_at["p25"] else None,
                **values_at,
            }
        return {
            **{key: _median([one[key] for one in tables.values()]) for key in ("cv", "gap", "mean")},
            "tables": tables,
            "from_zero": [name for name, zero in zip(names, zeros.tolist(), strict=True) if zero],
        }


def exact_percentiles(
    values: list[Tensor], counts: Tensor, percentiles: tuple[int, ...], total: Callable[[Tensor], Tensor]
) -> list[list[float]]:
    """Percentiles of several lists of non-negative fp32 values spread over ranks, interpolated linearly as by numpy.

    `values`: this rank's part of each list, sorted. `counts`: the length of each list over all ranks. `total` sums
    over ranks; it is called 31 times.

    Non-negative floats are ordered as their bits, so a bisection over bit patterns finds a value in 31 rounds."""
    position = counts[:, None].double().sub(1).clamp_min(0) * torch.tensor(percentiles, dtype=torch.float64) / 100
    lower = position.floor().long()
    wanted = torch.cat((lower, torch.minimum(lower + 1, (counts[:, None] - 1).clamp_min(0))), dim=1)
    bits = [one.contiguous().view(torch.int32) for one in values]
    low, high = torch.zeros_like(wanted), torch.full_like(wanted, INFINITY_BITS)
    for _ in range(31):
        middle = (low + high) // 2
        below = torch.stack(
            [torch.searchsorted(b, m.to(torch.int32), right=True) for b, m in zip(bits, middle, strict=True)]
        )
        enough = total(below) > wanted
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle + 1)
    order_statistics = high.to(torch.int32).view(torch.float32).double()
    first, second = order_statistics.split(len(percentiles), dim=1)
    return (first + (position - lower) * (second - first)).tolist()


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None
