"""Layouts of one recipe on the same ranks, side by side.

The paper's own: FSDP over all parameters, tables among them, within groups of 8 ranks, and replicas of such groups.
Each micro-batch gathers every block with its tables, before forward and again before backward, in the compute type, and
scatters the sums of their gradients in fp32, tables' as dense arrays; replicas are summed once a step; AdamW is dense.
This system's: table rows spread over all ranks of the data axis, vectors exchanged once a window, the backbone by
DeepSpeed's stage 1 or by FSDP over the same groups of 8.
"""

import contextlib
from typing import Any

from xgram_dist.config.check import accumulation
from xgram_dist.config.schema import Config
from xgram_dist.errors import UserError
from xgram_dist.memory.layout import num_rows, plan_tables
from xgram_dist.plan.activations import plan_activations
from xgram_dist.plan.axes import Axes
from xgram_dist.plan.engines import FP32, HELD_GATHERED, MOMENTS, UPDATE_PASSES, compute_bytes
from xgram_dist.plan.layout import Layout, plan_layout
from xgram_dist.plan.machine import Machine, step_time
from xgram_dist.plan.messages import Message, message
from xgram_dist.plan.parts import Part
from xgram_dist.plan.shapes import Shape, backbone_shapes, numel, shard_numel
from xgram_dist.plan.tables import num_gates
from xgram_dist.plan.traffic import Traffic

GROUP = 8


def group_of(ranks: int) -> int:
    """Ranks that share parameters: the most, up to 8, that divide the ranks."""
    return max(size for size in range(1, GROUP + 1) if ranks % size == 0)


def compare_layouts(config: Config, axes: Axes, machine: Machine, traffic: Traffic | None) -> list[Layout]:
    shard = group_of(axes.data)
    replicate = axes.data // shard
    over = "row-sharded tables" if traffic is not None else "no tables"
    engines: dict[str, dict[str, Any]] = {
        f"DeepSpeed stage 1, {over}": {"engine": "deepspeed", "zero_stage": 1, "replicate": 1},
        f"HSDP {replicate} x {shard}, {over}": {"engine": "hsdp", "replicate": replicate, "reshard": True},
    }
    found = []
    with contextlib.suppress(UserError):  # the batch does not divide over all ranks
        found.append(paper_layout(config, axes.world, machine))
    for name, keys in engines.items():
        changed = config.model_copy(update={"parallel": config.parallel.model_copy(update={"offload": False, **keys})})
        found.append(plan_layout(changed, Axes(axes.data, axes.tensor, keys["replicate"]), machine, traffic, name))
    return found


def paper_layout(config: Config, ranks: int, machine: Machine) -> Layout:
    """It has no tensor axis: all ranks are on the data axis."""
    alone = config.parallel.model_copy(update={"tensor": 1, "sequence_parallel": False})
    config = config.model_copy(update={"parallel": alone})
    shard = group_of(ranks)
    axes = Axes(ranks, 1, ranks // shard)
    micro_batches, size = accumulation(config, axes.data), compute_bytes(config)
    backbone, tables = backbone_shapes(config, 1), _dense_tables(config)
    own, theirs = shard_numel(backbone.shapes, shard), sum(shard_numel(block, shard) for block in tables)
    blocks = sorted(numel(block) + numel(of_block) for block, of_block in zip(backbone.blocks, tables, strict=True))
    ends = [numel(backbone.root), numel(backbone.head)]
    largest = max(*ends, blocks[-1])
    parts = [
        Part("backbone_parameters", FP32 * own),
        Part("backbone_gradients", FP32 * own),
        Part("backbone_optimizer", MOMENTS * FP32 * own),
        Part("tables", FP32 * theirs),
        Part("table_gradients", FP32 * theirs),
        Part("table_optimizer", MOMENTS * FP32 * theirs),
        Part("gathered", size * (sum(ends) + sum(blocks[-HELD_GATHERED:])), "compute"),
        # The gradient of a unit, and the same in fp32 on its way.
        Part("gradient_buffers", (size + FP32) * largest, "compute"),
        *plan_activations(config, axes),
    ]
    gathered_ends = shard_numel((*backbone.root, *backbone.head), shard) * shard
    gathers = gathered_ends + 2 * (own * shard - gathered_ends)
    messages: list[Message] = []
    for name, gathered, held in (("", gathers, own), ("table ", 2 * theirs * shard, theirs)):
        messages += [
            message(f"{name}parameters", "all-gather", "shard", axes, size * gathered * micro_batches),
            message(f"{name}gradients", "reduce-scatter", "shard", axes, FP32 * held * shard * micro_batches),
            message(f"{name}gradients", "all-reduce", "replicate", axes, FP32 * held),
        ]
    updates = {name: (UPDATE_PASSES * FP32 * held, False) for name, held in (("backbone", own), ("tables", theirs))}
    time = step_time(config, axes, machine, messages, updates, 0.0)
    name = f"the paper's: FSDP {axes.replicate} x {shard} over all"
    return Layout(name, axes, micro_batches, [p for p in parts if p.bytes], [m for m in messages if m.bytes], time)


def _dense_tables(config: Config) -> list[tuple[Shape, ...]]:
    """Tables and row gates of each block."""
    found: list[list[Shape]] = [[] for _ in range(config.model.layers)]
    gated = num_gates(config) > 0
    for table in plan_tables(config):
        found[table.layer] += [(num_rows(config), table.width), *([(num_rows(config),)] if gated else [])]
    return [tuple(shapes) for shapes in found]
