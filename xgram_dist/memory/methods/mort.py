"""MoRT: a router mixes the token's rows; the direction of the mix is added to the block's output.

    retrieve   B_m[token], of each of M views
    extract    z = W n + b of the normed state after attention; the top k of sigmoid(z), renormalised, weigh the rows
    inject     h <- h + 1/sqrt(2 L) * s * mix / |mix|, s a vector that starts at 0

A loss keeps the views in use: balance * M / (N^2 k) * sum over m of (sum over positions of sigmoid(z_m)) * (positions
that chose m), for N positions of a micro-batch; no gradient goes through the count.
Every rank of a tensor axis has the residual stream, the vectors and the router whole, and computes the same.
Shapes: B batch, T sequence, D width, U distinct tokens, M views.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config import Config


class Mort(nn.Module):
    def __init__(self, config: Config, layer: int):
        super().__init__()
        settings, width = config.memory.mort, config.model.width
        self.top, self.balance = settings.top, settings.balance
        self.depth = 1 / math.sqrt(2 * config.model.layers)
        self.tables = [f"layers.{layer}.block.{view}" for view in range(settings.views)]
        self.router = nn.Parameter(torch.zeros(settings.views, width))
        self.router_bias = nn.Parameter(torch.zeros(settings.views))
        self.scale = nn.Parameter(torch.zeros(width))

    def forward(self, normed_BTD: Tensor, values: list[Tensor], slots_BT: Tensor) -> tuple[Tensor, Tensor]:
        """(what is added to the block's output, the balancing loss). `values`: of each view [U, D]."""
        dtype = values[0].dtype
        z_BTM = F.linear(normed_BTD.to(dtype), self.router.to(dtype), self.router_bias.to(dtype))
        chance_BTM = torch.sigmoid(z_BTM)
        chosen_BTM = torch.zeros_like(chance_BTM).scatter(-1, chance_BTM.topk(self.top, -1).indices, 1.0)
        kept_BTM = chance_BTM * chosen_BTM
        weights_BTM = kept_BTM / kept_BTM.sum(-1, keepdim=True)
        mix = sum(
            (weights_BTM[..., m : m + 1] * F.embedding(slots_BT, value_UD) for m, value_UD in enumerate(values)),
            torch.zeros((), dtype=dtype, device=normed_BTD.device),
        )
        added = self.depth * self.scale.to(dtype) * F.normalize(mix, dim=-1)
        views, positions = len(values), slots_BT.numel()
        load = (chance_BTM.sum((0, 1)) * chosen_BTM.sum((0, 1)).detach()).sum()
        return added.to(normed_BTD.dtype), self.balance * views / (positions**2 * self.top) * load
