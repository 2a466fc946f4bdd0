"""Where the records of a shard lie: one record a slot, in the memory tier that `memory.placement` names."""

import mmap
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FIRST_SLOTS = 1024
RESERVED_BYTES = 1 << 40
"""Most address space that a shard in host memory reserves; pages are allocated when they are written."""
_MAP_NORESERVE = 0x4000  # sys/mman.h


class RecordStorage(ABC):
    """Records of the touched rows of a shard: one record a slot, contiguous bytes; grows by slots."""

    records: Tensor
    """float32 [capacity, record_width], zero where never written; may be replaced by `ensure`."""

    @abstractmethod
    def ensure(self, num_slots: int) -> bool:
        """Make the capacity at least `num_slots`. True if `records` was replaced: views must be taken again."""

    def prefetch(self, slots: NDArray[np.int64]) -> None:
        """A hint: the next step reads these slots. It does not wait, and any thread may call it."""
        return

    def close(self) -> None:
        return


class MemoryStorage(RecordStorage):
    """Records in device or host memory. Capacity doubles; in host memory as much as is reserved needs no copy."""

    def __init__(self, record_width: int, max_slots: int, device: torch.device):
        self._max_slots = max_slots
        size = 4 * record_width * max_slots
        if device.type == "cpu" and 0 < size <= RESERVED_BYTES:
            reserved = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
            self.records = torch.frombuffer(reserved, dtype=torch.float32).view(max_slots, record_width)
        else:
            self.records = torch.zeros(min(max_slots, FIRST_SLOTS), record_width, device=device)

    def ensure(self, num_slots: int) -> bool:
        capacity, width = self.records.shape
        if num_slots <= capacity:
            return False
        assert num_slots <= self._max_slots, (num_slots, self._max_slots)
        larger = self.records.new_zeros(min(self._max_slots, max(num_slots, 2 * capacity)), width)
        larger[:capacity] = self.records
        self.records = larger
        return True


def open_storage(
    placement: str, record_width: int, max_slots: int, device: torch.device, folder: Path | None, name: str
) -> RecordStorage:
    """`max_slots`: rows of the shard. `folder`: of the disk tier's files. `name`: of this shard's file there."""
    return MemoryStorage(record_width, max_slots, device)
