"""A rank's part of a tensor that is spread over ranks.

A tensor has one name and one global shape whatever the layout; a rank holds boxes of it (offsets, and a tensor). What
was saved as some boxes can be loaded as any others: the overlaps are worked out by torch.distributed.checkpoint.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata


@dataclass(frozen=True)
class Box:
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.shape)


@dataclass
class Spread:
    """One tensor of the checkpoint, as this rank holds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[Box] = field(default_factory=list)

    @staticmethod
    def whole(tensor: Tensor) -> "Spread":
        """Held whole by every rank."""
        return Spread(tuple(tensor.shape), tensor.dtype, [Box((0,) * tensor.dim(), tensor)])


State = dict[str, Spread]
