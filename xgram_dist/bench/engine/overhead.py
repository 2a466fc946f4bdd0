"""What the engines cost: our training step against a bare loop around the same model with the same library.

The tiny vanilla model, random tokens, for DeepSpeed's ZeRO stage 1 and for FSDP2.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from xgram_dist.bench.engine.turns import (
    CPU,
    ENGINES,
    WARM,
    Measured,
    Ours,
    Side,
    shard_backbone,
    take_turns,
    tiny_backbone,
)
from xgram_dist.config import Config, build_config
from xgram_dist.engine.adamw import build_adamw
from xgram_dist.engine.deepspeed import import_deepspeed
from xgram_dist.engine.deepspeed_config import deepspeed_config
from xgram_dist.model.build import build_model
from xgram_dist.optim.schedule import learning_rate
from xgram_dist.parallel.ranks import Ranks


def vanilla_config(parallel: dict[str, Any], ranks: int) -> Config:
    """The tiny recipe's; its global batch of 16 is that of two ranks."""
    return build_config(
        {
            "name": "bench-engine",
            "model": {**tiny_backbone(4096), "sequence_length": 256},
            "memory": {"method": "vanilla"},
            "optimizer": {"learning_rate": 2e-3},
            "parallel": parallel,
            "train": {"global_batch": 8 * ranks, "micro_batch": 8, "precision": "fp32"},
        }
    )


class BareDeepSpeed:
    """DeepSpeed as its documentation has it, with our settings but for clipping and averaging, which are its own."""

    def __init__(self, config: Config, ranks: Ranks):
        settings = deepspeed_config(config, ranks.size)
        settings |= {"gradient_clipping": config.optimizer.clip_norm, "gradient_allreduce_op": "mean"}
        model = build_model(config, CPU)
        self.config, self.arguments = config, _no_tables(config)
        self.adamw = build_adamw(config, model.named_parameters())
        self.engine, *_ = import_deepspeed(CPU).initialize(
            model=model, optimizer=self.adamw, config=settings, dist_init_required=False
        )

    def step(self, number: int, tokens_ABT: Tensor, next_ABT: Tensor) -> Tensor:
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate(self.config, number)
        for tokens_BT in tokens_ABT:
            loss, _ = self.engine(tokens_BT, *self.arguments, with_loss=True)
            self.engine.backward(loss)
            self.engine.step()
        return loss.detach()

    def close(self) -> None:
        self.engine.destroy()


class BareFsdp:
    """FSDP2 as its documentation has it: units like ours, one AdamW."""

    def __init__(self, config: Config, ranks: Ranks):
        self.config, self.arguments = config, _no_tables(config)
        self.model = build_model(config, CPU)
        shard_backbone(self.model)
        fully_shard(self.model, reshard_after_forward=False)
        self.adamw = build_adamw(config, self.model.named_parameters())

    def step(self, number: int, tokens_ABT: Tensor, next_ABT: Tensor) -> Tensor:
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate(self.config, number)
        for tokens_BT in tokens_ABT:  # one, so that gradients are always those of the step
            loss, _ = self.model(tokens_BT, *self.arguments, with_loss=True)
            (loss / len(tokens_ABT)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_norm)
        self.adamw.step()
        self.adamw.zero_grad()
        return loss.detach()

    def close(self) -> None:
        return


BARE: dict[str, Callable[[Config, Ranks], Side]] = {"deepspeed_stage_1": BareDeepSpeed, "hsdp": BareFsdp}


def _no_tables(config: Config) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """What the model wants beside tokens: slots, values, warm-up."""
    slots = torch.zeros(config.train.micro_batch, config.model.sequence_length, dtype=torch.int64)
    return slots, {}, torch.ones((), dtype=torch.float64)


def overhead_round(ranks: Ranks, engine: str, steps: int) -> dict[str, Any]:
    config = vanilla_config(ENGINES[engine], ranks.size)
    random = torch.Generator().manual_seed(ranks.rank)
    shape = (WARM + steps, 1, config.train.micro_batch, config.model.sequence_length)
    tokens = torch.randint(config.model.vocabulary, shape, generator=random)
    return take_turns(ranks, {"ours": Ours(config, ranks), "bare": BARE[engine](config, ranks)}, tokens)


def overhead_figures(found: Measured) -> dict[str, Any]:
    ratios = found.ratios("ours", "bare")
    return {
        "ours_ms": found.ms("ours"),
        "bare_ms": found.ms("bare"),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "ratio_of_fastest": round(found.fastest["ours"] / found.fastest["bare"], 3),
        "loss_difference": found.loss_difference,
    }
