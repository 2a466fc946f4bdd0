"""The one reader of checkpoints: for resuming, warm starts, eval, export, generate, consolidate and analysis.

`CheckpointReader(folder)` reads the manifest; recipe, routing and n-gram keys when they are asked for. It gives

    chunk, read_chunk        a saved chunk, as a memory-mapped view or copied into a buffer
    tensor, read_tensor      a whole tensor, assembled from the chunks of any layout
    blocks                   a weight from its first row to its last, a block at a time
    table_rows               global rows of a table or of its gates, caught up
    saved_view               the same without page release, for lookups at inference

A row that is not saved was never touched: its value is a formula, initial values and the decay since, and is computed
when it is asked for. Weights are `backbone.NAME` and `tables.layers.LAYER.SITE.VIEW.rows` or `.gates`. A chunk is
verified against its checksum once, before or while it is first read; `verify` shares that work among ranks. Nothing has
to fit in memory.
Shapes: R rows, W columns of a table.
"""

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.checkpoint.compatibility import saved_config
from xgram_dist.checkpoint.manifest import TABLE_ROWS, Chunk, Entry, Manifest
from xgram_dist.checkpoint.row_ids import SavedRows, read_row_ids
from xgram_dist.checkpoint.safetensors_io import ITEM_BYTES, DamagedFileError
from xgram_dist.checkpoint.sharded_tensor import MOMENT_SUFFIXES
from xgram_dist.checkpoint.tensor_file import TORCH_DTYPES, TensorFile
from xgram_dist.config import Config
from xgram_dist.errors import UserError
from xgram_dist.model.methods.base import Keys, method_of, table_layout
from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.initial_rows import initial_rows
from xgram_dist.tables.optimizers.adamw_catchup import SavedCatchUp
from xgram_dist.tables.optimizers.catchup_math import Rounded, as_it_is
from xgram_dist.tables.optimizers.rounding import (
    VALUES,
    column_keys,
    compute_dtype,
    element_noise,
    round_to_bf16,
    row_keys,
)
from xgram_dist.tables.routing import Routing, View
from xgram_dist.tables.routing_io import load_routing
from xgram_dist.tables.row_sharding import POLICIES, plan_row_sharding
from xgram_dist.untrusted import shown

ROUTING_FILE, KEYS_FILE = "routing.npz", "keys.npz"
BLOCK_BYTES = 32 << 20
"""Of a weight that is read in blocks."""


class CheckpointReader:
    def __init__(self, folder: Path):
        self.folder, self.manifest = folder, Manifest.read(folder)
        self.facts = self.manifest.run
        self._files: dict[str, TensorFile] = {}
        self._verified: set[tuple[str, str]] = set()
        self._saved_rows: dict[str, SavedRows] = {}
        self._views: dict[tuple[int, bool], SavedView] = {}
        self.bytes_verified = self.bytes_read = 0
        """Counted for tests and benchmarks."""

    # What belongs to the run.

    @cached_property
    def config(self) -> Config:
        return saved_config(self.folder, self.facts)

    @cached_property
    def routing(self) -> Routing | None:
        """The token -> row maps; None: row = token id, or no tables."""
        if self.facts["routing"] is None:
            return None
        if ROUTING_FILE not in self.manifest.files:
            raise DamagedFileError(f"'{self.folder}' has no {ROUTING_FILE}")
        routing = load_routing(self.folder / ROUTING_FILE)
        if routing.sha256() != self.facts["routing"]:
            raise DamagedFileError(f"'{self.folder / ROUTING_FILE}' is not the routing the checkpoint was saved with")
        return routing

    @cached_property
    def ngram_keys(self) -> Keys | None:
        """What the n-gram methods look up by; None for the other methods."""
        if self.facts.get("keys") is None:
            return None
        if KEYS_FILE not in self.manifest.files:
            raise DamagedFileError(f"'{self.folder}' has no {KEYS_FILE}")
        keys = method_of(self.config).load_keys(self.folder / KEYS_FILE)
        if keys.sha256() != self.facts["keys"]:
            raise DamagedFileError(f"'{self.folder / KEYS_FILE}' is not what the checkpoint was saved with")
        return keys

    def weight_shapes(self) -> dict[str, list[int]]:
        """Every weight by name: the backbone's, then the tables', with all rows."""
        entries = self.manifest.tensors
        names = [name for name in entries if name.startswith("backbone.") and not name.endswith(MOMENT_SUFFIXES)]
        names += [f"tables.{name}.{kind}" for name in self._view_of_table for kind in ("rows", "gates")]
        return {name: self.manifest.table_shape(name) for name in names if name in entries}

    def tensors_of_weight(self, name: str) -> list[str]:
        """The tensors of the checkpoint that reading a weight needs."""
        if name.startswith("backbone."):
            return [name]
        table, kind = _split(name)
        per_view = [one for one in self.manifest.tensors if one.startswith(self._view_prefix(table, kind))]
        moments = [f"{name}.{moment}" for moment in ("first", "second")] if per_view and self.behind else []
        return [name, *moments, *per_view]

    def view_of_table(self, table: str) -> View | None:
        """The token -> row map of a table; None: row = token id."""
        return None if self.routing is None else self.routing.views[self._view_of_table[table]]

    @property
    def behind(self) -> bool:
        """Whether saved rows still miss steps, which are applied when the rows are read."""
        return bool(self.facts["table_optimizer"] == "catch_up")

    @cached_property
    def _view_of_table(self) -> dict[str, int]:
        return {table.name: slab.view for slab in table_layout(self.config).slabs for table in slab.tables}

    def _view_prefix(self, table: str, kind: str) -> str:
        return f"tables.view-{self._view_of_table[table]}.{kind}."

    # Chunks and verification.

    def entry(self, name: str) -> Entry:
        if name not in self.manifest.tensors:
            raise DamagedFileError(f"the checkpoint '{self.folder}' has no '{name}'")
        return self.manifest.tensors[name]

    def verify(self, world: ProcessGroup, names: Iterable[str] | None = None) -> None:
        """Verify these tensors (None: all), each chunk on one rank, so that no rank reads everything.

        One all-gather over `world`, which all ranks of it must enter; all raise the same error."""
        error: str | None = None
        every = (chunk.file for entry in self.manifest.tensors.values() for chunk in entry.chunks)
        file_index = {name: index for index, name in enumerate(sorted(set(every)))}
        chunks = [c for name in names or self.manifest.tensors for c in self.entry(name).chunks]
        for number, chunk in enumerate(chunks):
            rank = _verifying_rank(file_index[chunk.file], number, len(file_index), world.size)
            if error is None and rank == world.rank:
                try:
                    self._verify(chunk)
                except DamagedFileError as damage:
                    error = str(damage)
        errors = [one for one in world.host.all_gather_object(error) if one is not None]
        if errors:
            raise DamagedFileError(errors[0])
        self._verified |= {(chunk.file, chunk.key) for chunk in chunks}

    def chunk(self, chunk: Chunk, dtype: str, *, verify: bool = True) -> Tensor:
        """A saved chunk as a memory-mapped view of its file."""
        if verify and (chunk.file, chunk.key) not in self._verified:
            self._verify(chunk)
        file = self._file(chunk)
        file.check_header(chunk.key, dtype, chunk.sizes)
        return file.mapped(chunk.key)

    def read_chunk(self, chunk: Chunk, dtype: str, target: Tensor) -> None:
        """Copy a whole chunk into a buffer, verifying it in the same pass."""
        if (chunk.file, chunk.key) in self._verified:
            target.copy_(self.chunk(chunk, dtype))
            return
        file = self._file(chunk)
        file.check_header(chunk.key, dtype, chunk.sizes)
        file.read_into(chunk.key, target, chunk.checksum)
        self._mark_verified(chunk)

    def release_pages(self) -> None:
        """Unmap the pages that mapped views have touched, so that streaming a checkpoint does not grow this process."""
        for file in self._files.values():
            file.release_pages()

    def _verify(self, chunk: Chunk) -> None:
        self._file(chunk).verify(chunk.key, chunk.checksum)
        self._mark_verified(chunk)

    def _mark_verified(self, chunk: Chunk) -> None:
        header = self._file(chunk).header(chunk.key)
        self.bytes_verified += header.end - header.begin
        self._verified.add((chunk.file, chunk.key))

    def _file(self, chunk: Chunk) -> TensorFile:
        if chunk.file not in self._files:
            self._files[chunk.file] = TensorFile(self.folder / chunk.file)
        return self._files[chunk.file]

    # Whole tensors. Table tensors come in saved order; for global rows use `blocks` or `table_rows`.

    def tensor(self, name: str) -> Tensor:
        entry = self.entry(name)
        tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
        self.read_tensor(name, tensor)
        return tensor

    def read_tensor(self, name: str, target: Tensor) -> None:
        """Assemble a tensor from its chunks in a buffer of its whole shape, on any device and of any dtype."""
        entry = self.entry(name)
        if list(entry.shape) != list(target.shape):
            raise DamagedFileError(
                f"'{name}' is {entry.shape} in the checkpoint, but its recipe asks for {list(target.shape)}"
            )
        covered = 0
        for chunk in entry.chunks:
            part = target
            for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                part = part.narrow(dim, start, size)
            self.read_chunk(chunk, entry.dtype, part)
            covered += part.numel()
        self._check_covered(name, covered, target.numel())

    def replicated_tensors(self, prefix: str) -> dict[str, Tensor]:
        """The tensors with this prefix that are no table tensors, by the rest of their name; copies."""
        return {
            name.removeprefix(prefix): self.tensor(name)
            for name, entry in self.manifest.tensors.items()
            if name.startswith(prefix) and entry.row_ids is None
        }

    def weight(self, name: str) -> Tensor:
        """A whole weight: rows of tables in global order, caught up."""
        return torch.cat(list(self.blocks(name))).view(self.manifest.table_shape(name))

    def blocks(self, name: str) -> Iterator[Tensor]:
        """A weight from its first row to its last; a scalar as one row."""
        entry = self.entry(name)
        if not entry.shape:
            yield self.tensor(name)[None]
            return
        num_rows, *rest = self.manifest.table_shape(name)
        step = max(1, BLOCK_BYTES // max(1, math.prod(rest) * ITEM_BYTES[entry.dtype]))
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            if entry.row_ids is None:
                yield self._row_range(name, start, stop)
            else:
                yield self.table_rows(name, np.arange(start, stop))

    def _row_range(self, name: str, start: int, stop: int) -> Tensor:
        """tensor[start:stop], from whatever chunks overlap it."""
        entry = self.entry(name)
        offsets, sizes = [start] + [0] * (len(entry.shape) - 1), [stop - start, *entry.shape[1:]]
        block, covered = torch.empty(sizes, dtype=TORCH_DTYPES[entry.dtype]), 0
        for chunk in entry.chunks:
            first = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
            ends = zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
            last = [min(a + m, b + n) for a, m, b, n in ends]
            if all(a < b for a, b in zip(first, last, strict=True)):
                target = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, offsets, strict=True))
                source = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, chunk.offsets, strict=True))
                block[target] = self.chunk(chunk, entry.dtype)[source]
                covered += block[target].numel()
        self._check_covered(name, covered, block.numel())
        return block

    def _check_covered(self, name: str, covered: int, wanted: int) -> None:
        if covered < wanted:
            raise DamagedFileError(f"the checkpoint '{self.folder}' does not hold all of '{name}'")

    # Rows of tables.

    def saved_rows(self, row_ids: str = TABLE_ROWS) -> SavedRows:
        """Which rows a row-id set holds, and their positions in the saved order; checked on first use."""
        if row_ids not in self._saved_rows:
            if self.manifest.version == 1:
                found = self._rows_by_policy()
            else:
                recorded = self.manifest.row_ids[row_ids]
                segments = read_row_ids(f"'{self.folder}'", row_ids, recorded, self._integers)
                found = SavedRows(segments, recorded.limit)
            self._saved_rows[row_ids] = found
        return self._saved_rows[row_ids]

    def row_id_sets(self) -> set[str]:
        """The row-id sets of the table tensors."""
        return {entry.row_ids for entry in self.manifest.tensors.values() if entry.row_ids is not None}

    def saved_rows_of(self, table: str) -> SavedRows:
        """Of a table's row-id set."""
        return self.saved_rows(str(self.entry(f"tables.{table}.rows").row_ids))

    def positions(self) -> NDArray[Any]:
        """The position of each global row in the saved order [num_rows], where all rows are saved."""
        saved = self.saved_rows()
        return saved.positions_of(np.arange(saved.table_rows))

    def _integers(self, name: str) -> NDArray[Any]:
        entry = self.entry(name)
        (chunk,) = entry.chunks
        return self._file(chunk).integers(chunk.key, chunk.checksum)

    def _rows_by_policy(self) -> SavedRows:
        """Version 1 records the row-sharding policy instead of row ids: run it again. This is right as long as the
        policies of that release compute what they computed then; tests/golden/checkpoints holds them to it."""
        policy = self.facts["row_sharding"]
        if policy not in POLICIES:
            raise UserError(
                f"'{self.folder}' has its rows sharded by {shown(policy)}, this release knows {', '.join(POLICIES)}; "
                "use the release that wrote it"
            )
        num_rows = next(entry.shape[0] for entry in self.manifest.tensors.values() if entry.row_ids == TABLE_ROWS)
        sharding = plan_row_sharding(self.routing, num_rows, self.facts["data_ranks"], policy)
        return SavedRows([sharding.rows_of(rank) for rank in range(sharding.ranks)], num_rows)

    def saved_view(self, number: int, *, verify: bool = True) -> "SavedView":
        """The tables of one view. Without `verify`, chunks are mapped unread: only touched pages are ever read."""
        if (number, verify) not in self._views:
            self._views[number, verify] = SavedView(self, number, verify)
        return self._views[number, verify]

    def table_rows(self, name: str, rows_R: NDArray[Any], columns: slice | None = None) -> Tensor:
        """These global rows of `tables.TABLE.rows` [R, W], or of `.gates` [R], caught up; in any order."""
        table, kind = _split(name)
        view = self.saved_view(self._view_of_table[table])
        found = view.find(rows_R)
        values = view.values(kind, table, found, view.missed(kind, found), columns)
        self.release_pages()
        return values


@dataclass(frozen=True)
class FoundRows:
    """Where the records of some rows are."""

    saved: NDArray[Any]
    """The rows that are saved, by ascending position."""
    positions: NDArray[Any]
    """Their positions."""
    unsaved: NDArray[Any]
    """The rows that are not saved."""
    order_R: NDArray[Any] | None
    """Index of each row asked for among the saved and then the unsaved; None: that is the order asked for."""


class SavedView:
    """The rows and gates of the tables of one view, caught up."""

    def __init__(self, reader: CheckpointReader, number: int, verify: bool):
        self._reader, self._number, self._verify = reader, number, verify
        self._tables = {
            table.name: table.width
            for slab in table_layout(reader.config).slabs
            if slab.view == number
            for table in slab.tables
        }
        self._saved_rows = reader.saved_rows_of(next(iter(self._tables)))
        self._mapped: dict[str, MappedRows] = {}
        self._catch_up: dict[str, SavedCatchUp] = {}

    def _is_vip(self, rows_R: NDArray[Any]) -> Tensor:
        """Whether a row is a VIP row: those have a learning rate of their own."""
        routing = self._reader.routing
        return torch.from_numpy(rows_R < (0 if routing is None else routing.vip_rows))

    def find(self, rows_R: NDArray[Any]) -> FoundRows:
        """For `values`; global rows in any order."""
        positions_R = self._saved_rows.positions_of(rows_R)
        # Rows that are not saved come last.
        keys_R = np.where(positions_R < 0, np.iinfo(np.int64).max, positions_R)
        inverse: NDArray[Any] | None = None
        if not (np.diff(keys_R) > 0).all():
            order = np.argsort(keys_R, kind="stable")
            rows_R, positions_R, inverse = rows_R[order], positions_R[order], np.argsort(order, kind="stable")
        count = int((positions_R >= 0).sum())
        return FoundRows(rows_R[:count], positions_R[:count], rows_R[count:], inverse)

    def missed(self, kind: str, found: FoundRows) -> Any:
        """The steps that saved rows (or gates) still miss, for `values`; None: none. Shared by the view's tables."""
        if not self._reader.behind:
            return None
        steps_R = self._rows(f"tables.view-{self._number}.{kind}.current").gather(found.positions)
        return self._catch_up_of(kind).since(steps_R, self._is_vip(found.saved))

    def values(self, kind: str, table: str, found: FoundRows, missed: Any, columns: slice | None = None) -> Tensor:
        """rows [R, W] or gates [R] of a table, caught up, in the order asked for; a copy."""
        name = f"tables.{table}.{kind}"
        values = self._gather(name, found.positions, columns)
        if missed is not None:
            first, second = (self._gather(f"{name}.{m}", found.positions, columns) for m in ("first", "second"))
            as_rows = [one if one.dim() > 1 else one[:, None] for one in (values, first, second)]
            self._catch_up_of(kind).catch_up_(as_rows[0], as_rows[1], as_rows[2], missed)
        if len(found.unsaved):
            values = torch.cat((values, self._formula(kind, table, found.unsaved, columns).to(values)))
        return values if found.order_R is None else values.index_select(0, torch.from_numpy(found.order_R))

    def _gather(self, name: str, positions_R: NDArray[Any], columns: slice | None) -> Tensor:
        """Numbers in bf16 as fp32."""
        numbers = self._rows(name).gather(positions_R, columns)
        return numbers.to(compute_dtype(numbers.dtype))

    def _formula(self, kind: str, table: str, rows_R: NDArray[Any], columns: slice | None) -> Tensor:
        """rows [R, W] or gates [R] that were never touched."""
        config = self._reader.config
        rounded: Rounded = as_it_is
        if kind == "gates":
            values = torch.full((len(rows_R), 1), config.memory.row_gate_init)
        else:
            begin, end = (0, self._tables[table]) if columns is None else (columns.start, columns.stop)
            rows = torch.from_numpy(rows_R)
            values = initial_rows(rows, end - begin, config.model.init_std, config.train.seed, table, begin)
            stored = TORCH_DTYPES[self._reader.entry(f"tables.{table}.rows").dtype]
            if stored == torch.bfloat16:
                values = values.to(stored).float()
                keys_W = column_keys(config.train.seed, [table], [end], 0, rows.device)[begin:]
                rounded = functools.partial(_rounded_rows, row_keys(rows), keys_W)
        if self._reader.behind:
            self._catch_up_of(kind).formula_(values, self._is_vip(rows_R), rounded)
        return values[:, 0] if kind == "gates" else values

    def _catch_up_of(self, kind: str) -> SavedCatchUp:
        if kind not in self._catch_up:
            saved = self._reader.replicated_tensors(f"tables.view-{self._number}.{kind}.")
            optimizer = self._reader.config.optimizer
            self._catch_up[kind] = SavedCatchUp(optimizer.betas, optimizer.eps, saved)
        return self._catch_up[kind]

    def _rows(self, name: str) -> "MappedRows":
        if name not in self._mapped:
            entry = self._reader.entry(name)
            chunks = [
                _MappedChunk(chunk, self._reader.chunk(chunk, entry.dtype, verify=self._verify))
                for chunk in sorted(entry.chunks, key=lambda one: one.offsets)
            ]
            if sum(chunk.tensor.numel() for chunk in chunks) != math.prod(entry.shape):
                raise DamagedFileError(f"the checkpoint '{self._reader.folder}' does not hold all of '{name}'")
            self._mapped[name] = MappedRows(tuple(entry.shape), chunks)
        return self._mapped[name]


def _rounded_rows(row_keys_R: Tensor, column_keys_W: Tensor, values_RW: Tensor, step: int) -> Tensor:
    return round_to_bf16(values_RW, element_noise(row_keys_R, step, VALUES), column_keys_W)


class _MappedChunk:
    def __init__(self, chunk: Chunk, tensor: Tensor):
        self.tensor = tensor
        self.rows = chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]
        self.columns = (chunk.offsets[1], chunk.offsets[1] + chunk.sizes[1]) if len(chunk.sizes) > 1 else (0, 1)


@dataclass(frozen=True)
class MappedRows:
    """A table tensor as memory-mapped chunks of rows and columns. Only the pages of gathered rows are read, and
    processes on one machine share them."""

    shape: tuple[int, ...]
    chunks: list[_MappedChunk]

    def gather(self, positions_R: NDArray[Any], columns: slice | None = None) -> Tensor:
        """Rows at ascending positions [R, W], or [R]; a copy. `columns` applies to tensors that have any."""
        if len(self.chunks) == 1 and (columns is None or len(self.shape) == 1):
            return self.chunks[0].tensor.index_select(0, torch.from_numpy(positions_R))
        begin, end = 0, 1 if len(self.shape) == 1 else self.shape[1]
        if columns is not None and len(self.shape) > 1:
            begin, end = columns.start, columns.stop
        values = self.chunks[0].tensor.new_empty(len(positions_R), end - begin)
        for chunk in self.chunks:
            first, last = np.searchsorted(positions_R, chunk.rows)
            low, high = max(begin, chunk.columns[0]), min(end, chunk.columns[1])
            if first == last or low >= high:
                continue
            source = chunk.tensor if chunk.tensor.dim() > 1 else chunk.tensor[:, None]
            source = source[:, low - chunk.columns[0] : high - chunk.columns[0]]
            index = torch.from_numpy(positions_R[first:last] - chunk.rows[0])
            values[first:last, low - begin : high - begin] = source.index_select(0, index)
        return values if len(self.shape) > 1 else values[:, 0]


def _split(name: str) -> tuple[str, str]:
    """`tables.TABLE.rows` -> (TABLE, rows)"""
    table, kind = name.removeprefix("tables.").rsplit(".", 1)
    return table, kind


def _verifying_rank(file: int, chunk: int, num_files: int, num_ranks: int) -> int:
    """The rank that verifies a chunk: in the layout that was saved, the one that loads it; else in turn."""
    if num_ranks <= num_files:
        return file % num_ranks
    return file + num_files * (chunk % -(-(num_ranks - file) // num_files))
