"""The sites of all layers at once, for one new token: what short convolutions add does not depend on the network.

Extractors of one width are stacked, so that a token costs a few operations for each stack, instead of some twenty for
each view of each layer. Shorter kernels have zeros for the taps they lack. Needs torch alone: an exported folder holds
a copy.
Shapes: B batch, J views of a stack, S sites of a stack, W width, k taps, U distinct tokens.
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
    """Views whose extractors have one width."""

    sites: tuple[tuple[int, str], ...]
    """Layer and name."""
    site_of_view_J: Tensor
    """Index into `sites`."""
    reaches: dict[str, int]
    """Tokens before its own that each table's convolution reads."""
    kernels_PkJW: Tensor
    """The oldest tap first: content, and the gate where there is one."""
    bias_JW: Tensor | None
    factors_J1: Tensor
    normalised: bool

    @staticmethod
    def build(views: list[StackedView]) -> "Stack":
        extractors = [view.extractor for view in views]
        taps, gated = max(extractor.taps for extractor in extractors), extractors[0].gate is not None
        sites = tuple(dict.fromkeys((view.layer, view.site) for view in views))

        def stacked(name: str) -> Tensor:
            kernels = [getattr(extractor, name).flip(0) for extractor in extractors]
            return torch.stack([F.pad(kernel, (0, 0, taps - len(kernel), 0)) for kernel in kernels], 1)

        return Stack(
            sites=sites,
            site_of_view_J=torch.tensor(
                [sites.index((view.layer, view.site)) for view in views], device=views[0].factor.device
            ),
            reaches={view.table: view.extractor.taps - 1 for view in views},
            kernels_PkJW=torch.stack([stacked("content"), stacked("gate")] if gated else [stacked("content")]),
            bias_JW=torch.stack([extractor.gate_bias for extractor in extractors]) if gated else None,
            factors_J1=torch.stack([view.factor for view in views])[:, None],
            normalised=extractors[0].normalised,
        )

    def forward(self, values: Mapping[str, Tensor], slots_B: Tensor, cache: ConvolutionCache) -> Tensor:
        """What each site adds [B, S, W]."""
        e = torch.stack([values[table] for table in self.reaches], 1)[slots_B]
        n = e * torch.rsqrt(e.square().mean(-1, keepdim=True) + CONV_EPS) if self.normalised else e
        whole_BkJW = cache.extend_stacked(self.reaches, n)
        convolved = (whole_BkJW[:, None] * self.kernels_PkJW).sum(2)
        content = convolved[:, 0]
        if self.bias_JW is not None:
            content = content * F.silu(convolved[:, 1] + self.bias_JW)
        added = (e + content) * self.factors_J1
        if len(self.sites) == len(self.reaches):
            return added
        totals = added.new_zeros(len(added), len(self.sites), added.shape[-1])
        return totals.index_add_(1, self.site_of_view_J, added)


class BatchedSites:
    """The sites of all layers, for one new token of each sequence."""

    def __init__(self, sites: dict[tuple[int, str], Any]):
        """By layer and site; all of them have extractors."""
        by_width: dict[int, list[StackedView]] = {}
        for (layer, name), site in sites.items():
            factors = site.gain * site.injection.scale
            for view in range(site.injection.views):
                extractor = site.extractors[view % len(site.extractors)]
                stacked = StackedView(layer, name, site.injection.table(view), extractor, factors[view])
                by_width.setdefault(site.injection.width, []).append(stacked)
        self.stacks = [Stack.build(views) for views in by_width.values()]

    def deltas(
        self, values: Mapping[str, Tensor], slots_B1: Tensor, cache: ConvolutionCache, dtype: torch.dtype
    ) -> dict[int, dict[str, Tensor]]:
        """What is added, by layer and site [B, 1, W]."""
        by_layer: dict[int, dict[str, Tensor]] = {}
        for stack in self.stacks:
            added_BS1W = stack.forward(values, slots_B1[:, 0], cache).to(dtype)[:, :, None]
            for (layer, site), added in zip(stack.sites, added_BS1W.unbind(1), strict=True):
                by_layer.setdefault(layer, {})[site] = added
        return by_layer
