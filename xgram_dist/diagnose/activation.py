"""Activation magnitude against token frequency.

The paper's M(token): the mean, over the token's occurrences and over the layers, of the L2 norm of the injected vector.
Here of each site, and over all sites of all layers together.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.diagnose.sums import Sums, Totals
from xgram_dist.parallel.ranks import Ranks

BINS_PER_DECADE = 2


class Activation:
    def __init__(self, sums: Sums, vocabulary: int):
        self._sums, self._vocabulary = sums, vocabulary
        self._tokens: Tensor | None = None

    def begin(self, tokens_BT: Tensor) -> None:
        """The tokens of the next forward pass."""
        self._tokens = tokens_BT.reshape(-1)
        self._sums.add("occurrences", torch.bincount(self._tokens, minlength=self._vocabulary))

    def see(self, what: str, layer: int, name: str, value: Tensor) -> None:
        if what != "injected":
            return
        assert self._tokens is not None
        norms = value.double().norm(dim=-1).reshape(-1)
        self._sums.add(f"norms.{name}", torch.bincount(self._tokens, norms, minlength=self._vocabulary))


class SiteNorms:
    """The mean norm of what is injected at each site, whatever the token, on any layout."""

    def __init__(self, sums: Sums, cut: tuple[str, ...] = (), tensor: Ranks | None = None):
        """`tensor`: the ranks that share a vector's columns at the sites `cut`."""
        self._sums, self._cut, self._tensor = sums, cut, tensor or Ranks()

    def see(self, what: str, layer: int, name: str, value: Tensor) -> None:
        if what != "injected":
            return
        squares = value.double().square().sum(-1)
        if name in self._cut:
            self._tensor.all_reduce_sum(squares)
        self._sums.add(f"site.{name}", torch.stack((squares.sqrt().sum(), squares.new_tensor(squares.numel()))))


def magnitudes(totals: Totals, sites: dict[str, list[int]]) -> dict[str, NDArray[np.float64]]:
    """M of every token, by site and over `all`; NaN for tokens that did not occur. `sites`: the layers of each."""
    occurrences = totals["occurrences"].numpy()
    sums = {site: totals[f"norms.{site}"].numpy() for site in sites}
    counts = {site: len(layers) for site, layers in sites.items()}
    sums["all"], counts["all"] = np.sum(list(sums.values()), axis=0), sum(counts.values())
    with np.errstate(invalid="ignore", divide="ignore"):
        return {name: np.where(occurrences > 0, sums[name] / (occurrences * counts[name]), np.nan) for name in sums}


def by_frequency(
    magnitude: NDArray[np.float64], frequency: NDArray[np.float64], occurrences: NDArray[np.float64]
) -> dict[str, Any]:
    """Means over the tokens of a band of frequencies, half a decade wide, and the correlation with log frequency."""
    known = np.isfinite(magnitude) & (frequency > 0)
    band = np.floor(np.log10(frequency, where=known, out=np.zeros_like(frequency)) * BINS_PER_DECADE)
    found = []
    for number in np.unique(band[known]):
        here = known & (band == number)
        found.append(
            {
                "from": float(10 ** (number / BINS_PER_DECADE)),
                "to": float(10 ** ((number + 1) / BINS_PER_DECADE)),
                "tokens": int(here.sum()),
                "occurrences": int(occurrences[here].sum()),
                "magnitude": float(magnitude[here].mean()),
            }
        )
    return {"bands": found, "correlation": correlation(np.log(frequency[known]), magnitude[known])}


def correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float | None:
    """Pearson's; None where there is nothing to correlate."""
    if len(one) < 2 or not one.std() or not other.std():
        return None
    return float(np.corrcoef(one, other)[0, 1])
