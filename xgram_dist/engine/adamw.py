"""The backbone's AdamW: matrices decay; vectors and scalars (norms, biases, injection gains) do not.

Its state exists from the start, so that a checkpoint can be written into it before the first step.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.engine.protocol import Kind

MOMENTS: dict[str, Kind] = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment"}


def build_adamw(config: Config, tensors: Iterable[Tensor]) -> torch.optim.AdamW:
    optimizer, given = config.optimizer, list(tensors)
    groups = [
        {"params": [t for t in given if t.dim() >= 2], "weight_decay": optimizer.weight_decay},
        {"params": [t for t in given if t.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optimizer.learning_rate, betas=optimizer.betas, eps=optimizer.eps, fused=True)


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
        group["lr"] = rate
