"""The tensor axis: ranks that share each layer, and the collectives between them, as steps of autograd.

    copy_to_tensor        forward: nothing                       backward: sum over ranks
    reduce_from_tensor    forward: sum over ranks                backward: nothing
    sum_over_tensor       forward: sum over ranks                backward: sum over ranks
    gather_sequence       forward: parts of the sequence joined  backward: sum over ranks, each its part
    scatter_sequence      forward: sum over ranks, each its part backward: parts of the sequence joined
    collect_sequence      forward: parts of the sequence joined  backward: each its part

A layer that is split by columns, then by rows, stands between `enter_layer` and `leave_layer`. What every rank holds
alike between layers has a complete gradient on every rank. A parameter that every rank holds whole, but of whose use
each sees a part only, goes through `copy_to_tensor`, and its gradient is complete too. With one rank nothing is done.

The collectives are the functional ones, which a compiler can trace. All ranks of the axis must call them in the same
order; they do, since they run the same network on the same tokens.

Shapes: B batch, T sequence, P part of the sequence (T over the ranks), D width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xgram_dist.parallel.ranks import Ranks


@dataclass(frozen=True)
class TensorAxis:
    """What a layer must know of the axis: plain data, so that a module can be copied and compiled."""

    rank: int = 0
    size: int = 1
    group: str = ""
    """The process group's name."""
    sequence_parallel: bool = False
    """Between layers, each rank keeps its part of the sequence."""

    @property
    def between_layers(self) -> "TensorAxis":
        """The axis over which the sequence is spread between layers: this one, or none."""
        return self if self.sequence_parallel else ALONE

    def share(self, whole: int) -> int:
        """This rank's part of a width, or of a length."""
        if whole % self.size:
            raise ValueError(f"{whole} cannot be divided evenly over {self.size} tensor-parallel ranks")
        return whole // self.size

    def part(self, whole: int) -> slice:
        """Where this rank's part lies."""
        share = self.share(whole)
        return slice(self.rank * share, (self.rank + 1) * share)


ALONE = TensorAxis()


def tensor_axis(ranks: Ranks | None, sequence_parallel: bool = False) -> TensorAxis:
    if ranks is None or ranks.size == 1:
        return ALONE
    return TensorAxis(ranks.rank, ranks.size, ranks.group.group_name, sequence_parallel)


# Collectives


def all_reduce(x: Tensor, axis: TensorAxis, operation: str = "sum") -> Tensor:
    """The sum (or "max") over the ranks, outside of autograd."""
    return x if axis.size == 1 else _reduce(x, axis.group, operation)


def copy_to_tensor(x: Tensor, axis: TensorAxis) -> Tensor:
    """For what all ranks hold alike and each uses in its own way."""
    return x if axis.size == 1 else _Copy.apply(x, axis.group)


def reduce_from_tensor(x: Tensor, axis: TensorAxis) -> Tensor:
    """For partial sums whose total all ranks use alike."""
    return x if axis.size == 1 else _Reduce.apply(x, axis.group)


def sum_over_tensor(x: Tensor, axis: TensorAxis) -> Tensor:
    """For partial sums whose total each rank uses in its own way, as the norm of a vector spread by channels."""
    return x if axis.size == 1 else _Sum.apply(x, axis.group)


def gather_sequence(x_BPD: Tensor, axis: TensorAxis) -> Tensor:
    """[B, T, D] of the ranks' parts, which each rank uses in its own way."""
    return x_BPD if axis.size == 1 else _Gather.apply(x_BPD, axis.size, axis.group)


def scatter_sequence(x_BTD: Tensor, axis: TensorAxis) -> Tensor:
    """This rank's part [B, P, D] of the total of partial sums."""
    axis.share(x_BTD.shape[1])  # a clear word where it cannot be divided
    return x_BTD if axis.size == 1 else _Scatter.apply(x_BTD, axis.size, axis.group)


def collect_sequence(x_BPD: Tensor, axis: TensorAxis) -> Tensor:
    """[B, T, D] of the ranks' parts, which all ranks use alike."""
    return x_BPD if axis.size == 1 else _Collect.apply(x_BPD, axis.rank, axis.size, axis.group)


def enter_layer(x: Tensor, axis: TensorAxis) -> Tensor:
    """Into a layer that is split by columns: the whole sequence, on every rank."""
    return gather_sequence(x, axis) if axis.sequence_parallel else copy_to_tensor(x, axis)


def leave_layer(x_BTD: Tensor, axis: TensorAxis) -> Tensor:
    """Out of a layer that is split by rows: partial sums become what stands between layers."""
    return scatter_sequence(x_BTD, axis) if axis.sequence_parallel else reduce_from_tensor(x_BTD, axis)


# Sharded parameters


def sharded(whole_shape: tuple[int, ...], dim: int, axis: TensorAxis, fill: float = 0.0) -> nn.Parameter:
    """This rank's part, along `dim`, of a parameter; with more than one rank it is marked by `tensor_dim`."""
    shape = list(whole_shape)
    shape[dim] = axis.share(shape[dim])
    parameter = nn.Parameter(torch.full(shape, fill))
    if axis.size > 1:
        parameter.tensor_dim = dim  # type: ignore[attr-defined]
    return parameter


def tensor_dim(parameter: Tensor) -> int | None:
    """The dimension a parameter is sharded on; None: every rank holds it whole."""
    return getattr(parameter, "tensor_dim", None)


def tensor_dims(module: nn.Module) -> dict[str, int]:
    """The sharded parameters by name. To be asked before an engine replaces the parameters by its own."""
    found = {name: tensor_dim(parameter) for name, parameter in module.named_parameters()}
    return {name: dim for name, dim in found.items() if dim is not None}


def tensor_slice(whole: Tensor, dim: int | None, tensor: Ranks | TensorAxis) -> Tensor:
    """This rank's part of a whole parameter (a view)."""
    if dim is None or tensor.size == 1:
        return whole
    return whole.chunk(tensor.size, dim)[tensor.rank]


def global_shape_and_offset(
    parameter: Tensor, tensor: Ranks | TensorAxis, dim: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The whole parameter's shape, and where this rank's part begins in it. `dim`: for a tensor without the mark."""
    dim = tensor_dim(parameter) if dim is None else dim
    shape, offset = list(parameter.shape), [0] * parameter.dim()
    if dim is not None:
        offset[dim] = tensor.rank * shape[dim]
        shape[dim] *= tensor.size
    return tuple(shape), tuple(offset)


# The steps of autograd

_ops: Any = torch.ops._c10d_functional


def _reduce(x: Tensor, group: str, operation: str = "sum") -> Tensor:
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), operation, group))


def _join(x_BPD: Tensor, size: int, group: str) -> Tensor:
    parts = _ops.wait_tensor(_ops.all_gather_into_tensor(x_BPD.contiguous(), size, group))
    return parts.unflatten(0, (size, -1)).movedim(0, 1).flatten(1, 2)


def _reduce_to_part(x_BTD: Tensor, size: int, group: str) -> Tensor:
    parts = x_BTD.unflatten(1, (size, -1)).movedim(1, 0).flatten(0, 1)
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(parts.contiguous(), "sum", size, group))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return _reduce(grads[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return _reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0], None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return _reduce(grads[0], ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BPD: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return _join(x_BPD, size, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return _reduce_to_part(grads[0], ctx.size, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return _reduce_to_part(x_BTD, size, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return _join(grads[0], ctx.size, ctx.group), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BPD: Tensor, rank: int, size: int, group: str) -> Tensor:
        ctx.rank, ctx.size = rank, size
        return _join(x_BPD, size, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        return grads[0].chunk(ctx.size, dim=1)[ctx.rank], None, None, None
