"""Work units of `prepare`: a group of files, or a part of one large file, to MDS shards.

In: files and settings. Out: a folder per unit with the shards of both splits, the remainder of each (tokens that did
not fill a chunk), the token counts and `done.json` with the statistics. The result of a unit is a function of its files
and the settings alone; it does not depend on workers or restarts. Its folder is named by a digest of both, and is
written to a temporary folder, synced and renamed: a folder that exists is finished and valid.
"""

import json
import math
import os
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from xgram_dist.data.documents import Document, Rejection, estimated_text_bytes, read_blocks
from xgram_dist.data.engines import Engine
from xgram_dist.data.manifest import HASH, SPLITS, digest
from xgram_dist.data.packing import DocumentPacker, count_padding

COMPRESSION = "zstd"
SHARD_BYTES = 1 << 26
KEPT_REJECTIONS = 10  # first rejections of a unit that are kept with their file and line
# Of tokens, matches shorter than two cost more time than they save bytes, and a small table of matches stays in the
# cache: 0.8 of the time of level 1 for shards 7 % larger.
_COMPRESSION = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    hash_log=12,
    window_log=17,
    chain_log=6,  # this and the next are not used by the strategy
    search_log=1,
    target_length=0,
)
_COUNTED_TOKENS = 1 << 18  # at a time
_MAX_PARTS = 16
_BATCH_BYTES = 1 << 22
_OPEN_SHARD_BYTES = 1 << 27  # of memory for the open shards of a worker, for each split
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


def plan_passes(units: Sequence[WorkUnit], workers: int) -> list[list[WorkUnit]]:
    """Units that are done together, largest first: parts of one file in as few passes over it as keep workers busy.

    A pass decompresses the whole file, whatever it takes from it. What a unit holds does not depend on its pass.
    """
    by_files: dict[tuple[str, tuple[str, ...]], list[WorkUnit]] = {}
    for unit in units:
        by_files.setdefault((unit.source, unit.files), []).append(unit)
    total = sum(unit.input_bytes for unit in units)
    passes = []
    for parts in by_files.values():
        size = sum(unit.input_bytes for unit in parts)
        count = min(len(parts), max(1, math.ceil(workers * size / total - 1e-9)) if total else 1)
        passes += [parts[number::count] for number in range(count)]
    return sorted(passes, key=lambda group: -sum(unit.input_bytes for unit in group))


@dataclass
class Report:
    """Progress of a worker: amounts since its last report."""

    input_bytes: float = 0.0
    tokens: int = 0
    documents: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    first_rejections: list[str] = field(default_factory=list)
    worker_bytes: int = 0  # the most memory the worker has held
    cpu_seconds: float = 0.0


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
    """Cuts a stream of tokens into chunks, writes them as MDS shards, and counts the tokens of the chunks.

    The chunks of the open shard are kept in memory up to `memory_bytes`, beyond that in a temporary file.
    """

    def __init__(self, folder: Path, settings: Settings, memory_bytes: int = SHARD_BYTES):
        folder.mkdir(parents=True)
        self._folder, self._settings, self._memory_bytes = folder, settings, memory_bytes
        self._dtype = np.dtype(settings.dtype).newbyteorder("<")
        self._chunk_bytes = settings.chunk_tokens * self._dtype.itemsize
        self._format = {
            "column_encodings": [f"ndarray:{settings.dtype}:{settings.chunk_tokens}"],
            "column_names": ["tokens"],
            "column_sizes": [self._chunk_bytes],
            "compression": COMPRESSION,
            "format": "mds",
            "hashes": [HASH],
            "size_limit": SHARD_BYTES,
            "version": 2,
        }
        self._format_text = json.dumps(self._format, sort_keys=True).encode()
        # A sample takes its bytes and an offset of 4 bytes.
        self._shard_chunks = max(1, (SHARD_BYTES - 8 - len(self._format_text)) // (self._chunk_bytes + 4))
        self._body: list[NDArray[Any]] = []  # chunks of the open shard that are in memory
        self._body_bytes = 0
        self._body_file: IO[bytes] | None = None  # those before them
        self._body_chunks = 0  # in memory and in the file
        self._shards: list[dict[str, Any]] = []
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
        for start in range(0, full, _COUNTED_TOKENS):  # small pieces: their indices stay in the cache
            np.add.at(self.counts, joined[start : min(start + _COUNTED_TOKENS, full)].astype(np.intp), 1)
        if self._settings.sequence_length is not None:
            end = self._settings.end_of_text
            padding = count_padding(joined[:full], self._settings.sequence_length, end)
            self.counts[end] -= padding
            self.padding += padding
        self._write(joined[:full].astype(self._dtype, copy=False).reshape(-1, size))
        self.chunks += full // size
        self._pending = [joined[full:].copy()]
        self._pending_tokens = len(joined) - full

    def _write(self, chunks: NDArray[Any]) -> None:
        start = 0
        while start < len(chunks):
            count = min(self._shard_chunks - self._body_chunks, len(chunks) - start)
            self._body.append(chunks[start : start + count])
            self._body_bytes += self._body[-1].nbytes
            self._body_chunks += count
            start += count
            if self._body_chunks == self._shard_chunks:
                self._close_shard()
            elif self._body_bytes > self._memory_bytes:
                self._spill()

    def _spill(self) -> None:
        """Move the chunks in memory to the temporary file."""
        if self._body_file is None:
            self._body_file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        for chunks in self._body:
            self._body_file.write(chunks.data)
        self._body, self._body_bytes = [], 0

    def _body_pieces(self) -> Iterator[Any]:
        if self._body_file is not None:
            self._body_file.seek(0)
            while piece := self._body_file.read(1 << 20):
                yield piece
            self._body_file.close()
        for chunks in self._body:
            yield chunks.data.cast("B")

    def _close_shard(self) -> None:
        """Header (number of chunks, their offsets, the format), then the chunks; hashed, compressed, hashed again."""
        offsets = np.arange(self._body_chunks + 1, dtype="<u4") * np.uint32(self._chunk_bytes)
        offsets += np.uint32(4 + offsets.nbytes + len(self._format_text))
        header = np.uint32(self._body_chunks).astype("<u4").tobytes() + offsets.tobytes() + self._format_text
        size = len(header) + self._body_chunks * self._chunk_bytes
        compressor = zstandard.ZstdCompressor(compression_params=_COMPRESSION).compressobj(size=size)
        raw_hash = xxhash.xxh128()
        packed_pieces = []
        for piece in chain([header], self._body_pieces()):
            raw_hash.update(piece)
            packed_pieces.append(compressor.compress(piece))
        packed = b"".join([*packed_pieces, compressor.flush()])
        raw = f"shard.{len(self._shards):05d}.mds"
        (self._folder / f"{raw}.{COMPRESSION}").write_bytes(packed)
        self._shards.append(
            {
                "samples": self._body_chunks,
                "raw_data": {"basename": raw, "bytes": size, "hashes": {HASH: raw_hash.hexdigest()}},
                "zip_data": {
                    "basename": f"{raw}.{COMPRESSION}",
                    "bytes": len(packed),
                    "hashes": {HASH: xxhash.xxh128_hexdigest(packed)},
                },
                **self._format,
            }
        )
        self._body, self._body_bytes, self._body_file, self._body_chunks = [], 0, None, 0

    def finish(self) -> tuple[list[dict[str, Any]], NDArray[Any]]:
        """The index entries of the shards, and the remainder: tokens that did not fill a chunk."""
        if self._body_chunks:
            self._close_shard()
        remainder = np.concatenate(self._pending) if self._pending else np.zeros(0)
        return self._shards, remainder.astype(self._settings.dtype)


def is_validation(text: bytes, share: float) -> bool:
    """By a hash of the text: copies of a document are always in the same split."""
    return int(xxhash.xxh64_intdigest(text, seed=0x5EED)) < share * 2.0**64


def unit_folder(staging: Path, unit: WorkUnit) -> Path:
    return staging / "units" / unit.key


def tokenize_units(
    units: Sequence[WorkUnit], settings: Settings, engine: Engine, staging: Path, send: Callable[[Report], None]
) -> None:
    """Write the folders of one unit, or of several parts of one file in one pass over it.

    `send` is called with progress reports.
    """
    finals = [unit_folder(staging, unit) for unit in units]
    temporaries = [final.with_name(f"{final.name}.tmp-{os.getpid()}") for final in finals]
    try:
        progress = _Progress(send, sum(unit.input_bytes for unit in units))
        tasks = {}
        for unit, temporary in zip(units, temporaries, strict=True):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            tasks[unit.part] = _UnitTask(unit, settings, engine, temporary, _OPEN_SHARD_BYTES // len(units), progress)
        for name in units[0].files:
            path = Path(name)
            share = len(units) / units[0].parts
            for block in read_blocks(path, units[0].parts, tasks, partial(progress.read_up_to, share)):
                tasks[block.part].add(block.items)
            progress.finish_file(path.stat().st_size * share)
        with ThreadPoolExecutor(4) as pool:  # the disk writes while the next unit is compressed
            synced = []
            for task, temporary in zip(tasks.values(), temporaries, strict=True):
                task.finish()
                synced.append(pool.submit(sync_tree, temporary))
        for final, temporary, done in zip(finals, temporaries, synced, strict=True):
            done.result()
            if final.exists():  # finished in the meantime by a worker of an earlier run
                shutil.rmtree(temporary)
            else:
                os.rename(temporary, final)
        progress.finish()
    except BaseException:
        for temporary in temporaries:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


class _Progress:
    """What the units of one pass have done, sent a few times a second."""

    def __init__(self, send: Callable[[Report], None], input_bytes: float):
        self._send, self._input_bytes = send, input_bytes
        self._finished_bytes = self._told_bytes = 0.0
        self._last = time.monotonic()
        self._cpu_told = time.process_time()
        self.unsent = Report()

    def read_up_to(self, share: float, position: int) -> None:
        """The current file is read up to byte `position`, of which `share` is of these units."""
        self._tell(self._finished_bytes + position * share)

    def finish_file(self, size: float) -> None:
        self._finished_bytes += size
        self._tell(self._finished_bytes)

    def finish(self) -> None:
        self._tell(self._input_bytes, force=True)

    def _tell(self, read: float, force: bool = False) -> None:
        now = time.monotonic()
        if force or now - self._last >= _REPORT_SECONDS:
            self.unsent.input_bytes = max(0.0, read - self._told_bytes)
            self._told_bytes += self.unsent.input_bytes
            self.unsent.worker_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            cpu = time.process_time()
            self.unsent.cpu_seconds, self._cpu_told = cpu - self._cpu_told, cpu
            self._send(self.unsent)
            self.unsent = Report()
            self._last = now


class _UnitTask:
    """One unit in work: takes its documents, tokenizes them in batches and writes its results."""

    def __init__(
        self,
        unit: WorkUnit,
        settings: Settings,
        engine: Engine,
        folder: Path,
        open_shard_bytes: int,
        progress: _Progress,
    ):
        self._unit, self._settings, self._engine = unit, settings, engine
        self._folder, self._progress = folder, progress
        self._writers = {split: ChunkWriter(folder / split, settings, open_shard_bytes) for split in SPLITS}
        self._documents = Counter[str]()
        self._rejected = Counter[str]()
        self._first_rejections: list[str] = []
        self._text_bytes = self._tokens = 0
        self._texts: dict[str, list[bytes]] = {split: [] for split in SPLITS}
        self._batch_bytes = dict.fromkeys(SPLITS, 0)
        length, end = settings.sequence_length, settings.end_of_text
        self._packers = {} if length is None else {split: DocumentPacker(length, end) for split in SPLITS}

    def add(self, items: list[Document | Rejection]) -> None:
        share = self._settings.validation
        for item in items:
            if isinstance(item, Rejection):
                self._reject(item)
                continue
            data = item.text.encode("utf-8")
            split = "validation" if share and is_validation(data, share) else "train"
            texts = self._texts[split]
            texts.append(data)
            self._batch_bytes[split] += len(data)
            if self._batch_bytes[split] >= _BATCH_BYTES:
                self._encode(split)

    def _reject(self, rejection: Rejection) -> None:
        self._rejected[rejection.reason] += 1
        self._progress.unsent.rejected[rejection.reason] += 1
        if len(self._first_rejections) < KEPT_REJECTIONS:
            self._first_rejections.append(str(rejection))
            self._progress.unsent.first_rejections.append(str(rejection))

    def _encode(self, split: str) -> None:
        texts = self._texts[split]
        if not texts:
            return
        tokens = self._engine.encode_joined(texts)
        self._writers[split].add(self._packers[split].add(tokens) if self._packers else tokens)
        self._documents[split] += len(texts)
        self._text_bytes += self._batch_bytes[split]
        self._tokens += len(tokens)
        self._progress.unsent.documents += len(texts)
        self._progress.unsent.tokens += len(tokens)
        self._texts[split] = []
        self._batch_bytes[split] = 0

    def finish(self) -> None:
        """Write what is left, the counts and the statistics."""
        for split in SPLITS:
            self._encode(split)
        for split, packer in self._packers.items():
            self._writers[split].add(packer.flush())
        splits = {}
        for split, writer in self._writers.items():
            shards, remainder = writer.finish()
            np.save(self._folder / f"{split}.rest.npy", remainder, allow_pickle=False)
            splits[split] = {
                "documents": self._documents[split],
                "chunks": writer.chunks,
                "padding": writer.padding,
                "dropped": self._packers[split].dropped if self._packers else 0,
                "shards": shards,
            }
        np.savez(self._folder / "counts.npz", counts=self._writers["train"].counts)
        record = {
            "source": self._unit.source,
            "text_bytes": self._text_bytes,
            "tokens": self._tokens,
            "rejected": dict(self._rejected),
            "first_rejections": self._first_rejections,
            **splits,
        }
        (self._folder / "done.json").write_text(json.dumps(record))


def sync_tree(folder: Path) -> None:
    """Flush all files of a folder to disk before it is renamed, so that a finished folder survives a power cut."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
