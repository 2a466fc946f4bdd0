import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xgram_dist.data.order import GlobalOrder, floor_sum, mix_edges, permutation
from xgram_dist.errors import UserError

shards = st.lists(st.integers(1, 9), min_size=1, max_size=8)
mixes = st.lists(shards, min_size=1, max_size=4)


@given(st.integers(0, 60), st.integers(1, 200), st.integers(0, 300), st.integers(0, 500))
def test_floor_sum_is_the_sum_of_the_floors(count: int, modulus: int, factor: int, start: int) -> None:
    assert floor_sum(count, modulus, factor, start) == sum((factor * i + start) // modulus for i in range(count))


@given(st.integers(0, 500), st.integers(0, 2**64 - 1))
def test_a_permutation_holds_each_index_once(size: int, key: int) -> None:
    assert sorted(permutation(size, key)) == list(range(size))


@settings(max_examples=40, deadline=None)
@given(mixes, st.integers(1, 5), st.integers(0, 2**40), st.integers(1, 12))
def test_every_epoch_of_every_source_covers_each_sequence_exactly_once(
    mix: list[list[int]], per_chunk: int, seed: int, block: int
) -> None:
    order = GlobalOrder(mix, per_chunk, seed, block_chunks=block)
    samples = order.samples(0, 3 * sum(map(sum, mix)) * per_chunk)
    for source, sizes in enumerate(mix):
        size = sum(sizes) * per_chunk
        rows = samples.source == source
        drawn = (samples.chunk * per_chunk + samples.sequence)[rows]
        for epoch in range(len(drawn) // size):
            assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


@settings(max_examples=40, deadline=None)
@given(mixes, st.integers(0, 2**40), st.integers(0, 300), st.integers(1, 50))
def test_a_place_depends_on_its_number_alone(mix: list[list[int]], seed: int, first: int, count: int) -> None:
    whole = GlobalOrder(mix, 3, seed).samples(0, first + count)
    part = GlobalOrder(mix, 3, seed).samples(first, count)
    for name in ("source", "chunk", "sequence"):
        assert getattr(part, name).tolist() == getattr(whole, name)[first:].tolist()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(0, 2**63), st.integers(0, 10**15))
def test_shares_of_sources_are_exact_over_short_spans(weights: list[float], seed: int, first: int) -> None:
    order = GlobalOrder([[5]] * len(weights), 2, seed, weights)
    count = 1000
    drawn = np.bincount(order.source_of(first, count), minlength=len(weights))
    assert np.abs(drawn / count - np.array(weights) / sum(weights)).max() < 0.01
    for source in range(len(weights)):
        assert order.draws_before(first + count, source) - order.draws_before(first, source) == drawn[source]


def test_sequences_of_a_block_come_from_few_shards_so_that_data_can_be_streamed() -> None:
    order = GlobalOrder([[10] * 100], 5, seed=7, block_chunks=30)
    samples = order.samples(0, 100 * 10 * 5)
    for start in range(0, 5000, 150):
        assert len(set(samples.chunk[start : start + 150] // 10)) <= 3
    assert samples.chunk[:5].tolist() != sorted(samples.chunk[:5])


def test_seeds_and_epochs_give_other_orders() -> None:
    def drawn(seed: int, first: int) -> list[int]:
        samples = GlobalOrder([[50]], 4, seed).samples(first, 200)
        return list(samples.chunk * 4 + samples.sequence)

    assert drawn(1, 0) != drawn(2, 0)
    assert drawn(1, 0) != drawn(1, 200)
    assert drawn(1, 0) == drawn(1, 0)


FROZEN = [[0, 6, 0], [0, 2, 1], [0, 0, 1], [0, 4, 1], [1, 3, 0], [0, 3, 1], [0, 4, 0], [1, 1, 1]]


def test_the_order_of_a_seed_is_frozen() -> None:
    """A change here changes what every resumed run sees."""
    samples = GlobalOrder([[3, 4], [5]], 2, seed=17, weights=[0.7, 0.3]).samples(1_000_003, 8)
    assert [list(map(int, row)) for row in zip(samples.source, samples.chunk, samples.sequence, strict=True)] == FROZEN


@pytest.mark.parametrize("weights", [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0, 0.0]])
def test_a_source_of_weight_zero_is_never_drawn(weights: list[float]) -> None:
    order = GlobalOrder([[4]] * len(weights), 2, 1, weights)
    assert set(order.source_of(0, 5000).tolist()) == {weights.index(1.0)}


@pytest.mark.parametrize("weights", [[], [0.0], [-1.0, 2.0], [float("nan")], [float("inf")]])
def test_impossible_weights_are_a_sentence(weights: list[float]) -> None:
    with pytest.raises(UserError, match="weights"):
        mix_edges(weights)
