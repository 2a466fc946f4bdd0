"""What the training loop, checkpoints and exports ask of an engine.

    for each micro-batch:   loss, entropy = engine.loss(tokens, slots, values, warmup)
                            engine.backward(loss / micro_batches, last=...)
    outcome = engine.step(rate, mean_loss, tables_square_sum)

The working set's leaves in `values` get their gradient by the same backward pass, as it is: not scaled, not averaged,
in fp32. The engine's own gradients are means over the data axis once the last backward pass of a step is through.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from xgram_dist.config import Config

Kind = Literal["weight", "first_moment", "second_moment"]
Box = tuple[tuple[int, ...], Tensor]
"""(offsets, values)"""


class StepOutcome(NamedTuple):
    norm: Tensor
    """Joint gradient norm of backbone and tables, before clipping; fp32, the same on every rank."""
    factor: float
    """What gradients were multiplied by; the tables' must be too."""
    counted: bool
    """False: norm or loss was not finite, and nothing was changed."""


@dataclass
class Piece:
    """This rank's part of one parameter, or of one of its moments, as a checkpoint sees it."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    """Of the parameter as the model builds it: with tensor parallelism, of this rank's shard."""
    tensor_dim: int | None
    """The dimension that is cut over the tensor axis; None: every rank of that axis holds the whole."""
    boxes: list[Box]
    """Boxes of `shape`; none where this rank holds nothing. Live fp32 views, to be read or overwritten in place."""


class Engine(Protocol):
    config: Config
    device: torch.device
    tensor_dims: dict[str, int]
    """The dimension that is cut over the tensor axis, for each parameter that is."""
    step_count: int
    """Steps that AdamW has made: its bias correction. To be set, beside the pieces, when a checkpoint is loaded."""

    def loss(self, *args: Any) -> tuple[Tensor, Tensor]:
        """`Transformer.loss` through the engine. Under `torch.no_grad` too, for validation; where parameters are
        sharded, every rank of the data axis must call it the same number of times."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Of one micro-batch; `loss` is already divided by their number. `last`: of the step."""
        ...

    def step(self, rate: float, loss: Tensor, tables_square_sum: Tensor) -> StepOutcome:
        """Clip by the joint norm and update with learning rate `rate`; gradients are cleared in any case.

        `loss`: of the step, the same on every rank. `tables_square_sum`: the squares of all table gradients, already
        summed over ranks."""
        ...

    def pieces(self) -> list[Piece]:
        """Every master weight and moment this rank holds; what is on several ranks appears on each of them."""
        ...

    def loaded(self) -> None:
        """The tensors of `pieces` were overwritten: bring what is derived from them in line. All ranks call it."""
        ...

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in fp32, whole on every rank of the data axis, one at a time; all ranks must go through.
        Shards of tensor parallelism stay shards."""
        ...

    def close(self) -> None:
        """Let go of hooks and of process groups the engine made."""
        ...
