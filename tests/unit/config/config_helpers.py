"""A small valid recipe, as a tree, to be changed by the tests."""

from pathlib import Path
from typing import Any

import yaml

RECIPES = Path(__file__).resolve().parents[3] / "recipes"


def small_tree() -> dict[str, Any]:
    return {
        "name": "small",
        "model": {
            "vocabulary": 1000,
            "layers": 4,
            "width": 64,
            "ffn_width": 96,
            "heads": 4,
            "kv_heads": 2,
            "sequence_length": 32,
        },
        "memory": {
            "method": "xgram",
            "compression": 0.5,
            "sites": {"v": {"views": 2, "kernels": [3, 5]}},
            "routing": {"vip": 20, "buckets": 8},
        },
        "train": {"global_batch": 16, "micro_batch": 4},
    }


def write_recipe(path: Path, tree: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path
