"""Reading table rows that another number of ranks has saved.

Rows are saved in the order of the saving ranks. A rank that owns other rows now picks them out of the saved parts, part
by part, some rows at a time: parts without a row of its own are not opened, and no table is ever whole in memory.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.checkpoint.boxes import Box, State
from xgram_dist.checkpoint.files import DamagedFileError
from xgram_dist.checkpoint.manifest import Chunk
from xgram_dist.checkpoint.storage import FolderReader
from xgram_dist.memory.placement import Placement


def saved_positions(saved: Placement) -> NDArray[Any]:
    """Where each global row stands in the saved order."""
    order = np.argsort(saved.owner, kind="stable")
    positions = np.empty(len(order), dtype=np.int64)
    positions[order] = np.arange(len(order))
    return positions


def read_rows(reader: FolderReader, state: State, positions: NDArray[Any]) -> None:
    """Fill the rows held here; `positions`: where they stand in the saved order, in the order they are held."""
    order = np.argsort(positions, kind="stable")
    ascending = positions[order]
    for name, spread in state.items():
        entry = reader.manifest.tensors.get(name)
        if entry is None:
            raise DamagedFileError(f"the checkpoint '{reader.folder}' has no '{name}'")
        if list(entry.shape) != list(spread.shape):
            raise DamagedFileError(f"'{name}' is {entry.shape} in the checkpoint, but {list(spread.shape)} here")
        (box,) = spread.boxes
        covered = 0
        for chunk in entry.chunks:
            first, last = np.searchsorted(ascending, (chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]))
            target, columns = _columns(chunk, box)
            if first == last or target.numel() == 0:
                continue
            here = order[first:last]
            covered += len(here) * (target.numel() // len(target))
            if len(here) == chunk.sizes[0] and here[-1] - here[0] == len(here) - 1 and columns is None:
                reader.read_into(chunk, target[here[0] : here[0] + len(here)])  # saved as it is held
            else:
                _pick(reader, chunk, target, here, ascending[first:last] - chunk.offsets[0], columns)
        if covered != box.tensor.numel():
            raise DamagedFileError(f"the checkpoint '{reader.folder}' does not hold all of '{name}'")


def _columns(chunk: Chunk, box: Box) -> tuple[Tensor, slice | None]:
    """The columns of the box that a saved part has, and which of its own those are; None: all."""
    if len(chunk.sizes) == 1:
        return box.tensor, None
    begin = max(chunk.offsets[1], box.offsets[1])
    end = max(begin, min(chunk.offsets[1] + chunk.sizes[1], box.offsets[1] + box.tensor.shape[1]))
    target = box.tensor[:, begin - box.offsets[1] : end - box.offsets[1]]
    return target, None if end - begin == chunk.sizes[1] else slice(begin - chunk.offsets[1], end - chunk.offsets[1])


def _pick(
    reader: FolderReader,
    chunk: Chunk,
    target: Tensor,
    here: NDArray[Any],
    there: NDArray[Any],
    columns: slice | None,
) -> None:
    """Rows `there` (ascending) of a saved part, to rows `here` of the target."""
    to, source = torch.from_numpy(here).to(target.device), torch.from_numpy(there)
    for start, block in reader.blocks(chunk):
        first, last = np.searchsorted(there, (start, start + len(block)))
        if first < last:
            rows = block.index_select(0, source[first:last] - start)
            target[to[first:last]] = (rows if columns is None else rows[:, columns]).to(target)
