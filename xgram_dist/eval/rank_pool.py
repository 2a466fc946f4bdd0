"""Work of the first rank, computed by all ranks.

Only the first rank runs the harness (tasks, prompts, metrics). It hands batches of work to the pool; the other ranks
`serve` until it calls `shut_down`. Batches go to the ranks of the batch axis in turn. Every rank computes the same
number of batches, because in a training run each forward pass contains collectives.

Collectives: two object gathers around each request: the request, then its results. They run over a gloo group of the
pool's own: the planning thread of the tables uses the mesh's, and its order relative to this thread differs by rank.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from xgram_dist.console import Progress
from xgram_dist.parallel.mesh import Mesh, new_host_group


class RankPool:
    def __init__(self, mesh: Mesh, functions: dict[str, Callable[[Any], Any]]):
        """`functions`: what can be computed, by name: a batch in, its result out. All ranks build the pool."""
        self.mesh, self._functions = mesh, functions
        self.group = new_host_group(mesh.world)

    def run(self, name: str, batches: list[Any], title: str, weigh: Callable[[Any], int] = len) -> list[Any]:
        """On the first rank: the result of every batch, in order. `weigh`: a batch's share of the progress bar."""
        request = name, batches, title, [weigh(batch) for batch in batches]
        self._broadcast(request)
        return self._compute(*request)

    def serve(self) -> None:
        """On the other ranks: compute until the first rank shuts the pool down."""
        while (request := self._broadcast(None)) is not None:
            self._compute(*request)

    def shut_down(self) -> None:
        """On the first rank, when all is done."""
        self._broadcast(None)

    def _broadcast(self, request: Any) -> Any:
        """The first rank's request, on every rank."""
        return self.group.all_gather_object(request)[0]

    def _compute(self, name: str, batches: list[Any], title: str, weights: list[int]) -> list[Any]:
        ranks, results = self.mesh.batch, {}
        if not batches:
            return []
        with ExitStack() as stack:
            first_rank = self.mesh.world.first
            progress = stack.enter_context(Progress(sum(weights), "sequences", title)) if first_rank else None
            for first in range(0, len(batches), ranks.size):
                mine = first + ranks.rank
                # A rank without a batch in the last round repeats the first one and discards the result.
                result = self._functions[name](batches[mine if mine < len(batches) else 0])
                if mine < len(batches):
                    results[mine] = result
                if progress is not None:
                    progress.update(sum(weights[first : first + ranks.size]))
        for others in self.group.all_gather_object(results):
            results |= others
        return [results[number] for number in range(len(batches))]
