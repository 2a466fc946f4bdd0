"""Work units of `prepare`: a group of files, or a part of one large file, to MDS shards.

In: files and settings. Out: a folder per unit with the shards of both splits, the remainder of each (tokens that did
not fill a chunk), the token counts and `done.json` with the statistics. The result of a unit is a function of its files
and the settings alone; it does not depend on workers or restarts. Its folder is named by a digest of both, and is
written to a temporary folder, synced and renamed: a folder that exists is finished and valid.
"""

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from xgram_dist.data.documents import Document, Rejection, estimated_text_bytes, read_documents
from xgram_dist.data.manifest import SPLITS, digest
from xgram_dist.data.packing import DocumentPacker, count_padding
from xgram_dist.data.streaming_import import streaming
from xgram_dist.data.tokenizer import Tokenizer

HASH = "xxh128"
COMPRESSION = "zstd"
SHARD_BYTES = 1 << 26
KEPT_REJECTIONS = 10  # first rejections of a unit that are kept with their file and line
_MAX_PARTS = 16
_BATCH_CHARACTERS = 1 << 20
_REPORT_SECONDS = 0.25


@dataclass(frozen=True)
class Settings:
    """What the output depends on, beside the documents."""

    tokenizer_sha256: str
    end_of_text: int
    vocabulary: int
    chunk_tokens: int
    validation: float  # share of documents
    sequence_length: int | None = None  # pack whole documents into sequences; None: join them and cut anywhere

    @property
    def identity(self) -> dict[str, Any]:
        """For digests: the same for settings that give the same output, also of earlier versions."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocabulary <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class WorkUnit:
    source: str
    files: tuple[str, ...]
    part: int
    parts: int
    input_bytes: float  # size of the files divided by `parts`
    key: str  # digest of the files and the settings; names the folder


@dataclass
class Report:
    """Progress of a worker: amounts since its last report."""

    input_bytes: float = 0.0
    tokens: int = 0
    documents: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    first_rejections: list[str] = field(default_factory=list)


def plan_units(source: str, files: list[tuple[Path, str]], settings: Settings, unit_bytes: int) -> list[WorkUnit]:
    """The units of one source, in order. `files`: paths, each with a stamp that changes when its content does."""
    units: list[WorkUnit] = []
    group: list[tuple[Path, str]] = []
    group_bytes = 0

    def close_group() -> None:
        nonlocal group, group_bytes
        if group:
            units.append(_unit(source, group, 0, 1, settings))
        group, group_bytes = [], 0

    for path, stamp in files:
        text_bytes = estimated_text_bytes(path)
        if text_bytes > 2 * unit_bytes:
            close_group()
            parts = min(_MAX_PARTS, -(-text_bytes // unit_bytes))
            units += [_unit(source, [(path, stamp)], part, parts, settings) for part in range(parts)]
            continue
        if group_bytes + text_bytes > unit_bytes:
            close_group()
        group.append((path, stamp))
        group_bytes += text_bytes
    close_group()
    return units


def _unit(source: str, files: list[tuple[Path, str]], part: int, parts: int, settings: Settings) -> WorkUnit:
    identity = [source, [[str(path), stamp] for path, stamp in files], part, parts, settings.identity, SHARD_BYTES]
    size = sum(path.stat().st_size for path, _ in files)
    return WorkUnit(source, tuple(str(path) for path, _ in files), part, parts, size / parts, digest(identity)[:24])


class ChunkWriter:
    """Cuts a stream of tokens into chunks, writes them as MDS shards, and counts the tokens of the chunks."""

    def __init__(self, folder: Path, settings: Settings):
        self._settings = settings
        self._writer = streaming().MDSWriter(
            columns={"tokens": f"ndarray:{settings.dtype}:{settings.chunk_tokens}"},
            out=str(folder),
            compression=COMPRESSION,
            hashes=[HASH],
            size_limit=SHARD_BYTES,
            max_workers=1,
        )
        self._pending: list[NDArray[Any]] = []
        self._pending_tokens = 0
        self.counts = np.zeros(settings.vocabulary, dtype=np.int64)
        self.chunks = 0
        self.padding = 0

    def add(self, tokens: NDArray[Any]) -> None:
        self._pending.append(tokens)
        self._pending_tokens += len(tokens)
        size = self._settings.chunk_tokens
        if self._pending_tokens < size:
            return
        joined = np.concatenate(self._pending) if len(self._pending) > 1 else tokens
        full = len(joined) // size * size
        self.counts += np.bincount(joined[:full], minlength=self._settings.vocabulary)
        if self._settings.sequence_length is not None:
            end = self._settings.end_of_text
            padding = count_padding(joined[:full], self._settings.sequence_length, end)
            self.counts[end] -= padding
            self.padding += padding
        for chunk in joined[:full].astype(self._settings.dtype).reshape(-1, size):
            self._writer.write({"tokens": chunk})
        self.chunks += full // size
        self._pending = [joined[full:].copy()]
        self._pending_tokens = len(joined) - full

    def finish(self) -> tuple[list[dict[str, Any]], NDArray[Any]]:
        """The index entries of the shards, and the remainder: tokens that did not fill a chunk."""
        self._writer.finish()
        remainder = np.concatenate(self._pending) if self._pending else np.zeros(0)
        return list(self._writer.shards), remainder.astype(self._settings.dtype)

    def cancel(self) -> None:
        self._writer.cancel_future_jobs()


def is_validation(text: bytes, share: float) -> bool:
    """By a hash of the text: copies of a document are always in the same split."""
    return int(xxhash.xxh64_intdigest(text, seed=0x5EED)) < share * 2.0**64


def unit_folder(staging: Path, unit: WorkUnit) -> Path:
    return staging / "units" / unit.key


def tokenize_unit(
    unit: WorkUnit, settings: Settings, tokenizer: Tokenizer, staging: Path, send: Callable[[Report], None]
) -> None:
    """Write the unit's folder; `send` is called with progress reports."""
    final = unit_folder(staging, unit)
    temporary = final.with_name(f"{final.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    writers = {split: ChunkWriter(temporary / split, settings) for split in SPLITS}
    try:
        task = _UnitTask(unit, settings, tokenizer, writers, send)
        task.run()
        _write_results(task, temporary)
        sync_tree(temporary)
        if final.exists():  # finished in the meantime by a worker of an earlier run
            shutil.rmtree(temporary)
        else:
            os.rename(temporary, final)
        task.report(force=True)
    except BaseException:
        for writer in writers.values():
            writer.cancel()
        shutil.rmtree(temporary, ignore_errors=True)
        raise


class _UnitTask:
    """One unit in work: reads its documents, tokenizes them in batches and sends progress reports."""

    def __init__(
        self,
        unit: WorkUnit,
        settings: Settings,
        tokenizer: Tokenizer,
        writers: dict[str, ChunkWriter],
        send: Callable[[Report], None],
    ):
        self.unit, self.settings, self.tokenizer, self.writers, self._send = unit, settings, tokenizer, writers, send
        self.total = Report()
        self.text_bytes = 0
        self.documents = Counter[str]()
        self._unreported = Report()
        self._last_report = time.monotonic()
        self._finished_bytes = 0.0  # input bytes of finished files
        self._texts: dict[str, list[str]] = {split: [] for split in SPLITS}
        self._characters = Counter[str]()
        length, end = settings.sequence_length, settings.end_of_text
        self.packers = {} if length is None else {split: DocumentPacker(length, end) for split in SPLITS}

    def run(self) -> None:
        for name in self.unit.files:
            path = Path(name)
            for item in read_documents(path, self.unit.part, self.unit.parts, self._advance):
                if isinstance(item, Document):
                    self._add(item.text)
                else:
                    self._reject(item)
            self._finished_bytes += path.stat().st_size / self.unit.parts
            self._advance(0)
        for split in SPLITS:
            self._encode(split)
        for split, packer in self.packers.items():
            self.writers[split].add(packer.flush())
        self._unreported.input_bytes = self.unit.input_bytes - self.total.input_bytes + self._unreported.input_bytes

    def _add(self, text: str) -> None:
        data = text.encode("utf-8")
        self.text_bytes += len(data)
        split = "validation" if is_validation(data, self.settings.validation) else "train"
        self.documents[split] += 1
        self._unreported.documents += 1
        self.total.documents += 1
        self._texts[split].append(text)
        self._characters[split] += len(text)
        if self._characters[split] >= _BATCH_CHARACTERS:
            self._encode(split)

    def _reject(self, rejection: Rejection) -> None:
        for report in (self._unreported, self.total):
            report.rejected[rejection.reason] += 1
        if len(self.total.first_rejections) < KEPT_REJECTIONS:
            for report in (self._unreported, self.total):
                report.first_rejections.append(str(rejection))

    def _encode(self, split: str) -> None:
        if self._texts[split]:
            tokens = self.tokenizer.encode_joined(self._texts[split])
            self.writers[split].add(self.packers[split].add(tokens) if self.packers else tokens)
            self.total.tokens += len(tokens)
            self._unreported.tokens += len(tokens)
        self._texts[split] = []
        self._characters[split] = 0
        self.report()

    def _advance(self, position: int) -> None:
        """Note that the current file is read up to byte `position`."""
        done = self._finished_bytes + position / self.unit.parts
        if done > self.total.input_bytes:
            self._unreported.input_bytes += done - self.total.input_bytes
            self.total.input_bytes = done
        self.report()

    def report(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._last_report >= _REPORT_SECONDS:
            self._send(self._unreported)
            self._unreported = Report()
            self._last_report = now


def _write_results(task: _UnitTask, folder: Path) -> None:
    splits = {}
    counts = np.zeros(0, dtype=np.int64)
    for split, writer in task.writers.items():
        shards, remainder = writer.finish()
        np.save(folder / f"{split}.rest.npy", remainder, allow_pickle=False)
        splits[split] = {
            "documents": task.documents[split],
            "chunks": writer.chunks,
            "padding": writer.padding,
            "dropped": task.packers[split].dropped if task.packers else 0,
            "shards": shards,
        }
        if split == "train":
            counts = writer.counts
    np.savez_compressed(folder / "counts.npz", counts=counts)
    record = {
        "source": task.unit.source,
        "text_bytes": task.text_bytes,
        "tokens": task.total.tokens,
        "rejected": dict(task.total.rejected),
        "first_rejections": task.total.first_rejections,
        **splits,
    }
    (folder / "done.json").write_text(json.dumps(record))


def sync_tree(folder: Path) -> None:
    """Flush all files of a folder to disk before it is renamed, so that a finished folder survives a power cut."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
