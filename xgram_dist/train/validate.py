"""Validation: mean cross-entropy over a fixed list of batches."""

import torch
from torch import Tensor

from xgram_dist.engine.protocol import Engine
from xgram_dist.memory.working_set import Lookup
from xgram_dist.parallel.mesh import Mesh


@torch.no_grad()
def validate(
    engine: Engine, lookup: Lookup, batches: list[Tensor], warmup: float, mesh: Mesh, device: torch.device
) -> float:
    """Mean over batches of equal shape, dealt to the ranks in turn; `warmup` is the injection's factor now."""
    data = mesh.data
    factor = torch.tensor(warmup, device=device, dtype=torch.float64)
    total = torch.zeros((), device=device, dtype=torch.float64)
    for first in range(0, len(batches), data.size):
        mine = first + data.rank
        # A rank without a batch in the last round goes along with another: collectives need all.
        tokens_BT = batches[mine] if mine < len(batches) else batches[0]
        working = lookup.fetch(lookup.plan(tokens_BT, whole=True).result()[0], training=False)
        entropy = engine.loss(tokens_BT.to(device, non_blocking=True), working.slots, working.values, factor)[1]
        if mine < len(batches):
            total += entropy
    return float(data.all_reduce_sum(total) / len(batches))
