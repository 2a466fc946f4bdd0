"""Build a routing from token frequencies.

In: a frequency (or count) for every token, the settings, the number of views. Out: a `Routing`.

1. Tokens are sorted by frequency, ties by token id; the first `vip` have rows of their own.
2. The others fill the buckets in that order, so that buckets weigh about the same, a token weighing frequency^alpha.
3. A bucket whose tokens fit its region is sparse: a row a token, and the spare rows are dealt out as additional rows.
4. A bucket whose tokens do not fit is dense: its tokens are hashed into its region, by `paths` paths.
At compression 1 none of this applies: row = token id, coefficient 1, no gate.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.errors import UserError
from xgram_dist.memory.routing.frequencies import check_frequencies
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.memory.routing.settings import Regions, RoutingSettings, plan_regions
from xgram_dist.memory.routing.views import NO_ROW, Slots, View, build_views

# A bucket is full when it reaches its share of the weight, up to this part of the total. Sums of equal or of fitted
# weights meet the share exactly on paper and miss it by rounding, in a direction that depends on the order of
# summation; with this allowance the outcome is the one on paper, and no other boundary moves by more than it.
SHARE_TOLERANCE = 1e-12

MAX_VIEWS = 64


def build_routing(frequencies: NDArray[Any], settings: RoutingSettings, views: int) -> Routing:
    """The routing of `views` views for tokens 0 .. len(frequencies) - 1."""
    check_views(views)
    frequencies = check_frequencies(frequencies, "frequencies")
    vocabulary = len(frequencies)
    if not settings.gated:
        return _plain_routing(vocabulary, settings, views)
    num_rows = settings.num_rows(vocabulary)
    regions = plan_regions(settings, num_rows)

    order = np.argsort(-frequencies, kind="stable")
    vip, others = order[: settings.vip], order[settings.vip :]
    bucket = fill_buckets(frequencies[others], settings.buckets, settings.alpha)
    sizes = np.bincount(bucket, minlength=settings.buckets)
    sparse = sizes <= regions.region_rows
    slots = _place(vip, others, bucket, sizes, regions, settings)
    return Routing(
        vocabulary=vocabulary,
        num_rows=num_rows,
        views=build_views(slots, settings.paths, views),
        vip_rows=regions.vip_rows,
        bucket_start=np.array([regions.start(b) for b in range(settings.buckets)], dtype=np.int64),
        bucket_rows=np.full(settings.buckets, regions.region_rows, dtype=np.int64),
        bucket_sparse=sparse,
        settings=settings,
        gated=True,
        source="frequencies",
    )


def check_views(views: int) -> None:
    if not 1 <= views <= MAX_VIEWS:
        raise UserError(f"views is {views}; it must be from 1 to {MAX_VIEWS}")


def fill_buckets(sorted_frequencies: NDArray[np.float64], buckets: int, alpha: float) -> NDArray[np.int64]:
    """The bucket of every token, for frequencies in descending order.

    A token goes to the first bucket b, not before its predecessor's, for which the weight accumulated before it is
    still below (b + 1) / buckets of the total; the last bucket takes all that remain. A token heavier than a
    bucket's share leaves the buckets it jumps over empty, and tokens never seen end in the last bucket.
    """
    total_frequency = sorted_frequencies.sum()
    weights = (sorted_frequencies / (total_frequency if total_frequency > 0 else 1.0)) ** alpha
    accumulated = np.cumsum(weights)
    before = np.concatenate([[0.0], accumulated[:-1]])
    total = accumulated[-1]
    full = total * (np.arange(1, buckets) / buckets - SHARE_TOLERANCE)
    bucket: NDArray[np.int64] = np.searchsorted(full, before, side="right").astype(np.int64)
    return bucket


def slot_weights(copies: int, decay: float) -> NDArray[np.float64]:
    """1 for the first slot, decay^c for the c-th additional one."""
    return np.power(float(decay), np.arange(copies + 1))


def _place(
    vip: NDArray[np.int64],
    others: NDArray[np.int64],
    bucket: NDArray[np.int64],
    sizes: NDArray[np.int64],
    regions: Regions,
    settings: RoutingSettings,
) -> Slots:
    """Slots of the VIP and sparse tokens, regions of the dense ones."""
    vocabulary, copies = len(vip) + len(others), settings.copies
    rows = np.full((vocabulary, copies + 1), NO_ROW, dtype=np.int64)
    hashed_start = np.full(vocabulary, NO_ROW, dtype=np.int64)

    rank = np.arange(len(vip))
    rows[vip, 0] = rank
    for copy in range(copies):
        rows[vip, copy + 1] = settings.vip + rank * copies + copy

    first_of_bucket = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    position = np.arange(len(others)) - first_of_bucket[bucket]
    start = regions.vip_rows + bucket * regions.region_rows
    dense = sizes[bucket] > regions.region_rows
    hashed_start[others[dense]] = start[dense]
    for slot in range(copies + 1):
        # Spare rows are dealt out in rounds over the bucket: round `slot` follows the rows of the rounds before it.
        local = position + slot * sizes[bucket]
        there = ~dense & (local < regions.region_rows)
        rows[others[there], slot] = start[there] + local[there]
    weights = np.broadcast_to(slot_weights(copies, settings.decay), rows.shape)
    return Slots(rows, weights, hashed_start, regions.region_rows)


def _plain_routing(vocabulary: int, settings: RoutingSettings, views: int) -> Routing:
    """Row = token id, coefficient 1, no regions."""
    view = View(
        np.arange(vocabulary + 1, dtype=np.int64),
        np.arange(vocabulary, dtype=np.int32),
        np.ones(vocabulary, dtype=np.float32),
    )
    none = np.zeros(0, dtype=np.int64)
    return Routing(
        vocabulary=vocabulary,
        num_rows=vocabulary,
        views=(view,) * views,
        vip_rows=0,
        bucket_start=none,
        bucket_rows=none.copy(),
        bucket_sparse=none.astype(bool),
        settings=settings,
        gated=False,
        source="frequencies",
    )
