"""PyTorch's FSDP2 over replicate x shard: each block, the head, and the rest are units, cut over the shard axis.

A rank keeps its share of the fp32 master weights and of AdamW's moments; parameters are gathered around their use, in
bf16 when the run is, and gradients are reduced in fp32 after the last micro-batch. With replicate = 1 this is plain
FSDP over the whole data axis.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from xgram_dist.config import Config
from xgram_dist.engine.groups import Groups
from xgram_dist.engine.local import LocalEngine, Part
from xgram_dist.model.transformer import Transformer
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.parallel.tensor import tensor_dims


class HsdpEngine(LocalEngine):
    def __init__(self, config: Config, model: Transformer, mesh: Mesh, device: torch.device):
        self.groups = Groups(device)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        cut = tensor_dims(model)
        self.units = _shard(config, model, _device_mesh(mesh, self.groups, device))
        named = dict(model.named_parameters())
        for name, dim in cut.items():  # sharding made new parameters
            named[name].tensor_dim = dim  # type: ignore[attr-defined]
        parts = {name: _local_part(named[name], shape, mesh) for name, shape in shapes.items()}
        super().__init__(config, model, mesh, device, mesh.shard, parts)

    def loss(self, *args: Any) -> tuple[Tensor, Tensor]:
        loss, entropy = self.model(*args, with_loss=True)
        if not torch.is_grad_enabled():
            self._release()  # no backward pass will
        return loss, entropy

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.units[-1].set_requires_gradient_sync(last)
        self.units[-1].set_is_last_backward(last)
        loss.backward()

    def loaded(self) -> None:
        self._release()

    def close(self) -> None:
        self.groups.close()

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        gradient = parameter.grad
        return gradient.to_local() if isinstance(gradient, DTensor) else None

    def _release(self) -> None:
        for unit in self.units:
            unit.reshard()


def _device_mesh(mesh: Mesh, groups: Groups, device: torch.device) -> DeviceMesh:
    shard = groups.of(mesh.shard)
    if not mesh.split:
        return DeviceMesh.from_group(shard, device.type, mesh_dim_names=("shard",))
    ranks = torch.tensor(dist.get_process_group_ranks(groups.of(mesh.data)))
    return DeviceMesh.from_group(
        [groups.of(mesh.replicate), shard],
        device.type,
        mesh=ranks.view(mesh.replicate.size, mesh.shard.size),
        mesh_dim_names=("replicate", "shard"),
    )


def _shard(config: Config, model: Transformer, mesh: DeviceMesh) -> list[FSDPModule]:
    """The units, the root last."""
    bf16 = config.train.precision == "bf16"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the working set stays fp32
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=config.parallel.reshard, mp_policy=policy)
    for last in (model.head, model):  # the backward pass begins where these end
        fully_shard(last, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    units = [module for module in (*model.blocks, model.head, model) if isinstance(module, FSDPModule)]
    assert len(units) == len(model.blocks) + 2
    return units


@torch.no_grad()
def _local_part(parameter: nn.Parameter, shape: tuple[int, ...], mesh: Mesh) -> Part:
    """This rank's rows: equal chunks of the first dimension, the last ones shorter or empty."""
    assert isinstance(parameter, DTensor)
    rows = -(-shape[0] // mesh.shard.size)
    start = min(mesh.shard.rank * rows, shape[0])
    local = parameter.to_local().detach()
    assert local.shape == (min(rows, shape[0] - start), *shape[1:])
    return Part((start, *(0 for _ in shape[1:])), local)
