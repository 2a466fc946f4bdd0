"""A model small enough to train in a second, on a data set that the real `prepare` made."""

import json
import random
from pathlib import Path
from typing import Any

from torch import Tensor

from xgram_dist.checkpoint.folder import checkpoints_at
from xgram_dist.checkpoint.reader import CheckpointReader
from xgram_dist.config import Config, build_config
from xgram_dist.optim.clip import StepOutcome
from xgram_dist.train.step import JointOptimizer

VOCABULARY, LAYERS, WIDTH, FFN, KV_WIDTH, LENGTH = 320, 2, 32, 48, 16, 32
ROWS = 160
VIEWS = 2
WORDS = ["the", "of", "table", "row", "token", "vector", "gradient", "rank", "step", "while", "return", "état", "数据"]


def make_documents(count: int) -> list[str]:
    chooser = random.Random(5)
    return [" ".join(chooser.choices(WORDS, k=chooser.randint(20, 80))) for _ in range(count)]


def small_tree(data: Path, method: str = "xgram") -> dict[str, Any]:
    memory: dict[str, Any] = {"method": method}
    if method == "xgram":
        memory |= {
            "compression": 0.5,
            "sites": {"v": {"views": VIEWS, "kernels": [3, 5]}},
            "routing": {"vip": 10, "buckets": 4},
        }
    return {
        "name": f"small-{method}",
        "model": {
            "vocabulary": VOCABULARY,
            "layers": LAYERS,
            "width": WIDTH,
            "ffn_width": FFN,
            "heads": 4,
            "kv_heads": 2,
            "sequence_length": LENGTH,
        },
        "memory": memory,
        "data": {"path": str(data)},
        "parallel": {"engine": "replicated"},
        "train": {
            "steps": 4,
            "global_batch": 8,
            "micro_batch": 4,
            "precision": "fp32",
            "log_every": 1,
            "validation_sequences": 8,
        },
    }


def small_config(data: Path, method: str = "xgram", /, **sections: dict[str, Any]) -> Config:
    """`small_config(data, "vanilla", train={"steps": 2})`"""
    tree = small_tree(data, method)
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    return build_config(tree)


def read_metrics(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    records = [json.loads(line, parse_constant=_refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if kind in (None, record["kind"])]


def saved_weights(run: Path) -> dict[str, Tensor]:
    """Of a run's newest checkpoint: backbone, and tables in the order of their rows."""
    weights = CheckpointReader(checkpoints_at(run)[-1])
    return {name: weights.weight(name) for name in weights.weight_shapes()}


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def apply_step(optimizer: JointOptimizer, step: int, loss: Tensor) -> StepOutcome:
    """Clip and update, as `train_step` does after the last backward pass."""
    outcome = optimizer.clip(loss)
    optimizer.update_tables(step, outcome)
    optimizer.update_backbone(step, outcome)
    return outcome
