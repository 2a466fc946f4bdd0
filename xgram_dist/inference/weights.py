"""Whole tensors of a checkpoint, whatever boxes they were saved in."""

from torch import Tensor

from xgram_dist.checkpoint.raw import DamagedFileError
from xgram_dist.checkpoint.storage import FolderReader


def read_whole(reader: FolderReader, name: str, into: Tensor) -> None:
    """All boxes of a tensor, verified, into one of its whole shape."""
    entry = reader.manifest.tensors.get(name)
    if entry is None:
        raise DamagedFileError(f"the checkpoint '{reader.folder}' has no '{name}'")
    if list(entry.shape) != list(into.shape):
        raise DamagedFileError(
            f"'{name}' is {entry.shape} in the checkpoint, but its recipe asks for {list(into.shape)}"
        )
    covered = 0
    for chunk in entry.chunks:
        part = into
        for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            part = part.narrow(dim, start, size)
        reader.read_into(chunk, entry.dtype, part)
        covered += part.numel()
    if covered < into.numel():
        raise DamagedFileError(f"the checkpoint '{reader.folder}' does not hold all of '{name}'")
