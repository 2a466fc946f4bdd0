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
        self.stacked: list[tuple[dict[str, int], Tensor]] = []
        """In place of `recent`, while tokens come one at a time: the reach of each of J views, and the vectors of all
        of them [B, longest reach, J, W]."""
        self.documents: Tensor | None = None
        """[B, P], where documents or padding matter."""
        self.next_document: Tensor | None = None

    def extend(self, name: str, new_BTW: Tensor, reach: int) -> Tensor:
        """The new vectors with the `reach` before them [B, reach + T, W]; zeros before the sequence."""
        self.unstack()
        before = self.recent.get(name)
        whole = F.pad(new_BTW, (0, 0, reach, 0)) if before is None else torch.cat((before, new_BTW), 1)
        self.recent[name] = whole[:, whole.shape[1] - reach :]
        return whole

    def extend_stacked(self, reaches: dict[str, int], new_BJW: Tensor) -> Tensor:
        """As `extend`, for one new vector of each of these views [B, longest reach + 1, J, W]."""
        for number, (members, before) in enumerate(self.stacked):
            if members == reaches:
                whole = torch.cat((before, new_BJW[:, None]), 1)
                self.stacked[number] = reaches, whole[:, 1:]
                return whole
        longest = max(reaches.values())
        padded = [F.pad(self.recent[name], (0, 0, longest - reach, 0)) for name, reach in reaches.items()]
        whole = torch.cat((torch.stack(padded, 2), new_BJW[:, None]), 1)
        self.stacked.append((reaches, whole[:, 1:]))
        return whole

    def unstack(self) -> None:
        """Bring `recent` up to date."""
        for reaches, kept in self.stacked:
            for number, (name, reach) in enumerate(reaches.items()):
                self.recent[name] = kept[:, kept.shape[1] - reach :, number]
        self.stacked.clear()


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
