"""Learning rate and warm-up as pure functions of the step.

Steps count from 1: the first update is step 1, the last is `train.steps`.
"""

import math

from xgram_dist.config import Config
from xgram_dist.config.schema import TableLearningRate


def warmup_steps(config: Config) -> int:
    return round(config.optimizer.warmup_share * config.train.steps)


def warmup_factor(config: Config, step: int) -> float:
    """w(u) = min(1, u / warm-up steps)."""
    steps = warmup_steps(config)
    return 1.0 if steps == 0 else min(1.0, step / steps)


def learning_rate(config: Config, step: int) -> float:
    """Linear to the peak over the warm-up, then a cosine to `final_share` of the peak at the last step."""
    optimizer, warm = config.optimizer, warmup_steps(config)
    if step <= warm:
        return optimizer.learning_rate * warmup_factor(config, step)
    progress = (step - warm) / max(1, config.train.steps - warm)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return optimizer.learning_rate * (optimizer.final_share + (1 - optimizer.final_share) * cosine)


def table_multipliers(config: Config, num_rows: int) -> tuple[float, float]:
    """(VIP rows, hashed and aliased rows): how much larger than the backbone's their learning rate is."""
    settings: TableLearningRate = config.memory.learning_rate
    if settings.multiplier == "sqrt_vocabulary":
        body = math.sqrt(config.model.vocabulary / config.model.width)
    elif settings.multiplier == "sqrt_rows":
        body = math.sqrt(num_rows / config.model.width)
    else:
        body = float(settings.multiplier)
    vip = body if settings.vip_multiplier is None else settings.vip_multiplier
    return _capped(vip, settings.vip_cap), _capped(body, settings.cap)


def opening_multiplier(config: Config, name: str) -> float:
    """How much larger than the backbone's the learning rate of the backbone's parameter `name` is."""
    if config.memory.learning_rate.scales == "tables" and name.rsplit(".", 1)[-1].startswith("scale"):
        return table_multipliers(config, config.model.vocabulary)[1]
    return 1.0


def _capped(value: float, cap: float | None) -> float:
    return value if cap is None else min(value, cap)
