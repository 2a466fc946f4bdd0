"""Exchange and compute: with and without overlap (`memory.overlap`), over a slow link between two ranks.

Each rank runs in a network namespace of its own, with one core. Both sides train the same model on the same tokens, in
turns of some steps each within one run. The first step of a turn is not counted, since its vectors travelled while the
other side computed.

Exposed exchange time is what the training thread spends on the exchange while it does not compute: the phases fetch
(rows are gathered and sent), wait (for vectors) and return (gradients are sent, waited for and added up). A figure is
the mean over the two ranks, and the median over steps. On a busy machine the overlapped side looks worse than it is:
other processes interrupt work, and not waiting; so the ratio of the fastest steps is given, too.

The step: width 256, 8 layers, 2 micro-batches of 4 x 256 Zipf tokens a rank, tables at 50 % of 8,192 tokens (two value
views), dense AdamW (what `memory.optimizer: auto` chooses where a step hits this many rows), fp32, not compiled,
backbone replicated. Its gradients are all-reduced over the same link, within "compute", on both sides.
"""

import os
import statistics
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from xgram_dist.bench.common import run_on_ranks
from xgram_dist.bench.slow_link import SlowLink
from xgram_dist.config import Config, build_config
from xgram_dist.engine import build_engine
from xgram_dist.model.build import build_lookup, build_model
from xgram_dist.model.methods.base import table_layout
from xgram_dist.parallel.mesh import build_mesh
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.exchange_plan import Window
from xgram_dist.tables.layout import routing_settings
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.routing_build import build_routing
from xgram_dist.tables.working_set import WorkingSet
from xgram_dist.train.profiling import exchange_figures
from xgram_dist.train.step import JointOptimizer, train_step

RATE_MBIT, DELAY_MS = 1000, 1.0
VOCABULARY, LENGTH, MICRO_BATCH, MICRO_BATCHES = 8192, 256, 4, 2
EXCHANGE = ("fetch", "wait", "return")
CPU = torch.device("cpu")


def overlap_config(overlap: bool, ranks: int) -> Config:
    return build_config(
        {
            "name": "bench-overlap",
            "model": {
                "vocabulary": VOCABULARY,
                "layers": 8,
                "width": 256,
                "ffn_width": 768,
                "heads": 4,
                "kv_heads": 4,
                "sequence_length": LENGTH,
            },
            "memory": {
                "method": "xgram",
                "compression": 0.5,
                "sites": {"v": {"views": 2, "kernels": [3, 5]}},
                "optimizer": "dense",
                "overlap": overlap,
            },
            "parallel": {"engine": "replicated"},
            "train": {
                "precision": "fp32",
                "compile": False,
                "global_batch": MICRO_BATCH * MICRO_BATCHES * ranks,
                "micro_batch": MICRO_BATCH,
            },
        }
    )


class Side:
    """A model, and where it is in its training."""

    def __init__(self, config: Config, ranks: ProcessGroup, routing: Routing):
        self.config = config
        mesh = build_mesh(self.config, ranks)
        self.lookup = build_lookup(self.config, routing, CPU, mesh)
        self.engine = build_engine(self.config, build_model(self.config, CPU), mesh, CPU)
        self.optimizer = JointOptimizer(self.config, self.engine, self.lookup, mesh)
        self.phases = ranks.phases
        self.planned: Future[list[Window]] | None = None
        self.windows: list[Window] = []
        self.working: WorkingSet | None = None
        self.steps = 0

    def step(self, tokens_SABT: Tensor) -> dict[str, Any]:
        """The next step, as the trainer runs it: seconds of the whole, of the exchange, and the loss."""
        self.phases.take()
        start = time.perf_counter()
        tokens_ABT, next_ABT = tokens_SABT[self.steps], tokens_SABT[self.steps + 1]
        self.windows = (self.planned or self.lookup.plan(tokens_ABT)).result()
        self.planned = self.lookup.plan(next_ABT)
        self.steps += 1
        result = train_step(
            self.config,
            self.lookup,
            self.optimizer,
            tokens_ABT,
            self.windows,
            self.steps,
            working=self.working,
            upcoming=self.planned if self.lookup.overlap else None,
        )
        self.working = result.next_working
        seconds = time.perf_counter() - start
        taken = self.phases.take()
        return {
            "step": seconds,
            "loss": float(result.loss).hex(),
            "phases": {name.removeprefix("seconds_"): value for name, value in taken.items()},
        }

    def close(self) -> None:
        if self.working is not None:
            self.working.wait()
        assert self.planned is not None
        self.planned.result()
        self.lookup.close()
        self.engine.close()


def run_turns(ranks: ProcessGroup, turns: int, steps: int) -> dict[str, Any]:
    """All steps of both sides on this rank."""
    frequencies = 1.0 / np.arange(1, VOCABULARY + 1)
    frequencies /= frequencies.sum()
    layout = table_layout(overlap_config(False, ranks.size))
    routing = build_routing(frequencies, routing_settings(overlap_config(False, ranks.size)), layout.num_views)
    sides = {
        name: Side(overlap_config(name == "overlapped", ranks.size), ranks, routing) for name in ("plain", "overlapped")
    }
    shape = (turns * (1 + steps) + 1, MICRO_BATCHES, MICRO_BATCH, LENGTH)
    tokens = torch.from_numpy(np.random.default_rng(ranks.rank).choice(VOCABULARY, shape, p=frequencies))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    losses: dict[str, list[str]] = {name: [] for name in sides}
    for turn in range(turns):
        for name in sorted(sides, reverse=bool(turn % 2)):
            dist.barrier()
            for number in range(1 + steps):
                done = sides[name].step(tokens)
                losses[name].append(done.pop("loss"))
                if number:
                    found[name].append(done)
    exchanged = exchange_figures(sides["plain"].config, sides["plain"].windows, ranks.rank)
    dist.barrier()
    for side in sides.values():
        side.close()
    return {"steps": found, "losses": losses, "bytes_sent": exchanged["bytes_sent"]}


def run_overlap_benchmark(turns: int, steps: int) -> dict[str, Any]:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the addresses of the namespaces have no names
    with SlowLink(RATE_MBIT, DELAY_MS) as link:
        results = run_on_ranks(run_turns, 2, turns, steps, network=link.ends)
        kind = link.kind
    figures: dict[str, Any] = {"link": f"{RATE_MBIT} Mb/s, {DELAY_MS:g} ms: {kind}", "turns": turns, "steps": steps}
    exposed, fastest = {}, {}
    for name in ("plain", "overlapped"):
        by_rank = [result["steps"][name] for result in results]
        phases = sorted({phase for of_rank in by_rank for step in of_rank for phase in step["phases"]})
        exchange = [[_exchange(step) for step in of_rank] for of_rank in by_rank]
        exposed[name], fastest[name] = _median(exchange), min(map(statistics.mean, zip(*exchange, strict=True)))
        figures[f"{name}_exposed_ms"] = exposed[name]
        figures[f"{name}_step_ms"] = _median([[step["step"] for step in of_rank] for of_rank in by_rank])
        figures[f"{name}_phases_ms"] = {
            phase: _median([[step["phases"].get(phase, 0.0) for step in of_rank] for of_rank in by_rank])
            for phase in phases
        }
    figures["exposed_ratio"] = round(exposed["overlapped"] / exposed["plain"], 3)
    figures["exposed_ratio_of_fastest"] = round(fastest["overlapped"] / fastest["plain"], 3)
    figures["step_ratio"] = round(figures["overlapped_step_ms"] / figures["plain_step_ms"], 3)
    figures["bytes_sent"] = results[0]["bytes_sent"]
    figures["same_losses"] = all(result["losses"]["plain"] == result["losses"]["overlapped"] for result in results)
    return figures


def _exchange(step: dict[str, Any]) -> float:
    return sum(step["phases"].get(phase, 0.0) for phase in EXCHANGE)


def _median(by_rank: list[list[float]]) -> float:
    """Milliseconds: mean over ranks, median over steps."""
    return round(1000 * statistics.median(statistics.mean(step) for step in zip(*by_rank, strict=True)), 2)
