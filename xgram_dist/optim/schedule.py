"""Learning rates and warm-up as pure functions of the step.

Steps count from 1: the first update is step 1, the last is `train.steps`.
"""

import math

from xgram_dist.config import Config
from xgram_dist.model.methods.base import method_of
from xgram_dist.tables.optimizers.build import TableRates, table_multipliers


def warmup_steps(config: Config) -> int:
    return round(config.optimizer.warmup_share * config.train.steps)


def warmup_factor(config: Config, step: int) -> float:
    """min(1, step / warm-up steps)."""
    steps = warmup_steps(config)
    return 1.0 if steps == 0 else min(1.0, step / steps)


def learning_rate(config: Config, step: int) -> float:
    """Of the backbone: linear to the peak over the warm-up, then as `optimizer.schedule` says."""
    optimizer, warmup = config.optimizer, warmup_steps(config)
    if step <= warmup:
        return optimizer.learning_rate * warmup_factor(config, step)
    progress = min(1.0, (step - warmup) / max(1, config.train.steps - warmup))
    if optimizer.schedule == "constant":
        above = 1.0
    elif optimizer.schedule == "cosine":
        above = 0.5 * (1 + math.cos(math.pi * progress))
    elif optimizer.schedule == "linear":
        above = 1 - progress
    else:
        steps = config.train.steps
        above = min(1.0, (steps - step) / max(1, round(optimizer.decay_share * steps)))
    return optimizer.learning_rate * (optimizer.final_share + (1 - optimizer.final_share) * above)


def table_rates(config: Config, step: int, num_rows: int) -> TableRates:
    """Learning rates of the tables. Row gates learn at the backbone's rate."""
    base = learning_rate(config, step)
    warm = warmup_factor(config, step) if config.memory.learning_rate.warmup else 1.0
    vip, body = table_multipliers(config, num_rows)
    return TableRates(base * vip * warm, base * body * warm, base)


def scale_multiplier(config: Config, name: str) -> float:
    """Of the backbone's parameter `name`. Zero-initialised scales, through which a method's tables reach the network,
    learn at the tables' rate with `memory.learning_rate.scales = tables`; all else learns at the backbone's."""
    if config.memory.learning_rate.scales == "tables" and method_of(config).is_table_scale(name):
        return table_multipliers(config, config.model.vocabulary)[1]
    return 1.0
