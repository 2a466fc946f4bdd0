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


def plan_activations(config: Config, axes: Axes) -> list[Allocation]:
    """What forward and backward of a micro-batch hold.

    Counted as autograd saves tensors, operation by operation, or, for compiled blocks, as torch's partitioner does.
    Norms and extraction are fp32, the rest is in the compute type. With activation checkpointing each block saves its
    input, and one block at a time is recomputed. Operands of a single operation and gradients in flight within a block
    are not counted.
    """
    model, size = config.model, compute_bytes(config)
    tokens = rank_tokens(config)
    sequence_ranks = axes.tensor if config.parallel.sequence_parallel else 1
    blocks = [tokens * block_activation_bytes(config, layer, axes.tensor) for layer in range(model.layers)]
    final_norm = tokens * model.width * (2 * FP32 / sequence_ranks + size) + tokens * FP32
    token_ids = tokens * 2 * INT64
    loss, remote = _loss_bytes(config, axes.tensor), _remote_keys_and_values_bytes(config, axes)
    if not config.train.activation_checkpointing:
        saved = sum(blocks) + (final_norm + token_ids)
        return [
            Allocation("activations", saved, "compute"),
            Allocation("keys_and_values", remote * model.layers, "compute"),
            Allocation("loss", loss, "compute"),
        ]
    inputs = model.layers * tokens * model.width * size / sequence_ranks
    recomputed = max(blocks)
    return [
        Allocation("activations", inputs + (final_norm + token_ids) + recomputed, "compute"),
        Allocation("keys_and_values", remote, "compute"),
        # The loss is done before the first block is recomputed.
        Allocation("loss", max(0.0, loss - recomputed - remote), "compute"),
    ]


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
