"""AdamW of the backbone, as every engine uses it.

Matrices decay; vectors and scalars (norms, biases, injection gains) only with `optimizer.decay_vectors`. The scales
that gate a method's tables may learn at the tables' rate (`schedule.scale_multiplier`). The state exists from the
start, so that a checkpoint can be loaded before the first step.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.optim.schedule import scale_multiplier

MOMENTS: dict[str, Literal["first_moment", "second_moment"]] = {
    "exp_avg": "first_moment",
    "exp_avg_sq": "second_moment",
}
"""torch's name of each moment -> ours."""
MULTIPLIER = "multiplier"
"""Key of a parameter group: its learning rate over the backbone's."""


def build_adamw(config: Config, named: Iterable[tuple[str, Tensor]]) -> torch.optim.AdamW:
    optimizer = config.optimizer
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, tensor in named:
        decay = optimizer.weight_decay if tensor.dim() >= 2 or optimizer.decay_vectors else 0.0
        groups.setdefault((decay, scale_multiplier(config, name)), []).append(tensor)
    param_groups = [
        {"params": tensors, "weight_decay": decay, MULTIPLIER: multiplier}
        for (decay, multiplier), tensors in groups.items()
    ]
    return torch.optim.AdamW(
        param_groups, lr=optimizer.learning_rate, betas=optimizer.betas, eps=optimizer.eps, fused=True
    )


def create_state(adamw: torch.optim.AdamW, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        state = {name: torch.zeros_like(tensor, requires_grad=False) for name in MOMENTS}
        state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        adamw.state[tensor] = state


def set_step_count(adamw: torch.optim.AdamW, count: int) -> None:
    for state in adamw.state.values():
        state["step"].fill_(count)


def set_learning_rate(adamw: torch.optim.AdamW, rate: float) -> None:
    for group in adamw.param_groups:
        group["lr"] = rate * group[MULTIPLIER]
