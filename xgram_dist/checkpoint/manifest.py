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
import re
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import crc32c

from xgram_dist import __version__
from xgram_dist.checkpoint.row_ids import RowIdSegment, RowIdSet, check_row_id_set
from xgram_dist.checkpoint.safetensors_io import ITEM_BYTES, DamagedFileError

FORMAT, VERSION, TOUCHED_VERSION, CHAIN_VERSION = "xgram-dist checkpoint", 2, 3, 4
READABLE_VERSIONS = (1, 2, 3, 4)
FILE = "manifest.json"
TABLE_ROWS = "tables"
"""The row-id set of the tables, which share one row sharding. Where touched rows alone are saved, each view has a set
of its own: `tables.view-V`."""
FACTS = {
    "step": int,
    "updates": int,
    "skipped": int,
    "loss": float | None,
    "saved": str,
    "started_from": dict | None,
    "loader": dict,
    "tokenizer": dict,
    "ranks": int,
    "data_ranks": int,
    "tensor": int,
    "engine": str,
    "row_sharding": str | None,
    "table_optimizer": str | None,
    "routing": str | None,
    "config": str,
}
"""What a manifest must say about its run. `row_sharding` is for people: from version 2 on, loading does not use it."""
_SAFE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a tensor, and the file and key that hold it."""

    offsets: list[int]
    sizes: list[int]
    file: str
    key: str
    checksum: int


@dataclass(frozen=True)
class Entry:
    dtype: str
    shape: list[int]
    chunks: list[Chunk]
    row_ids: str | None = None
    """The row-id set that says which global rows dimension 0 holds; None: the tensor is no table tensor."""


@dataclass
class Manifest:
    run: dict[str, Any]
    tensors: dict[str, Entry] = field(default_factory=dict)
    row_ids: dict[str, RowIdSet] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
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
            if path.is_symlink():
                raise DamagedFileError(f"'{path}' is a link; a checkpoint must contain its files itself")
            tree = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise DamagedFileError(f"'{folder}' is not a checkpoint: it has no {FILE}") from None
        except OSError as error:
            raise DamagedFileError(f"cannot read '{path}': {error.strerror}") from error
        except (ValueError, RecursionError):
            raise DamagedFileError(f"'{path}' is not valid JSON") from None
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise DamagedFileError(f"'{path}' is not the manifest of a checkpoint")
        if tree.get("version") not in READABLE_VERSIONS:
            raise DamagedFileError(
                f"'{path}' has version {tree.get('version')}, this release reads versions "
                f"{' and '.join(map(str, READABLE_VERSIONS))}; use the release that wrote it "
                f"({tree.get('written_by', {})})"
            )
        try:
            if tree["checksum"] != manifest_checksum(tree):
                raise DamagedFileError(f"'{path}' is damaged: its checksum does not match")
            if tree["version"] == 1:
                _upgrade_version_1(tree)
            manifest = _parse(tree)
            manifest._check_content(path)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DamagedFileError(f"'{path}' is not a complete manifest") from None
        for name, size in manifest.files.items():
            _check_file(folder, name, size)
        return manifest

    def _check_content(self, path: Path) -> None:
        for name, entry in self.tensors.items():
            _check_entry(path, name, entry, self.files)
            if entry.row_ids is not None and self.version > 1:
                num_rows = self.row_ids[entry.row_ids].num_rows
                if entry.shape[0] != num_rows:
                    raise DamagedFileError(
                        f"'{path}': '{name}' has {entry.shape[0]:,} rows, its row ids '{entry.row_ids}' {num_rows:,}"
                    )
        for name, row_ids in self.row_ids.items():
            check_row_id_set(f"'{path}'", name, row_ids)
            for tensor in (segment.tensor for segment in row_ids.segments):
                if tensor is not None and len(self.tensors[tensor].chunks) != 1:
                    raise DamagedFileError(f"'{path}': the row ids '{tensor}' are not one chunk")
        for fact, kind in FACTS.items():
            if not isinstance(self.run[fact], kind):
                raise DamagedFileError(f"'{path}': '{fact}' has the invalid value {self.run[fact]!r}")

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


def _parse(tree: dict[str, Any]) -> Manifest:
    return Manifest(
        run=dict(tree["run"]),
        tensors={
            name: Entry(entry["dtype"], entry["shape"], [Chunk(**chunk) for chunk in entry["chunks"]], entry["row_ids"])
            for name, entry in tree["tensors"].items()
        },
        row_ids={
            name: RowIdSet(
                row_ids["num_rows"],
                [RowIdSegment(**segment) for segment in row_ids["segments"]],
                row_ids.get("table_rows"),
                row_ids.get("parts"),
            )
            for name, row_ids in tree["row_ids"].items()
        },
        files={name: int(size) for name, size in tree["files"].items()},
        checksums={name: int(checksum) for name, checksum in tree["checksums"].items()},
        written_by=dict(tree["written_by"]),
        version=tree["version"],
    )


def _upgrade_version_1(tree: dict[str, Any]) -> None:
    """Rewrite a version 1 tree in the names of version 2; it stays without row ids."""
    tree["run"]["row_sharding"] = tree["run"].pop("placement")
    tree["row_ids"] = {}
    tensors = {}
    for name, entry in tree["tensors"].items():
        if name.startswith("tables.slab-"):
            name = name.replace("tables.slab-", "tables.view-", 1)
            by_row = name.endswith((".hit", ".last", ".current"))
        else:
            by_row = name.startswith("tables.")
        tensors[name] = {**entry, "row_ids": TABLE_ROWS if by_row else None}
    tree["tensors"] = tensors


def _check_entry(path: Path, name: str, entry: Entry, files: dict[str, int]) -> None:
    if entry.dtype not in ITEM_BYTES:
        raise DamagedFileError(f"'{path}': '{name}' has the unknown dtype '{entry.dtype}'")
    for chunk in entry.chunks:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(entry.shape) and all(
            o >= 0 and s >= 0 and o + s <= whole
            for o, s, whole in zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)
        )
        if not inside:
            raise DamagedFileError(f"'{path}': a chunk of '{name}' is outside its shape")
        if chunk.file not in files:
            raise DamagedFileError(f"'{path}': a chunk of '{name}' is in '{chunk.file}', which is not listed")


def _check_file(folder: Path, name: str, size: int) -> None:
    if not _SAFE_NAME.match(name):
        raise DamagedFileError(f"'{folder / FILE}' names a file '{name}' outside its folder")
    path = folder / name
    if path.is_symlink():
        raise DamagedFileError(f"'{path}' is a link; a checkpoint must contain its files itself")
    if not path.is_file():
        raise DamagedFileError(f"'{path}' is missing")
    if path.stat().st_size != size:
        raise DamagedFileError(f"'{path}' has {path.stat().st_size:,} bytes, not {size:,}: it was truncated or changed")
