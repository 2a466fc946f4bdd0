"""How many rows a step touches, in expectation.

In: token frequencies (counts or probabilities), the routing (None: row = token id) and the number of tokens. Out:
chances. Tokens count as independent draws. A row is touched when any token that reads it occurs, so its chance
is that of one outcome which is as likely as all its readers together.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.errors import UserError
from xgram_dist.memory.routing.routing import Routing


def chance_seen(probabilities: NDArray[Any], tokens: int) -> NDArray[np.float64]:
    """1 - (1 - p)^tokens: the chance that an outcome of probability p occurs among so many draws."""
    assert tokens > 0, tokens
    # Sums of probabilities may exceed 1 by rounding. Small p would vanish in 1 - p; log1p and expm1 keep it.
    with np.errstate(divide="ignore"):
        chance: NDArray[np.float64] = -np.expm1(tokens * np.log1p(-np.minimum(probabilities, 1.0)))
    return chance


def row_probabilities(
    frequencies: NDArray[Any], routing: Routing | None, view: int, num_rows: int
) -> NDArray[np.float64]:
    """For each row, the probability that one token of the text reads it."""
    probabilities: NDArray[np.float64] = frequencies / np.sum(frequencies, dtype=np.float64)
    if routing is None:
        assert len(probabilities) == num_rows, (len(probabilities), num_rows)
        return probabilities
    if len(frequencies) != routing.vocabulary:
        raise UserError(
            f"the frequencies are of {len(frequencies):,} tokens, the routing of {routing.vocabulary:,}; "
            f"use frequencies of the same tokenizer"
        )
    lists = routing.views[view]
    weights = np.repeat(probabilities, np.diff(lists.offsets))
    return np.bincount(lists.rows, weights=weights, minlength=num_rows).astype(np.float64)


def expected_touched_share(frequencies: NDArray[Any], routing: Routing | None, num_rows: int, tokens: int) -> float:
    """Share of the rows that `tokens` tokens touch, mean over the routing's views; rows no token reads count too."""
    views = range(1 if routing is None else routing.num_views)
    chances = [chance_seen(row_probabilities(frequencies, routing, view, num_rows), tokens) for view in views]
    return float(np.mean(chances))
