"""The backbone's AdamW: matrices decay; vectors and scalars (norms, biases, injection gains) do not. Those that
let a method's tables in may learn at the tables' rate.

Its state exists from the start, so that a checkpoint can be written into it before the first step.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.engine.protocol import Kind
from xgram_dist.optim.schedule import opening_multiplier

MOMENTS: dict[str, Kind] = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment"}
MULTIPLIER = "multiplier"
"""Of a group: its learning rate over the backbone's."""


def build_adamw(config: Config, named: Iterable[tuple[str, Tensor]]) -> torch.optim.AdamW:
    optimizer = config.optimizer
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, tensor in named:
        decay = optimizer.weight_decay if tensor.dim() >= 2 else 0.0
        groups.setdefault((decay, opening_multiplier(config, name)), []).append(tensor)
    given = [{"params": held, "weight_decay": decay, MULTIPLIER: times} for (decay, times), held in groups.items()]
    return torch.optim.AdamW(given, lr=optimizer.learning_rate, betas=optimizer.betas, eps=optimizer.eps, fused=True)


def create_state(adamw: torch.optim.AdamW, tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        state = {name: torch.zeros_like(tensor, requires_grad=False) for name in MOMENTS}
        state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        adamw.state[tensor] = state


def set_step(adamw: torch.optim.AdamW, count: int) -> None:
    for state in adamw.state.values():
        state["step"].fill_(count)


def set_rate(adamw: torch.optim.AdamW, rate: float) -> None:
    for group in adamw.param_groups:
        group["lr"] = rate * group[MULTIPLIER]
