"""Which rows are read for which tokens, as index tensors: from lists in host memory, without looking at any row.

Shapes: Q tokens asked of this owner, those of this rank first; N accesses, token by token; R distinct rows of them.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.memory.retrieval import Accesses, Reads
from xgram_dist.parallel.device import to_device

Integers = NDArray[Any]

SORTED_FROM = 96
"""Numbers below the limit for each value, from which sorting is faster. 4,096 values take 0.08 ms without and 0.16 with
it below a limit of 75,968; 0.39 without and 0.17 with it below 1.2 million."""


class Distinct:
    """Distinct values of integers below a limit, ascending, and where each is among them; without sorting, unless the
    limit is so high that going through all numbers below it takes longer."""

    def __init__(self, limit: int):
        self._limit = limit
        self._seen = np.zeros(limit, dtype=bool)
        self._place = np.empty(limit, dtype=np.int64)

    def __call__(self, values: Integers) -> tuple[Integers, Integers]:
        if values.size * SORTED_FROM < self._limit:
            found, places = np.unique(values, return_inverse=True)
            return found.astype(np.int64), places.reshape(values.shape)
        self._seen[values] = True
        found = np.flatnonzero(self._seen)
        self._seen[found] = False
        self._place[found] = np.arange(len(found))
        return found, self._place[values]

    def count(self, values: Integers) -> int:
        return len(self(values)[0])


class Touched:
    """The distinct rows of some accesses: first those that others ask for, then the rest, both ascending."""

    def __init__(self, rows_N: Integers, of_own: int, distinct: Distinct):
        """This rank itself makes the first `of_own` accesses."""
        rows_R, place_N = distinct(rows_N)
        for_others_R = np.zeros(len(rows_R), dtype=bool)
        for_others_R[place_N[of_own:]] = True
        order_R = np.concatenate((np.flatnonzero(for_others_R), np.flatnonzero(~for_others_R)))
        self.of_own, self.for_others = of_own, int(for_others_R.sum())
        self.rows_R: Integers = rows_R[order_R]
        self.place_N: Integers = np.argsort(order_R)[place_N]
        """Of each access, among them."""


def make_accesses(
    touched: Touched,
    counts_Q: Integers | None,
    coefficients_N: NDArray[Any] | None,
    own: int,
    device: torch.device,
) -> Accesses:
    """Accesses given token by token, as `counts_Q` of each token; without counts, one a token. This rank itself asks
    for the first `own` tokens."""
    place_N, of_own = touched.place_N, touched.of_own
    by_row_N, starts_R = _by_row(place_N, len(touched.rows_R))
    token_N = None if counts_Q is None else np.repeat(np.arange(len(counts_Q)), counts_Q)

    def place(array: NDArray[Any]) -> Tensor:
        return to_device(torch.from_numpy(array), device)

    def reads(tokens: slice, accesses: slice) -> Reads:
        of_Q = None if counts_Q is None else counts_Q[tokens]
        return Reads(
            count=len(place_N[accesses]) if of_Q is None else len(of_Q),
            place_N=None if of_Q is None and _in_order(place_N[accesses]) else place(place_N[accesses]),
            starts_Q=None if of_Q is None else place(np.cumsum(of_Q) - of_Q),
            coefficients_N=None if coefficients_N is None else place(coefficients_N[accesses]),
        )

    return Accesses(
        touched_R=place(touched.rows_R),
        for_others=touched.for_others,
        others=reads(slice(own, None), slice(of_own, None)),
        own=reads(slice(own), slice(of_own)),
        by_row_N=place(by_row_N if token_N is None else token_N[by_row_N]),
        row_starts_R=place(starts_R),
        row_coefficients_N=None if coefficients_N is None else place(coefficients_N[by_row_N]),
    )


def make_accesses_in_place(touched: Touched, device: torch.device) -> Accesses:
    """The same where a token reads one row, and this rank reads its own where they are."""
    place_N = touched.place_N[touched.of_own :]
    by_row_N, starts_R = _by_row(place_N, touched.for_others)
    in_order = _in_order(place_N)

    def place(array: NDArray[Any]) -> Tensor:
        return to_device(torch.from_numpy(array), device)

    return Accesses(
        touched_R=place(touched.rows_R),
        for_others=touched.for_others,
        others=Reads(len(place_N), None if in_order else place(place_N), None, None),
        own=None,
        by_row_N=None if in_order else place(by_row_N),
        row_starts_R=place(starts_R),
        row_coefficients_N=None,
    )


def _by_row(place_N: Integers, rows: int) -> tuple[Integers, Integers]:
    """(accesses row by row, the first of them for each row)."""
    readers_R = np.bincount(place_N, minlength=rows)
    return np.argsort(place_N, kind="stable"), np.cumsum(readers_R) - readers_R


def _in_order(place_N: Integers) -> bool:
    return np.array_equal(place_N, np.arange(len(place_N)))
