"""What a checkpoint holds, read without the code that wrote it: tensors whole, tables in the order of global rows.

    python tests/golden/digest.py CHECKPOINT     a line for each tensor, to compare two checkpoints with diff

Only for checkpoints of version 1 is the package asked for anything: which rows stand where.
"""

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "u1",
}
"""Types of safetensors files, read as bits where numpy has no such type."""
BACKBONE, MOMENTS = "backbone weights", "backbone moments"
TABLES, PER_ROW, SMALL = "table rows and gates", "table optimizer state by row", "small tensors"
CATEGORIES = (BACKBONE, MOMENTS, TABLES, PER_ROW, SMALL)
ROW_KEYS = ("last", "current", "hit")
"""Ends of the names that have a number for each row of a view."""

Tensors = dict[str, NDArray[Any]]


def global_rows(manifest: dict[str, Any], folder: Path, row_ids: str, num_rows: int) -> NDArray[Any]:
    """The global row at each position of the tensors of a row-id set, for tables of `num_rows` rows."""
    if manifest["version"] == 1:
        return _rows_by_policy(manifest["run"], folder, num_rows)
    ids: list[NDArray[Any]] = []
    for segment in manifest["row_ids"][row_ids]["segments"]:
        if segment["tensor"] is not None:
            (chunk,) = manifest["tensors"][segment["tensor"]]["chunks"]
            ids.append(read_safetensors(folder / chunk["file"])[chunk["key"]].astype(np.int64))
        else:
            ids += [np.arange(start, stop, step) for start, stop, step in segment["ranges"]]
    return np.concatenate(ids)


def _rows_by_policy(facts: dict[str, Any], folder: Path, num_rows: int) -> NDArray[Any]:
    """Version 1 names the policy that placed the rows; there is no other record of it."""
    from xgram_dist.tables.routing_io import load_routing
    from xgram_dist.tables.row_sharding import plan_row_sharding

    routing = None if facts["routing"] is None else load_routing(folder / "routing.npz")
    owner = plan_row_sharding(routing, num_rows, facts["data_ranks"], facts["placement"]).owner
    return np.argsort(owner, kind="stable")


def canonical(name: str) -> str:
    return name.replace("tables.slab-", "tables.view-", 1) if name.startswith("tables.slab-") else name


def category(name: str) -> str:
    """Of a canonical name."""
    if name.startswith("backbone."):
        return MOMENTS if name.endswith((".first_moment", ".second_moment")) else BACKBONE
    if name.startswith("tables.view-"):
        return PER_ROW if name.rsplit(".", 1)[1] in ROW_KEYS else SMALL
    if name.startswith("tables."):
        return TABLES if name.endswith((".rows", ".gates")) else PER_ROW
    return SMALL


def read_checkpoint(folder: Path) -> Tensors:
    """All tensors but random generators and row ids, whole, by canonical name; rows in global order."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    files: dict[str, Tensors] = {}
    orders: dict[tuple[str, int], NDArray[Any]] = {}
    found: Tensors = {}
    for saved, entry in sorted(manifest["tensors"].items()):
        if saved.startswith(("rng.", "row_ids.")):
            continue
        name = canonical(saved)
        value = _assembled(folder, entry, files)
        if category(name) in (TABLES, PER_ROW):
            row_ids, rows = entry.get("row_ids", "tables"), len(value)
            order = orders.get((row_ids, rows))
            if order is None:
                order = orders[row_ids, rows] = global_rows(manifest, folder, row_ids, rows)
                assert np.array_equal(np.sort(order), np.arange(rows)), f"rows of {folder} are not each there once"
            ordered = np.empty_like(value)
            ordered[order] = value
            value = ordered
        assert name not in found, name
        found[name] = value
    return found


def _assembled(folder: Path, entry: dict[str, Any], files: dict[str, Tensors]) -> NDArray[Any]:
    """A tensor from its parts; `files` holds those that have been read."""
    value = np.zeros(entry["shape"], dtype=NUMPY[entry["dtype"]])
    filled = np.zeros(entry["shape"], dtype=bool)
    for chunk in entry["chunks"]:
        if chunk["file"] not in files:
            files[chunk["file"]] = read_safetensors(folder / chunk["file"])
        part = files[chunk["file"]][chunk["key"]]
        box = tuple(slice(o, o + s) for o, s in zip(chunk["offsets"], chunk["sizes"], strict=True))
        assert part.dtype == value.dtype, (part.dtype, value.dtype)
        value[box] = part.reshape(chunk["sizes"])
        filled[box] = True
    assert filled.all(), "a part is missing"
    return value


def read_safetensors(path: Path) -> Tensors:
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    found: Tensors = {}
    for key, one in json.loads(content[8:start]).items():
        if key != "__metadata__":
            begin, end = (start + offset for offset in one["data_offsets"])
            kind = np.dtype(NUMPY[one["dtype"]])
            assert end - begin == kind.itemsize * math.prod(one["shape"]), key
            found[key] = np.frombuffer(content[begin:end], dtype=kind).reshape(one["shape"])
    return found


def sha256_of(tensors: Tensors) -> str:
    """Of names, types, shapes and bits, in the order of the names."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        value = np.ascontiguousarray(tensors[name])
        total.update(f"{name} {value.dtype.str} {list(tensors[name].shape)}\n".encode())
        total.update(value.tobytes())
    return total.hexdigest()


def digests(folder: Path) -> dict[str, dict[str, Any]]:
    """For each category: how many tensors there are, and the sha256 of all of them."""
    found = read_checkpoint(folder)
    by_category: dict[str, Tensors] = {name: {} for name in CATEGORIES}
    for name, value in found.items():
        by_category[category(name)][name] = value
    return {name: {"tensors": len(some), "sha256": sha256_of(some)} for name, some in by_category.items()}


def main() -> int:
    for name, value in read_checkpoint(Path(sys.argv[1])).items():
        print(sha256_of({name: value})[:16], category(name), name, value.dtype.str, list(value.shape), sep="  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
