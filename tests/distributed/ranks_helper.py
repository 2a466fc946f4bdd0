"""Run a function on N real gloo ranks and bring back what each returns, or the first failing rank's traceback.

Ranks are forked from a server that has imported torch, DeepSpeed and the package: a rank that imports them itself takes
five seconds to start.
"""

import os
import socket
import time
import traceback
from multiprocessing import forkserver

import torch.multiprocessing as mp

_server = forkserver.ForkServer()  # not the one that data workers are forked from
_server.set_forkserver_preload(["deepspeed", "xgram_dist.train.trainer", "xgram_dist.engine.deepspeed"])


def _start(processes):
    connect = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = _server.connect_to_new_process
    try:
        for process in processes:
            process.start()
    finally:
        forkserver.connect_to_new_process = connect


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(function, rank, size, port, arguments, results):
    import torch

    from xgram_dist.parallel.mesh import init_world

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    try:
        ranks = init_world(torch.device("cpu"))
        results.put((rank, True, function(ranks, *arguments)))
        ranks.close()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))


def run_ranks(function, size, *arguments, timeout=400):
    """[function(ranks, *arguments) of rank 0, of rank 1, ...]; plain data only."""
    context = mp.get_context("forkserver")
    results = context.SimpleQueue()
    port = _free_port()
    processes = [
        context.Process(target=_rank, args=(function, rank, size, port, arguments, results), daemon=True)
        for rank in range(size)
    ]
    _start(processes)
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
