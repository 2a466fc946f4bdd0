"""The preflight of `train --preflight GB/s`: find a missing, differing or slow node before training starts.

1. Check-in, before the process group exists. Every rank reports to rank 0 over a separate TCP store, at the port after
   MASTER_PORT. Joining the process group waits long for ranks that never come and does not name them; the check-in
   does, after a minute. It also compares hashes of code, config, data and routing, and refuses an interface of gloo
   that other nodes do not reach.
2. Links, after the process group exists. All ranks time an all-to-all and an all-reduce. Then one rank of each node
   exchanges messages with one of another node, in rounds with different partners; a node whose best link is far below
   the others' is named.
"""

import hashlib
import json
import math
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]

import xgram_dist
from xgram_dist.cluster.interfaces import Interface, gloo_interface, unreachable_sentence
from xgram_dist.cluster.slurm.bad_nodes import LOST, SLOW, note_node
from xgram_dist.config import Config, dump_config
from xgram_dist.data.manifest import MANIFEST
from xgram_dist.environment import Place, node_names, read_place
from xgram_dist.errors import UserError
from xgram_dist.parallel.device import describe_gpu, synchronize
from xgram_dist.parallel.mesh import init_world
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.parallel.rendezvous import RendezvousError, open_store

CHECK_IN_SECONDS, LAST_PORT = 60.0, (1 << 16) - 1
COMPARED = ("code", "config", "data", "routing")
REPEATS = 3
ROUNDS = 3
SLOW_SHARE = 0.5
"""Of the expected or usual speed; below it a link is reported as slow."""
MESSAGE_BYTES = {"cuda": 256 << 20, "cpu": 4 << 20}


class MissingNodesError(RendezvousError):
    """Ranks did not check in."""

    def __init__(self, message: str, nodes: list[str]):
        super().__init__(message)
        self.nodes = nodes


def join_with_preflight(config: Config, device: torch.device, expected: float, run: Path) -> ProcessGroup:
    """As `init_world`, with the preflight around it. `expected`: GB/s of a rank that the plan counts on. Nodes that are
    missing or slow are noted in the run folder, for the run's next start."""
    try:
        nodes = check_in_from_environment({**rank_facts(config), "gpu": describe_gpu(device)})
    except MissingNodesError as error:
        for node in error.nodes if read_place().rank == 0 else ():
            note_node(run, node, LOST, str(error))
        raise
    ranks = init_world(device, config.train.collective_timeout)
    links = measure_links(ranks, nodes, device)
    if links is not None and ranks.first:
        for sentence in links.sentences(expected):
            print(sentence, flush=True)
        for node, why in links.slow_nodes().items():
            note_node(run, node, SLOW, why)
    return ranks


def check_in_from_environment(facts: dict[str, str]) -> list[str]:
    """The node of every rank; rank and rendezvous come from the environment of torchrun or srun."""
    place = read_place()
    if place.size == 1:
        return [facts["node"]]
    nodes = node_names(place.size)
    if place.port == LAST_PORT:
        raise UserError(f"MASTER_PORT = {LAST_PORT}: the preflight uses the port after it, and there is none")
    # Not torchrun's store, nor the launcher's socket: the first is not at this port, the second not bound to it.
    place = replace(place, port=place.port + 1, agent_store=False, launched=False, listen_fd=None)
    return check_in(place, nodes, facts)


# ---- check-in


def rank_facts(config: Config | None) -> dict[str, str]:
    """The node of this rank, its interface of gloo, and hashes of the package's source, the config, and the data and
    routing files."""
    facts = {
        "node": socket.gethostname(),
        "gloo": json.dumps(asdict(gloo_interface())),
        "code": code_hash(Path(xgram_dist.__file__).parent),
    }
    if config is None:
        return facts
    routing = config.memory.routing
    return facts | {
        "config": _hash(dump_config(config).encode()),
        "data": _file_hash(None if config.data.path is None else Path(config.data.path) / MANIFEST),
        "routing": _file_hash(Path(routing.file) if routing.file is not None else None),
    }


def check_in(place: Place, nodes: list[str], facts: dict[str, str], seconds: float = CHECK_IN_SECONDS) -> list[str]:
    """The node of every rank, on every rank. `nodes`: those the ranks should be on, in rank order; empty: not known."""
    rank, size = place.rank, place.size
    try:
        # Ranks of another run at this port do not see the keys of this one.
        store = PrefixStore(_hash(place.token.encode()), open_store(place, seconds, patience=0.0))
        store.set(f"rank-{rank}", json.dumps(facts))
        if rank == 0:
            store.set("verdict", json.dumps(_collect(store, size, nodes, seconds)))
        # Rank 0 may have started to wait a little later than this rank.
        store.wait(["verdict"], timedelta(seconds=2 * seconds))
        verdict = json.loads(store.get("verdict"))
        _leave(store, rank, size)
    except (DistNetworkError, DistStoreError, RendezvousError) as error:
        raise RendezvousError(
            f"preflight: rank {rank} on {facts['node']} does not reach rank 0 at {place.address}:{place.port} "
            f"({str(error).splitlines()[0]}); check the network between the two nodes, and the site's interface and "
            f"node_suffix"
        ) from None
    if verdict["missing"]:
        raise MissingNodesError(verdict["missing"], verdict["missing_nodes"])
    if verdict["mixed"] and rank == 0:
        print(verdict["mixed"], flush=True)
    for problem in ("differs", "unreachable"):
        if verdict[problem]:
            raise UserError(verdict[problem])
    return list(verdict["nodes"])


def _collect(store: Store, size: int, nodes: list[str], seconds: float) -> dict[str, object]:
    """On rank 0: wait for all ranks, compare them."""
    deadline = time.monotonic() + seconds
    missing = list(range(size))
    while missing and time.monotonic() < deadline:
        missing = [rank for rank in missing if not store.check([f"rank-{rank}"])]
        time.sleep(0.05)
    present = {rank: json.loads(store.get(f"rank-{rank}")) for rank in range(size) if rank not in missing}
    return {
        "nodes": [facts["node"] for facts in present.values()],
        "missing": missing_sentence(missing, size, nodes, seconds) if missing else "",
        "missing_nodes": missing_nodes(missing, size, nodes),
        "mixed": mixed_gpus_sentence(present),
        "differs": differing_sentence(present),
        "unreachable": _unreachable_sentence(present),
    }


def _unreachable_sentence(present: dict[int, dict[str, str]]) -> str:
    interfaces = {rank: Interface(**json.loads(facts["gloo"])) for rank, facts in present.items() if "gloo" in facts}
    sentence = unreachable_sentence(interfaces, {rank: facts["node"] for rank, facts in present.items()})
    return sentence and f"preflight: {sentence}"


def _leave(store: Store, rank: int, size: int) -> None:
    """Rank 0 hosts the store, so it leaves last."""
    left = store.add("left", 1)
    deadline = time.monotonic() + 10
    while rank == 0 and left < size and time.monotonic() < deadline:
        time.sleep(0.02)
        left = store.add("left", 0)


def missing_nodes(missing: list[int], size: int, nodes: list[str]) -> list[str]:
    """Those of which no rank reported."""
    each = size // len(nodes) if nodes else size
    return [node for number, node in enumerate(nodes) if set(range(number * each, (number + 1) * each)) <= {*missing}]


def mixed_gpus_sentence(present: dict[int, dict[str, str]]) -> str:
    """Empty if all ranks have the same GPU, or none."""
    by_gpu: dict[str, list[str]] = {}
    for facts in present.values():
        by_gpu.setdefault(facts.get("gpu", ""), []).append(facts["node"])
    if len(by_gpu) < 2:
        return ""
    kinds = "; ".join(f"{gpu or 'no GPU'} on {', '.join(dict.fromkeys(nodes))}" for gpu, nodes in by_gpu.items())
    return (
        f"preflight: the nodes have different GPUs: {kinds}. All wait for the slowest, and the smallest memory decides "
        f"what fits; name one kind in the site file (gpu_type, or --constraint under sbatch)"
    )


def missing_sentence(missing: list[int], size: int, nodes: list[str], seconds: float) -> str:
    ranks_per_node = size // len(nodes) if nodes else 0
    if not ranks_per_node:
        return f"preflight: {len(missing)} of {size} ranks did not report within {seconds:g} s: {missing}"
    by_node: dict[str, list[int]] = {}
    for rank in missing:
        by_node.setdefault(nodes[rank // ranks_per_node], []).append(rank)
    where = "; ".join(f"{node} (rank {', '.join(map(str, ranks))})" for node, ranks in by_node.items())
    return f"preflight: {len(missing)} of {size} ranks did not report within {seconds:g} s: node {where}"


def differing_sentence(present: dict[int, dict[str, str]]) -> str:
    """Empty if all ranks agree. The majority is taken as right, so that a single stale node is the one named."""
    for what in COMPARED:
        values = [facts.get(what, "none") for facts in present.values()]
        usual = max(values, key=values.count)
        for rank, facts in present.items():
            if facts.get(what, "none") != usual:
                return (
                    f"preflight: rank {rank} on node {facts['node']} has another {what} ({facts.get(what)}) than most "
                    f"({usual}); all nodes must see the same files"
                )
    return ""


def code_hash(package: Path) -> str:
    """Of every Python file and its path within the package."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _file_hash(path: Path | None) -> str:
    if path is None:
        return "none"
    try:
        return _hash(path.read_bytes())
    except OSError as error:
        return f"cannot be read: {error.strerror}"


# ---- links


@dataclass(frozen=True)
class Links:
    """GB/s that leave a rank."""

    all_to_all: float
    all_reduce: float
    nodes: dict[str, float]
    """Best link of each node to another; empty with one node."""

    def sentences(self, expected: float) -> list[str]:
        """For the log. `expected`: GB/s of a rank that the plan counts on."""
        lines = [
            f"preflight: all-to-all {self.all_to_all:.3g} GB/s, all-reduce {self.all_reduce:.3g} GB/s a rank "
            f"(plan: {expected:g})"
        ]
        lines += [f"preflight: node {node} is slow: {why}" for node, why in self.slow_nodes().items()]
        worst = min(self.all_to_all, self.all_reduce)
        if worst < SLOW_SHARE * expected:
            lines.append(
                f"preflight: the links carry {worst:.3g} GB/s, the plan counts on {expected:g}: steps will take longer "
                f"than planned; look at the site's interface, or plan with --bandwidth {worst:.3g}"
            )
        return lines

    def slow_nodes(self) -> dict[str, str]:
        """By node: its speed, and the others'."""
        usual = statistics.median(self.nodes.values()) if self.nodes else 0.0
        return {
            node: f"{self.nodes[node]:.3g} GB/s at best, the others about {usual:.3g}"
            for node in slow_nodes(self.nodes)
        }


def slow_nodes(best: dict[str, float]) -> list[str]:
    """Nodes whose best link is far below the median. Of two nodes neither can be blamed."""
    if len(best) < 3:
        return []
    usual = statistics.median(best.values())
    return [node for node, speed in best.items() if speed < SLOW_SHARE * usual]


def measure_links(ranks: ProcessGroup, nodes: list[str], device: torch.device) -> Links | None:
    """All ranks call it; None with a single rank. `nodes`: the node of each rank."""
    if ranks.size == 1:
        return None
    size = MESSAGE_BYTES[device.type] // 4 // ranks.size * ranks.size
    sent = torch.ones(size, device=device)
    received = torch.empty_like(sent)
    remote_bytes = (ranks.size - 1) / ranks.size * 4 * size
    all_to_all = fastest_seconds(lambda: dist.all_to_all_single(received, sent, group=ranks.group), device)
    all_reduce = fastest_seconds(lambda: dist.all_reduce(received, group=ranks.group), device)
    slowest = ranks.all_reduce_max(torch.tensor([all_to_all, all_reduce], device=device)).tolist()
    between_nodes = _best_links(ranks, nodes, sent, received)
    return Links(remote_bytes / slowest[0] / 1e9, 2 * remote_bytes / slowest[1] / 1e9, between_nodes)


def _best_links(ranks: ProcessGroup, nodes: list[str], sent: torch.Tensor, received: torch.Tensor) -> dict[str, float]:
    """The best speed of each node over some rounds with different partners."""
    leaders = {node: nodes.index(node) for node in dict.fromkeys(nodes)}  # the first rank of each node
    order = list(leaders)
    leads = leaders[nodes[ranks.rank]] == ranks.rank
    best = 0.0
    for pairs in pair_rounds(len(order), ROUNDS):
        partner = pairs.get(order.index(nodes[ranks.rank]))
        if leads and partner is not None:
            swap = partial(_swap, sent, received, leaders[order[partner]])
            best = max(best, sent.numel() * 4 / fastest_seconds(swap, sent.device) / 1e9)
        dist.barrier(group=ranks.host.group)  # all pairs begin a round together
    speeds = ranks.all_gather_object(best)
    return {node: speeds[rank] for node, rank in leaders.items()} if len(order) > 1 else {}


def pair_rounds(count: int, rounds: int) -> list[dict[int, int]]:
    """A round-robin tournament: in each round everyone has one partner (of an odd number, one has none), and no pair
    meets twice."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    pairings = []
    for _ in range(min(rounds, len(seats) - 1)):
        pairs: dict[int, int] = {}
        for a, b in zip(seats[: len(seats) // 2], reversed(seats), strict=False):
            if a is not None and b is not None:
                pairs |= {a: b, b: a}
        pairings.append(pairs)
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return pairings


def _swap(sent: torch.Tensor, received: torch.Tensor, partner: int) -> None:
    operations = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def fastest_seconds(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Seconds of the fastest of some repeats; the first call, which opens connections, does not count."""
    fastest = math.inf
    for number in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        if number:
            fastest = min(fastest, time.perf_counter() - start)
    return fastest
