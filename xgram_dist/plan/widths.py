"""How wide a token's vectors are in the working set of a rank."""

from xgram_dist.config.schema import Config
from xgram_dist.memory.layout import RESIDUAL_SITES, plan_tables


def working_set_width(config: Config, tensor: int) -> int:
    """Columns of all tables: residual sites are whole on every rank, attention sites are of its heads."""
    return sum(t.width * (tensor if t.site in RESIDUAL_SITES else 1) for t in plan_tables(config, tensor))


def pieces_width(config: Config, tensor: int) -> int:
    """Columns that a rank holds beside the whole vectors it gathered from them, and whose gradients it holds beside
    the whole ones."""
    return sum(t.width for t in plan_tables(config, tensor) if t.site in RESIDUAL_SITES) if tensor > 1 else 0
