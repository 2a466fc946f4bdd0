"""One optimizer step: fetch, compute, give back, update.

In: the tokens of all micro-batches of the step [A,B,T]. Out: loss, cross-entropy and gradient norm as
tensors, and whether the step counted.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.memory.working_set import Lookup
from xgram_dist.model.transformer import Transformer
from xgram_dist.optim.schedule import warmup_factor
from xgram_dist.optim.update import Optimizer


class StepResult(NamedTuple):
    loss: Tensor
    cross_entropy: Tensor
    gradient_norm: Tensor
    counted: bool
    distinct: int


def train_step(
    config: Config, model: Transformer, lookup: Lookup, optimizer: Optimizer, tokens_ABT: Tensor, step: int
) -> StepResult:
    device = model.embedding.device
    tokens_ABT = tokens_ABT.to(device, non_blocking=True)
    warmup = torch.tensor(warmup_factor(config, step), device=device, dtype=torch.float64)
    working = lookup.fetch(tokens_ABT)
    losses, entropies = [], []
    for tokens_BT, slots_BT in zip(tokens_ABT, working.slots, strict=True):
        loss, entropy = model.loss(tokens_BT, slots_BT, working.values, warmup)
        (loss / len(tokens_ABT)).backward()
        losses.append(loss.detach())
        entropies.append(entropy)
    lookup.give_back(working)
    # Means over micro-batches and ranks, so that every rank reports, and decides by, the same numbers.
    means = torch.stack((torch.stack(losses).mean(), torch.stack(entropies).mean()))
    optimizer.ranks.all_reduce_mean([means])
    norm, counted = optimizer.step(step, means[0])
    return StepResult(means[0], means[1], norm, counted, working.keys.numel())
