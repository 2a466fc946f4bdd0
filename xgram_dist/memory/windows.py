"""How many micro-batches share a working set: all of a step, a number of them, or as many as fit a memory budget.

In: the tokens of a step. Out: slices of its micro-batches, the same on every rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from xgram_dist.config import Config
from xgram_dist.config.units import parse_bytes
from xgram_dist.errors import UserError
from xgram_dist.memory.layout import plan_tables
from xgram_dist.parallel.ranks import Ranks

BYTES = 4
"""Vectors and their gradients are fp32 in the working set, whatever travels."""


@dataclass
class WindowRule:
    micro_batches: int | None
    """Micro-batches a window; None: as many as there are."""
    budget: int | None
    """Largest number of distinct tokens; None: any."""
    text: str
    bytes_per_token: int

    @staticmethod
    def of(config: Config) -> "WindowRule":
        window = config.memory.window
        per_token = 2 * BYTES * sum(table.width for table in plan_tables(config))
        if isinstance(window, int):
            return WindowRule(window, None, str(window), per_token)
        if window == "step":
            return WindowRule(None, None, window, per_token)
        return WindowRule(None, parse_bytes(window) // max(1, per_token), window, per_token)

    def __post_init__(self) -> None:
        self._started = False

    def cut(self, tokens: Any, count_distinct: Callable[[Any], int], ranks: Ranks) -> list[slice]:
        """Slices of the first axis of `tokens`. With a budget, ranks agree on them: one small all-reduce a window.
        Later in a run a single micro-batch may exceed the budget: better than ending the run."""
        total = len(tokens)
        if self.budget is None:
            size = self.micro_batches or total
            return [slice(start, min(start + size, total)) for start in range(0, total, size)]
        slices, start = [], 0
        while start < total:
            counts = torch.tensor([count_distinct(tokens[start : end + 1]) for end in range(start, total)])
            fits = int((ranks.all_reduce_max(counts) <= self.budget).sum())
            if fits == 0 and not self._started:
                most = int(counts[0])
                raise UserError(
                    f"memory.window = {self.text} is too small for one micro-batch: {most:,} distinct tokens x "
                    f"{self.bytes_per_token:,} bytes are {most * self.bytes_per_token / 2**20:,.1f} MiB; give it at "
                    f"least that, or lower train.micro_batch"
                )
            slices.append(slice(start, start + max(1, fits)))
            start += max(1, fits)
        self._started = True
        return slices
