"""The small runs whose numbers are kept in goldens/. Between them they have every engine, table optimizer, window,
wire, placement and method.

Each is a recipe, as the sections that differ from `BASE`, and a number of ranks. Names say what is run, for people.
"""

import copy
from dataclasses import dataclass
from typing import Any

STEPS = 20
MICRO_BATCHES = 2
"""That a rank takes in a step, of one sequence each."""
BASE: dict[str, Any] = {
    "model": {
        "vocabulary": 320,
        "layers": 2,
        "width": 32,
        "ffn_width": 48,
        "heads": 4,
        "kv_heads": 2,
        "sequence_length": 32,
    },
    "data": {"path": "data"},
    "parallel": {"engine": "replicated"},
    "train": {
        "steps": STEPS,
        "micro_batch": 1,
        "precision": "fp32",
        "log_every": 1,
        "validation_sequences": 8,
    },
}
HASHED: dict[str, Any] = {
    "method": "xgram",
    "compression": 0.5,
    "sites": {"h": {"views": 1, "kernels": [3]}, "v": {"views": 2, "kernels": [3, 5]}},
    "routing": {"vip": 10, "buckets": 4},
    "learning_rate": {"vip_multiplier": 0.7},
}
WHOLE: dict[str, Any] = {
    "method": "xgram",
    "compression": 1.0,
    "sites": {"qk": {"views": 1, "kernels": [2]}, "o": {"views": 2, "kernels": [4], "layers": [1]}},
}
ENGRAM: dict[str, Any] = {
    "method": "engram",
    "compression": 1.0,
    "engram": {"heads": 2, "rows": 200, "width": 32, "taps": 3},
}
BF16 = {"precision": "bf16"}
STAGE_1 = {"engine": "deepspeed", "zero_stage": 1}
STAGE_2 = {"engine": "deepspeed", "zero_stage": 2}
STAGE_3 = {"engine": "deepspeed", "zero_stage": 3}
HSDP = {"engine": "hsdp"}
TENSOR = {"engine": "replicated", "tensor": 2}


@dataclass(frozen=True)
class Configuration:
    ranks: int
    recipe: dict[str, Any]


def _made(
    ranks: int,
    memory: dict[str, Any],
    parallel: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> Configuration:
    """BASE with these sections; keys they name replace its own."""
    recipe = copy.deepcopy(BASE)
    recipe["memory"] = copy.deepcopy(memory)
    recipe["train"]["global_batch"] = MICRO_BATCHES * ranks // (parallel or {}).get("tensor", 1)
    for name, section in {"parallel": parallel or {}, "train": train or {}, **sections}.items():
        recipe[name] = {**recipe.get(name, {}), **section}
    return Configuration(ranks, recipe)


CONFIGURATIONS: dict[str, Configuration] = {
    "vanilla-1": _made(1, {"method": "vanilla"}),
    "vanilla-stage-1-bf16-2": _made(2, {"method": "vanilla"}, STAGE_1, BF16),
    "hashed-dense-1": _made(1, HASHED | {"optimizer": "dense"}, model={"document_masking": True}),
    "hashed-catch-up-host-1": _made(
        1, HASHED | {"optimizer": "catch_up", "placement": "host", "window": 2}, train={"global_batch": 6}
    ),
    "hashed-dense-hsdp-2x2-4": _made(
        4, HASHED | {"optimizer": "dense", "window": 1}, HSDP | {"replicate": 2}, {"activation_checkpointing": True}
    ),
    "hashed-catch-up-clipped-4": _made(4, HASHED | {"optimizer": "catch_up"}, optimizer={"clip_norm": 0.05}),
    "hashed-catch-up-stage-2-budget-bf16-2": _made(
        2, HASHED | {"optimizer": "catch_up", "window": "32KiB", "wire": "bf16"}, STAGE_2, BF16 | {"global_batch": 8}
    ),
    "hashed-catch-up-stage-3-tensor-host-4": _made(
        4, HASHED | {"optimizer": "catch_up", "placement": "host"}, STAGE_3 | {"tensor": 2}
    ),
    "hashed-catch-up-compiled-1": _made(
        1,
        HASHED | {"optimizer": "catch_up", "sites": {"v": {"views": 2, "kernels": [3]}}},
        train={"compile": True},
        model={"layers": 1},
    ),
    "hashed-lazy-stage-1-bf16-2": _made(
        2, HASHED | {"optimizer": "lazy", "window": 2}, STAGE_1, BF16 | {"global_batch": 6}
    ),
    "hashed-adagrad-hsdp-2": _made(2, HASHED | {"optimizer": "adagrad"}, HSDP),
    "hashed-adagrad-tensor-sequence-4": _made(
        4, HASHED | {"optimizer": "adagrad", "window": 1}, TENSOR | {"sequence_parallel": True}
    ),
    "whole-auto-4": _made(4, WHOLE | {"optimizer": "auto"}),
    "whole-catch-up-wire-bf16-2": _made(2, WHOLE | {"optimizer": "catch_up", "wire": "bf16"}, STAGE_3, BF16),
    "whole-dense-host-hsdp-bf16-2": _made(2, WHOLE | {"optimizer": "dense", "placement": "host"}, HSDP, BF16),
    "ple-lazy-stage-1-2": _made(
        2,
        {"method": "ple", "compression": 1.0, "sites": {"h": {"views": 2}, "v": {"views": 1}}, "optimizer": "lazy"},
        STAGE_1,
    ),
    "retoken-catch-up-hsdp-2": _made(
        2,
        {
            "method": "retoken",
            "compression": 1.0,
            "retoken": {"views": 2},
            "learning_rate": {"scales": "tables"},
            "optimizer": "catch_up",
        },
        HSDP,
    ),
    "mort-dense-stage-2-tensor-4": _made(
        4,
        {"method": "mort", "compression": 1.0, "mort": {"views": 3, "balance": 0.05}, "optimizer": "dense"},
        STAGE_2 | {"tensor": 2},
    ),
    "engram-catch-up-2": _made(2, ENGRAM | {"optimizer": "catch_up"}),
    "engram-adagrad-host-budget-1": _made(1, ENGRAM | {"optimizer": "adagrad", "placement": "host", "window": "16KiB"}),
    "stem-catch-up-tensor-2": _made(
        2, {"method": "stem", "compression": 1.0, "stem": {"layers": [1]}, "optimizer": "catch_up"}, TENSOR
    ),
    "mole-stage-3-2": _made(2, {"method": "mole", "mole": {"experts": 3, "width": 8}}, STAGE_3),
    "scone-bf16-2": _made(2, {"method": "scone", "scone": {"grams": 60, "longest": 3, "layers": 1}}, None, BF16),
}
