"""Stage 2: the gated short convolution.

    out = e + content * SiLU(gate),  content = conv(n), gate = conv(n) + bias,  n = e / sqrt(mean(e^2) + 1e-5)

Both convolutions are causal and depthwise: channel c of position t reads channel c of positions t-k+1 .. t.
They are written as sums over shifted copies: one pass that a compiler fuses with the retrieval before and the
injection after it, on any device. What depends on the token alone (the norm) is computed once per distinct token,
not per position. Where the channels are spread over ranks, the norm is all they exchange: a number a distinct token.

Shapes: B batch, T sequence, W channels of this rank, U distinct tokens of the working set, k taps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config.schema import ExtractionConfig
from xgram_dist.parallel.tensor import ALONE, TensorAxis, copy_to_tensor, sharded, sum_over_tensor

NORM_EPS = 1e-5


def inverse_rms(values_UW: Tensor, channels: TensorAxis = ALONE) -> Tensor:
    """1 / sqrt(mean over all channels of e^2 + eps), for each row of the working set: [U]."""
    if channels.size == 1:
        return torch.rsqrt(values_UW.square().mean(-1) + NORM_EPS)
    total = sum_over_tensor(values_UW.square().sum(-1), channels)
    return torch.rsqrt(total / (values_UW.shape[-1] * channels.size) + NORM_EPS)


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
    """The extractor of one view (or, shared, of all views of a site).

    `channels`: the axis over which the width is spread. `parts`: the axis whose ranks each see a part of the sequence,
    so that the parameters' gradients are summed over it.
    """

    def __init__(
        self,
        width: int,
        taps: int,
        config: ExtractionConfig,
        channels: TensorAxis = ALONE,
        parts: TensorAxis = ALONE,
    ):
        super().__init__()
        self.taps, self.normalised = taps, config.norm
        self.channels, self.parts = channels, parts
        # Tap 0 is the current position, tap j the one j before it.
        self.content = sharded((taps, width), 1, channels)
        self.gate = sharded((taps, width), 1, channels) if config.gate else None
        self.gate_bias = sharded((width,), 0, channels) if config.gate else None

    def forward(self, values_UW: Tensor, slots_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
        """Rows of the working set and the row of each position -> extracted features [B, T, W]."""
        e = F.embedding(slots_BT, values_UW)
        n = e * F.embedding(slots_BT, inverse_rms(values_UW, self.channels)[:, None]) if self.normalised else e
        taps = [shifted(n, step, documents_BT) for step in range(self.taps)]
        kernel = copy_to_tensor(self.content.to(e.dtype), self.parts)
        content = sum((tap * kernel[j] for j, tap in enumerate(taps)), torch.zeros_like(e))
        if self.gate is None or self.gate_bias is None:
            return e + content
        kernel = copy_to_tensor(self.gate.to(e.dtype), self.parts)
        bias = copy_to_tensor(self.gate_bias.to(e.dtype), self.parts)
        gate = sum((tap * kernel[j] for j, tap in enumerate(taps)), bias)
        return e + content * F.silu(gate)
