"""From a recipe to the network and its tables.

`build_model` applies, in this order:

    1. pipeline, tensor axes       this rank's layers are built, with its shards
    2. initial weights             whole parameters are drawn, each rank keeps its slice
    3. activation checkpointing    around each block
    4. torch.compile               of each block, inside of its checkpoint; on a GPU, of the passes over the logits
    5. the engine                  shards parameters over the data axis: `build_engine` (engine/), which takes the model

Each step sees what the former left: compiled blocks hold the tensor axis' collectives, and the engine's hooks stay
outside of the compiled graphs.
"""

import torch
from torch import nn

from xgram_dist.config import Config
from xgram_dist.model.loss import CompiledPasses
from xgram_dist.model.methods.base import Keys, check_method, method_of
from xgram_dist.model.pipeline_stages import layers_of, stages_of_rank
from xgram_dist.model.transformer import Transformer
from xgram_dist.parallel.context_parallel import context_axis
from xgram_dist.parallel.device import DTYPES, fuses_loss_passes, recompute_elementwise
from xgram_dist.parallel.mesh import Mesh, single_mesh
from xgram_dist.parallel.tensor_parallel import global_shape_and_offset, tensor_axis, tensor_dim, tensor_slice
from xgram_dist.tables.initial_rows import CUT, stream_key
from xgram_dist.tables.routing import Routing
from xgram_dist.tables.working_set import Lookup


def build_model(
    config: Config, device: torch.device, end_of_text: int | None = None, mesh: Mesh | None = None
) -> Transformer:
    """`end_of_text`: the token that ends a document. `mesh`: its tensor axis shards the layers, its context axis the
    sequences, and of its pipeline axis this rank's stages are built."""
    check_method(config)
    mesh = mesh or single_mesh()
    axis = tensor_axis(mesh.tensor, config.parallel.sequence_parallel)
    sequence, stages = context_axis(mesh.context, method_of(config).reach), stages_of_rank(config, mesh.pipeline)
    model = Transformer(config, DTYPES[config.train.precision], end_of_text, axis, sequence, stages)
    initialise(model, config)
    model.to(device)
    if config.train.freeze_backbone:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(of_method(name))
    model.activation_checkpointing = config.train.activation_checkpointing
    if config.train.compile:
        recompute_elementwise(device)
        for block in model.blocks:
            block.compile(dynamic=None)
        if fuses_loss_passes(device) and model.head is not None:
            model.head.passes = CompiledPasses()
    return model


def of_method(name: str) -> bool:
    """Whether a parameter of the network is the memory method's."""
    return ".sites." in name or name.startswith("side.")


def initialise(model: Transformer, config: Config) -> None:
    """Fills every parameter in place: a truncated normal for matrices, 1 for vectors, or what the method wants.

    Each parameter is seeded by its own name. So a backbone starts the same whatever tables are trained beside it, and
    however it is sharded: a rank of the tensor axis draws the whole parameter and keeps its slice."""
    method, std = method_of(config), config.model.init_std
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(stream_key(config.train.seed, name) & (2**63 - 1))
        # Drawn on the CPU, for the same numbers on every device.
        value = torch.empty(global_shape_and_offset(parameter, model.axis)[0])
        if not method.initialise(name, value, generator):
            if parameter.dim() < 2:  # norm scales and injection gains
                value.fill_(1.0)
            else:
                nn.init.trunc_normal_(value, 0.0, std, -CUT * std, CUT * std, generator=generator)
        with torch.no_grad():
            parameter.copy_(tensor_slice(value, tensor_dim(parameter), model.axis))


def build_lookup(
    config: Config,
    routing: Routing | None,
    device: torch.device,
    mesh: Mesh | None = None,
    keys: Keys | None = None,
    end_of_text: int | None = None,
    optimizer: str | None = None,
) -> Lookup:
    """`keys`: of the methods that look up n-grams. `end_of_text`: the token that ends a document.
    `optimizer`: the kind of table optimizer (tables/optimizers/build.py); by default what the recipe says."""
    held = None if mesh is None else layers_of(stages_of_rank(config, mesh.pipeline))
    return method_of(config, held).build_lookup(routing, device, mesh, keys, end_of_text, optimizer)
