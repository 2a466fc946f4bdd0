"""Initial weights: truncated normal, each parameter seeded by its own name.

So a backbone starts the same whatever tables stand beside it, and however it is spread over ranks: a rank of a tensor
axis draws the whole parameter and keeps its part.
"""

import torch
from torch import nn

from xgram_dist.config import Config
from xgram_dist.memory.initial import CUT, stream_key
from xgram_dist.model.transformer import Transformer
from xgram_dist.parallel.tensor import global_shape_and_offset, tensor_dim, tensor_slice


def initialise(model: Transformer, config: Config) -> None:
    """Fill every parameter in place."""
    std = config.model.init_std
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        generator = torch.Generator().manual_seed(stream_key(config.train.seed, name) & (2**63 - 1))
        # Drawn on the CPU: the same numbers whatever the device.
        value = torch.empty(global_shape_and_offset(parameter, model.axis)[0])
        if ".extractors." in name:
            if leaf == "content":
                value.zero_()[0] = 1.0  # identity: tap 0 is the current position
            elif leaf == "gate":
                value.normal_(0.0, 0.02, generator=generator)
            else:
                assert leaf == "gate_bias", name
                value.fill_(1.0)
        elif leaf == "kernel" or leaf.startswith("scale"):
            # Engram's convolution: its branch starts as the identity, y itself. Retoken's and MoRT's: nothing at first.
            value.zero_()
        elif leaf == "router_bias":
            value.fill_(-2.0)
        elif parameter.dim() < 2:  # norm scales and injection gains
            value.fill_(1.0)
        else:
            nn.init.trunc_normal_(value, 0.0, std, -CUT * std, CUT * std, generator=generator)
        with torch.no_grad():
            parameter.copy_(tensor_slice(value, tensor_dim(parameter), model.axis))
