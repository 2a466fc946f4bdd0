"""What a rank asks of the owners of rows, for any number of tokens, in expectation.

Tokens count as independent draws. A token that occurs in a window is asked for once a slab and owner of its rows.
Hashed n-grams have no frequencies here: each counts as new, so that what is said of them is an upper limit.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.config.schema import Config
from xgram_dist.memory.layout import has_tables, ngram_heads, num_views, plan_slabs, routing_settings, site_layers
from xgram_dist.memory.placement import plan_placement
from xgram_dist.memory.routing.build import build_routing
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.memory.touched import chance_seen, expected_touched_share
from xgram_dist.plan.exchange import Draw, Owners


class Traffic:
    """`ranks`: of the data axis. The recipe must have tables."""

    def __init__(self, config: Config, frequencies: NDArray[Any], routing: Routing | None, ranks: int):
        slabs, vocabulary = plan_slabs(config), config.model.vocabulary
        self._keys = 0
        if config.memory.method == "engram":
            self._keys = ngram_heads(config) * len(site_layers(config, "ngram"))
            self._num_rows, self.rows_held = slabs[0].rows, -(-slabs[0].rows // ranks)
            self.ranks = ranks
            self.touched_share = lru_cache(self._touched_share)
            self.seen = lru_cache(self._seen)
            return
        placement = plan_placement(routing, slabs[0].rows, ranks)
        owners = {slab.view: Owners(routing, slab, placement, vocabulary) for slab in slabs}
        self._owners = [owners[slab.view] for slab in slabs]
        self._frequencies, self._routing, self._num_rows = frequencies, routing, slabs[0].rows
        self.ranks = ranks
        self.rows_held = int(np.bincount(placement.owner, minlength=ranks).max())
        """Of a table, on the rank that has most."""
        self.touched_share = lru_cache(self._touched_share)
        self.seen = lru_cache(self._seen)

    def _seen(self, tokens: int) -> tuple[float, list[float]]:
        """(distinct keys, vectors asked for in each slab) of so many tokens."""
        if self._keys:
            distinct = self._num_rows * self._touched_share(tokens)
            return distinct, [distinct]
        draw = Draw(self._frequencies, tokens)
        return draw.distinct, [one.vectors(draw.seen) for one in self._owners]

    def _touched_share(self, tokens: int) -> float:
        """Of all rows, by so many tokens of all ranks."""
        if self._keys:
            return float(chance_seen(np.array([self._keys / self._num_rows]), tokens)[0])
        return expected_touched_share(self._frequencies, self._routing, self._num_rows, tokens)


def zipf(vocabulary: int) -> NDArray[np.float64]:
    """Where no frequencies are given: the n-th most frequent token is 1/n as frequent as the first."""
    return 1.0 / np.arange(1, vocabulary + 1)


def assumed_traffic(config: Config) -> Callable[[int], Traffic | None]:
    """By ranks of the data axis, with tokens by Zipf's law: close enough for memory. None without tables."""

    def traffic_of(data_ranks: int) -> Traffic | None:
        if not has_tables(config):
            return None
        frequencies = zipf(config.model.vocabulary)
        routing = None
        if config.memory.compression < 1:
            routing = build_routing(frequencies, routing_settings(config), num_views(config))
        return Traffic(config, frequencies, routing, data_ranks)

    return traffic_of
