"""Run a function on N gloo ranks of this machine, and bring back what each returns (plain data)."""

import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from xgram_dist.parallel.cores import bind, cores_of
from xgram_dist.parallel.device import keep_host_memory
from xgram_dist.parallel.ranks import Ranks, join_ranks


def run_on_ranks(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """[function(ranks, *arguments) of rank 0, of rank 1, ...]; cores are shared out evenly."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="xgram-bench-") as folder:
        spawn(_run, args=(function, size, port, folder, arguments), nprocs=size)  # type: ignore[no-untyped-call]
        return [json.loads((Path(folder) / str(rank)).read_text(encoding="utf-8")) for rank in range(size)]


def _run(
    rank: int, function: Callable[..., Any], size: int, port: int, folder: str, arguments: tuple[Any, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    cores = cores_of(rank, size)
    bind(0, cores)
    torch.set_num_threads(max(1, len(cores)))
    keep_host_memory()
    ranks: Ranks = join_ranks(torch.device("cpu"))
    result = function(ranks, *arguments)
    (Path(folder) / str(rank)).write_text(json.dumps(result), encoding="utf-8")
    ranks.close()
