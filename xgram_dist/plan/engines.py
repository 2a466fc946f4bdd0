"""What each engine holds of the backbone on a rank, and what it sends for it.

P parameters on a rank of the tensor axis, b bytes of the compute type, D ranks of the data axis, S of the shard axis:

                weights      gradients   moments
    replicated  4P           4P          8P        1 all-reduce a step
    hsdp        4P/S         4P          8P/S      gathers each micro-batch, 1 reduce-scatter a step
    stage 1     bP + 4P/D    4P          8P/D      1 all-reduce and 1 gather a step
    stage 2     bP + 4P/D    4P/D        8P/D      1 all-reduce each micro-batch, 1 gather a step
    stage 3     (b+4)P/D     4P/D        8P/D      gathers and 1 reduce-scatter each micro-batch

As the engines of this package are set up; tests hold these figures against real ranks.
"""

from dataclasses import dataclass
from typing import Any

from xgram_dist.config.schema import Config
from xgram_dist.plan.axes import Axes
from xgram_dist.plan.messages import Message, message
from xgram_dist.plan.parts import Part
from xgram_dist.plan.shapes import Backbone, backbone_shapes, matrices, numel, shard_numel

FP32 = 4
MOMENTS = 2
UPDATE_PASSES = 7
"""AdamW reads weights, gradients and two moments, and writes all but the gradients."""

# DeepSpeed's keys as this package sets them, in elements.
BUCKET = 50_000_000
WHOLE_BELOW = 10_000
MOST_LIVE = 1_000_000_000
AT_ONCE = 500_000_000
"""Stage 1 in bf16 reduces its flat gradients as they are, from this size on; smaller ones as a copy."""
HELD_GATHERED = 2
"""Blocks that FSDP has gathered at one time: the one at work, and the next."""


@dataclass(frozen=True)
class EnginePlan:
    parts: list[Part]
    messages: list[Message]
    updated: float
    """Parameters that this rank's AdamW updates."""
    host: bool = False
    """It does so in host memory."""


def compute_bytes(config: Config) -> int:
    return 2 if config.train.precision == "bf16" else FP32


def plan_engine(config: Config, axes: Axes, micro_batches: int) -> EnginePlan:
    backbone = backbone_shapes(config, axes.tensor)
    if config.parallel.engine == "replicated":
        return _replicated(config, axes, backbone)
    if config.parallel.engine == "hsdp":
        return _hsdp(config, axes, backbone, micro_batches)
    if config.parallel.zero_stage == 3:
        return _stage_3(config, axes, backbone, micro_batches)
    return _stage_1_or_2(config, axes, backbone, micro_batches)


def _replicated(config: Config, axes: Axes, backbone: Backbone) -> EnginePlan:
    whole = FP32 * backbone.numel
    parts = [
        Part("backbone_parameters", whole),
        Part("backbone_gradients", whole),
        Part("backbone_optimizer", MOMENTS * whole),
        Part("backbone_buffers", whole if axes.data > 1 else 0, "reduce"),
    ]
    if config.train.precision == "bf16":  # weights are cast where they are used, and kept for backward
        cast = max(numel(matrices(block)) for block in backbone.blocks)
        if not config.train.activation_checkpointing:
            cast = sum(numel(matrices(block)) for block in backbone.blocks)
        parts.append(Part("backbone_compute", 2 * (cast + numel(backbone.head)), "compute"))
    return EnginePlan(parts, [message("gradients", "all-reduce", "data", axes, whole)], backbone.numel)


def _hsdp(config: Config, axes: Axes, backbone: Backbone, micro_batches: int) -> EnginePlan:
    size, reshard = compute_bytes(config), config.parallel.reshard
    shard = shard_numel(backbone.shapes, axes.shard)
    largest = max(numel(unit) for unit in backbone.units)
    ends, blocks = numel(backbone.root) + numel(backbone.head), [numel(block) for block in backbone.blocks]
    gathered = ends + (sum(sorted(blocks)[-HELD_GATHERED:]) if reshard else sum(blocks))
    parts = [
        Part("backbone_parameters", FP32 * shard),
        Part("backbone_gradients", FP32 * (backbone.numel if micro_batches > 1 else shard)),
        Part("backbone_optimizer", MOMENTS * FP32 * shard),
        Part("backbone_compute", size * gathered, "compute"),
        Part("backbone_buffers", (FP32 + (size if micro_batches == 1 else 0)) * largest, "compute"),
    ]
    padded_ends = shard_numel((*backbone.root, *backbone.head), axes.shard) * axes.shard
    padded_blocks = shard * axes.shard - padded_ends
    gathers = size * (padded_ends + padded_blocks * (2 if reshard else 1)) * micro_batches
    messages = [
        message("parameters", "all-gather", "shard", axes, gathers),
        message("gradients", "reduce-scatter", "shard", axes, FP32 * shard * axes.shard),
        message("gradients", "all-reduce", "replicate", axes, FP32 * shard),
    ]
    return EnginePlan(parts, messages, shard)


def _stage_1_or_2(config: Config, axes: Axes, backbone: Backbone, micro_batches: int) -> EnginePlan:
    stage, size, offload = config.parallel.zero_stage, compute_bytes(config), config.parallel.offload
    count, largest = backbone.numel, max(numel((shape,)) for shape in backbone.shapes)
    share = count / axes.data
    bucket = _tuned(config, "reduce_bucket_size", BUCKET)
    parts = [
        Part("backbone_parameters", size * count),
        Part("backbone_parameters", FP32 * share, host=offload),
        Part("backbone_optimizer", MOMENTS * FP32 * share, host=offload),
        Part("backbone_gradients", FP32 * (count if stage == 1 else 0 if offload else share)),
    ]
    if stage == 2:  # two buckets of gradients, and the message of one, or of one larger parameter
        parts.append(Part("backbone_buffers", 2 * size * bucket + FP32 * max(bucket, largest), "compute"))
    elif size == FP32 or offload:
        parts.append(Part("backbone_buffers", FP32 * bucket))
    elif axes.data > 1 and numel(matrices(backbone.shapes)) <= AT_ONCE:
        parts.append(Part("backbone_buffers", FP32 * count, "reduce"))
    if offload:
        parts.append(Part("backbone_buffers", size * largest))
        # Reduced gradients, new weights, and the largest parameter's gradient on its way.
        parts.append(Part("backbone_buffers", (FP32 + size) * share + size * largest, host=True))
        if stage == 2 and micro_batches > 1:
            parts.append(Part("backbone_gradients", FP32 * share, host=True))
    times = 1 if stage == 1 else micro_batches
    messages = [
        message("gradients", "all-reduce", "data", axes, FP32 * count * times),
        message("parameters", "all-gather", "data", axes, size * count),
    ]
    return EnginePlan(parts, messages, share, offload)


def _stage_3(config: Config, axes: Axes, backbone: Backbone, micro_batches: int) -> EnginePlan:
    size, offload = compute_bytes(config), config.parallel.offload
    whole_below = _tuned(config, "stage3_param_persistence_threshold", WHOLE_BELOW)
    most_live = _tuned(config, "stage3_max_live_parameters", MOST_LIVE)
    bucket = _tuned(config, "reduce_bucket_size", BUCKET)
    sizes = [numel((shape,)) for shape in backbone.shapes]
    largest, share = max(sizes), sum(-(-one // axes.data) for one in sizes)
    kept = sum(one for one in sizes if one < whole_below)
    cut = sum(sizes) - kept
    # Its prefetching runs ahead as far as it may; what fits stays until the backward pass has used it. The embedding,
    # which the outermost module holds, is let go of and gathered again.
    again = numel(backbone.root) if cut <= most_live else cut
    parts = [
        Part("backbone_parameters", size * share + size * kept),
        Part("backbone_parameters", FP32 * share, host=offload),
        Part("backbone_gradients", FP32 * share, host=offload),
        Part("backbone_optimizer", MOMENTS * FP32 * share, host=offload),
        Part("backbone_compute", size * min(cut, max(most_live, largest)), "compute"),
        Part("backbone_buffers", FP32 * bucket),
        Part("backbone_buffers", FP32 * largest if largest > bucket else 0, "compute"),
    ]
    if offload:
        parts.append(Part("backbone_buffers", FP32 * share, host=True))
    messages = [
        message("parameters", "all-gather", "data", axes, size * (cut + again) * micro_batches + size * kept),
        message("gradients", "reduce-scatter", "data", axes, FP32 * share * axes.data * micro_batches),
    ]
    return EnginePlan(parts, messages, share, offload)


def _tuned(config: Config, key: str, value: int) -> int:
    """What `parallel.deepspeed` says, if it says something."""
    given: Any = config.parallel.deepspeed.get("zero_optimization", {})
    return int(given.get(key, value)) if isinstance(given, dict) else value
