"""Retoken: the token's own factors on what the feed-forward gives.

    retrieve   B_m[token], of each view m
    extract    its direction: B_m[token] / |B_m[token]|
    inject     ffn <- ffn * product over m of (1 + a_m * direction_m), a_m a vector that starts at 0

Every rank of a tensor axis has the residual stream, the vectors and a_m whole, and computes the same.
Shapes: B batch, T sequence, D width, U distinct tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config import Config


class Retoken(nn.Module):
    def __init__(self, config: Config, layer: int):
        super().__init__()
        views = config.memory.retoken.views
        self.tables = [f"layers.{layer}.ffn.{view}" for view in range(views)]
        for view in range(views):  # vectors, one by one: matrices would decay
            self.register_parameter(f"scale_{view}", nn.Parameter(torch.zeros(config.model.width)))

    def forward(self, ffn_BTD: Tensor, values: list[Tensor], slots_BT: Tensor) -> Tensor:
        """`values`: of each view, the rows of the distinct tokens [U, D]."""
        out = ffn_BTD.to(values[0].dtype)
        for view, value_UD in enumerate(values):
            direction = F.embedding(slots_BT, F.normalize(value_UD, dim=-1))
            out = out * (1 + self.get_parameter(f"scale_{view}").to(out.dtype) * direction)
        return out.to(ffn_BTD.dtype)
