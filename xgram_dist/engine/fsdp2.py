"""The backbone under PyTorch's FSDP2, over replicate x shard (`parallel.engine = hsdp`).

Each block, the head, and the rest are FSDP units. A rank keeps its shard of the fp32 master weights and of AdamW's
moments. Parameters are all-gathered around their use, in the compute dtype; gradients are reduce-scattered in fp32
after the last micro-batch. With `parallel.replicate = 1` this is plain FSDP over the whole data axis.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from xgram_dist.config import Config
from xgram_dist.engine.base import Chunk, LocalEngine
from xgram_dist.model.transformer import Transformer
from xgram_dist.parallel.mesh import EngineGroups, Mesh, build_device_mesh
from xgram_dist.parallel.tensor_parallel import tensor_dims


class Fsdp2Engine(LocalEngine):
    def __init__(self, config: Config, model: Transformer, mesh: Mesh, device: torch.device):
        self.groups = EngineGroups(device)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        dims = tensor_dims(model)
        self.units = _apply_fsdp(config, model, build_device_mesh(mesh, self.groups, device))
        parameters = dict(model.named_parameters())
        for name, dim in dims.items():  # fully_shard replaces parameters, and with them their marks
            parameters[name].tensor_dim = dim  # type: ignore[attr-defined]
        weights = {name: _local_chunk(parameters[name], shape, mesh) for name, shape in shapes.items()}
        super().__init__(config, model, mesh, device, mesh.shard, weights)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.model(*args, **kwargs)
        if not torch.is_grad_enabled():
            self._reshard()  # which else the backward pass does
        return outputs

    def backward(self, loss: Tensor, *, last: bool) -> None:
        root = self.units[-1]
        root.set_requires_gradient_sync(last)
        root.set_is_last_backward(last)
        loss.backward()

    def after_load(self) -> None:
        self._reshard()
        self.muon.refresh()

    def close(self) -> None:
        self.groups.close()

    def _local_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        gradient = parameter.grad
        return gradient.to_local() if isinstance(gradient, DTensor) else None

    def _reshard(self) -> None:
        for unit in self.units:
            unit.reshard()


def _apply_fsdp(config: Config, model: Transformer, mesh: DeviceMesh) -> list[FSDPModule]:
    """Returns the units, the root last."""
    bf16 = config.train.precision == "bf16"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the working set stays fp32
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=config.parallel.reshard, mp_policy=policy)
    ends = (model,) if model.head is None else (model.head, model)
    for module in ends:  # the backward pass begins with these: resharding them would be for nothing
        fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    units = [module for module in (*model.blocks, *ends) if isinstance(module, FSDPModule)]
    assert len(units) == len(model.blocks) + len(ends)
    return units


@torch.no_grad()
def _local_chunk(parameter: nn.Parameter, shape: tuple[int, ...], mesh: Mesh) -> Chunk:
    """FSDP2 shards the first dimension in equal chunks; the last ones are shorter or empty."""
    assert isinstance(parameter, DTensor)
    rows = -(-shape[0] // mesh.shard.size)
    start = min(mesh.shard.rank * rows, shape[0])
    local = parameter.to_local().detach()
    assert local.shape == (min(rows, shape[0] - start), *shape[1:])
    return Chunk((start, *(0 for _ in shape[1:])), local)
