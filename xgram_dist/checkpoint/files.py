"""Tensor files: the safetensors layout, written and read as a stream with checksums.

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
from xgram_dist.progress import Lines

BLOCK_BYTES = 4 << 20
AHEAD_BYTES = 16 << 20
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


def write_tensors(path: Path, tensors: dict[str, Tensor], lines: Lines | None = None) -> dict[str, int]:
    """Write, flush to the disk; the checksum of each tensor. `lines` are told how far it is."""
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
    done = 0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for key, tensor in tensors.items():
            total = 0
            for block in _blocks(tensor):
                total = crc32c.crc32c(block, total)
                file.write(block)
                done += len(block)
                if lines is not None:
                    lines.at(done, end)
            sums[key] = total
        file.flush()
        os.fsync(file.fileno())
    return sums


def _blocks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in order, some rows at a time."""
    if tensor.numel() == 0:
        return
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    step = max(1, BLOCK_BYTES // max(1, rows[0].numel() * rows.element_size()))
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step].cpu().contiguous()
        yield part.view(-1).view(torch.uint8).numpy().data


def verify_file(path: Path, sums: dict[str, int]) -> None:
    """What was written reads back as it was meant."""
    file = TensorFile(path)
    for key, expected in sums.items():
        file.verify(key, expected)


@dataclass(frozen=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """A file of `write_tensors`. Large tensors are read block by block, in order, and checked on the way."""

    def __init__(self, path: Path):
        self.path = path
        self._map: mmap.mmap | None = None
        try:
            self._file = path.open("rb", buffering=0)
            size = os.fstat(self._file.fileno()).st_size
            start = self._file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise DamagedFileError(f"'{path}' is not a tensor file: its header is missing or cut off")
            self._data = 8 + length
            self._entries = self._read_header(self._file.read(length), size - self._data)
        except OSError as error:
            raise DamagedFileError(f"cannot read '{path}': {error.strerror}") from error

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

    def _entry(self, key: str) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            raise DamagedFileError(f"'{self.path}' has no '{key}'")
        return entry

    def shape(self, key: str) -> tuple[int, ...]:
        return self._entry(key).shape

    def dtype(self, key: str) -> torch.dtype:
        return self._entry(key).dtype

    def tensor(self, key: str) -> Tensor:
        """A view of the file, mapped into memory: not checked, and read only where it is touched."""
        entry = self._entry(key)
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if self._map is None:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        raw = torch.frombuffer(self._map, dtype=torch.uint8)[self._data + entry.begin : self._data + entry.end]
        # A slice of bytes need not be aligned for its type; the writer keeps 8-byte headers but not entries.
        if raw.data_ptr() % entry.dtype.itemsize:
            raw = raw.clone()
        return raw.view(entry.dtype).view(entry.shape)

    def blocks(self, key: str, expected: int) -> Iterator[tuple[int, Tensor]]:
        """(number of the first row, some rows) of a tensor, in order; a block is good until the next is asked for.

        The last one is followed by an error where the checksum does not match."""
        entry = self._entry(key)
        rows = entry.shape[0] if entry.shape else 1
        width = (entry.end - entry.begin) // max(1, rows)
        step = max(1, BLOCK_BYTES // max(1, width))
        buffer = torch.empty(min(step, rows) * width, dtype=torch.uint8)
        total = 0
        for start in range(0, rows if width else 0, step):
            count = min(step, rows - start)
            part = buffer[: count * width]
            total = self._read(key, entry.begin + start * width, part, total)
            yield start, part.view(entry.dtype).view(count, *entry.shape[1:])
        self._compare(key, total, expected)

    def read_into(self, key: str, target: Tensor, expected: int) -> None:
        """All of a tensor, checked; straight into the target where that is of one piece in host memory."""
        entry = self._entry(key)
        same = target.dtype == entry.dtype and target.device.type == "cpu" and target.is_contiguous()
        if not same or not target.numel():
            rows = target if target.dim() else target.view(1)
            for start, block in self.blocks(key, expected):
                rows[start : start + len(block)] = block.to(target)
            return
        raw = target.view(-1).view(torch.uint8)
        total = 0
        for start in range(0, raw.numel(), BLOCK_BYTES):
            total = self._read(key, entry.begin + start, raw[start : start + BLOCK_BYTES], total)
        self._compare(key, total, expected)

    def verify(self, key: str, expected: int) -> None:
        """Read it all against its checksum."""
        for _ in self.blocks(key, expected):
            pass

    def _read(self, key: str, begin: int, target: Tensor, total: int) -> int:
        """Fill the target from here in the data; the checksum so far."""
        position, into = self._data + begin, target.numpy().data
        # The disk works on what comes next while this is checked and copied.
        os.posix_fadvise(self._file.fileno(), position + len(into), AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        done = 0
        while done < len(into):
            count = os.preadv(self._file.fileno(), [into[done:]], position + done)
            if count == 0:
                raise DamagedFileError(f"'{self.path}' is cut off at '{key}'")
            done += count
        return int(crc32c.crc32c(into, total))

    def _compare(self, key: str, total: int, expected: int) -> None:
        if total != expected:
            raise DamagedFileError(f"'{self.path}' is damaged at '{key}': its checksum does not match")
