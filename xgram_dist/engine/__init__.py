"""Backbone engines: how the dense part of the model is sharded over the data axis and updated.

One interface, `Engine` (base.py), and three engines: replicated.py, fsdp2.py (PyTorch's FSDP2) and deepspeed.py
(ZeRO 1 to 3). Tables are outside of the engines; only the gradient norm is joint.
"""

import torch

from xgram_dist.config import Config
from xgram_dist.engine.base import Chunk, Engine, ParameterShard
from xgram_dist.model.transformer import Transformer
from xgram_dist.optim.clip import StepOutcome
from xgram_dist.parallel.mesh import Mesh

__all__ = ["Chunk", "Engine", "ParameterShard", "StepOutcome", "build_engine"]


def build_engine(config: Config, model: Transformer, mesh: Mesh, device: torch.device) -> Engine:
    """`model`: initialised, on `device`, the same on all ranks of the data axis. The engine takes it over: its
    parameters may be replaced by shards."""
    if config.parallel.engine == "deepspeed":
        from xgram_dist.engine.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(config, model, mesh, device)
    if config.parallel.engine == "hsdp":
        from xgram_dist.engine.fsdp2 import Fsdp2Engine

        return Fsdp2Engine(config, model, mesh, device)
    from xgram_dist.engine.replicated import ReplicatedEngine

    return ReplicatedEngine(config, model, mesh, device)
