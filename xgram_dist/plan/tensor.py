"""What ranks that share each layer send one another: Megatron's sums; with sequence parallelism, gathers and scatters.

Recomputing a block (activation checkpointing) sends again what its forward pass sent, but for the last sum, on which
nothing that backward needs depends.
"""

from xgram_dist.config.schema import Config
from xgram_dist.memory.layout import RESIDUAL_SITES, extraction_settings, plan_tables
from xgram_dist.plan.axes import Axes
from xgram_dist.plan.engines import compute_bytes
from xgram_dist.plan.messages import Message, message
from xgram_dist.plan.shapes import extractor_taps

FP32 = 4


def plan_tensor_messages(config: Config, axes: Axes, micro_batches: int, distinct_tokens: float) -> list[Message]:
    """`distinct_tokens`: of a window."""
    if axes.tensor == 1:
        return []
    model, again = config.model, config.train.activation_checkpointing
    tokens = config.train.micro_batch * model.sequence_length * micro_batches
    hidden, layers = compute_bytes(config) * tokens * model.width, model.layers
    passes = 3 if again else 2
    found = [
        message("norms of q and k", "all-reduce", "tensor", axes, FP32 * 2 * tokens * layers * passes),
        message("loss", "all-reduce", "tensor", axes, FP32 * 3 * tokens),
    ]
    # Embedding, two layers a block, head; forward and backward.
    sums = 2 + 4 * layers + (layers if again else 0)
    if config.parallel.sequence_parallel:
        gathers = 2 + 4 * layers + (2 * layers if again else 0)
        found.append(message("activations", "all-gather", "tensor", axes, hidden * gathers))
        found.append(message("activations", "reduce-scatter", "tensor", axes, hidden * sums))
        found.append(
            message("gradients of whole parameters", "all-reduce", "tensor", axes, _whole(config, micro_batches))
        )
    else:
        found.append(message("activations", "all-reduce", "tensor", axes, hidden * sums))
    extraction = extraction_settings(config)
    if config.memory.method == "xgram" and extraction.enabled and extraction.norm:
        views = sum(table.site not in RESIDUAL_SITES for table in plan_tables(config))
        size = FP32 * distinct_tokens * views * passes * micro_batches
        found.append(message("norms of vectors", "all-reduce", "tensor", axes, size))
    return found


def _whole(config: Config, micro_batches: int) -> float:
    """Gradients of parameters that each rank has whole, but uses on its part of the sequence."""
    memory = config.memory
    numbers = (1 + 2 * config.model.layers) * config.model.width
    for table in plan_tables(config):
        taps = extractor_taps(config, table.site)
        if table.site in RESIDUAL_SITES and taps:
            length = taps[table.view % len(taps)]
            numbers += table.width * ((2 * length + 1) if memory.extraction.gate else length)
    return FP32 * numbers * micro_batches
