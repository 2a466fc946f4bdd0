"""The machine a plan is made for, and how long a step takes on it.

Compute: model FLOPs, and what activation checkpointing computes again, at a share of the device's peak. Wire: bytes
over bandwidth, without latency; groups that lie within a node use its own links. Updates: bytes read and written over
memory bandwidth; in host memory over the host's. `one_by_one` adds all of it up; `overlapped` takes the larger of
compute and wire, as if all communication hid behind compute. A run lies between the two.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from xgram_dist.config.schema import Config
from xgram_dist.plan.axes import Axes
from xgram_dist.plan.budget import block_flops_per_token, plan_budget
from xgram_dist.plan.messages import Message

GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True)
class Machine:
    bandwidth: float = 50.0
    """Of the network, for each rank, in GB/s; so are the others."""
    node_bandwidth: float = 450.0
    host_bandwidth: float = 25.0
    memory_bandwidth: float = 2000.0
    flops: float = 989.0
    """TFLOP/s."""
    utilisation: float = 0.4
    node_ranks: int = 8

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def seconds_on_wire(self, message: Message, axes: Axes) -> float:
        inside = axes.span(message.axis) <= self.node_ranks
        return message.bytes / GIGA / (self.node_bandwidth if inside else self.bandwidth)


@dataclass(frozen=True)
class StepTime:
    compute: float
    wire: float
    tables_wire: float
    """The part of `wire` that is for tables."""
    update: float
    tables_update: float
    """The part of `update` that is for tables."""
    host: float
    """Between host and device."""
    one_by_one: float
    overlapped: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def step_time(
    config: Config,
    axes: Axes,
    machine: Machine,
    messages: list[Message],
    updates: Mapping[str, tuple[float, bool]],
    moved: float,
) -> StepTime:
    """`updates`: bytes that the updates of `backbone` and `tables` touch, and whether in host memory. `moved`: bytes
    between host and device."""
    compute = step_flops(config, axes) / (machine.flops * TERA * machine.utilisation)
    wire = [(machine.seconds_on_wire(one, axes), one.of_tables) for one in messages]
    on_wire = sum(seconds for seconds, _ in wire)
    update = {
        name: size / GIGA / (machine.host_bandwidth if host else machine.memory_bandwidth)
        for name, (size, host) in updates.items()
    }
    host = moved / GIGA / machine.host_bandwidth
    rest = sum(update.values()) + host
    return StepTime(
        compute=compute,
        wire=on_wire,
        tables_wire=sum(seconds for seconds, of_tables in wire if of_tables),
        update=sum(update.values()),
        tables_update=update.get("tables", 0.0),
        host=host,
        one_by_one=compute + on_wire + rest,
        overlapped=max(compute, on_wire) + rest,
    )


def step_flops(config: Config, axes: Axes) -> float:
    """Of a rank. Backward is twice forward; checkpointing computes blocks, but not the head, once more."""
    budget = plan_budget(config)
    per_token = 3 * (budget.backbone_flops_per_token + budget.extra_flops_per_token)
    if config.train.activation_checkpointing:
        per_token += block_flops_per_token(config)
    return per_token * budget.tokens_per_step / axes.world
