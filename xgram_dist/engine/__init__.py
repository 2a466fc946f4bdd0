"""Backbone engines: how the dense part of the model is spread over ranks and updated.

One interface (protocol.py), three ways: whole on every rank (replicated.py), PyTorch's FSDP2 (hsdp.py), DeepSpeed's
ZeRO (deepspeed.py). Tables are none of their business but for the gradient norm, which is joint.
"""

from xgram_dist.engine.build import build_engine
from xgram_dist.engine.protocol import Engine, Piece, StepOutcome

__all__ = ["Engine", "Piece", "StepOutcome", "build_engine"]
