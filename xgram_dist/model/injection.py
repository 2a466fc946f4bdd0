"""X-gram's stages 2 and 3: the gated short convolution, and the sum over views that is added at a site of a block.

Extraction (`ShortConv`), for each view:

    out = e + content * SiLU(gate),  content = conv(n), gate = conv(n) + bias,  n = e / sqrt(mean(e^2) + 1e-5)

Both convolutions are causal and depthwise: channel c of position t reads channel c of positions t-k+1 .. t. They are
written as sums over shifted copies, which a compiler fuses with the retrieval before and the injection after them, on
any device. The norm depends on the token alone, so it is computed once for each distinct token.

Injection (`SiteInjection`), for the M views of a site:

    delta = 1/sqrt(M) * sum over views m of  lambda_m * sqrt(layer + 1) * w(step) * out_m

lambda is learnable and starts at 1; w ramps from 0 to 1 over the warm-up. Each factor can be switched off.

On a tensor axis, an attention site (q, k, v, qk) has the channels of this rank's key/value heads in its working-set
values, its extractors and its delta; its norm is one all-reduce of a number for each distinct token. A residual site
(h, o) has all channels on every rank. With sequence parallelism its delta covers this rank's part of the sequence,
computed from that part and the few positions before it, without communication. So it is where sequences are cut over a
context axis: slots and documents are of the positions that are read, the delta of those that are computed. Convolved
side by side, the two chunks differ from whole sequences only in positions that are dropped.

Shapes: B batch, T sequence, W channels of the site on this rank, U distinct tokens of the working set, M views, k taps.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config import Config
from xgram_dist.config.schema import ExtractionConfig, InjectionConfig
from xgram_dist.model.gather import Slots, gather_rows
from xgram_dist.parallel.context_parallel import WHOLE_SEQUENCES, ContextAxis, select_slices
from xgram_dist.parallel.tensor_parallel import (
    SINGLE_RANK,
    TensorAxis,
    all_reduce_in_tensor_parallel_region,
    copy_to_tensor_parallel_region,
    sharded_parameter,
)
from xgram_dist.tables.layout import RESIDUAL_SITES, site_width

NORM_EPS = 1e-5


def inverse_rms(values_UW: Tensor, channels: TensorAxis = SINGLE_RANK) -> Tensor:
    """1 / sqrt(mean over all channels of e^2 + eps), for each row of the working set: [U]."""
    if channels.size == 1:
        return torch.rsqrt(values_UW.square().mean(-1) + NORM_EPS)
    total = all_reduce_in_tensor_parallel_region(values_UW.square().sum(-1), channels)
    return torch.rsqrt(total / (values_UW.shape[-1] * channels.size) + NORM_EPS)


def shifted(x_BTW: Tensor, steps: int, documents_BT: Tensor | None) -> Tensor:
    """x[t - steps], zero where that lies before the sequence or in another document."""
    if steps == 0:
        return x_BTW
    before_BTW = F.pad(x_BTW, (0, 0, steps, 0))[:, : x_BTW.shape[1]]
    if documents_BT is None:
        return before_BTW
    same = F.pad(documents_BT, (steps, 0), value=-1)[:, : x_BTW.shape[1]] == documents_BT
    return before_BTW * same[..., None]


class ShortConv(nn.Module):
    """The extractor of one view (or, shared, of all views of a site).

    `channels`: the axis over which the width is sharded. `sequence`: the axis over which the sequence is sharded, and
    over which the parameters' gradients are summed.
    """

    def __init__(
        self,
        width: int,
        taps: int,
        config: ExtractionConfig,
        channels: TensorAxis = SINGLE_RANK,
        sequence: TensorAxis = SINGLE_RANK,
    ):
        super().__init__()
        self.taps, self.normalised = taps, config.norm
        self.channels, self.sequence = channels, sequence
        # Tap 0 is the current position, tap j the one j before it.
        self.content = sharded_parameter((taps, width), 1, channels)
        self.gate = sharded_parameter((taps, width), 1, channels) if config.gate else None
        self.gate_bias = sharded_parameter((width,), 0, channels) if config.gate else None

    def forward(
        self,
        values_UW: Tensor,
        slots_BT: Slots,
        documents_BT: Tensor | None,
        kept: tuple[slice, ...] = (slice(None),),
    ) -> Tensor:
        """Rows of the working set and the row of each position -> extracted features [B, T, W]. `kept`: of these
        positions."""
        e = gather_rows(values_UW, slots_BT)
        n = e * gather_rows(inverse_rms(values_UW, self.channels)[:, None], slots_BT) if self.normalised else e
        taps = [shifted(n, step, documents_BT) for step in range(self.taps)]
        kernel = copy_to_tensor_parallel_region(self.content.to(e.dtype), self.sequence)
        taps, e = [select_slices(tap, kept) for tap in taps], select_slices(e, kept)
        content = sum((tap * kernel[j] for j, tap in enumerate(taps)), torch.zeros_like(e))
        if self.gate is None or self.gate_bias is None:
            return e + content
        kernel = copy_to_tensor_parallel_region(self.gate.to(e.dtype), self.sequence)
        bias = copy_to_tensor_parallel_region(self.gate_bias.to(e.dtype), self.sequence)
        gate = sum((tap * kernel[j] for j, tap in enumerate(taps)), bias)
        return e + content * F.silu(gate)


class SiteInjection(nn.Module):
    """One site of one layer: extraction of each view, and their weighted sum."""

    scale: Tensor

    def __init__(
        self,
        config: Config,
        extraction: ExtractionConfig,
        injection: InjectionConfig,
        layer: int,
        site: str,
        axis: TensorAxis = SINGLE_RANK,
        context: ContextAxis = WHOLE_SEQUENCES,
    ):
        super().__init__()
        self.context = context
        settings = config.memory.sites[site]  # type: ignore[index]
        residual = site in RESIDUAL_SITES
        channels = SINGLE_RANK if residual else axis
        self.sequence = axis.sequence_axis if residual else SINGLE_RANK
        self.gain_axis = self.sequence if residual else axis
        """The axis over which the gradients of the gains are summed: each rank sees a part of what they scale."""
        self.tables = [f"layers.{layer}.{site}.{view}" for view in range(settings.views)]
        self.gain = nn.Parameter(torch.ones(settings.views))
        factor = math.sqrt(layer + 1) if injection.depth_scaling else 1.0
        factor *= 1 / math.sqrt(settings.views) if injection.view_norm else 1.0
        # A tensor rather than a number, so that the blocks of all layers share one compiled graph. It has no dimension,
        # so fp64 does not widen what it multiplies.
        self.register_buffer("scale", torch.tensor(factor, dtype=torch.float64), persistent=False)
        self.warmed_up = injection.warmup
        kernels = settings.kernels[:1] if extraction.shared else settings.kernels
        distinct = 1 if extraction.shared else settings.views
        taps = [kernels[view % len(kernels)] for view in range(distinct if extraction.enabled else 0)]
        self.extractors = nn.ModuleList(
            ShortConv(site_width(config, site), taps_m, extraction, channels, self.sequence) for taps_m in taps
        )
        self.reach = max(taps, default=1) - 1
        """Positions before the current one that are read."""

    def forward(
        self, values: list[Tensor], slots_BT: Slots, warmup: Tensor, documents_BT: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """The views' working-set rows -> delta [B, T, W] in `dtype`, of this rank's part of the sequence."""
        factors_M = copy_to_tensor_parallel_region(self.gain, self.gain_axis) * (
            self.scale * warmup if self.warmed_up else self.scale
        )
        num_read = slots_BT.rows.shape[1]
        local = self.sequence.local_slice(self.context.num_computed(num_read))
        kept = self.context.kept(local, num_read)
        if self.sequence.size > 1:
            read = slice(max(0, kept[0].start - self.reach), kept[-1].stop)
            slots_BT = slots_BT.select(read)
            documents_BT = None if documents_BT is None else documents_BT[:, read]
            kept = tuple(slice(part.start - read.start, part.stop - read.start) for part in kept)
        total: Tensor | None = None
        for view, value_UW in enumerate(values):
            if len(self.extractors) == 0:
                out = select_slices(gather_rows(value_UW, slots_BT), kept)
            else:
                out = self.extractors[view % len(self.extractors)](value_UW, slots_BT, documents_BT, kept)
            weighted = out * factors_M[view]
            total = weighted if total is None else total + weighted
        assert total is not None
        return total.to(dtype)
