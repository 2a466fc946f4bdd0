"""Safetensors files as torch tensors: streamed writing with checksums, verified reading, memory-mapped views.

Writing is our own because the `safetensors` package takes whole contiguous tensors only, while tables are columns of a
larger tensor. The package reads these files.
"""

import json
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xgram_dist.checkpoint.safetensors_io import BLOCK_BYTES, RawFile, running_checksum
from xgram_dist.console import ByteProgress

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def write_tensors(path: Path, tensors: dict[str, Tensor], lines: ByteProgress | None = None) -> dict[str, int]:
    """Write a file and flush it to the disk; returns the checksum of each tensor. `lines` shows the progress."""
    # Wide dtypes first, so that every tensor is aligned for a view of its dtype.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    layout = {key: (DTYPE_NAMES[tensor.dtype], list(tensor.shape), tensor.nbytes) for key, tensor in tensors.items()}
    total = sum(tensor.nbytes for tensor in tensors.values())
    checksums, written = {}, 0
    with path.open("wb") as file:
        file.write(encode_header(layout))
        for key, tensor in tensors.items():
            checksum = 0
            for block in tensor_bytes(tensor):
                checksum = running_checksum(block, checksum)
                file.write(block)
                written += len(block)
                if lines is not None:
                    lines.update(written, total)
            checksums[key] = checksum
        file.flush()
        os.fsync(file.fileno())
    return checksums


def encode_header(layout: dict[str, tuple[str, list[int], int]], metadata: dict[str, str] | None = None) -> bytes:
    """The header of a file whose tensors (dtype, shape, bytes) follow in this order."""
    tree: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for key, (dtype, shape, nbytes) in layout.items():
        begin, end = end, end + nbytes
        tree[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(tree).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def tensor_bytes(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in order, some rows at a time."""
    if tensor.numel() == 0:
        return
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    step = max(1, BLOCK_BYTES // max(1, rows[0].numel() * rows.element_size()))
    for start in range(0, rows.shape[0], step):
        block = rows[start : start + step].cpu().contiguous()
        yield block.view(-1).view(torch.uint8).numpy().data


def verify_file(path: Path, checksums: dict[str, int]) -> None:
    """Read back what was written."""
    file = RawFile(path)
    for key, expected in checksums.items():
        file.verify(key, expected)


class TensorFile(RawFile):
    """A file written by `write_tensors`."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._map: mmap.mmap | None = None

    def dtype(self, key: str) -> torch.dtype:
        return TORCH_DTYPES[self.header(key).dtype]

    def mapped(self, key: str) -> Tensor:
        """A memory-mapped view of a tensor. It is not verified, and pages are read when they are touched."""
        header, dtype = self.header(key), self.dtype(key)
        if header.begin == header.end:
            return torch.empty(header.shape, dtype=dtype)
        if self._map is None:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        data = torch.frombuffer(self._map, dtype=torch.uint8)[
            self.data_start + header.begin : self.data_start + header.end
        ]
        if data.data_ptr() % dtype.itemsize:  # a file of another writer may be unaligned
            data = data.clone()
        return data.view(dtype).view(header.shape)

    def release_pages(self) -> None:
        """Unmap the pages touched so far from this process; mapped views stay valid."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def read_into(self, key: str, target: Tensor, expected: int) -> None:
        """Read and verify a whole tensor; without a copy if the target is contiguous host memory of the same dtype."""
        header = self.header(key)
        same = target.dtype == self.dtype(key) and target.device.type == "cpu" and target.is_contiguous()
        if not same or not target.numel():
            rows = target if target.dim() else target.view(1)
            for start, block in self._row_blocks(key, expected):
                rows[start : start + len(block)] = block.to(target)
            return
        data = target.view(-1).view(torch.uint8)
        checksum = 0
        for start in range(0, data.numel(), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            checksum = self.read(key, header.begin + start, block.numpy().data, checksum)
        self.check_checksum(key, checksum, expected)

    def _row_blocks(self, key: str, expected: int) -> Iterator[tuple[int, Tensor]]:
        """(index of the first row, rows) blocks of a tensor; the buffer is reused. Checks the checksum at the end."""
        header = self.header(key)
        rows = header.shape[0] if header.shape else 1
        row_bytes = (header.end - header.begin) // max(1, rows)
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        buffer = torch.empty(min(step, rows) * row_bytes, dtype=torch.uint8)
        checksum = 0
        for start in range(0, rows if row_bytes else 0, step):
            count = min(step, rows - start)
            block = buffer[: count * row_bytes]
            checksum = self.read(key, header.begin + start * row_bytes, block.numpy().data, checksum)
            yield start, block.view(self.dtype(key)).view(count, *header.shape[1:])
        self.check_checksum(key, checksum, expected)
