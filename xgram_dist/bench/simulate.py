"""Simulated steps against measured ones: 2, 4 and 8 gloo ranks on two emulated nodes, joined by a slow link.

Each node is a network namespace with half of the ranks. What it sends to the other one is held to a rate, and delayed
(`slow_link.py`); its ranks share that link, and talk to each other over the loopback device. A layout's steps are
measured in turns, at a rate that costs little and at a low one, in the same processes. From the first come the seconds
that ranks work, with as many of them on the machine's cores, and with what gloo and the emulation cost. The simulation
adds what the low rate adds: bytes, nodes, and tokens that it draws itself from the same law. It is not told anything
that was measured at the low rate.

A measured step is the median over steps of the mean over ranks; on a busy machine it varies from run to run.
"""

import os
import statistics
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from xgram_dist.bench.common import run_on_ranks
from xgram_dist.bench.overlap import Side
from xgram_dist.bench.slow_link import LinkEnd, SlowLink
from xgram_dist.config import Config, build_config
from xgram_dist.console import Progress
from xgram_dist.estimate.comm import Axes
from xgram_dist.estimate.links import Latency, Links
from xgram_dist.estimate.scaling import Trace, plan_and_draw
from xgram_dist.estimate.simulate import SimulatedStep, Stragglers, simulate_step
from xgram_dist.estimate.step_program import StepProgram, Work
from xgram_dist.estimate.step_time import Machine
from xgram_dist.estimate.traffic import zipf
from xgram_dist.model.methods.base import table_layout
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.layout import routing_settings
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.routing_build import build_routing
from xgram_dist.train.profiling import exchange_figures

RANKS = (2, 4, 8)
NODES = 2
RATE_MBIT, FREE_MBIT, DELAY_MS = 20, 2000, 1.0
LOOPBACK = 1e4
"""GB/s: what the loopback device costs is part of the measured work, as is the delay."""
TURNS = 2
VOCABULARY, LENGTH, MICRO_BATCHES, LAYERS, WIDTH = 4096, 128, 2, 8, 128
PHASES = {"compute": ("compute", "wait"), "fetch": ("fetch",), "return": ("return",)}
"""Phases of a run by part of the simulated work; the rest of a step is its update."""

KINDS = ("free", "limited")
EXCHANGE = ("token ids", "table vectors", "table gradients")


def check_config(ranks: int, layout: str) -> Config:
    keys = LAYOUTS[layout]
    memory: dict[str, Any] = {"overlap": keys.get("overlap", False)}
    if keys.get("by_node"):
        memory["shard"] = ranks // NODES
    return build_config(
        {
            "name": "bench-simulate",
            "model": {
                "vocabulary": VOCABULARY,
                "layers": LAYERS,
                "width": WIDTH,
                "ffn_width": 3 * WIDTH,
                "heads": 4,
                "kv_heads": 4,
                "sequence_length": LENGTH,
            },
            "memory": {
                "method": "xgram",
                "compression": 0.5,
                "sites": {"v": {"views": 2, "kernels": [3, 5]}, "h": {"views": 2, "kernels": [3, 5]}},
                "optimizer": "dense",
                **memory,
            },
            "parallel": keys["parallel"],
            "train": {
                "precision": "fp32",
                "compile": False,
                "global_batch": MICRO_BATCHES * ranks,
                "micro_batch": 1,
            },
        }
    )


LAYOUTS: dict[str, dict[str, Any]] = {
    "replicated": {"parallel": {"engine": "replicated"}},
    "replicated, overlap": {"parallel": {"engine": "replicated"}, "overlap": True},
    "replicated, tables by node": {"parallel": {"engine": "replicated"}, "by_node": True},
    "FSDP": {"parallel": {"engine": "hsdp"}},
}


def _routing(config: Config) -> Routing:
    return build_routing(zipf(VOCABULARY), routing_settings(config), table_layout(config).num_views)


def measure_steps(
    ranks: ProcessGroup, layouts: tuple[str, ...], steps: int, rate_mbit: int, end_of_rank: list[dict[str, Any]]
) -> dict[str, Any]:
    """Seconds of each layout's steps on this rank, by phase, at both rates, and the bytes of the exchange that it sent
    in one."""
    frequencies = zipf(VOCABULARY) / zipf(VOCABULARY).sum()
    shape = (2 * TURNS * (1 + steps) + 1, MICRO_BATCHES, 1, LENGTH)
    tokens = torch.from_numpy(np.random.default_rng(1 + ranks.rank).choice(VOCABULARY, shape, p=frequencies))
    first_of_node = ranks.rank % (ranks.size // NODES) == 0
    found = {}
    for name in layouts:
        config = check_config(ranks.size, name)
        side = Side(config, ranks, _routing(config))
        taken: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
        for turn in range(2 * TURNS):
            kind, rate = KINDS[turn % 2], (FREE_MBIT, rate_mbit)[turn % 2]
            dist.barrier()
            if first_of_node:
                LinkEnd(**end_of_rank[ranks.rank]).set_rate(rate)
            for number in range(1 + steps):
                dist.barrier()
                done = side.step(tokens)
                if number:
                    taken[kind].append(done)
        shard = config.memory.shard if isinstance(config.memory.shard, int) else ranks.size
        sent = exchange_figures(config, side.windows, ranks.rank % shard, ranks.size // shard).get("bytes_sent", 0)
        side.close()
        found[name] = {**taken, "bytes_sent": sent}
    dist.barrier()
    return found


def run_simulate_benchmark(
    sizes: list[int], steps: int, names: tuple[str, ...] = tuple(LAYOUTS), rate_mbit: int = RATE_MBIT
) -> dict[str, Any]:
    """`names`: of the layouts. `rate_mbit`: of the slow link."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the addresses of the namespaces have no names
    figures: dict[str, Any] = {"link": "", "steps": TURNS * steps, "layouts": {}}
    with Progress(len(sizes), "numbers of ranks", "bench simulate") as progress:
        for size in sizes:
            with SlowLink(FREE_MBIT, DELAY_MS) as link:
                ends = [link.ends[rank * NODES // size] for rank in range(size)]
                plain = [asdict(end) for end in ends]
                results = run_on_ranks(measure_steps, size, names, steps, rate_mbit, plain, network=ends)
                figures["link"] = f"{rate_mbit} Mb/s between {NODES} nodes, {DELAY_MS:g} ms: {link.kind}"
            progress.update()
            for name in names:
                figures["layouts"][f"{name}, {size} ranks"] = compare(
                    size, name, rate_mbit, [one[name] for one in results]
                )
    errors = [abs(one["error"]) for one in figures["layouts"].values()]
    figures["largest_error"], figures["median_error"] = max(errors), round(statistics.median(errors), 3)
    return figures


def compare(size: int, name: str, rate_mbit: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """`ranks`: what each of them measured."""
    simulated = simulate_check(size, name, rate_mbit, [rank["free"] for rank in ranks])
    without, measured = (_median([[step["step"] for step in rank[kind]] for rank in ranks]) for kind in KINDS)
    return {
        "without_limits_ms": round(1000 * without, 1),
        "measured_ms": round(1000 * measured, 1),
        "simulated_ms": round(1000 * simulated.seconds, 1),
        "error": round(simulated.seconds / measured - 1, 3),
        "exchange_bytes_measured": sum(rank["bytes_sent"] for rank in ranks),
        "exchange_bytes_simulated": round(sum(simulated.bytes.get(transfer, 0.0) for transfer in EXCHANGE)),
    }


def simulate_check(size: int, name: str, rate_mbit: int, steps: list[list[dict[str, Any]]]) -> SimulatedStep:
    """`steps`: of each rank, without limits."""
    config = check_config(size, name)
    machine = Machine(bandwidth=rate_mbit / 8e3, node_bandwidth=LOOPBACK, node_ranks=size // NODES)
    machine = replace(machine, bandwidth=1 / (1 / machine.bandwidth - 8e3 / FREE_MBIT))
    latency = Latency(0.0, 0.0, 0.0)
    axes = Axes.of(config, size)
    layout, requests = plan_and_draw(config, axes, machine, Trace(zipf(VOCABULARY), _routing(config)))
    links = Links.of(machine, size, latency, uplink=machine.bandwidth)
    program = StepProgram(config, axes, links, layout, _work(config, steps), requests)
    return simulate_step(program, size, lambda: Stragglers(size))[0]


def _work(config: Config, steps: list[list[dict[str, Any]]]) -> Work:
    parts = {
        part: _median([[sum(step["phases"].get(phase, 0.0) for phase in phases) for step in rank] for rank in steps])
        for part, phases in PHASES.items()
    }
    whole = _median([[step["step"] for step in rank] for rank in steps])
    block = parts["compute"] / (MICRO_BATCHES * config.model.layers)
    return Work(
        forward=block / 3,
        backward=2 * block / 3,
        head=0.0,
        fetch=parts["fetch"],
        give_back=parts["return"],
        backbone_update=max(0.0, whole - sum(parts.values())),
        engine_overlaps=False,
    )


def _median(by_rank: list[list[float]]) -> float:
    """Mean over ranks, median over steps."""
    return statistics.median(statistics.mean(step) for step in zip(*by_rank, strict=True))
