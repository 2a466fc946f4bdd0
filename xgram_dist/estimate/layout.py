"""A recipe on a number of ranks: memory, messages and time together; and other layouts of it for comparison.

The layouts compared are the paper's and two of this system, on the same ranks. The paper's is FSDP over all parameters,
tables included, in groups of 8 ranks, with replicas of these groups. Each micro-batch gathers every block and its
tables before forward and again before backward, in the compute type, and reduce-scatters dense gradients in fp32;
replicas are all-reduced once a step; AdamW is dense. This system's shard table rows over the whole data axis and
exchange vectors once a window, with the backbone under DeepSpeed's stage 1, or FSDP in the same groups of 8.
"""

import contextlib
from dataclasses import dataclass, replace
from typing import Any

from xgram_dist.config.schema import Config
from xgram_dist.config.validate import accumulation
from xgram_dist.errors import UserError
from xgram_dist.estimate.comm import (
    FP32,
    Axes,
    Axis,
    Message,
    compute_bytes,
    merge_messages,
    plan_context_messages,
    plan_pipeline_messages,
    plan_tensor_messages,
    ring_message,
)
from xgram_dist.estimate.device_traffic import plan_compute_parts
from xgram_dist.estimate.engines import GATHERED_BLOCKS, NUM_MOMENTS, UPDATE_PASSES, plan_engine
from xgram_dist.estimate.flops import num_row_gates
from xgram_dist.estimate.memory import Allocation, merge_allocations, peak_bytes, plan_activations
from xgram_dist.estimate.shapes import Shape, numel, parameter_shapes, shard_numel
from xgram_dist.estimate.step_time import Machine, StepTime, step_time
from xgram_dist.estimate.tables import TableEstimate, plan_rank_tables
from xgram_dist.estimate.traffic import Traffic
from xgram_dist.model.methods.base import table_layout
from xgram_dist.model.pipeline_stages import PipelineStage

BF16 = 2
MAX_GROUP = 8
"""Ranks of the paper's FSDP groups: those of a node."""


@dataclass(frozen=True)
class LayoutEstimate:
    name: str
    axes: Axes
    micro_batches: int
    allocations: list[Allocation]
    messages: list[Message]
    time: StepTime
    tables: TableEstimate | None = None
    """None without row-sharded tables."""
    stages: tuple[PipelineStage, ...] = ()
    """Of the rank whose memory it is."""

    @property
    def device_bytes(self) -> float:
        return peak_bytes(self.allocations)

    @property
    def host_bytes(self) -> float:
        return peak_bytes(self.allocations, host=True)

    @property
    def wire_bytes(self) -> float:
        return sum(message.bytes for message in self.messages)

    def as_dict(self) -> dict[str, Any]:
        tables = self.tables
        return {
            "name": self.name,
            "data": self.axes.data,
            "tensor": self.axes.tensor,
            "pipeline": self.axes.pipeline,
            "stage_layers": [list(stage.layers) for stage in self.stages],
            "replicate": self.axes.replicate,
            "shard": self.axes.shard,
            "replicas": self.axes.replicas,
            "context": self.axes.context,
            "micro_batches": self.micro_batches,
            "table_optimizer": None if tables is None else tables.optimizer,
            "windows": None if tables is None else tables.window_sizes,
            "touched_rows": None if tables is None else tables.run.as_dict(),
            "memory": [allocation.as_dict() for allocation in self.allocations],
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "wire": [message.as_dict() for message in self.messages],
            "wire_bytes": self.wire_bytes,
            "seconds": self.time.as_dict(),
            "planning_cpu_seconds": None if tables is None else tables.planning_cpu_seconds,
        }


def plan_layout(
    config: Config, axes: Axes, machine: Machine, traffic: Traffic | None, name: str = ""
) -> LayoutEstimate:
    """`traffic`: None for a recipe without tables. In a pipeline: of the rank that holds most, with the time of the
    slowest one."""
    ranks = [_plan_rank(config, replace(axes, at=at), machine, traffic, name) for at in range(axes.pipeline)]
    most, slowest = max(ranks, key=lambda one: one.device_bytes), max(ranks, key=lambda one: one.time.one_by_one)
    return replace(most, time=slowest.time)


def _plan_rank(config: Config, axes: Axes, machine: Machine, traffic: Traffic | None, name: str) -> LayoutEstimate:
    micro_batches = accumulation(config, axes.data)
    engine = plan_engine(config, axes, micro_batches)
    tables = None if traffic is None else plan_rank_tables(config, axes, micro_batches, traffic)
    distinct_tokens = tables.distinct_tokens if tables else 0.0
    allocations = [
        *engine.allocations,
        *(tables.allocations if tables else ()),
        *plan_activations(config, axes, micro_batches),
    ]
    messages = [
        *(tables.messages if tables else ()),
        *engine.messages,
        *plan_tensor_messages(config, axes, micro_batches, distinct_tokens),
        *plan_context_messages(config, axes, micro_batches),
        *plan_pipeline_messages(config, axes, micro_batches),
        *_scalar_messages(axes),
    ]
    updates = {"backbone": (UPDATE_PASSES * FP32 * engine.updated_parameters, engine.update_on_host)}
    # An update on the host receives gradients in fp32 and returns weights in bf16.
    host_device_bytes = (FP32 + BF16) * engine.updated_parameters if engine.update_on_host else 0.0
    if tables is not None:
        updates["tables"] = (tables.update_bytes, tables.updated_on_host)
        host_device_bytes += tables.host_device_bytes
    compute = plan_compute_parts(config, axes, micro_batches, distinct_tokens)
    exchanged = tables.exchange_bytes if tables else 0.0
    staged = tables.staged_bytes if tables else 0.0
    wait = bubble_share(config, axes, micro_batches)
    time = step_time(config, axes, machine, messages, compute, updates, exchanged, host_device_bytes, staged, wait)
    merged = merge_allocations(allocations), merge_messages(messages)
    return LayoutEstimate(name, axes, micro_batches, *merged, time, tables, axes.stages(config))


def bubble_share(config: Config, axes: Axes, micro_batches: int) -> float:
    """Time that a rank of a pipeline waits at the start and end of a step, of the time it computes: a forward and a
    backward for each other rank, of a stage; a third of that where gradients of weights fill it."""
    parallel = config.parallel
    unfilled = 1 / 3 if parallel.pipeline_schedule == "zero_bubble" else 1.0
    return unfilled * (axes.pipeline - 1) / (parallel.virtual_stages * micro_batches)


def _scalar_messages(axes: Axes) -> list[Message]:
    """Square sums of backbone and tables for the joint norm, and two means of the loss."""
    sizes: dict[Axis, int] = {"data": 8 + 8, "tensor": 8, "world": 4}
    return [ring_message("norm and loss", "all-reduce", axis, axes, size) for axis, size in sizes.items()]


# Layouts for comparison


def compare_update_places(
    config: Config, axes: Axes, machine: Machine, traffic: Traffic | None
) -> dict[str, LayoutEstimate] | None:
    """With touched rows in host memory or on disk updated on the `device`, and on the `host`; None where there is no
    choice."""
    tables = plan_layout(config, axes, machine, traffic).tables
    if tables is None or not tables.run.kept or config.memory.placement == "device":
        return None
    layouts = {}
    for place in ("device", "host"):
        memory = config.memory.model_copy(update={"update": place, "rows": "touched"})
        layouts[place] = plan_layout(config.model_copy(update={"memory": memory}), axes, machine, traffic, place)
    return layouts


def compare_layouts(config: Config, axes: Axes, machine: Machine, traffic: Traffic | None) -> list[LayoutEstimate]:
    shard = group_size(axes.data)
    replicate = axes.data // shard
    tables = "row-sharded tables" if traffic is not None else "no tables"
    engines: dict[str, dict[str, Any]] = {
        f"DeepSpeed stage 1, {tables}": {"engine": "deepspeed", "zero_stage": 1, "replicate": 1},
        f"HSDP {replicate} x {shard}, {tables}": {"engine": "hsdp", "replicate": replicate, "reshard": True},
    }
    layouts = []
    with contextlib.suppress(UserError):  # the batch does not divide over all ranks
        layouts.append(paper_layout(config, axes.world, machine))
    for name, keys in engines.items():
        changed = config.model_copy(update={"parallel": config.parallel.model_copy(update={"offload": False, **keys})})
        changed_axes = replace(axes, replicate=keys["replicate"])
        layouts.append(plan_layout(changed, changed_axes, machine, traffic, name))
    return layouts


def group_size(ranks: int) -> int:
    """Ranks that share parameters: the most, up to 8, that divide the ranks."""
    return max(size for size in range(1, MAX_GROUP + 1) if ranks % size == 0)


def paper_layout(config: Config, ranks: int, machine: Machine) -> LayoutEstimate:
    """It has no tensor, context and pipeline axis: all ranks have sequences of their own and all layers."""
    alone = {"tensor": 1, "context": 1, "pipeline": 1, "pipeline_schedule": "1f1b", "virtual_stages": 1}
    parallel = config.parallel.model_copy(update={"sequence_parallel": False, **alone})
    config = config.model_copy(update={"parallel": parallel})
    group = group_size(ranks)
    axes = Axes(ranks, 1, ranks // group)
    micro_batches, size = accumulation(config, axes.data), compute_bytes(config)
    shapes, tables = parameter_shapes(config), _dense_tables(config)
    backbone_shard = shard_numel(shapes.all, group)
    table_shard = sum(shard_numel(block, group) for block in tables)
    blocks = sorted(numel(block) + numel(of_block) for block, of_block in zip(shapes.blocks, tables, strict=True))
    ends = [numel(shapes.root), numel(shapes.head)]
    largest = max(*ends, blocks[-1])
    allocations = [
        Allocation("backbone_parameters", FP32 * backbone_shard),
        Allocation("backbone_gradients", FP32 * backbone_shard),
        Allocation("backbone_optimizer", NUM_MOMENTS * FP32 * backbone_shard),
        Allocation("tables", FP32 * table_shard),
        Allocation("table_gradients", FP32 * table_shard),
        Allocation("table_optimizer", NUM_MOMENTS * FP32 * table_shard),
        Allocation("gathered", size * (sum(ends) + sum(blocks[-GATHERED_BLOCKS:])), "compute"),
        # The gradient of a unit, and its fp32 copy for the message.
        Allocation("gradient_buffers", (size + FP32) * largest, "compute"),
        *plan_activations(config, axes),
    ]
    padded_ends = shard_numel((*shapes.root, *shapes.head), group) * group
    gathered = padded_ends + 2 * (backbone_shard * group - padded_ends)
    messages: list[Message] = []
    for name, numel_gathered, shard in (
        ("", gathered, backbone_shard),
        ("table ", 2 * table_shard * group, table_shard),
    ):
        messages += [
            ring_message(f"{name}parameters", "all-gather", "shard", axes, size * numel_gathered * micro_batches),
            ring_message(f"{name}gradients", "reduce-scatter", "shard", axes, FP32 * shard * group * micro_batches),
            ring_message(f"{name}gradients", "all-reduce", "replicate", axes, FP32 * shard),
        ]
    updates = {
        "backbone": (UPDATE_PASSES * FP32 * backbone_shard, False),
        "tables": (UPDATE_PASSES * FP32 * table_shard, False),
    }
    # Gradients of tables are dense.
    compute = plan_compute_parts(config, axes, micro_batches, table_layout(config).num_rows)
    time = step_time(config, axes, machine, messages, compute, updates, 0.0, 0.0)
    return LayoutEstimate(
        name=f"the paper's: FSDP {axes.replicate} x {group} over all",
        axes=axes,
        micro_batches=micro_batches,
        allocations=[allocation for allocation in allocations if allocation.bytes],
        messages=[message for message in messages if message.bytes],
        time=time,
    )


def _dense_tables(config: Config) -> list[tuple[Shape, ...]]:
    """Tables and row gates of each block."""
    blocks: list[list[Shape]] = [[] for _ in range(config.model.layers)]
    gated = num_row_gates(config) > 0
    layout = table_layout(config)
    for table in layout.tables:
        blocks[table.layer] += [(layout.num_rows, table.width), *([(layout.num_rows,)] if gated else [])]
    return [tuple(shapes) for shapes in blocks]
