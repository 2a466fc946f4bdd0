"""What would make a recipe fit: keys, each tried alone, and the memory it would leave."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from xgram_dist.config.check import accumulation, check
from xgram_dist.config.schema import Config
from xgram_dist.errors import UserError
from xgram_dist.memory.layout import has_tables
from xgram_dist.plan.axes import Axes
from xgram_dist.plan.layout import plan_layout
from xgram_dist.plan.machine import Machine
from xgram_dist.plan.traffic import Traffic

WORTH = 0.02
"""Share of the memory that a change must save to be named."""


@dataclass(frozen=True)
class Advice:
    change: str
    device_bytes: float
    fits: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def advise(config: Config, ranks: int, limit: float, traffic_of: Callable[[int], Traffic | None]) -> list[Advice]:
    """The most helpful first. `traffic_of`: by ranks of the data axis."""
    now = _bytes(config, ranks, traffic_of)
    assert now is not None
    tries = [(_words(config, keys), keys, ranks) for keys in _keys(config)]
    tries.append((f"--ranks {2 * ranks}", {}, 2 * ranks))
    found = []
    for name, keys, count in tries:
        changed = _changed(config, keys)
        size = None if changed is None else _bytes(changed, count, traffic_of)
        if size is not None and size < (1 - WORTH) * now:
            found.append(Advice(name, size, size <= limit))
    return sorted(found, key=lambda one: one.device_bytes)


def _keys(config: Config) -> list[dict[str, Any]]:
    train, parallel = config.train, config.parallel
    found: list[dict[str, Any]] = [{"model.loss_chunk": max(1, config.model.loss_chunk // 4)}]
    if not train.activation_checkpointing:
        found.append({"train.activation_checkpointing": True})
    if train.micro_batch % 2 == 0:
        found.append({"train.micro_batch": train.micro_batch // 2})
    if train.precision == "fp32":
        found.append({"train.precision": "bf16"})
    if has_tables(config):
        found += [{"memory.window": 1}, {"memory.wire": "bf16"}, {"memory.placement": "host"}]
        found += [{"memory.optimizer": kind} for kind in ("catch_up", "adagrad")]
    if parallel.engine == "deepspeed":
        found += [{"parallel.zero_stage": 2}] if parallel.zero_stage < 2 else []
        found += [{"parallel.zero_stage": 3, "train.compile": False}] if parallel.zero_stage < 3 else []
        found.append({"parallel.offload": True})
    else:
        found.append({"parallel.engine": "deepspeed", "parallel.replicate": 1, "parallel.reshard": True})
    tensor = 2 * parallel.tensor
    found.append({"parallel.tensor": tensor})
    found.append({"parallel.tensor": tensor, "parallel.sequence_parallel": True})
    return found


def _changed(config: Config, keys: dict[str, Any]) -> Config | None:
    """None where a key already has that value, or the recipe would not be valid."""
    changed = config
    for path, value in keys.items():
        section, key = path.split(".")
        part = getattr(changed, section).model_copy(update={key: value})
        changed = changed.model_copy(update={section: part})
    try:
        check(changed)
    except UserError:
        return None
    return None if keys and changed == config else changed


def _bytes(config: Config, ranks: int, traffic_of: Callable[[int], Traffic | None]) -> float | None:
    try:
        axes = Axes.of(config, ranks)
        accumulation(config, axes.data)  # before anything is computed for so many ranks
        return plan_layout(config, axes, Machine(), traffic_of(axes.data)).device_bytes
    except UserError:
        return None


def _words(config: Config, keys: dict[str, Any]) -> str:
    """As one would write them on the command line; what is so already is left out."""
    found = []
    for path, value in keys.items():
        section, key = path.split(".")
        if getattr(getattr(config, section), key) != value:
            found.append(f"{path}={str(value).lower() if isinstance(value, bool) else value}")
    return " ".join(found)
