"""Import a published token map.

In: the `.npz` that X-gram's authors publish with their models. Out: a `Routing` of any number of views.

The map places tokens, not rows: `token_to_group_id` (a bucket, or -1 for VIP) with `token_intra_rank`, and for the
additional slots of token t the entries alias_offsets[t] .. alias_offsets[t + 1] of `alias_group_ids`,
`alias_intra_ranks`, `alias_weights`. The rows follow from the regions (routing.py): VIP ranks count from row 0
(additional VIP slots rank from `top_k` on), the ranks of a bucket from the start of its region, and the tokens of a
bucket that overflows its region are hashed. The number of hash paths is not in the map.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.errors import BadFileError, UserError
from xgram_dist.files import Arrays, float_array, int_array, int_scalar, read_npz
from xgram_dist.tables.frequencies import MAX_VOCABULARY
from xgram_dist.tables.routing import Routing, RoutingSettings
from xgram_dist.tables.routing_build import NO_ROW, Regions, Slots, build_views, check_views, plan_regions, slot_weights

FILE_KIND = "a token map (.npz with `token_to_group_id`, `token_intra_rank` and the `alias_` arrays)"
FORMAT_VERSION = 1
VIP_GROUP = -1

_NUMBERS = ("format_version", "vocab_size", "total_capacity", "max_copies", "bucket_count", "top_k")
_FRACTIONS = ("alpha", "multi_weight_decay")
_LISTS = ("token_to_group_id", "token_intra_rank", "bucket_token_counts")
_ALIASES = ("alias_offsets", "alias_group_ids", "alias_intra_ranks", "alias_weights")


@dataclass(frozen=True)
class _Aliases:
    """The additional slots, one entry each."""

    token: NDArray[np.int64]
    number: NDArray[np.int64]  # 1 for a token's first additional slot
    group: NDArray[np.int64]
    rank: NDArray[np.int64]
    weight: NDArray[np.float64]


def import_token_map(path: str | Path, views: int, paths: int = RoutingSettings.paths) -> Routing:
    """The routing a token map describes."""
    check_views(views)
    arrays = read_npz(path, FILE_KIND, names={*_NUMBERS, *_FRACTIONS, *_LISTS, *_ALIASES})
    for name in (*_NUMBERS, *_FRACTIONS, *_LISTS, *_ALIASES):
        if name not in arrays:
            raise BadFileError(f"{path} is not {FILE_KIND}: array '{name}' is missing")
    settings, vocabulary, num_rows = _read_settings(arrays, path, paths)
    try:
        regions = plan_regions(settings, num_rows)
    except UserError as error:
        raise BadFileError(f"{path}: {error}") from error
    group = int_array(arrays, "token_to_group_id", path, vocabulary)
    rank = int_array(arrays, "token_intra_rank", path, vocabulary)
    sizes = _check_groups(group, rank, settings, path)
    aliases = _read_aliases(arrays, path, vocabulary, settings)
    sparse = sizes <= regions.region_rows
    _check_aliases(aliases, group, sparse, settings, regions, path)
    _check_counts(arrays, path, sizes, aliases, settings)
    slots = assign_slots(group, rank, sparse, aliases, regions, settings)
    _check_rows_unshared(slots, path)
    return Routing(
        vocabulary=vocabulary,
        num_rows=num_rows,
        views=build_views(slots, paths, views),
        vip_rows=regions.vip_rows,
        bucket_start=np.array([regions.start(b) for b in range(settings.buckets)], dtype=np.int64),
        bucket_rows=np.full(settings.buckets, regions.region_rows, dtype=np.int64),
        bucket_sparse=sparse,
        settings=settings,
        gated=True,
        source="token map",
    )


def _read_settings(arrays: Arrays, path: str | Path, paths: int) -> tuple[RoutingSettings, int, int]:
    numbers = {name: int_scalar(arrays, name, path) for name in _NUMBERS}
    if numbers["format_version"] != FORMAT_VERSION:
        raise BadFileError(
            f"{path}: 'format_version' is {numbers['format_version']}; this program reads {FORMAT_VERSION}"
        )
    vocabulary, num_rows = numbers["vocab_size"], numbers["total_capacity"]
    if not 1 <= vocabulary <= MAX_VOCABULARY:
        raise BadFileError(f"{path}: 'vocab_size' is {vocabulary}; it must be from 1 to {MAX_VOCABULARY:,}")
    if not 1 <= num_rows <= vocabulary:
        raise BadFileError(
            f"{path}: 'total_capacity' is {num_rows}; it must be from 1 to the vocabulary of {vocabulary:,}"
        )
    # Each of these needs rows, so the table's length bounds them; without a bound they could ask for endless memory.
    for name in ("max_copies", "bucket_count", "top_k"):
        if not 0 <= numbers[name] <= num_rows:
            raise BadFileError(
                f"{path}: '{name}' is {numbers[name]}; it must be from 0 to the table's {num_rows:,} rows"
            )
    try:
        settings = RoutingSettings(
            vip=numbers["top_k"],
            buckets=numbers["bucket_count"],
            compression=num_rows / vocabulary,
            paths=paths,
            alpha=_fraction(arrays, "alpha", path),
            copies=numbers["max_copies"],
            decay=_fraction(arrays, "multi_weight_decay", path),
        )
    except UserError as error:
        raise BadFileError(f"{path}: {error}") from error
    return settings, vocabulary, num_rows


def _fraction(arrays: Arrays, name: str, path: str | Path) -> float:
    array = arrays[name]
    if array.dtype.kind != "f" or array.size != 1:
        raise BadFileError(f"{path}: '{name}' has type {array.dtype} and {array.size} values; it must be one float")
    # The shortest decimal of the stored precision: float32 0.8 is 0.8, not 0.800000011920929.
    return float(str(array.reshape(-1)[0]))


def _check_groups(
    group: NDArray[np.int64], rank: NDArray[np.int64], settings: RoutingSettings, path: str | Path
) -> NDArray[np.int64]:
    """Tokens per bucket, if groups are in range and the ranks of each group are 0, 1, 2, ..."""
    if group.min() < VIP_GROUP or group.max() >= settings.buckets:
        worst = group.min() if group.min() < VIP_GROUP else group.max()
        raise BadFileError(f"{path}: 'token_to_group_id' holds {worst}; it must be from -1 to {settings.buckets - 1}")
    counts = np.bincount(group + 1, minlength=settings.buckets + 1)
    if counts[0] != settings.vip:
        raise BadFileError(f"{path}: {counts[0]} tokens are in group -1 (VIP); 'top_k' says {settings.vip}")
    order = np.lexsort((rank, group))
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    expected = np.arange(len(group)) - first[group[order] + 1]
    wrong = np.flatnonzero(rank[order] != expected)
    if len(wrong):
        token = int(order[wrong[0]])
        raise BadFileError(
            f"{path}: 'token_intra_rank' of token {token} in group {group[token]} is {rank[token]}; the ranks of a "
            f"group must be 0, 1, 2 and so on, without gaps"
        )
    return counts[1:]


def _read_aliases(arrays: Arrays, path: str | Path, vocabulary: int, settings: RoutingSettings) -> _Aliases:
    offsets = int_array(arrays, "alias_offsets", path, vocabulary + 1)
    if offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any():
        raise BadFileError(f"{path}: 'alias_offsets' must start at 0 and never fall")
    number = np.diff(offsets)
    if number.max() > settings.copies:
        raise BadFileError(
            f"{path}: token {number.argmax()} has {number.max()} additional slots; 'max_copies' is {settings.copies}"
        )
    total = int(offsets[-1])
    token = np.repeat(np.arange(vocabulary, dtype=np.int64), number)
    slot = np.arange(total, dtype=np.int64) - offsets[token] + 1
    weight = float_array(arrays, "alias_weights", path, total)
    # Maps store weights as float32. Where one is decay^c to that precision, decay^c itself is taken, so that a map
    # gives bit for bit the coefficients, and the hash, of the same routing built from frequencies.
    exact = slot_weights(settings.copies, settings.decay)[slot]
    return _Aliases(
        token=token,
        number=slot,
        group=int_array(arrays, "alias_group_ids", path, total),
        rank=int_array(arrays, "alias_intra_ranks", path, total),
        weight=np.where(np.isclose(weight, exact, rtol=1e-6, atol=0), exact, weight),
    )


def _check_aliases(
    aliases: _Aliases,
    group: NDArray[np.int64],
    sparse: NDArray[np.bool_],
    settings: RoutingSettings,
    regions: Regions,
    path: str | Path,
) -> None:
    def refuse(wrong: NDArray[np.bool_], name: str, values: NDArray[Any], limit: str) -> None:
        if wrong.any():
            place = int(np.flatnonzero(wrong)[0])
            token = aliases.token[place]
            raise BadFileError(f"{path}: '{name}' of token {token} is {values[place]}; {limit}")

    # Rows of a dense bucket are all hashed into: neither may its tokens have slots, nor others a slot there.
    sparse_or_vip = np.append(sparse, True)
    in_range = (aliases.group >= VIP_GROUP) & (aliases.group < settings.buckets)
    refuse(~in_range, "alias_group_ids", aliases.group, f"it must be from -1 to {settings.buckets - 1}")
    refuse(
        ~sparse_or_vip[aliases.group], "alias_group_ids", aliases.group, "that bucket overflows and has no spare rows"
    )
    refuse(
        ~sparse_or_vip[group[aliases.token]], "alias_group_ids", aliases.group, "a hashed token has no additional slots"
    )
    limit = np.where(aliases.group == VIP_GROUP, regions.vip_rows, regions.region_rows)
    outside = (aliases.rank < 0) | (aliases.rank >= limit)
    refuse(outside, "alias_intra_ranks", aliases.rank, "it must lie inside its group's region")
    refuse(~((aliases.weight > 0) & (aliases.weight <= 1)), "alias_weights", aliases.weight, "it must be in (0, 1]")


def _check_counts(
    arrays: Arrays, path: str | Path, sizes: NDArray[np.int64], aliases: _Aliases, settings: RoutingSettings
) -> None:
    stated = int_array(arrays, "bucket_token_counts", path, settings.buckets)
    used = sizes + np.bincount(aliases.group[aliases.group != VIP_GROUP], minlength=settings.buckets)
    wrong = np.flatnonzero(stated != used)
    if len(wrong):
        b = wrong[0]
        raise BadFileError(
            f"{path}: 'bucket_token_counts' of bucket {b} is {stated[b]}; its tokens and slots are {used[b]}"
        )


def assign_slots(
    group: NDArray[np.int64],
    rank: NDArray[np.int64],
    sparse: NDArray[np.bool_],
    aliases: _Aliases,
    regions: Regions,
    settings: RoutingSettings,
) -> Slots:
    vocabulary = len(group)
    # The last entry serves group -1: the VIP region starts at row 0 and is never hashed into.
    starts = np.array([*(regions.start(b) for b in range(settings.buckets)), 0], dtype=np.int64)
    direct = np.append(sparse, True)[group]
    rows = np.full((vocabulary, settings.copies + 1), NO_ROW, dtype=np.int64)
    weights = np.zeros(rows.shape)
    rows[direct, 0] = (starts[group] + rank)[direct]
    weights[direct, 0] = 1.0
    rows[aliases.token, aliases.number] = starts[aliases.group] + aliases.rank
    weights[aliases.token, aliases.number] = aliases.weight
    hashed_start = np.where(direct, NO_ROW, starts[group])
    return Slots(rows, weights, hashed_start, regions.region_rows)


def _check_rows_unshared(slots: Slots, path: str | Path) -> None:
    used = np.bincount(slots.rows[slots.rows != NO_ROW])
    if used.size and used.max() > 1:
        row = int(used.argmax())
        token = int(np.flatnonzero((slots.rows == row).any(axis=1))[-1])
        raise BadFileError(
            f"{path}: row {row} of token {token} is also another slot's; VIP and sparse rows are not shared"
        )
