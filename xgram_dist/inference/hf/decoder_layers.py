"""Layers that the decoder and the methods' sites share. Needs torch alone: an exported folder holds a copy.

Shapes: B batch, P positions in the cache, T new positions, W width of the remembered vectors, J stacked views.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONV_EPS = 1e-5
PADDING, BEFORE_SEQUENCE = -1, -2
"""Document numbers of padding, and of what lies before the sequence."""


class ConvolutionCache:
    """The last vectors that each short convolution has read, and the document of each position."""

    def __init__(self) -> None:
        self.recent: dict[str, Tensor] = {}
        """[B, reach, W], by the name of a view."""
        self.stacked: dict[tuple[str, ...], Tensor] = {}
        """The same for stacked views [B, reach, J, W], while tokens come one at a time."""
        self.documents: Tensor | None = None
        """[B, P], where documents or padding matter."""
        self.next_document: Tensor | None = None

    def extend(self, name: str, new_BTW: Tensor, reach: int) -> Tensor:
        """The new vectors with the `reach` before them [B, reach + T, W]; zeros before the sequence."""
        before = self.recent.get(name)
        whole = F.pad(new_BTW, (0, 0, reach, 0)) if before is None else torch.cat((before, new_BTW), 1)
        self.recent[name] = whole[:, whole.shape[1] - reach :]
        self.stacked.clear()
        return whole

    def extend_stacked(self, names: tuple[str, ...], new_BJW: Tensor, reach: int) -> Tensor:
        """As `extend`, for one new vector of each of these views [B, reach + 1, J, W]."""
        before = self.stacked.get(names)
        if before is None:
            before = torch.stack([self.recent[name] for name in names], 2)
        whole = torch.cat((before, new_BJW[:, None]), 1)
        self.stacked[names] = kept = whole[:, whole.shape[1] - reach :]
        self.recent.update(zip(names, kept.unbind(2), strict=True))
        return whole


@dataclass
class Positions:
    """Where the new tokens stand."""

    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    """[B,1,T,P+T] or [T,P+T]: which positions attend to which; None: each to those before it and to itself."""
    documents: Tensor | None
    """[B, P+T]"""
    slots: Tensor
    """The row of each new position among the retrieved vectors: [B, T], or [B, T, K] for K keys."""


def at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x_fp32 = at_least_fp32(x)
        scale = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + self.eps)
        return (x_fp32 * scale * at_least_fp32(self.weight)).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def shifted_copies(whole: Tensor, new: int, taps: int, at: Positions) -> list[Tensor]:
    """The new positions of `whole` [B, taps - 1 + T, W], and those 1, 2, .. before each; zero in another document."""
    reach = taps - 1
    copies = [whole[:, reach - j : reach - j + new] for j in range(taps)]
    if at.documents is None:
        return copies
    around = F.pad(at.documents, (reach, 0), value=BEFORE_SEQUENCE)[:, -(reach + new) :]
    return [
        copy * (around[:, reach - j : reach - j + new] == around[:, reach:])[..., None] for j, copy in enumerate(copies)
    ]


def weighted_sum(copies: list[Tensor], kernel: Tensor) -> Tensor:
    """The sum of the shifted copies, each times its row of the kernel."""
    kernel = kernel.to(copies[0].dtype)
    total = copies[0] * kernel[0]
    for copy, weight in zip(copies[1:], kernel[1:], strict=True):
        total = torch.addcmul(total, copy, weight)
    return total
