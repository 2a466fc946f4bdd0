"""Tensor files: the safetensors layout, written as a stream with checksums, read as a memory map.

The layout is a length, a JSON header and raw bytes: nothing in it can be executed. `safetensors` itself reads these
files; writing is our own because it takes whole contiguous tensors, while tables are columns of something larger.
"""

import json
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import crc32c
import torch
from torch import Tensor

from xgram_dist.errors import UserError

BLOCK_BYTES = 4 << 20
MAX_HEADER = 100 << 20
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
NAMES = {name: dtype for dtype, name in DTYPES.items()}


class DamagedFileError(UserError):
    """A file of a checkpoint that is not what the manifest says."""


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Write, flush to the disk; the checksum of each tensor."""
    # The widest types first: then every tensor lies where its type wants it, and can be used through the map.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header: dict[str, Any] = {}
    end = 0
    for key, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    sums = {}
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for key, tensor in tensors.items():
            total = 0
            for block in _blocks(tensor):
                total = crc32c.crc32c(block, total)
                file.write(block)
            sums[key] = total
        file.flush()
        os.fsync(file.fileno())
    return sums


def _blocks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a CPU tensor in order, some rows at a time."""
    if tensor.numel() == 0:
        return
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    step = max(1, BLOCK_BYTES // max(1, rows[0].numel() * rows.element_size()))
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step].contiguous()
        yield part.view(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """A file of `write_tensors`, mapped into memory; what is not touched is not read."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = file.read(8)
                length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
                if not 2 <= length <= min(MAX_HEADER, size - 8):
                    raise DamagedFileError(f"'{path}' is not a tensor file: its header is missing or cut off")
                self._entries = self._read_header(file.read(length), size - 8 - length)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise DamagedFileError(f"cannot read '{path}': {error.strerror}") from error
        self._data = torch.frombuffer(self._map, dtype=torch.uint8)[8 + length :]

    def _read_header(self, text: bytes, size: int) -> dict[str, _Entry]:
        try:
            header = json.loads(text)
            entries = {
                key: _Entry(NAMES[one["dtype"]], tuple(one["shape"]), *one["data_offsets"])
                for key, one in header.items()
                if key != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DamagedFileError(f"'{self.path}' is not a tensor file: its header is not valid") from None
        for key, entry in entries.items():
            wanted = torch.Size(entry.shape).numel() * entry.dtype.itemsize
            if not 0 <= entry.begin <= entry.end <= size or entry.end - entry.begin != wanted:
                raise DamagedFileError(f"'{self.path}' is cut off or damaged at '{key}'")
        return entries

    def tensor(self, key: str) -> Tensor:
        """A view of the map."""
        entry = self._entries.get(key)
        if entry is None:
            raise DamagedFileError(f"'{self.path}' has no '{key}'")
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=entry.dtype)
        # A slice of bytes need not be aligned for its type; the writer keeps 8-byte headers but not entries.
        raw = self._data[entry.begin : entry.end]
        if raw.data_ptr() % entry.dtype.itemsize:
            raw = raw.clone()
        return raw.view(entry.dtype).view(entry.shape)

    def verify(self, key: str, expected: int) -> None:
        """Read it all against its checksum."""
        entry = self._entries.get(key)
        if entry is None:
            raise DamagedFileError(f"'{self.path}' has no '{key}'")
        total = 0
        data = memoryview(self._map)[len(self._map) - self._data.numel() :]
        for start in range(entry.begin, entry.end, BLOCK_BYTES):
            total = crc32c.crc32c(data[start : min(start + BLOCK_BYTES, entry.end)], total)
        if total != expected:
            raise DamagedFileError(f"'{self.path}' is damaged at '{key}': its checksum does not match")
