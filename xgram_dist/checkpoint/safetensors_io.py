"""Safetensors files as bytes: header, checksums and small integer arrays, without torch.

A safetensors file is a length, a JSON header and raw bytes. Nothing in it can be executed. `xgram-dist inspect` needs
this module only, so it starts without importing torch.
"""

import json
import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
from numpy.typing import NDArray

from xgram_dist.errors import UserError

BLOCK_BYTES = 4 << 20
READAHEAD_BYTES = 16 << 20
MAX_HEADER_BYTES = 100 << 20
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
INTEGER_DTYPES = {"I64": "<i8", "I32": "<i4"}


class DamagedFileError(UserError):
    """A checkpoint file that is missing, truncated, or not what the manifest says."""


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a file's header; `begin` and `end` are byte offsets into the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class RawFile:
    """A safetensors file, read in blocks and verified while reading."""

    def __init__(self, path: Path):
        self.path = path
        self._readahead_end = 0
        try:
            # A symlink could point outside the checkpoint folder.
            self._file = open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0)  # noqa: SIM115
            size = os.fstat(self._file.fileno()).st_size
            prefix = self._file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise DamagedFileError(f"'{path}' is not a tensor file: its header is missing or truncated")
            self.data_start = 8 + length
            self.headers = self._parse_header(self._file.read(length), size - self.data_start)
        except OSError as error:
            raise DamagedFileError(f"cannot read '{path}': {error.strerror}") from error

    def _parse_header(self, text: bytes, data_bytes: int) -> dict[str, TensorHeader]:
        try:
            headers = {
                key: TensorHeader(tree["dtype"], tuple(tree["shape"]), *tree["data_offsets"])
                for key, tree in json.loads(text).items()
                if key != "__metadata__"
            }
            for key, header in headers.items():
                nbytes = math.prod(header.shape) * ITEM_BYTES[header.dtype]
                if not 0 <= header.begin <= header.end <= data_bytes or header.end - header.begin != nbytes:
                    raise DamagedFileError(f"'{self.path}' is truncated or damaged at '{key}'")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DamagedFileError(f"'{self.path}' is not a tensor file: its header is not valid") from None
        return headers

    def header(self, key: str) -> TensorHeader:
        if key not in self.headers:
            raise DamagedFileError(f"'{self.path}' has no '{key}'")
        return self.headers[key]

    def check_header(self, key: str, dtype: str, shape: list[int]) -> None:
        """Refuse a tensor whose dtype or shape is not the manifest's."""
        header = self.header(key)
        if header.dtype != dtype or list(header.shape) != shape:
            raise DamagedFileError(
                f"'{self.path}': '{key}' is {header.dtype} {list(header.shape)}, not {dtype} {shape}"
            )

    def read(self, key: str, begin: int, buffer: memoryview, checksum: int) -> int:
        """Fill the buffer from byte `begin` of the data; returns the running checksum."""
        position = self.data_start + begin
        end = position + len(buffer)
        # Ask for the next blocks now, so that the disk reads them while this one is checksummed.
        if not READAHEAD_BYTES // 2 <= self._readahead_end - end <= READAHEAD_BYTES:
            os.posix_fadvise(self._file.fileno(), end, READAHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            self._readahead_end = end + READAHEAD_BYTES
        done = 0
        while done < len(buffer):
            count = os.preadv(self._file.fileno(), [buffer[done:]], position + done)
            if count == 0:
                raise DamagedFileError(f"'{self.path}' is truncated at '{key}'")
            done += count
        return int(crc32c.crc32c(buffer, checksum))

    def check_checksum(self, key: str, checksum: int, expected: int) -> None:
        if checksum != expected:
            raise DamagedFileError(f"'{self.path}' is damaged at '{key}': its checksum does not match")

    def verify(self, key: str, expected: int, progress: Callable[[int], None] = lambda nbytes: None) -> None:
        """Read a whole tensor against its checksum; `progress` gets the bytes of each block."""
        header, checksum = self.header(key), 0
        buffer = memoryview(bytearray(min(BLOCK_BYTES, header.end - header.begin)))
        for start in range(header.begin, header.end, BLOCK_BYTES):
            block = buffer[: min(BLOCK_BYTES, header.end - start)]
            checksum = self.read(key, start, block, checksum)
            progress(len(block))
        self.check_checksum(key, checksum, expected)

    def integers(self, key: str, expected: int) -> NDArray[Any]:
        """A whole integer tensor as int64, verified."""
        header = self.header(key)
        if header.dtype not in INTEGER_DTYPES:
            raise DamagedFileError(f"'{self.path}': '{key}' is {header.dtype}, not integers")
        buffer = bytearray(header.end - header.begin)
        self.check_checksum(key, self.read(key, header.begin, memoryview(buffer), 0), expected)
        return np.frombuffer(buffer, dtype=INTEGER_DTYPES[header.dtype]).astype(np.int64).reshape(header.shape)


def file_checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            checksum = crc32c.crc32c(block, checksum)
    return checksum
