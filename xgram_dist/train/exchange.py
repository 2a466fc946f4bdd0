"""What the exchange of a step moved, from its plan alone."""

from typing import Any

from xgram_dist.config import Config
from xgram_dist.memory.layout import plan_slabs
from xgram_dist.memory.plan import Window

ID_BYTES = 4


def exchange_figures(config: Config, windows: list[Window], rank: int) -> dict[str, Any]:
    """Of this rank, over all windows of the step. Vectors and bytes are those that leave or enter it.

    The lower bound is what no exchange could do without: each distinct token that has a row elsewhere, once each way.
    Imbalance: what this rank asks of its busiest owner, against the mean owner.
    """
    if not any(window.slabs for window in windows):
        return {}
    size = 2 if config.memory.wire == "bf16" else 4
    asked = answered = sent = received = bound = 0
    load: list[int] = []
    for window in windows:
        for slab, plan in zip(plan_slabs(config), window.slabs, strict=True):
            out, back = sum(plan.asked) - plan.asked[rank], sum(plan.answered) - plan.answered[rank]
            asked, answered = asked + out, answered + back
            sent += (out + back) * slab.width * size + out * ID_BYTES
            received += (out + back) * slab.width * size + back * ID_BYTES
            bound += 2 * plan.off_rank * slab.width * size
            load = [a + b for a, b in zip(load or [0] * len(plan.asked), plan.asked, strict=True)]
    return {
        "distinct_tokens": sum(window.distinct for window in windows),
        "windows": len(windows),
        "vectors_received": asked,
        "vectors_sent": answered,
        "bytes_sent": sent,
        "bytes_received": received,
        "bytes_bound": bound,
        "imbalance": max(load) * len(load) / max(1, sum(load)),
    }
