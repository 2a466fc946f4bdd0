"""AdamW over the tables: dense and exact.

Every row moves every step: one that is not hit still decays, and its momentum still moves it. VIP rows and the
other rows have their own learning-rate multiplier; row gates learn at the backbone's rate and do not decay.
"""

from typing import Any

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.memory.local_tables import LocalTables
from xgram_dist.optim.schedule import learning_rate, table_multipliers, warmup_factor


class TableOptimizer:
    def __init__(self, config: Config, tables: LocalTables):
        self.config, self.tables = config, tables
        optimizer, memory = config.optimizer, config.memory
        decay = optimizer.weight_decay if memory.weight_decay is None else memory.weight_decay
        # Gradients as a dense AdamW wants them. They stay allocated and are zero but for the rows of the step.
        self._dense = [
            (torch.zeros_like(state.rows), torch.zeros_like(state.gates) if state.gates is not None else None)
            for state in tables.states
        ]
        groups: list[dict[str, Any]] = []
        for state, (rows_grad, gates_grad) in zip(tables.states, self._dense, strict=True):
            vip, body = table_multipliers(config, state.slab.rows)
            cut = tables.vip_rows if vip != body else 0
            # Row ranges are views of one storage, each with its part of the gradient.
            for multiplier, rows in ((vip, slice(0, cut)), (body, slice(cut, None))):
                if state.rows[rows].numel():
                    part = _with_gradient(state.rows[rows], rows_grad[rows])
                    groups.append({"params": [part], "multiplier": multiplier, "weight_decay": decay})
            if state.gates is not None and gates_grad is not None:
                groups.append({"params": [_with_gradient(state.gates, gates_grad)], "weight_decay": 0.0})
        self.adamw = torch.optim.AdamW(
            groups, lr=optimizer.learning_rate, betas=optimizer.betas, eps=optimizer.eps, fused=True
        )

    def step(self, step: int) -> None:
        base = learning_rate(self.config, step)
        warm = warmup_factor(self.config, step) if self.config.memory.learning_rate.warmup else 1.0
        for group in self.adamw.param_groups:
            group["lr"] = base * group["multiplier"] * warm if "multiplier" in group else base
        hit = [
            (dense, state.gradient)
            for dense, state in zip(self._dense, self.tables.states, strict=True)
            if state.gradient is not None
        ]
        for (rows_grad, gates_grad), gradient in hit:
            rows_grad.index_copy_(0, gradient.touched, gradient.rows)
            if gates_grad is not None and gradient.gates is not None:
                gates_grad.index_copy_(0, gradient.touched, gradient.gates)
        self.adamw.step()
        for (rows_grad, gates_grad), gradient in hit:
            rows_grad.index_fill_(0, gradient.touched, 0.0)
            if gates_grad is not None:
                gates_grad.index_fill_(0, gradient.touched, 0.0)


def _with_gradient(values: Tensor, gradient: Tensor) -> Tensor:
    leaf = values.detach().requires_grad_()
    leaf.grad = gradient
    return leaf
