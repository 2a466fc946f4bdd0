"""Links between ranks, and how long transfers over them take: for all ranks at once, from when each is ready.

Ranks stand node after node. Each has a card to the network and a link to the other ranks of its node, full duplex, used
side by side. The ranks of a node share its uplink. A transfer knows when it ends on each rank, given when it starts:

    ring        all-reduce, reduce-scatter, all-gather: nobody gets ahead of the last one to start. Each hop carries the
                bytes that a rank sends. A node that has g ranks in a ring sends and receives over g cards; rings of
                other groups use its uplink at the same time
    tree        an all-reduce whose bytes are few: as many hops as a tree has levels, up and down
    all-to-all  each pair has its own number of bytes. A rank ends when the last of its senders has sent everything, and
                its own card, its link and the uplink of its node have taken everything in

Durations only ever add up and wait for the latest, so that no link and no rank that becomes faster can make a step
slower.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xgram_dist.estimate.comm import Axes, Axis, Collective
from xgram_dist.estimate.step_time import GIGA, Machine

Times = NDArray[np.float64]
"""Seconds, of each rank."""
MICRO = 1e-6


@dataclass(frozen=True)
class Latency:
    """In microseconds. Assumptions about NCCL between nodes with InfiniBand or RoCE, and over NVLink."""

    network: float = 10.0
    """From a rank to one of another node, beside the bytes."""
    node: float = 2.0
    """From a rank to one of its node."""
    message: float = 1.0
    """For each message of an all-to-all, on the rank that sends it: one for each other rank."""


@dataclass(frozen=True)
class Links:
    """Bytes and seconds."""

    ranks: int
    node_ranks: int
    bandwidth: float
    """Of a rank's card."""
    node_bandwidth: float
    """Of a rank's link to the others of its node."""
    uplink: float
    """Of a node to all others, over all its cards."""
    latency: Latency

    @staticmethod
    def of(machine: Machine, ranks: int, latency: Latency, uplink: float | None = None) -> "Links":
        """`uplink`: in GB/s; by default each rank has a card of its own."""
        per_node = min(machine.node_ranks, ranks)
        return Links(
            ranks=ranks,
            node_ranks=per_node,
            bandwidth=machine.bandwidth * GIGA,
            node_bandwidth=machine.node_bandwidth * GIGA,
            uplink=(machine.bandwidth * per_node if uplink is None else uplink) * GIGA,
            latency=latency,
        )

    @property
    def num_nodes(self) -> int:
        return -(-self.ranks // self.node_ranks)

    def nodes(self) -> NDArray[np.int64]:
        """The node of each rank."""
        return np.arange(self.ranks) // self.node_ranks


def ranks_of_groups(axes: Axes, axis: Axis) -> NDArray[np.int64]:
    """[groups, ranks of a group]: the process groups of a mesh axis."""
    ranks = np.arange(axes.world)
    if axis == "world":
        return ranks.reshape(1, -1)
    if axis == "tensor":
        return ranks.reshape(axes.data, axes.tensor)
    outer, inner = {
        "data": (1, axes.data),
        "shard": (axes.replicate, axes.shard),
        "replicate": (axes.replicate, axes.shard),
        "rows": (axes.replicas, axes.rows),
        "replicas": (axes.replicas, axes.rows),
    }[axis]
    grid = ranks.reshape(outer, inner, axes.tensor)
    last = 0 if axis in ("replicate", "replicas") else 1
    return np.moveaxis(grid, last, 2).reshape(-1, grid.shape[last])


class Transfer(ABC):
    """A collective that moves bytes between the ranks of each of some groups."""

    name: str
    groups: NDArray[np.int64]
    far: Times
    """Bytes that each rank sends to other nodes."""
    near: Times
    """Bytes that each rank sends within its node."""
    between_nodes: bool

    def last_of_group(self, times: Times) -> Times:
        """The latest of each rank's group."""
        latest = np.empty_like(times)
        latest[self.groups] = times[self.groups].max(1)[:, None]
        return latest

    @abstractmethod
    def ends(self, start: Times) -> Times:
        """When it ends on each rank, if each starts it then."""


class Ring(Transfer):
    """All-reduce, reduce-scatter or all-gather by ring; a small all-reduce by tree."""

    def __init__(self, name: str, collective: Collective, groups: NDArray[np.int64], size: float, links: Links):
        """`size`: bytes that a rank sends, as `comm.ring_bytes` counts them."""
        self.name, self.groups, self._collective, self._size = name, groups, collective, size
        ranks, nodes = groups.shape[1], len(np.unique(groups[0] // links.node_ranks))
        self._in_node = -(-ranks // nodes)
        self._nodes, self._links, self.between_nodes = nodes, links, nodes > 1
        crossing = self._size / self._in_node if nodes > 1 else 0.0
        self.far = np.full(links.ranks, crossing)
        self.near = np.full(links.ranks, self._size - crossing)
        self.seconds = self._seconds(ranks)

    def _seconds(self, ranks: int) -> float:
        if ranks == 1:
            return 0.0
        links, hop = self._links, self._links.latency
        near_seconds = self._size / links.node_bandwidth if self._in_node > 1 else 0.0
        far_seconds = 0.0
        if self._nodes > 1:
            groups_of_node = max(1.0, min(links.node_ranks, links.ranks) / self._in_node)
            far_seconds = self._size / min(self._in_node * links.bandwidth, links.uplink / groups_of_node)
        far_hops = min(self._nodes, ranks - 1) if self._nodes > 1 else 0
        lap = far_hops * hop.network + (ranks - 1 - far_hops) * hop.node
        delay = lap
        if self._collective == "all-reduce":
            levels = math.ceil(math.log2(self._nodes)) * hop.network + math.ceil(math.log2(self._in_node)) * hop.node
            delay = 2 * min(lap, levels)
        return delay * MICRO + max(near_seconds, far_seconds)

    def ends(self, start: Times) -> Times:
        return self.last_of_group(start) + self.seconds


class AllToAll(Transfer):
    def __init__(
        self,
        name: str,
        groups: NDArray[np.int64],
        sent: tuple[Times, Times],
        received: tuple[Times, Times],
        links: Links,
    ):
        """`sent`, `received`: bytes of each rank, (to or from other nodes, within its node)."""
        self.name, self.groups, self._links = name, groups, links
        self.far, self.near = sent
        self._out, self._in = self._seconds(*sent), self._seconds(*received)
        self._node_out, self._node_in = sent[0] / links.uplink, received[0] / links.uplink
        ranks = groups.shape[1]
        self.between_nodes = len(np.unique(groups[0] // links.node_ranks)) > 1
        delay = links.latency.network if self.between_nodes else links.latency.node
        self._delay = (delay + (ranks - 1) * links.latency.message) * MICRO if ranks > 1 else 0.0

    def _seconds(self, far: Times, near: Times) -> Times:
        return np.maximum(far / self._links.bandwidth, near / self._links.node_bandwidth)

    def ends(self, start: Times) -> Times:
        sent = np.maximum(start + self._out, self._uplink_ends(start, self._node_out))
        received = np.maximum(start + self._in, self._uplink_ends(start, self._node_in))
        return np.maximum(self.last_of_group(sent), received) + self._delay

    def _uplink_ends(self, start: Times, seconds: Times) -> Times:
        """When the uplink of each rank's node has carried what its ranks give it: it works whenever there is any."""
        links = self._links
        padding = links.num_nodes * links.node_ranks - links.ranks
        starts = np.pad(start, (0, padding), constant_values=-np.inf).reshape(links.num_nodes, -1)
        work = np.pad(seconds, (0, padding)).reshape(links.num_nodes, -1)
        order = np.argsort(starts, axis=1, kind="stable")
        starts, work = np.take_along_axis(starts, order, 1), np.take_along_axis(work, order, 1)
        still_to_come = np.cumsum(work[:, ::-1], axis=1)[:, ::-1]
        return np.repeat((starts + still_to_come).max(1), links.node_ranks)[: links.ranks]
