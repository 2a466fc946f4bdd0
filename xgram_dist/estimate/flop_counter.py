"""A cross-check of the added-FLOPs formulas with torch's flop counter, on a small model of the same method.

The small model has the recipe's views, kernels, heads and experts, and a small backbone. torch counts matrix products;
an elementwise product or sum counts one for each element. Table vectors are inputs: side networks, which are tables at
inference, do not count. The method's share is the difference to a vanilla model of the same size.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from xgram_dist.config import Config, build_config
from xgram_dist.estimate.flops import plan_budget
from xgram_dist.inference.hf.decoder import Decoder
from xgram_dist.inference.model import spec_of
from xgram_dist.model.methods.base import method_class, method_of, table_layout

SMALL_MODEL = {
    "vocabulary": 512,
    "layers": 2,
    "width": 256,
    "ffn_width": 683,
    "heads": 4,
    "kv_heads": 2,
    "sequence_length": 64,
}


@dataclass(frozen=True)
class FlopCheck:
    """FLOPs a token that the method adds to the small model."""

    formula: int
    counted: float
    """By torch."""

    @property
    def difference(self) -> float:
        return self.counted / self.formula - 1 if self.formula else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "difference": self.difference}


def check_flops(config: Config) -> FlopCheck:
    small, vanilla = _small_config(config, config.memory.method), _small_config(config, "vanilla")
    added = (_count_forward(small) - _count_forward(vanilla)) / small.model.sequence_length
    return FlopCheck(plan_budget(small).extra_flops_per_token, added + _retrieval_flops(small))


def _small_config(config: Config, method: str) -> Config:
    memory = config.memory.model_dump(mode="json")
    memory["method"] = method
    sections = [section for section in memory.values() if isinstance(section, dict)]
    for settings in (*memory["sites"].values(), *sections):
        if "layers" in settings and not isinstance(settings["layers"], int):
            settings["layers"] = "all"
    for section, keys in method_class(method).reduced_settings.items():
        memory[section] |= keys
    train = {"global_batch": 1, "micro_batch": 1, "precision": "fp32"}
    return build_config({"name": "small", "model": SMALL_MODEL, "memory": memory, "train": train})


def _retrieval_flops(config: Config) -> int:
    """At the owner of the rows, outside the network: for hashed tokens, the weighted sum of K rows."""
    rows, layout = 1 + config.memory.routing.copies, table_layout(config)
    return (2 * rows - 1) * layout.width if layout.hashed else 0


@torch.no_grad()
def _count_forward(config: Config) -> int:
    """FLOPs of the forward pass of one sequence."""
    torch.manual_seed(0)
    decoder, method = Decoder(spec_of(config, config.train.steps, 0)), method_of(config)
    tokens = torch.arange(config.model.sequence_length)[None]
    values = {name: torch.randn(len(tokens[0]), width) for name, width in method.decoder_tables().items()}
    slots = tokens
    if method.num_ngram_keys:
        slots = tokens[..., None].expand(-1, -1, method.num_ngram_keys)
    aten = torch.ops.aten
    formulas: dict[Any, Any] = {aten.mul: _numel, aten.add: _numel, aten.addcmul: _twice_numel}
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter, sdpa_kernel(SDPBackend.MATH):
        decoder.logits(decoder(tokens, slots, values))
    return int(counter.get_total_flops())


def _numel(*_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(torch.Size(out_shape).numel())


def _twice_numel(*_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * int(torch.Size(out_shape).numel())
