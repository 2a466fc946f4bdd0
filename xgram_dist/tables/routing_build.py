"""Build a routing from token frequencies.

In: a frequency (or count) for every token, the settings, the number of views. Out: a `Routing`.

1. Tokens are sorted by frequency, ties by token id; the first `vip` are VIP tokens, with rows of their own.
2. The others fill the buckets in that order, so that buckets weigh about the same; a token weighs frequency^alpha.
3. A bucket whose tokens fit its region is sparse: one row for each token, and spare rows are dealt out as additional
   rows.
4. A bucket whose tokens do not fit is dense: its tokens are hashed into its region, by `paths` hash paths.
5. From slots (VIP, sparse) and hash paths (dense) follow the access lists of each view.
At compression 1 none of this applies: row = token id, coefficient 1, no gate.

Hash: position = (token * multiplier mod 2^64, top bit cleared) mod rows of the region. View m takes its `paths`
multipliers from a circle of eight, starting at m * paths, so that the views of a site collide differently.

Coefficients: slot weights are normalised by their sum, and every hash path counts: all paths visit a slot of a VIP or
sparse token, so its coefficient is `paths` times its weight. Hash paths of a dense token that meet in one row are
merged and their coefficients summed.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.errors import UserError
from xgram_dist.tables.frequencies import check_frequencies
from xgram_dist.tables.routing import MAX_PATHS, MAX_ROWS, Routing, RoutingSettings, View

# A bucket is full when it reaches its share of the weight, up to this part of the total. Sums that meet the share
# exactly in real arithmetic miss it by rounding, in a direction that depends on the order of summation; the tolerance
# gives the exact outcome, and moves no other boundary by more than itself.
SHARE_TOLERANCE = 1e-12

MAX_VIEWS = 64
NO_ROW = -1


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
    slots = assign_slots(vip, others, bucket, sizes, regions, settings)
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


# Regions and slots


@dataclass(frozen=True)
class Regions:
    """Where the regions of a table with shared rows lie."""

    num_rows: int
    vip_rows: int  # the VIP region is rows 0 .. vip_rows - 1
    region_rows: int  # rows of each bucket's region
    buckets: int

    def start(self, bucket: int) -> int:
        return self.vip_rows + bucket * self.region_rows


def plan_regions(settings: RoutingSettings, num_rows: int) -> Regions:
    """Cut `num_rows` rows into the VIP region and equal bucket regions."""
    if num_rows > MAX_ROWS:
        raise UserError(f"a table of {num_rows:,} rows is too long; a routing holds at most {MAX_ROWS:,} rows")
    vip_rows = settings.vip * (1 + settings.copies)
    if vip_rows > num_rows:
        raise UserError(
            f"routing vip is {settings.vip}, which with copies {settings.copies} needs {vip_rows:,} rows, but the "
            f"table has {num_rows:,}; lower vip or copies, or raise compression"
        )
    region_rows = (num_rows - vip_rows) // settings.buckets
    if region_rows < 1:
        raise UserError(
            f"routing compression leaves {num_rows - vip_rows:,} of {num_rows:,} rows for {settings.buckets} buckets, "
            f"less than one row each; lower buckets or vip, or raise compression above {settings.compression}"
        )
    return Regions(num_rows, vip_rows, region_rows, settings.buckets)


@dataclass(frozen=True, eq=False)
class Slots:
    """The rows of every token, before hashing. A token has either slots or a region to be hashed into."""

    rows: NDArray[np.int64]  # [vocabulary, 1 + copies]; NO_ROW where there is no such slot
    weights: NDArray[np.float64]  # [vocabulary, 1 + copies]; not normalised
    hashed_start: NDArray[np.int64]  # [vocabulary]; first row of a dense token's region, NO_ROW for the others
    region_rows: int


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


def assign_slots(
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

    # VIP: base rows first, then the copies of each token.
    rank = np.arange(len(vip))
    rows[vip, 0] = rank
    for copy in range(copies):
        rows[vip, copy + 1] = settings.vip + rank * copies + copy

    # Buckets: sparse ones have slots, dense ones a region to hash into.
    first_of_bucket = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    position = np.arange(len(others)) - first_of_bucket[bucket]
    start = regions.vip_rows + bucket * regions.region_rows
    dense = sizes[bucket] > regions.region_rows
    hashed_start[others[dense]] = start[dense]
    for slot in range(copies + 1):
        # Spare rows are dealt out in rounds over the bucket: round `slot` follows the rows of the rounds before it.
        local = position + slot * sizes[bucket]
        in_region = ~dense & (local < regions.region_rows)
        rows[others[in_region], slot] = start[in_region] + local[in_region]
    weights = np.broadcast_to(slot_weights(copies, settings.decay), rows.shape)
    return Slots(rows, weights, hashed_start, regions.region_rows)


# Hashing, and the access lists of views

MULTIPLIERS = (
    11400714819323198485,
    14313749767032793493,
    18397679294719823053,
    13627969195753728349,
    7109453100751438417,
    1609587929392839161,
    15404834773449339307,
    10041221585803275913,
)

TOP_BIT_CLEARED = np.uint64(2**63 - 1)
assert len(MULTIPLIERS) == MAX_PATHS


def path_multiplier(view: int, path: int, paths: int) -> int:
    """The multiplier of hash path `path` of view `view`, when a token has `paths` paths."""
    return MULTIPLIERS[(view * paths + path) % len(MULTIPLIERS)]


def hash_positions(tokens: NDArray[np.int64], multiplier: int, region_rows: int) -> NDArray[np.int64]:
    """Position of each token inside a region of `region_rows` rows."""
    # Products of uint64 arrays wrap around at 2^64, which is the modulus wanted.
    product = tokens.astype(np.uint64) * np.uint64(multiplier)
    return ((product & TOP_BIT_CLEARED) % np.uint64(region_rows)).astype(np.int64)


def build_views(slots: Slots, paths: int, views: int) -> tuple[View, ...]:
    """The access lists of `views` views; they differ in the hash multipliers alone."""
    direct_weights = np.where(slots.rows != NO_ROW, slots.weights, 0.0)
    total = direct_weights.sum(axis=1, keepdims=True)
    # Dense tokens have no slots and so no weight; their coefficients come from the hash paths.
    direct: NDArray[np.float64] = direct_weights * (paths / np.where(total > 0, total, 1.0))
    hashed = np.flatnonzero(slots.hashed_start != NO_ROW)
    return tuple(_build_view(slots, direct, hashed, paths, view) for view in range(views))


def _build_view(slots: Slots, direct: NDArray[np.float64], hashed: NDArray[np.int64], paths: int, view: int) -> View:
    vocabulary, num_slots = slots.rows.shape
    width = max(num_slots, paths)
    rows = np.full((vocabulary, width), NO_ROW, dtype=np.int64)
    coefficients = np.zeros((vocabulary, width))
    rows[:, :num_slots] = slots.rows
    coefficients[:, :num_slots] = direct
    if len(hashed):
        rows[hashed, :paths], coefficients[hashed, :paths] = _hash_paths(slots, hashed, paths, view)
    present = rows != NO_ROW
    offsets = np.zeros(vocabulary + 1, dtype=np.int64)
    np.cumsum(present.sum(axis=1), out=offsets[1:])
    return View(offsets, rows[present].astype(np.int32), coefficients[present].astype(np.float32))


def _hash_paths(
    slots: Slots, tokens: NDArray[np.int64], paths: int, view: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Rows and coefficients of the dense tokens, one column per path; equal rows merge into the first path."""
    positions = [hash_positions(tokens, path_multiplier(view, path, paths), slots.region_rows) for path in range(paths)]
    rows = slots.hashed_start[tokens][:, None] + np.stack(positions, axis=1)
    coefficients = np.ones(rows.shape)
    for path in range(1, paths):
        for earlier in range(path):
            # `rows` of an already merged path is NO_ROW, so a path is merged once, into the first that met its row.
            same = (rows[:, path] == rows[:, earlier]) & (rows[:, path] != NO_ROW)
            coefficients[same, earlier] += coefficients[same, path]
            coefficients[same, path] = 0.0
            rows[same, path] = NO_ROW
    return rows, coefficients
