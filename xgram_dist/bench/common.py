"""Shared by the benchmarks: run a function on N gloo ranks of this machine; the run facts of a synthetic checkpoint."""

import json
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from xgram_dist.bench.slow_link import LinkEnd
from xgram_dist.config import Config, dump_config
from xgram_dist.parallel.device import retain_freed_host_memory
from xgram_dist.parallel.launch import bind, cores_of, end_with_starter
from xgram_dist.parallel.mesh import init_world
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.table_shards import TableShards


def synthetic_facts(config: Config, step: int, ranks: int, tables: TableShards | None, **known: Any) -> dict[str, Any]:
    """The facts a checkpoint records about its run, for a state that was just built; `known` overrides them."""
    return {
        "step": step,
        "updates": 0,
        "skipped": 0,
        "loss": None,
        "saved": "",
        "started_from": None,
        "loader": {},
        "tokenizer": {},
        "ranks": ranks,
        "data_ranks": ranks,
        "tensor": 1,
        "engine": config.parallel.engine,
        "row_sharding": None if tables is None else tables.sharding.policy,
        "table_optimizer": None if tables is None else tables.settings.kind,
        "routing": None,
        "config": dump_config(config),
    } | known


def run_on_ranks(
    function: Callable[..., Any], size: int, *arguments: Any, network: Sequence[LinkEnd] = ()
) -> list[Any]:
    """What function(ranks, *arguments) returns on each rank, as plain JSON data. Every rank gets its own cores.
    `network`: the end of a slow link for each rank; by default they talk over the loopback device."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="xgram-bench-") as folder:
        spawn(_run, args=(function, size, port, folder, arguments, network), nprocs=size)  # type: ignore[no-untyped-call]
        return [json.loads((Path(folder) / str(rank)).read_text(encoding="utf-8")) for rank in range(size)]


def _run(
    rank: int,
    function: Callable[..., Any],
    size: int,
    port: int,
    folder: str,
    arguments: tuple[Any, ...],
    network: Sequence[LinkEnd],
) -> None:
    end_with_starter()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if network:
        network[rank].enter()
        os.environ |= {"MASTER_ADDR": network[0].address, "GLOO_SOCKET_IFNAME": network[rank].device}
    cores = cores_of(rank, size)
    bind(0, cores)
    torch.set_num_threads(max(1, len(cores)))
    retain_freed_host_memory()
    ranks: ProcessGroup = init_world(torch.device("cpu"))
    result = function(ranks, *arguments)
    (Path(folder) / str(rank)).write_text(json.dumps(result), encoding="utf-8")
    ranks.close()
