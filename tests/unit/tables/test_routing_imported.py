"""The authors' token map: its rows follow the layout rules, and a map with anything wrong in it is refused."""

import numpy as np
import pytest
from slow_routing import MULTIPLIERS, slow_routing

from xgram_dist.errors import UserError
from xgram_dist.tables.frequencies import load_frequencies
from xgram_dist.tables.routing import RoutingSettings
from xgram_dist.tables.routing_build import build_routing
from xgram_dist.tables.routing_import import import_token_map

VIP, BUCKETS, ROWS, COPIES = 5, 4, 200, 3
VIP_ROWS = VIP * (1 + COPIES)


def make_map(weights):
    """A small token map in the authors' format, derived from the slow loop's rows."""
    accesses, sizes, region = slow_routing(
        weights, vip=VIP, buckets=BUCKETS, rows=ROWS, paths=1, copies=COPIES, decay=0.8, view=0
    )
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    group, rank = np.zeros(len(weights), np.int32), np.zeros(len(weights), np.int32)
    places = [(-1, r) for r in range(VIP)] + [(b, r) for b, size in enumerate(sizes) for r in range(size)]
    for token, place in zip(order, places, strict=True):
        group[token], rank[token] = place
    aliases = [[] for _ in weights]
    for token, rows in accesses.items():
        if group[token] == -1 or sizes[group[token]] <= region:
            start = 0 if group[token] == -1 else VIP_ROWS + group[token] * region
            aliases[token] = [(group[token], row - start, 0.8 ** (c + 1)) for c, row in enumerate(list(rows)[1:])]
    flat = [alias for of_token in aliases for alias in of_token]
    counts = np.array(sizes) + [sum(a[0] == b for a in flat) for b in range(BUCKETS)]
    return {
        "token_to_group_id": group,
        "token_intra_rank": rank,
        "bucket_token_counts": counts.astype(np.int32),
        "format_version": np.int32(1),
        "vocab_size": np.int64(len(weights)),
        "total_capacity": np.int64(ROWS),
        "max_copies": np.int64(COPIES),
        "bucket_count": np.int64(BUCKETS),
        "top_k": np.int64(VIP),
        "alpha": np.float32(0.5),
        "multi_weight_decay": np.float32(0.8),
        "freq_path": np.array("somewhere.json"),
        "alias_offsets": np.concatenate([[0], np.cumsum([len(a) for a in aliases])]).astype(np.int64),
        "alias_group_ids": np.array([a[0] for a in flat], dtype=np.int64),
        "alias_intra_ranks": np.array([a[1] for a in flat], dtype=np.int64),
        "alias_weights": np.array([a[2] for a in flat], dtype=np.float32),
    }


@pytest.fixture
def weights():
    return [int(1000 / (1 + (7 * t) % 400)) for t in range(400)]


@pytest.fixture
def token_map(weights):
    return make_map(weights)


def imported(token_map, tmp_path, views=2):
    np.savez(tmp_path / "map.npz", **token_map)
    return import_token_map(tmp_path / "map.npz", views)


def test_a_map_gives_bit_for_bit_the_routing_built_from_its_frequencies(token_map, weights, tmp_path):
    built = build_routing(np.array(weights) ** 2, RoutingSettings(vip=VIP, buckets=BUCKETS), views=3)
    assert built.bucket_sparse.any()
    assert not built.bucket_sparse.all()
    loaded = imported(token_map, tmp_path, views=3)
    assert loaded.sha256() == built.sha256()
    assert loaded.settings == built.settings
    assert loaded.source == "token map"


def first(array, condition):
    return int(np.flatnonzero(condition(array))[0])


def set_at(name, place, value):
    def spoil(token_map):
        token_map[name][place(token_map) if callable(place) else place] = value

    return spoil


def dense_token(token_map):
    return first(token_map["token_to_group_id"], lambda g: g == BUCKETS - 1)


def bucket_alias(token_map):
    return first(token_map["alias_group_ids"], lambda g: g == 0)


SPOILT = {
    "missing": (lambda m: m.pop("alias_offsets"), "array 'alias_offsets' is missing"),
    "version": (lambda m: m.update(format_version=np.int32(2)), "'format_version' is 2; this program reads 1"),
    "vocabulary": (
        lambda m: m.update(vocab_size=np.int64(399)),
        "'token_to_group_id' has 400 values; it must have 399",
    ),
    "capacity": (lambda m: m.update(total_capacity=np.int64(401)), "'total_capacity' is 401; it must be from 1 to"),
    "VIPs": (lambda m: m.update(top_k=np.int64(60)), "vip is 60, which with copies 3 needs 240 rows"),
    "VIP count": (lambda m: m.update(top_k=np.int64(6)), r"5 tokens are in group -1 \(VIP\); 'top_k' says 6"),
    "copies": (lambda m: m.update(max_copies=np.int64(10**6)), "'max_copies' is 1000000; it must be from 0 to"),
    "buckets": (lambda m: m.update(bucket_count=np.int64(0)), "buckets is 0; it must be at least 1"),
    "decay": (lambda m: m.update(multi_weight_decay=np.float32(2)), "decay is 2.0; it must be above 0"),
    "group": (set_at("token_to_group_id", 0, BUCKETS), "'token_to_group_id' holds 4; it must be from -1 to 3"),
    "rank": (set_at("token_intra_rank", dense_token, 399), "the ranks of a group must be 0, 1, 2"),
    "float ranks": (
        lambda m: m.update(token_intra_rank=m["token_intra_rank"].astype(float)),
        "'token_intra_rank' has type float64",
    ),
    "counts": (set_at("bucket_token_counts", 2, 1), "'bucket_token_counts' of bucket 2 is 1; its tokens and slots are"),
    "offsets": (set_at("alias_offsets", 1, -1), "'alias_offsets' must start at 0 and never fall"),
    "alias group": (set_at("alias_group_ids", 0, 77), "is 77; it must be from -1 to 3"),
    "alias in a dense bucket": (set_at("alias_group_ids", 0, BUCKETS - 1), "that bucket overflows"),
    "alias rank": (set_at("alias_intra_ranks", bucket_alias, 45), "is 45; it must lie inside its group's region"),
    "weight": (set_at("alias_weights", 0, 0), r"is 0.0; it must be in \(0, 1\]"),
    "NaN weight": (set_at("alias_weights", 0, np.nan), "'alias_weights' holds nan at 0"),
    "shared row": (set_at("alias_intra_ranks", bucket_alias, 0), "is also another slot's"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_spoilt_map_is_refused(case, token_map, tmp_path):
    spoil, sentence = SPOILT[case]
    spoil(token_map)
    with pytest.raises(UserError, match=sentence):
        imported(token_map, tmp_path)


def test_a_hashed_token_with_additional_slots_is_refused(token_map, tmp_path):
    token = dense_token(token_map)
    token_map["alias_offsets"][token + 1 :] += 1
    place = token_map["alias_offsets"][token]
    for name, value in (("alias_group_ids", 0), ("alias_intra_ranks", 44), ("alias_weights", 0.8)):
        token_map[name] = np.insert(token_map[name], place, value)
    with pytest.raises(UserError, match="a hashed token has no additional slots"):
        imported(token_map, tmp_path)


def test_every_token_of_the_published_map_follows_the_layout_rules(real_token_map):
    routing = import_token_map(real_token_map, views=2)
    with np.load(real_token_map, allow_pickle=False) as file:
        group, rank = file["token_to_group_id"].tolist(), file["token_intra_rank"].tolist()
    assert (routing.vocabulary, routing.num_rows, routing.vip_rows) == (151_936, 75_968, 800)
    assert set(routing.bucket_rows.tolist()) == {2349}
    assert routing.bucket_sparse.tolist() == [True] * 20 + [False] * 12
    sizes = np.bincount(np.array(group) + 1)[1:].tolist()
    for number, view in enumerate(routing.views):
        rows, coefficients, offsets = view.rows.tolist(), view.coefficients.tolist(), view.offsets.tolist()
        normal = [[2 * 0.8**c / sum(0.8**k for k in range(n)) for c in range(n)] for n in range(5)]
        for token, (g, r) in enumerate(zip(group, rank, strict=True)):
            if g == -1:
                expected = [r, *(200 + 3 * r + c for c in range(3))]
            elif g < 20:
                expected = [800 + 2349 * g + r + c * sizes[g] for c in range(4) if r + c * sizes[g] < 2349]
            else:
                hashes = [token * MULTIPLIERS[2 * number + h] % 2**64 % 2**63 % 2349 for h in (0, 1)]
                expected = list(dict.fromkeys(800 + 2349 * g + position for position in hashes))
            span = slice(offsets[token], offsets[token + 1])
            assert rows[span] == expected
            wanted = normal[len(expected)] if g < 20 else [2 / len(expected)] * len(expected)
            assert all(abs(a - b) < 1e-6 for a, b in zip(coefficients[span], wanted, strict=True))


def test_reconstructed_frequencies_give_the_published_map_up_to_tied_tokens(real_token_map, real_frequencies_file):
    frequencies = load_frequencies(real_frequencies_file)
    built, published = build_routing(frequencies, RoutingSettings(), 2), import_token_map(real_token_map, 2)
    # Every bucket has the published number of tokens; tokens of equal frequency may stand in another order.
    _, place, times = np.unique(frequencies, return_inverse=True, return_counts=True)
    different = set()
    for ours, theirs in zip(built.views, published.views, strict=True):
        for t in range(built.vocabulary):
            if ours.of_token(t)[0].tolist() != theirs.of_token(t)[0].tolist():
                different.add(t)
    assert len(different) <= 22
    assert all(times[place[token]] > 1 for token in different)
