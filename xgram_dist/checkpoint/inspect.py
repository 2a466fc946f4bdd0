"""`xgram-dist inspect`: the contents of a checkpoint in groups with sizes, and a check of every byte. No torch."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.checkpoint.manifest import Manifest
from xgram_dist.checkpoint.row_ids import read_row_ids
from xgram_dist.checkpoint.safetensors_io import DamagedFileError, RawFile, file_checksum
from xgram_dist.config.load import parse_tree
from xgram_dist.errors import UserError

_TABLE = re.compile(r"^tables\.layers\.(?:\d+|all)\.(\w+)\.(\d+)\.(rows|gates)(\..+)?$")
_VIEW = re.compile(r"^tables\.view-(\d+)\.")
_GROUP_ORDER = ("backbone weights", "backbone optimizer", "tables", "view", "row ids", "random", "other")


@dataclass
class TensorGroup:
    """Tensors of one kind: each kind of table once for all layers."""

    name: str
    tensors: int
    shape: list[int] | None
    """Of each tensor; None where they differ."""
    numbers: int
    dtypes: list[str]
    bytes: int
    files: int


def tensor_groups(manifest: Manifest) -> list[TensorGroup]:
    names_by_group: dict[str, list[str]] = {}
    for name in manifest.tensors:
        names_by_group.setdefault(_group_name(name), []).append(name)
    groups = []
    for group, names in sorted(names_by_group.items(), key=lambda item: _group_rank(item[0])):
        entries = [manifest.tensors[name] for name in names]
        shapes = {tuple(entry.shape) for entry in entries}
        groups.append(
            TensorGroup(
                name=group,
                tensors=len(entries),
                shape=list(shapes.pop()) if len(shapes) == 1 else None,
                numbers=sum(math.prod(entry.shape) for entry in entries),
                dtypes=sorted({entry.dtype for entry in entries}),
                bytes=sum(manifest.nbytes(name) for name in names),
                files=len({chunk.file for entry in entries for chunk in entry.chunks}),
            )
        )
    return groups


def _group_name(name: str) -> str:
    if name.startswith("backbone."):
        return "backbone optimizer" if name.endswith("_moment") else "backbone weights"
    if match := _TABLE.match(name):
        site, view, kind, state = match.groups()
        return f"tables {site}.{view} {kind}{' optimizer' if state else ''}"
    if match := _VIEW.match(name):
        return f"view {match[1]}: hits, updates and steps of rows"
    if name.startswith("row_ids."):
        return "row ids"
    return "random generators" if name.startswith("rng.") else "other"


def _group_rank(group: str) -> int:
    return next(rank for rank, prefix in enumerate(_GROUP_ORDER) if group.startswith(prefix))


def describe(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """What `inspect --json` prints, as plain values."""
    facts = manifest.run
    recipe = _recipe(folder, facts["config"])
    memory = recipe["memory"]
    return {
        "checkpoint": str(folder),
        "version": manifest.version,
        "name": recipe["name"],
        "step": facts["step"],
        "steps": recipe["train"]["steps"],
        "loss": facts["loss"],
        "saved": facts["saved"],
        "written_by": manifest.written_by,
        "engine": facts["engine"],
        "ranks": facts["ranks"],
        "tensor": facts["tensor"],
        "stages": facts.get("stages", []),
        "method": memory["method"],
        "compression": memory["compression"] if memory["method"] != "vanilla" else None,
        "table_optimizer": facts["table_optimizer"],
        "row_sharding": facts["row_sharding"],
        "routing": facts["routing"],
        "data": facts["loader"]["fingerprint"],
        "tokenizer": facts["tokenizer"].get("sha256"),
        "position": facts["loader"]["position"],
        "started_from": facts["started_from"],
        "bytes": sum(manifest.files.values()),
        "files": manifest.files,
        "parts": [asdict(group) for group in tensor_groups(manifest)],
        "tensors": {name: {"dtype": entry.dtype, "shape": entry.shape} for name, entry in manifest.tensors.items()},
        "config": facts["config"],
    }


def _recipe(folder: Path, text: str) -> dict[str, Any]:
    """The recipe as it was saved, by whatever release: only what is shown must be there."""
    try:
        recipe = parse_tree(text)
        shown = recipe["name"], recipe["train"]["steps"], recipe["memory"]["method"]
        sound = isinstance(shown[0], str) and type(shown[1]) is int and isinstance(shown[2], str)
    except (UserError, KeyError, TypeError):
        sound = False
    if not sound:
        raise DamagedFileError(f"'{folder}': the recipe in its manifest cannot be read")
    return {**recipe, "memory": {"compression": None, **recipe["memory"]}}


def find_damage(folder: Path, manifest: Manifest, progress: Callable[[int], None]) -> Iterator[str]:
    """A sentence for every damage. Reads every byte that has a checksum; `progress` gets the bytes of each block."""
    by_file: dict[str, list[tuple[str, int, str, list[int]]]] = {}
    for entry in manifest.tensors.values():
        for chunk in entry.chunks:
            by_file.setdefault(chunk.file, []).append((chunk.key, chunk.checksum, entry.dtype, chunk.sizes))
    damaged = False
    for name, chunks in by_file.items():
        try:
            file = RawFile(folder / name)
        except DamagedFileError as error:
            damaged = True
            yield str(error)
            continue
        for key, checksum, dtype, shape in chunks:
            try:
                file.verify(key, checksum, progress)
                file.check_header(key, dtype, shape)
            except DamagedFileError as error:
                damaged = True
                yield str(error)
    for name, checksum in manifest.checksums.items():
        try:
            damage = file_checksum(folder / name) != checksum
        except (OSError, DamagedFileError) as error:
            yield str(error)
            continue
        if damage:
            yield f"'{folder / name}' is damaged: its checksum does not match"
    for name, row_ids in manifest.row_ids.items() if not damaged else ():  # damage of their file was reported above
        try:
            read_row_ids(f"'{folder}'", name, row_ids, lambda tensor: _integers(folder, manifest, tensor))
        except DamagedFileError as error:
            yield str(error)


def _integers(folder: Path, manifest: Manifest, name: str) -> NDArray[np.int64]:
    (chunk,) = manifest.tensors[name].chunks
    return RawFile(folder / chunk.file).integers(chunk.key, chunk.checksum)
