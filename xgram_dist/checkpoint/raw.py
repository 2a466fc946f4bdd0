"""Tensor files as bytes: their header and checksums, without torch, so that looking into a checkpoint is instant.

The layout is that of safetensors: a length, a JSON header and raw bytes. Nothing in it can be executed.
"""

import json
import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import crc32c

from xgram_dist.errors import UserError

BLOCK_BYTES = 4 << 20
AHEAD_BYTES = 16 << 20
MAX_HEADER = 100 << 20
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}


class DamagedFileError(UserError):
    """A file of a checkpoint that is not what the manifest says."""


@dataclass(frozen=True)
class RawEntry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class RawFile:
    """A tensor file. It is read block by block, in order, and checked on the way."""

    def __init__(self, path: Path):
        self.path = path
        self._ahead = 0
        """How far the disk has been asked to read."""
        try:
            # A link would lead out of the folder that the manifest speaks of.
            self._file = open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0)  # noqa: SIM115
            size = os.fstat(self._file.fileno()).st_size
            start = self._file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise DamagedFileError(f"'{path}' is not a tensor file: its header is missing or cut off")
            self.start = 8 + length
            self.entries = self._read_header(self._file.read(length), size - self.start)
        except OSError as error:
            raise DamagedFileError(f"cannot read '{path}': {error.strerror}") from error

    def _read_header(self, text: bytes, size: int) -> dict[str, RawEntry]:
        try:
            entries = {
                key: RawEntry(one["dtype"], tuple(one["shape"]), *one["data_offsets"])
                for key, one in json.loads(text).items()
                if key != "__metadata__"
            }
            for key, entry in entries.items():
                wanted = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
                if not 0 <= entry.begin <= entry.end <= size or entry.end - entry.begin != wanted:
                    raise DamagedFileError(f"'{self.path}' is cut off or damaged at '{key}'")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DamagedFileError(f"'{self.path}' is not a tensor file: its header is not valid") from None
        return entries

    def entry(self, key: str) -> RawEntry:
        if key not in self.entries:
            raise DamagedFileError(f"'{self.path}' has no '{key}'")
        return self.entries[key]

    def read(self, key: str, begin: int, into: memoryview, total: int) -> int:
        """Fill a buffer from here in the data; the checksum so far."""
        position = self.start + begin
        end = position + len(into)
        if (
            not AHEAD_BYTES // 2 <= self._ahead - end <= AHEAD_BYTES
        ):  # the disk works on what comes next while this is checked
            os.posix_fadvise(self._file.fileno(), end, AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            self._ahead = end + AHEAD_BYTES
        done = 0
        while done < len(into):
            count = os.preadv(self._file.fileno(), [into[done:]], position + done)
            if count == 0:
                raise DamagedFileError(f"'{self.path}' is cut off at '{key}'")
            done += count
        return int(crc32c.crc32c(into, total))

    def compare(self, key: str, total: int, expected: int) -> None:
        if total != expected:
            raise DamagedFileError(f"'{self.path}' is damaged at '{key}': its checksum does not match")

    def verify(self, key: str, expected: int, read: Callable[[int], None] = lambda count: None) -> None:
        """Read it all against its checksum; `read` hears how many bytes were."""
        entry, total = self.entry(key), 0
        buffer = memoryview(bytearray(min(BLOCK_BYTES, entry.end - entry.begin)))
        for start in range(entry.begin, entry.end, BLOCK_BYTES):
            block = buffer[: min(BLOCK_BYTES, entry.end - start)]
            total = self.read(key, start, block, total)
            read(len(block))
        self.compare(key, total, expected)


def checksum_of(path: Path) -> int:
    """Of a whole file."""
    total = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            total = crc32c.crc32c(block, total)
    return total
