"""The engine a recipe asks for."""

import torch

from xgram_dist.config import Config
from xgram_dist.engine.protocol import Engine
from xgram_dist.model.transformer import Transformer
from xgram_dist.parallel.mesh import Mesh


def build_engine(config: Config, model: Transformer, mesh: Mesh, device: torch.device) -> Engine:
    """`model`: initialised, on `device`, alike on all ranks of the data axis; from here on it is the engine's."""
    if config.parallel.engine == "deepspeed":
        from xgram_dist.engine.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(config, model, mesh, device)
    if config.parallel.engine == "hsdp":
        from xgram_dist.engine.hsdp import HsdpEngine

        return HsdpEngine(config, model, mesh, device)
    from xgram_dist.engine.replicated import ReplicatedEngine

    return ReplicatedEngine(config, model, mesh, device)
