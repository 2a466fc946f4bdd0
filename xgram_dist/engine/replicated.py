"""The backbone replicated on every rank; gradients are averaged in one all-reduce after the last backward pass.

Parameters are fp32 and are the master weights: layers cast them to the compute dtype.
"""

from typing import Any

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.engine.base import Chunk, LocalEngine
from xgram_dist.model.transformer import Transformer
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.parallel.process_group import ProcessGroup


class ReplicatedEngine(LocalEngine):
    def __init__(self, config: Config, model: Transformer, mesh: Mesh, device: torch.device):
        weights = {name: Chunk((0,) * p.dim(), p) for name, p in model.named_parameters()}
        super().__init__(config, model, mesh, device, ProcessGroup(), weights)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()
        if last:
            self.mesh.data.all_reduce_mean([gradient for _, gradient in self._local_gradients()])

    def after_load(self) -> None:
        self.muon.refresh()
