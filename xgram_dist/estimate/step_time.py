"""How long a step takes on a given machine, part by part.

Matrix products run at a share of the device's peak, attention at a share of that; everything else is bytes over memory
bandwidth (`device_traffic.py`). Wire: bytes over bandwidth, without latency; process groups within a node use its
links. Rows that are staged cross between host and device. Updates in host memory take the host's bandwidth.
`one_by_one` is the sum of all; `overlapped` takes the largest of compute, wire and staging, as if communication were
hidden behind compute. A run lies between the two.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from xgram_dist.config.schema import Config
from xgram_dist.estimate.comm import Axes, Message
from xgram_dist.estimate.device_traffic import Part
from xgram_dist.estimate.flops import plan_budget
from xgram_dist.parallel.device import PEAK_FLOPS

GIGA, TERA = 1e9, 1e12
ATTENTION_SHARE = 0.5
"""Of the speed of matrix products: fused causal attention, forward and backward, on an H100."""
PUBLIC_MFU = {"0.76B": 0.348, "1.3B": 0.377}
"""Measured by others: MPT models, 8,192 tokens, 8 x H100 80 GB, bf16, FSDP, without activation checkpointing; by
parameters. From mosaicml/llm-foundry, scripts/train/benchmarking/README.md, table "H100 80GB BF16"."""


@dataclass(frozen=True)
class Machine:
    """Bandwidths are in GB/s and for each rank."""

    bandwidth: float = 50.0
    """Of the network."""
    node_bandwidth: float = 450.0
    """Between ranks of a node."""
    host_bandwidth: float = 25.0
    """Between host and device."""
    memory_bandwidth: float = 2600.0
    """Of the device's memory, as elementwise kernels reach it; 3350 by the data sheet of an H100."""
    flops: float = PEAK_FLOPS["H100"] / TERA
    """Peak of the device, in TFLOP/s."""
    utilisation: float = 0.65
    """Share of the peak that matrix products reach."""
    node_ranks: int = 8

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def seconds_on_wire(self, message: Message, axes: Axes) -> float:
        within_node = axes.span(message.axis) <= self.node_ranks
        return message.bytes / GIGA / (self.node_bandwidth if within_node else self.bandwidth)


@dataclass(frozen=True)
class PartTime:
    """A part of the step on this rank, in seconds."""

    name: str
    matmul: float
    """Matrix products and attention."""
    memory: float
    wire: float
    host: float = 0.0

    @property
    def seconds(self) -> float:
        return self.matmul + self.memory + self.wire + self.host

    @property
    def bound(self) -> str:
        """What takes most of it."""
        by_resource = {
            "matrix products": self.matmul,
            "memory": self.memory,
            "network": self.wire,
            "host": self.host,
        }
        return max(by_resource, key=lambda name: by_resource[name])

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds, "bound": self.bound}


@dataclass(frozen=True)
class StepTime:
    """In seconds."""

    compute: float
    """Head, blocks, extraction and scatter."""
    wire: float
    tables_wire: float
    """The share of `wire` that is for tables."""
    update: float
    tables_update: float
    """The share of `update` that is for tables."""
    host: float
    """Transfers between host and device."""
    one_by_one: float
    overlapped: float
    mfu: float
    """Model FLOPs, without recomputation, over the peak; of `one_by_one`. Attention is causal: half of the scores."""
    mfu_overlapped: float
    mfu_full_attention: float
    """Of `one_by_one`, with all scores counted, as public tables do."""
    parts: list[PartTime]

    @property
    def bottleneck(self) -> PartTime:
        return max(self.parts, key=lambda part: part.seconds)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "parts": [part.as_dict() for part in self.parts], "bottleneck": self.bottleneck.name}


def step_time(
    config: Config,
    axes: Axes,
    machine: Machine,
    messages: list[Message],
    compute_parts: list[Part],
    updates: Mapping[str, tuple[float, bool]],
    exchange_bytes: float,
    host_device_bytes: float,
    staged_bytes: float = 0.0,
    bubble_share: float = 0.0,
) -> StepTime:
    """`updates`: for `backbone` and `tables`, the bytes that an update reads and writes, and whether in host memory.
    `exchange_bytes`: of device memory, by fetch and return. `staged_bytes`: moved between host and device while others
    compute. `bubble_share`: of the compute, for which a rank of a pipeline waits."""
    peak, memory_speed = machine.flops * TERA, machine.memory_bandwidth * GIGA
    matmul_speed = peak * machine.utilisation
    parts = [
        PartTime(
            name=part.name,
            matmul=(part.matmul_flops + part.attention_flops / ATTENTION_SHARE) / matmul_speed,
            memory=part.bytes / memory_speed,
            wire=0.0,
        )
        for part in compute_parts
    ]
    compute = sum(part.seconds for part in parts)
    wire = [(machine.seconds_on_wire(message, axes), message.of_tables) for message in messages]
    total_wire, tables_wire = sum(s for s, _ in wire), sum(s for s, of_tables in wire if of_tables)
    update = {
        name: size / GIGA / (machine.host_bandwidth if on_host else machine.memory_bandwidth)
        for name, (size, on_host) in updates.items()
    }
    on_host = sum(update[name] for name, (_, host) in updates.items() if host)
    host = host_device_bytes / GIGA / machine.host_bandwidth
    exchange, staging = exchange_bytes / memory_speed, staged_bytes / GIGA / machine.host_bandwidth
    parts += [
        PartTime("waiting for other stages", bubble_share * compute, 0.0, 0.0),
        PartTime("exchange", 0.0, exchange, tables_wire),
        PartTime("backbone collectives", 0.0, 0.0, total_wire - tables_wire),
        PartTime("update", 0.0, sum(update.values()) - on_host, 0.0, on_host + host),
        PartTime("staging of table rows", 0.0, 0.0, 0.0, staging),
    ]
    not_overlapped = sum(update.values()) + host + exchange + bubble_share * compute
    one_by_one = compute + total_wire + staging + not_overlapped
    overlapped = max(compute, total_wire, staging) + not_overlapped
    model_flops = model_step_flops(config, axes)
    scores = 3 * 2 * config.model.layers * config.model.attention_width * config.model.sequence_length
    halved = scores * plan_budget(config).tokens_per_step / axes.world
    return StepTime(
        compute=compute,
        wire=total_wire,
        tables_wire=tables_wire,
        update=sum(update.values()),
        tables_update=update.get("tables", 0.0),
        host=host,
        one_by_one=one_by_one,
        overlapped=overlapped,
        mfu=model_flops / (one_by_one * peak),
        mfu_overlapped=model_flops / (overlapped * peak),
        mfu_full_attention=(model_flops + halved) / (one_by_one * peak),
        parts=[part for part in parts if part.seconds],
    )


def model_step_flops(config: Config, axes: Axes) -> float:
    """Of a rank: forward and backward, which is twice forward."""
    budget = plan_budget(config)
    per_token = 3 * (budget.backbone_flops_per_token + budget.extra_flops_per_token)
    return per_token * budget.tokens_per_step / axes.world
