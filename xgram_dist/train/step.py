"""One optimizer step: fetch, compute, give back, clip jointly, update backbone and tables.

In: the tokens of all micro-batches of the step [A,B,T] in host memory, and their planned windows. Out: loss,
cross-entropy and gradient norm as tensors, and whether the step was applied.

The engine holds the backbone and decides by the joint norm; each owner updates its table rows. Two scalars cross the
wire for the norm.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.engine.base import Engine
from xgram_dist.optim.clip import StepOutcome
from xgram_dist.optim.schedule import learning_rate, table_rates, warmup_factor
from xgram_dist.parallel.device import to_device
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.tables.exchange import shards_of
from xgram_dist.tables.exchange_plan import Window
from xgram_dist.tables.working_set import Lookup


class StepResult(NamedTuple):
    loss: Tensor
    cross_entropy: Tensor
    gradient_norm: Tensor
    applied: bool


class JointOptimizer:
    """Updates backbone and tables together, clipped by their joint gradient norm."""

    def __init__(self, config: Config, engine: Engine, lookup: Lookup, mesh: Mesh):
        self.config, self.engine, self.mesh = config, engine, mesh
        self.shards = shards_of(lookup)

    @torch.no_grad()
    def step(self, step: int, loss: Tensor) -> StepOutcome:
        """Clip by the joint norm and update. Where the norm or the loss is not finite, nothing changes."""
        squares: Any = torch.zeros((), device=loss.device)
        if self.shards is not None:
            squares = self.mesh.world.all_reduce_sum(to_device(self.shards.gradient_square_sum(), loss.device))
        outcome = self.engine.step(learning_rate(self.config, step), loss, squares)
        if self.shards is not None:
            if outcome.applied:
                self.shards.apply(table_rates(self.config, step, self.shards.num_rows), outcome.factor)
            else:
                self.shards.abandon()
        return outcome


def train_step(
    config: Config, lookup: Lookup, optimizer: JointOptimizer, tokens_ABT: Tensor, windows: list[Window], step: int
) -> StepResult:
    engine, mesh = optimizer.engine, optimizer.mesh
    phases = mesh.world.phases
    phases.step = step
    device = windows[0].slots.device
    tokens_ABT = to_device(tokens_ABT, device)
    # Filled on the device: `torch.tensor` would copy from host memory, and wait.
    warmup = torch.full((), warmup_factor(config, step), device=device, dtype=torch.float64)
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
        # Means over micro-batches and ranks: every rank reports, and decides by, the same numbers.
        means = torch.stack((torch.stack(losses).mean(), torch.stack(entropies).mean()))
        mesh.data.all_reduce_mean([means])
        outcome = optimizer.step(step, means[0])
    return StepResult(means[0], means[1], outcome.norm, outcome.applied)
