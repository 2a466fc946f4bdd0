"""W1, the work that every peer does: its size, and the loss over what was looked up.

Every rank looks up its tokens of a step in all tables, takes the loss, goes backward and updates the rows. Rows start
small (INITIAL) and the second moments' floor (EPSILON) lies far below the gradients, which a mean over millions of
numbers makes tiny: so every optimizer moves rows by about its learning rate, and the loss falls visibly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

INITIAL = 0.02  # uniform within +- this
LEARNING_RATE = 1e-3
EPSILON = 1e-14


@dataclass(frozen=True)
class Workload:
    rank: int
    ranks: int
    rows: int
    tables: int
    width: int


class Peer(Protocol):
    note: str

    def prepare(self, tokens: Tensor) -> Any:
        """What a step takes, made of its tokens before the clock starts."""

    def step(self, ready: Any) -> Tensor | None:
        """One whole training step; returns its loss, where there is one."""


class _HalfMeanSquare(torch.autograd.Function):
    """The gradient is the vectors themselves over their number: one pass, so that the loss costs all peers little."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, numbers: int) -> Tensor:
        ctx.save_for_backward(vectors)
        ctx.numbers = numbers
        return torch.linalg.vector_norm(vectors).square() * (0.5 / numbers)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (vectors,) = ctx.saved_tensors
        return vectors * (gradients[0] / ctx.numbers), None


@torch.compile(dynamic=True)
def half_mean_square(parts: Sequence[Tensor]) -> Tensor:
    """0.5 * mean square over all parts together."""
    return _half_mean_square(parts)


@torch.compile(dynamic=True)
def half_mean_square_of(vectors: Tensor, index: Tensor) -> Tensor:
    """The same of some vectors, each as often as it is named."""
    return _half_mean_square([vectors.index_select(0, index)])


def _half_mean_square(parts: Sequence[Tensor]) -> Tensor:
    numbers = sum(part.numel() for part in parts)
    losses = [_HalfMeanSquare.apply(part, numbers) for part in parts]
    return torch.stack(losses).sum()
