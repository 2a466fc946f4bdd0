"""The small parts of the backbone: linear, RMSNorm, rotary embedding, SwiGLU.

Shapes: B batch, T sequence, D width, F feed-forward width, H heads, K head width.
Parameters may be kept in fp32 (master weights) or in the compute type; each layer casts its weight to the type of
what it is given, so that precision is chosen once, where the residual stream is made. Norms compute in fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def wide(x: Tensor) -> Tensor:
    """At least fp32: where sums, norms and softmax are computed."""
    return x if x.dtype == torch.float64 else x.float()


class Linear(nn.Module):
    """y = x W^T without bias."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x_wide = wide(x)
        scale = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + self.eps)
        return (x_wide * scale * wide(self.weight)).to(x.dtype)


class SwiGLU(nn.Module):
    """W_down(SiLU(W_gate x) * W_up x)."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate = Linear(width, inner)
        self.up = Linear(width, inner)
        self.down = Linear(inner, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


def rotary_table(length: int, head_width: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [T, K/2] of position x theta^(-2i/K), in fp32; the angles are made in fp64."""
    exponents = torch.arange(0, head_width, 2, dtype=torch.float64) / head_width
    angles = torch.outer(torch.arange(length, dtype=torch.float64), theta**-exponents)
    return angles.cos().float(), angles.sin().float()


def rotate(x_BTHK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotary embedding in the half-split form: the pair of dimension i is dimension i + K/2."""
    cos, sin = cos_TK[None, :, None, :], sin_TK[None, :, None, :]
    first, second = wide(x_BTHK).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHK.dtype)
