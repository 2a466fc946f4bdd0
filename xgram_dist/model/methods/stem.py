"""STEM: a row of the token replaces the feed-forward's up projection.

    retrieve   U[token], as wide as the feed-forward's inner width
    extract    nothing
    inject     ffn = W_down(SiLU(W_gate x) * U[token])

On a tensor axis a rank holds the columns of its part of the feed-forward.
"""

from typing import Any

import torch
from torch import Tensor, nn

from xgram_dist.model.gather import Slots, gather_rows
from xgram_dist.model.methods.base import MemoryMethod, check_layers
from xgram_dist.parallel.context_parallel import ContextAxis
from xgram_dist.parallel.tensor_parallel import TensorAxis
from xgram_dist.tables.layout import TableSite


class STEM(MemoryMethod):
    name = "stem"
    reads = ("stem",)

    def check(self) -> None:
        check_layers(self.config, "stem", self.memory.stem.layers)

    def sites(self) -> dict[str, TableSite]:
        return {"up": TableSite(self.resolve_layers(self.memory.stem.layers), self.model.ffn_width)}

    def build_sites(self, layer: int, axis: TensorAxis, context: ContextAxis) -> dict[str, nn.Module]:
        return {"up": StemSite(layer)} if layer in self.sites()["up"].layers else {}

    def extra_flops_per_token(self) -> int:
        """A row instead of a matrix product."""
        return -2 * self.model.width * self.retrieved_width()

    def activation_numbers(self, layer: int, tensor: int) -> float:
        site = self.sites()["up"]
        return site.width / tensor if layer in site.layers else 0

    def decoder_spec(self, warmup: float) -> dict[str, Any]:
        return {"method_site": {"method": self.name, "site": "up", "layers": self.sites()["up"].layers}}


class StemSite(nn.Module):
    def __init__(self, layer: int):
        super().__init__()
        self.tables = [f"layers.{layer}.up.0"]

    def forward(self, values: list[Tensor], slots_BT: Slots, dtype: torch.dtype) -> Tensor:
        """The rows of the distinct tokens -> what the up projection would give [B, T, F]."""
        return gather_rows(values[0], slots_BT).to(dtype)
