"""Records: all that a shard keeps of a row, side by side in one piece of memory, for touched rows only.

    | rows W | rows.first W | rows.second W | gates J | gates.first J | .. | rows.last | rows.current | hit | .. |

A record holds values, what the optimizers keep, gates, and bookkeeping (int32) of one row of a slab. `Records` knows
which slot holds which row (slots.py) and gives the fields of all records as strided tensors [capacity, width], on which
optimizers work. Planning gives rows their slots, a step ahead in its own thread; the training thread creates their
records, that is, initialises them, before they are first read (shard.py).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.tables.slots import SlotMap
from xgram_dist.tables.storage import open_storage

LINE = 16
"""Numbers of a cache line. Records begin at a line."""


@dataclass(frozen=True)
class Field:
    """Of a record: `width` numbers in fp32, or one in int32."""

    name: str
    width: int
    integer: bool = False


def record_width(fields: list[Field]) -> int:
    """Numbers of a record."""
    return -(-sum(field.width for field in fields) // LINE) * LINE


@dataclass(frozen=True)
class StorageSettings:
    """Where the records of a rank lie."""

    placement: str
    device: torch.device
    folder: Path | None
    rank: int
    """Of all ranks; names files."""

    @staticmethod
    def of(config: Config, device: torch.device, rank: int) -> "StorageSettings":
        folder = config.memory.folder
        return StorageSettings(config.memory.placement, device, None if folder is None else Path(folder), rank)


class Records:
    """The records of one shard."""

    def __init__(self, fields: list[Field], max_rows: int, settings: StorageSettings, name: str):
        """`max_rows`: rows of the shard, touched or not. `name`: of the shard, on its rank."""
        self.max_rows = max_rows
        self._fields, self._starts, end = {field.name: field for field in fields}, dict[str, int](), 0
        for field in fields:
            self._starts[field.name] = end
            end += field.width
        self.width = record_width(fields)
        self.storage = open_storage(
            settings.placement, self.width, max_rows, settings.device, settings.folder, f"rank-{settings.rank}.{name}"
        )
        self.slots = SlotMap()
        self.num_created = 0
        """Slots whose records are initialised; the first ones."""
        self._views: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def field(self, name: str) -> Tensor:
        """[capacity, width], of an integer [capacity]; stays the same tensor when the storage grows."""
        if name not in self._views:
            dtype = torch.int32 if self._fields[name].integer else torch.float32
            self._views[name] = torch.empty(0, dtype=dtype, device=self.storage.records.device)
            self._point(name)
        return self._views[name]

    def _point(self, name: str) -> None:
        """Make a view cover the storage's present records."""
        records, field = self.storage.records, self._fields[name]
        size, stride = [len(records)], [records.stride(0)]  # records on disk are padded
        if not field.integer:
            size, stride = [*size, field.width], [*stride, 1]
        start = records.storage_offset() + self._starts[name]
        self._views[name].set_(records.untyped_storage(), start, size, stride)

    def ensure(self, num_slots: int) -> None:
        if self.storage.ensure(num_slots):
            for name in self._views:
                self._point(name)

    def writing(self, slots_R: Tensor) -> AbstractContextManager[None]:
        """Every write to records happens within such a block."""
        return self.storage.writing(slots_R.numpy()) if self.storage.on_disk else nullcontext()

    def verify(self, slots_R: Tensor) -> None:
        """Raise if one of these records is damaged, before they are saved."""
        if self.storage.on_disk:
            self.storage.verify(slots_R.numpy())

    @property
    def nbytes(self) -> int:
        """Of the records that exist."""
        return 4 * self.width * self.num_created
