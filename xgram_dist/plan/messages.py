"""What crosses the wire in a step.

A message's bytes are those that leave a rank in a step; as many enter it. Sums and gathers count as rings make them:
each rank passes on what it has of all but one part. What a rank keeps for itself does not travel.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from xgram_dist.plan.axes import Axes, Axis

Collective = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all"]

TABLES = (
    "token ids",
    "table vectors",
    "table gradients",
    "table parameters",
    "residual-site vectors",
    "residual-site gradients",
    "row-gate gradients",
)


@dataclass(frozen=True)
class Message:
    name: str
    collective: Collective
    axis: Axis
    ranks: int
    bytes: float

    @property
    def of_tables(self) -> bool:
        return self.name in TABLES

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def ring_bytes(collective: Collective, size: float, ranks: int) -> float:
    """`size`: bytes of the whole that is summed, gathered or scattered."""
    assert collective != "all-to-all"
    rounds = 2 if collective == "all-reduce" else 1
    return rounds * size * (ranks - 1) / ranks


def message(name: str, collective: Collective, axis: Axis, axes: Axes, size: float) -> Message:
    ranks = axes.size(axis)
    return Message(name, collective, axis, ranks, ring_bytes(collective, size, ranks))


def merged(messages: list[Message]) -> list[Message]:
    """Those of one name, collective and axis added up; none that move nothing."""
    sums: dict[tuple[str, Collective, Axis, int], float] = {}
    for one in messages:
        key = (one.name, one.collective, one.axis, one.ranks)
        sums[key] = sums.get(key, 0.0) + one.bytes
    return [Message(*key, size) for key, size in sums.items() if size]
