"""Units of work of `prepare`: a group of files, or a part of one large file, to MDS shards.

In: files and settings. Out: a folder per unit with the shards of both splits, the tokens that did not fill a chunk,
the token counts and `done.json` with the statistics. A unit is a function of its files and the settings alone:
which worker does it, how many there are, or whether it is done today or after a restart does not matter. Its folder
is named by a digest of both and appears whole (written aside, synced, renamed), so a folder that is there is
finished and still valid.
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
from xgram_dist.data.streaming_import import MDSWriter
from xgram_dist.data.tokenizer import Tokenizer

HASH = "xxh128"
COMPRESSION = "zstd"
SHARD_BYTES = 1 << 26
KEPT_REJECTIONS = 10  # the first ones of a unit are kept word for word
_MAX_PARTS = 16
_BATCH_CHARACTERS = 1 << 20
_REPORT_SECONDS = 0.25


@dataclass(frozen=True)
class Settings:
    """What, beside the documents, decides the output."""

    tokenizer_sha256: str
    end_of_text: int
    vocabulary: int
    chunk_tokens: int
    validation: float  # share of documents

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocabulary <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class Unit:
    source: str
    files: tuple[str, ...]
    part: int
    parts: int
    input_bytes: float  # of the files, divided by the parts
    key: str


@dataclass
class Report:
    """What a worker tells while it works: amounts since its last report."""

    input_bytes: float = 0.0
    tokens: int = 0
    documents: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    first_rejections: list[str] = field(default_factory=list)


def plan_units(source: str, files: list[tuple[Path, str]], settings: Settings, unit_bytes: int) -> list[Unit]:
    """Units of one source in order; `files` come with a stamp that changes when their content does."""
    units: list[Unit] = []
    group: list[tuple[Path, str]] = []
    group_bytes = 0

    def close() -> None:
        nonlocal group, group_bytes
        if group:
            units.append(_unit(source, group, 0, 1, settings))
        group, group_bytes = [], 0

    for path, stamp in files:
        text_bytes = estimated_text_bytes(path)
        if text_bytes > 2 * unit_bytes:
            close()
            parts = min(_MAX_PARTS, -(-text_bytes // unit_bytes))
            units += [_unit(source, [(path, stamp)], part, parts, settings) for part in range(parts)]
            continue
        if group_bytes + text_bytes > unit_bytes:
            close()
        group.append((path, stamp))
        group_bytes += text_bytes
    close()
    return units


def _unit(source: str, files: list[tuple[Path, str]], part: int, parts: int, settings: Settings) -> Unit:
    identity = [source, [[str(path), stamp] for path, stamp in files], part, parts, asdict(settings), SHARD_BYTES]
    size = sum(path.stat().st_size for path, _ in files)
    return Unit(source, tuple(str(path) for path, _ in files), part, parts, size / parts, digest(identity)[:24])


class ChunkWriter:
    """A stream of tokens cut into chunks, written as MDS shards, and counted."""

    def __init__(self, folder: Path, settings: Settings):
        self._settings = settings
        self._writer = MDSWriter(
            columns={"tokens": f"ndarray:{settings.dtype}:{settings.chunk_tokens}"},
            out=str(folder),
            compression=COMPRESSION,
            hashes=[HASH],
            size_limit=SHARD_BYTES,
            max_workers=1,
        )
        self._waiting: list[NDArray[Any]] = []
        self._waiting_tokens = 0
        self.counts = np.zeros(settings.vocabulary, dtype=np.int64)
        self.chunks = 0

    def add(self, tokens: NDArray[Any]) -> None:
        self._waiting.append(tokens)
        self._waiting_tokens += len(tokens)
        size = self._settings.chunk_tokens
        if self._waiting_tokens < size:
            return
        joined = np.concatenate(self._waiting) if len(self._waiting) > 1 else tokens
        full = len(joined) // size * size
        self.counts += np.bincount(joined[:full], minlength=self._settings.vocabulary)
        for chunk in joined[:full].astype(self._settings.dtype).reshape(-1, size):
            self._writer.write({"tokens": chunk})
        self.chunks += full // size
        self._waiting = [joined[full:].copy()]
        self._waiting_tokens = len(joined) - full

    def finish(self) -> tuple[list[dict[str, Any]], NDArray[Any]]:
        """The index entries of the shards, and the tokens that did not fill a chunk."""
        self._writer.finish()
        rest = np.concatenate(self._waiting) if self._waiting else np.zeros(0)
        return list(self._writer.shards), rest.astype(self._settings.dtype)

    def abandon(self) -> None:
        self._writer.cancel_future_jobs()


def is_validation(text: bytes, share: float) -> bool:
    """By a hash of the text: the same document is in the same split wherever it stands."""
    return int(xxhash.xxh64_intdigest(text, seed=0x5EED)) < share * 2.0**64


def unit_folder(staging: Path, unit: Unit) -> Path:
    return staging / "units" / unit.key


def process_unit(
    unit: Unit, settings: Settings, tokenizer: Tokenizer, staging: Path, send: Callable[[Report], None]
) -> None:
    """Write the unit's folder; `send` gets a report now and then."""
    final = unit_folder(staging, unit)
    aside = final.with_name(f"{final.name}.tmp-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    writers = {split: ChunkWriter(aside / split, settings) for split in SPLITS}
    try:
        work = _UnitWork(unit, settings, tokenizer, writers, send)
        work.run()
        _finish_unit(work, aside)
        sync_tree(aside)
        if final.exists():  # finished meanwhile by a worker that outlived an earlier run
            shutil.rmtree(aside)
        else:
            os.rename(aside, final)
        work.report(force=True)
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        shutil.rmtree(aside, ignore_errors=True)
        raise


class _UnitWork:
    def __init__(
        self,
        unit: Unit,
        settings: Settings,
        tokenizer: Tokenizer,
        writers: dict[str, ChunkWriter],
        send: Callable[[Report], None],
    ):
        self.unit, self.settings, self.tokenizer, self.writers, self._send = unit, settings, tokenizer, writers, send
        self.total = Report()
        self.text_bytes = 0
        self.documents = Counter[str]()
        self._since = Report()
        self._last = time.monotonic()
        self._file_done = 0.0  # input bytes of finished files
        self._texts: dict[str, list[str]] = {split: [] for split in SPLITS}
        self._characters = Counter[str]()

    def run(self) -> None:
        for name in self.unit.files:
            path = Path(name)
            for item in read_documents(path, self.unit.part, self.unit.parts, self._position):
                if isinstance(item, Document):
                    self._take(item.text)
                else:
                    self._reject(item)
            self._file_done += path.stat().st_size / self.unit.parts
            self._position(0)
        for split in SPLITS:
            self._encode(split)
        self._since.input_bytes = self.unit.input_bytes - self.total.input_bytes + self._since.input_bytes

    def _take(self, text: str) -> None:
        data = text.encode("utf-8")
        self.text_bytes += len(data)
        split = "validation" if is_validation(data, self.settings.validation) else "train"
        self.documents[split] += 1
        self._since.documents += 1
        self.total.documents += 1
        self._texts[split].append(text)
        self._characters[split] += len(text)
        if self._characters[split] >= _BATCH_CHARACTERS:
            self._encode(split)

    def _reject(self, rejection: Rejection) -> None:
        for report in (self._since, self.total):
            report.rejected[rejection.reason] += 1
        if len(self.total.first_rejections) < KEPT_REJECTIONS:
            for report in (self._since, self.total):
                report.first_rejections.append(str(rejection))

    def _encode(self, split: str) -> None:
        if self._texts[split]:
            tokens = self.tokenizer.encode_joined(self._texts[split])
            self.writers[split].add(tokens)
            self.total.tokens += len(tokens)
            self._since.tokens += len(tokens)
        self._texts[split] = []
        self._characters[split] = 0
        self.report()

    def _position(self, position: int) -> None:
        done = self._file_done + position / self.unit.parts
        if done > self.total.input_bytes:
            self._since.input_bytes += done - self.total.input_bytes
            self.total.input_bytes = done
        self.report()

    def report(self, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._last >= _REPORT_SECONDS:
            self._send(self._since)
            self._since = Report()
            self._last = now


def _finish_unit(work: _UnitWork, folder: Path) -> None:
    splits = {}
    counts = np.zeros(0, dtype=np.int64)
    for split, writer in work.writers.items():
        shards, rest = writer.finish()
        np.save(folder / f"{split}.rest.npy", rest, allow_pickle=False)
        splits[split] = {"documents": work.documents[split], "chunks": writer.chunks, "shards": shards}
        if split == "train":
            counts = writer.counts
    np.savez_compressed(folder / "counts.npz", counts=counts)
    record = {
        "source": work.unit.source,
        "text_bytes": work.text_bytes,
        "tokens": work.total.tokens,
        "rejected": dict(work.total.rejected),
        "first_rejections": work.total.first_rejections,
        **splits,
    }
    (folder / "done.json").write_text(json.dumps(record))


def sync_tree(folder: Path) -> None:
    """To the disk before the rename: a finished unit must survive a power cut whole."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
