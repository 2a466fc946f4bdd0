"""The backbone on a rank: what each engine holds of it and which collectives it runs.

P parameters on a rank of the tensor axis, b bytes of the compute type, D ranks of the data axis, S of the shard axis:

                weights      gradients   moments   collectives
    replicated  4P           4P          8P        1 all-reduce a step
    hsdp        4P/S         4P          8P/S      all-gathers each micro-batch, 1 reduce-scatter a step
    stage 1     bP + 4P/D    4P          8P/D      1 all-reduce and 1 all-gather a step
    stage 2     bP + 4P/D    4P/D        8P/D      1 all-reduce each micro-batch, 1 all-gather a step
    stage 3     (b+4)P/D     4P/D        8P/D      all-gathers and 1 reduce-scatter each micro-batch

These are the engines as `xgram_dist.engine` configures them; tests compare the figures with real ranks.
"""

from dataclasses import dataclass
from typing import Any

from xgram_dist.config.schema import Config
from xgram_dist.engine.deepspeed import deepspeed_config
from xgram_dist.estimate.comm import FP32, Axes, Message, compute_bytes, ring_message
from xgram_dist.estimate.memory import Allocation
from xgram_dist.estimate.shapes import ParameterShapes, matrices, numel, parameter_shapes, shard_numel
from xgram_dist.optim.backbone_adamw import MOMENTS

NUM_MOMENTS = len(MOMENTS)
UPDATE_PASSES = 3 + 2 * NUM_MOMENTS
"""AdamW reads the gradient, and reads and writes the weight and its moments."""
FLAT_ALLREDUCE_NUMEL = 500_000_000
"""DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE: stage 1 in bf16 reduces larger flat gradients in place, smaller ones in a
copy."""
GATHERED_BLOCKS = 2
"""Blocks that FSDP holds gathered at a time: the current one and the prefetched next one."""


@dataclass(frozen=True)
class EngineEstimate:
    allocations: list[Allocation]
    messages: list[Message]
    updated_parameters: float
    """Parameters that this rank's AdamW updates."""
    update_on_host: bool = False


def plan_engine(config: Config, axes: Axes, micro_batches: int) -> EngineEstimate:
    shapes = parameter_shapes(config, axes.tensor, axes.stages(config))
    if config.parallel.engine == "replicated":
        return _replicated(config, axes, shapes)
    if config.parallel.engine == "hsdp":
        return _hsdp(config, axes, shapes, micro_batches)
    zero: dict[str, Any] = deepspeed_config(config, axes.data)["zero_optimization"]
    if config.parallel.zero_stage == 3:
        return _stage_3(config, axes, shapes, micro_batches, zero)
    return _stage_1_or_2(config, axes, shapes, micro_batches, zero["reduce_bucket_size"])


def _replicated(config: Config, axes: Axes, shapes: ParameterShapes) -> EngineEstimate:
    full = FP32 * shapes.numel
    allocations = [
        Allocation("backbone_parameters", full),
        Allocation("backbone_gradients", full),
        Allocation("backbone_optimizer", NUM_MOMENTS * full),
        Allocation("backbone_buffers", full if axes.data > 1 else 0, "reduce"),
    ]
    if config.train.precision == "bf16":  # weights are cast where they are used, and saved for backward
        blocks = [numel(matrices(block)) for block in shapes.blocks]
        cast = max(blocks) if config.train.activation_checkpointing else sum(blocks)
        allocations.append(Allocation("backbone_compute", 2 * (cast + numel(shapes.head)), "compute"))
    return EngineEstimate(allocations, [ring_message("gradients", "all-reduce", "data", axes, full)], shapes.numel)


def _hsdp(config: Config, axes: Axes, shapes: ParameterShapes, micro_batches: int) -> EngineEstimate:
    size, reshard = compute_bytes(config), config.parallel.reshard
    shard = shard_numel(shapes.all, axes.shard)
    largest = max(numel(unit) for unit in shapes.units)
    ends, blocks = numel(shapes.root) + numel(shapes.head), [numel(block) for block in shapes.blocks]
    gathered = ends + (sum(sorted(blocks)[-GATHERED_BLOCKS:]) if reshard else sum(blocks))
    allocations = [
        Allocation("backbone_parameters", FP32 * shard),
        Allocation("backbone_gradients", FP32 * (shapes.numel if micro_batches > 1 else shard)),
        Allocation("backbone_optimizer", NUM_MOMENTS * FP32 * shard),
        Allocation("backbone_compute", size * gathered, "compute"),
        Allocation("backbone_buffers", (FP32 + (size if micro_batches == 1 else 0)) * largest, "compute"),
    ]
    padded_ends = shard_numel((*shapes.root, *shapes.head), axes.shard) * axes.shard
    padded_blocks = shard * axes.shard - padded_ends
    gathers = size * (padded_ends + padded_blocks * (2 if reshard else 1)) * micro_batches
    messages = [
        ring_message("parameters", "all-gather", "shard", axes, gathers),
        ring_message("gradients", "reduce-scatter", "shard", axes, FP32 * shard * axes.shard),
        ring_message("gradients", "all-reduce", "replicate", axes, FP32 * shard),
    ]
    return EngineEstimate(allocations, messages, shard)


def _stage_1_or_2(
    config: Config, axes: Axes, shapes: ParameterShapes, micro_batches: int, bucket: int
) -> EngineEstimate:
    """`bucket`: elements of a gradient bucket."""
    stage, size, offload = config.parallel.zero_stage, compute_bytes(config), config.parallel.offload
    count, largest = shapes.numel, max(numel((shape,)) for shape in shapes.all)
    partition = count / axes.data
    allocations = [
        Allocation("backbone_parameters", size * count),
        Allocation("backbone_parameters", FP32 * partition, host=offload),
        Allocation("backbone_optimizer", NUM_MOMENTS * FP32 * partition, host=offload),
        Allocation("backbone_gradients", FP32 * (count if stage == 1 else 0 if offload else partition)),
    ]
    if stage == 2:  # two gradient buckets, and the fp32 message of one, or of one larger parameter
        allocations.append(Allocation("backbone_buffers", 2 * size * bucket + FP32 * max(bucket, largest), "compute"))
    elif size == FP32 or offload:
        allocations.append(Allocation("backbone_buffers", FP32 * bucket))
    elif axes.data > 1 and numel(matrices(shapes.all)) <= FLAT_ALLREDUCE_NUMEL:
        allocations.append(Allocation("backbone_buffers", FP32 * count, "reduce"))
    if offload:
        allocations.append(Allocation("backbone_buffers", size * largest))
        # On the host: reduced gradients, new weights, and the gradient of the largest parameter in transfer.
        allocations.append(Allocation("backbone_buffers", (FP32 + size) * partition + size * largest, host=True))
        if stage == 2 and micro_batches > 1:
            allocations.append(Allocation("backbone_gradients", FP32 * partition, host=True))
    reductions = 1 if stage == 1 else micro_batches
    messages = [
        ring_message("gradients", "all-reduce", "data", axes, FP32 * count * reductions),
        ring_message("parameters", "all-gather", "data", axes, size * count),
    ]
    return EngineEstimate(allocations, messages, partition, offload)


def _stage_3(
    config: Config, axes: Axes, shapes: ParameterShapes, micro_batches: int, zero: dict[str, Any]
) -> EngineEstimate:
    size, offload, bucket = compute_bytes(config), config.parallel.offload, zero["reduce_bucket_size"]
    max_live = zero["stage3_max_live_parameters"]
    counts = [numel((shape,)) for shape in shapes.all]
    largest, partition = max(counts), sum(-(-count // axes.data) for count in counts)
    replicated = sum(count for count in counts if count < zero["stage3_param_persistence_threshold"])
    sharded = sum(counts) - replicated
    # Its prefetching gathers up to `max_live` parameters ahead, and keeps those that fit until backward has used them.
    # The embedding belongs to the outermost module: it is released and gathered again.
    gathered_again = numel(shapes.root) if sharded <= max_live else sharded
    allocations = [
        Allocation("backbone_parameters", size * partition + size * replicated),
        Allocation("backbone_parameters", FP32 * partition, host=offload),
        Allocation("backbone_gradients", FP32 * partition, host=offload),
        Allocation("backbone_optimizer", NUM_MOMENTS * FP32 * partition, host=offload),
        Allocation("backbone_compute", size * min(sharded, max(max_live, largest)), "compute"),
        Allocation("backbone_buffers", FP32 * bucket),
        Allocation("backbone_buffers", FP32 * largest if largest > bucket else 0, "compute"),
    ]
    if offload:
        allocations.append(Allocation("backbone_buffers", FP32 * partition, host=True))
    gathers = size * (sharded + gathered_again) * micro_batches + size * replicated
    messages = [
        ring_message("parameters", "all-gather", "data", axes, gathers),
        ring_message("gradients", "reduce-scatter", "data", axes, FP32 * partition * axes.data * micro_batches),
    ]
    return EngineEstimate(allocations, messages, partition, offload)
