"""Stage 3: what is added at a site of a block.

    delta = 1/sqrt(M) * sum over views m of  lambda_m * sqrt(layer + 1) * w(step) * out_m

lambda is learnable and starts at 1; w ramps from 0 to 1 over the warm-up. Each factor has its switch.
Shapes: B batch, T sequence, W width of the site, U distinct tokens, M views.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config import Config
from xgram_dist.memory.extraction.shortconv import ShortConv
from xgram_dist.memory.layout import site_layers, site_width


class SiteInjection(nn.Module):
    """One site of one layer: extraction of each view, and their weighted sum."""

    scale: Tensor

    def __init__(self, config: Config, layer: int, site: str):
        super().__init__()
        memory, settings = config.memory, config.memory.sites[site]  # type: ignore[index]
        width = site_width(config, site)
        self.tables = [f"layers.{layer}.{site}.{view}" for view in range(settings.views)]
        self.gain = nn.Parameter(torch.ones(settings.views))
        factor = math.sqrt(layer + 1) if memory.injection.depth_scaling else 1.0
        factor *= 1 / math.sqrt(settings.views) if memory.injection.view_norm else 1.0
        # A tensor, not a number: blocks of all layers then share one compiled graph. Of no dimension, so fp64 here
        # does not widen what it multiplies.
        self.register_buffer("scale", torch.tensor(factor, dtype=torch.float64), persistent=False)
        self.warmed_up = memory.injection.warmup
        kernels = settings.kernels[:1] if memory.extraction.shared else settings.kernels
        distinct = 1 if memory.extraction.shared else settings.views
        self.extractors = nn.ModuleList(
            ShortConv(width, kernels[view % len(kernels)], memory.extraction)
            for view in range(distinct if memory.extraction.enabled else 0)
        )

    def forward(
        self, values: list[Tensor], slots_BT: Tensor, warmup: Tensor, documents_BT: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """The views' working-set rows -> delta [B, T, W] in `dtype`."""
        factors_M = self.gain * (self.scale * warmup if self.warmed_up else self.scale)
        total: Tensor | None = None
        for view, value_UW in enumerate(values):
            if len(self.extractors) == 0:
                out = F.embedding(slots_BT, value_UW)
            else:
                out = self.extractors[view % len(self.extractors)](value_UW, slots_BT, documents_BT)
            weighted = out * factors_M[view]
            total = weighted if total is None else total + weighted
        assert total is not None
        return total.to(dtype)


def build_injections(config: Config, layer: int) -> nn.ModuleDict:
    """The sites of one block."""
    if config.memory.method == "vanilla":
        return nn.ModuleDict()
    return nn.ModuleDict(
        {site: SiteInjection(config, layer, site) for site in config.memory.sites if layer in site_layers(config, site)}
    )
