"""One new token, all layers at once: what the short convolutions add does not depend on the network's state.

Extractors of one width and length are stacked, so that a token costs a few operations instead of some twenty for each
view of each layer. Needs torch alone: an exported folder holds a copy.
Shapes: B batch, J views of a stack, W width, k taps, U distinct tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .parts import CONV_EPS, Recent


@dataclass(frozen=True)
class Stack:
    """Views whose extractors have one shape."""

    names: tuple[str, ...]
    places: tuple[tuple[int, str], ...]
    """Layer and site of each."""
    content_kJW: Tensor
    """The oldest tap first."""
    gate_kJW: Tensor | None
    bias_JW: Tensor | None
    factors_J1: Tensor
    normalised: bool

    def forward(self, values: Mapping[str, Tensor], slots_B: Tensor, cache: Recent) -> Tensor:
        """What each view adds, times its factor [B, J, W]."""
        e = torch.stack([values[name] for name in self.names], 1)[slots_B]
        n = e * torch.rsqrt(e.square().mean(-1, keepdim=True) + CONV_EPS) if self.normalised else e
        whole = cache.window_together(self.names, n, len(self.content_kJW) - 1)
        content = (whole * self.content_kJW).sum(1)
        if self.gate_kJW is not None and self.bias_JW is not None:
            content = content * F.silu((whole * self.gate_kJW).sum(1) + self.bias_JW)
        return (e + content) * self.factors_J1


class Together:
    """The sites of all layers, for one new token a sequence."""

    def __init__(self, sites: dict[tuple[int, str], Any]):
        """By layer and site; all of them have extractors."""
        found: dict[tuple[int, ...], list[tuple[tuple[int, str], str, Any, Tensor]]] = {}
        for place, site in sites.items():
            factors = site.gain * site.injection.scale
            for view in range(site.injection.views):
                extractor = site.extractors[view % len(site.extractors)]
                entry = place, site.injection.table(view), extractor, factors[view]
                found.setdefault(tuple(extractor.content.shape), []).append(entry)
        self.stacks = [_stack(entries) for entries in found.values()]

    def deltas(
        self, values: Mapping[str, Tensor], slots_B1: Tensor, cache: Recent, dtype: torch.dtype
    ) -> dict[int, dict[str, Tensor]]:
        """By layer and site [B, 1, W]."""
        made: dict[int, dict[str, Tensor]] = {}
        for stack in self.stacks:
            parts = stack.forward(values, slots_B1[:, 0], cache).unbind(1)
            for (layer, site), part in zip(stack.places, parts, strict=True):
                of_layer = made.setdefault(layer, {})
                of_layer[site] = of_layer[site] + part if site in of_layer else part
        return {layer: {s: one[:, None].to(dtype) for s, one in of.items()} for layer, of in made.items()}


def _stack(entries: list[tuple[tuple[int, str], str, Any, Tensor]]) -> Stack:
    extractors = [extractor for _, _, extractor, _ in entries]
    gated = extractors[0].gate is not None
    return Stack(
        names=tuple(name for _, name, _, _ in entries),
        places=tuple(place for place, _, _, _ in entries),
        content_kJW=torch.stack([one.content.flip(0) for one in extractors], 1),
        gate_kJW=torch.stack([one.gate.flip(0) for one in extractors], 1) if gated else None,
        bias_JW=torch.stack([one.gate_bias for one in extractors]) if gated else None,
        factors_J1=torch.stack([factor for _, _, _, factor in entries])[:, None],
        normalised=extractors[0].normalised,
    )
