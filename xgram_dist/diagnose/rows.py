"""How reads spread over the rows of a table: concentration of hits, and rows with more than N updates.

Both follow from token frequencies and routing alone. A hit is a visit of a row by a path (routing/statistics.py). An
update is a token of the training text that reads the row: expected, as the paper has it, tokens trained on times the
probability that one reads the row.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.memory.routing.routing import Routing
from xgram_dist.memory.routing.statistics import hits_per_row, row_hits
from xgram_dist.memory.touched import row_probabilities


def hit_concentration(frequencies: NDArray[np.float64], routing: Routing | None) -> dict[str, Any]:
    """Share of hits that the hottest 0.1, 1 and 10 % of rows take: mean over views, and of each."""
    if routing is None:
        views = [row_hits(frequencies)]
    else:
        views = [row_hits(hits_per_row(routing, frequencies, view)) for view in range(routing.num_views)]
    return {"hottest": {part: float(np.mean([view[part] for view in views])) for part in views[0]}, "by_view": views}


def update_shares(
    frequencies: NDArray[np.float64], routing: Routing | None, num_rows: int, tokens: int, thresholds: list[int]
) -> dict[str, Any]:
    """Share of the rows with more than so many expected updates after `tokens` tokens, mean over views."""
    views = range(1 if routing is None else routing.num_views)
    expected = [tokens * row_probabilities(frequencies, routing, view, num_rows) for view in views]
    return {
        "tokens": tokens,
        "rows": num_rows,
        "more_than": {str(n): float(np.mean([(one > n).mean() for one in expected])) for n in thresholds},
    }
