"""The manifest of a checkpoint: what it holds and in which files, as JSON. A folder without one is no checkpoint.

    run         step, data position, layout, recipe, hashes: plain values (FACTS)
    tensors     for each tensor its dtype, global shape and saved chunks, and for table tensors the row-id set
    row_ids     which global row stands where in the table tensors (row_ids.py)
    files       bytes of each file; checksums of the files that hold no tensors (those of tensors are in their chunks)

A checkpoint of touched rows alone has version 3: an older release would miss the others. A chain (chain.py) has
version 4. Version 1 has no row ids: it
names the row-sharding policy, and the policy is run again to find where rows stand (reader.py). Its per-view tensors
are named `tables.slab-N`, which are read as `tables.view-N`. No torch.
"""

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NotRequired

import crc32c
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from xgram_dist import __version__
from xgram_dist.checkpoint.row_ids import Count, RowIdSet, check_row_id_set
from xgram_dist.checkpoint.safetensors_io import ITEM_BYTES, DamagedFileError
from xgram_dist.untrusted import check_name, read_json, shown

FORMAT, VERSION, TOUCHED_VERSION, CHAIN_VERSION = "xgram-dist checkpoint", 2, 3, 4
READABLE_VERSIONS = (1, 2, 3, 4)
FILE = "manifest.json"
TABLE_ROWS = "tables"
"""The row-id set of the tables, which share one row sharding. Where touched rows alone are saved, each view has a set
of its own: `tables.view-V`."""
MAX_RANKS = 65_536
MAX_STEP = 10**12
MAX_DEPTH = 16
_FIELDS = {"run", "tensors", "row_ids", "files", "checksums", "written_by", "version"}
_Ranks = Annotated[int, Field(strict=True, ge=1, le=MAX_RANKS)]
_Step = Annotated[int, Field(strict=True, ge=0, le=MAX_STEP)]
_Checksum = Annotated[int, Field(strict=True, ge=0, lt=2**32)]


class LoaderFacts(TypedDict):
    """Where the data loader stood; the loader checks the rest itself."""

    position: _Step
    fingerprint: str


class StartedFrom(TypedDict):
    checkpoint: str
    name: str
    step: _Step
    weights_only: Annotated[bool, Field(strict=True)]


class Facts(TypedDict):
    """What a manifest must say about its run; it may say more. `row_sharding` is for people: from version 2 on, loading
    does not use it."""

    step: _Step
    updates: _Step
    skipped: _Step
    loss: Annotated[float, Field(strict=True, allow_inf_nan=False)] | None
    saved: str
    started_from: StartedFrom | None
    loader: LoaderFacts
    tokenizer: dict[str, str | None]
    ranks: _Ranks
    data_ranks: _Ranks
    tensor: _Ranks
    engine: str
    row_sharding: str | None
    table_optimizer: str | None
    routing: str | None
    config: str
    run_id: NotRequired[str | None]


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a tensor, and the file and key that hold it."""

    offsets: list[Count]
    sizes: list[Count]
    file: str
    key: str
    checksum: _Checksum


@dataclass(frozen=True)
class Entry:
    dtype: str
    shape: list[Count]
    chunks: list[Chunk]
    row_ids: str | None = None
    """The row-id set that says which global rows dimension 0 holds; None: the tensor is no table tensor."""


@dataclass
class Manifest:
    run: dict[str, Any]
    tensors: dict[str, Entry] = field(default_factory=dict)
    row_ids: dict[str, RowIdSet] = field(default_factory=dict)
    files: dict[str, Count] = field(default_factory=dict)
    checksums: dict[str, _Checksum] = field(default_factory=dict)
    written_by: dict[str, str] = field(default_factory=lambda: {"xgram-dist": __version__, "torch": version("torch")})
    version: int = VERSION

    def write(self, folder: Path) -> None:
        tree = {"format": FORMAT, **asdict(self)}
        tree["checksum"] = manifest_checksum(tree)
        with (folder / FILE).open("w", encoding="utf-8") as file:
            json.dump(tree, file)
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """Parse and check a manifest: format, version, checksum, facts, and that every file is there in its size."""
        path = folder / FILE
        try:
            tree = read_json(path, depth=MAX_DEPTH, error=DamagedFileError)
        except FileNotFoundError:
            raise DamagedFileError(f"'{folder}' is not a checkpoint: it has no {FILE}") from None
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise DamagedFileError(f"'{path}' is not the manifest of a checkpoint")
        if type(tree.get("version")) is not int or tree["version"] not in READABLE_VERSIONS:
            raise DamagedFileError(
                f"'{path}' has version {shown(tree.get('version'))}, this release reads versions "
                f"{' and '.join(map(str, READABLE_VERSIONS))}; use the release that wrote it "
                f"({shown(str(tree.get('written_by')))})"
            )
        if tree.get("checksum") != manifest_checksum(tree):
            raise DamagedFileError(f"'{path}' is damaged: its checksum does not match")
        if tree["version"] == 1:
            _upgrade_version_1(path, tree)
        manifest = _parse(path, tree)
        manifest._check_content(path)
        for name, size in manifest.files.items():
            _check_file(folder, name, size)
        return manifest

    def _check_content(self, path: Path) -> None:
        for name in (*self.files, *self.checksums):
            check_name(path, name, DamagedFileError)
            if name not in self.files:
                raise DamagedFileError(f"'{path}': '{name}' has a checksum, but is not one of its files")
        for name, entry in self.tensors.items():
            _check_entry(path, name, entry, self.files)
            if entry.row_ids is not None and self.version > 1:
                if entry.row_ids not in self.row_ids:
                    raise DamagedFileError(f"'{path}': '{name}' names row ids '{entry.row_ids}', which are missing")
                num_rows = self.row_ids[entry.row_ids].num_rows
                if entry.shape[:1] != [num_rows]:
                    raise DamagedFileError(
                        f"'{path}': '{name}' has {entry.shape[0] if entry.shape else 1:,} rows, its row ids "
                        f"'{entry.row_ids}' {num_rows:,}"
                    )
        saved_bytes = sum(self.files.values())
        for name, row_ids in self.row_ids.items():
            check_row_id_set(f"'{path}'", name, row_ids)
            if row_ids.num_rows > saved_bytes:
                raise DamagedFileError(f"'{path}': the row ids '{name}' are more than its files can hold")
            for tensor in (segment.tensor for segment in row_ids.segments):
                if tensor is not None and (tensor not in self.tensors or len(self.tensors[tensor].chunks) != 1):
                    raise DamagedFileError(f"'{path}': the row ids '{tensor}' are not one chunk")

    def table_shape(self, name: str) -> list[int]:
        """The shape of a tensor; of a table tensor with all rows, whether they are saved or not."""
        entry = self.tensors[name]
        row_ids = None if entry.row_ids is None else self.row_ids.get(entry.row_ids)
        return entry.shape if row_ids is None else [row_ids.limit, *entry.shape[1:]]

    def nbytes(self, name: str) -> int:
        """Bytes of a whole tensor, as it is saved."""
        entry = self.tensors[name]
        return math.prod(entry.shape) * ITEM_BYTES[entry.dtype]


def manifest_checksum(tree: dict[str, Any]) -> int:
    """The checksum of a manifest's content."""
    text = json.dumps({key: value for key, value in tree.items() if key != "checksum"}, sort_keys=True)
    return int(crc32c.crc32c(text.encode()))


@cache
def _schema() -> TypeAdapter["Manifest"]:
    return TypeAdapter(Manifest)


@cache
def _facts_schema() -> TypeAdapter[Facts]:
    return TypeAdapter(Facts)


def _parse(path: Path, tree: dict[str, Any]) -> Manifest:
    """Types and ranges of every field."""
    try:
        manifest = _schema().validate_python({key: value for key, value in tree.items() if key in _FIELDS})
        _facts_schema().validate_python(manifest.run)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        if first["type"] == "missing":
            raise DamagedFileError(
                f"'{path}' is not a complete manifest: '{_place(first['loc'])}' is missing"
            ) from None
        raise DamagedFileError(
            f"'{path}': '{_place(first['loc'])}' has the invalid value {shown(first['input'])}"
        ) from None
    missing = sorted(_FIELDS - tree.keys())
    if missing:
        raise DamagedFileError(f"'{path}' is not a complete manifest: '{missing[0]}' is missing")
    return manifest


def _place(location: tuple[int | str, ...]) -> str:
    """The place of a fault, as keys and indices."""
    return ".".join(shown(part).strip("'") if isinstance(part, str) else str(part) for part in location)


def _upgrade_version_1(path: Path, tree: dict[str, Any]) -> None:
    """Rewrite a version 1 tree in the names of version 2; it stays without row ids."""
    run, tensors = tree.get("run"), tree.get("tensors")
    if not isinstance(run, dict) or "placement" not in run or not isinstance(tensors, dict):
        raise DamagedFileError(f"'{path}' is not a complete manifest: 'run.placement' or 'tensors' is missing")
    tree["run"] = {**run, "row_sharding": run["placement"]}
    tree["row_ids"] = {}
    renamed = {}
    for name, entry in tensors.items():
        if name.startswith("tables.slab-"):
            name = name.replace("tables.slab-", "tables.view-", 1)
            by_row = name.endswith((".hit", ".last", ".current"))
        else:
            by_row = name.startswith("tables.")
        row_ids = TABLE_ROWS if by_row else None
        renamed[name] = {**entry, "row_ids": row_ids} if isinstance(entry, Mapping) else entry
    tree["tensors"] = renamed


def _check_entry(path: Path, name: str, entry: Entry, files: dict[str, int]) -> None:
    """That a tensor is covered by chunks which its files have room for: so nothing larger is allocated to read it."""
    if entry.dtype not in ITEM_BYTES:
        raise DamagedFileError(f"'{path}': '{name}' has the unknown dtype {shown(entry.dtype)}")
    covered = 0
    for chunk in entry.chunks:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(entry.shape) and all(
            o + s <= whole for o, s, whole in zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)
        )
        if not inside:
            raise DamagedFileError(f"'{path}': a chunk of '{name}' is outside its shape")
        if chunk.file not in files:
            raise DamagedFileError(f"'{path}': a chunk of '{name}' is in {shown(chunk.file)}, which is not listed")
        size = math.prod(chunk.sizes)
        if size * ITEM_BYTES[entry.dtype] > files[chunk.file]:
            raise DamagedFileError(f"'{path}': a chunk of '{name}' is larger than its file '{chunk.file}'")
        covered += size
    if len({(chunk.file, chunk.key) for chunk in entry.chunks}) != len(entry.chunks):
        raise DamagedFileError(f"'{path}': '{name}' has a chunk twice")
    if covered < math.prod(entry.shape):
        raise DamagedFileError(f"'{path}' does not hold all of '{name}'")
    if entry.row_ids is not None and not entry.shape:
        raise DamagedFileError(f"'{path}': '{name}' has row ids, but no rows")


def _check_file(folder: Path, name: str, size: int) -> None:
    path = folder / name
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise DamagedFileError(f"'{path}' is missing") from None
    except OSError as error:
        raise DamagedFileError(f"cannot read '{path}': {error.strerror}") from error
    if stat.S_ISLNK(found.st_mode):
        raise DamagedFileError(f"'{path}' is a link; a checkpoint must contain its files itself")
    if not stat.S_ISREG(found.st_mode):
        raise DamagedFileError(f"'{path}' is not a regular file")
    if found.st_size != size:
        raise DamagedFileError(f"'{path}' has {found.st_size:,} bytes, not {size:,}: it was truncated or changed")
