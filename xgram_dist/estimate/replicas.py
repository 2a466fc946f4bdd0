"""Replicas of the tables (`memory.shard`): bytes within and between nodes, for each number of ranks that holds one.

With one replica, most vectors come from other nodes. With a replica on each node vectors stay within it, and what
crosses between nodes is the gradient of the rows that a step touches, once, however many vectors were read. More
replicas take more memory: a rank holds the rows of the tables divided by the ranks of a replica.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from xgram_dist.config.schema import Config
from xgram_dist.config.validate import accumulation
from xgram_dist.errors import UserError
from xgram_dist.estimate.comm import Axes, Message
from xgram_dist.estimate.layout import plan_layout
from xgram_dist.estimate.step_time import GIGA, Machine
from xgram_dist.estimate.traffic import Traffic

RANKS = (16, 32, 64, 128, 256, 512, 1024)
NODES = (1, 2, 4)
"""Of a replica; beside those of all ranks."""


@dataclass(frozen=True)
class ShardChoice:
    ranks: int
    shard: int
    """Ranks of the data axis that hold a replica."""
    replicas: int
    within_bytes: float
    """Of the tables, sent by a rank in a step to ranks of its node."""
    between_bytes: float
    """To ranks of other nodes."""
    seconds: float
    """On the wire, for the tables."""
    device_bytes: float
    """Of a rank, all in all."""
    fits: bool
    picked: bool = False
    """The fastest that fits, of those for so many ranks."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_shards(
    config: Config,
    machine: Machine,
    traffic_of: Callable[[int], Traffic | None],
    limit: float | None,
    ranks: tuple[int, ...] = RANKS,
    progress: Callable[[], None] = lambda: None,
) -> list[ShardChoice]:
    """For each number of ranks over which the batch divides. `limit`: device bytes of a rank; None: no limit."""
    found: list[ShardChoice] = []
    for count in ranks:
        choices = [
            one for shard in _shards(count, machine) if (one := _choice(config, count, shard, machine, traffic_of))
        ]
        choices = [replace(one, fits=limit is None or one.device_bytes <= limit) for one in choices]
        best = min((one for one in choices if one.fits), key=lambda one: (one.seconds, one.device_bytes), default=None)
        found += [replace(one, picked=one is best) for one in choices]
        progress()
    return found


def _shards(ranks: int, machine: Machine) -> list[int]:
    of_nodes = [nodes * machine.node_ranks for nodes in NODES]
    return [*(shard for shard in of_nodes if shard < ranks and ranks % shard == 0), ranks]


def _choice(
    config: Config, ranks: int, shard: int, machine: Machine, traffic_of: Callable[[int], Traffic | None]
) -> ShardChoice | None:
    """None where the recipe does not run on so many ranks."""
    tensor = config.parallel.tensor
    memory = config.memory.model_copy(update={"shard": shard // tensor})
    config = config.model_copy(update={"memory": memory})
    try:
        axes = Axes.of(config, ranks)
        accumulation(config, axes.data)
    except UserError:
        return None
    layout = plan_layout(config, axes, machine, traffic_of(axes.rows))
    messages = [message for message in layout.messages if message.of_tables]
    between = sum(message.bytes * _share_between_nodes(message, axes, machine) for message in messages)
    within = sum(message.bytes for message in messages) - between
    seconds = (between / machine.bandwidth + within / machine.node_bandwidth) / GIGA
    return ShardChoice(ranks, axes.rows, axes.replicas, within, between, seconds, layout.device_bytes, True)


def _share_between_nodes(message: Message, axes: Axes, machine: Machine) -> float:
    """Of the bytes that a rank sends. The others of a node are as likely receivers of an all-to-all as any; a ring over
    ranks of which each node has one leaves the node with every message."""
    if axes.span(message.axis) <= machine.node_ranks:
        return 0.0
    if message.collective != "all-to-all" or message.axis == "replicas":
        return 1.0
    neighbours = machine.node_ranks // axes.tensor - 1
    return 1 - neighbours / (message.ranks - 1)
