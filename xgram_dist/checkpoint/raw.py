"""Tensor files as bytes: their header and checksums, without torch, so that looking into a checkpoint is instant.

The layout is that of safetensors: a length, a JSON header and raw bytes. Nothing in it can be executed.
"""

import json
import math
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import crc32c

from xgram_dist.errors import UserError

BLOCK_BYTES = 4 << 20
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
    """A tensor file, mapped into memory; what is not touched is not read."""

    def __init__(self, path: Path):
        self.path = path
        try:
            # A link would lead out of the folder that the manifest speaks of.
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = file.read(8)
                length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
                if not 2 <= length <= min(MAX_HEADER, size - 8):
                    raise DamagedFileError(f"'{path}' is not a tensor file: its header is missing or cut off")
                self.entries = self._read_header(file.read(length), size - 8 - length)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise DamagedFileError(f"cannot read '{path}': {error.strerror}") from error
        self.start = 8 + length

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

    def verify(self, key: str, expected: int, read: Callable[[int], None] = lambda count: None) -> None:
        """Read it all against its checksum; `read` hears how many bytes were."""
        entry, total = self.entry(key), 0
        data = memoryview(self._map)[self.start :]
        for start in range(entry.begin, entry.end, BLOCK_BYTES):
            block = data[start : min(start + BLOCK_BYTES, entry.end)]
            total = crc32c.crc32c(block, total)
            read(len(block))
        if total != expected:
            raise DamagedFileError(f"'{self.path}' is damaged at '{key}': its checksum does not match")


def checksum_of(path: Path) -> int:
    """Of a whole file."""
    total = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            total = crc32c.crc32c(block, total)
    return total
