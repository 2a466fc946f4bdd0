"""Safetensors files for Hugging Face, written as a stream: a block of rows at a time, no tensor whole in memory."""

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from xgram_dist.checkpoint.files import DTYPES

SHARD_BYTES = 4 << 30
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Stream:
    """A tensor that comes in blocks of its first dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: Callable[[], Iterator[Tensor]]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_shards(folder: Path, tensors: dict[str, Stream], wrote: Callable[[int], None]) -> int:
    """One file, or several with an index; all bytes. `wrote` hears of bytes as they are written."""
    shards: list[dict[str, Stream]] = [{}]
    for name, stream in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        if shards[-1] and sum(one.nbytes for one in shards[-1].values()) + stream.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = stream
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / file, shard, wrote)
        where |= dict.fromkeys(shard, file)
    total = sum(stream.nbytes for stream in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    return total


def _write(path: Path, tensors: dict[str, Stream], wrote: Callable[[int], None]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, stream in tensors.items():
        begin, end = end, end + stream.nbytes
        header[name] = {"dtype": DTYPES[stream.dtype], "shape": list(stream.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, stream in tensors.items():
            done = 0
            for block in stream.blocks():
                data = block.to(stream.dtype).contiguous().view(-1).view(torch.uint8).numpy().data
                file.write(data)
                done += len(data)
                wrote(len(data))
            assert done == stream.nbytes, name
