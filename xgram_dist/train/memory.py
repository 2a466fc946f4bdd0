"""Memory of a rank: the bytes each part of a run holds, and a sentence with the way out when memory runs out."""

from collections.abc import Iterable

from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.engine.base import Engine
from xgram_dist.errors import UserError
from xgram_dist.estimate.advice import advise
from xgram_dist.estimate.comm import Axes
from xgram_dist.estimate.layout import plan_layout
from xgram_dist.estimate.step_time import Machine
from xgram_dist.estimate.traffic import zipf_traffic
from xgram_dist.parallel.device import peak_memory
from xgram_dist.tables.exchange import ShardedTables
from xgram_dist.tables.exchange_plan import Window
from xgram_dist.tables.working_set import Lookup

FP32_BYTES = 4


def footprint(engine: Engine, lookup: Lookup, windows: list[Window]) -> dict[str, int]:
    """`bytes_PART` that this rank holds after a step, and `bytes_peak`. Activations are the rest of the peak."""
    backbone = engine.parameter_shards()
    parts = {
        "backbone": _bytes(t for p in backbone if p.kind == "weight" for _, t in p.chunks),
        "backbone_optimizer": _bytes(t for p in backbone if p.kind != "weight" for _, t in p.chunks),
    }
    if isinstance(lookup, ShardedTables):
        width = sum(sum(shard.widths) for shard in lookup.shards)
        parts["tables"] = sum(shard.value_bytes() for shard in lookup.shards)
        parts["tables_optimizer"] = sum(shard.optimizer_bytes() for shard in lookup.shards)
        # The vectors and their gradients.
        parts["working_set"] = 2 * FP32_BYTES * width * max(len(window.keys) for window in windows)
    return {f"bytes_{name}": value for name, value in parts.items()} | {"bytes_peak": peak_memory(engine.device)}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def explain_out_of_memory(config: Config, ranks: int, error: BaseException) -> UserError:
    """The error with the estimate for a rank and the keys that would help. Token frequencies are assumed to follow
    Zipf's law, which is close enough for memory."""
    axes = Axes.of(config, ranks)
    traffic_of = zipf_traffic(config)
    layout = plan_layout(config, axes, Machine(), traffic_of(axes.rows))
    allocations = sorted((one for one in layout.allocations if not one.host), key=lambda one: -one.bytes)
    needs = ", ".join(f"{one.key.replace('_', ' ')} {one.bytes / 2**30:,.2f}" for one in allocations[:8])
    changes = [advice.change for advice in advise(config, ranks, 0.0, traffic_of)[:3]]
    return UserError(
        f"out of memory ({str(error).splitlines()[0][:160]}); the plan for a rank, in GiB: {needs}; "
        f"{layout.device_bytes / 2**30:,.2f} in all. What would help: {'; '.join(changes) or 'more ranks'}"
    )
