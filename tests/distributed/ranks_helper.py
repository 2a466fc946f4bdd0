"""Run a function on N real gloo ranks and bring back what each returns, or the first failing rank's traceback."""

import os
import socket
import time
import traceback

import torch.multiprocessing as mp


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(function, rank, size, port, arguments, results):
    import torch

    from xgram_dist.parallel.ranks import join_ranks

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    try:
        ranks = join_ranks(torch.device("cpu"))
        results.put((rank, True, function(ranks, *arguments)))
        ranks.close()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))


def run_ranks(function, size, *arguments, timeout=400):
    """[function(ranks, *arguments) of rank 0, of rank 1, ...]; plain data only."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    port = _free_port()
    processes = [
        context.Process(target=_rank, args=(function, rank, size, port, arguments, results), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found = {}
    end = time.monotonic() + timeout
    try:
        while len(found) < size:
            if not results.empty():
                rank, fine, value = results.get()
                assert fine, f"rank {rank} of {size} failed:\n{value}"
                found[rank] = value
                continue
            dead = [r for r, p in enumerate(processes) if p.exitcode not in (None, 0) and r not in found]
            assert not dead, f"rank {dead[0]} of {size} died with exit code {processes[dead[0]].exitcode}"
            assert time.monotonic() < end, f"ranks {sorted(set(range(size)) - set(found))} did not end in {timeout} s"
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [found[rank] for rank in range(size)]
