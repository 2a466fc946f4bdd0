"""Who owns which row, and for how many vectors a token is asked."""

import numpy as np
import pytest
import tiny_models as tiny

from xgram_dist.tables.frequencies import load_frequencies
from xgram_dist.tables.routing import RoutingSettings
from xgram_dist.tables.routing_build import build_routing
from xgram_dist.tables.row_sharding import POLICIES, owners_of_tokens, plan_row_sharding


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64, 100])
def test_every_row_has_one_owner_and_one_place_there(policy, ranks):
    routing = tiny.routing(tiny.config())
    placement = plan_row_sharding(routing, routing.num_rows, ranks, policy)
    seen = sorted(int(row) for rank in range(ranks) for row in placement.rows_of(rank))
    assert seen == list(range(routing.num_rows))
    for rank in range(ranks):
        rows = placement.rows_of(rank)
        assert placement.local[rows].tolist() == list(range(len(rows)))


def test_the_rows_of_a_token_that_shares_none_lie_with_one_owner():
    routing = tiny.routing(tiny.config())
    placement = plan_row_sharding(routing, routing.num_rows, 3)
    readers = np.bincount(routing.views[0].rows, minlength=routing.num_rows)
    readers += np.bincount(routing.views[1].rows, minlength=routing.num_rows)
    checked = 0
    for token in range(routing.vocabulary):
        rows = routing.views[0].rows[routing.views[0].offsets[token] : routing.views[0].offsets[token + 1]]
        if len(rows) > 1 and np.all(readers[rows] == 2):  # one reader, in each of two views
            assert len(set(placement.owner[rows].tolist())) == 1
            checked += 1
    assert checked > 3


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_a_bucket_that_fits_in_half_a_rank_lies_with_one_owner_and_ranks_hold_as_many_rows(ranks):
    routing = build_routing(1.0 / np.arange(1, 4001), RoutingSettings(vip=20, buckets=40), 2)
    placement = plan_row_sharding(routing, routing.num_rows, ranks)
    dense = [
        set(placement.owner[start : start + rows].tolist())
        for start, rows, sparse in zip(routing.bucket_start, routing.bucket_rows, routing.bucket_sparse, strict=True)
        if not sparse
    ]
    assert len(dense) > 8
    assert all(len(owners) == 1 for owners in dense)
    buckets = np.bincount([owner for owners in dense for owner in owners], minlength=ranks)
    assert buckets.max() - buckets.min() <= 1
    held = np.bincount(placement.owner, minlength=ranks)
    assert held.max() - held.min() <= 4
    offsets, _ = owners_of_tokens(routing, 1, placement, routing.vocabulary)
    assert np.all(np.diff(offsets) == 1)


def test_a_bucket_that_does_not_fit_is_spread_over_all_ranks():
    routing = build_routing(1.0 / np.arange(1, 4001), RoutingSettings(vip=20, buckets=40), 1)
    placement = plan_row_sharding(routing, routing.num_rows, 30)
    last = slice(int(routing.bucket_start[-1]), int(routing.bucket_start[-1] + routing.bucket_rows[-1]))
    assert not routing.bucket_sparse[-1]
    assert len(set(placement.owner[last].tolist())) > 20


def test_owners_of_a_token_are_the_owners_of_its_rows():
    routing = tiny.routing(tiny.config())
    placement = plan_row_sharding(routing, routing.num_rows, 4)
    for view in range(2):
        offsets, owners = owners_of_tokens(routing, view, placement, routing.vocabulary)
        lists = routing.views[view]
        for token in range(routing.vocabulary):
            rows = lists.rows[lists.offsets[token] : lists.offsets[token + 1]]
            expected = sorted(set(placement.owner[rows].tolist()))
            assert owners[offsets[token] : offsets[token + 1]].tolist() == expected


@pytest.mark.parametrize(("ranks", "limit"), [(4, 1.3), (16, 1.3), (64, 1.5)])
@pytest.mark.parametrize("compression", [0.5, 1.0])
def test_owners_are_balanced_under_the_real_token_frequencies(real_frequencies_file, ranks, limit, compression):
    """Most loaded owner / mean, in distinct tokens of a rank's step of 524,288 tokens."""
    frequencies = load_frequencies(real_frequencies_file)
    vocabulary = len(frequencies)
    routing = build_routing(frequencies, RoutingSettings(), 1) if compression < 1 else None
    rows = routing.num_rows if routing is not None else vocabulary
    placement = plan_row_sharding(routing, rows, ranks)
    offsets, owners = owners_of_tokens(routing, 0, placement, vocabulary)
    random = np.random.default_rng(0)
    tokens = np.unique(random.choice(vocabulary, size=524_288, p=frequencies / frequencies.sum()))
    asked = np.concatenate([owners[offsets[t] : offsets[t + 1]] for t in tokens])
    load = np.bincount(asked, minlength=ranks)
    assert load.max() / load.mean() <= limit
    assert len(asked) / len(tokens) <= (1.45 if ranks == 64 and compression < 1 else 1)  # vectors a token
    held = np.bincount(placement.owner, minlength=ranks)
    assert held.max() - held.min() <= 4
