"""Validation: mean cross-entropy over a fixed list of batches."""

import torch
from torch import Tensor

from xgram_dist.memory.working_set import Lookup
from xgram_dist.model.transformer import Transformer


@torch.no_grad()
def validate(model: Transformer, lookup: Lookup, batches: list[Tensor], warmup: float) -> float:
    """Mean over batches of equal shape; `warmup` is the injection's factor at the present step."""
    device = model.embedding.device
    factor = torch.tensor(warmup, device=device, dtype=torch.float64)
    total = torch.zeros((), device=device, dtype=torch.float64)
    for tokens in batches:
        tokens_BT = tokens.to(device, non_blocking=True)
        working = lookup.fetch(tokens_BT, training=False)
        _, entropy = model.loss(tokens_BT, working.slots, working.values, factor)
        total += entropy
    return float(total / len(batches))
