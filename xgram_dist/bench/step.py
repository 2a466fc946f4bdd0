"""The cost of tables in a training step: X-gram against vanilla, in one process, alternating step by step.

A round is vanilla, X-gram, X-gram, vanilla (the next one in reverse), so that a drift in the machine's speed affects
both alike. The ratio of a round is of the two sums; the result is the median over rounds.

The model: width 512, 6 layers, 4 x 512 Zipf tokens per step, 1x at 50 % (two value views, kernels 3 and 5),
torch.compile, fp32. The step is complete: fetch, forward, backward, return, clipping, both optimizers.
"""

import statistics
import time
from typing import Any

import numpy as np
import torch

from xgram_dist.config import Config, build_config
from xgram_dist.console import Progress
from xgram_dist.engine import build_engine
from xgram_dist.model.build import build_lookup, build_model
from xgram_dist.model.methods.base import table_layout
from xgram_dist.parallel.device import choose_device, synchronize
from xgram_dist.parallel.mesh import single_mesh
from xgram_dist.tables.layout import routing_settings
from xgram_dist.tables.routing_build import build_routing
from xgram_dist.train.step import JointOptimizer, train_step

BATCH, LENGTH = 4, 512
WARM = 1


def step_config(method: str, vocabulary: int, compiled: bool) -> Config:
    memory: dict[str, Any] = {"method": method}
    if method == "xgram":
        memory |= {"compression": 0.5, "sites": {"v": {"views": 2, "kernels": [3, 5]}}}
    return build_config(
        {
            "name": f"bench-{method}",
            "model": {
                "vocabulary": vocabulary,
                "layers": 6,
                "width": 512,
                "ffn_width": 1536,
                "heads": 8,
                "kv_heads": 4,
                "sequence_length": LENGTH,
            },
            "memory": memory,
            "parallel": {"engine": "replicated"},
            "train": {"precision": "fp32", "compile": compiled, "global_batch": BATCH, "micro_batch": BATCH},
        }
    )


class Side:
    """One of the two models with its optimizer."""

    def __init__(self, config: Config, frequencies: "np.ndarray[Any, Any]", device: torch.device):
        routing = None
        if table_layout(config).hashed:
            routing = build_routing(frequencies, routing_settings(config), table_layout(config).num_views)
        self.config, self.device = config, device
        self.lookup = build_lookup(config, routing, device)
        engine = build_engine(config, build_model(config, device), single_mesh(), device)
        self.optimizer = JointOptimizer(config, engine, self.lookup, single_mesh())
        self.steps = 0

    def step(self, tokens: torch.Tensor) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        self.steps += 1
        windows = self.lookup.plan(tokens).result()
        train_step(self.config, self.lookup, self.optimizer, tokens, windows, self.steps)
        synchronize(self.device)
        return time.perf_counter() - start


def run_step_benchmark(rounds: int, vocabulary: int, compiled: bool) -> dict[str, Any]:
    device = choose_device()
    frequencies = 1.0 / (np.arange(vocabulary) + 10.0)
    frequencies /= frequencies.sum()
    random = np.random.default_rng(0)
    sides = {m: Side(step_config(m, vocabulary, compiled), frequencies, device) for m in ("vanilla", "xgram")}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with Progress(WARM + rounds, "rounds", "bench step") as progress:
        for number in range(WARM + rounds):
            first, second = sorted(sides, reverse=bool(number % 2))
            taken = dict.fromkeys(sides, 0.0)
            for name in (first, second, second, first):
                tokens = torch.from_numpy(random.choice(vocabulary, size=(1, BATCH, LENGTH), p=frequencies))
                taken[name] += sides[name].step(tokens) / 2
            for name in sides:
                if number >= WARM:
                    seconds[name].append(taken[name])
            progress.update()
    ratios = [x / v for x, v in zip(seconds["xgram"], seconds["vanilla"], strict=True)]
    return {
        "vocabulary": vocabulary,
        "compile": compiled,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "vanilla_ms": round(1000 * statistics.median(seconds["vanilla"]), 1),
        "xgram_ms": round(1000 * statistics.median(seconds["xgram"]), 1),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(q, 4) for q in statistics.quantiles(ratios, n=4)[::2]],
        "ratio_of_fastest": round(min(seconds["xgram"]) / min(seconds["vanilla"]), 4),
    }
