"""One optimizer step: fetch, compute, give back, clip jointly, update tables and backbone.

In: the tokens of all micro-batches of the step [A,B,T] in host memory, and their planned windows. Out: loss,
cross-entropy and gradient norm as tensors, and whether the step was applied.

The engine holds the backbone and decides by the joint norm; each owner updates its table rows. Two scalars cross the
wire for the norm. Tables are updated before the backbone, so that the vectors of the next step can be sent in between:
they travel while the backbone's optimizer and its all-gather run.
"""

from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.engine.base import Engine
from xgram_dist.model.loss import IGNORE_INDEX, next_token_labels
from xgram_dist.optim.clip import StepOutcome
from xgram_dist.optim.schedule import learning_rate, table_rates, warmup_factor
from xgram_dist.parallel.device import to_device
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.tables.exchange import shards_of
from xgram_dist.tables.exchange_plan import Window
from xgram_dist.tables.working_set import Lookup, WorkingSet


class StepResult(NamedTuple):
    loss: Tensor
    cross_entropy: Tensor
    gradient_norm: Tensor
    applied: bool
    next_working: WorkingSet | None
    """Of the next step's first window, on its way; None: it was not asked for."""
    host_loss: float
    """The loss, on the host."""
    micro_losses: list[Tensor]
    """Of this rank's micro-batches."""


class JointOptimizer:
    """Updates backbone and tables together, clipped by their joint gradient norm."""

    def __init__(self, config: Config, engine: Engine, lookup: Lookup, mesh: Mesh):
        self.config, self.engine, self.mesh = config, engine, mesh
        self.shards = shards_of(lookup)

    @torch.no_grad()
    def clip(self, loss: Tensor) -> StepOutcome:
        """By the joint norm. Where it or the loss is not finite, or a spike, the updates below change nothing."""
        squares: Any = torch.zeros((), device=loss.device)
        if self.shards is not None:
            self.shards.sum_over_replicas()
            squares = self.mesh.world.all_reduce_sum(to_device(self.shards.gradient_square_sum(), loss.device))
        return self.engine.clip(loss, squares)

    @torch.no_grad()
    def update_tables(self, step: int, outcome: StepOutcome) -> None:
        if self.shards is None:
            return
        if outcome.applied:
            self.shards.apply(table_rates(self.config, step, self.shards.num_rows), outcome.factor)
        else:
            self.shards.abandon()

    def update_backbone(self, step: int, outcome: StepOutcome) -> None:
        self.engine.update(learning_rate(self.config, step), outcome)


def train_step(
    config: Config,
    lookup: Lookup,
    optimizer: JointOptimizer,
    tokens_ABT: Tensor,
    windows: list[Window],
    step: int,
    *,
    working: WorkingSet | None = None,
    upcoming: "Future[list[Window]] | None" = None,
) -> StepResult:
    """`working`: of the first window, where the former step has fetched it. `upcoming`: the windows of the next step,
    to be fetched before the backbone is updated; None: they are not."""
    mesh = optimizer.mesh
    phases = mesh.world.phases
    phases.step = step
    device = windows[0].slots.device
    tokens_ABT = to_device(tokens_ABT, device)
    # Filled on the device: `torch.tensor` would copy from host memory, and wait.
    warmup = torch.full((), warmup_factor(config, step), device=device, dtype=torch.float64)
    weights_A = _weights(optimizer.engine, tokens_ABT, mesh)
    found: list[tuple[Tensor, Tensor]] = []
    # A pipeline computes all micro-batches together.
    for some in [[window] for window in windows] if optimizer.engine.pipeline is None else [windows]:
        fetched = [lookup.fetch(window) for window in some] if working is None else [working]
        compute = _compute_window if optimizer.engine.pipeline is None else _compute_in_pipeline
        found += compute(optimizer.engine, fetched, tokens_ABT, warmup, weights_A)
        while fetched:
            lookup.give_back(fetched.pop())
        working = None  # frees its memory before the next fetch
    losses, entropies = map(list, zip(*found, strict=True))
    with phases("update"):
        # Means over micro-batches and ranks: every rank reports, and decides by, the same numbers.
        means = torch.stack((torch.stack(losses).mean(), torch.stack(entropies).mean()))
        mesh.data.all_reduce_mean([means])
        outcome = optimizer.clip(means[0])
        optimizer.update_tables(step, outcome)
        next_working = None if upcoming is None else _fetch_ahead(lookup, upcoming.result())
        optimizer.update_backbone(step, outcome)
    return StepResult(means[0], means[1], outcome.norm, outcome.applied, next_working, outcome.loss, losses)


def _weights(engine: Engine, tokens_ABT: Tensor, mesh: Mesh) -> Tensor | None:
    """Of each micro-batch in the step's mean: its share of the labels, times the number of micro-batches of all ranks.
    None: all count the same. One all-reduce of a number."""
    if engine.config.train.accumulation == "batches":
        return None
    labels = next_token_labels(tokens_ABT.flatten(0, 1), engine.model.unlabelled)
    counts_A = (labels != IGNORE_INDEX).view(len(tokens_ABT), -1).sum(1).double()
    total = mesh.data.all_reduce_sum(counts_A.sum())
    return counts_A * (len(tokens_ABT) * mesh.data.size) / total.clamp_min(1)


def _compute_window(
    engine: Engine, fetched: list[WorkingSet], tokens_ABT: Tensor, warmup: Tensor, weights_A: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """Forward and backward of the window's micro-batches: (loss, cross-entropy) of each."""
    found, (working,) = [], fetched
    numbers = range(len(tokens_ABT))[working.window.micro_batches]
    with engine.mesh.world.phases("compute"):
        for number, slots_BT in zip(numbers, working.slots, strict=True):
            loss, entropy = engine.loss(tokens_ABT[number], slots_BT, working.values, warmup)
            if weights_A is not None:
                loss, entropy = loss * weights_A[number], entropy * weights_A[number]
            found.append((loss.detach(), entropy))
            if number == numbers[-1]:
                working.begin_return()
            engine.backward(loss / len(tokens_ABT), last=number == len(tokens_ABT) - 1)
    return found


def _compute_in_pipeline(
    engine: Engine, fetched: list[WorkingSet], tokens_ABT: Tensor, warmup: Tensor, weights_A: Tensor | None
) -> list[tuple[Tensor, Tensor]]:
    """The same of all windows, for the stages of this rank."""
    assert engine.pipeline is not None
    with engine.mesh.world.phases("compute"):
        return engine.pipeline.train(fetched, tokens_ABT, warmup, weights_A)


def _fetch_ahead(lookup: Lookup, windows: list[Window]) -> WorkingSet | None:
    """Where a step is one window: the tables do not change, and a checkpoint may be saved before it is trained on. Rows
    of several windows would be caught up in place."""
    return lookup.fetch(windows[0]) if len(windows) == 1 else None
