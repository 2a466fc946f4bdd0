"""What the decoder and the methods in it have in common. Needs torch alone: an exported folder holds a copy.

Shapes: B batch, P positions in the cache, T new ones, W width of what is remembered.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONV_EPS = 1e-5
PADDING, BEFORE = -1, -2
"""Document numbers of padding, and of what lies before the sequence."""


class Recent:
    """What the short convolutions remember: the last vectors of each view, and which document a position is of."""

    def __init__(self) -> None:
        self.recent: dict[str, Tensor] = {}
        self.together: dict[tuple[str, ...], Tensor] = {}
        """The same, of views that are stacked [B, reach, J, W]; as long as tokens come one by one."""
        self.documents: Tensor | None = None
        """[B, P], where documents or padding matter."""
        self.next_document: Tensor | None = None

    def window(self, name: str, new_BTW: Tensor, reach: int) -> Tensor:
        """The new vectors with the `reach` before them [B, reach + T, W]; zeros before the sequence."""
        before = self.recent.get(name)
        whole = F.pad(new_BTW, (0, 0, reach, 0)) if before is None else torch.cat((before, new_BTW), 1)
        self.recent[name] = whole[:, whole.shape[1] - reach :]
        self.together.clear()
        return whole

    def window_together(self, names: tuple[str, ...], new_BJW: Tensor, reach: int) -> Tensor:
        """As `window`, of one new vector for each of these views [B, reach + 1, J, W]."""
        before = self.together.get(names)
        if before is None:
            before = torch.stack([self.recent[name] for name in names], 2)
        whole = torch.cat((before, new_BJW[:, None]), 1)
        self.together[names] = kept = whole[:, whole.shape[1] - reach :]
        self.recent.update(zip(names, kept.unbind(2), strict=True))
        return whole


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x_wide = wide(x)
        scale = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + self.eps)
        return (x_wide * scale * wide(self.weight)).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


@dataclass
class Positions:
    """Where the new tokens stand."""

    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    """[B,1,T,P+T] or [T,P+T]: who may attend to whom; None: to all before, and itself."""
    documents: Tensor | None
    """[B, P+T]"""
    slots: Tensor


def taps_of(whole: Tensor, new: int, count: int, at: Positions) -> list[Tensor]:
    """The new positions of `whole` [B, count - 1 + T, W], and those 1, 2, .. before each; zero in another document."""
    reach = count - 1
    taps = [whole[:, reach - j : reach - j + new] for j in range(count)]
    if at.documents is None:
        return taps
    around = F.pad(at.documents, (reach, 0), value=BEFORE)[:, -(reach + new) :]
    return [
        tap * (around[:, reach - j : reach - j + new] == around[:, reach:])[..., None] for j, tap in enumerate(taps)
    ]


def mixed(taps: list[Tensor], kernel: Tensor) -> Tensor:
    """The sum of the taps, each times its row of the kernel."""
    kernel = kernel.to(taps[0].dtype)
    total = taps[0] * kernel[0]
    for tap, weight in zip(taps[1:], kernel[1:], strict=True):
        total = torch.addcmul(total, tap, weight)
    return total
