"""Records in memory: of the device, or of the host."""

import mmap

import torch

from xgram_dist.errors import UserError
from xgram_dist.parallel.device import advise_huge_pages
from xgram_dist.tables.storage.base import RecordStorage
from xgram_dist.tables.storage.system import memory_limit, reserve_memory

FIRST_BYTES = 1 << 20
"""Of the first tensor on a device."""


class DeviceStorage(RecordStorage):
    """A tensor that doubles. One tensor, not pieces, so that the rows of a step are one gather and one scatter. Over a
    run, every record is copied less than twice; while it grows, the old tensor and the new one are held."""

    def __init__(self, record_width: int, max_slots: int, device: torch.device):
        self._max_slots = max(1, max_slots)
        slots = min(self._max_slots, max(1, FIRST_BYTES // (4 * record_width)))
        self.records = torch.zeros(slots, record_width, device=device)

    def ensure(self, num_slots: int) -> bool:
        assert num_slots <= self._max_slots, (num_slots, self._max_slots)
        old, width = len(self.records), self.records.shape[1]
        if num_slots <= old:
            return False
        slots = min(self._max_slots, max(num_slots, 2 * old))
        try:
            grown = self.records.new_empty(slots, width)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"no room on the device for {num_slots:,} touched table rows ({4 * width * slots:,} bytes, beside "
                f"{4 * width * old:,} that are copied); set memory.placement=host or use more ranks"
            ) from error
        grown[:old] = self.records
        grown[old:].zero_()
        self.records = grown
        return True


class HostStorage(RecordStorage):
    """Address space for all records, reserved once: `records` is never replaced. Pages are taken when a record is
    written, huge ones where the system has them."""

    def __init__(self, record_width: int, max_slots: int):
        record_bytes = 4 * record_width
        # No more than there is memory: 10^11 slots would exceed the address space.
        capacity = max(1, min(max_slots, memory_limit() // record_bytes))
        memory: mmap.mmap = reserve_memory(capacity * record_bytes)
        self.records = advise_huge_pages(torch.frombuffer(memory, dtype=torch.float32).view(capacity, record_width))

    def ensure(self, num_slots: int) -> bool:
        capacity, width = self.records.shape
        if num_slots > capacity:
            raise UserError(
                f"{num_slots:,} touched table rows take {4 * width * num_slots:,} bytes, more than this host's memory; "
                "set memory.placement=disk and memory.folder, or use more nodes"
            )
        return False
