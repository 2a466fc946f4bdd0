"""Reading table rows that another number of ranks has saved.

Rows are saved in the order of the saving ranks. A rank that owns other rows now picks them out of the saved parts, part
by part, through the memory map: parts without a row of its own are not opened, and no table is ever whole in memory.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from xgram_dist.checkpoint.boxes import State
from xgram_dist.checkpoint.raw import DamagedFileError
from xgram_dist.checkpoint.storage import FolderReader
from xgram_dist.errors import UserError
from xgram_dist.memory.placement import POLICIES, Placement, plan_placement
from xgram_dist.memory.routing.routing import Routing


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
            if first == last:
                continue
            here = torch.from_numpy(order[first:last])
            there = torch.from_numpy(ascending[first:last] - chunk.offsets[0])
            if len(spread.shape) == 1:
                source = reader.chunk(chunk, entry.dtype)
                box.tensor[here] = source[there].to(box.tensor)
                covered += len(here)
                continue
            begin = max(chunk.offsets[1], box.offsets[1])
            end = min(chunk.offsets[1] + chunk.sizes[1], box.offsets[1] + box.tensor.shape[1])
            if begin < end:
                source = reader.chunk(chunk, entry.dtype)[:, begin - chunk.offsets[1] : end - chunk.offsets[1]]
                target = box.tensor[:, begin - box.offsets[1] : end - box.offsets[1]]
                target[here] = source[there].to(target)
                covered += len(here) * (end - begin)
        if covered != box.tensor.numel():
            raise DamagedFileError(f"the checkpoint '{reader.folder}' does not hold all of '{name}'")
        reader.bytes_taken += box.tensor.nbytes
