"""Changes of a recipe that `xgram-dist plan` recommends: such that reduce its memory, and such that make it faster.

Recipe keys and more ranks, each tried alone; micro-batch and activation checkpointing together, because the memory that
one frees is what the other needs.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from xgram_dist.config.schema import Config
from xgram_dist.config.validate import accumulation, check
from xgram_dist.errors import UserError
from xgram_dist.estimate.comm import Axes
from xgram_dist.estimate.layout import plan_layout
from xgram_dist.estimate.step_time import Machine
from xgram_dist.estimate.traffic import Traffic
from xgram_dist.model.methods.base import check_method, table_layout

MIN_SAVING = 0.02
"""Share of the memory that a change must save to be listed."""

MIN_SPEEDUP = 0.02
"""Share of the step's time that a change must save to be recommended."""
USUAL_DEVICE_BYTES = 80e9
"""Assumed for recommendations where no memory is given."""
USABLE_SHARE = 0.9
"""Of the device's memory: the estimate leaves out fragmentation and the libraries' own."""

Keys = dict[str, Any]
"""New values by recipe key, as `section.key`."""


@dataclass(frozen=True)
class Advice:
    change: str
    """As written on the command line."""
    device_bytes: float
    fits: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def advise(config: Config, ranks: int, limit: float, traffic_of: Callable[[int], Traffic | None]) -> list[Advice]:
    """The largest saving first. `limit`: device bytes of a rank. `traffic_of`: by ranks of the data axis."""
    current = _device_bytes(config, ranks, traffic_of)
    assert current is not None
    candidates = [(_as_overrides(config, keys), keys, ranks) for keys in _candidates(config)]
    candidates.append((f"--ranks {2 * ranks}", {}, 2 * ranks))
    advice = []
    for change, keys, num_ranks in candidates:
        changed = _apply(config, keys)
        size = None if changed is None else _device_bytes(changed, num_ranks, traffic_of)
        if size is not None and size < (1 - MIN_SAVING) * current:
            advice.append(Advice(change, size, size <= limit))
    return sorted(advice, key=lambda one: one.device_bytes)


@dataclass(frozen=True)
class Recommendation:
    change: str
    """As written on the command line."""
    seconds: float
    """Of a step, without overlap."""
    mfu: float
    device_bytes: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def recommend(
    config: Config,
    axes: Axes,
    machine: Machine,
    limit: float | None,
    traffic_of: Callable[[int], Traffic | None],
) -> list[Recommendation]:
    """Changes that make a step faster and fit the memory, the fastest first. They change no result but by rounding.
    `limit`: device bytes of a rank."""
    usable = USABLE_SHARE * (USUAL_DEVICE_BYTES if limit is None else limit)
    now = plan_layout(config, axes, machine, traffic_of(axes.rows)).time.one_by_one
    found = []
    for keys in _faster_candidates(config):
        changed = _apply(config, keys)
        if changed is None:
            continue
        try:
            layout = plan_layout(changed, axes, machine, traffic_of(axes.rows))
        except UserError:
            continue
        if layout.device_bytes <= usable and layout.time.one_by_one < (1 - MIN_SPEEDUP) * now:
            change = _as_overrides(config, keys)
            found.append(Recommendation(change, layout.time.one_by_one, layout.time.mfu, layout.device_bytes))
    return sorted(found, key=lambda one: one.seconds)


def _faster_candidates(config: Config) -> list[Keys]:
    train, chunk = config.train, config.model.loss_chunk
    candidates: list[Keys] = [{"model.loss_chunk": 4 * chunk}, {"train.compile": True}, {"parallel.zero_stage": 1}]
    if table_layout(config).tables:
        candidates.append({"memory.window": "step"})
    micro_batches = [size for size in (1, 2, 4, 8, 16) if size <= train.micro_batch]
    candidates += [{"train.activation_checkpointing": False, "train.micro_batch": size} for size in micro_batches]
    candidates += [
        {"train.activation_checkpointing": False, "train.micro_batch": size, "model.loss_chunk": 4 * chunk}
        for size in micro_batches
    ]
    return candidates


def _candidates(config: Config) -> list[Keys]:
    train, parallel = config.train, config.parallel
    candidates: list[Keys] = [{"model.loss_chunk": max(1, config.model.loss_chunk // 4)}]
    if not train.activation_checkpointing:
        candidates.append({"train.activation_checkpointing": True})
    if train.micro_batch % 2 == 0:
        candidates.append({"train.micro_batch": train.micro_batch // 2})
    if train.precision == "fp32":
        candidates.append({"train.precision": "bf16"})
    if table_layout(config).tables:
        candidates += [{"memory.window": 1}, {"memory.wire": "bf16"}, {"memory.placement": "host"}]
        candidates += [{"memory.optimizer": kind} for kind in ("catch_up", "adagrad")]
        if config.memory.placement != "device":
            candidates.append({"memory.update": "host"})
    if parallel.engine == "deepspeed":
        candidates += [{"parallel.zero_stage": 2}] if parallel.zero_stage < 2 else []
        candidates += [{"parallel.zero_stage": 3, "train.compile": False}] if parallel.zero_stage < 3 else []
        candidates.append({"parallel.offload": True})
    else:
        candidates.append({"parallel.engine": "deepspeed", "parallel.replicate": 1, "parallel.reshard": True})
    candidates.append({"parallel.context": 2 * parallel.context})
    tensor = 2 * parallel.tensor
    candidates.append({"parallel.tensor": tensor})
    candidates.append({"parallel.tensor": tensor, "parallel.sequence_parallel": True})
    return candidates


def _apply(config: Config, keys: Keys) -> Config | None:
    """None if the keys change nothing or the recipe would not be valid."""
    changed = config
    for path, value in keys.items():
        section, key = path.split(".")
        updated = getattr(changed, section).model_copy(update={key: value})
        changed = changed.model_copy(update={section: updated})
    try:
        check(changed)
        check_method(changed)
    except UserError:
        return None
    return None if keys and changed == config else changed


def _device_bytes(config: Config, ranks: int, traffic_of: Callable[[int], Traffic | None]) -> float | None:
    """None if the recipe cannot run on so many ranks."""
    try:
        axes = Axes.of(config, ranks)
        accumulation(config, axes.data)  # before the costly traffic of so many ranks
        return plan_layout(config, axes, Machine(), traffic_of(axes.rows)).device_bytes
    except UserError:
        return None


def _as_overrides(config: Config, keys: Keys) -> str:
    """The keys that change, as command-line overrides."""
    overrides = []
    for path, value in keys.items():
        section, key = path.split(".")
        if getattr(getattr(config, section), key) != value:
            overrides.append(f"{path}={str(value).lower() if isinstance(value, bool) else value}")
    return " ".join(overrides)
