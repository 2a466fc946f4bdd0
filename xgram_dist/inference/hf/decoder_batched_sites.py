"""The sites of all layers at once, for one new token: what short convolutions add does not depend on the network.

Extractors of one width and length are stacked, so that a token costs a few operations for each stack, instead of some
twenty for each view of each layer. Needs torch alone: an exported folder holds a copy.
Shapes: B batch, J views of a stack, W width, k taps, U distinct tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .decoder_layers import CONV_EPS, ConvolutionCache


@dataclass(frozen=True)
class StackedView:
    """One view, as a member of a stack."""

    layer: int
    site: str
    table: str
    extractor: Any
    """Its `ShortConv`."""
    factor: Tensor


@dataclass(frozen=True)
class Stack:
    """Views whose extractors have one shape."""

    views: tuple[StackedView, ...]
    tables: tuple[str, ...]
    content_kJW: Tensor
    """The oldest tap first."""
    gate_kJW: Tensor | None
    bias_JW: Tensor | None
    factors_J1: Tensor
    normalised: bool

    @staticmethod
    def build(views: list[StackedView]) -> "Stack":
        extractors = [view.extractor for view in views]
        gated = extractors[0].gate is not None
        return Stack(
            views=tuple(views),
            tables=tuple(view.table for view in views),
            content_kJW=torch.stack([extractor.content.flip(0) for extractor in extractors], 1),
            gate_kJW=torch.stack([extractor.gate.flip(0) for extractor in extractors], 1) if gated else None,
            bias_JW=torch.stack([extractor.gate_bias for extractor in extractors]) if gated else None,
            factors_J1=torch.stack([view.factor for view in views])[:, None],
            normalised=extractors[0].normalised,
        )

    def forward(self, values: Mapping[str, Tensor], slots_B: Tensor, cache: ConvolutionCache) -> Tensor:
        """What each view adds, times its factor [B, J, W]."""
        e = torch.stack([values[table] for table in self.tables], 1)[slots_B]
        n = e * torch.rsqrt(e.square().mean(-1, keepdim=True) + CONV_EPS) if self.normalised else e
        whole = cache.extend_stacked(self.tables, n, len(self.content_kJW) - 1)
        content = (whole * self.content_kJW).sum(1)
        if self.gate_kJW is not None and self.bias_JW is not None:
            content = content * F.silu((whole * self.gate_kJW).sum(1) + self.bias_JW)
        return (e + content) * self.factors_J1


class BatchedSites:
    """The sites of all layers, for one new token of each sequence."""

    def __init__(self, sites: dict[tuple[int, str], Any]):
        """By layer and site; all of them have extractors."""
        by_shape: dict[tuple[int, ...], list[StackedView]] = {}
        for (layer, name), site in sites.items():
            factors = site.gain * site.injection.scale
            for view in range(site.injection.views):
                extractor = site.extractors[view % len(site.extractors)]
                stacked = StackedView(layer, name, site.injection.table(view), extractor, factors[view])
                by_shape.setdefault(tuple(extractor.content.shape), []).append(stacked)
        self.stacks = [Stack.build(views) for views in by_shape.values()]

    def deltas(
        self, values: Mapping[str, Tensor], slots_B1: Tensor, cache: ConvolutionCache, dtype: torch.dtype
    ) -> dict[int, dict[str, Tensor]]:
        """What is added, by layer and site [B, 1, W]."""
        totals: dict[int, dict[str, Tensor]] = {}
        for stack in self.stacks:
            added = stack.forward(values, slots_B1[:, 0], cache).unbind(1)
            for view, added_BW in zip(stack.views, added, strict=True):
                sums = totals.setdefault(view.layer, {})
                sums[view.site] = sums[view.site] + added_BW if view.site in sums else added_BW
        return {
            layer: {site: total[:, None].to(dtype) for site, total in sums.items()} for layer, sums in totals.items()
        }
