"""Memory of a rank, by allocation; here those of activations and the loss.

Allocations of phase `step` are permanent. Those of the other phases come and go (`compute`: forward and backward;
`reduce`: the gradients after the last backward pass; `exchange`: fetch and return of table vectors), so the peak is the
permanent ones plus the largest of these phases. `engines.py` has the allocations of the backbone, `tables.py` those of
the tables.
"""

from dataclasses import dataclass
from typing import Any, Literal

from xgram_dist.config.schema import Config
from xgram_dist.estimate.comm import FP32, Axes, compute_bytes, rank_tokens
from xgram_dist.model.methods.base import method_of
from xgram_dist.tables.layout import site_width

Phase = Literal["step", "compute", "reduce", "exchange"]
INT32, INT64 = 4, 8


@dataclass(frozen=True)
class Allocation:
    key: str
    bytes: float
    phase: Phase = "step"
    host: bool = False
    """In host memory, not on the device."""

    def as_dict(self) -> dict[str, Any]:
        return {"key": self.key, "bytes": self.bytes, "moment": self.phase, "host": self.host}


def peak_bytes(allocations: list[Allocation], *, host: bool = False) -> float:
    """Of the device, or of the host."""
    sums: dict[str, float] = {}
    for allocation in allocations:
        if allocation.host == host:
            sums[allocation.phase] = sums.get(allocation.phase, 0.0) + allocation.bytes
    return sums.pop("step", 0.0) + max(sums.values(), default=0.0)


def merge_allocations(allocations: list[Allocation]) -> list[Allocation]:
    """Sums those that share key, phase and memory, and drops empty ones."""
    sums: dict[tuple[str, Phase, bool], float] = {}
    for allocation in allocations:
        key = (allocation.key, allocation.phase, allocation.host)
        sums[key] = sums.get(key, 0.0) + allocation.bytes
    return [Allocation(key, size, phase, host) for (key, phase, host), size in sums.items() if size]


# Activations and the loss


def plan_activations(config: Config, axes: Axes, micro_batches: int = 1) -> list[Allocation]:
    """What forward and backward of a micro-batch hold; in a pipeline, of those that are under way. `micro_batches`: of
    a step.

    Counted as autograd saves tensors, operation by operation, or, for compiled blocks, as torch's partitioner does.
    Norms and extraction are fp32, the rest is in the compute type. With activation checkpointing each block saves its
    input, and one block at a time is recomputed. Operands of a single operation and gradients in flight within a block
    are not counted.
    """
    model, size = config.model, compute_bytes(config)
    tokens = rank_tokens(config)
    sequence_ranks = axes.tensor if config.parallel.sequence_parallel else 1
    stages, recomputes = axes.stages(config), config.train.activation_checkpointing
    residual = tokens * model.width * size / sequence_ranks
    final_norm = tokens * model.width * (2 * FP32 / sequence_ranks + size) + tokens * FP32
    token_ids = tokens * 2 * INT64
    loss = _loss_bytes(config, axes.tensor) if stages[-1].is_last else 0.0
    saved = recomputed = 0.0
    largest = 0
    """Blocks whose remote keys and values are held at once."""
    for stage, count in zip(stages, micro_batches_under_way(config, axes, micro_batches), strict=True):
        blocks = [tokens * block_activation_bytes(config, layer, axes.tensor) for layer in stage.layers]
        of_stage = len(blocks) * residual if recomputes else sum(blocks)
        # What a stage has sent stays until its gradient comes.
        of_stage += final_norm + token_ids if stage.is_last else residual
        saved += count * of_stage
        recomputed = max(recomputed, *blocks) if recomputes else 0.0
        largest = 1 if recomputes else largest + count * len(blocks)
    remote = largest * _remote_keys_and_values_bytes(config, axes)
    allocations = [
        Allocation("activations", saved + recomputed, "compute"),
        Allocation("keys_and_values", remote, "compute"),
        # The loss is done before the first block is recomputed.
        Allocation("loss", max(0.0, loss - recomputed - (remote if recomputes else 0.0)), "compute"),
    ]
    if axes.pipeline > 1:  # a gradient that comes, and one that leaves
        ends = int(stages[0].is_first) + int(stages[-1].is_last)
        allocations.append(Allocation("stage_buffers", (2 * len(stages) - ends) * residual, "compute"))
    return allocations


def micro_batches_under_way(config: Config, axes: Axes, micro_batches: int) -> list[int]:
    """For each stage of this rank, the micro-batches that have been forward and not backward, when they are most. As
    torch's schedules order them: so many forwards first, then a forward and a backward in turn."""
    ranks, stages = axes.pipeline, len(axes.stages(config))
    if ranks == 1:
        return [1]
    last = ranks - 1 - axes.at
    if stages == 1 and config.parallel.pipeline_schedule == "1f1b":
        return [min(micro_batches, last + 1)]
    of_round = micro_batches // max(1, micro_batches // ranks)
    ahead = last if config.parallel.pipeline_schedule == "zero_bubble" else 2 * last
    first = min((stages - 1) * of_round + ahead + 1, stages * micro_batches)
    counts = [0] * stages
    for step in range(first):
        counts[step // of_round % stages] += 1
    return counts


def _remote_keys_and_values_bytes(config: Config, axes: Axes) -> float:
    """Of the other ranks of the context axis, in one block: what passing them round a ring would not hold."""
    local = rank_tokens(config) * 2 * compute_bytes(config) * site_width(config, "v") / axes.tensor
    return (axes.context - 1) * local


def block_activation_bytes(config: Config, layer: int, tensor: int) -> float:
    """Of a token, in one block."""
    model, size = config.model, compute_bytes(config)
    width, kv, inner = model.width, site_width(config, "v"), model.ffn_width
    query = model.attention_width
    sequence_ranks = tensor if config.parallel.sequence_parallel else 1
    norm_scales = 4 + model.heads / tensor
    sites = method_of(config).activation_numbers(layer, tensor)
    if config.train.compile:
        # Outputs of the two norms, for the whole sequence; the residual stream at both; q and k before and after their
        # norms, v and the output of attention; three of the feed-forward.
        computed = 2 * width + 2 * width / sequence_ranks + (3 * query + 3 * kv + 3 * inner) / tensor
        return size * computed + FP32 * (norm_scales + sites)
    # Outputs of the two norms; q, k, v and the output of attention; the feed-forward's gate, its SiLU, its up
    # projection, their product. Input and normalised input of each norm: two of the block's width, those of q and of k.
    computed = 2 * width + (2 * query + 2 * kv + 4 * inner) / tensor
    normed = 4 * width / sequence_ranks + (0 if model.qk_norm == "none" else 2 * (query + kv) / tensor)
    return size * computed + FP32 * (normed + norm_scales + sites)


def _loss_bytes(config: Config, tensor: int) -> float:
    """Logits of a chunk and the head's gradient. Compiled for a GPU: one buffer in the compute type, and a sum. Else
    logits are in fp32 too, beside what the matrix products return and read, and a chunk's contribution is beside the
    sum."""
    model, size = config.model, compute_bytes(config)
    vocabulary = model.vocabulary / tensor
    chunk = min(model.loss_chunk, rank_tokens(config))
    if config.train.compile:
        return vocabulary * (chunk * size + model.width * 2 * FP32)
    cast = size if size < FP32 else 0
    return vocabulary * (chunk * (FP32 + cast) + model.width * (2 * FP32 + cast))
