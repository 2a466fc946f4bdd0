"""What forward and backward of a micro-batch hold: activations, and the loss at work.

Counted as autograd keeps them, operation by operation, or, for compiled blocks, as torch's partitioner does. Norms and
extraction are fp32, the rest is of the compute type. With activation checkpointing each block keeps its input, and one
block is computed again at a time. Operands of a single operation, and gradients on their way through a block, are not
counted.
"""

from xgram_dist.config.schema import Config
from xgram_dist.memory.layout import (
    RESIDUAL_SITES,
    extraction_settings,
    ngram_width,
    resolved_layers,
    site_layers,
    site_width,
    table_sites,
)
from xgram_dist.plan.axes import Axes
from xgram_dist.plan.engines import compute_bytes
from xgram_dist.plan.parts import Part
from xgram_dist.plan.shapes import extractor_taps

FP32 = 4


def plan_activations(config: Config, axes: Axes) -> list[Part]:
    model, size = config.model, compute_bytes(config)
    tokens = config.train.micro_batch * model.sequence_length
    apart = axes.tensor if config.parallel.sequence_parallel else 1
    blocks = [tokens * block_bytes(config, layer, axes.tensor) for layer in range(model.layers)]
    final = tokens * model.width * (2 * FP32 / apart + size) + tokens * (FP32 + 2 * 8)  # norm, hidden states; ids
    loss = _loss_bytes(config, axes.tensor)
    if config.train.activation_checkpointing:
        kept = model.layers * tokens * model.width * size / apart
        again = max(blocks)
        return [
            Part("activations", kept + final + again, "compute"),
            Part("loss", max(0.0, loss - again), "compute"),  # never at one time with a block
        ]
    return [Part("activations", sum(blocks) + final, "compute"), Part("loss", loss, "compute")]


def block_bytes(config: Config, layer: int, tensor: int) -> float:
    """Of a token."""
    model, size = config.model, compute_bytes(config)
    width, kv, inner = model.width, site_width(config, "v"), model.ffn_width
    apart = tensor if config.parallel.sequence_parallel else 1
    scales = 4 + model.heads / tensor
    sites = sum(_site_numbers(config, site, tensor) for site in _sites_of(config, layer))
    if config.train.compile:
        # Outputs of the two norms, whole for the layers behind them; the residual stream at both; q and k before and
        # after their norms, v and what attention gives; three of the feed-forward.
        computed = 2 * width + 2 * width / apart + (3 * width + 3 * kv + 3 * inner) / tensor
        return size * computed + FP32 * (scales + sites)
    # Outputs of the two norms; q, k, v and what attention gives; the feed-forward's gate, its SiLU, its other branch,
    # their product. Input and normalised input of each norm: two of the block's width, those of q and of k.
    computed = 2 * width + (2 * width + 2 * kv + 4 * inner) / tensor
    normed = 4 * width / apart + 2 * (width + kv) / tensor
    return size * computed + FP32 * (normed + scales + sites)


def _sites_of(config: Config, layer: int) -> list[str]:
    if config.memory.method == "mole":
        return ["experts"] if layer in resolved_layers(config, config.memory.mole.layers) else []
    return [site for site in table_sites(config) if layer in site_layers(config, site)]


def _site_numbers(config: Config, site: str, tensor: int) -> float:
    """fp32 numbers of a token: the retrieved vector, its normalised copies (one a tap), content, gate, SiLU, result."""
    if site in OWN_NUMBERS:
        return _own_numbers(config, site, tensor)
    extraction, views = extraction_settings(config), table_sites(config)[site].views
    residual = site in RESIDUAL_SITES
    apart = (tensor if config.parallel.sequence_parallel else 1) if residual else tensor
    width = site_width(config, site) / apart
    taps = extractor_taps(config, site)
    if not taps:
        return views * width
    copies = 3 if config.train.compile else 2 + (1 if extraction.norm else 0) + (3 if extraction.gate else 0)
    return sum(taps[view % len(taps)] - 1 + copies for view in range(views)) * width


OWN_NUMBERS = ("ffn", "block", "up", "ngram", "experts")


def _own_numbers(config: Config, site: str, tensor: int) -> float:
    """fp32 numbers of a token at the site of a method that has its own, roughly: operands of its products."""
    memory, width = config.memory, config.model.width
    if site == "ffn":
        return 3 * memory.retoken.views * width + width
    if site == "block":
        return (memory.mort.views + 3) * width
    if site == "up":
        return config.model.ffn_width / tensor
    if site == "experts":  # what experts keep is of distinct tokens, and counts little
        return memory.mole.experts * width
    return 2 * ngram_width(config) + (memory.engram.taps + 8) * width


def _loss_bytes(config: Config, tensor: int) -> float:
    """Logits of a chunk in fp32 (and as the matrix product gives and takes them), and the head's gradient: its sum,
    and what a chunk adds."""
    model, size = config.model, compute_bytes(config)
    vocabulary = model.vocabulary / tensor
    chunk = min(model.loss_chunk, config.train.micro_batch * model.sequence_length)
    beside = size if size < FP32 else 0
    return vocabulary * (chunk * (FP32 + beside) + model.width * (2 * FP32 + beside))
