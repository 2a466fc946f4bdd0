"""The context axis: each sequence is cut over its ranks, and attention alone looks across the cut.

A sequence of T tokens is cut into 2C chunks for C ranks. Rank r computes chunks r and 2C - 1 - r: the first sees few
keys, the second many, so that every rank has the same share of the causal mask.

    C = 2     chunk   0 | 1 | 2 | 3
              rank    0   1   1   0

Every rank of the axis is given the whole token ids. Positions, labels, documents and n-gram keys are computed from
those and then selected, so that they need no communication. A site that reads the k - 1 tokens before a position
(ShortConv) gets the vectors of these tokens from the working set: a rank reads the positions of its chunks and, before
each, `reach` more. Collectives are those of this file:

    function                    forward                                                          backward
    gather_keys_and_values      all-gather, in the order of the sequence                         reduce-scatter
    exchange_before             all-gather of the last `reach` positions of each chunk           reduce-scatter

Gradients of parameters and table rows are partial sums on each rank, as over the batch: the engine and the exchange
average over the data axis, of which the context axis is a part. So a rank's loss is its sum over the positions that it
computes, times C, over the targets of the whole sequences: the mean over ranks is the loss of one process.

Why gather and not pass keys and values round a ring: both move the same bytes, (C - 1)/C of the keys and values of a
layer each way. A ring hides them behind the attention of the part before; a gather is one message, needs no rescaling
of partial softmaxes, and works with every attention kernel. What it costs is the memory of one layer's keys and values
of whole sequences, which grouped-query attention keeps small (`xgram-dist plan` has both numbers).

Shapes: B batch, T sequence, L chunk, S positions that a rank computes (2 L), R positions that it reads (S and those
before each chunk), G key/value heads, K head width, D width.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.parallel.process_group import ProcessGroup


@dataclass(frozen=True)
class ContextAxis:
    """What a layer knows of the axis. Plain data, so that a module can be copied and compiled. On a single rank, which
    computes whole sequences, every method returns what it is given."""

    rank: int = 0
    size: int = 1
    group_name: str = ""
    """Of torch's process group."""
    reach: int = 0
    """Positions before a chunk that are read."""

    # Positions of a sequence

    @property
    def chunk_numbers(self) -> tuple[int, int]:
        """Of this rank, among the 2C of a sequence."""
        return self.rank, 2 * self.size - 1 - self.rank

    @property
    def before(self) -> tuple[int, int]:
        """Positions that are read before each of the two chunks: none where the sequence begins."""
        return (self.reach if self.rank else 0), self.reach

    def chunk_length(self, length: int) -> int:
        """Of sequences of `length`."""
        if length % self.divisor or length < self.shortest:
            raise ValueError(
                f"{length} tokens cannot be cut into {self.divisor} chunks of at least {self.reach} tokens"
            )
        return length // self.divisor

    @property
    def divisor(self) -> int:
        """Of the lengths that can be cut: the number of chunks."""
        return 2 * self.size if self.size > 1 else 1

    @property
    def shortest(self) -> int:
        """Of these lengths: a chunk has at least the positions that are read before the next."""
        return self.divisor * max(1, self.reach) if self.size > 1 else 1

    def computed(self, length: int) -> tuple[slice, ...]:
        """The positions of a sequence that this rank computes."""
        if self.size == 1:
            return (slice(0, length),)
        chunk = self.chunk_length(length)
        return tuple(slice(number * chunk, (number + 1) * chunk) for number in self.chunk_numbers)

    def read(self, length: int) -> tuple[slice, ...]:
        """Those that it reads."""
        if self.size == 1:
            return (slice(0, length),)
        parts = zip(self.computed(length), self.before, strict=True)
        return tuple(slice(chunk.start - before, chunk.stop) for chunk, before in parts)

    # Selection

    def select(self, x: Tensor, dim: int = 1) -> Tensor:
        """T -> S"""
        return x if self.size == 1 else select_slices(x, self.computed(x.shape[dim]), dim)

    def select_read(self, x: Tensor, dim: int = 1) -> Tensor:
        """T -> R"""
        return x if self.size == 1 else select_slices(x, self.read(x.shape[dim]), dim)

    def select_read_on_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """[..., T] -> [..., R]"""
        return array if self.size == 1 else array[..., _read_positions(self, array.shape[-1])]

    def without_before(self, x: Tensor, dim: int = 1) -> Tensor:
        """R -> S"""
        num_read = x.shape[dim]
        return select_slices(x, self.kept(slice(0, self.num_computed(num_read)), num_read), dim)

    def num_computed(self, num_read: int) -> int:
        """R -> S, as numbers."""
        return num_read if self.size == 1 else num_read - sum(self.before)

    def kept(self, local: slice, num_read: int) -> tuple[slice, ...]:
        """Where the computed positions `local` (of S) lie among those that are read (R): a slice for each chunk that
        they touch."""
        if self.size == 1:
            return (local,)
        chunk, (before_first, before_second) = self.num_computed(num_read) // 2, self.before
        first = slice(local.start + before_first, min(local.stop, chunk) + before_first)
        offset = before_first + before_second
        second = slice(max(local.start, chunk) + offset, local.stop + offset)
        return tuple(part for part in (first, second) if part.start < part.stop)

    # Communication

    def gather_sequence(self, x: Tensor) -> Tensor:
        """[B, S, ...] -> [B, T, ...], outside of autograd."""
        return x if self.size == 1 else _all_gather(x, self.size, self.group_name)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, outside of autograd."""
        return x if self.size == 1 else _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", self.group_name))


WHOLE_SEQUENCES = ContextAxis()


def context_axis(ranks: ProcessGroup | None, reach: int = 0) -> ContextAxis:
    """`reach`: positions before the current one that the memory method reads."""
    if ranks is None or ranks.size == 1:
        return WHOLE_SEQUENCES
    return ContextAxis(ranks.rank, ranks.size, ranks.group.group_name, reach)


def select_slices(x: Tensor, parts: tuple[slice, ...], dim: int = 1) -> Tensor:
    """The parts of `x` along `dim`, side by side."""
    if parts in ((slice(None),), (slice(0, x.shape[dim]),)):
        return x
    pieces = [x.narrow(dim, part.start, part.stop - part.start) for part in parts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


@lru_cache(maxsize=8)
def _read_positions(axis: ContextAxis, length: int) -> NDArray[Any]:
    return np.concatenate([np.arange(part.start, part.stop) for part in axis.read(length)])


def gather_keys_and_values(k_BSGK: Tensor, v_BSGK: Tensor, axis: ContextAxis) -> tuple[Tensor, Tensor]:
    """Those of the whole sequence [B, T, G, K], in one message."""
    if axis.size == 1:
        return k_BSGK, v_BSGK
    heads = k_BSGK.shape[2]
    whole = _GatherSequence.apply(torch.cat((k_BSGK, v_BSGK), 2), axis.size, axis.group_name)
    k_BTGK, v_BTGK = whole.split(heads, 2)
    return k_BTGK, v_BTGK


def exchange_before(x_BSD: Tensor, axis: ContextAxis) -> Tensor:
    """Of what a rank computes, what it reads [B, R, D]: `reach` positions before each chunk, from their ranks."""
    if axis.size == 1 or axis.reach == 0:
        return x_BSD
    reach, chunk = axis.reach, x_BSD.shape[1] // 2
    ends = [x_BSD[:, end - reach : end] for end in (chunk, 2 * chunk)]
    # The ends of all chunks, in the order of the sequence.
    whole = _GatherSequence.apply(torch.cat(ends, 1), axis.size, axis.group_name)
    pieces = []
    for part, number in enumerate(axis.chunk_numbers):
        pieces += [whole[:, (number - 1) * reach : number * reach]] if number else []
        pieces.append(x_BSD[:, part * chunk : (part + 1) * chunk])
    return torch.cat(pieces, 1)


_ops: Any = torch.ops._c10d_functional


def _all_gather(x_BS: Tensor, size: int, group: str) -> Tensor:
    gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(x_BS.contiguous(), size, group))
    by_rank = gathered.unflatten(0, (size, -1)).unflatten(2, (2, -1))  # [C, B, 2, L, ...]
    ascending, descending = by_rank[:, :, 0], by_rank[:, :, 1]
    return torch.cat([*ascending.unbind(0), *reversed(descending.unbind(0))], 1)


def _reduce_scatter(x_BT: Tensor, size: int, group: str) -> Tensor:
    chunks = x_BT.chunk(2 * size, 1)
    by_rank = [torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), 1) for rank in range(size)]
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(torch.cat(by_rank, 0), "sum", size, group))


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BS: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return _all_gather(x_BS, size, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        return _reduce_scatter(grads[0], ctx.size, ctx.group), None, None
