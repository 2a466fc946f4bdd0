"""The last step of `prepare`: finished units to a data set.

In: the units' folders. Out: `OUT/{train,validation}/<source>/` with shards and one `index.json`, `counts.npz`, the
tokenizer, and last of all `dataset.json`. The units' shards are linked under new names; the tokens that did not
fill a chunk are joined in the units' order into further chunks, so that at most one partial chunk a source and
split is dropped. Until `dataset.json` stands the units keep their files: a merge that is cut off starts again.
"""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.data.manifest import MANIFEST, SPLITS, Manifest, SourceInfo, SplitInfo, shards_digest, write_atomically
from xgram_dist.data.tokenizer import Tokenizer
from xgram_dist.data.units import COMPRESSION, ChunkWriter, Settings, Unit, sync_tree, unit_folder
from xgram_dist.errors import UserError


def merge_units(
    out: Path,
    units: list[Unit],
    settings: Settings,
    tokenizer: Tokenizer,
    staging: Path,
    weights: dict[str, float | None],
    key: str,
) -> tuple[Manifest, int]:
    """The manifest of the data set that now stands in `out`, and the number of tokens that filled no chunk."""
    final = staging / "final"
    shutil.rmtree(final, ignore_errors=True)
    counts = np.zeros(settings.vocabulary, dtype=np.int64)
    sources = []
    dropped = 0
    for name, weight in weights.items():
        folders = [unit_folder(staging, unit) for unit in units if unit.source == name]
        records = [json.loads((folder / "done.json").read_bytes()) for folder in folders]
        splits = {}
        for split in SPLITS:
            splits[split], rest_counts, left = _merge_split(final, name, split, folders, records, settings)
            dropped += left
            if split == "train":
                counts += rest_counts
        for folder in folders:
            with np.load(folder / "counts.npz", allow_pickle=False) as stored:
                counts += stored["counts"]
        rejected: Counter[str] = Counter()
        for record in records:
            rejected.update(record["rejected"])
        sources.append(
            SourceInfo(
                name=name,
                weight=weight,
                documents=sum(info.documents for info in splits.values()),
                bytes=sum(record["text_bytes"] for record in records),
                rejected=dict(sorted(rejected.items())),
                train=splits["train"],
                validation=splits["validation"],
            )
        )
    if not any(source.train.chunks for source in sources):
        raise UserError(
            f"the documents hold fewer tokens than one chunk of {settings.chunk_tokens:,}; lower --chunk-tokens"
        )
    np.savez_compressed(final / "counts.npz", counts=counts)
    shutil.copyfile(tokenizer.path, final / tokenizer.file_name)
    manifest = Manifest(
        vocabulary=settings.vocabulary,
        chunk_tokens=settings.chunk_tokens,
        dtype=settings.dtype,
        end_of_text=settings.end_of_text,
        end_of_text_name=tokenizer.end_of_text_name,
        tokenizer_file=tokenizer.file_name,
        tokenizer_sha256=tokenizer.sha256,
        request=key,
        sources=tuple(sources),
    )
    _put_in_place(final, out, manifest)
    return manifest, dropped


def _merge_split(
    final: Path, name: str, split: str, folders: list[Path], records: list[dict[str, Any]], settings: Settings
) -> tuple[SplitInfo, NDArray[Any], int]:
    target = final / split / name
    target.mkdir(parents=True)
    shards: list[dict[str, Any]] = []

    def take(folder: Path, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            raw = f"shard.{len(shards):06d}.mds"
            entry = {**entry, "raw_data": {**entry["raw_data"], "basename": raw}}
            old, new = entry["zip_data"]["basename"], f"{raw}.{COMPRESSION}"
            entry["zip_data"] = {**entry["zip_data"], "basename": new}
            _link(folder / old, target / new)
            shards.append(entry)

    rest_writer = ChunkWriter(final / "rest", settings)
    for folder, record in zip(folders, records, strict=True):
        take(folder / split, record[split]["shards"])
        rest_writer.add(np.load(folder / f"{split}.rest.npy", allow_pickle=False))
    entries, dropped = rest_writer.finish()
    take(final / "rest", entries)
    shutil.rmtree(final / "rest")
    write_atomically(target / "index.json", json.dumps({"version": 2, "shards": shards}, sort_keys=True).encode())
    chunks = sum(int(shard["samples"]) for shard in shards)
    documents = sum(record[split]["documents"] for record in records)
    info = SplitInfo(documents, chunks, chunks * settings.chunk_tokens, shards_digest(shards))
    return info, rest_writer.counts, len(dropped)


def _link(old: Path, new: Path) -> None:
    """The unit keeps its file until the data set stands: a merge that is cut off starts again from whole units."""
    try:
        os.link(old, new)
    except OSError:
        shutil.copyfile(old, new)


def _put_in_place(final: Path, out: Path, manifest: Manifest) -> None:
    sync_tree(final)
    (out / MANIFEST).unlink(missing_ok=True)  # from here until the last line `out` is not a data set
    for stale in [*SPLITS, "tokenizer.json", "tokenizer.model", "counts.npz"]:
        path = out / stale
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for item in sorted(final.iterdir()):
        os.rename(item, out / item.name)
    manifest.write(out)
