"""What the links between ranks carry, in GB/s, against the plan; and which node is slow.

All ranks: an all-to-all and an all-reduce, as bytes that leave a rank over seconds. Then one rank of each node sends to
one of other nodes, in rounds in which every node sends to one and receives from one: a node whose best link is far
below the others' is named.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from xgram_dist.parallel.device import synchronize
from xgram_dist.parallel.ranks import Ranks

REPEATS = 3
SLOW = 0.5
"""Of what was expected: below this share, it is said."""
ROUNDS = 3
SIZES = {"cuda": 256 << 20, "cpu": 4 << 20}
"""Bytes of a message."""


@dataclass(frozen=True)
class Links:
    all_to_all: float
    all_reduce: float
    nodes: dict[str, float]
    """Best link of each node to another; empty with one node."""

    def sentences(self, expected: float) -> list[str]:
        """For the log; `expected`: the plan's GB/s of a rank."""
        found = [
            f"preflight: all-to-all {self.all_to_all:.3g} GB/s, all-reduce {self.all_reduce:.3g} GB/s a rank "
            f"(plan: {expected:g})"
        ]
        slow = slow_nodes(self.nodes)
        if slow:
            usual = statistics.median(self.nodes.values())
            found += [
                f"preflight: node {node} is slow: {self.nodes[node]:.3g} GB/s at best, the others about {usual:.3g}"
                for node in slow
            ]
        if min(self.all_to_all, self.all_reduce) < SLOW * expected:
            worst = min(self.all_to_all, self.all_reduce)
            found.append(
                f"preflight: the links carry {worst:.3g} GB/s, the plan counts on {expected:g}: steps will take longer "
                f"than planned; look at the site's interface, or plan with --bandwidth {worst:.3g}"
            )
        return found


def slow_nodes(best: dict[str, float]) -> list[str]:
    """Nodes whose best link is far below what is usual; of two, none can be told from the other."""
    if len(best) < 3:
        return []
    usual = statistics.median(best.values())
    return [node for node, speed in best.items() if speed < SLOW * usual]


def measure_links(ranks: Ranks, nodes: list[str], device: torch.device) -> Links | None:
    """On all ranks together; None with a single rank. `nodes`: of each rank."""
    if ranks.size == 1:
        return None
    size = SIZES[device.type] // 4 // ranks.size * ranks.size
    sent = torch.ones(size, device=device)
    received = torch.empty_like(sent)
    share = (ranks.size - 1) / ranks.size * 4 * size
    exchange = _best(lambda: dist.all_to_all_single(received, sent, group=ranks.group), device)
    reduce = _best(lambda: dist.all_reduce(received, group=ranks.group), device)
    slowest = ranks.all_reduce_max(torch.tensor([exchange, reduce], device=device)).tolist()
    return Links(share / slowest[0] / 1e9, 2 * share / slowest[1] / 1e9, _between_nodes(ranks, nodes, sent, received))


def _between_nodes(ranks: Ranks, nodes: list[str], sent: torch.Tensor, received: torch.Tensor) -> dict[str, float]:
    speakers = {node: nodes.index(node) for node in dict.fromkeys(nodes)}
    order = list(speakers)
    best = 0.0
    for shift in range(1, min(len(order), 1 + ROUNDS)):
        if speakers[nodes[ranks.rank]] == ranks.rank:
            place = order.index(nodes[ranks.rank])
            to, from_ = speakers[order[(place + shift) % len(order)]], speakers[order[(place - shift) % len(order)]]

            def swap(to: int = to, from_: int = from_) -> None:
                waits = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, from_)]
                for one in dist.batch_isend_irecv(waits):
                    one.wait()

            best = max(best, sent.numel() * 4 / _best(swap, sent.device) / 1e9)
        dist.barrier(group=ranks.host.group)  # the next round begins for all at once
    found = ranks.gather_objects(best)
    return {node: found[rank] for node, rank in speakers.items()} if len(order) > 1 else {}


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the quickest of a few; the first, which opens connections, does not count."""
    quickest = math.inf
    for number in range(REPEATS + 1):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        if number:
            quickest = min(quickest, time.perf_counter() - start)
    return quickest
