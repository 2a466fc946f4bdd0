"""Table rows where they lie: in the files of a checkpoint, mapped into memory, read when a token needs them.

A token's vector depends on its id alone, so a lookup reads a few rows and nothing else: no table is ever loaded, and
processes on one machine share the system's copy of what they read. Rows are saved in the order of the saving ranks, cut
into boxes of rows and columns; here they are found by their global number whatever the layout was.
Shapes: U distinct tokens, N accesses, R distinct rows, W width of a table.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.checkpoint.files import TensorFile
from xgram_dist.checkpoint.raw import DamagedFileError
from xgram_dist.checkpoint.rows import saved_positions
from xgram_dist.checkpoint.storage import FolderReader
from xgram_dist.config import Config
from xgram_dist.inference.decoder import accesses_of, combined
from xgram_dist.memory.layout import Slab, Table, plan_slabs
from xgram_dist.memory.placement import plan_placement
from xgram_dist.memory.routing.routing import Routing
from xgram_dist.optim.rows.catch_up import SavedCatchUp


@dataclass(frozen=True)
class _Part:
    """A saved box."""

    rows: tuple[int, int]
    columns: slice
    tensor: Tensor


class MappedTensor:
    """A tensor with a row for each row of a table, as boxes in the files."""

    def __init__(self, reader: FolderReader, files: dict[str, TensorFile], name: str, *, verify: bool):
        entry = reader.manifest.tensors.get(name)
        if entry is None:
            raise DamagedFileError(f"the checkpoint '{reader.folder}' has no '{name}'")
        self.shape = tuple(entry.shape)
        self._parts = []
        for chunk in sorted(entry.chunks, key=lambda one: one.offsets):
            if chunk.file not in files:
                files[chunk.file] = TensorFile(reader.folder / chunk.file)
            tensor = reader.chunk(chunk, entry.dtype) if verify else files[chunk.file].tensor(chunk.key)
            if list(tensor.shape) != chunk.sizes:
                raise DamagedFileError(f"'{chunk.file}': '{chunk.key}' is {list(tensor.shape)}, not {chunk.sizes}")
            columns = slice(chunk.offsets[1], chunk.offsets[1] + chunk.sizes[1]) if len(self.shape) > 1 else slice(0)
            self._parts.append(_Part((chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]), columns, tensor))
        covered = sum(part.tensor.numel() for part in self._parts)
        if covered != torch.Size(self.shape).numel():
            raise DamagedFileError(f"the checkpoint '{reader.folder}' does not hold all of '{name}'")

    def take(self, positions_R: NDArray[Any]) -> Tensor:
        """Rows at ascending positions of the saved order [R, W], or [R]."""
        if len(self._parts) == 1:
            return self._parts[0].tensor.index_select(0, torch.from_numpy(positions_R))
        found = self._parts[0].tensor.new_empty(len(positions_R), *self.shape[1:])
        for part in self._parts:
            first, last = np.searchsorted(positions_R, part.rows)
            if first == last:
                continue
            index = torch.from_numpy(positions_R[first:last] - part.rows[0])
            if len(self.shape) == 1:
                found[first:last] = part.tensor.index_select(0, index)
            else:
                found[first:last, part.columns] = part.tensor.index_select(0, index)
        return found


class _MappedSlab:
    """Tables whose tokens read the same rows."""

    def __init__(self, owner: "MappedTables", number: int, slab: Slab):
        self.slab, self._vip = slab, owner.vip_positions
        tensor = owner.tensor
        self.rows = {table.name: tensor(f"tables.{table.name}.rows") for table in slab.tables}
        gated = f"tables.{slab.tables[0].name}.gates" in owner.reader.manifest.tensors
        self.gates = {table.name: tensor(f"tables.{table.name}.gates") for table in slab.tables} if gated else None
        self.offsets: Tensor | None = None
        if owner.routing is not None:
            view = owner.routing.views[slab.view]
            self.offsets = torch.from_numpy(view.offsets.copy())
            self._positions = owner.positions[view.rows]
            self._coefficients = torch.from_numpy(view.coefficients.copy())
        self._widths = torch.tensor([table.width for table in slab.tables])
        self._settle: dict[str, SavedCatchUp] = {}
        if owner.behind:
            prefix = f"tables.slab-{number}"
            optimizer = owner.config.optimizer
            for kind in ("rows", "gates") if gated else ("rows",):
                saved = owner.small(f"{prefix}.{kind}.")
                self._settle[kind] = SavedCatchUp(optimizer.betas, optimizer.eps, saved)
            self._steps = {kind: tensor(f"{prefix}.{kind}.current") for kind in self._settle}
            self._moments = {
                (kind, table.name, moment): tensor(f"tables.{table.name}.{kind}.{moment}")
                for kind in self._settle
                for table in slab.tables
                for moment in ("first", "second")
            }

    def settled(self, kind: str, table: Table, positions_R: NDArray[Any], missed: Any) -> Tensor:
        """Rows [R, W] or gates [R], up to date."""
        source = self.rows if kind == "rows" else self.gates
        assert source is not None
        values = source[table.name].take(positions_R)
        if missed is None:
            return values
        first, second = (self._moments[kind, table.name, one].take(positions_R) for one in ("first", "second"))
        if kind == "rows":
            return self._settle[kind].settle_(values, first, second, missed)
        return self._settle[kind].settle_(values[:, None], first[:, None], second[:, None], missed)[:, 0]

    def missed(self, kind: str, positions_R: NDArray[Any]) -> Any:
        if kind not in self._settle:
            return None
        vip_R = torch.from_numpy(self._vip[positions_R])
        return self._settle[kind].since(self._steps[kind].take(positions_R), vip_R)

    def vectors(self, tokens_U: Tensor, own: NDArray[Any] | None, into: dict[str, Tensor]) -> None:
        """`own`: where tokens have a row of their own, its position."""
        if self.offsets is None:
            assert own is not None
            positions_R, index_N = np.unique(own, return_inverse=True)
            missed = self.missed("rows", positions_R)
            for table in self.slab.tables:
                rows_RW = self.settled("rows", table, positions_R, missed)
                into[table.name] = rows_RW.index_select(0, torch.from_numpy(index_N))
            return
        places_N, starts_U = accesses_of(tokens_U, self.offsets)
        positions_R, inverse = np.unique(self._positions[places_N.numpy()], return_inverse=True)
        index_N, coefficients_N = torch.from_numpy(inverse), self._coefficients[places_N]
        of_rows, of_gates = self.missed("rows", positions_R), self.missed("gates", positions_R)
        tables, widths = self.slab.tables, [table.width for table in self.slab.tables]
        rows_RW = torch.cat([self.settled("rows", table, positions_R, of_rows) for table in tables], 1)
        if self.gates is not None:
            gates_RJ = torch.stack([self.settled("gates", table, positions_R, of_gates) for table in tables], 1)
            rows_RW *= torch.sigmoid(gates_RJ).repeat_interleave(self._widths, dim=1, output_size=rows_RW.shape[1])
        vectors_UW = combined(rows_RW, index_N, starts_U, coefficients_N)
        into.update(zip((table.name for table in tables), vectors_UW.split(widths, dim=1), strict=True))


class MappedTables:
    """All tables of a checkpoint."""

    def __init__(self, config: Config, routing: Routing | None, reader: FolderReader, *, verify: bool = False):
        """`verify`: read everything against its checksum first."""
        facts = reader.manifest.run
        self.config, self.routing, self.reader = config, routing, reader
        self._files: dict[str, TensorFile] = {}
        self._verify = verify
        slabs = plan_slabs(config)
        placement = plan_placement(routing, slabs[0].rows, facts["data_ranks"], facts["placement"])
        self.positions = saved_positions(placement)
        """Where each global row stands in the saved order."""
        self.vip_positions = np.zeros(len(self.positions), dtype=bool)
        self.vip_positions[self.positions[: 0 if routing is None else routing.vip_rows]] = True
        self.behind = facts["table_optimizer"] == "catch_up"
        self.slabs = [_MappedSlab(self, number, slab) for number, slab in enumerate(slabs)]

    def tensor(self, name: str) -> MappedTensor:
        return MappedTensor(self.reader, self._files, name, verify=self._verify)

    def small(self, prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix): self.reader.chunk(entry.chunks[0], entry.dtype).clone()
            for name, entry in self.reader.manifest.tensors.items()
            if name.startswith(prefix) and len(entry.chunks) == 1 and entry.chunks[0].sizes == entry.shape
        }

    @torch.no_grad()
    def vectors(self, tokens_U: Tensor) -> dict[str, Tensor]:
        """One vector a token and table [U, W], in fp32, for tokens in host memory."""
        own = self.positions[tokens_U.numpy()] if self.routing is None else None
        found: dict[str, Tensor] = {}
        for slab in self.slabs:
            slab.vectors(tokens_U, own, found)
        return found

    @torch.no_grad()
    def rows(self, table: str, start: int, stop: int) -> Tensor:
        """Global rows of one table, up to date [stop - start, W]."""
        return self._global("rows", table, self.positions[start:stop])

    @torch.no_grad()
    def gates(self, table: str) -> Tensor:
        """Gates of all its rows [S]."""
        return self._global("gates", table, self.positions)

    def _global(self, kind: str, name: str, positions: NDArray[Any]) -> Tensor:
        slab = next(slab for slab in self.slabs if name in slab.rows)
        table = next(table for table in slab.slab.tables if table.name == name)
        order = np.argsort(positions)
        ascending = positions[order]
        found = slab.settled(kind, table, ascending, slab.missed(kind, ascending))
        return found.index_select(0, torch.from_numpy(np.argsort(order)))
