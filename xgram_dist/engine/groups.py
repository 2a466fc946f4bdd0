"""Process groups as FSDP and DeepSpeed want them: also for an axis of one rank, and for a run of one process."""

from typing import Any

import torch
import torch.distributed as dist

from xgram_dist.parallel.ranks import Ranks


class Groups:
    """`of` gives an axis's group. `close` takes back the process group that a run of one process had to make."""

    def __init__(self, device: torch.device):
        self.made = not dist.is_initialized()
        if self.made:
            backend = "nccl" if device.type == "cuda" else "gloo"
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        self._alone: Any = None

    def of(self, axis: Ranks) -> Any:
        if axis.size > 1:
            return axis.group
        if dist.get_world_size() == 1:
            return dist.group.WORLD
        if self._alone is None:
            self._alone = dist.new_group([dist.get_rank()], timeout=axis.timeout, use_local_synchronization=True)
        return self._alone

    def close(self) -> None:
        if self.made and dist.is_initialized():
            dist.destroy_process_group()
