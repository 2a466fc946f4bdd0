"""Who asks whom for how many vectors in a step: tokens drawn for each rank, and the owners of their rows.

In: a recipe, the mesh axes, token frequencies and the routing. Out: for each window of the step, the numbers that every
rank sends and receives, to and from its node and others, under the row sharding that a run would have. Tokens are
independent draws, so a real text has somewhat fewer distinct ones. Keys of n-grams are hashed: each counts as new, and
falls on any owner with equal chance.

Loads are kept for each rank, not for each pair: 4,096 ranks are 16 million pairs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.config.schema import Config
from xgram_dist.estimate.comm import Axes
from xgram_dist.estimate.links import Times
from xgram_dist.estimate.traffic import Traffic
from xgram_dist.model.methods.base import method_of, table_layout
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.row_sharding import owners_of_tokens, plan_row_sharding


@dataclass
class WindowLoad:
    """Numbers (elements of vectors) of a window, of each rank; local rows do not travel."""

    requested_far: Times
    requested_near: Times
    served_far: Times
    served_near: Times
    vectors: float = 0.0
    """Requested, local ones included; mean over the ranks of the data axis."""

    @staticmethod
    def empty(ranks: int) -> "WindowLoad":
        return WindowLoad(np.zeros(ranks), np.zeros(ranks), np.zeros(ranks), np.zeros(ranks))


@dataclass
class Requests:
    windows: list[WindowLoad] = field(default_factory=list)
    served: Times = field(default_factory=lambda: np.zeros(0))
    """Numbers that each rank gathers for all ranks, over the mean."""
    hit: Times = field(default_factory=lambda: np.zeros(0))
    """Numbers of each rank's rows that any rank of the step reads, over the mean."""
    distinct_tokens: float = 0.0
    """Of a rank's step, summed over its windows; mean over ranks."""

    @property
    def imbalance(self) -> float:
        """What the busiest owner serves, over the mean."""
        return float(self.served.max()) if self.served.size else 1.0


def draw_requests(
    config: Config,
    axes: Axes,
    frequencies: NDArray[Any],
    routing: Routing | None,
    traffic: Traffic,
    window_sizes: list[int],
    node_ranks: int,
    seed: int,
    progress: Callable[[], None] = lambda: None,
) -> Requests:
    """`window_sizes`: micro-batches of each window. `progress`: called for each rank of the data axis and window."""
    random = np.random.default_rng(seed)
    per_micro_batch = config.train.micro_batch * config.model.sequence_length
    source: _Tokens | _Ngrams
    if method_of(config).num_ngram_keys:
        source = _Ngrams(config, axes, traffic)
    else:
        source = _Tokens(config, axes, frequencies, routing)
    found = Requests()
    gathered = np.zeros(axes.data)
    nodes = np.arange(axes.world).reshape(axes.data, axes.tensor) // node_ranks
    for size in window_sizes:
        load = WindowLoad.empty(axes.world)
        for rank, vectors, elements in source.draw(size * per_micro_batch, random):
            first = rank - rank % axes.rows
            owners = slice(first, first + axes.rows)
            gathered[owners] += elements
            load.vectors += float(vectors) / axes.data
            elements[rank - first] = 0.0
            near = nodes[owners] == nodes[rank]  # [owners, tensor]
            within = elements[:, None] * near
            between = elements[:, None] - within
            ranks = slice(rank * axes.tensor, (rank + 1) * axes.tensor)
            all_owners = slice(first * axes.tensor, (first + axes.rows) * axes.tensor)
            load.requested_near[ranks] += within.sum(0)
            load.requested_far[ranks] += between.sum(0)
            load.served_near[all_owners] += within.ravel()
            load.served_far[all_owners] += between.ravel()
            progress()
        found.windows.append(load)
    found.served = np.repeat(_over_mean(gathered), axes.tensor)
    found.hit = np.repeat(_over_mean(source.hit()), axes.tensor)
    found.distinct_tokens = source.distinct / axes.data
    return found


def _over_mean(loads: Times) -> Times:
    mean = loads.mean()
    return loads / mean if mean else np.ones_like(loads)


class _Tokens:
    """Tables that are indexed by token."""

    def __init__(self, config: Config, axes: Axes, frequencies: NDArray[Any], routing: Routing | None):
        slabs = table_layout(config, axes.tensor).slabs
        vocabulary = config.model.vocabulary
        sharding = plan_row_sharding(routing, slabs[0].rows, axes.rows)
        # Slabs of one view share their map.
        widths: dict[int, int] = {}
        for slab in slabs:
            widths[slab.view] = widths.get(slab.view, 0) + slab.width
        self._views = [
            (*owners_of_tokens(routing, view, sharding, vocabulary), width) for view, width in widths.items()
        ]
        order = np.argsort(-frequencies, kind="stable")
        self._order, self._cumulative = order, np.cumsum(frequencies[order], dtype=np.float64)
        self._cumulative /= self._cumulative[-1]
        self._axes = axes
        self._seen = np.zeros((axes.replicas, vocabulary), dtype=bool)
        self.distinct = 0.0

    def draw(self, tokens: int, random: np.random.Generator) -> Iterator[tuple[int, float, Times]]:
        """(rank of the data axis, vectors it requests, numbers from each owner)"""
        for rank in range(self._axes.data):
            places = np.searchsorted(self._cumulative, np.sort(random.random(tokens)), side="right")
            places = places[np.append(True, places[1:] != places[:-1])]
            seen = self._order[np.minimum(places, len(self._order) - 1)]
            self.distinct += len(seen)
            self._seen[rank // self._axes.rows, seen] = True
            vectors, elements = self._loads(seen)
            yield rank, vectors, elements

    def _loads(self, tokens: NDArray[np.int64]) -> tuple[float, Times]:
        vectors, elements = 0.0, np.zeros(self._axes.rows)
        for offsets, owners, width in self._views:
            starts, counts = offsets[tokens], offsets[tokens + 1] - offsets[tokens]
            positions = np.repeat(starts - np.append(0, np.cumsum(counts)[:-1]), counts) + np.arange(counts.sum())
            vectors += float(counts.sum())
            elements += width * np.bincount(owners[positions], minlength=self._axes.rows)
        return vectors, elements

    def hit(self) -> Times:
        """Replicas update the rows that any of them touches."""
        _, elements = self._loads(np.flatnonzero(self._seen.any(0)))
        return np.tile(elements, self._axes.replicas)


class _Ngrams:
    """Tables of hashed n-grams."""

    def __init__(self, config: Config, axes: Axes, traffic: Traffic):
        self._axes, self._traffic = axes, traffic
        self._width = sum(slab.width for slab in table_layout(config, axes.tensor).slabs)
        self.distinct = 0.0

    def draw(self, tokens: int, random: np.random.Generator) -> Iterator[tuple[int, float, Times]]:
        distinct, _ = self._traffic.seen(tokens)
        for rank in range(self._axes.data):
            vectors = random.poisson(distinct / self._axes.rows, self._axes.rows).astype(np.float64)
            self.distinct += vectors.sum()
            yield rank, float(vectors.sum()), self._width * vectors

    def hit(self) -> Times:
        return np.ones(self._axes.data)
