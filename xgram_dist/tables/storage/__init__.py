"""Records of a shard's touched rows in one of three memory tiers (`memory.placement`).

base        the interface: records by slot, growth, hints, what every tier promises
memory      device: a tensor that grows; host: address space reserved once
disk        a sparse memory-mapped file in a scratch folder; readahead and write-back in the background
scratch     the scratch folder: owners, leftovers of killed runs, full disks, file systems that will not do
checksums   damaged records are found before they are used
system      calls of Linux that Python has no name for
staging     rows of host records on a GPU, gathered while the former step computes
"""

from pathlib import Path

import torch

from xgram_dist.tables.storage.base import DamagedRecordsError, RecordStorage
from xgram_dist.tables.storage.disk import DiskStorage
from xgram_dist.tables.storage.memory import DeviceStorage, HostStorage

__all__ = ["DamagedRecordsError", "RecordStorage", "open_storage"]


def open_storage(
    placement: str,
    record_width: int,
    max_slots: int,
    device: torch.device,
    folder: Path | None,
    name: str,
    sharers: int = 1,
) -> RecordStorage:
    """Storage without records yet. `placement`: the memory tier. `max_slots`: no shard has more; reserving them costs
    nothing. `device`: where the model computes. `folder`: `memory.folder`, for the disk tier. `name`: of this rank's
    shard, different from those of all other storages of the run on this node, of which there are `sharers`."""
    if placement == "disk":
        assert folder is not None, "placement=disk without a folder passed the checks of the recipe"
        return DiskStorage(record_width, max_slots, folder, name, sharers)
    if placement == "host" or device.type == "cpu":
        return HostStorage(record_width, max_slots)
    return DeviceStorage(record_width, max_slots, device)
