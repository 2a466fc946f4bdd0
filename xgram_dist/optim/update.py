"""One update of everything: joint gradient norm, clipping, then backbone and tables.

The backbone is replicated: its gradients are averaged over ranks in one all-reduce. Tables are updated by the ranks
that own their rows. One more all-reduce, of a scalar, joins their norms.

Backbone matrices decay; its vectors and scalars (norms, biases, injection gains) do not.
"""

import math

import torch
from torch import Tensor, nn

from xgram_dist.config import Config
from xgram_dist.memory.sharded_tables import owned_tables
from xgram_dist.memory.working_set import Lookup
from xgram_dist.optim.schedule import learning_rate
from xgram_dist.optim.tables import TableOptimizer
from xgram_dist.parallel.ranks import Ranks


class Optimizer:
    def __init__(self, config: Config, model: nn.Module, lookup: Lookup, ranks: Ranks | None = None):
        self.config = config
        self.ranks = ranks or Ranks()
        self.parameters = list(model.parameters())
        self.tables = owned_tables(lookup)
        self.table_optimizer = TableOptimizer(config, self.tables) if self.tables is not None else None
        optimizer = config.optimizer
        groups = [
            {"params": [p for p in self.parameters if p.dim() >= 2], "weight_decay": optimizer.weight_decay},
            {"params": [p for p in self.parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            groups, lr=optimizer.learning_rate, betas=optimizer.betas, eps=optimizer.eps, fused=True
        )

    @torch.no_grad()
    def step(self, step: int, loss: Tensor) -> tuple[Tensor, bool]:
        """Clip by the joint norm and update. Returns the norm, and whether the step counted: where the norm or the
        loss is not finite, nothing is changed."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.ranks.all_reduce_mean(gradients)
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.tables is not None:
            norm = torch.sqrt(norm.square() + self.ranks.all_reduce_sum(self.tables.gradient_square_sum()))
        size, loss_value = torch.stack((norm, loss.to(norm.dtype))).tolist()  # the one host sync of a step
        finite = math.isfinite(size) and math.isfinite(loss_value)
        if finite:
            self._clip(size, gradients)
            for group in self.adamw.param_groups:
                group["lr"] = learning_rate(self.config, step)
            self.adamw.step()
            if self.table_optimizer is not None:
                self.table_optimizer.step(step)
        self.adamw.zero_grad()
        if self.tables is not None:
            self.tables.clear_gradients()
        return norm, finite

    def _clip(self, norm: float, gradients: list[Tensor]) -> None:
        limit = self.config.optimizer.clip_norm
        if limit == 0 or norm <= limit:
            return
        factor = limit / (norm + 1e-6)
        torch._foreach_mul_(gradients, factor)
        if self.tables is not None:
            self.tables.scale_gradients(factor)
