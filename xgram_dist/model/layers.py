"""Layers of the backbone: column- and row-parallel linears, vocabulary-parallel embedding, RMSNorm, SwiGLU, rotary.

Parameters may be in fp32 (master weights) or in the compute dtype. Each layer casts its weight to the dtype of its
input, so that precision is chosen in one place: where the residual stream begins. Norms compute in fp32.
On a tensor axis each rank holds its shards of the parameters; the sizes given to a layer are the global ones.

Shapes: B batch, T sequence, D width, F feed-forward width, H heads, K head width, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xgram_dist.config.schema import ModelConfig, RopeScalingConfig
from xgram_dist.parallel.tensor_parallel import (
    SINGLE_RANK,
    TensorAxis,
    column_parallel_input,
    copy_to_tensor_parallel_region,
    row_parallel_output,
    sharded_parameter,
)


def at_least_fp32(x: Tensor) -> Tensor:
    """For sums, norms and softmax; fp64 stays fp64."""
    return x if x.dtype == torch.float64 else x.float()


class ColumnParallelLinear(nn.Module):
    """y = x W^T without bias; outputs are sharded over the tensor axis. Its input goes through
    `column_parallel_input`, which stands outside because several linears share it (query, key, value)."""

    def __init__(self, inputs: int, outputs: int, axis: TensorAxis = SINGLE_RANK):
        super().__init__()
        self.weight = sharded_parameter((outputs, inputs), 0, axis)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RowParallelLinear(nn.Module):
    """y = x W^T without bias; inputs are sharded over the tensor axis. Its output is a partial sum, which goes through
    `row_parallel_output`."""

    def __init__(self, inputs: int, outputs: int, axis: TensorAxis = SINGLE_RANK):
        super().__init__()
        self.weight = sharded_parameter((outputs, inputs), 1, axis)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    `sequence_axis`: the axis over which the sequence is split, so that the weight's gradient is summed over it.
    `channel_axis`: the axis over which the width is sharded.
    """

    def __init__(
        self,
        width: int,
        eps: float,
        sequence_axis: TensorAxis = SINGLE_RANK,
        channel_axis: TensorAxis = SINGLE_RANK,
    ):
        super().__init__()
        self.weight = sharded_parameter((width,), 0, channel_axis, fill=1.0)
        self.eps, self.sequence_axis = eps, sequence_axis

    def forward(self, x: Tensor, mean_square: Tensor | None = None) -> Tensor:
        """`mean_square` [..., 1]: over the global width; must be given where the width is sharded."""
        x_fp32 = at_least_fp32(x)
        if mean_square is None:
            mean_square = x_fp32.square().mean(-1, keepdim=True)
        scale = torch.rsqrt(mean_square + self.eps)
        normed = x_fp32 * scale
        weight = copy_to_tensor_parallel_region(at_least_fp32(self.weight), self.sequence_axis)
        return (normed * weight).to(x.dtype)


class SwiGLU(nn.Module):
    """W_down(SiLU(W_gate x) * W_up x); the inner width is sharded over the tensor axis."""

    def __init__(self, width: int, inner: int, axis: TensorAxis = SINGLE_RANK, *, has_up: bool = True):
        """`has_up`: False where `forward` is given the up projection (STEM)."""
        super().__init__()
        self.axis = axis
        self.gate = ColumnParallelLinear(width, inner, axis)
        self.up = ColumnParallelLinear(width, inner, axis) if has_up else None
        self.down = RowParallelLinear(inner, width, axis)

    def forward(self, x: Tensor, up: Tensor | None = None) -> Tensor:
        """`up`: this rank's shard of the inner width."""
        x_BTD = column_parallel_input(x, self.axis)
        if self.up is not None:
            up = self.up(x_BTD)
        assert up is not None
        return row_parallel_output(self.down(F.silu(self.gate(x_BTD)) * up), self.axis)


# Vocabulary-parallel embedding


def vocab_parallel_embedding(tokens_BT: Tensor, weight_VD: Tensor, dtype: torch.dtype, axis: TensorAxis) -> Tensor:
    """The tokens' rows in `dtype`: Megatron's VocabParallelEmbedding. Each rank holds a range of the vocabulary and
    contributes zero for other tokens; the sum leaves the region as a row-parallel output does.

    A function, not a module: the weight is a parameter of the Transformer, because its name seeds its initial value,
    SCONE and MoLE read it, and ZeRO-3 gathers it with the root."""
    if axis.size == 1:
        return F.embedding(tokens_BT, weight_VD).to(dtype)
    index, is_local = local_vocab_index(tokens_BT, weight_VD.shape[0], axis)
    return row_parallel_output((F.embedding(index, weight_VD) * is_local[..., None]).to(dtype), axis)


def local_vocab_index(ids: Tensor, local_rows: int, axis: TensorAxis) -> tuple[Tensor, Tensor]:
    """(index of each global id in this rank's range of the vocabulary, or 0; whether the id is in that range)."""
    index = ids - axis.rank * local_rows
    is_local = (index >= 0) & (index < local_rows)
    return torch.where(is_local, index, 0), is_local


# Rotary position embedding


def rotary_cos_sin(model: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin [T, K/2] of position x theta^(-2i/K), in fp32; angles are computed in fp64, on the CPU."""
    exponents = torch.arange(0, model.width_of_head, 2, dtype=torch.float64, device="cpu") / model.width_of_head
    rates = model.rope_theta**-exponents
    if model.rope_scaling.factor != 1:
        rates = _scaled_rates(rates, model.rope_scaling)
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), rates)
    return angles.cos().float(), angles.sin().float()


def _scaled_rates(rates: Tensor, scaling: RopeScalingConfig) -> Tensor:
    turns = scaling.original_length * rates / (2 * math.pi)
    kept = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
    return torch.lerp(rates / scaling.factor, rates, kept.clamp(0, 1))


def apply_rotary(x_BTHK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Half-split form: dimension i is paired with dimension i + K/2."""
    cos, sin = cos_TK[None, :, None, :], sin_TK[None, :, None, :]
    first, second = at_least_fp32(x_BTHK).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BTHK.dtype)
