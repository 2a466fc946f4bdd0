"""If this fails, ranks wait for each other forever: the pool and the planning thread share a process group."""

import threading
import time

import torch
from ranks_helper import run_ranks

from xgram_dist.eval.rank_pool import RankPool
from xgram_dist.parallel.mesh import single_mesh


def _pool_while_planning(ranks) -> tuple[bool, list[int], list[int] | None]:
    """A planning thread that is late on the second rank, and the pool in the main thread."""
    mesh = single_mesh(ranks)
    planning, received = mesh.data.host, []

    def plan() -> None:
        time.sleep(1.0 * ranks.rank)
        sent = torch.arange(2) + 10 * ranks.rank
        buffer, work = planning.all_to_all(sent, [1, 1], [1, 1])
        work.wait()
        received.extend(buffer.tolist())

    pool = RankPool(mesh, {"double": lambda batch: [2 * value for value in batch]})
    thread = threading.Thread(target=plan, daemon=True)
    thread.start()
    time.sleep(0.3)
    results = None
    if ranks.first:
        results = pool.run("double", [[1], [2], [3]], "numbers")
        pool.shut_down()
    else:
        pool.serve()
    thread.join()
    return pool.group.group is planning.group, received, results


def test_the_pool_and_the_planning_thread_may_run_in_any_order() -> None:
    first, second = run_ranks(_pool_while_planning, 2, timeout=60)
    assert first == (False, [0, 10], [[2], [4], [6]])
    assert second == (False, [1, 11], None)
