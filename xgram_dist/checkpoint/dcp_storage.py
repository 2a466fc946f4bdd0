"""torch.distributed.checkpoint (DCP) with our tensors and files: planners, storage writer, storage reader.

DCP's planning (which rank writes what, which saved chunks overlap the shards wanted) and its collectives are used; its
file format is not, because it holds pickles. Each rank writes one safetensors file, the coordinator (rank 0) the
manifest. A save runs DCP's collectives in this order: gather local plans, scatter global plans, write, gather results.
Loading plans locally, without collectives.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from xgram_dist.checkpoint.chain import extend, link_files, rows_file
from xgram_dist.checkpoint.manifest import TOUCHED_VERSION, Chunk, Entry, Manifest
from xgram_dist.checkpoint.reader import CheckpointReader
from xgram_dist.checkpoint.row_ids import RowIdSet
from xgram_dist.checkpoint.safetensors_io import DamagedFileError, file_checksum
from xgram_dist.checkpoint.sharded_tensor import CheckpointState, LocalRowIds, Tensors
from xgram_dist.checkpoint.tensor_file import DTYPE_NAMES, TORCH_DTYPES, verify_file, write_tensors
from xgram_dist.console import ByteProgress


def ignore_single_process_warning() -> None:
    """Call before each call into DCP, which warns when it runs in one process. The filter is set every time because
    `catch_warnings` is not thread-safe and others may have set their own filters since."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _index(name: str, offsets: Any) -> MetadataIndex:
    return MetadataIndex(name, torch.Size(offsets))


class ShardSavePlanner(SavePlanner):
    """Plans the writes of a state. A shard that several ranks hold is written by the one with the fewest bytes so far.

    Local plans carry the row ids of their rank, and the row-id set of each of its tensors (`planner_data`); the global
    plan's metadata carries those of all ranks."""

    def __init__(self, row_ids: dict[str, LocalRowIds]):
        self.row_ids = row_ids

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.tensors: Tensors = state_dict

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                _index(name, shard.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    shard.chunk, TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape)
                ),
            )
            for name, tensor in self.tensors.items()
            for shard in tensor.shards
        ]
        row_sets = {name: tensor.row_ids for name, tensor in self.tensors.items()}
        return SavePlan(items, planner_data=(self.row_ids, row_sets))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        holders: dict[MetadataIndex, list[int]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                holders.setdefault(item.index, []).append(rank)
        nbytes = [0] * len(all_plans)
        writer: dict[MetadataIndex, int] = {}
        entries: dict[str, TensorStorageMetadata] = {}
        items = {item.index: item for plan in all_plans for item in plan.items}
        for index, ranks in holders.items():
            chosen = min(ranks, key=lambda rank: (nbytes[rank], rank))
            data = items[index].tensor_data
            assert data is not None
            nbytes[chosen] += data.chunk.sizes.numel() * data.properties.dtype.itemsize
            writer[index] = chosen
            entry = entries.setdefault(index.fqn, TensorStorageMetadata(data.properties, data.size, []))
            entry.chunks.append(data.chunk)
        plans = [
            SavePlan([item for item in plan.items if writer[item.index] == rank]) for rank, plan in enumerate(all_plans)
        ]
        row_ids, row_sets = zip(*(plan.planner_data for plan in all_plans), strict=True)
        names = {name: row_set for of_rank in row_sets for name, row_set in of_rank.items()}
        return plans, Metadata(dict(entries), planner_data=(_row_id_sets(list(row_ids)), names))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        index = write_item.index
        shards = self.tensors[index.fqn].shards
        return next(shard for shard in shards if torch.Size(shard.offsets) == index.offset).tensor


def _row_id_sets(ranks: list[dict[str, LocalRowIds]]) -> dict[str, RowIdSet]:
    """The row-id sets from the parts of all ranks. Ranks of one tensor group bring the same part, and stages of a
    pipeline that have tables of the same set."""
    sets = {}
    for name in sorted({name for of_rank in ranks for name in of_rank}):
        parts = [of_rank[name] for of_rank in ranks if name in of_rank]
        segments = {local.data_rank: local.segment for local in parts}
        ordered = [segments[rank] for rank in range(len(segments))]
        sets[name] = RowIdSet(sum(segment.count for segment in ordered), ordered, parts[0].table_rows)
    return sets


class FolderWriter(StorageWriter):
    """Writes into an existing folder; `run` goes into the manifest."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        run: dict[str, Any],
        state: CheckpointState,
        lines: ByteProgress | None = None,
        base: Path | None = None,
    ):
        """`base`: the checkpoint that the touched rows of the state are the changes of; None: they are all rows."""
        self.folder, self.rank, self.run, self.lines, self.base = folder, rank, run, lines, base
        touched = {name for name, local in state.row_ids.items() if local.table_rows is not None}
        ids = {state.row_ids[name].segment.tensor for name in touched}
        self._chained = {name for name, one in state.tensors.items() if one.row_ids in touched or name in ids}
        """Tensors that later checkpoints may link to."""
        self.written: set[tuple[str, tuple[int, ...]]] = set()
        """(name, offsets) of the shards that this rank has written."""
        self.total_bytes = 0
        """Written by all ranks; known to the coordinator."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        chained = [item for item in plan.items if item.index.fqn in self._chained]
        others = [item for item in plan.items if item.index.fqn not in self._chained]
        results += self._write_file(f"rank-{self.rank:05d}.safetensors", others, planner)
        if chained:
            results += self._write_file(rows_file(self.run["step"], self.rank), chained, planner)
        self.written = {(result.index.fqn, tuple(result.index.offset or ())) for result in results}
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        tensors: dict[str, Tensor] = {}
        indices = {}
        for item in items:
            offsets = item.index.offset or ()
            key = f"{item.index.fqn}@{','.join(map(str, offsets))}"
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)
            tensors[key], indices[key] = data, item.index
        checksums = write_tensors(self.folder / name, tensors, self.lines)
        verify_file(self.folder / name, checksums)
        size = (self.folder / name).stat().st_size
        return [
            WriteResult(indices[key], tensors[key].nbytes, (name, size, key, checksum))
            for key, checksum in checksums.items()
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        row_ids, row_sets = metadata.planner_data
        manifest = Manifest(self.run, row_ids=row_ids)
        if any(row_ids.table_rows is not None for row_ids in manifest.row_ids.values()):
            manifest.version = TOUCHED_VERSION
        stored = {result.index: result.storage_data for rank_results in results for result in rank_results}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            chunks = []
            for chunk in entry.chunks:
                file, size, key, checksum = stored[_index(name, chunk.offsets)]
                manifest.files[file] = size
                chunks.append(Chunk(list(chunk.offsets), list(chunk.sizes), file, key, checksum))
            dtype = DTYPE_NAMES[entry.properties.dtype]
            manifest.tensors[name] = Entry(dtype, list(entry.size), chunks, row_sets.get(name))
        self.total_bytes = sum(manifest.files.values())
        if self.base is not None:
            base = Manifest.read(self.base)
            needed = extend(base, manifest)
            link_files(self.base, needed, self.folder)
            manifest.files |= {name: base.files[name] for name in needed}
        for path in self.folder.iterdir():
            if path.name not in manifest.files:
                manifest.files[path.name] = path.stat().st_size
                manifest.checksums[path.name] = file_checksum(path)
                self.total_bytes += manifest.files[path.name]
        manifest.write(self.folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class ShardLoadPlanner(LoadPlanner):
    """Fills the shards of a state in place from whatever chunks were saved."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self.tensors: Tensors = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, tensor in self.tensors.items():
            entry = self.metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            assert entry.size == torch.Size(tensor.shape), name
            wanted = [shard.chunk for shard in tensor.shards]
            overlaps = create_read_items_for_chunk_list(name, entry, wanted)
            if sum(item.lengths.numel() for item in overlaps) < sum(chunk.sizes.numel() for chunk in wanted):
                raise DamagedFileError(f"the checkpoint does not hold all of '{name}'")
            items += overlaps
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("checkpoints hold tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        offsets = torch.Size(index.offset or ())
        shard = next(shard for shard in self.tensors[index.fqn].shards if torch.Size(shard.offsets) == offsets)
        return _narrow(shard.tensor, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class FolderReader(StorageReader):
    """What a load plan asks for, through the `CheckpointReader`."""

    def __init__(self, reader: CheckpointReader):
        self.reader = reader

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=TORCH_DTYPES[entry.dtype]),
                    torch.Size(entry.shape),
                    [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks],
                )
                for name, entry in self.reader.manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            offsets = list(item.storage_index.offset or ())
            entry = self.reader.manifest.tensors[item.storage_index.fqn]
            chunk = next(chunk for chunk in entry.chunks if chunk.offsets == offsets)
            target = planner.resolve_tensor(item)
            if list(item.lengths) == chunk.sizes:
                self.reader.read_chunk(chunk, entry.dtype, target)
            else:
                target.copy_(_narrow(self.reader.chunk(chunk, entry.dtype), item.storage_offsets, item.lengths))
                self.reader.release_pages()
            self.reader.bytes_read += target.nbytes
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _narrow(tensor: Tensor, offsets: Any, lengths: Any) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor
