"""X-gram's modules for any network: vectors of a working set in, features to add to a hidden state out.

Shapes: B batch, T sequence, W channels, U vectors of the working set.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from xgram_dist.config.schema import ExtractionConfig
from xgram_dist.model import injection
from xgram_dist.model.gather import Slots, gather_rows, sort_slots


def gather(values_UW: Tensor, slots: Tensor) -> Tensor:
    """The vector of each position: [*slots.shape, W]. Its gradient is a segment sum that repeats bit for bit."""
    return gather_rows(values_UW, _sorted(slots, values_UW))


def _sorted(slots: Tensor | Slots, values_UW: Tensor) -> Slots:
    return slots if isinstance(slots, Slots) else sort_slots(slots, len(values_UW))


class ShortConv(nn.Module):
    """e + content * SiLU(gate): two causal depthwise convolutions of the normalised vectors. It starts as e + a copy of
    the normalised e, gated."""

    def __init__(self, width: int, taps: int = 3, *, init_std: float = 0.02):
        super().__init__()
        self.conv = injection.ShortConv(width, taps, ExtractionConfig())
        with torch.no_grad():
            self.conv.content[0] = 1.0
            assert self.conv.gate is not None
            assert self.conv.gate_bias is not None
            self.conv.gate.normal_(0.0, init_std)
            self.conv.gate_bias.fill_(1.0)

    def forward(self, values_UW: Tensor, slots_BT: Tensor | Slots, documents_BT: Tensor | None = None) -> Tensor:
        """`documents_BT`: the document of each position, across which nothing is read."""
        features: Tensor = self.conv(values_UW, _sorted(slots_BT, values_UW), documents_BT)
        return features


class XgramInjection(nn.Module):
    """The sum over the views of a site: scale / sqrt(M) * sum_m lambda_m * ShortConv_m(e_m), to be added to attention
    values or a residual stream of `width` channels. The paper's scale is sqrt(layer + 1)."""

    def __init__(
        self,
        tables: Sequence[str],
        width: int,
        kernels: Sequence[int] = (3, 5),
        *,
        scale: float = 1.0,
        init_std: float = 0.02,
    ):
        """`tables`: names in the working set, one for each view; view m has kernels[m mod number of kernels] taps."""
        super().__init__()
        self.tables, self.scale = list(tables), scale / len(tables) ** 0.5
        self.gain = nn.Parameter(torch.ones(len(self.tables)))
        taps = [kernels[view % len(kernels)] for view in range(len(self.tables))]
        self.extractors = nn.ModuleList(ShortConv(width, one, init_std=init_std) for one in taps)

    def forward(
        self, values: dict[str, Tensor], slots_BT: Tensor | Slots, documents_BT: Tensor | None = None
    ) -> Tensor:
        """`values`: of the working set, by table -> [B, T, W]."""
        slots = _sorted(slots_BT, values[self.tables[0]])  # once for all views
        outputs = [
            gain * extractor(values[name], slots, documents_BT)
            for gain, name, extractor in zip(self.gain, self.tables, self.extractors, strict=True)
        ]
        return self.scale * torch.stack(outputs).sum(0)
