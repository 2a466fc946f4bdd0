"""A recipe on so many ranks: memory by part, bytes by message, seconds of a step."""

from dataclasses import dataclass
from typing import Any

from xgram_dist.config.check import accumulation
from xgram_dist.config.schema import Config
from xgram_dist.plan.activations import plan_activations
from xgram_dist.plan.axes import Axes
from xgram_dist.plan.engines import FP32, UPDATE_PASSES, plan_engine
from xgram_dist.plan.machine import Machine, StepTime, step_time
from xgram_dist.plan.messages import Message, merged
from xgram_dist.plan.parts import Part, total
from xgram_dist.plan.tables import TablesPlan, plan_rank_tables
from xgram_dist.plan.tensor import plan_tensor_messages
from xgram_dist.plan.traffic import Traffic


@dataclass(frozen=True)
class Layout:
    name: str
    axes: Axes
    micro_batches: int
    parts: list[Part]
    messages: list[Message]
    time: StepTime
    tables: TablesPlan | None = None

    @property
    def device_bytes(self) -> float:
        return total(self.parts)

    @property
    def host_bytes(self) -> float:
        return total(self.parts, host=True)

    @property
    def wire_bytes(self) -> float:
        return sum(message.bytes for message in self.messages)

    def as_dict(self) -> dict[str, Any]:
        tables = self.tables
        return {
            "name": self.name,
            "data": self.axes.data,
            "tensor": self.axes.tensor,
            "replicate": self.axes.replicate,
            "shard": self.axes.shard,
            "micro_batches": self.micro_batches,
            "table_optimizer": None if tables is None else tables.optimizer,
            "windows": None if tables is None else tables.windows,
            "memory": [part.as_dict() for part in self.parts],
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "wire": [message.as_dict() for message in self.messages],
            "wire_bytes": self.wire_bytes,
            "seconds": self.time.as_dict(),
        }


def plan_layout(config: Config, axes: Axes, machine: Machine, traffic: Traffic | None, name: str = "") -> Layout:
    """`traffic`: None for a recipe without tables."""
    micro_batches = accumulation(config, axes.data)
    engine = plan_engine(config, axes, micro_batches)
    tables = None if traffic is None else plan_rank_tables(config, axes, micro_batches, traffic)
    parts = [*engine.parts, *(tables.parts if tables else ()), *plan_activations(config, axes)]
    distinct = tables.distinct_tokens if tables else 0.0
    messages = [
        *(tables.messages if tables else ()),
        *engine.messages,
        *plan_tensor_messages(config, axes, micro_batches, distinct),
        *_scalars(axes),
    ]
    updates = {"backbone": (UPDATE_PASSES * FP32 * engine.updated, engine.host)}
    moved = (FP32 + 2) * engine.updated if engine.host else 0.0
    if tables is not None:
        updates["tables"] = (tables.updated, config.memory.placement == "host")
        moved += tables.moved
    time = step_time(config, axes, machine, messages, updates, moved)
    return Layout(name, axes, micro_batches, _added(parts), merged(messages), time, tables)


def _added(parts: list[Part]) -> list[Part]:
    """Parts of one name, moment and place added up; none that are empty."""
    sums: dict[tuple[str, str, bool], float] = {}
    for part in parts:
        key = (part.key, part.moment, part.host)
        sums[key] = sums.get(key, 0.0) + part.bytes
    return [Part(key, size, moment, host) for (key, moment, host), size in sums.items() if size]  # type: ignore[arg-type]


def _scalars(axes: Axes) -> list[Message]:
    """Square sums of backbone and tables, and two means of the loss."""
    found = []
    for axis, size in (("data", 8 + 8), ("tensor", 8), ("world", 4)):
        ranks = axes.size(axis)  # type: ignore[arg-type]
        found.append(Message("norm and loss", "all-reduce", axis, ranks, 2 * size * (ranks - 1) / ranks))  # type: ignore[arg-type]
    return found
