"""Tensor files: the safetensors layout, written and read as a stream with checksums.

`safetensors` itself reads these files; writing is our own because it takes whole contiguous tensors, while tables are
columns of something larger.
"""

import json
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crc32c
import torch
from torch import Tensor

from xgram_dist.checkpoint.raw import BLOCK_BYTES, RawFile
from xgram_dist.progress import Lines

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


def write_tensors(path: Path, tensors: dict[str, Tensor], lines: Lines | None = None) -> dict[str, int]:
    """Write, flush to the disk; the checksum of each tensor. `lines` are told how far it is."""
    # Wide types first: then every tensor lies where a view of its type may begin.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    shapes = {key: (DTYPES[tensor.dtype], list(tensor.shape), tensor.nbytes) for key, tensor in tensors.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    sums, done = {}, 0
    with path.open("wb") as file:
        file.write(header(shapes))
        for key, tensor in tensors.items():
            total = 0
            for block in blocks(tensor):
                total = crc32c.crc32c(block, total)
                file.write(block)
                done += len(block)
                if lines is not None:
                    lines.at(done, size)
            sums[key] = total
        file.flush()
        os.fsync(file.fileno())
    return sums


def header(tensors: dict[str, tuple[str, list[int], int]], metadata: dict[str, str] | None = None) -> bytes:
    """The beginning of a file whose tensors (type, shape, bytes) follow in this order."""
    tree: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for key, (dtype, shape, size) in tensors.items():
        begin, end = end, end + size
        tree[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(tree).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def blocks(tensor: Tensor) -> Iterator[memoryview]:
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
    file = RawFile(path)
    for key, expected in sums.items():
        file.verify(key, expected)


class TensorFile(RawFile):
    """A file of `write_tensors`."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._map: mmap.mmap | None = None

    def shape(self, key: str) -> tuple[int, ...]:
        return self.entry(key).shape

    def dtype(self, key: str) -> torch.dtype:
        return NAMES[self.entry(key).dtype]

    def tensor(self, key: str) -> Tensor:
        """A view of the file, mapped into memory: not checked, and read only where it is touched."""
        entry, dtype = self.entry(key), self.dtype(key)
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        if self._map is None:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        raw = torch.frombuffer(self._map, dtype=torch.uint8)[self.start + entry.begin : self.start + entry.end]
        if raw.data_ptr() % dtype.itemsize:  # not by our writer
            raw = raw.clone()
        return raw.view(dtype).view(entry.shape)

    def forget(self) -> None:
        """Let go of the pages that were touched through `tensor`; its views stay good."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def blocks(self, key: str, expected: int) -> Iterator[tuple[int, Tensor]]:
        """(number of the first row, some rows) of a tensor, in order; a block is good until the next is asked for.

        The last one is followed by an error where the checksum does not match."""
        entry = self.entry(key)
        rows = entry.shape[0] if entry.shape else 1
        width = (entry.end - entry.begin) // max(1, rows)
        step = max(1, BLOCK_BYTES // max(1, width))
        buffer = torch.empty(min(step, rows) * width, dtype=torch.uint8)
        total = 0
        for start in range(0, rows if width else 0, step):
            count = min(step, rows - start)
            part = buffer[: count * width]
            total = self.read(key, entry.begin + start * width, part.numpy().data, total)
            yield start, part.view(self.dtype(key)).view(count, *entry.shape[1:])
        self.compare(key, total, expected)

    def read_into(self, key: str, target: Tensor, expected: int) -> None:
        """All of a tensor, checked; straight into the target where that is of one piece in host memory."""
        entry = self.entry(key)
        same = target.dtype == self.dtype(key) and target.device.type == "cpu" and target.is_contiguous()
        if not same or not target.numel():
            rows = target if target.dim() else target.view(1)
            for start, block in self.blocks(key, expected):
                rows[start : start + len(block)] = block.to(target)
            return
        raw = target.view(-1).view(torch.uint8)
        total = 0
        for start in range(0, raw.numel(), BLOCK_BYTES):
            part = raw[start : start + BLOCK_BYTES]
            total = self.read(key, entry.begin + start, part.numpy().data, total)
        self.compare(key, total, expected)
