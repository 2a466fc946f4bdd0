"""Retoken: factors of the token on the feed-forward's output.

    retrieve   B_m[token], for each view m
    extract    its direction: B_m[token] / |B_m[token]|
    inject     ffn <- ffn * product over m of (1 + a_m * direction_m), a_m a vector that starts at 0

Every rank of a tensor axis holds the residual stream, the vectors and a_m whole, and computes the same.
Shapes: B batch, T sequence, D width, U distinct tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config import Config
from xgram_dist.model.gather import Slots, gather_rows
from xgram_dist.model.methods.base import MemoryMethod, check_layers
from xgram_dist.parallel.context_parallel import ContextAxis
from xgram_dist.parallel.tensor_parallel import TensorAxis
from xgram_dist.tables.layout import TableSite


class Retoken(MemoryMethod):
    name = "retoken"
    reads = ("retoken",)
    zero_initialised_scales = True

    def check(self) -> None:
        check_layers(self.config, "retoken", self.memory.retoken.layers)

    def sites(self) -> dict[str, TableSite]:
        settings = self.memory.retoken
        return {"ffn": TableSite(self.resolve_layers(settings.layers), self.model.width, settings.views)}

    def build_sites(self, layer: int, axis: TensorAxis, context: ContextAxis) -> dict[str, nn.Module]:
        return {"ffn": RetokenSite(self.config, layer)} if layer in self.sites()["ffn"].layers else {}

    def initialise(self, name: str, value: Tensor, generator: torch.Generator) -> bool:
        if not self.is_table_scale(name):
            return False
        value.zero_()  # the model starts as the backbone alone
        return True

    def extra_flops_per_token(self) -> int:
        """ffn * (1 + a * direction)."""
        return 3 * self.retrieved_width()

    def activation_numbers(self, layer: int, tensor: int) -> float:
        site = self.sites()["ffn"]
        return (3 * site.views + 1) * site.width if layer in site.layers else 0

    def decoder_spec(self, warmup: float) -> dict[str, Any]:
        site = self.sites()["ffn"]
        return {"method_site": {"method": self.name, "site": "ffn", "layers": site.layers, "views": site.views}}


class RetokenSite(nn.Module):
    def __init__(self, config: Config, layer: int):
        super().__init__()
        views = config.memory.retoken.views
        self.tables = [f"layers.{layer}.ffn.{view}" for view in range(views)]
        for view in range(views):  # one vector each: a matrix would decay
            self.register_parameter(f"scale_{view}", nn.Parameter(torch.zeros(config.model.width)))

    def forward(self, ffn_BTD: Tensor, values: list[Tensor], slots_BT: Slots) -> Tensor:
        """`values`: for each view, the rows of the distinct tokens [U, D]."""
        out = ffn_BTD.to(values[0].dtype)
        for view, value_UD in enumerate(values):
            direction = gather_rows(F.normalize(value_UD, dim=-1), slots_BT)
            out = out * (1 + self.get_parameter(f"scale_{view}").to(out.dtype) * direction)
        return out.to(ffn_BTD.dtype)
