"""How torch.distributed.checkpoint plans, writes and reads our tensors.

Its planning (who writes what, which saved boxes overlap the boxes wanted) and its collectives are used; its files are
not, since they hold pickles. A rank writes one tensor file, the first rank the manifest.
"""

import warnings
from collections.abc import Iterable
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

from xgram_dist.checkpoint.boxes import Box, State
from xgram_dist.checkpoint.contents import check_kind
from xgram_dist.checkpoint.files import DTYPES, NAMES, TensorFile, verify_file, write_tensors
from xgram_dist.checkpoint.manifest import Chunk, Entry, Manifest
from xgram_dist.checkpoint.raw import DamagedFileError, checksum_of
from xgram_dist.parallel.ranks import Ranks
from xgram_dist.progress import Lines


def allow_one_process() -> None:
    """Before a call into torch.distributed.checkpoint: it warns of a run in one process, which is no mistake. A filter
    is set each time, as `catch_warnings` is not for threads and others may have set their own since."""
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
            if path.name not in manifest.files:
                manifest.files[path.name] = path.stat().st_size
                manifest.checksums[path.name] = checksum_of(path)
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
            entry = self.metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            assert entry.size == torch.Size(spread.shape), name
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
    """Reads what the plan asks for. A part is checked as it is read, when all of it is; else before, here or for all by
    one rank (`verify`)."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        self._files: dict[str, TensorFile] = {}
        self._verified: set[tuple[str, str]] = set()
        self.bytes_checked = self.bytes_taken = 0

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=NAMES[entry.dtype]),
                    torch.Size(entry.shape),
                    [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks],
                )
                for name, entry in self.manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def verify(self, world: Ranks, names: Iterable[str] | None = None) -> None:
        """These tensors (None: all) against their checksums, each part by one rank: no rank reads everything. All ranks
        call it, and all get the same answer."""
        first: str | None = None
        every = (chunk.file for entry in self.manifest.tensors.values() for chunk in entry.chunks)
        places = {name: place for place, name in enumerate(sorted(set(every)))}
        parts = [c for name in names or self.manifest.tensors for c in self.manifest.tensors[name].chunks]
        for number, chunk in enumerate(parts):
            if first is None and _reader_of(places[chunk.file], number, len(places), world.size) == world.rank:
                try:
                    self._verify(chunk)
                except DamagedFileError as error:
                    first = str(error)
        complaints = [one for one in world.host.gather_objects(first) if one is not None]
        if complaints:
            raise DamagedFileError(complaints[0])
        self._verified |= {(chunk.file, chunk.key) for chunk in parts}

    def chunk(self, chunk: Chunk, dtype: str) -> Tensor:
        """A saved part, verified, as a view of the file."""
        if (chunk.file, chunk.key) not in self._verified:
            self._verify(chunk)
        file = self._file(chunk)
        check_kind(file, chunk.key, dtype, chunk.sizes)
        return file.tensor(chunk.key)

    def _verify(self, chunk: Chunk) -> None:
        file = self._file(chunk)
        file.verify(chunk.key, chunk.checksum)
        self._note(chunk)

    def _note(self, chunk: Chunk) -> None:
        entry = self._file(chunk).entry(chunk.key)
        self.bytes_checked += entry.end - entry.begin
        self._verified.add((chunk.file, chunk.key))

    def read_into(self, chunk: Chunk, dtype: str, target: Tensor) -> None:
        """All of a saved part, in one pass with its verification."""
        if (chunk.file, chunk.key) in self._verified:
            target.copy_(self.chunk(chunk, dtype))
            return
        file = self._file(chunk)
        check_kind(file, chunk.key, dtype, chunk.sizes)
        file.read_into(chunk.key, target, chunk.checksum)
        self._note(chunk)

    def forget(self, chunk: Chunk) -> None:
        """What was read of a part through its view need not stay in memory."""
        self._file(chunk).forget()

    def _file(self, chunk: Chunk) -> TensorFile:
        if chunk.file not in self._files:
            self._files[chunk.file] = TensorFile(self.folder / chunk.file)
        return self._files[chunk.file]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            offsets = list(item.storage_index.offset or ())
            entry = self.manifest.tensors[item.storage_index.fqn]
            chunk = next(chunk for chunk in entry.chunks if chunk.offsets == offsets)
            target = planner.resolve_tensor(item)
            if list(item.lengths) == chunk.sizes:
                self.read_into(chunk, entry.dtype, target)
            else:
                target.copy_(_narrow(self.chunk(chunk, entry.dtype), item.storage_offsets, item.lengths))
                self.forget(chunk)
            self.bytes_taken += target.nbytes
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _reader_of(file: int, part: int, files: int, ranks: int) -> int:
    """The rank that verifies a part: on the layout that was saved, the one that has it; else in turn."""
    if ranks <= files:
        return file % ranks
    return file + files * (part % -(-(ranks - file) // files))


def _narrow(tensor: Tensor, offsets: Any, lengths: Any) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor
