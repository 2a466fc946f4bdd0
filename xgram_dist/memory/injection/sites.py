"""Stage 3: what is added at a site of a block.

    delta = 1/sqrt(M) * sum over views m of  lambda_m * sqrt(layer + 1) * w(step) * out_m

lambda is learnable and starts at 1; w ramps from 0 to 1 over the warm-up. Each factor has its switch.

On a tensor axis, an attention site (q, k, v, qk) has the channels of this rank's key/value heads, in its working-set
values, its extractors and its delta. A residual site (h, o) has all channels on every rank; where the sequence is
spread between layers, its delta is of this rank's part, made from that part and the few positions before it.
Shapes: B batch, T sequence, W width of the site on this rank, U distinct tokens, M views.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config import Config
from xgram_dist.memory.extraction.shortconv import ShortConv
from xgram_dist.memory.layout import RESIDUAL_SITES, extraction_settings, injection_settings, site_width
from xgram_dist.parallel.tensor import ALONE, TensorAxis, copy_to_tensor


class SiteInjection(nn.Module):
    """One site of one layer: extraction of each view, and their weighted sum."""

    scale: Tensor

    def __init__(self, config: Config, layer: int, site: str, axis: TensorAxis = ALONE):
        super().__init__()
        settings = config.memory.sites[site]  # type: ignore[index]
        extraction, injection = extraction_settings(config), injection_settings(config)
        residual = site in RESIDUAL_SITES
        channels = ALONE if residual else axis
        self.parts = axis.between_layers if residual else ALONE
        self.gain_axis = self.parts if residual else axis
        """Each of its ranks sees a part of what the gains act on."""
        self.tables = [f"layers.{layer}.{site}.{view}" for view in range(settings.views)]
        self.gain = nn.Parameter(torch.ones(settings.views))
        factor = math.sqrt(layer + 1) if injection.depth_scaling else 1.0
        factor *= 1 / math.sqrt(settings.views) if injection.view_norm else 1.0
        # A tensor, not a number: blocks of all layers then share one compiled graph. Of no dimension, so fp64 here
        # does not widen what it multiplies.
        self.register_buffer("scale", torch.tensor(factor, dtype=torch.float64), persistent=False)
        self.warmed_up = injection.warmup
        kernels = settings.kernels[:1] if extraction.shared else settings.kernels
        distinct = 1 if extraction.shared else settings.views
        taps = [kernels[view % len(kernels)] for view in range(distinct if extraction.enabled else 0)]
        self.extractors = nn.ModuleList(
            ShortConv(site_width(config, site), taps_m, extraction, channels, self.parts) for taps_m in taps
        )
        self.reach = max(taps, default=1) - 1
        """Positions before the current one that are read."""

    def forward(
        self, values: list[Tensor], slots_BT: Tensor, warmup: Tensor, documents_BT: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """The views' working-set rows -> delta [B, T, W] in `dtype`, of this rank's part of the sequence."""
        factors_M = copy_to_tensor(self.gain, self.gain_axis) * (self.scale * warmup if self.warmed_up else self.scale)
        before = 0
        if self.parts.size > 1:
            part = self.parts.part(slots_BT.shape[1])
            before = min(self.reach, part.start)
            read = slice(part.start - before, part.stop)
            slots_BT = slots_BT[:, read]
            documents_BT = None if documents_BT is None else documents_BT[:, read]
        total: Tensor | None = None
        for view, value_UW in enumerate(values):
            if len(self.extractors) == 0:
                out = F.embedding(slots_BT, value_UW)
            else:
                out = self.extractors[view % len(self.extractors)](value_UW, slots_BT, documents_BT)
            weighted = out * factors_M[view]
            total = weighted if total is None else total + weighted
        assert total is not None
        return (total[:, before:] if before else total).to(dtype)
