"""The last stage of `prepare`: merge finished work units into a data set.

In: the folders of the units. Out: `OUT/{train,validation}/<source>/` with shards and one `index.json`, `counts.npz`,
the tokenizer, and last of all `dataset.json`. The units' shards are hard-linked under new names. The remainders, tokens
that did not fill a chunk, are joined in the order of the units and written as further chunks, so that at most one
partial chunk per source and split is dropped. The units keep their files until `dataset.json` is written: an
interrupted merge starts again.
"""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.data.manifest import MANIFEST, SPLITS, Manifest, SourceInfo, SplitInfo, shards_digest
from xgram_dist.data.shards import COMPRESSION, ChunkWriter, Settings, WorkUnit, sync_tree, unit_folder
from xgram_dist.data.tokenizer import Tokenizer
from xgram_dist.errors import UserError
from xgram_dist.files import write_atomically


def merge_units(
    out: Path,
    units: list[WorkUnit],
    settings: Settings,
    tokenizer: Tokenizer,
    staging: Path,
    weights: dict[str, float | None],
    key: str,
) -> tuple[Manifest, int]:
    """Write the data set to `out`; its manifest, and the number of dropped tokens."""
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
            splits[split], remainder_counts, num_dropped = _merge_split(final, name, split, folders, records, settings)
            dropped += num_dropped
            if split == "train":
                counts += remainder_counts
        for folder in folders:
            with np.load(folder / "counts.npz", allow_pickle=False) as archive:
                counts += archive["counts"]
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
        sequence_length=settings.sequence_length,
        dtype=settings.dtype,
        end_of_text=settings.end_of_text,
        end_of_text_name=tokenizer.end_of_text_name,
        tokenizer_file=tokenizer.file_name,
        tokenizer_sha256=tokenizer.sha256,
        request=key,
        sources=tuple(sources),
    )
    _publish(final, out, manifest)
    return manifest, dropped


def _merge_split(
    final: Path, name: str, split: str, folders: list[Path], records: list[dict[str, Any]], settings: Settings
) -> tuple[SplitInfo, NDArray[Any], int]:
    """Merge one source and split; also the counts of the chunks made of remainders, and the dropped tokens."""
    target = final / split / name
    target.mkdir(parents=True)
    shards: list[dict[str, Any]] = []

    def add_shards(folder: Path, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            raw = f"shard.{len(shards):06d}.mds"
            entry = {**entry, "raw_data": {**entry["raw_data"], "basename": raw}}
            old, new = entry["zip_data"]["basename"], f"{raw}.{COMPRESSION}"
            entry["zip_data"] = {**entry["zip_data"], "basename": new}
            _link(folder / old, target / new)
            shards.append(entry)

    remainders = ChunkWriter(final / "rest", settings)
    for folder, record in zip(folders, records, strict=True):
        add_shards(folder / split, record[split]["shards"])
        remainders.add(np.load(folder / f"{split}.rest.npy", allow_pickle=False))
    entries, dropped = remainders.finish()
    add_shards(final / "rest", entries)
    shutil.rmtree(final / "rest")
    write_atomically(target / "index.json", json.dumps({"version": 2, "shards": shards}, sort_keys=True))
    chunks = sum(int(shard["samples"]) for shard in shards)
    documents = sum(record[split]["documents"] for record in records)
    padding = sum(record[split].get("padding", 0) for record in records) + remainders.padding
    num_dropped = sum(record[split].get("dropped", 0) for record in records) + len(dropped)
    info = SplitInfo(documents, chunks, chunks * settings.chunk_tokens, shards_digest(shards), padding)
    return info, remainders.counts, num_dropped


def _link(old: Path, new: Path) -> None:
    """A hard link, or a copy on file systems without them. The unit keeps its file, so that a merge can be repeated."""
    try:
        os.link(old, new)
    except OSError:
        shutil.copyfile(old, new)


def _publish(final: Path, out: Path, manifest: Manifest) -> None:
    """Move the merged files from `final` to `out`, in place of an earlier data set."""
    sync_tree(final)
    (out / MANIFEST).unlink(missing_ok=True)  # until the manifest is written again, `out` is not a data set
    for stale in [*SPLITS, "tokenizer.json", "tokenizer.model", "counts.npz"]:
        path = out / stale
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for item in sorted(final.iterdir()):
        os.rename(item, out / item.name)
    manifest.write(out)
