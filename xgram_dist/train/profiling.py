"""What a run measures of itself: throughput, utilisation, traffic of the exchange, a profiler trace.

Nothing here communicates. Memory is in memory.py; the records are written by metrics.py.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

from xgram_dist.config import Config
from xgram_dist.estimate.flops import num_row_gates, plan_budget
from xgram_dist.model.methods.base import method_of
from xgram_dist.parallel.device import peak_flops
from xgram_dist.tables.exchange_plan import ID_BYTES, Window
from xgram_dist.tables.layout import Slab


class Throughput:
    """Tokens a second and seconds a step since the last status line; tokens a second over the run; time left.

    The first step compiles and allocates, so the overall rate and the time left leave it out.
    """

    def __init__(self, steps: int, start: int = 0) -> None:
        """`steps`: of the whole run. `start`: the last step that was done before this process."""
        self._steps, self._start = steps, start
        self._created = self._interval_begin = time.monotonic()
        self._first_step_end: float | None = None
        self._interval_tokens = self._tokens = 0
        self._last_step = start

    def add(self, tokens: int) -> None:
        """A step ended."""
        self._interval_tokens += tokens
        if self._first_step_end is None:
            self._first_step_end = time.monotonic()
        else:
            self._tokens += tokens

    def exclude(self, seconds: float) -> None:
        """Seconds just spent on something other than training."""
        self._interval_begin += seconds
        if self._first_step_end is not None:
            self._first_step_end += seconds

    def overall(self) -> float:
        """Tokens a second over the run."""
        elapsed = time.monotonic() - (self._first_step_end or self._created)
        return self._tokens / elapsed if self._tokens else 0.0

    def end_interval(self, step: int) -> tuple[dict[str, float], float | None]:
        """(figures since the last call, seconds left or None while there is only the first step to go by)."""
        now = time.monotonic()
        seconds = now - self._interval_begin
        figures = {
            "tokens_per_second": self._interval_tokens / seconds,
            "step_seconds": seconds / (step - self._last_step),
        }
        self._interval_tokens, self._interval_begin, self._last_step = 0, now, step
        if self._first_step_end is None or step < self._start + 2:
            return figures, None
        return figures, (self._steps - step) * (now - self._first_step_end) / (step - self._start - 1)


class Utilization:
    """Tokens and model FLOPs a second of a rank, and their share of its device's peak."""

    def __init__(self, config: Config, ranks: int, device: torch.device):
        budget = plan_budget(config)
        self._ranks = ranks
        # Backward costs twice forward. Recomputation by activation checkpointing is not model work and is not counted.
        self._flops_per_token = 3 * (budget.backbone_flops_per_token + budget.extra_flops_per_token)
        configured = config.train.peak_tflops
        self._peak = peak_flops(device) if configured is None else configured * 1e12

    def figures(self, tokens_per_second: float) -> dict[str, float]:
        """`tokens_per_second`: of all ranks."""
        rate = tokens_per_second / self._ranks
        flops = rate * self._flops_per_token
        figures = {"tokens_per_second_rank": rate, "model_tflops": flops / 1e12}
        return figures if self._peak is None else figures | {"utilisation": flops / self._peak}


def exchange_figures(
    config: Config, windows: list[Window], rank: int, replicas: int = 1, layers: Sequence[int] | None = None
) -> dict[str, Any]:
    """What the exchange of a step moves, from its plan: vectors and bytes that leave or enter this rank, over all
    windows. `rank`: of those that hold the tables once; `replicas`: of the tables; `layers`: of this rank of a
    pipeline.

    `bytes_bound` is the least any exchange could move: each distinct token with a remote row, once each way.
    `bytes_replicas` are those of the gradients that are summed over replicas, by a ring. `imbalance` is the load this
    rank puts on its busiest owner relative to the mean owner.
    """
    if not any(window.slabs for window in windows):
        return {}
    size = 2 if config.memory.wire == "bf16" else 4
    vectors_in = vectors_out = sent = received = bound = 0
    load: list[int] = []
    slabs = method_of(config, layers).layout().slabs
    for window in windows:
        for slab, plan in zip(slabs, window.slabs, strict=True):
            out, back = sum(plan.requested) - plan.requested[rank], sum(plan.served) - plan.served[rank]
            vectors_in, vectors_out = vectors_in + out, vectors_out + back
            sent += (out + back) * slab.width * size + out * ID_BYTES
            received += (out + back) * slab.width * size + back * ID_BYTES
            bound += 2 * plan.num_remote_tokens * slab.width * size
            load = [a + b for a, b in zip(load or [0] * len(plan.requested), plan.requested, strict=True)]
    return {
        "distinct_tokens": sum(window.num_distinct for window in windows),
        "windows": len(windows),
        "vectors_received": vectors_in,
        "vectors_sent": vectors_out,
        "bytes_sent": sent,
        "bytes_received": received,
        "bytes_bound": bound,
        "bytes_replicas": _bytes_of_replicas(config, slabs, windows[0], replicas),
        "imbalance": max(load) * len(load) / max(1, sum(load)),
    }


def _bytes_of_replicas(config: Config, slabs: tuple[Slab, ...], window: Window, replicas: int) -> int:
    size = 0
    for slab, plan in zip(slabs, window.slabs, strict=True):
        gates = len(slab.tables) if num_row_gates(config) else 0
        if replicas > 1 and plan.part is not None:
            size += plan.part.step_rows.numel() * (slab.width + gates) * 4
    return 2 * size * (replicas - 1) // replicas


class ProfilerTrace:
    """torch's profiler over some steps, written as a trace that Perfetto and Chrome open."""

    def __init__(self, first: int, steps: int, path: str):
        self.first, self.last, self.path = first, first + steps - 1, path
        self._profiler: torch.profiler.profile | None = None

    def before_step(self, step: int) -> None:
        if step == self.first:
            self._profiler = torch.profiler.profile()
            self._profiler.__enter__()

    def after_step(self, step: int) -> bool:
        """True when the trace has just been written."""
        if self._profiler is None or step < self.last:
            return False
        self._profiler.__exit__(None, None, None)
        self._profiler.export_chrome_trace(self.path)
        self._profiler = None
        return True
