"""What a routing does to a table: tokens and hits of each region, concentration of hits, collisions.

In: a `Routing` and, for everything about hits, the token frequencies. Out: plain numbers.

Reading a token visits each of its slots by each of its hash paths, and every visit is one hit of the row it ends in: a
VIP token with 3 additional rows and 2 paths makes 8 hits, 2 in each of its 4 rows; a dense token makes 2 hits, in two
rows or, where its paths meet, both in one. Slot weights do not matter. The hits of a row are summed over the tokens,
weighted by their frequency. `row_hits[f]` is the share of all hits that the hottest floor(f * num_rows) rows take (at
least one row; unused rows count as rows).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.errors import UserError
from xgram_dist.tables.routing import VIP, Routing, region_of_rows

# Fractions of the rows, as text and as one part in so many: exact, so that the floor is too.
HOTTEST = {"0.001": 1000, "0.01": 100, "0.1": 10}


@dataclass(frozen=True)
class RegionStatistics:
    """One region, or several taken together."""

    name: str
    tokens: int
    rows: int
    share_of_hits: float | None

    @property
    def tokens_per_row(self) -> float:
        return self.tokens / self.rows if self.rows else 0.0


@dataclass(frozen=True)
class RoutingStatistics:
    vip: RegionStatistics
    buckets: tuple[RegionStatistics, ...]
    unused_rows: int  # rows no token reads, in view 0
    reads_per_token: float  # rows read for a token, merged; mean over the vocabulary
    reads_per_position: float | None  # the same, mean over the text
    most_tokens_in_a_row: int
    indistinguishable_tokens: int  # tokens with the same rows as another token in every view
    row_hits: dict[str, float] | None
    row_hits_by_view: list[dict[str, float]] | None


def path_hits(routing: Routing, view: int) -> NDArray[np.float64]:
    """How often each access of a view is visited when its token is read once."""
    accesses = routing.views[view]
    if not routing.gated:
        return np.ones(len(accesses.rows))
    region = region_of_rows(routing, accesses.rows)
    dense = region >= 0
    dense[dense] = ~routing.bucket_sparse[region[dense]]
    # A dense token has one slot of weight 1, so its coefficient is the number of paths merged into the access.
    hits = accesses.coefficients.astype(np.float64).round()
    hits[~dense] = routing.settings.paths
    return hits


def hits_per_row(routing: Routing, frequencies: NDArray[Any], view: int = 0) -> NDArray[np.float64]:
    """Hits of every row for a text with these token frequencies."""
    if len(frequencies) != routing.vocabulary:
        raise UserError(
            f"the frequencies are of {len(frequencies):,} tokens, the routing of {routing.vocabulary:,}; "
            f"use frequencies of the same tokenizer"
        )
    accesses = routing.views[view]
    weight = path_hits(routing, view) * np.repeat(frequencies, np.diff(accesses.offsets))
    return np.bincount(accesses.rows, weights=weight, minlength=routing.num_rows).astype(np.float64)


def row_hits(hits: NDArray[np.float64]) -> dict[str, float]:
    """Share of all hits that the hottest 0.1 %, 1 % and 10 % of the rows take, keyed by the fraction of rows."""
    hottest_first = np.sort(hits)[::-1]
    total = hits.sum()
    return {
        fraction: float(hottest_first[: max(1, len(hits) // parts)].sum() / total)
        for fraction, parts in HOTTEST.items()
    }


def routing_statistics(routing: Routing, frequencies: NDArray[Any] | None = None) -> RoutingStatistics:
    """Everything above; regions and hits are those of view 0, unless they say otherwise."""
    view = routing.views[0]
    reads = np.diff(view.offsets)
    tokens_in_row = np.bincount(view.rows, minlength=routing.num_rows)
    hits = by_view = None
    if frequencies is not None:
        hits_of_views = [hits_per_row(routing, frequencies, m) for m in range(routing.num_views)]
        hits, by_view = hits_of_views[0], [row_hits(view_hits) for view_hits in hits_of_views]
    vip, buckets = _region_statistics(routing, hits)
    return RoutingStatistics(
        vip=vip,
        buckets=buckets,
        unused_rows=int((tokens_in_row == 0).sum()),
        reads_per_token=float(reads.mean()),
        reads_per_position=None if frequencies is None else float((reads * frequencies).sum() / np.sum(frequencies)),
        most_tokens_in_a_row=int(tokens_in_row.max()),
        indistinguishable_tokens=indistinguishable_tokens(routing),
        row_hits=by_view[0] if by_view else None,
        row_hits_by_view=by_view,
    )


def merged(name: str, regions: list[RegionStatistics]) -> RegionStatistics:
    """Several regions as one."""
    shares = [region.share_of_hits for region in regions if region.share_of_hits is not None]
    share = sum(shares) if len(shares) == len(regions) else None
    return RegionStatistics(name, sum(r.tokens for r in regions), sum(r.rows for r in regions), share)


def indistinguishable_tokens(routing: Routing) -> int:
    """Tokens that read exactly the rows of some other token, in every view: the table cannot tell them apart."""
    if not routing.gated:
        return 0
    label = np.zeros(routing.vocabulary, dtype=np.int64)
    for view in routing.views:
        reads = np.diff(view.offsets)
        # Sorted by token, then row: two paths in swapped order read the same rows.
        order = np.lexsort((view.rows, view.tokens()))
        sorted_rows = view.rows[order].astype(np.int64)
        for position in range(int(reads.max())):
            long_enough = reads > position
            row = np.full(routing.vocabulary, routing.num_rows, dtype=np.int64)
            row[long_enough] = sorted_rows[view.offsets[:-1][long_enough] + position]
            label = np.unique(label * (routing.num_rows + 1) + row, return_inverse=True)[1]
    return int((np.bincount(label)[label] > 1).sum())


def _region_statistics(
    routing: Routing, hits: NDArray[np.float64] | None
) -> tuple[RegionStatistics, tuple[RegionStatistics, ...]]:
    view = routing.views[0]
    num_buckets = len(routing.bucket_start)
    # All rows of a token lie in one region, so its first row tells its bucket; a plain table is one region.
    region = region_of_rows(routing, view.rows[view.offsets[:-1]]) if routing.gated else None
    tokens = np.zeros(0) if region is None else np.bincount(region[region != VIP], minlength=num_buckets)
    total = None if hits is None else float(hits.sum())

    def share(start: int, rows: int) -> float | None:
        return None if hits is None or total is None else float(hits[start : start + rows].sum() / total)

    vip_tokens = 0 if region is None else int((region == VIP).sum())
    vip = RegionStatistics("VIP", vip_tokens, routing.vip_rows, share(0, routing.vip_rows))
    buckets = []
    for b in range(num_buckets):
        start, rows = int(routing.bucket_start[b]), int(routing.bucket_rows[b])
        buckets.append(RegionStatistics(f"bucket {b}", int(tokens[b]), rows, share(start, rows)))
    return vip, tuple(buckets)
