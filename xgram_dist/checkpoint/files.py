"""Tensor files: the safetensors layout, written as a stream with checksums, read as a memory map.

`safetensors` itself reads these files; writing is our own because it takes whole contiguous tensors, while tables are
columns of something larger.
"""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crc32c
import torch
from torch import Tensor

from xgram_dist.checkpoint.raw import BLOCK_BYTES, RawFile

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


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Write, flush to the disk; the checksum of each tensor."""
    # Wide types first: then every tensor lies where a view of its type may begin.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    shapes = {key: (DTYPES[tensor.dtype], list(tensor.shape), tensor.nbytes) for key, tensor in tensors.items()}
    sums = {}
    with path.open("wb") as file:
        file.write(header(shapes))
        for key, tensor in tensors.items():
            total = 0
            for block in blocks(tensor):
                total = crc32c.crc32c(block, total)
                file.write(block)
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
    """The bytes of a CPU tensor in order, some rows at a time."""
    if tensor.numel() == 0:
        return
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    step = max(1, BLOCK_BYTES // max(1, rows[0].numel() * rows.element_size()))
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step].contiguous()
        yield part.view(-1).view(torch.uint8).numpy().data


class TensorFile(RawFile):
    def __init__(self, path: Path):
        super().__init__(path)
        self._data = torch.frombuffer(self._map, dtype=torch.uint8)[self.start :]

    def tensor(self, key: str) -> Tensor:
        """A view of the map."""
        entry = self.entry(key)
        dtype = NAMES[entry.dtype]
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        raw = self._data[entry.begin : entry.end]
        if raw.data_ptr() % dtype.itemsize:  # not by our writer
            raw = raw.clone()
        return raw.view(dtype).view(entry.shape)
