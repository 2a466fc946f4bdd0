"""Records: all that a shard keeps of a row, side by side in one piece of memory, for touched rows only.

    | rows W | rows.first W | rows.second W | gates J | gates.first J | .. | rows.last | rows.current | hit | .. |

A record holds values, what the optimizers keep, gates, and bookkeeping (int32) of one row of a slab. `Records` knows
which slot holds which row (slots.py) and gives the fields of all records as strided tensors [capacity, width], on which
optimizers work. Planning gives rows their slots, a step ahead in its own thread; the training thread creates their
records, that is, initialises them, before they are first read (touched_shard.py).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from xgram_dist.config import Config
from xgram_dist.tables.slots import SlotMap
from xgram_dist.tables.storage import open_storage

WORD = 4
"""Bytes. Fields begin at a word."""
LINE = 16
"""Words of a cache line. Records begin at a line."""


@dataclass(frozen=True)
class Field:
    """Of a record: `width` numbers in fp32 or bf16, or one in int32."""

    name: str
    width: int
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def words(self) -> int:
        """Of 4 bytes, that it takes in a record."""
        return -(-self.nbytes // WORD)


def record_width(fields: list[Field]) -> int:
    """Words of a record."""
    return -(-sum(field.words for field in fields) // LINE) * LINE


@dataclass(frozen=True)
class StorageSettings:
    """Where the records of a rank lie."""

    placement: str
    device: torch.device
    folder: Path | None
    rank: int
    """Of all ranks; names files."""
    sharers: int = 1
    """Storages of all ranks of this node, which share its memory."""

    @staticmethod
    def of(config: Config, device: torch.device, rank: int, sharers: int) -> "StorageSettings":
        folder = config.memory.folder
        return StorageSettings(config.memory.placement, device, None if folder is None else Path(folder), rank, sharers)


class Records:
    """The records of one shard."""

    def __init__(
        self,
        fields: list[Field],
        max_rows: int,
        settings: StorageSettings,
        name: str,
        staged_on: torch.device | None = None,
    ):
        """`max_rows`: rows of the shard, touched or not. `name`: of the shard, on its rank. `staged_on`: fields are
        those of records that were copied there (`use`), and not of all records."""
        self.max_rows = max_rows
        self._fields, self._starts, end = {field.name: field for field in fields}, dict[str, int](), 0
        for field in fields:
            self._starts[field.name] = end
            end += field.words
        self.width = record_width(fields)
        self.storage = open_storage(
            settings.placement,
            self.width,
            max_rows,
            settings.device,
            settings.folder,
            f"rank-{settings.rank}.{name}",
            settings.sharers,
        )
        self.slots = SlotMap()
        self.num_created = 0
        """Slots whose records are initialised; the first ones."""
        self._in_use = None if staged_on is None else torch.empty(0, self.width, device=staged_on)
        self._views: dict[str, Tensor] = {}
        self._views_at_rest: dict[str, Tensor] = self._views if staged_on is None else {}

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def field(self, name: str) -> Tensor:
        """[capacity, width], of an integer [capacity]; stays the same tensor when the storage grows, or when other
        records are in use."""
        return self._view(self._views, name, self.storage.records if self._in_use is None else self._in_use)

    def at_rest(self, name: str) -> Tensor:
        """The field of all records, in the storage."""
        return self._view(self._views_at_rest, name, self.storage.records)

    def use(self, records_RW: Tensor) -> None:
        """From now on fields are those of these records."""
        self._in_use = records_RW
        for name, view in self._views.items():
            self._point(view, name, records_RW)

    def _view(self, views: dict[str, Tensor], name: str, records: Tensor) -> Tensor:
        if name not in views:
            views[name] = torch.empty(0, dtype=self._fields[name].dtype, device=records.device)
            self._point(views[name], name, records)
        return views[name]

    def _point(self, view: Tensor, name: str, records: Tensor) -> None:
        """Make a view cover these records."""
        field, start = self._fields[name], self._starts[name]
        words = records[:, start : start + field.words].view(field.dtype)
        numbers = words[:, 0] if field.dtype == torch.int32 else words[:, : field.width]
        view.set_(numbers)  # type: ignore[call-overload]

    def ensure(self, num_slots: int) -> None:
        if self.storage.ensure(num_slots):
            for name, view in self._views_at_rest.items():
                self._point(view, name, self.storage.records)

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
