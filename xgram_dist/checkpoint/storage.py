"""How torch.distributed.checkpoint plans, writes and reads our tensors.

Its planning (who writes what, which saved boxes overlap the boxes wanted) and its collectives are used; its files are
not, since they hold pickles. A rank writes one tensor file, the first rank the manifest.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
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

from xgram_dist.checkpoint.boxes import Box, State
from xgram_dist.checkpoint.files import DTYPES, DamagedFileError, TensorFile, verify_file, write_tensors
from xgram_dist.checkpoint.manifest import Chunk, Entry, Manifest
from xgram_dist.progress import Lines

# Said of every run in one process, which is no mistake.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _index(name: str, offsets: Any) -> MetadataIndex:
    return MetadataIndex(name, torch.Size(offsets))


class BoxSavePlanner(SavePlanner):
    """Boxes that several ranks hold alike are written by one of them, in turn."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state: State = state_dict

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [
                WriteItem(
                    _index(name, box.offsets),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        box.chunk, TensorProperties(dtype=spread.dtype), torch.Size(spread.shape)
                    ),
                )
                for name, spread in self.state.items()
                for box in spread.boxes
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        holders: dict[MetadataIndex, list[int]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                holders.setdefault(item.index, []).append(rank)
        load = [0] * len(all_plans)
        writer: dict[MetadataIndex, int] = {}
        entries: dict[str, TensorStorageMetadata] = {}
        items = {item.index: item for plan in all_plans for item in plan.items}
        for index, ranks in holders.items():
            chosen = min(ranks, key=lambda rank: (load[rank], rank))
            data = items[index].tensor_data
            assert data is not None
            load[chosen] += data.chunk.sizes.numel() * data.properties.dtype.itemsize
            writer[index] = chosen
            entry = entries.setdefault(index.fqn, TensorStorageMetadata(data.properties, data.size, []))
            entry.chunks.append(data.chunk)
        plans = [
            SavePlan([item for item in plan.items if writer[item.index] == rank]) for rank, plan in enumerate(all_plans)
        ]
        return plans, Metadata(dict(entries))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        index = write_item.index
        return next(box for box in self.state[index.fqn].boxes if torch.Size(box.offsets) == index.offset).tensor


class FolderWriter(StorageWriter):
    """Into a folder that exists; `run` goes into the manifest."""

    def __init__(self, folder: Path, rank: int, run: dict[str, Any], lines: Lines | None = None):
        self.folder, self.rank, self.run, self.lines = folder, rank, run, lines
        self.written: set[tuple[str, tuple[int, ...]]] = set()
        """Boxes that this rank has written."""
        self.total = 0
        """Bytes of all ranks; known to the first."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"rank-{self.rank:05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        keys = {}
        for item in plan.items:
            offsets = item.index.offset or ()
            key = f"{item.index.fqn}@{','.join(map(str, offsets))}"
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)
            tensors[key], keys[key] = data, item.index
        sums = write_tensors(self.folder / name, tensors, self.lines)
        verify_file(self.folder / name, sums)
        self.written = {(index.fqn, tuple(index.offset or ())) for index in keys.values()}
        size = (self.folder / name).stat().st_size
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [WriteResult(keys[key], tensors[key].nbytes, (name, size, key, checksum)) for key, checksum in sums.items()]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        manifest = Manifest(self.run)
        where = {result.index: result.storage_data for of_rank in results for result in of_rank}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            chunks = []
            for chunk in entry.chunks:
                file, size, key, checksum = where[_index(name, chunk.offsets)]
                manifest.files[file] = size
                chunks.append(Chunk(list(chunk.offsets), list(chunk.sizes), file, key, checksum))
            manifest.tensors[name] = Entry(DTYPES[entry.properties.dtype], list(entry.size), chunks)
        for path in self.folder.iterdir():
            manifest.files.setdefault(path.name, path.stat().st_size)
        manifest.write(self.folder)
        self.total = sum(manifest.files.values())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class BoxLoadPlanner(LoadPlanner):
    """Fills the boxes of a state in place from whatever boxes were saved."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self.state: State = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, spread in self.state.items():
            entry = self.metadata.state_dict_metadata.get(name)
            if not isinstance(entry, TensorStorageMetadata):
                raise DamagedFileError(f"the checkpoint has no '{name}'")
            if tuple(entry.size) != tuple(spread.shape):
                raise DamagedFileError(
                    f"'{name}' is {list(entry.size)} in the checkpoint, but {list(spread.shape)} here"
                )
            wanted = [box.chunk for box in spread.boxes]
            found = create_read_items_for_chunk_list(name, entry, wanted)
            if sum(item.lengths.numel() for item in found) < sum(chunk.sizes.numel() for chunk in wanted):
                raise DamagedFileError(f"the checkpoint does not hold all of '{name}'")
            items += found
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("checkpoints hold tensors alone")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        box: Box = next(
            box for box in self.state[index.fqn].boxes if torch.Size(box.offsets) == torch.Size(index.offset or ())
        )
        return _narrow(box.tensor, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class FolderReader(StorageReader):
    """Reads what the plan asks for, and checks each saved part it reads from against its checksum."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self._files: dict[str, TensorFile] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.manifest.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def _open(self, chunk: Chunk) -> TensorFile:
        file = self._files.get(chunk.file)
        if file is None:
            file = self._files[chunk.file] = TensorFile(self.folder / chunk.file)
        found = list(file.shape(chunk.key))
        if found != chunk.sizes:
            raise DamagedFileError(f"'{file.path}': '{chunk.key}' is {found}, not {chunk.sizes}")
        return file

    def chunk(self, chunk: Chunk) -> Tensor:
        """A saved part, verified."""
        made = torch.empty(chunk.sizes, dtype=self._open(chunk).dtype(chunk.key))
        self.read_into(chunk, made)
        return made

    def read_into(self, chunk: Chunk, target: Tensor) -> None:
        """All of a saved part, verified."""
        self._open(chunk).read_into(chunk.key, target, chunk.checksum)

    def blocks(self, chunk: Chunk) -> Iterator[tuple[int, Tensor]]:
        """A saved part some rows at a time, verified when the last has been taken."""
        return self._open(chunk).blocks(chunk.key, chunk.checksum)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            offsets = list(item.storage_index.offset or ())
            entry = self.manifest.tensors[item.storage_index.fqn]
            chunk = next(chunk for chunk in entry.chunks if chunk.offsets == offsets)
            target = planner.resolve_tensor(item)
            if list(item.lengths) == chunk.sizes:
                self.read_into(chunk, target)
            else:
                self._read_part(chunk, target, item.storage_offsets, item.lengths)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_part(self, chunk: Chunk, target: Tensor, offsets: Any, lengths: Any) -> None:
        for start, block in self.blocks(chunk):
            first, last = max(start, offsets[0]), min(start + len(block), offsets[0] + lengths[0])
            if first < last:
                rows = _narrow(block[first - start : last - start], (0, *offsets[1:]), (last - first, *lengths[1:]))
                target[first - offsets[0] : last - offsets[0]] = rows.to(target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _narrow(tensor: Tensor, offsets: Any, lengths: Any) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor
