"""Rows as they are after all steps, from a checkpoint whose optimizer was behind with some.

An optimizer that touches only the rows that were hit saves them as they lie, so that a run goes on to the last bit.
Whoever reads rows for another purpose gives them the steps they missed, from what was saved beside them.
"""

from typing import Any

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.optim.rows.adamw import AdamW
from xgram_dist.optim.rows.catch_up import HISTORY, NOTHING, caught_up
from xgram_dist.optim.rows.missed import MissedSteps

CATCH_UP = "catch_up"


class Settle:
    """For the rows, or the gates, of one slab."""

    def __init__(self, config: Config, saved: dict[str, Tensor], weight_decay: float):
        """`saved`: the optimizer's small tensors, by the end of their names."""
        optimizer = config.optimizer
        adamw = AdamW(optimizer.betas, optimizer.eps, weight_decay)
        self.kinds = saved["sums"].shape[0]
        """2 where VIP rows have their own learning rate."""
        self._missed = MissedSteps(adamw, HISTORY, self.kinds, torch.float32, torch.device("cpu"))
        self._missed.restore(saved)
        smallest = max((NOTHING[torch.float32] * adamw.eps) ** 2, 2 * torch.finfo(torch.float32).tiny)
        self._constants = adamw.eps**0.5, smallest

    def since(self, steps_R: Tensor, vip_R: Tensor) -> Any:
        """What rows that are at these steps have missed."""
        kinds_R = (~vip_R).long() if self.kinds == 2 else torch.zeros_like(steps_R, dtype=torch.int64)
        return self._missed.since(steps_R.long(), kinds_R)

    def __call__(self, values_RW: Tensor, first_RW: Tensor, second_RW: Tensor, missed: Any) -> Tensor:
        return caught_up(values_RW, first_RW, second_RW, missed, *self._constants)
