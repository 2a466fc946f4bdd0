"""From a recipe to the things that are trained: tables, network, optimizer.

The order of application a reader can follow: tensor parallel -> initialise -> activation checkpointing (in the model)
-> compile -> engine (engine/build.py).
"""

import torch

from xgram_dist.config import Config
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.memory.tables import Tables
from xgram_dist.memory.working_set import Lookup, NoTables
from xgram_dist.model.initial import initialise
from xgram_dist.model.transformer import Transformer
from xgram_dist.parallel.device import DTYPES
from xgram_dist.parallel.mesh import Mesh
from xgram_dist.parallel.ranks import Ranks


def build_model(
    config: Config, device: torch.device, end_of_text: int | None = None, tensor: Ranks | None = None
) -> Transformer:
    model = Transformer(config, DTYPES[config.train.precision], end_of_text, tensor)
    initialise(model, config)
    model.to(device)
    if config.train.compile:
        for block in model.blocks:
            block.compile(dynamic=None)
    return model


def build_lookup(config: Config, routing: Routing | None, device: torch.device, mesh: Mesh | None = None) -> Lookup:
    if config.memory.method == "vanilla":
        return NoTables(device)
    return Tables(config, routing, device, mesh)
