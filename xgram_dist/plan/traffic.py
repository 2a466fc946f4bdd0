"""What a rank asks of the owners of rows, for any number of tokens, in expectation.

Tokens count as independent draws. A token that occurs in a window is asked for once a slab and owner of its rows.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.config.schema import Config
from xgram_dist.memory.layout import plan_slabs
from xgram_dist.memory.placement import plan_placement
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.memory.touched import expected_touched_share
from xgram_dist.plan.exchange import Draw, Owners


class Traffic:
    """`ranks`: of the data axis. The recipe must have tables."""

    def __init__(self, config: Config, frequencies: NDArray[Any], routing: Routing | None, ranks: int):
        slabs, vocabulary = plan_slabs(config), config.model.vocabulary
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
        """(distinct tokens, vectors asked for in each slab) of so many tokens."""
        draw = Draw(self._frequencies, tokens)
        return draw.distinct, [one.vectors(draw.seen) for one in self._owners]

    def _touched_share(self, tokens: int) -> float:
        """Of all rows, by so many tokens of all ranks."""
        return expected_touched_share(self._frequencies, self._routing, self._num_rows, tokens)


def zipf(vocabulary: int) -> NDArray[np.float64]:
    """Where no frequencies are given: the n-th most frequent token is 1/n as frequent as the first."""
    return 1.0 / np.arange(1, vocabulary + 1)
