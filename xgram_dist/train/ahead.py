"""Batches with their plan, the next one planned while this one trains.

The plan of step k + 1 is asked for when step k begins, on every rank: all ranks plan the same steps in the same order,
and none is left waiting for a plan the others will not make.
"""

from concurrent.futures import Future
from typing import NamedTuple

from torch import Tensor

from xgram_dist.data.loader import Loader
from xgram_dist.memory.plan import Window
from xgram_dist.memory.working_set import Lookup


class Planned(NamedTuple):
    work: tuple[Tensor, list[Window]]
    """A step's tokens [A,B,T] in host memory, and their windows."""
    position: int
    """Global sequences handed out up to and with this step."""


class PlannedSteps:
    def __init__(self, loader: Loader, lookup: Lookup, *, steps: int, ahead: bool):
        """`steps`: how many will be taken."""
        self._loader, self._lookup, self._left, self._ahead = loader, lookup, steps, ahead
        self._next: tuple[Tensor, Future[list[Window]], int] | None = None

    def take(self) -> Planned:
        tokens, windows, position = self._next or self._plan()
        self._next = self._plan() if self._ahead and self._left else None
        return Planned((tokens, windows.result()), position)

    def finish(self) -> None:
        """Let the plan that is under way come to its end, as it does on the other ranks."""
        if self._next is not None:
            self._next[1].exception()

    def _plan(self) -> tuple[Tensor, "Future[list[Window]]", int]:
        self._left -= 1
        tokens = next(self._loader).tokens
        return tokens, self._lookup.plan(tokens), self._loader.position
