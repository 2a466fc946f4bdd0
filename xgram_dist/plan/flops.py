"""What a memory method adds to the forward pass of one token (pure arithmetic); a multiply and an add count two.

X-gram as the paper counts it: per view (K + 2k + 1) * width multiply-adds, K rows retrieved, k taps. The others by
their formulas: matrices, products and sums; reading a row is none. Norms of a row are the key's alone and do not count.
MoLE and SCONE count as at inference, where their side networks are tables. STEM saves its up projection.
"""

from xgram_dist.config.schema import Config
from xgram_dist.memory.layout import (
    extraction_settings,
    ngram_width,
    plan_tables,
    resolved_layers,
    site_layers,
    table_sites,
)


def retrieved_width(config: Config) -> int:
    """Numbers that a token retrieves, over all tables."""
    memory, width = config.memory, config.model.width
    if memory.method == "engram":
        return len(site_layers(config, "ngram")) * ngram_width(config)
    if memory.method == "mole":
        return len(resolved_layers(config, memory.mole.layers)) * memory.mole.experts * width
    if memory.method == "scone":
        return width
    return sum(table.width for table in plan_tables(config))


def extra_flops_per_token(config: Config) -> int:
    memory, width = config.memory, config.model.width
    if memory.method == "xgram":
        return sum(_view(config, table.site, table.view, table.width) for table in plan_tables(config))
    if memory.method == "ple":  # a gain, a sum
        return 2 * retrieved_width(config)
    if memory.method == "retoken":  # ffn * (1 + a * direction)
        return 3 * memory.retoken.views * width * len(site_layers(config, "ffn"))
    if memory.method == "mort":  # router; rows of all views weighed and added up; scale, sum
        return (4 * memory.mort.views + 1) * width * len(site_layers(config, "block"))
    if memory.method == "stem":  # a row instead of a matrix
        return -2 * width * config.model.ffn_width * len(site_layers(config, "up"))
    if memory.method == "engram":  # two matrices, the score, the gate, the taps
        layer = 2 * ngram_width(config) * width + (memory.engram.taps + 2) * width
        return 2 * layer * len(site_layers(config, "ngram"))
    if memory.method == "mole":  # router; rows of all experts weighed and added up
        return 4 * memory.mole.experts * width * len(resolved_layers(config, memory.mole.layers))
    if memory.method == "scone":  # a sum
        return width
    return 0


def _view(config: Config, site: str, view: int, width: int) -> int:
    kernels = table_sites(config)[site].kernels
    taps = kernels[view % len(kernels)] if extraction_settings(config).enabled else 0
    retrieved = 1 + config.memory.routing.copies if config.memory.compression < 1 else 1
    return 2 * (retrieved + 2 * taps + 1) * width
