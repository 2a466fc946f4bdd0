"""What all engines share: the order of a step, and whole parameters from pieces."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from xgram_dist.config import Config
from xgram_dist.engine.adamw import set_step
from xgram_dist.engine.boxes import place
from xgram_dist.engine.norm import NamedTensors, decide, square_sum
from xgram_dist.engine.protocol import Box, Kind, Piece, StepOutcome
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.parallel.ranks import Ranks
from xgram_dist.parallel.tensor import tensor_dims


class BaseEngine(ABC):
    adamw: torch.optim.AdamW

    def __init__(self, config: Config, model: nn.Module, mesh: Mesh, device: torch.device, shard: Ranks):
        """`shard`: the ranks that hold different parts of the state; those beside them hold copies."""
        self.config, self.model, self.mesh, self.device, self.shard = config, model, mesh, device, shard
        named = list(model.named_parameters())
        self.shapes = {name: tuple(parameter.shape) for name, parameter in named}
        self.tensor_dims = tensor_dims(model)
        self._steps = 0

    @abstractmethod
    def loss(self, *args: Any) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def backward(self, loss: Tensor, *, last: bool) -> None: ...

    @abstractmethod
    def pieces(self) -> list[Piece]: ...

    @abstractmethod
    def loaded(self) -> None: ...

    def close(self) -> None:
        return

    @abstractmethod
    def _gradients(self) -> NamedTensors:
        """This rank's parts of the reduced gradients, by parameter; scaled in place by `step`."""

    @abstractmethod
    def _finish(self, rate: float, outcome: StepOutcome) -> None:
        """Update if the step counts; clear gradients."""

    @torch.no_grad()
    def step(self, rate: float, loss: Tensor, tables_square_sum: Tensor) -> StepOutcome:
        gradients = self._gradients()
        squares = square_sum(gradients, self.tensor_dims, shard=self.shard, tensor=self.mesh.tensor, device=self.device)
        outcome = decide(squares, tables_square_sum, loss, self.config.optimizer.clip_norm)
        if outcome.factor < 1 and gradients:
            torch._foreach_mul_([gradient for _, gradient in gradients], outcome.factor)
        self._finish(rate, outcome)
        self._steps += outcome.counted
        return outcome

    @property
    def step_count(self) -> int:
        return self._steps

    @step_count.setter
    def step_count(self, count: int) -> None:
        self._steps = count
        set_step(self.adamw, count)

    def _piece(self, name: str, kind: Kind, boxes: list[Box] | None = None) -> Piece:
        return Piece(name, kind, self.shapes[name], self.tensor_dims.get(name), boxes or [])

    @torch.no_grad()
    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        boxes = {piece.name: piece.boxes for piece in self.pieces() if piece.kind == "weight"}
        for name, shape in self.shapes.items():
            whole = torch.zeros(shape, dtype=torch.float32, device=self.device)
            for offsets, tensor in boxes[name]:
                whole[place(offsets, tensor)].copy_(tensor)
            # Every element is on one rank of the axis: a sum with zeros is a gather.
            yield name, self.shard.all_reduce_sum(whole)
