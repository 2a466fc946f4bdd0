"""Reading table rows that another number of ranks has saved.

Rows are saved in the order of the saving ranks. A rank that owns other rows now picks them out of the saved parts, part
by part, some rows at a time: parts without a row of its own are not opened, and no table is ever whole in memory.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.checkpoint.boxes import Box, State
from xgram_dist.checkpoint.manifest import Chunk
from xgram_dist.checkpoint.raw import DamagedFileError
from xgram_dist.checkpoint.storage import FolderReader
from xgram_dist.errors import UserError
from xgram_dist.memory.placement import POLICIES, Placement, plan_placement
from xgram_dist.memory.routing.routing import Routing

AT_ONCE_BYTES = 16 << 20
"""Of rows that are picked out of a part, before its pages are let go."""


def saved_placement(folder: Path, facts: dict[str, Any], routing: Routing | None, num_rows: int) -> Placement:
    """Which rank held which row when the checkpoint was saved."""
    if facts["placement"] not in POLICIES:
        raise UserError(
            f"'{folder}' has its rows placed by '{facts['placement']}', this release knows {', '.join(POLICIES)}; use "
            "the release that wrote it"
        )
    return plan_placement(routing, num_rows, facts["data_ranks"], facts["placement"])


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
        entry = reader.manifest.tensors[name]
        assert list(entry.shape) == list(spread.shape), name
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
                reader.read_into(chunk, entry.dtype, target[here[0] : here[0] + len(here)])  # saved as it is held
            else:
                _pick(reader, chunk, entry.dtype, target, here, ascending[first:last] - chunk.offsets[0], columns)
        if covered != box.tensor.numel():
            raise DamagedFileError(f"the checkpoint '{reader.folder}' does not hold all of '{name}'")
        reader.bytes_taken += box.tensor.nbytes


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
    dtype: str,
    target: Tensor,
    here: NDArray[Any],
    there: NDArray[Any],
    columns: slice | None,
) -> None:
    """Rows `there` (ascending) of a saved part, to rows `here` of the target."""
    source = reader.chunk(chunk, dtype)
    source = source if columns is None else source[:, columns]
    step = max(1, AT_ONCE_BYTES // max(1, chunk.sizes[-1] * source.element_size()))
    for start in range(0, len(here), step):
        part = slice(start, start + step)
        rows = source[torch.from_numpy(there[part])]
        target[torch.from_numpy(here[part]).to(target.device)] = rows.to(target)
        reader.forget(chunk)
