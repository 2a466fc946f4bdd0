"""The formulas of `flops.py` against what torch's flop counter sees in a small model of the same kind.

The twin has the recipe's method with its views, kernels, heads and experts, and a small backbone. Matrix products are
counted by torch, and beside them one for each element of a product or a sum of tensors. What tables give is looked up:
side networks, which are tables at inference, do not count. The backbone's own share is what a vanilla twin shows.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from xgram_dist.config import Config, build_config
from xgram_dist.inference.decoder import Decoder
from xgram_dist.inference.spec import spec_of
from xgram_dist.memory.layout import plan_tables
from xgram_dist.plan.budget import plan_budget

MODEL = {
    "vocabulary": 512,
    "layers": 2,
    "width": 256,
    "ffn_width": 683,
    "heads": 4,
    "kv_heads": 2,
    "sequence_length": 64,
}


@dataclass(frozen=True)
class Twin:
    formula: int
    """FLOPs a token that the method adds, in the small model."""
    counted: float

    @property
    def difference(self) -> float:
        return self.counted / self.formula - 1 if self.formula else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "difference": self.difference}


def twin_of(config: Config, method: str) -> Config:
    """A small model of the recipe's kind, or its vanilla backbone."""
    memory = config.memory.model_dump(mode="json")
    memory["method"] = method
    for site in (*memory["sites"].values(), *(memory[name] for name in ("retoken", "mort", "stem", "engram", "mole"))):
        site["layers"] = "all"
    small: dict[str, dict[str, Any]] = {
        "engram": {"engram": {"rows": 64, "width": None}},
        "mole": {"mole": {"width": None}},
        "xgram": {"routing": {"vip": 4, "buckets": 4, "file": None}},
    }
    for section, keys in small.get(method, {}).items():
        memory[section] |= keys
    train = {"global_batch": 1, "micro_batch": 1, "precision": "fp32"}
    return build_config({"name": "twin", "model": MODEL, "memory": memory, "train": train})


def count_twin(config: Config) -> Twin:
    twin, vanilla = twin_of(config, config.memory.method), twin_of(config, "vanilla")
    added = (_counted(twin) - _counted(vanilla)) / twin.model.sequence_length
    return Twin(plan_budget(twin).extra_flops_per_token, added + _retrieval(twin))


def _retrieval(config: Config) -> int:
    """At the owner of the rows, before the network: where tokens are hashed, the sum of K weighed rows."""
    rows = 1 + config.memory.routing.copies
    return (2 * rows - 1) * sum(table.width for table in plan_tables(config)) if config.memory.compression < 1 else 0


@torch.no_grad()
def _counted(config: Config) -> int:
    torch.manual_seed(0)
    spec = spec_of(config, config.train.steps, 0)
    decoder = Decoder(spec)
    tokens = torch.arange(config.model.sequence_length)[None]
    values = {table.name: torch.randn(len(tokens[0]), table.width) for table in plan_tables(config)}
    slots = tokens
    own = spec.own
    if own is not None and own.hashing is not None:
        keys = len(own.layers) * sum(len(of_order) for of_order in own.hashing.rows)
        slots = tokens[..., None].expand(-1, -1, keys)
    if own is not None and own.site == "experts":
        names = [f"layers.{layer}.experts.{view}" for layer in own.layers for view in range(own.views)]
        values = {name: torch.randn(len(tokens[0]), config.model.width) for name in names}
    if own is not None and own.site == "input":
        values = {"layers.all.input.0": torch.randn(len(tokens[0]), config.model.width)}

    def elements(*_: Any, out_shape: Any = None, **__: Any) -> int:
        return int(torch.Size(out_shape).numel())

    aten = torch.ops.aten
    mapping: dict[Any, Any] = {
        aten.mul: elements,
        aten.add: elements,
        aten.addcmul: lambda *a, **k: 2 * elements(*a, **k),
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter, sdpa_kernel(SDPBackend.MATH):
        decoder.logits(decoder(tokens, slots, values))
    return int(counter.get_total_flops())


def _elements(*_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(torch.Size(out_shape).numel())


def _twice_elements(*_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * int(torch.Size(out_shape).numel())
