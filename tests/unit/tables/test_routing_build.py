"""Rows and coefficients of every token: hand-worked cases, and an independent slow loop over the rules."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_routing import slow_routing

from xgram_dist.errors import UserError
from xgram_dist.tables.routing import RoutingSettings
from xgram_dist.tables.routing_build import MULTIPLIERS, build_routing, fill_buckets, hash_positions


def accesses(routing, token, view=0):
    rows, coefficients = routing.views[view].of_token(token)
    return dict(zip(rows.tolist(), coefficients.tolist(), strict=True))


def test_a_routing_worked_by_hand():
    # 12 tokens, 10 rows: VIP region 1 * (1 + 1) = 2 rows, then 2 regions of 4 rows. Token 5 is VIP. Of the
    # rest, tokens 3 (36) and 0 (16) weigh 6 and 4; tokens 1, 2, 4, 6..11 weigh 1 each, but 11, never seen, 0:
    # in all 18, so bucket 0 closes at 9: it holds 3 and 0, and 9 tokens follow, more than 4 rows.
    counts = np.array([16, 1, 1, 36, 1, 99, 1, 1, 1, 1, 1, 0])
    routing = build_routing(
        counts, RoutingSettings(vip=1, buckets=2, compression=10 / 12, copies=1, decay=0.5), views=1
    )
    assert (routing.num_rows, routing.vip_rows) == (10, 2)
    assert routing.bucket_start.tolist() == [2, 6]
    assert routing.bucket_rows.tolist() == [4, 4]
    assert routing.bucket_sparse.tolist() == [True, False]
    # A slot counts once a path: weights 1 and 0.5 become 2 * 2/3 and 2 * 1/3.
    assert accesses(routing, 5) == pytest.approx({0: 4 / 3, 1: 2 / 3})
    assert accesses(routing, 3) == pytest.approx({2: 4 / 3, 4: 2 / 3})
    assert accesses(routing, 0) == pytest.approx({3: 4 / 3, 5: 2 / 3})
    # hash paths of token 1 are the multipliers themselves without their top bit, which modulo 4 are 1 and 1.
    assert accesses(routing, 1) == {6 + 1: 2.0}
    for token in (1, 2, 4, 6, 7, 8, 9, 10, 11):
        assert set(accesses(routing, token)) <= {6, 7, 8, 9}


def test_spare_rows_are_dealt_in_rounds_and_not_beyond_copies():
    # 16 tokens, 15 rows, 3 regions of 5. Weights 4, 4, 4, 4, then eight times 1: a bucket closes at 8, so they
    # hold 2, 2 and 12 tokens. Of 5 rows 2 tokens take 0 and 1, then 2 and 3, and the first of them 4.
    counts = np.array([16] * 4 + [1] * 8 + [0] * 4)
    routing = build_routing(
        counts, RoutingSettings(vip=0, buckets=3, compression=15 / 16, copies=3, decay=1.0), views=1
    )
    assert routing.views[0].of_token(0)[0].tolist() == [0, 2, 4]
    assert routing.views[0].of_token(1)[0].tolist() == [1, 3]
    assert routing.views[0].of_token(3)[0].tolist() == [6, 8]
    few = build_routing(counts, RoutingSettings(vip=0, buckets=3, compression=15 / 16, copies=1, decay=1.0), views=1)
    assert few.views[0].of_token(0)[0].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("frequencies", "buckets", "expected"),
    [
        ([1, 1, 1, 1, 1, 1, 1, 1], 4, [0, 0, 1, 1, 2, 2, 3, 3]),  # shares met exactly
        ([1] * 10, 10, list(range(10))),  # 0.1 + 0.1 + 0.1 > 0.3 in floating point
        ([100, 1, 1, 1], 4, [0, 3, 3, 3]),  # a heavy token jumps over two buckets
        ([5, 0, 0], 3, [0, 2, 2]),  # never seen: the last bucket
        ([0, 0, 0], 3, [2, 2, 2]),
        ([3, 2, 1], 1, [0, 0, 0]),
    ],
)
def test_bucket_boundaries(frequencies, buckets, expected):
    assert fill_buckets(np.array(frequencies, dtype=np.float64), buckets, alpha=1.0).tolist() == expected


@settings(max_examples=150, deadline=None)
@given(
    roots=st.lists(st.integers(0, 30), min_size=8, max_size=120).filter(any),
    alpha=st.sampled_from([0.5, 1.0]),
    vip=st.integers(0, 4),
    buckets=st.integers(1, 6),
    compression=st.sampled_from([0.25, 0.5, 0.75]),
    paths=st.integers(1, 4),
    copies=st.integers(0, 4),
    decay=st.sampled_from([0.5, 0.8, 1.0]),
    view=st.integers(0, 4),
)
def test_build_agrees_with_the_slow_loop(roots, alpha, vip, buckets, compression, paths, copies, decay, view):
    rows = int(len(roots) * compression)
    if vip * (1 + copies) + buckets > rows:
        vip, buckets = 0, 1
    # frequency^alpha is then proportional to a whole number, and the slow loop can compare exactly.
    frequencies = np.array(roots) ** (2 if alpha == 0.5 else 1)
    routing = build_routing(
        frequencies, RoutingSettings(vip, buckets, compression, paths, alpha, copies, decay), view + 1
    )
    expected, sizes, region = slow_routing(
        roots, vip=vip, buckets=buckets, rows=rows, paths=paths, copies=copies, decay=decay, view=view
    )
    assert routing.num_rows == rows
    assert routing.bucket_rows.tolist() == [region] * buckets
    assert routing.bucket_sparse.tolist() == [size <= region for size in sizes]
    assert len(expected) == len(roots)
    for token, wanted in expected.items():
        got = accesses(routing, token, view)
        assert list(got) == list(wanted)  # the same rows, in slot order
        assert list(got.values()) == pytest.approx(list(wanted.values()), rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=60, max_size=300).filter(any), st.integers(1, 3), st.integers(1, 3))
def test_every_token_has_paths_worth_of_coefficients_and_only_dense_rows_are_shared(counts, paths, views):
    chosen = RoutingSettings(vip=3, buckets=4, compression=0.5, paths=paths, copies=2)
    routing = build_routing(np.array(counts), chosen, views)
    for view in routing.views:
        assert view.offsets[0] == 0
        assert (np.diff(view.offsets) >= 1).all()
        sums = np.add.reduceat(view.coefficients, view.offsets[:-1])
        np.testing.assert_allclose(sums, paths, rtol=1e-6)
        shared = np.flatnonzero(np.bincount(view.rows, minlength=routing.num_rows) > 1)
        for row in shared:
            bucket = np.searchsorted(routing.bucket_start, row, side="right") - 1
            assert bucket >= 0
            assert not routing.bucket_sparse[bucket]


def test_hash_wraps_at_64_bits_and_clears_the_top_bit():
    tokens = np.array([0, 1, 2, 151935], dtype=np.int64)
    for multiplier in MULTIPLIERS:
        expected = [(t * multiplier) % 2**64 % 2**63 % 2349 for t in tokens.tolist()]
        assert hash_positions(tokens, multiplier, 2349).tolist() == expected


def test_views_hash_differently_and_share_the_direct_rows(zipf):
    routing = build_routing(zipf, RoutingSettings(vip=5, buckets=4), views=5)
    direct = [t for t in range(400) if accesses(routing, t, 0) == accesses(routing, t, 1)]
    assert 20 < len(direct) < 200
    # 8 multipliers, 2 paths: the fifth view starts the circle again.
    assert [accesses(routing, t, 4) for t in range(400)] == [accesses(routing, t, 0) for t in range(400)]


def test_compression_one_is_the_plain_table_whatever_the_other_settings(zipf):
    routing = build_routing(zipf[:50], RoutingSettings(compression=1), views=2)
    assert not routing.gated
    assert (routing.num_rows, routing.vip_rows, len(routing.bucket_start)) == (50, 0, 0)
    assert all(accesses(routing, t, view) == {t: 1.0} for t in range(50) for view in range(2))


def test_counts_and_probabilities_give_the_same_map(zipf):
    chosen = RoutingSettings(vip=5, buckets=4)
    assert build_routing(zipf, chosen, 2).sha256() == build_routing(zipf / zipf.sum(), chosen, 2).sha256()


def test_rounding_does_not_cost_a_row():
    assert all(RoutingSettings(compression=n / 300).num_rows(300) == n for n in range(1, 301))
    assert RoutingSettings(compression=0.29).num_rows(100) == 29  # 0.29 * 100 is 28.999... in floating point
    assert RoutingSettings().num_rows(151_936) == 75_968
    assert RoutingSettings(compression=0.5).num_rows(7) == 3


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"compression": 0.0}, "compression is 0.0; it must be above 0 and at most 1"),
        ({"compression": 1.5}, "compression is 1.5; it must be above 0 and at most 1"),
        ({"compression": float("nan")}, "compression is nan; it must be above 0"),
        ({"alpha": 0}, "alpha is 0; it must be above 0"),
        ({"decay": -1.0}, "decay is -1.0; it must be above 0"),
        ({"buckets": 0}, "buckets is 0; it must be at least 1"),
        ({"vip": -1}, "vip is -1; it must be at least 0"),
        ({"vip": 2.5}, "vip is 2.5; it must be a whole number"),
        ({"copies": True}, "copies is True; it must be a whole number"),
        ({"copies": 65}, "copies is 65; it must be at most 64"),
        ({"paths": 9}, "paths is 9; there are 8 hash multipliers"),
        ({"decay": "x"}, "decay is 'x'; it must be a number"),
    ],
)
def test_impossible_settings_are_named(wrong, sentence):
    with pytest.raises(UserError, match=sentence):
        RoutingSettings(**wrong)


def test_too_few_rows_are_named(zipf):
    with pytest.raises(
        UserError, match="vip is 200, which with copies 3 needs 800 rows, but the table has 200; lower vip"
    ):
        build_routing(zipf, RoutingSettings(), 1)
    with pytest.raises(UserError, match="leaves 20 of 200 rows for 32 buckets, less than one row each"):
        build_routing(zipf, RoutingSettings(vip=45), 1)


@pytest.mark.parametrize(
    ("frequencies", "sentence"),
    [
        ([0.5, -0.1], "is -0.1 for token 1; it must be finite and at least 0"),
        ([float("nan"), 1], "is nan for token 0"),
        ([1, float("inf")], "is inf for token 1"),
        ([0, 0], "sums to 0"),
        ([[1, 2]], "must list one number for each token"),
        ([], "must list one number for each token"),
    ],
)
def test_impossible_frequencies_are_named(frequencies, sentence):
    with pytest.raises(UserError, match=sentence):
        build_routing(np.array(frequencies), RoutingSettings(), 1)


def test_number_of_views_is_bounded(zipf):
    for views in (0, 65):
        with pytest.raises(UserError, match=f"views is {views}; it must be from 1 to 64"):
            build_routing(zipf, RoutingSettings(vip=5, buckets=4), views)
