"""How many micro-batches share a working set, by the recipe and by how many distinct tokens they will have."""

from collections.abc import Callable

from xgram_dist.config.schema import Config
from xgram_dist.config.units import parse_bytes
from xgram_dist.memory.layout import plan_tables

FP32 = 4


def plan_windows(config: Config, micro_batches: int, distinct: Callable[[int], float]) -> list[int]:
    """Micro-batches of each window of a step. `distinct`: tokens of so many micro-batches."""
    window = config.memory.window
    if isinstance(window, int):
        size = min(window, micro_batches)
    elif window == "step":
        size = micro_batches
    else:
        budget = parse_bytes(window) / (2 * FP32 * sum(table.width for table in plan_tables(config)))
        size = next((n for n in range(micro_batches, 0, -1) if distinct(n) <= budget), 1)
    return [min(size, micro_batches - start) for start in range(0, micro_batches, size)]
