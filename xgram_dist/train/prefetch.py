"""Batches with their exchange plans, one step ahead.

The exchange plan of step k + 1 is requested when step k begins, and made by a thread while step k trains. All ranks
request the plans of the same steps in the same order, so no rank waits for a plan that the others never make.
"""

from concurrent.futures import Future
from typing import NamedTuple

from torch import Tensor

from xgram_dist.data.loader import Loader
from xgram_dist.tables.exchange_plan import Window
from xgram_dist.tables.working_set import Lookup


class PrefetchedStep(NamedTuple):
    tokens_ABT: Tensor
    """The step's micro-batches, in host memory."""
    windows: list[Window]
    """Their planned windows."""
    position: int
    """Global sequences handed out up to and including this step."""


class StepPrefetcher:
    def __init__(self, loader: Loader, lookup: Lookup, *, steps: int, ahead: bool):
        """`steps`: how many will be taken. `ahead`: plan the next step while the current one trains."""
        self._loader, self._lookup, self._remaining, self._ahead = loader, lookup, steps, ahead
        self._next: tuple[Tensor, Future[list[Window]], int] | None = None

    def take(self) -> PrefetchedStep:
        tokens_ABT, windows, position = self._next or self._request()
        self._next = self._request() if self._ahead and self._remaining else None
        return PrefetchedStep(tokens_ABT, windows.result(), position)

    @property
    def upcoming(self) -> "Future[list[Window]] | None":
        """The windows of the step after the one just taken; None: it is not planned ahead, or there is none."""
        return None if self._next is None else self._next[1]

    def drain(self) -> None:
        """Wait for the plan under way: it communicates, and the other ranks complete it too."""
        if self._next is not None:
            self._next[1].exception()

    def _request(self) -> tuple[Tensor, "Future[list[Window]]", int]:
        self._remaining -= 1
        tokens_ABT = next(self._loader).tokens
        return tokens_ABT, self._lookup.plan(tokens_ABT), self._loader.position
