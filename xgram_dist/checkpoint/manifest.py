"""The manifest: what a checkpoint holds, in JSON. A folder without one is not a checkpoint."""

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
from xgram_dist.checkpoint.raw import ITEM_BYTES, DamagedFileError

FORMAT, VERSION = "xgram-dist checkpoint", 1
FILE = "manifest.json"
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
    "placement": str,
    "table_optimizer": str | None,
    "routing": str | None,
    "config": str,
}
"""What a manifest says of its run."""
_SAFE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where it is."""

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


@dataclass
class Manifest:
    run: dict[str, Any]
    """Step, data position, layout, hashes: plain values."""
    tensors: dict[str, Entry] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    """Bytes of each file."""
    checksums: dict[str, int] = field(default_factory=dict)
    """Of the files that hold no tensors; those of tensors stand with their parts."""
    written_by: dict[str, str] = field(default_factory=lambda: {"xgram-dist": __version__, "torch": version("torch")})

    def write(self, folder: Path) -> None:
        tree = {"format": FORMAT, "version": VERSION, **asdict(self)}
        tree["checksum"] = seal(tree)
        with (folder / FILE).open("w", encoding="utf-8") as file:
            json.dump(tree, file)
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def read(folder: Path) -> "Manifest":
        """Checked: the right kind and version, and no name that leads out of the folder."""
        path = folder / FILE
        try:
            if path.is_symlink():
                raise DamagedFileError(f"'{path}' is a link; a checkpoint holds its files itself")
            tree = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise DamagedFileError(f"'{folder}' is not a checkpoint: it has no {FILE}") from None
        except OSError as error:
            raise DamagedFileError(f"cannot read '{path}': {error.strerror}") from error
        except (ValueError, RecursionError):
            raise DamagedFileError(f"'{path}' is not valid JSON") from None
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise DamagedFileError(f"'{path}' is not the manifest of a checkpoint")
        if tree.get("version") != VERSION:
            raise DamagedFileError(
                f"'{path}' has version {tree.get('version')}, this program reads version {VERSION}; use the release "
                f"that wrote it ({tree.get('written_by', {})})"
            )
        try:
            made = Manifest(
                run=dict(tree["run"]),
                tensors={
                    name: Entry(one["dtype"], one["shape"], [Chunk(**chunk) for chunk in one["chunks"]])
                    for name, one in tree["tensors"].items()
                },
                files={name: int(size) for name, size in tree["files"].items()},
                checksums={name: int(total) for name, total in tree["checksums"].items()},
                written_by=dict(tree["written_by"]),
            )
            if tree["checksum"] != seal(tree):
                raise DamagedFileError(f"'{path}' is damaged: its checksum does not match")
            for name, entry in made.tensors.items():
                _check_entry(path, name, entry, made.files)
            for fact, kind in FACTS.items():
                if not isinstance(made.run[fact], kind):
                    raise DamagedFileError(f"'{path}': '{fact}' is {made.run[fact]!r}, which it cannot be")
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DamagedFileError(f"'{path}' is not a complete manifest") from None
        for name, size in made.files.items():
            made._check_file(folder, name, size)
        return made

    @staticmethod
    def _check_file(folder: Path, name: str, size: int) -> None:
        if not _SAFE_NAME.match(name):
            raise DamagedFileError(f"'{folder / FILE}' names a file '{name}' outside its folder")
        path = folder / name
        if path.is_symlink():
            raise DamagedFileError(f"'{path}' is a link; a checkpoint holds its files itself")
        if not path.is_file():
            raise DamagedFileError(f"'{path}' is missing")
        if path.stat().st_size != size:
            raise DamagedFileError(
                f"'{path}' has {path.stat().st_size:,} bytes, not {size:,}: it was cut off or changed"
            )

    def bytes_of(self, name: str) -> int:
        entry = self.tensors[name]
        return math.prod(entry.shape) * ITEM_BYTES[entry.dtype]


def seal(tree: dict[str, Any]) -> int:
    """The checksum of a manifest's content."""
    text = json.dumps({key: value for key, value in tree.items() if key != "checksum"}, sort_keys=True)
    return int(crc32c.crc32c(text.encode()))


def _check_entry(path: Path, name: str, entry: Entry, files: dict[str, int]) -> None:
    if entry.dtype not in ITEM_BYTES:
        raise DamagedFileError(f"'{path}': '{name}' has type '{entry.dtype}', which is not known")
    for chunk in entry.chunks:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(entry.shape) and all(
            o >= 0 and s >= 0 and o + s <= whole
            for o, s, whole in zip(chunk.offsets, chunk.sizes, entry.shape, strict=True)
        )
        if not inside or chunk.file not in files:
            raise DamagedFileError(f"'{path}': a part of '{name}' does not fit into it")
