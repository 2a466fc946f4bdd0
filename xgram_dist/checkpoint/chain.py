"""Chains: a checkpoint that holds rows changed since the one before it, and that one's rows by links to its files.

    part 0    rows-00000100.rank-00000.safetensors    all rows that were touched until step 100
    part 1    rows-00000200.rank-00000.safetensors    those written between steps 100 and 200
    part 2    ..

A table tensor of a chain is its parts one after the other, so that a row may stand at several positions: the last one
counts. The files of older parts are hard links (copies where the file system has none): each folder is complete in
itself, deleting an older checkpoint frees only what no newer one needs, and copying a folder copies all of it. When a
chain gets long, the next save writes all rows again.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from xgram_dist.checkpoint.inspect import find_damage
from xgram_dist.checkpoint.manifest import CHAIN_VERSION, FILE, Chunk, Entry, Manifest
from xgram_dist.checkpoint.row_ids import RowIdSet
from xgram_dist.checkpoint.safetensors_io import DamagedFileError
from xgram_dist.errors import UserError

BLOCK_BYTES = 4 << 20

MAX_PARTS = 32
MAX_GROWTH = 2.0
"""A chain may hold this many times the rows that exist."""


@dataclass(frozen=True)
class Chain:
    """The checkpoints that one with changed rows would extend."""

    newest: Path
    parts: int
    rows: int
    """Of all parts and ranks."""

    def is_short(self, created: int) -> bool:
        """`created`: rows that exist, on all ranks."""
        return self.parts <= MAX_PARTS and self.rows <= MAX_GROWTH * created


def rows_file(step: int, rank: int) -> str:
    return f"rows-{step:08d}.rank-{rank:05d}.safetensors"


def touched_sets(manifest: Manifest) -> dict[str, RowIdSet]:
    """The row-id sets of touched rows, which can be chained."""
    return {name: one for name, one in manifest.row_ids.items() if one.table_rows is not None}


def extend(base: Manifest, new: Manifest) -> list[str]:
    """Put the parts of `base` before the rows of `new`. Returns the files of `base` that `new` then needs."""
    needed: set[str] = set()
    for name, rows in touched_sets(new).items():
        old = base.row_ids[name]
        parts = old.parts or [len(old.segments)]
        segments = []
        for segment in old.segments:
            if segment.tensor is not None:
                entry, tensor = base.tensors[segment.tensor], segment.tensor
                if ".part-" not in tensor:  # of the newest part of `base`
                    tensor = f"{tensor}.part-{len(parts) - 1}"
                new.tensors[tensor], segment = entry, replace(segment, tensor=tensor)
                needed |= {chunk.file for chunk in entry.chunks}
            segments.append(segment)
        total = old.num_rows + rows.num_rows
        new.row_ids[name] = RowIdSet(total, [*segments, *rows.segments], rows.table_rows, [*parts, len(rows.segments)])
        for tensor, entry in list(new.tensors.items()):
            if entry.row_ids == name:
                before = base.tensors[tensor]
                chunks = [*before.chunks, *(_shifted(chunk, old.num_rows) for chunk in entry.chunks if chunk.sizes[0])]
                new.tensors[tensor] = Entry(entry.dtype, [total, *entry.shape[1:]], chunks, name)
                needed |= {chunk.file for chunk in before.chunks}
    new.version = CHAIN_VERSION
    return sorted(needed)


def _shifted(chunk: Chunk, rows: int) -> Chunk:
    return replace(chunk, offsets=[chunk.offsets[0] + rows, *chunk.offsets[1:]])


def link_files(source: Path, names: list[str], target: Path) -> None:
    """Hard links, or copies where there can be none."""
    for name in names:
        try:
            os.link(source / name, target / name)
        except FileNotFoundError:
            raise
        except OSError:
            with (source / name).open("rb") as old, (target / name).open("wb") as new:
                shutil.copyfileobj(old, new, BLOCK_BYTES)
                new.flush()
                os.fsync(new.fileno())


def pack(checkpoint: Path, target: Path, progress: Callable[[int], None]) -> Manifest:
    """Copy a checkpoint with all that it needs, as files of its own, and read the copy against its checksums. The
    target is complete or not there."""
    manifest = Manifest.read(checkpoint)
    if target.exists():
        raise UserError(f"'{target}' exists; choose another --out")
    unfinished = target.with_name(f".{target.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        for name in (*manifest.files, FILE):
            with (checkpoint / name).open("rb") as source, (unfinished / name).open("wb") as copy:
                while block := source.read(BLOCK_BYTES):
                    copy.write(block)
                    progress(len(block))
                copy.flush()
                os.fsync(copy.fileno())
        damage = next(find_damage(unfinished, Manifest.read(unfinished), progress), None)
        if damage is not None:
            raise DamagedFileError(damage.replace(str(unfinished), str(checkpoint)))
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return manifest
