"""MoRT: a router mixes the token's rows; the direction of the mix is added to the block's output.

    retrieve   B_m[token], for each of M views
    extract    z = W n + b of the normed state after attention; the top k of sigmoid(z), renormalised, weight the rows
    inject     h <- h + 1/sqrt(2 L) * s * mix / |mix|, s a vector that starts at 0

An auxiliary loss keeps all views in use: balance * M / (N^2 k) * sum over m of (sum over positions of sigmoid(z_m)) *
(positions that chose m), for the N positions of a micro-batch; no gradient flows through the count. Where sequences
are cut over a context axis, the count is summed over it: one all-reduce of M numbers.
Every rank of a tensor axis holds the residual stream, the vectors and the router whole, and computes the same.
Shapes: B batch, T sequence, D width, U distinct tokens, M views.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config import Config
from xgram_dist.errors import UserError
from xgram_dist.model.gather import Slots, gather_rows
from xgram_dist.model.methods.base import MemoryMethod, check_layers
from xgram_dist.parallel.context_parallel import WHOLE_SEQUENCES, ContextAxis
from xgram_dist.parallel.tensor_parallel import TensorAxis
from xgram_dist.tables.layout import TableSite


class MoRT(MemoryMethod):
    name = "mort"
    reads = ("mort",)
    zero_initialised_scales = True

    def check(self) -> None:
        settings = self.memory.mort
        check_layers(self.config, "mort", settings.layers)
        if settings.top > settings.views:
            raise UserError(
                f"memory.mort.top = {settings.top} is more than memory.mort.views = {settings.views}; lower it"
            )

    def sites(self) -> dict[str, TableSite]:
        settings = self.memory.mort
        return {"block": TableSite(self.resolve_layers(settings.layers), self.model.width, settings.views)}

    def build_sites(self, layer: int, axis: TensorAxis, context: ContextAxis) -> dict[str, nn.Module]:
        return {"block": MortSite(self.config, layer, context)} if layer in self.sites()["block"].layers else {}

    def initialise(self, name: str, value: Tensor, generator: torch.Generator) -> bool:
        if self.is_table_scale(name):
            value.zero_()  # the model starts as the backbone alone
        elif name.endswith(".router_bias"):
            value.fill_(-2.0)
        else:
            return False
        return True

    def extra_flops_per_token(self) -> int:
        """The router; rows of all views weighted and summed; the scale and the sum."""
        site = self.sites()["block"]
        return (4 * site.views + 1) * site.width * len(site.layers)

    def activation_numbers(self, layer: int, tensor: int) -> float:
        site = self.sites()["block"]
        return (site.views + 3) * site.width if layer in site.layers else 0

    def summed_numbers(self, layer: int) -> int:
        site = self.sites()["block"]
        return site.views if layer in site.layers else 0

    def decoder_spec(self, warmup: float) -> dict[str, Any]:
        site, top = self.sites()["block"], self.memory.mort.top
        return {
            "method_site": {
                "method": self.name,
                "site": "block",
                "layers": site.layers,
                "views": site.views,
                "top": top,
            }
        }


class MortSite(nn.Module):
    def __init__(self, config: Config, layer: int, context: ContextAxis = WHOLE_SEQUENCES):
        super().__init__()
        self.context = context
        settings, width = config.memory.mort, config.model.width
        self.top, self.balance = settings.top, settings.balance
        self.depth_factor = 1 / math.sqrt(2 * config.model.layers)
        self.tables = [f"layers.{layer}.block.{view}" for view in range(settings.views)]
        self.router = nn.Parameter(torch.zeros(settings.views, width))
        self.router_bias = nn.Parameter(torch.zeros(settings.views))
        self.scale = nn.Parameter(torch.zeros(width))

    def forward(self, normed_BTD: Tensor, values: list[Tensor], slots_BT: Slots) -> tuple[Tensor, Tensor]:
        """(what is added to the block's output, the balancing loss). `values`: for each view [U, D]."""
        dtype = values[0].dtype
        z_BTM = F.linear(normed_BTD.to(dtype), self.router.to(dtype), self.router_bias.to(dtype))
        probability_BTM = torch.sigmoid(z_BTM)
        chosen_BTM = torch.zeros_like(probability_BTM).scatter(-1, probability_BTM.topk(self.top, -1).indices, 1.0)
        kept_BTM = probability_BTM * chosen_BTM
        weights_BTM = kept_BTM / kept_BTM.sum(-1, keepdim=True)
        mix = sum(
            (weights_BTM[..., m : m + 1] * gather_rows(value_UD, slots_BT) for m, value_UD in enumerate(values)),
            torch.zeros((), dtype=dtype, device=normed_BTD.device),
        )
        added = self.depth_factor * self.scale.to(dtype) * F.normalize(mix, dim=-1)
        views, ranks = len(values), self.context.size
        positions = slots_BT.rows.numel() * ranks
        counts_M = self.context.all_reduce(chosen_BTM.sum((0, 1)).detach())
        # The mean over the ranks that share the sequences is the product of both whole sums.
        load = ranks * (probability_BTM.sum((0, 1)) * counts_M).sum()
        return added.to(normed_BTD.dtype), self.balance * views / (positions**2 * self.top) * load
