"""What the links between ranks carry, in GB/s, against the plan; and which node is slow.

All ranks: an all-to-all and an all-reduce, as bytes that leave a rank over seconds. Then one rank of each node swaps
with one of another node, in rounds with other partners: a node whose best link is far below the others' is named.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
    speaks = speakers[nodes[ranks.rank]] == ranks.rank
    best = 0.0
    for pairs in pairings(len(order), ROUNDS):
        partner = pairs.get(order.index(nodes[ranks.rank]))
        if speaks and partner is not None:
            swap = partial(_swap, sent, received, speakers[order[partner]])
            best = max(best, sent.numel() * 4 / _best(swap, sent.device) / 1e9)
        dist.barrier(group=ranks.host.group)  # the next round begins for all at once
    found = ranks.gather_objects(best)
    return {node: found[rank] for node, rank in speakers.items()} if len(order) > 1 else {}


def pairings(count: int, rounds: int) -> list[dict[int, int]]:
    """Who meets whom: in each round everyone meets one other (of an odd number, one rests), never the same twice."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    found = []
    for _ in range(min(rounds, len(seats) - 1)):
        pairs: dict[int, int] = {}
        for one, other in zip(seats[: len(seats) // 2], reversed(seats), strict=False):
            if one is not None and other is not None:
                pairs |= {one: other, other: one}
        found.append(pairs)
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def _swap(sent: torch.Tensor, received: torch.Tensor, partner: int) -> None:
    for one in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
    ):
        one.wait()


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
