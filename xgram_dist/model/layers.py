"""The small parts of the backbone: linear, RMSNorm, rotary embedding, SwiGLU, input embedding.

Shapes: B batch, T sequence, D width, F feed-forward width, H heads, K head width, V vocabulary.
Parameters may be kept in fp32 (master weights) or in the compute type; each layer casts its weight to the type of
what it is given, so that precision is chosen once, where the residual stream is made. Norms compute in fp32.
On a tensor axis each rank holds its part of the sharded parameters; the sizes a layer is given are the whole ones.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.parallel.tensor import ALONE, TensorAxis, copy_to_tensor, enter_layer, leave_layer, sharded


def wide(x: Tensor) -> Tensor:
    """At least fp32: where sums, norms and softmax are computed."""
    return x if x.dtype == torch.float64 else x.float()


class Linear(nn.Module):
    """y = x W^T without bias. `dim`: 0 where outputs are spread over the tensor axis, 1 where inputs are."""

    def __init__(self, inputs: int, outputs: int, dim: int, axis: TensorAxis = ALONE):
        super().__init__()
        self.weight = sharded((outputs, inputs), dim, axis)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    `parts`: the axis whose ranks each see a part of the sequence, so that the weight's gradient is summed over it.
    `channels`: the axis over which the width is spread.
    """

    def __init__(self, width: int, eps: float, parts: TensorAxis = ALONE, channels: TensorAxis = ALONE):
        super().__init__()
        self.weight = sharded((width,), 0, channels, fill=1.0)
        self.eps, self.parts = eps, parts

    def forward(self, x: Tensor, mean_square: Tensor | None = None) -> Tensor:
        """`mean_square` [..., 1]: where the width is spread over ranks, the mean over all of it."""
        x_wide = wide(x)
        if mean_square is None:
            mean_square = x_wide.square().mean(-1, keepdim=True)
        scale = torch.rsqrt(mean_square + self.eps)
        return (x_wide * scale * copy_to_tensor(wide(self.weight), self.parts)).to(x.dtype)


class SwiGLU(nn.Module):
    """W_down(SiLU(W_gate x) * W_up x); the inner width is spread over the tensor axis."""

    def __init__(self, width: int, inner: int, axis: TensorAxis = ALONE, *, has_up: bool = True):
        """`has_up`: False where what W_up x would be is given."""
        super().__init__()
        self.axis = axis
        self.gate = Linear(width, inner, 0, axis)
        self.up = Linear(width, inner, 0, axis) if has_up else None
        self.down = Linear(inner, width, 1, axis)

    def forward(self, x: Tensor, up: Tensor | None = None) -> Tensor:
        """`up`: of this rank's part of the inner width."""
        x_BTD = enter_layer(x, self.axis)
        if self.up is not None:
            up = self.up(x_BTD)
        assert up is not None
        return leave_layer(self.down(F.silu(self.gate(x_BTD)) * up), self.axis)


def embed(tokens_BT: Tensor, weight_VD: Tensor, dtype: torch.dtype, axis: TensorAxis) -> Tensor:
    """The rows of the tokens, in `dtype`. Each rank has a range of the vocabulary and gives zero for other tokens."""
    if axis.size == 1:
        return F.embedding(tokens_BT, weight_VD).to(dtype)
    index, mine = in_part(tokens_BT, weight_VD.shape[0], axis)
    return leave_layer((F.embedding(index, weight_VD) * mine[..., None]).to(dtype), axis)


def in_part(ids: Tensor, rows: int, axis: TensorAxis) -> tuple[Tensor, Tensor]:
    """For global ids: the row of this rank's `rows` (0 where it is another's), and whether it is this rank's."""
    index = ids - axis.rank * rows
    mine = (index >= 0) & (index < rows)
    return torch.where(mine, index, 0), mine


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
