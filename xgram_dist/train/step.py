"""One optimizer step: fetch, compute, give back, update.

In: the tokens of all micro-batches of the step [A,B,T] in host memory, and their planned windows. Out: loss,
cross-entropy and gradient norm as tensors, and whether the step counted.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.memory.plan import Window
from xgram_dist.memory.working_set import Lookup
from xgram_dist.optim.schedule import warmup_factor
from xgram_dist.optim.update import Optimizer


class StepResult(NamedTuple):
    loss: Tensor
    cross_entropy: Tensor
    gradient_norm: Tensor
    counted: bool


def train_step(
    config: Config, lookup: Lookup, optimizer: Optimizer, tokens_ABT: Tensor, windows: list[Window], step: int
) -> StepResult:
    engine, mesh = optimizer.engine, optimizer.mesh
    phases = mesh.world.phases
    phases.step = step
    device = windows[0].slots.device
    tokens_ABT = tokens_ABT.to(device, non_blocking=True)
    warmup = torch.tensor(warmup_factor(config, step), device=device, dtype=torch.float64)
    losses: list[Tensor] = []
    entropies: list[Tensor] = []
    for window in windows:
        working = lookup.fetch(window)
        with phases("compute"):
            for tokens_BT, slots_BT in zip(tokens_ABT[window.micro_batches], working.slots, strict=True):
                loss, entropy = engine.loss(tokens_BT, slots_BT, working.values, warmup)
                losses.append(loss.detach())
                entropies.append(entropy)
                engine.backward(loss / len(tokens_ABT), last=len(losses) == len(tokens_ABT))
        lookup.give_back(working)
    with phases("update"):
        # Means over micro-batches and ranks, so that every rank reports, and decides by, the same numbers.
        means = torch.stack((torch.stack(losses).mean(), torch.stack(entropies).mean()))
        mesh.data.all_reduce_mean([means])
        outcome = optimizer.step(step, means[0])
    return StepResult(means[0], means[1], outcome.norm, outcome.counted)
