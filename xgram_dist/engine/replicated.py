"""The backbone whole on every rank; gradients are averaged in one all-reduce after the last backward pass.

Parameters are fp32 and are the master weights: the model casts them where it uses them.
"""

from typing import Any

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.engine.local import LocalEngine, Part
from xgram_dist.model.transformer import Transformer
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.parallel.ranks import Ranks


class ReplicatedEngine(LocalEngine):
    def __init__(self, config: Config, model: Transformer, mesh: Mesh, device: torch.device):
        parts = {name: Part((0,) * p.dim(), p) for name, p in model.named_parameters()}
        super().__init__(config, model, mesh, device, Ranks(), parts)
        self.transformer = model

    def loss(self, *args: Any) -> tuple[Tensor, Tensor]:
        return self.transformer.loss(*args)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()
        if last:
            self.mesh.data.all_reduce_mean([gradient for _, gradient in self._gradients()])

    def loaded(self) -> None:
        return
