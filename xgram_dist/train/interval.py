"""Rates between status lines: tokens a second, seconds a step, time left."""

import time

import torch

from xgram_dist.config import Config
from xgram_dist.parallel.device import peak_flops
from xgram_dist.plan.budget import plan_budget


class Interval:
    def __init__(self, steps: int, start: int = 0) -> None:
        """`start`: the last step that was done before."""
        self._steps, self._begun = steps, start
        self._begin = self._since = time.monotonic()
        self._first: float | None = None  # the first step compiles and allocates; it says nothing of the rate
        self._tokens = self._all_tokens = 0
        self._step = start

    def add(self, tokens: int) -> None:
        self._tokens += tokens
        if self._first is None:
            self._first = time.monotonic()
        else:
            self._all_tokens += tokens

    def pause(self, seconds: float) -> None:
        """Time that was not training."""
        self._since += seconds
        if self._first is not None:
            self._first += seconds

    def overall(self) -> float:
        """Tokens a second over the run, without the first step."""
        elapsed = time.monotonic() - (self._first or self._begin)
        return self._all_tokens / elapsed if self._all_tokens else 0.0

    def close(self, step: int) -> tuple[dict[str, float], float | None]:
        """Figures since the last call, and seconds left (None while there is nothing to judge by)."""
        now = time.monotonic()
        seconds = now - self._since
        figures = {"tokens_per_second": self._tokens / seconds, "step_seconds": seconds / (step - self._step)}
        self._tokens, self._since, self._step = 0, now, step
        if self._first is None or step < self._begun + 2:
            return figures, None
        return figures, (self._steps - step) * (now - self._first) / (step - self._begun - 1)


class Rates:
    """Of a rank: tokens and model FLOPs a second, and the share of what its device could do."""

    def __init__(self, config: Config, ranks: int, device: torch.device):
        budget = plan_budget(config)
        self._ranks = ranks
        # Backward is twice forward. What activation checkpointing computes again is not counted: it is not model work.
        self._flops = 3 * (budget.backbone_flops_per_token + budget.extra_flops_per_token)
        given = config.train.peak_tflops
        self._peak = peak_flops(device) if given is None else given * 1e12

    def of(self, tokens_per_second: float) -> dict[str, float]:
        mine = tokens_per_second / self._ranks
        found = {"tokens_per_second_rank": mine, "model_tflops": mine * self._flops / 1e12}
        return found if self._peak is None else found | {"utilisation": mine * self._flops / self._peak}
