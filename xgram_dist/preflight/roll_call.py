"""Roll call: every rank reports to the first within some seconds, and all hear who is missing or differs.

Over a store of its own, beside the port where the ranks will meet for training: joining the process group waits long
for ranks that may never come, and does not say which they are.
"""

import json
import time
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]

from xgram_dist.errors import UserError
from xgram_dist.preflight.facts import COMPARED

SECONDS = 60.0


class MissingRanksError(UserError):
    """Ranks that could not be reached."""

    exit_code = 1  # it may go better another time


def roll_call(
    rank: int, size: int, address: str, port: int, nodes: list[str], facts: dict[str, str], seconds: float = SECONDS
) -> list[str]:
    """The node of every rank, on every rank. `nodes`: where ranks should be, in order, or empty where not known."""
    try:
        store = TCPStore(
            address, port, size, is_master=rank == 0, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
        store.set(f"rank-{rank}", json.dumps(facts))
        if rank == 0:
            store.set("verdict", json.dumps(_verdict(store, size, nodes, seconds)))
        # The first rank may have begun to wait a little later than this one.
        store.wait(["verdict"], timedelta(seconds=2 * seconds))
        verdict = json.loads(store.get("verdict"))
        _leave(store, rank, size)
    except (DistNetworkError, DistStoreError) as error:
        raise MissingRanksError(
            f"preflight: rank {rank} on {facts['node']} does not reach rank 0 at {address}:{port} "
            f"({str(error).splitlines()[0]}); look at the network between the two nodes, or at the site's interface "
            f"and node_suffix"
        ) from None
    if verdict["missing"]:
        raise MissingRanksError(verdict["missing"])
    if verdict["differs"]:
        raise UserError(verdict["differs"])
    return list(verdict["nodes"])


def _leave(store: TCPStore, rank: int, size: int) -> None:
    """The first rank holds the store; it goes last."""
    left = store.add("left", 1)
    end = time.monotonic() + 10
    while rank == 0 and left < size and time.monotonic() < end:
        time.sleep(0.02)
        left = store.add("left", 0)


def _verdict(store: TCPStore, size: int, nodes: list[str], seconds: float) -> dict[str, object]:
    end = time.monotonic() + seconds
    missing = list(range(size))
    while missing and time.monotonic() < end:
        missing = [rank for rank in missing if not store.check([f"rank-{rank}"])]
        time.sleep(0.05)
    everyone = {rank: json.loads(store.get(f"rank-{rank}")) for rank in range(size) if rank not in missing}
    return {
        "nodes": [facts["node"] for facts in everyone.values()],
        "missing": missing_sentence(missing, size, nodes, seconds) if missing else "",
        "differs": differing_sentence(everyone),
    }


def missing_sentence(missing: list[int], size: int, nodes: list[str], seconds: float) -> str:
    each = size // len(nodes) if nodes else 0
    if not each:
        return f"preflight: {len(missing)} of {size} ranks did not report within {seconds:g} s: {missing}"
    by_node: dict[str, list[int]] = {}
    for rank in missing:
        by_node.setdefault(nodes[rank // each], []).append(rank)
    where = "; ".join(f"{node} (rank {', '.join(map(str, ranks))})" for node, ranks in by_node.items())
    return f"preflight: {len(missing)} of {size} ranks did not report within {seconds:g} s: node {where}"


def differing_sentence(everyone: dict[int, dict[str, str]]) -> str:
    """Empty where all agree. What most have is taken as right, so that a single stale node is the one named."""
    for what in COMPARED:
        values = [facts[what] for facts in everyone.values()]
        usual = max(values, key=values.count)
        for rank, facts in everyone.items():
            if facts[what] != usual:
                return (
                    f"preflight: rank {rank} on node {facts['node']} has another {what} ({facts[what]}) than most "
                    f"({usual}); all nodes must see the same files"
                )
    return ""
