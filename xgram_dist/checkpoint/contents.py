"""What is in a checkpoint, for people: its parts with sizes, and whether every byte is as it was written. No torch."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from xgram_dist.checkpoint.manifest import Manifest
from xgram_dist.checkpoint.raw import DamagedFileError, RawFile, checksum_of

_TABLE = re.compile(r"^tables\.layers\.(?:\d+|all)\.(\w+)\.(\d+)\.(rows|gates)(\..+)?$")
_SLAB = re.compile(r"^tables\.slab-(\d+)\.")


@dataclass
class Part:
    """Tensors that belong together."""

    name: str
    tensors: int
    shape: list[int] | None
    """Of each of them; None where they differ."""
    numbers: int
    dtypes: list[str]
    bytes: int
    files: int


def part_of(name: str) -> str:
    """The part that a tensor belongs to, by its name."""
    if name.startswith("backbone."):
        return "backbone optimizer" if name.endswith("_moment") else "backbone weights"
    if match := _TABLE.match(name):
        site, view, what, state = match.groups()
        return f"tables {site}.{view} {what}{' optimizer' if state else ''}"
    if match := _SLAB.match(name):
        return f"slab {match[1]}: hits and steps of rows"
    return "random generators" if name.startswith("rng.") else "other"


def parts_of(manifest: Manifest) -> list[Part]:
    """Each kind of table once for all layers."""
    groups: dict[str, list[str]] = {}
    for name in manifest.tensors:
        groups.setdefault(part_of(name), []).append(name)
    parts = []
    for group, names in sorted(groups.items(), key=lambda item: _place(item[0])):
        entries = [manifest.tensors[name] for name in names]
        shapes = {tuple(entry.shape) for entry in entries}
        parts.append(
            Part(
                name=group,
                tensors=len(entries),
                shape=list(shapes.pop()) if len(shapes) == 1 else None,
                numbers=sum(math.prod(entry.shape) for entry in entries),
                dtypes=sorted({entry.dtype for entry in entries}),
                bytes=sum(manifest.bytes_of(name) for name in names),
                files=len({chunk.file for entry in entries for chunk in entry.chunks}),
            )
        )
    return parts


def _place(part: str) -> int:
    order = ("backbone weights", "backbone optimizer", "tables", "slab", "random", "other")
    return next(place for place, start in enumerate(order) if part.startswith(start))


def describe(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Everything there is to say, as plain values."""
    facts = manifest.run
    recipe = yaml.safe_load(facts["config"])
    memory = recipe["memory"]
    return {
        "checkpoint": str(folder),
        "name": recipe["name"],
        "step": facts["step"],
        "steps": recipe["train"]["steps"],
        "loss": facts["loss"],
        "saved": facts["saved"],
        "written_by": manifest.written_by,
        "engine": facts["engine"],
        "ranks": facts["ranks"],
        "tensor": facts["tensor"],
        "method": memory["method"],
        "compression": memory["compression"] if memory["method"] != "vanilla" else None,
        "table_optimizer": facts["table_optimizer"],
        "placement": facts["placement"],
        "routing": facts["routing"],
        "data": facts["loader"]["fingerprint"],
        "tokenizer": facts["tokenizer"].get("sha256"),
        "position": facts["loader"]["position"],
        "started_from": facts["started_from"],
        "bytes": sum(manifest.files.values()),
        "files": manifest.files,
        "parts": [asdict(part) for part in parts_of(manifest)],
        "tensors": {name: {"dtype": one.dtype, "shape": one.shape} for name, one in manifest.tensors.items()},
        "config": facts["config"],
    }


def damages(folder: Path, manifest: Manifest, read: Callable[[int], None]) -> Iterator[str]:
    """A sentence for everything that is not as it was written; reads every byte that has a checksum."""
    by_file: dict[str, list[tuple[str, int, str, list[int]]]] = {}
    for entry in manifest.tensors.values():
        for chunk in entry.chunks:
            by_file.setdefault(chunk.file, []).append((chunk.key, chunk.checksum, entry.dtype, chunk.sizes))
    for name, chunks in by_file.items():
        try:
            file = RawFile(folder / name)
        except DamagedFileError as error:
            yield str(error)
            continue
        for key, checksum, dtype, shape in chunks:
            try:
                file.verify(key, checksum, read)
                check_kind(file, key, dtype, shape)
            except DamagedFileError as error:
                yield str(error)
    for name, checksum in manifest.checksums.items():
        if checksum_of(folder / name) != checksum:
            yield f"'{folder / name}' is damaged: its checksum does not match"


def check_kind(file: RawFile, key: str, dtype: str, shape: list[int]) -> None:
    found = file.entry(key)
    if found.dtype != dtype or list(found.shape) != shape:
        raise DamagedFileError(f"'{file.path}': '{key}' is {found.dtype} {list(found.shape)}, not {dtype} {shape}")
