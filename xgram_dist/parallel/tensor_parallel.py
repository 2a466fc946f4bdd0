"""The tensor axis, as in Megatron-LM: its collectives as autograd functions, and parameters sharded over it.

    function                                     forward           backward
    copy_to_tensor_parallel_region               identity          all-reduce
    reduce_from_tensor_parallel_region           all-reduce        identity
    all_reduce_in_tensor_parallel_region         all-reduce        all-reduce
    gather_from_sequence_parallel_region         all-gather        reduce-scatter, or split
    reduce_scatter_to_sequence_parallel_region   reduce-scatter    all-gather

A column-parallel linear followed by a row-parallel one stands between `column_parallel_input` and
`row_parallel_output`. Outside of such a pair activations are replicated, or, with sequence parallelism, split along the
sequence; either way the gradient of what a rank holds there is complete. A replicated parameter of which each rank sees
only a part of the uses goes through `copy_to_tensor_parallel_region`, so that its gradient is complete, too. With one
rank every function is the identity.

The collectives are torch's functional ones, which torch.compile can trace. All ranks of the axis run the same network
on the same tokens, hence the same collectives in the same order.

Shapes: B batch, T sequence, S this rank's part of the sequence (T over the ranks), D width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xgram_dist.parallel.process_group import ProcessGroup


@dataclass(frozen=True)
class TensorAxis:
    """What a layer knows of the axis. Plain data, so that a module can be copied and compiled."""

    rank: int = 0
    size: int = 1
    group_name: str = ""
    """Of torch's process group."""
    sequence_parallel: bool = False
    """Between tensor-parallel regions, each rank keeps its part of the sequence."""

    @property
    def sequence_axis(self) -> "TensorAxis":
        """The axis over which the sequence is split between tensor-parallel regions: this one, or a single rank."""
        return self if self.sequence_parallel else SINGLE_RANK

    def local_size(self, global_size: int) -> int:
        """This rank's part of a width or a length."""
        if global_size % self.size:
            raise ValueError(f"{global_size} cannot be divided evenly over {self.size} tensor-parallel ranks")
        return global_size // self.size

    def local_slice(self, global_size: int) -> slice:
        local = self.local_size(global_size)
        return slice(self.rank * local, (self.rank + 1) * local)


SINGLE_RANK = TensorAxis()


def tensor_axis(ranks: ProcessGroup | None, sequence_parallel: bool = False) -> TensorAxis:
    if ranks is None or ranks.size == 1:
        return SINGLE_RANK
    return TensorAxis(ranks.rank, ranks.size, ranks.group.group_name, sequence_parallel)


# Regions


def column_parallel_input(x: Tensor, axis: TensorAxis) -> Tensor:
    """The input of column-parallel linears: the whole sequence, on every rank."""
    if axis.sequence_parallel:
        return gather_from_sequence_parallel_region(x, axis)
    return copy_to_tensor_parallel_region(x, axis)


def row_parallel_output(x_BTD: Tensor, axis: TensorAxis) -> Tensor:
    """The output of a row-parallel linear: its partial sums reduced, and split along the sequence if that is."""
    if axis.sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(x_BTD, axis)
    return reduce_from_tensor_parallel_region(x_BTD, axis)


def copy_to_tensor_parallel_region(x: Tensor, axis: TensorAxis) -> Tensor:
    """`x` is replicated; each rank uses it differently."""
    return x if axis.size == 1 else _CopyToRegion.apply(x, axis.group_name)


def reduce_from_tensor_parallel_region(x: Tensor, axis: TensorAxis) -> Tensor:
    """`x` is a partial sum; all ranks use the total alike."""
    return x if axis.size == 1 else _ReduceFromRegion.apply(x, axis.group_name)


def all_reduce_in_tensor_parallel_region(x: Tensor, axis: TensorAxis) -> Tensor:
    """`x` is a partial sum; each rank uses the total differently, as for the norm of a vector sharded by channels."""
    return x if axis.size == 1 else _AllReduceInRegion.apply(x, axis.group_name)


def gather_from_sequence_parallel_region(
    x_BSD: Tensor, axis: TensorAxis, *, tensor_parallel_output_grad: bool = True
) -> Tensor:
    """[B, T, D]. `tensor_parallel_output_grad`: each rank uses the result differently, so that its gradient is summed
    (reduce-scatter); False: all ranks use it alike, and each takes its part of the gradient."""
    if axis.size == 1:
        return x_BSD
    if tensor_parallel_output_grad:
        return _GatherFromSequence.apply(x_BSD, axis.size, axis.group_name)
    return _GatherReplicatedFromSequence.apply(x_BSD, axis.rank, axis.size, axis.group_name)


def reduce_scatter_to_sequence_parallel_region(x_BTD: Tensor, axis: TensorAxis) -> Tensor:
    """`x_BTD` is a partial sum; the result is this rank's part [B, S, D] of the total."""
    axis.local_size(x_BTD.shape[1])  # raises where the length cannot be divided
    return x_BTD if axis.size == 1 else _ReduceScatterToSequence.apply(x_BTD, axis.size, axis.group_name)


def all_reduce(x: Tensor, axis: TensorAxis, operation: str = "sum") -> Tensor:
    """Outside of autograd; "sum" or "max"."""
    return x if axis.size == 1 else _all_reduce(x, axis.group_name, operation)


# Sharded parameters


def sharded_parameter(global_shape: tuple[int, ...], dim: int, axis: TensorAxis, fill: float = 0.0) -> nn.Parameter:
    """This rank's shard of a parameter that is split along `dim`; on several ranks it is marked by `tensor_dim`."""
    shape = list(global_shape)
    shape[dim] = axis.local_size(shape[dim])
    parameter = nn.Parameter(torch.full(shape, fill))
    if axis.size > 1:
        parameter.tensor_dim = dim  # type: ignore[attr-defined]
    return parameter


def tensor_dim(parameter: Tensor) -> int | None:
    """The dimension along which a parameter is sharded; None: it is replicated over the tensor axis."""
    return getattr(parameter, "tensor_dim", None)


def tensor_dims(module: nn.Module) -> dict[str, int]:
    """`tensor_dim` of the sharded parameters, by name. Call it before an engine replaces the parameters by its own."""
    dims = {name: tensor_dim(parameter) for name, parameter in module.named_parameters()}
    return {name: dim for name, dim in dims.items() if dim is not None}


def tensor_slice(whole: Tensor, dim: int | None, tensor: ProcessGroup | TensorAxis) -> Tensor:
    """This rank's shard of a whole parameter (a view)."""
    if dim is None or tensor.size == 1:
        return whole
    return whole.chunk(tensor.size, dim)[tensor.rank]


def global_shape_and_offset(
    parameter: Tensor, tensor: ProcessGroup | TensorAxis, dim: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The whole parameter's shape, and the offset of this rank's shard in it. `dim`: for a tensor without the mark."""
    dim = tensor_dim(parameter) if dim is None else dim
    shape, offset = list(parameter.shape), [0] * parameter.dim()
    if dim is not None:
        offset[dim] = tensor.rank * shape[dim]
        shape[dim] *= tensor.size
    return tuple(shape), tuple(offset)


# Autograd functions

_ops: Any = torch.ops._c10d_functional


def _all_reduce(x: Tensor, group: str, operation: str = "sum") -> Tensor:
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), operation, group))


def _all_gather_sequence(x_BSD: Tensor, size: int, group: str) -> Tensor:
    gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(x_BSD.contiguous(), size, group))
    return gathered.unflatten(0, (size, -1)).movedim(0, 1).flatten(1, 2)


def _reduce_scatter_sequence(x_BTD: Tensor, size: int, group: str) -> Tensor:
    by_rank = x_BTD.unflatten(1, (size, -1)).movedim(1, 0).flatten(0, 1)
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(by_rank.contiguous(), "sum", size, group))


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.group), None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0], None


class _AllReduceInRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.group), None


class _GatherFromSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return _all_gather_sequence(x_BSD, size, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return _reduce_scatter_sequence(grads[0], ctx.size, ctx.group), None, None


class _GatherReplicatedFromSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, rank: int, size: int, group: str) -> Tensor:
        ctx.rank, ctx.size = rank, size
        return _all_gather_sequence(x_BSD, size, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        return grads[0].chunk(ctx.size, dim=1)[ctx.rank], None, None, None


class _ReduceScatterToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return _reduce_scatter_sequence(x_BTD, size, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return _all_gather_sequence(grads[0], ctx.size, ctx.group), None, None
