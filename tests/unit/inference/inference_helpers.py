"""Checkpoints of small models, made by the real trainer."""

from pathlib import Path
from typing import Any

import torch
from train_helpers import small_config

from xgram_dist.config import Config
from xgram_dist.optim.schedule import warmup_factor
from xgram_dist.train.trainer import Trainer

SITES: dict[str, dict[str, Any]] = {
    "v": {"v": {"views": 2, "kernels": [3, 5]}},
    "all": {
        "h": {"views": 2, "kernels": [4]},
        "q": {"views": 1, "kernels": [2], "layers": [1]},
        "k": {"views": 1, "kernels": [1]},
        "v": {"views": 3, "kernels": [3, 5]},
        "o": {"views": 1, "kernels": [3]},
    },
    "qk": {"qk": {"views": 2, "kernels": [3, 2]}},
}


def recipe(data: Path, sites: str = "v", **sections: dict[str, Any]) -> Config:
    """Few steps and large ones, so that nothing is left at its initial value."""
    memory = {
        "method": "xgram",
        "compression": 0.5,
        "sites": SITES[sites],
        "routing": {"vip": 10, "buckets": 4},
        **sections.pop("memory", {}),
    }
    train = {
        "steps": 4,
        "global_batch": 4,
        "micro_batch": 1,
        "precision": "fp32",
        "validation_sequences": 4,
        **sections.pop("train", {}),
    }
    optimizer = {"learning_rate": 0.02, "warmup_share": 0.0, **sections.pop("optimizer", {})}
    return small_config(data, memory=memory, train=train, optimizer=optimizer, **sections)


def trained(config: Config, folder: Path) -> Trainer:
    """The trainer after its run, its checkpoint in `folder`."""
    trainer = Trainer(config, folder, fresh=False)
    assert trainer.run() == 0
    return trainer


@torch.no_grad()
def training_logits(trainer: Trainer, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Of the training model itself, with its own tables."""
    model, lookup = trainer.engine.model, trainer.lookup
    window = lookup.planner.plan(tokens_BT, whole=True)[0]  # type: ignore[attr-defined]
    working = lookup.fetch(window, training=False)
    warmup = torch.tensor(warmup_factor(trainer.config, trainer.config.train.steps), dtype=torch.float64)
    return model(tokens_BT, working.slots, working.values, warmup) @ model.head.weight.T


def some_tokens(config: Config, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 300, shape, generator=torch.Generator().manual_seed(seed))
