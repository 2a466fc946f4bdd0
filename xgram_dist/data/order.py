"""The order of training data: a global sequence number to (source, chunk, sequence within the chunk).

In: a seed, the number of chunks in every shard of every source, weights, sequences per chunk. Out: the sample of every
draw n = 0, 1, 2, ... It is a function of (seed, n) alone: it does not depend on the number of ranks, the batch size,
earlier draws or a library's random generator, so that a run resumed on another number of ranks, or after an upgrade,
sees the same sequences. Pure numpy, no state but caches.

- The source of draw n: the golden-ratio sequence (offset + n * G) mod 2^64 compared with the cumulative weights. The
  proportions are exact to a few draws over any span, and the number of draws of a source before n has a closed form
  (`floor_sum`).
- The j-th draw of a source: epoch j // N, and within the epoch a permutation of its N sequences that respects shards.
  Shards are permuted, then sequences are shuffled within blocks of consecutive shards. A block is computed when it is
  reached, so that terabytes can be streamed with a few shards on disk. Small data is one block: a full shuffle.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.errors import UserError

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_TWO_64 = 1 << 64
BLOCK_CHUNKS = 4096  # chunks shuffled together; 4,096 chunks of 40,960 tokens are 0.3 to 0.7 GB
_KEPT_BLOCKS = 2


def mix64(values: NDArray[Any]) -> NDArray[Any]:
    """splitmix64's finaliser: uint64 in, well-mixed uint64 out."""
    z = values + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def key64(*values: int) -> int:
    """One well-mixed 64-bit number from several integers."""
    state = np.zeros(1, dtype=np.uint64)
    for value in values:
        state = mix64(state ^ mix64(np.array([value % _TWO_64], dtype=np.uint64)))
    return int(state[0])


def permutation(size: int, key: int) -> NDArray[Any]:
    """A permutation of 0..size-1: indices sorted by a keyed hash; ties, which are very rare, by index."""
    hashes = mix64(np.arange(size, dtype=np.uint64) ^ np.uint64(key))
    return np.argsort(mix64(hashes), kind="stable")


def floor_sum(count: int, modulus: int, factor: int, start: int) -> int:
    """Sum of (factor * i + start) // modulus over i = 0..count-1, exactly, in logarithmic time."""
    total = 0
    while True:
        quotient, factor = divmod(factor, modulus)
        total += quotient * (count * (count - 1) // 2)
        quotient, start = divmod(start, modulus)
        total += quotient * count
        last = factor * count + start
        if last < modulus:
            return total
        count, start = divmod(last, modulus)
        modulus, factor = factor, modulus


@dataclass(frozen=True)
class Samples:
    """The sequences of some draws; one array entry per draw."""

    source: NDArray[Any]
    chunk: NDArray[Any]  # within the source
    sequence: NDArray[Any]  # within the chunk


@dataclass(frozen=True)
class _Block:
    """Shuffled sequences of some consecutive shards."""

    start: int  # first draw of the block, within the epoch
    chunk: NDArray[Any]
    sequence: NDArray[Any]


class SourceOrder:
    """The endless order of the sequences of one source."""

    def __init__(
        self, shard_chunks: Sequence[int], sequences_per_chunk: int, key: int, block_chunks: int = BLOCK_CHUNKS
    ):
        self._shard_chunks = np.asarray(shard_chunks, dtype=np.int64)
        self._first_chunk = np.concatenate([[0], np.cumsum(self._shard_chunks)[:-1]]).astype(np.int64)
        self._per_chunk = sequences_per_chunk
        self._key = key
        self._block_chunks = block_chunks
        self.sequences = int(self._shard_chunks.sum()) * sequences_per_chunk
        self._epochs: OrderedDict[int, tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = OrderedDict()
        self._blocks: OrderedDict[tuple[int, int], _Block] = OrderedDict()

    def locate(self, draws: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Chunk and sequence of the given draws of this source, in any order."""
        chunk = np.empty(len(draws), dtype=np.int64)
        sequence = np.empty(len(draws), dtype=np.int64)
        epochs, within = np.divmod(draws, self.sequences)
        for epoch in np.unique(epochs):
            in_epoch = np.flatnonzero(epochs == epoch)
            _, _, starts = self._epoch(int(epoch))
            numbers = np.searchsorted(starts, within[in_epoch], side="right") - 1
            for number in np.unique(numbers):
                rows = in_epoch[numbers == number]
                block = self._block(int(epoch), int(number))
                chunk[rows] = block.chunk[within[rows] - block.start]
                sequence[rows] = block.sequence[within[rows] - block.start]
        return chunk, sequence

    def block_of(self, draw: int) -> tuple[tuple[int, int], list[int]]:
        """The block of a draw, as (epoch, number), and its shards: all are read while it lasts."""
        epoch, within = divmod(draw, self.sequences)
        shards, firsts, starts = self._epoch(epoch)
        number = int(np.searchsorted(starts, within, side="right")) - 1
        end = firsts[number + 1] if number + 1 < len(firsts) else len(shards)
        return (epoch, number), shards[firsts[number] : end].tolist()

    def _epoch(self, epoch: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Shards in the order of this epoch; for each block, the index of its first shard in it and its first draw."""
        if epoch not in self._epochs:
            shards = permutation(len(self._shard_chunks), key64(self._key, epoch, 1))
            sizes = self._shard_chunks[shards]
            firsts, chunks_before, block_chunks = [0], [0], 0
            for index, size in enumerate(sizes):
                if block_chunks >= self._block_chunks:
                    firsts.append(index)
                    chunks_before.append(chunks_before[-1] + block_chunks)
                    block_chunks = 0
                block_chunks += int(size)
            entry = shards, np.asarray(firsts), np.asarray(chunks_before, dtype=np.int64) * self._per_chunk
            self._epochs[epoch] = entry
            if len(self._epochs) > _KEPT_BLOCKS:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]

    def _block(self, epoch: int, number: int) -> _Block:
        cached = self._blocks.get((epoch, number))
        if cached is not None:
            self._blocks.move_to_end((epoch, number))
            return cached
        shards, firsts, starts = self._epoch(epoch)
        end = firsts[number + 1] if number + 1 < len(firsts) else len(shards)
        members = shards[firsts[number] : end]
        chunks = np.concatenate([self._first_chunk[s] + np.arange(self._shard_chunks[s]) for s in members])
        shuffled = permutation(len(chunks) * self._per_chunk, key64(self._key, epoch, 2, number))
        block = _Block(int(starts[number]), chunks[shuffled // self._per_chunk], shuffled % self._per_chunk)
        self._blocks[epoch, number] = block
        if len(self._blocks) > _KEPT_BLOCKS:
            self._blocks.popitem(last=False)
        return block


class SourceMix:
    """Which source each draw is from, by weights."""

    def __init__(self, weights: Sequence[float], seed: int):
        self.edges = mix_edges(weights)
        self._offset = key64(seed, 0x0F)

    def source_of(self, first: int, count: int) -> NDArray[Any]:
        """The sources of the draws first .. first+count-1."""
        n = np.uint64(first % _TWO_64) + np.arange(count, dtype=np.uint64)
        points = n * np.uint64(_GOLDEN) + np.uint64(self._offset)
        # An edge of 2^64 is above every point, and does not fit in a uint64.
        edges = np.array([edge for edge in self.edges[1:] if edge < _TWO_64], dtype=np.uint64)
        return np.searchsorted(edges, points, side="right")

    def draws_before(self, n: int, source: int) -> int:
        """Number of draws 0..n-1 from this source."""

        def below(edge: int) -> int:  # points below `edge`
            first = floor_sum(n, _TWO_64, _GOLDEN, self._offset)
            return first - floor_sum(n, _TWO_64, _GOLDEN, self._offset + _TWO_64 - edge) + n

        if n == 0:
            return 0
        return below(self.edges[source + 1]) - below(self.edges[source])


class GlobalOrder:
    """The order of a weighted mix of sources."""

    def __init__(
        self,
        shard_chunks: Sequence[Sequence[int]],
        sequences_per_chunk: int,
        seed: int,
        weights: Sequence[float] | None = None,
        block_chunks: int = BLOCK_CHUNKS,
        first_draws: Sequence[int] | None = None,
    ):
        """`first_draws`: for each source, how many of its draws came before draw 0 of the mix."""
        self.sources = [
            SourceOrder(shards, sequences_per_chunk, key64(seed, 0x50, number), block_chunks)
            for number, shards in enumerate(shard_chunks)
        ]
        self._mix = SourceMix(weights or [float(source.sequences) for source in self.sources], seed)
        self._first_draws = first_draws or [0] * len(self.sources)
        edges = self._mix.edges
        for number, source in enumerate(self.sources):
            if source.sequences == 0 and edges[number] < edges[number + 1]:
                raise UserError(f"source {number} has a weight but no sequence")

    def source_of(self, first: int, count: int) -> NDArray[Any]:
        """The sources of the draws first .. first+count-1."""
        return self._mix.source_of(first, count)

    def draws_before(self, n: int, source: int) -> int:
        """Number of draws 0..n-1 from this source."""
        return self._mix.draws_before(n, source)

    def blocks_at(self, n: int) -> dict[int, tuple[tuple[int, int], list[int]]]:
        """For every source with a weight, the block that its next draw from draw n on is in."""
        edges = self._mix.edges
        return {
            number: source.block_of(self._first_draws[number] + self.draws_before(n, number))
            for number, source in enumerate(self.sources)
            if edges[number] < edges[number + 1]
        }

    def samples(self, first: int, count: int) -> Samples:
        """The samples of the draws first .. first+count-1."""
        sources = self.source_of(first, count)
        chunk = np.empty(count, dtype=np.int64)
        sequence = np.empty(count, dtype=np.int64)
        for number in np.unique(sources):
            rows = np.flatnonzero(sources == number)
            before = self._first_draws[number] + self.draws_before(first, int(number))
            chunk[rows], sequence[rows] = self.sources[number].locate(before + np.arange(len(rows), dtype=np.int64))
        return Samples(sources, chunk, sequence)


def mix_edges(weights: Sequence[float]) -> list[int]:
    """Cumulative weights as integers from 0 to 2^64."""
    if not weights or any(not weight >= 0 for weight in weights) or not 0 < sum(weights) < float("inf"):
        raise UserError(f"weights {list(weights)} must be numbers of at least 0, at least one above 0")
    total = sum(weights)
    edges, running = [0], 0.0
    for weight in weights:
        running += weight
        edges.append(int(running / total * _TWO_64))
    # Rounding must not give the last points to a source of weight 0: the last source with a weight ends at 2^64.
    last = max(number for number, weight in enumerate(weights) if weight > 0)
    for number in range(last + 1, len(edges)):
        edges[number] = _TWO_64
    return edges
