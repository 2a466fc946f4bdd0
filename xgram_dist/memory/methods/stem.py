"""STEM: a row of the token stands in place of the feed-forward's up projection.

    retrieve   U[token], as wide as the feed-forward inside
    extract    nothing
    inject     ffn = W_down(SiLU(W_gate x) * U[token])

On a tensor axis a rank has the columns of its part of the feed-forward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config import Config


class Stem(nn.Module):
    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.tables = [f"layers.{layer}.up.0"]

    def forward(self, values: list[Tensor], slots_BT: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows of the distinct tokens -> what the up projection would give [B, T, F]."""
        return F.embedding(slots_BT, values[0]).to(dtype)
