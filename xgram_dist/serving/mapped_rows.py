"""Table rows mapped from an exported folder: not loaded, and shared by all processes through the page cache.

Vectors of keys are gathered from them in host memory. To a GPU they travel through pinned memory on a stream of their
own, piece by piece: one is copied while the next is gathered.
Shapes: S rows, U keys, N accesses, W columns of all tables.
"""

import mmap
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from xgram_dist.checkpoint.safetensors_io import RawFile
from xgram_dist.checkpoint.tensor_file import TORCH_DTYPES
from xgram_dist.errors import BadFileError
from xgram_dist.inference.hf.decoder_tables import Tables, ViewRows
from xgram_dist.parallel.device import CopyStream
from xgram_dist.untrusted import check_name, read_json

INDEX = "model.safetensors.index.json"
MANY = 4
"""Keys from which on their rows are read ahead, together."""
PIECE_BYTES = 16 << 20
"""Of vectors that are copied to a GPU at once."""


class MappedRows:
    """The rows of one view, in a file of any size. Pages are read as rows are, and none beside them."""

    def __init__(self, path: Path, name: str):
        raw = RawFile(path, follow=True)
        header = raw.header(name)
        dtype, self._begin = TORCH_DTYPES[header.dtype], raw.data_start + header.begin
        with path.open("rb") as file:
            # Read-only: a mapping that may be written to cannot be larger than memory.
            self._map = mmap.mmap(file.fileno(), raw.data_start + header.end, access=mmap.ACCESS_READ)
        self._map.madvise(mmap.MADV_RANDOM)
        size = header.end - header.begin
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the buffer cannot be written to; nothing writes
            stored = torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=self._begin)
        if self._begin % dtype.itemsize:
            raise BadFileError(
                f"'{path}': '{name}' begins at byte {self._begin}, where no {header.dtype} can be mapped; export the "
                "checkpoint again"
            )
        self.rows: Tensor = stored.view(dtype).view(header.shape)
        self._row_bytes = size // max(1, len(self.rows))

    def read_ahead(self, index_N: Tensor) -> None:
        """Have these rows read together, where they are not in memory, instead of one after the other."""
        for row in index_N.tolist():
            start = self._begin + row * self._row_bytes
            inside = start % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, start - inside, self._row_bytes + inside)


class RowReader:
    """Vectors of keys, from mapped rows into memory of a device."""

    def __init__(self, tables: Tables, mapped: list[MappedRows], copies: CopyStream):
        self.tables, self.copies, self._mapped = tables, copies, mapped
        self._piece = max(1, PIECE_BYTES // (4 * tables.width))

    def read(self, keys_U: Tensor, vectors_UW: Tensor) -> None:
        """Fill `vectors_UW` with the vectors of distinct keys. What the device computes next waits for them; the host
        does not."""
        if len(keys_U) >= MANY:
            for mapped, rows in zip(self._mapped, self.tables.rows_of(keys_U), strict=True):
                mapped.read_ahead(rows)
        computed, arrived = self.copies.computed(), None
        for keys, vectors in zip(keys_U.split(self._piece), vectors_UW.split(self._piece), strict=True):
            arrived = self.copies.fill(vectors, partial(self.tables.read_into, keys), computed)
        self.copies.compute_after(arrived)


def map_rows(folder: Path, tables: Tables) -> list[MappedRows]:
    """Give the views of `tables`, built without memory, their rows."""
    index, mapped = _weight_map(folder / INDEX), []
    for number, view in enumerate(tables.views):
        assert isinstance(view, ViewRows)
        name = f"tables.views.{number}.rows"
        if name not in index:
            raise BadFileError(
                f"'{folder}' has no files of tables: an older release exported it; export the checkpoint again"
            )
        file = folder / check_name(folder / INDEX, index[name])
        found = MappedRows(file, name)
        if found.rows.shape != view.rows.shape or found.rows.dtype != view.row_format.dtype:
            raise BadFileError(f"'{file}' does not hold the rows that config.json describes; export it again")
        del view.rows
        view.register_buffer("rows", found.rows)
        mapped.append(found)
    return mapped


def _weight_map(path: Path) -> dict[str, object]:
    """The file of each tensor. Files of an export may be links, because model hubs keep them behind links."""
    try:
        tree = read_json(path, follow=True)
    except FileNotFoundError:
        return {}
    if not isinstance(tree, dict) or not isinstance(tree.get("weight_map"), dict):
        raise BadFileError(f"'{path}' has no 'weight_map'; export the checkpoint again")
    return dict(tree["weight_map"])
