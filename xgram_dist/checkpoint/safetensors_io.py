"""Safetensors files as bytes: header, checksums and small integer arrays, without torch.

A safetensors file is a length, a JSON header and raw bytes. Nothing in it can be executed. `xgram-dist inspect` needs
this module only, so it starts without importing torch.
"""

import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.errors import BadFileError
from xgram_dist.untrusted import JsonError, open_file, parse_json

BLOCK_BYTES = 4 << 20
READAHEAD_BYTES = 16 << 20
MAX_HEADER_BYTES = 100 << 20
MAX_HEADER_DEPTH = 4
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
INTEGER_DTYPES = {"I64": "<i8", "I32": "<i4"}


class DamagedFileError(BadFileError):
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

    def __init__(self, path: Path, *, follow: bool = False):
        """`follow`: the file may be a link."""
        self.path = path
        self._readahead_end = 0
        try:
            self._file = open(open_file(path, follow=follow, error=DamagedFileError), "rb", buffering=0)  # noqa: SIM115
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
            tree = parse_json(text, depth=MAX_HEADER_DEPTH)
        except JsonError:
            tree = None
        if not isinstance(tree, dict):
            raise DamagedFileError(f"'{self.path}' is not a tensor file: its header is not valid")
        tree.pop("__metadata__", None)
        return {key: self._parse_tensor(key, one, data_bytes) for key, one in tree.items()}

    def _parse_tensor(self, key: str, tree: Any, data_bytes: int) -> TensorHeader:
        match tree:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]}:
                numbers = [*shape, begin, end]
                # A bool is an int, and 64.0 equals 64.
                if dtype in ITEM_BYTES and all(type(one) is int and 0 <= one < 2**62 for one in numbers):
                    if begin <= end <= data_bytes and end - begin == math.prod(shape) * ITEM_BYTES[dtype]:
                        return TensorHeader(dtype, tuple(shape), begin, end)
                    raise DamagedFileError(f"'{self.path}' is truncated or damaged at '{key}'")
        raise DamagedFileError(f"'{self.path}' is not a tensor file: its header is not valid at '{key}'")

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
        return running_checksum(buffer, checksum)

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
        if len(header.shape) != 1:
            raise DamagedFileError(f"'{self.path}': '{key}' is not one row of integers")
        buffer = bytearray(header.end - header.begin)
        self.check_checksum(key, self.read(key, header.begin, memoryview(buffer), 0), expected)
        return np.frombuffer(buffer, dtype=INTEGER_DTYPES[header.dtype]).astype(np.int64).reshape(header.shape)


def running_checksum(data: bytes | memoryview, checksum: int) -> int:
    # Not imported by the module: an environment that serves mapped tables verifies nothing and may not have it.
    import crc32c

    return int(crc32c.crc32c(data, checksum))


def file_checksum(path: Path) -> int:
    """Of a file that holds no tensors."""
    checksum = 0
    with open(open_file(path, error=DamagedFileError), "rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            checksum = running_checksum(block, checksum)
    return checksum
