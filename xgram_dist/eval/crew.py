"""Work of the first rank shared out over all: it leads, the others follow until it is through.

Only the first rank runs the harness (tasks, prompts, metrics). What the network has to compute goes in batches to the
ranks in turn; every rank takes the same number of turns, since in training a turn is full of collectives. Two messages
of plain data over the host's group around each request.
"""

from collections.abc import Callable
from typing import Any

from xgram_dist.parallel.mesh import Mesh
from xgram_dist.progress import Progress


class Crew:
    def __init__(self, mesh: Mesh, work: dict[str, Callable[[Any], Any]]):
        """`work`: what can be asked for, by name: a batch in, its result out."""
        self.mesh, self._work = mesh, work

    def run(self, name: str, batches: list[Any], title: str, weigh: Callable[[Any], int] = len) -> list[Any]:
        """Asked by the first rank: the result of every batch, in order."""
        self._order((name, batches, title, [weigh(batch) for batch in batches]))
        return self._do(name, batches, title, [weigh(batch) for batch in batches])

    def follow(self) -> None:
        """Of the other ranks."""
        while (order := self._order(None)) is not None:
            self._do(*order)

    def dismiss(self) -> None:
        """Of the first rank, when all is done."""
        self._order(None)

    def _order(self, order: Any) -> Any:
        return self.mesh.world.host.gather_objects(order)[0]

    def _do(self, name: str, batches: list[Any], title: str, weights: list[int]) -> list[Any]:
        data, found = self.mesh.data, {}
        if not batches:
            return []
        with Progress(sum(weights), "rows", title) if self.mesh.world.first else _Silent() as progress:
            for first in range(0, len(batches), data.size):
                mine = first + data.rank
                # A rank without a batch in the last round goes along with another.
                result = self._work[name](batches[mine if mine < len(batches) else 0])
                if mine < len(batches):
                    found[mine] = result
                progress.update(sum(weights[first : first + data.size]))
        for others in self.mesh.world.host.gather_objects(found):
            found |= others
        return [found[number] for number in range(len(batches))]


class _Silent:
    def update(self, amount: float) -> None:
        pass

    def __enter__(self) -> "_Silent":
        return self

    def __exit__(self, *_: object) -> None:
        pass
