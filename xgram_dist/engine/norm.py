"""The joint gradient norm, and what it decides: to skip the step, to clip, or to go on as is."""

import math
from collections.abc import Container

import torch
from torch import Tensor

from xgram_dist.engine.protocol import StepOutcome
from xgram_dist.parallel.ranks import Ranks

NamedTensors = list[tuple[str, Tensor]]


def square_sum(
    gradients: NamedTensors, cut: Container[str], *, shard: Ranks, tensor: Ranks, device: torch.device
) -> Tensor:
    """Squares of the whole backbone's gradients, in fp64.

    `shard`: the ranks whose parts of the gradients make up the whole. `cut`: the parameters that are cut over the
    tensor axis; of the others, which are alike on all of its ranks, the first rank's count."""
    counted = [gradient for name, gradient in gradients if tensor.first or name in cut]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if counted:
        total += torch.stack(torch._foreach_norm(counted)).double().square().sum().to(device)
    return tensor.all_reduce_sum(shard.all_reduce_sum(total))


def decide(squares: Tensor, tables_square_sum: Tensor, loss: Tensor, limit: float) -> StepOutcome:
    """`limit`: of the norm; 0 for none. The one place in a step where the host waits for the device."""
    norm = torch.sqrt(squares + tables_square_sum.to(squares))
    size, value = torch.stack((norm, loss.detach().to(norm))).tolist()
    if not (math.isfinite(size) and math.isfinite(value)):
        return StepOutcome(norm, 1.0, False)
    return StepOutcome(norm, min(1.0, limit / (size + 1e-6)) if limit else 1.0, True)
