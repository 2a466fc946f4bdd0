"""Parameter groups and the AdamW over them.

Backbone matrices decay, its vectors and scalars do not. Tables have their own learning rate and decay; VIP rows and
the other rows of a slab may differ, and are then two views of its storage. Row gates learn at the backbone's rate
and do not decay. AdamW is dense and exact: a row that is not hit still decays, and its momentum still moves it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xgram_dist.config import Config
from xgram_dist.memory.local_tables import LocalTables
from xgram_dist.optim.schedule import learning_rate, table_multipliers, warmup_factor


@dataclass
class RowRange:
    """Some rows of a slab as a parameter of their own: same storage, their part of the gradient."""

    slab: nn.Parameter
    part: nn.Parameter
    rows: slice

    def take_gradient(self) -> None:
        self.part.grad = None if self.slab.grad is None else self.slab.grad[self.rows]


class Optimizer:
    """AdamW over backbone and local tables, with joint clipping and the schedule."""

    def __init__(self, config: Config, model: nn.Module, tables: LocalTables | None):
        self.config = config
        self.row_ranges: list[RowRange] = []
        groups = _backbone_groups(config, model)
        self.parameters: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        if tables is not None and tables.rows:
            groups += self._table_groups(tables)
            self.parameters += [*tables.rows, *(gate for gate in tables.gates if gate is not None)]
        optimizer = config.optimizer
        self.adamw = torch.optim.AdamW(groups, lr=optimizer.learning_rate, betas=optimizer.betas, eps=optimizer.eps,
                                       fused=True)  # fmt: skip

    def step(self, step: int) -> Tensor:
        """Clip by the joint norm and update; returns the norm. Where it is not finite, nothing is changed."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not bool(torch.isfinite(norm)):  # the one host sync of a step
            self.zero_grad()
            return norm
        if self.config.optimizer.clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.config.optimizer.clip_norm, norm)
        for row_range in self.row_ranges:
            row_range.take_gradient()
        self.set_learning_rates(step)
        self.adamw.step()
        self.zero_grad()
        return norm

    def set_learning_rates(self, step: int) -> None:
        base = learning_rate(self.config, step)
        warm = warmup_factor(self.config, step) if self.config.memory.learning_rate.warmup else 1.0
        for group in self.adamw.param_groups:
            group["lr"] = base * group["multiplier"] * warm if "multiplier" in group else base

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        for row_range in self.row_ranges:
            row_range.part.grad = None

    def _table_groups(self, tables: LocalTables) -> list[dict[str, Any]]:
        memory = self.config.memory
        decay = self.config.optimizer.weight_decay if memory.weight_decay is None else memory.weight_decay
        groups: list[dict[str, Any]] = []
        for slab, rows in zip(tables.slabs, tables.rows, strict=True):
            vip, body = table_multipliers(self.config, slab.rows)
            if vip == body or tables.vip_rows == 0:
                groups.append({"params": [rows], "multiplier": body, "weight_decay": decay})
                continue
            for multiplier, part in ((vip, slice(0, tables.vip_rows)), (body, slice(tables.vip_rows, None))):
                view = nn.Parameter(rows.data[part])
                self.row_ranges.append(RowRange(rows, view, part))
                groups.append({"params": [view], "multiplier": multiplier, "weight_decay": decay})
        gates = [gate for gate in tables.gates if gate is not None]
        if gates:
            groups.append({"params": gates, "weight_decay": 0.0})
        return groups


def _backbone_groups(config: Config, model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.optimizer.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
