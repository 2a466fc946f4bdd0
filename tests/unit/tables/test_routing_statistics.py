"""Hits and collisions, against sums worked by hand or by a loop, and the figures of the published frequencies."""

import numpy as np
import pytest
from slow_routing import slow_routing

from xgram_dist.errors import UserError
from xgram_dist.tables.frequencies import load_frequencies
from xgram_dist.tables.routing import RoutingSettings
from xgram_dist.tables.routing_build import build_routing
from xgram_dist.tables.routing_import import import_token_map
from xgram_dist.tables.routing_statistics import hits_per_row, routing_statistics, row_hits


def percent(shares):
    return {part: round(100 * share, 2) for part, share in shares.items()}


def test_row_hits_worked_by_hand():
    # 1000 rows with hits 1000, 999, ..., 1, in all 500,500: 1 row, 10 rows, 100 rows.
    hits = np.random.default_rng(0).permutation(np.arange(1.0, 1001.0))
    assert row_hits(hits) == pytest.approx({"0.001": 1000 / 500500, "0.01": 9955 / 500500, "0.1": 95050 / 500500})
    # Of 15 rows the hottest 10 % are one, and a table always has a hottest row.
    assert row_hits(np.arange(15.0)) == pytest.approx(dict.fromkeys(("0.001", "0.01", "0.1"), 14 / 105))


@pytest.mark.parametrize("decay", [0.8, 1.0])
@pytest.mark.parametrize("paths", [1, 2, 3])
def test_every_path_of_every_slot_is_a_hit(paths, decay):
    weights = [int(1000 / (1 + (7 * t) % 400)) for t in range(400)]
    counts = np.array(weights) ** 2
    chosen = RoutingSettings(vip=5, buckets=4, paths=paths, decay=decay)
    routing = build_routing(counts, chosen, views=2)
    for view in (0, 1):
        accesses, sizes, region = slow_routing(
            weights, vip=5, buckets=4, rows=200, paths=paths, copies=3, decay=decay, view=view
        )
        expected = np.zeros(200)
        for token, rows in accesses.items():
            bucket = (min(rows) - 20) // region
            dense = bucket >= 0 and sizes[bucket] > region
            for row, coefficient in rows.items():
                expected[row] += counts[token] * (coefficient if dense else paths)
        np.testing.assert_allclose(hits_per_row(routing, counts, view), expected)


def test_regions_tokens_and_shares_add_up(zipf):
    routing = build_routing(zipf, RoutingSettings(vip=5, buckets=4), views=2)
    found = routing_statistics(routing, zipf)
    regions = [found.vip, *found.buckets]
    assert sum(region.tokens for region in regions) == 400
    assert found.vip.tokens == 5
    assert sum(region.share_of_hits for region in regions) == pytest.approx(1)
    assert found.vip.rows + sum(b.rows for b in found.buckets) == 200
    assert found.buckets[3].tokens_per_row == found.buckets[3].tokens / 45
    assert found.row_hits == found.row_hits_by_view[0]
    reads = np.diff(routing.views[0].offsets)
    assert found.reads_per_position == pytest.approx((reads * zipf).sum() / zipf.sum())


def test_tokens_that_share_all_rows_are_counted():
    # One region of 2 rows and one path: the 4 tokens can only be told apart by one bit, so all of them share.
    one_path = RoutingSettings(vip=0, buckets=1, compression=0.5, paths=1)
    routing = build_routing(np.ones(4), one_path, views=1)
    rows = [routing.views[0].of_token(t)[0].tolist() for t in range(4)]
    expected = sum(rows.count(of_token) > 1 for of_token in rows)
    assert routing_statistics(routing).indistinguishable_tokens == expected > 0


def test_without_frequencies_there_are_no_hits(zipf):
    found = routing_statistics(build_routing(zipf, RoutingSettings(vip=5, buckets=4), 1))
    assert found.row_hits is None
    assert found.vip.share_of_hits is None
    assert found.vip.tokens == 5


def test_frequencies_of_another_vocabulary_are_refused(zipf):
    routing = build_routing(zipf, RoutingSettings(vip=5, buckets=4), 1)
    with pytest.raises(UserError, match="the frequencies are of 399 tokens, the routing of 400"):
        routing_statistics(routing, zipf[:-1])


def test_the_published_row_hit_table(real_frequencies_file, real_token_map):
    frequencies = load_frequencies(real_frequencies_file, 151_936)
    routing = build_routing(frequencies, RoutingSettings(), views=2)
    hashed = {"0.001": 42.96, "0.01": 66.34, "0.1": 86.77}
    assert percent(routing_statistics(routing, frequencies).row_hits) == hashed
    assert percent(routing_statistics(import_token_map(real_token_map, 1), frequencies).row_hits) == hashed
    plain = build_routing(frequencies, RoutingSettings(compression=1), views=1)
    assert percent(routing_statistics(plain, frequencies).row_hits) == {"0.001": 57.71, "0.01": 76.1, "0.1": 93.66}
