"""Engines whose AdamW runs over plain tensors of this rank: whole parameters, or shards of them."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from xgram_dist.config import Config
from xgram_dist.engine.adamw import MOMENTS, build_adamw, create_state, set_rate
from xgram_dist.engine.base import BaseEngine
from xgram_dist.engine.norm import NamedTensors
from xgram_dist.engine.protocol import Piece, StepOutcome
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.parallel.ranks import Ranks


class Part(NamedTuple):
    offsets: tuple[int, ...]
    tensor: Tensor
    """The master weights: a box of the parameter; may be empty."""


class LocalEngine(BaseEngine):
    def __init__(
        self, config: Config, model: nn.Module, mesh: Mesh, device: torch.device, shard: Ranks, parts: dict[str, Part]
    ):
        """`model`'s parameters have the names of `parts`; their gradients, of which `_gradient` gives this rank's
        part, have the shapes of the parts."""
        super().__init__(config, model, mesh, device, shard)
        self.parts = parts
        self.named = dict(model.named_parameters())
        held = {name: part.tensor for name, part in parts.items() if part.tensor.numel()}
        self.adamw = build_adamw(config, held.items())
        create_state(self.adamw, held.values())

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        return parameter.grad

    def _gradients(self) -> NamedTensors:
        found = ((name, self._gradient(parameter)) for name, parameter in self.named.items())
        return [(name, gradient) for name, gradient in found if gradient is not None and gradient.numel()]

    def _finish(self, rate: float, outcome: StepOutcome) -> None:
        if outcome.counted:
            for name, gradient in self._gradients():
                self.parts[name].tensor.grad = gradient
            set_rate(self.adamw, rate)
            self.adamw.step()
        for name, parameter in self.named.items():
            self.parts[name].tensor.grad = parameter.grad = None

    def pieces(self) -> list[Piece]:
        found = []
        for name, part in self.parts.items():
            state = self.adamw.state[part.tensor] if part.tensor.numel() else {}
            weight = [(part.offsets, part.tensor.detach())] if part.tensor.numel() else []
            found.append(self._piece(name, "weight", weight))
            for key, kind in MOMENTS.items():
                found.append(self._piece(name, kind, [(part.offsets, state[key])] if state else []))
        return found
