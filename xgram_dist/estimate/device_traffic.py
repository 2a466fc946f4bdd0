"""FLOPs and bytes of device memory of a step on one rank, by part of the step.

    head         the three matrix products of the loss, and the passes over the logits between them
    blocks       matrix products, attention, and what is elementwise between them
    extraction   gather of the working set's vectors, short convolutions, injection; forward and backward
    scatter      gradients of positions summed into the rows of the working set
    exchange     owners gather, gate and send rows; gradients come back and are summed over readers
    update       AdamW of backbone and tables

Matrix products and attention are bound by FLOPs; their own bytes are not counted. The rest is bound by memory.
The constants of compiled blocks, extraction, scatter, eager bf16 logits and the exchange on one rank agree to 5 % with
counts of traced graphs (tests/unit/estimate/test_device_traffic.py): an operation reads its inputs and writes its
outputs; what is compiled is fused between matrix products. The other constants are derived by hand from the code, and
EAGER_FACTOR is an estimate. Whoever changes a kernel of the product changes its constant here.
"""

from dataclasses import dataclass
from typing import Literal

from xgram_dist.config.schema import Config
from xgram_dist.estimate.comm import FP32, Axes, compute_bytes, rank_tokens
from xgram_dist.estimate.flops import block_flops_per_token, plan_budget
from xgram_dist.model.methods.base import method_of
from xgram_dist.tables.layout import site_width

PartName = Literal["head", "blocks", "extraction", "scatter", "exchange", "update"]

# Bytes for each logit.
HEAD_EAGER_BYTES = {2: 44, 4: 40}
"""By bytes of the compute type: cast to fp32, maximum, subtraction, exponential, sum, product, cast back."""
HEAD_COMPILED_PASSES = 3
"""The logits are read once for maximum and sum, read again, and overwritten by their gradient; in the compute type."""
HEAD_WEIGHT_PASSES = 2
"""fp32 passes over the head's gradient for each chunk: the matrix product reads the sum and writes it."""

# Numbers of the compute type, for each token and block: (of the width, of the key/value width, of the feed-forward's).
BLOCK_FORWARD = (16, 6, 3)
"""Two norms, two residual sums, rotary embedding and norms of q and k, SwiGLU."""
BLOCK_FORWARD_AND_BACKWARD = (60, 20, 9)
EAGER_FACTOR = 3.0
"""Blocks that are not compiled: each operation is a pass of its own, and norms are fp32."""

# fp32 passes over the retrieved vectors of each token.
EXTRACTION_FORWARD = (1, 0.5)
"""(for each view, for each site): vectors are gathered; the sum of the views is written, in the compute type."""
EXTRACTION_BACKWARD = (2, 0.5)
"""The vectors again and their gradient; the gradient of the site."""
SCATTER_TOKEN_PASSES = 1
"""Gradients of positions are read once, in the order of their rows."""
SCATTER_ROW_PASSES = 4
"""Rows of the working set: written by each micro-batch, then added to the sum of those before."""

# fp32 passes of fetch and return together: over rows hit on this rank, over vectors of this rank's distinct tokens.
EXCHANGE_GATED = (16, 5)
"""Hashed rows with gates; in addition, 2 for each row that a token reads."""
EXCHANGE_PLAIN = (2, 2)
"""One row a token, read in place."""
EXCHANGE_REMOTE = 4
"""Vectors of other ranks: written to be sent and read as received, each way."""


@dataclass(frozen=True)
class Part:
    name: PartName
    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    bytes: float = 0.0
    """Read and written in device memory, beside matrix products and attention."""


def plan_compute_parts(config: Config, axes: Axes, micro_batches: int, gradient_rows: float) -> list[Part]:
    """Head, blocks, extraction and scatter of a step. `gradient_rows`: rows of the tensors to which gradients of table
    vectors are summed: distinct tokens of a window."""
    tokens = rank_tokens(config) * micro_batches
    return [
        _head(config, axes, tokens),
        _blocks(config, axes, tokens),
        _extraction(config, axes, tokens),
        _scatter(config, axes, tokens, micro_batches, gradient_rows),
    ]


def _head(config: Config, axes: Axes, tokens: float) -> Part:
    if not axes.stages(config)[-1].is_last:
        return Part("head")
    model, size = config.model, compute_bytes(config)
    vocabulary = model.vocabulary / axes.tensor
    per_logit = HEAD_COMPILED_PASSES * size if config.train.compile else HEAD_EAGER_BYTES[size]
    chunks = tokens / min(model.loss_chunk, rank_tokens(config))
    weight = FP32 * HEAD_WEIGHT_PASSES * vocabulary * model.width * chunks
    return Part("head", 3 * 2 * vocabulary * model.width * tokens, 0.0, per_logit * vocabulary * tokens + weight)


def _blocks(config: Config, axes: Axes, tokens: float) -> Part:
    """Activation checkpointing repeats the forward pass."""
    model, train, share = config.model, config.train, _share_of_layers(config, axes)
    forward = (
        2 * model.layers * model.attention_width * model.sequence_length
    )  # attention over half the sequence on average
    passes = 4 if train.activation_checkpointing else 3
    matmul = block_flops_per_token(config) - forward
    if method_of(config).elementwise:
        matmul -= plan_budget(config).extra_flops_per_token
    counted = [BLOCK_FORWARD_AND_BACKWARD, *([BLOCK_FORWARD] if train.activation_checkpointing else [])]
    sequence = axes.tensor if config.parallel.sequence_parallel else 1
    widths = (model.width / sequence, site_width(config, "v") / axes.tensor, model.ffn_width / axes.tensor)
    numbers = sum(count * width for counts in counted for count, width in zip(counts, widths, strict=True))
    numbers *= 1.0 if train.compile else EAGER_FACTOR
    return Part(
        "blocks",
        share * passes * matmul * tokens / axes.tensor,
        # Backward of attention recomputes the scores: 2.5 times forward.
        share * (passes + 0.5) * forward * tokens / axes.tensor,
        compute_bytes(config) * numbers * len(axes.method(config).held) * tokens,
    )


def _share_of_layers(config: Config, axes: Axes) -> float:
    """Those of this rank of a pipeline."""
    return len(axes.method(config).held) / config.model.layers


def _retrieved_width(config: Config, axes: Axes) -> float:
    """Numbers that a token retrieves in the layers of this rank."""
    return _share_of_layers(config, axes) * method_of(config).retrieved_width()


def _extraction(config: Config, axes: Axes, tokens: float) -> Part:
    forwards = 2 if config.train.activation_checkpointing else 1
    view = forwards * EXTRACTION_FORWARD[0] + EXTRACTION_BACKWARD[0]
    site = forwards * EXTRACTION_FORWARD[1] + EXTRACTION_BACKWARD[1]
    tables = axes.layout(config).tables
    # A site is as wide as one of its views.
    sites = {(table.layer, table.site): table.width for table in tables}
    numbers = view * _retrieved_width(config, axes) / axes.tensor + site * sum(sites.values())
    return Part("extraction", bytes=FP32 * numbers * tokens if tables else 0.0)


def _scatter(config: Config, axes: Axes, tokens: float, micro_batches: int, rows: float) -> Part:
    layout = axes.layout(config)
    if not layout.tables:
        return Part("scatter")
    positions = SCATTER_TOKEN_PASSES * tokens * _retrieved_width(config, axes) / axes.tensor
    summed = SCATTER_ROW_PASSES * rows * layout.width * micro_batches
    return Part("scatter", bytes=FP32 * (positions + summed))


def exchange_bytes(config: Config, axes: Axes, hit_rows: float, vectors: float) -> float:
    """Of device memory, by fetch and return. `hit_rows`: rows of this rank that any rank reads in the step. `vectors`:
    distinct tokens of this rank, over all windows."""
    layout = axes.layout(config)
    rows, tokens = EXCHANGE_GATED if layout.hashed else EXCHANGE_PLAIN
    tokens += 2 * config.memory.routing.paths if layout.hashed else 0
    remote = EXCHANGE_REMOTE * (1 - 1 / axes.rows)
    return FP32 * layout.width * (rows * hit_rows + (tokens + remote) * vectors)
