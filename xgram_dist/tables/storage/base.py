"""What every memory tier promises about the records of a shard's touched rows.

if storage.ensure(num_slots): ...            room for more rows; views of `records` are taken again
storage.prefetch(slots)                      the next step reads these
storage.records[slots]                       read as any tensor
with storage.writing(slots): ...             every write to `records` happens in such a block
storage.verify(slots)                        before they are saved
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.errors import GO_BACK, UserError

Slots = NDArray[np.int64]


class DamagedRecordsError(UserError):
    """Records came back from the disk with other bytes than were written. The rows are lost; the last checkpoint is
    good. By its exit code, `train` and Slurm jobs start again and resume from there."""

    exit_code = GO_BACK


class RecordStorage(ABC):
    """Records of the touched rows of a shard: one record a slot, contiguous bytes; grows by slots."""

    records: Tensor
    """float32 [capacity, record_width], zero where never written. May be replaced by `ensure`."""

    on_disk = False
    """Whether `writing` and `verify` do anything."""

    @abstractmethod
    def ensure(self, num_slots: int) -> bool:
        """Room for records 0 to num_slots - 1. True: `records` was replaced, and views must be taken again."""

    def prefetch(self, slots: Slots) -> None:
        """A hint: the next step reads these slots. Returns at once; any thread may call it."""
        return

    def writing(self, slots: Slots) -> AbstractContextManager[None]:
        """Within the block the caller writes to these distinct records, and to no others. One block at a time."""
        return nullcontext()

    def verify(self, slots: Slots) -> None:
        """Raise if one of these records is damaged. For records that are about to be saved."""
        return

    def close(self) -> None:
        """Stop threads and remove files. `records` must not be used afterwards."""
        return
