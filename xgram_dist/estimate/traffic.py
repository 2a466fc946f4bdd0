"""Expected traffic of the tables: distinct tokens, vectors and rows hit, for any number of tokens.

Tokens count as independent draws from given frequencies, so every figure is an exact expectation. A slab has its own
token -> row map: a token is asked for once for each slab and owner of its rows there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.config.schema import Config, parse_bytes
from xgram_dist.estimate.comm import FP32
from xgram_dist.model.methods.base import method_of, table_layout
from xgram_dist.tables.frequencies import chance_seen, expected_touched_share
from xgram_dist.tables.layout import Slab, routing_settings
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.routing_build import build_routing
from xgram_dist.tables.row_sharding import RowSharding, owners_of_tokens, plan_row_sharding

SEED = 0


class TokenDraw:
    """A number of independent tokens: the probability that each token id occurs, and one sample."""

    def __init__(self, frequencies: NDArray[Any], tokens: int):
        self.tokens = tokens
        self.probabilities = frequencies / np.sum(frequencies, dtype=np.float64)
        self.seen = chance_seen(self.probabilities, tokens)

    @property
    def distinct(self) -> float:
        return float(self.seen.sum())

    @cached_property
    def sample(self) -> NDArray[np.float64]:
        """1 for each token id that occurs in one seeded draw, else 0."""
        # Ascending, because the rounding error falls to the last category: the most frequent token can absorb it.
        order = np.argsort(self.probabilities, kind="stable")
        counts = np.zeros(len(order), dtype=np.int64)
        counts[order] = np.random.default_rng(SEED).multinomial(self.tokens, self.probabilities[order])
        return (counts > 0).astype(np.float64)


class TokenOwners:
    """The ranks that own rows of each token in a slab."""

    def __init__(self, routing: Routing | None, slab: Slab, sharding: RowSharding, vocabulary: int):
        offsets, self.owners = owners_of_tokens(routing, slab.view, sharding, vocabulary)
        self.ranks = sharding.ranks
        self.per_token = np.diff(offsets)

    def vectors(self, seen: NDArray[np.float64]) -> float:
        """Asked for by a rank that sees each token with this probability."""
        return float(seen @ self.per_token)

    def loads(self, seen: NDArray[np.float64]) -> NDArray[np.float64]:
        """Vectors asked of each owner."""
        weights = np.repeat(seen, self.per_token)
        return np.bincount(self.owners, weights=weights, minlength=self.ranks).astype(np.float64)

    def remote_tokens(self, seen: NDArray[np.float64]) -> float:
        """Distinct tokens with a row on another rank than the one that asks, mean over the ranks."""
        return float(seen @ (1 - (self.per_token == 1) / self.ranks))


class Traffic(ABC):
    """Expected traffic of the tables, for any number of tokens."""

    rows_held: int
    """Rows of a table on the rank that holds most."""

    def __init__(self) -> None:
        self._seen_by_tokens: dict[int, tuple[float, list[float]]] = {}
        self._share_by_tokens: dict[int, float] = {}

    def seen(self, tokens: int) -> tuple[float, list[float]]:
        """(distinct keys, vectors asked for in each slab) of a rank's window of so many tokens."""
        if tokens not in self._seen_by_tokens:
            self._seen_by_tokens[tokens] = self._seen(tokens)
        return self._seen_by_tokens[tokens]

    def touched_share(self, tokens: int) -> float:
        """Share of all rows that so many tokens of all ranks hit."""
        if tokens not in self._share_by_tokens:
            self._share_by_tokens[tokens] = self._touched_share(tokens)
        return self._share_by_tokens[tokens]

    def run_share(self, tokens: int) -> float:
        """The same for the tokens of a whole run."""
        return self.touched_share(tokens)

    @abstractmethod
    def _seen(self, tokens: int) -> tuple[float, list[float]]: ...

    @abstractmethod
    def _touched_share(self, tokens: int) -> float: ...


class TokenTraffic(Traffic):
    """Tables that are indexed by token. A token of a window is asked for once for each slab and owner of its rows."""

    def __init__(self, config: Config, frequencies: NDArray[Any], routing: Routing | None, ranks: int):
        super().__init__()
        slabs = table_layout(config).slabs
        self._frequencies, self._routing, self._num_rows = frequencies, routing, slabs[0].rows
        sharding = plan_row_sharding(routing, self._num_rows, ranks)
        # Slabs of one view share their map.
        owners = {slab.view: TokenOwners(routing, slab, sharding, config.model.vocabulary) for slab in slabs}
        self._owners = [owners[slab.view] for slab in slabs]
        self.rows_held = int(np.bincount(sharding.owner, minlength=ranks).max())

    def _seen(self, tokens: int) -> tuple[float, list[float]]:
        draw = TokenDraw(self._frequencies, tokens)
        return draw.distinct, [owners.vectors(draw.seen) for owners in self._owners]

    def _touched_share(self, tokens: int) -> float:
        return expected_touched_share(self._frequencies, self._routing, self._num_rows, tokens)


class NgramTraffic(Traffic):
    """Tables that are indexed by hashed n-grams. Their frequencies are not known: in a step each counts as new, and in
    a run they are those of independent tokens. Both are upper bounds."""

    def __init__(self, config: Config, frequencies: NDArray[Any], ranks: int):
        super().__init__()
        self._method, self._frequencies = method_of(config), frequencies
        self._keys_per_token = method_of(config).num_ngram_keys
        self._num_rows = table_layout(config).num_rows
        self.rows_held = -(-self._num_rows // ranks)

    def _seen(self, tokens: int) -> tuple[float, list[float]]:
        distinct = self._num_rows * self._touched_share(tokens)
        return distinct, [distinct]

    def _touched_share(self, tokens: int) -> float:
        return float(chance_seen(np.array([self._keys_per_token / self._num_rows]), tokens)[0])

    def run_share(self, tokens: int) -> float:
        return self._method.run_share(tokens, self._frequencies)


def build_traffic(config: Config, frequencies: NDArray[Any], routing: Routing | None, ranks: int) -> Traffic:
    """`ranks`: of the data axis. The recipe must have tables."""
    if method_of(config).num_ngram_keys:
        return NgramTraffic(config, frequencies, ranks)
    return TokenTraffic(config, frequencies, routing, ranks)


def zipf(vocabulary: int) -> NDArray[np.float64]:
    """Frequencies to assume where none are given: the n-th most frequent token is 1/n as frequent as the first."""
    return 1.0 / np.arange(1, vocabulary + 1)


def zipf_traffic(config: Config) -> Callable[[int], Traffic | None]:
    """Traffic by ranks of the data axis, with tokens by Zipf's law: close enough for memory. None without tables."""

    @cache
    def traffic_of(data_ranks: int) -> Traffic | None:
        layout = table_layout(config)
        if not layout.tables:
            return None
        frequencies = zipf(config.model.vocabulary)
        routing = None
        if layout.hashed:
            routing = build_routing(frequencies, routing_settings(config), layout.num_views)
        return build_traffic(config, frequencies, routing, data_ranks)

    return traffic_of


def plan_window_sizes(config: Config, micro_batches: int, distinct: Callable[[int], float]) -> list[int]:
    """Micro-batches of each window of a step. `distinct`: the expected distinct tokens of so many micro-batches."""
    window = config.memory.window
    if isinstance(window, int):
        size = min(window, micro_batches)
    elif window == "step":
        size = micro_batches
    else:
        max_distinct = parse_bytes(window) / (2 * FP32 * table_layout(config).width)
        size = next((n for n in range(micro_batches, 0, -1) if distinct(n) <= max_distinct), 1)
    return [min(size, micro_batches - start) for start in range(0, micro_batches, size)]
