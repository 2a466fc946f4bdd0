"""Validation: mean cross-entropy over a fixed list of batches."""

import torch
from torch import Tensor

from xgram_dist.memory.working_set import Lookup
from xgram_dist.model.transformer import Transformer
from xgram_dist.parallel.ranks import Ranks


@torch.no_grad()
def validate(
    model: Transformer, lookup: Lookup, batches: list[Tensor], warmup: float, ranks: Ranks | None = None
) -> float:
    """Mean over batches of equal shape, dealt to the ranks in turn; `warmup` is the injection's factor now."""
    ranks = ranks or Ranks()
    device = model.embedding.device
    factor = torch.tensor(warmup, device=device, dtype=torch.float64)
    total = torch.zeros((), device=device, dtype=torch.float64)
    for first in range(0, len(batches), ranks.size):
        mine = first + ranks.rank
        # A rank without a batch in the last round still answers the others' requests for rows.
        tokens_BT = batches[mine].to(device, non_blocking=True) if mine < len(batches) else batches[0][:0].to(device)
        working = lookup.fetch(tokens_BT, training=False)
        if mine < len(batches):
            total += model.loss(tokens_BT, working.slots, working.values, factor)[1]
    return float(ranks.all_reduce_sum(total) / len(batches))
