"""Stage 2: the gated short convolution.

    out = e + content * SiLU(gate),  content = conv(n), gate = conv(n) + bias,  n = e / sqrt(mean(e^2) + 1e-5)

Both convolutions are causal and depthwise: channel c of position t reads channel c of positions t-k+1 .. t.
They are written as sums over shifted copies: one pass that a compiler fuses with the retrieval before and the
injection after it, on any device. What depends on the token alone (the norm) is computed once per distinct token,
not per position.

Shapes: B batch, T sequence, W channels, U distinct tokens of the working set, k taps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config.schema import ExtractionConfig

NORM_EPS = 1e-5


def inverse_rms(values_UW: Tensor) -> Tensor:
    """1 / sqrt(mean over channels of e^2 + eps), for each row of the working set: [U]."""
    return torch.rsqrt(values_UW.square().mean(-1) + NORM_EPS)


def shifted(x_BTW: Tensor, steps: int, documents_BT: Tensor | None) -> Tensor:
    """x[t - steps], zero where that lies before the sequence or in another document."""
    if steps == 0:
        return x_BTW
    moved = F.pad(x_BTW, (0, 0, steps, 0))[:, : x_BTW.shape[1]]
    if documents_BT is None:
        return moved
    same = F.pad(documents_BT, (steps, 0), value=-1)[:, : x_BTW.shape[1]] == documents_BT
    return moved * same[..., None]


class ShortConv(nn.Module):
    """The extractor of one view (or, shared, of all views of a site)."""

    def __init__(self, width: int, taps: int, config: ExtractionConfig):
        super().__init__()
        self.taps = taps
        self.normalised = config.norm
        # Tap 0 is the current position, tap j the one j before it.
        self.content = nn.Parameter(torch.zeros(taps, width))
        self.gate = nn.Parameter(torch.zeros(taps, width)) if config.gate else None
        self.gate_bias = nn.Parameter(torch.zeros(width)) if config.gate else None

    def forward(self, values_UW: Tensor, slots_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
        """Rows of the working set and the row of each position -> extracted features [B, T, W]."""
        e = F.embedding(slots_BT, values_UW)
        n = e * F.embedding(slots_BT, inverse_rms(values_UW)[:, None]) if self.normalised else e
        taps = [shifted(n, step, documents_BT) for step in range(self.taps)]
        content = sum((tap * self.content[j].to(e.dtype) for j, tap in enumerate(taps)), torch.zeros_like(e))
        if self.gate is None or self.gate_bias is None:
            return e + content
        gate = sum((tap * self.gate[j].to(e.dtype) for j, tap in enumerate(taps)), self.gate_bias.to(e.dtype))
        return e + content * F.silu(gate)
