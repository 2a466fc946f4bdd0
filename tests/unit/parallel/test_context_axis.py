"""How sequences are cut over a context axis: every position is computed once, and each rank has the same work."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xgram_dist.parallel.context_parallel import WHOLE_SEQUENCES, ContextAxis, select_slices
from xgram_dist.tables.ngrams import NgramKeys, plan_ngram_hash, primes_from
from xgram_dist.tables.requests import NgramRequests, OwnerOrder, RowNumbering, TokenRequests


@st.composite
def cuts(draw):
    """(the axes of all ranks, a length that they can cut)"""
    size, reach = draw(st.integers(2, 6)), draw(st.integers(0, 4))
    chunk = draw(st.integers(max(1, reach), 9))
    return [ContextAxis(rank, size, "", reach) for rank in range(size)], 2 * size * chunk


def positions_of(parts):
    return np.concatenate([np.arange(part.start, part.stop) for part in parts])


@settings(max_examples=60, deadline=None)
@given(cuts())
def test_every_position_is_computed_by_one_rank_and_all_see_as_many_keys(cut):
    axes, length = cut
    computed = [positions_of(axis.computed(length)) for axis in axes]
    assert sorted(np.concatenate(computed)) == list(range(length))
    assert len({int((positions + 1).sum()) for positions in computed}) == 1


@settings(max_examples=60, deadline=None)
@given(cuts(), st.integers(1, 3))
def test_what_is_read_is_what_is_computed_and_the_positions_before(cut, parts):
    axes, length = cut
    x = torch.arange(3 * length).view(3, length)
    for axis in axes:
        read, computed = axis.select_read(x), axis.select(x)
        assert torch.equal(axis.without_before(read), computed)
        assert torch.equal(torch.from_numpy(axis.select_read_on_host(x.numpy())), read)
        assert axis.num_computed(read.shape[1]) == computed.shape[1] == length // axis.size
        for position in computed[0].tolist():
            wanted = range(max(0, position - axis.reach), position + 1)
            place = read[0].tolist().index(position)
            if read[0].tolist().count(position) == 1:
                assert read[0, max(0, place - len(wanted) + 1) : place + 1].tolist() == list(wanted)
        # Parts of what is computed, as the ranks of a tensor axis have them.
        ends = np.linspace(0, computed.shape[1], parts + 1).astype(int).tolist()
        for start, stop in pairwise(ends):
            if start < stop:
                kept = axis.kept(slice(start, stop), read.shape[1])
                assert torch.equal(select_slices(read, kept), computed[:, start:stop])


def test_whole_sequences_are_left_as_they_are():
    x = torch.arange(6).view(2, 3)
    for same in (WHOLE_SEQUENCES.select(x), WHOLE_SEQUENCES.select_read(x), WHOLE_SEQUENCES.without_before(x)):
        assert same is x


def test_a_length_that_cannot_be_cut_is_an_error():
    with pytest.raises(ValueError, match="10 tokens cannot be cut into 4 chunks"):
        ContextAxis(0, 2).computed(10)
    with pytest.raises(ValueError, match="8 tokens cannot be cut into 4 chunks of at least 3"):
        ContextAxis(0, 2, "", 3).computed(8)


@settings(max_examples=40, deadline=None)
@given(cuts(), st.integers(0, 99))
def test_the_keys_of_a_part_are_those_that_whole_sequences_have_there(cut, seed):
    axes, length = cut
    tokens = np.random.default_rng(seed).integers(0, 9, (2, 3, length))
    for axis in axes:
        requests = TokenRequests(RowNumbering(9, OwnerOrder(_Alone())), 1, axis)
        (window,) = requests.plan([tokens])
        read = axis.select_read_on_host(tokens)
        np.testing.assert_array_equal(window.keys_U[window.index.index], read)
        assert requests.count(tokens) == len(np.unique(read)) == len(window.keys_U)


@settings(max_examples=20, deadline=None)
@given(cuts(), st.integers(0, 99), st.sampled_from([None, 3]))
def test_n_grams_of_a_part_reach_over_the_tokens_before_it(cut, seed, end):
    axes, length = cut
    tokens = np.random.default_rng(seed).integers(0, 5, (2, length))
    hashing = plan_ngram_hash(9, (2, 3), (0,), [primes_from(7, 4)])
    keys = NgramKeys(hashing, np.arange(9), end)

    def listed(axis):
        requests = NgramRequests(keys, OwnerOrder(_Alone()), 1, _Serial(), axis)
        (window,) = requests.plan([tokens])
        return window.keys_U[window.index.slots(torch.device("cpu")).numpy()], len(window.keys_U)

    whole, _ = listed(WHOLE_SEQUENCES)
    for axis in axes:
        found, distinct = listed(axis)
        np.testing.assert_array_equal(found, whole[:, positions_of(axis.read(length))])
        assert distinct == len(np.unique(found))  # nothing else is fetched


class _Alone:
    rank, size = 0, 1


class _Serial:
    def map(self, function, items):
        return [function(item) for item in items]
