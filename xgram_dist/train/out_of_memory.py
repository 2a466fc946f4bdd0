"""When memory runs out: what the plan says a rank needs, and the keys that would help."""

import torch

from xgram_dist.config import Config
from xgram_dist.errors import UserError
from xgram_dist.plan.advice import advise
from xgram_dist.plan.axes import Axes
from xgram_dist.plan.layout import plan_layout
from xgram_dist.plan.machine import Machine
from xgram_dist.plan.traffic import assumed_traffic

CPU_WORDS = "DefaultCPUAllocator"


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_WORDS in str(error)


def explained(config: Config, ranks: int, error: BaseException) -> UserError:
    """The failure as a user can act on it. Token frequencies are taken as Zipf's: close enough for memory."""
    axes = Axes.of(config, ranks)
    traffic_of = assumed_traffic(config)
    layout = plan_layout(config, axes, Machine(), traffic_of(axes.data))
    parts = sorted((part for part in layout.parts if not part.host), key=lambda part: -part.bytes)
    needs = ", ".join(f"{part.key.replace('_', ' ')} {part.bytes / 2**30:,.2f}" for part in parts[:8])
    helps = [one.change for one in advise(config, ranks, 0.0, traffic_of)[:3]]
    return UserError(
        f"out of memory ({str(error).splitlines()[0][:160]}); the plan for a rank, in GiB: {needs}; "
        f"{layout.device_bytes / 2**30:,.2f} in all. What would help: {'; '.join(helps) or 'more ranks'}"
    )
