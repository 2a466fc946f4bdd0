"""The joint gradient norm of backbone and tables, and what follows from it: clip the step, or skip it."""

import math
import statistics
from collections import deque
from collections.abc import Container
from typing import NamedTuple

import torch
from torch import Tensor

from xgram_dist.parallel.process_group import ProcessGroup

NamedTensors = list[tuple[str, Tensor]]


class StepOutcome(NamedTuple):
    norm: Tensor
    """Joint gradient norm before clipping; fp64, the same on every rank."""
    factor: float
    """The clipping factor: gradients of the backbone were multiplied by it, those of the tables must be, too."""
    applied: bool
    """False: norm or loss was not finite, or a spike, and the step is skipped."""
    loss: float = math.nan
    """Of the step, on the host."""


def backbone_square_sum(
    gradients: NamedTensors,
    tensor_sharded: Container[str],
    *,
    shard: ProcessGroup,
    tensor: ProcessGroup,
    device: torch.device,
) -> Tensor:
    """Square sum of the whole backbone's gradients, in fp64. All-reduces one scalar over `shard`, then `tensor`.

    `gradients`: this rank's shards. `shard`: the ranks whose shards make up the whole. `tensor_sharded`: names of the
    parameters that are sharded over the tensor axis; of the others, which are replicated, the first rank's count."""
    counted = [gradient for name, gradient in gradients if tensor.first or name in tensor_sharded]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if counted:
        total += torch.stack(torch._foreach_norm(counted)).double().square().sum().to(device)
    return tensor.all_reduce_sum(shard.all_reduce_sum(total))


class SpikeGuard:
    """Recognises a step whose loss or gradient norm is far above those of the steps before it.

    All steps with finite numbers are remembered, skipped ones too, so that a lasting change of level passes after a
    while. Until half of the memory is filled, every step passes."""

    MEMORY = 128
    """Steps."""

    def __init__(self, sigmas: float | None):
        """`sigmas`: standard deviations above the mean; None: every step passes."""
        self._sigmas = sigmas
        self.recent: deque[tuple[float, float]] = deque(maxlen=self.MEMORY)
        """(loss, gradient norm) of the last steps. Part of a checkpoint."""

    def is_spike(self, loss: float, norm: float) -> bool:
        """Judge a step by those before it, then remember it."""
        if self._sigmas is None:
            return False
        earlier = list(zip(*self.recent, strict=True)) if len(self.recent) >= self.MEMORY // 2 else []
        self.recent.append((loss, norm))
        return any(
            value > statistics.fmean(values) + self._sigmas * statistics.stdev(values)
            for value, values in zip((loss, norm), earlier, strict=False)
        )


def clip_by_joint_norm(
    backbone_squares: Tensor, table_squares: Tensor, loss: Tensor, max_norm: float, guard: SpikeGuard
) -> StepOutcome:
    """`max_norm`: 0 for no clipping. The one place in a step where the host waits for the device."""
    norm = torch.sqrt(backbone_squares + table_squares.to(backbone_squares))
    norm_value, loss_value = torch.stack((norm, loss.detach().to(norm))).tolist()
    if not (math.isfinite(norm_value) and math.isfinite(loss_value)) or guard.is_spike(loss_value, norm_value):
        return StepOutcome(norm, 1.0, False, loss_value)
    return StepOutcome(norm, min(1.0, max_norm / (norm_value + 1e-6)) if max_norm else 1.0, True, loss_value)
