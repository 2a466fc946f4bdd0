"""A prepared data set as random-access chunks of tokens.

In: the folder (or remote address) that `prepare` wrote. Out: `PreparedData` with `chunk(source, index)` and
`tokens(source, index, start, length)`. Shards are fetched, verified and decompressed by `streaming.Stream` when they
are first read. No shared memory is used.

The ranks of a node share the decompressed shards. A lock file per shard lets one rank fetch and decompress it; the
shard is written to a temporary file and renamed; the lock of a process that dies is released by the kernel. Every
process verifies a decompressed shard when it first opens it, and decompresses it again if it is damaged. A damaged
compressed shard is an error that names the file.
"""

import contextlib
import fcntl
import json
import os
import tempfile
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.data.manifest import MANIFEST, SPLITS, Manifest, check_file_name, read_manifest, shards_digest
from xgram_dist.data.streaming_import import streaming
from xgram_dist.errors import UserError

_OPEN_SHARDS = 64  # open files per source
_DOWNLOAD_SECONDS = 300.0
_DOWNLOAD_ATTEMPTS = 3


class _OpenShard:
    """The open decompressed file of one shard, and the byte offset of every chunk in it."""

    def __init__(self, path: Path, samples: int):
        self.path = path
        self._handle = os.open(path, os.O_RDONLY)
        header = np.frombuffer(os.pread(self._handle, 4 * (samples + 2), 0), dtype="<u4")
        if len(header) != samples + 2 or header[0] != samples:
            raise UserError(
                f"shard '{path}' is damaged: its header does not name {samples} chunks; delete it and run again"
            )
        self._offsets = header[1:].astype(np.int64)

    def read(self, sample: int, dtype: Any, start: int, length: int) -> NDArray[Any]:
        # pread instead of a memory map: a file that shrinks is an exception and not a bus error, and pread releases
        # the GIL.
        data = os.pread(self._handle, length * dtype.itemsize, int(self._offsets[sample]) + start * dtype.itemsize)
        if len(data) != length * dtype.itemsize:
            raise UserError(f"shard '{self.path}' ended within chunk {sample}; delete it and run again")
        return np.frombuffer(data, dtype=dtype)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._handle)


class _SourceReader:
    """The shards of one source and split."""

    def __init__(
        self, folder: Path, remote: str | None, manifest: Manifest, number: int, split: str, limit: "_CacheLimit"
    ):
        info = manifest.sources[number].split(split)
        self.folder = folder
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._chunk_tokens = manifest.chunk_tokens
        self._limit = limit
        self._stream = streaming().Stream(
            remote=remote,
            local=str(folder),
            download_retry=_DOWNLOAD_ATTEMPTS,
            download_timeout=_DOWNLOAD_SECONDS,
            keep_zip=False,  # applies to fetched copies; streaming never deletes a local original
        )
        index = self._read_index(info.content)
        self.shards: list[Any] = [streaming().reader_from_json(str(folder), None, shard) for shard in index]
        self.shard_chunks = [int(shard.samples) for shard in self.shards]
        if sum(self.shard_chunks) != info.chunks:
            raise UserError(f"'{folder / 'index.json'}' does not agree with {MANIFEST}; run `xgram-dist prepare` again")
        self._first = np.concatenate([[0], np.cumsum(self.shard_chunks)]).astype(np.int64)
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._guard = threading.Lock()

    def _read_index(self, content: str) -> list[dict[str, Any]]:
        path = self.folder / "index.json"
        if not path.exists() and self._stream.remote:
            _download(f"{self._stream.remote}/index.json", path)
        try:
            shards = json.loads(path.read_bytes())["shards"]
            encoding = f"ndarray:{self._dtype.name}:{self._chunk_tokens}"
            for shard in shards:
                check_file_name(shard["raw_data"]["basename"], path)
                check_file_name(shard["zip_data"]["basename"], path)
                if shard["format"] != "mds" or shard["column_encodings"] != [encoding] or shard["hashes"] == []:
                    raise ValueError(f"a shard is not of hashed '{encoding}'")
            agrees = shards_digest(shards) == content
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"cannot read '{path}': {error}; run `xgram-dist prepare` again") from error
        if not agrees:
            raise UserError(f"'{path}' is not the index {MANIFEST} was written with; run `xgram-dist prepare` again")
        return list(shards)

    def shard_of(self, chunk: int) -> tuple[int, int]:
        """The shard of a chunk, and the chunk's index in the shard."""
        if not 0 <= chunk < self._first[-1]:
            raise IndexError(f"chunk {chunk} of {self._first[-1]}")
        shard = int(np.searchsorted(self._first, chunk, side="right")) - 1
        return shard, chunk - int(self._first[shard])

    def shard_file(self, chunk: int) -> Path:
        return self.folder / str(self.shards[self.shard_of(chunk)[0]].zip_data.basename)

    def read(self, chunk: int, start: int, length: int) -> NDArray[Any]:
        shard, sample = self.shard_of(chunk)
        with self._guard:
            open_shard = self._open.get(shard)
            if open_shard is None:
                open_shard = self._open[shard] = self._open_shard(shard)
                if len(self._open) > _OPEN_SHARDS:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(shard)
            return open_shard.read(sample, self._dtype, start, length)

    def _open_shard(self, number: int) -> _OpenShard:
        reader = self.shards[number]
        raw = self.folder / reader.raw_data.basename
        with _locked(raw.with_name(raw.name + ".lock")):
            if not _verified(raw, reader.raw_data):
                raw.unlink(missing_ok=True)  # damaged by a crash or a bad disk; decompress it again
                self._fetch(reader)
                if not _verified(raw, reader.raw_data):
                    raise UserError(f"shard '{raw}' does not read back as it was written: the disk is full or failing")
            open_shard = _OpenShard(raw, reader.samples)
        self._limit.touch(raw)
        return open_shard

    def _fetch(self, reader: Any) -> None:
        compressed = self.folder / reader.zip_data.basename
        if self._stream.remote is None and not compressed.is_file():
            raise _missing(compressed)
        self._stream.validate_hash = reader.hashes[0]
        try:
            self._stream.prepare_shard(reader)
        except ValueError as error:
            if "Checksum" in str(error) and self._stream.remote:
                compressed.unlink(missing_ok=True)  # the next run fetches it again
            raise UserError(
                f"shard '{compressed}' is corrupt: its {reader.hashes[0]} is not the one in index.json ({error}); "
                "restore the file from a copy, or run `xgram-dist prepare --overwrite` again"
            ) from error
        except FileNotFoundError as error:
            raise _missing(compressed) from error
        except OSError as error:
            raise UserError(
                f"cannot decompress shard '{compressed}': {error}; free space or give another cache"
            ) from error
        except Exception as error:  # downloaders raise many types
            raise UserError(f"cannot fetch shard '{compressed.name}' from '{self._stream.remote}': {error}") from error


def _missing(compressed: Path) -> UserError:
    return UserError(
        f"shard '{compressed}' is missing; restore it from a copy, or run `xgram-dist prepare --overwrite` again"
    )


def _verified(raw: Path, info: Any) -> bool:
    if not raw.is_file() or raw.stat().st_size != info.bytes:
        return False
    data = raw.read_bytes()
    return all(streaming().get_hash(name, data) == value for name, value in info.hashes.items())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror}; give a cache folder that can be written") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(remote: str, local: Path) -> None:
    """Fetch a small file to a temporary one and rename it; ranks may do so at the same time."""
    temporary = local.with_name(f"{local.name}.{uuid.uuid4().hex}")
    try:
        streaming().CloudDownloader.direct_download(remote, str(temporary), _DOWNLOAD_SECONDS)
        os.replace(temporary, local)
    except Exception as error:  # downloaders raise many types
        raise UserError(f"cannot fetch '{remote}': {error}") from error


class _CacheLimit:
    """Limits the bytes of decompressed shards on disk by deleting the least recently opened."""

    def __init__(self, limit: int | None):
        self._limit = limit
        self._sizes: OrderedDict[Path, int] = OrderedDict()

    def touch(self, raw: Path) -> None:
        """Note that `raw` was opened."""
        if self._limit is None:
            return
        self._sizes.pop(raw, None)
        self._sizes[raw] = raw.stat().st_size if raw.exists() else 0
        while len(self._sizes) > 1 and sum(self._sizes.values()) > self._limit:
            old, _ = self._sizes.popitem(last=False)
            old.unlink(missing_ok=True)  # open files stay readable; a later reader decompresses it again


class PreparedData:
    """One split of a prepared data set."""

    def __init__(
        self, manifest: Manifest, split: str, readers: list[_SourceReader], folder: Path, origin: str | None = None
    ):
        """`origin`: the folder or address that `folder` is a cache of."""
        self.manifest, self.split, self.folder = manifest, split, folder
        self._readers, self._origin = readers, origin

    @classmethod
    def open(
        cls,
        path: str | Path | None,
        split: str = "train",
        *,
        remote: str | None = None,
        cache: str | Path | None = None,
        cache_limit: int | None = None,
    ) -> "PreparedData":
        """Open the folder `path`, or the address `remote` (as `streaming` understands it) through the folder `cache`.

        A `path` without write permission is read through `cache` too. `cache_limit`: bytes of decompressed shards to
        keep.
        """
        if split not in SPLITS:
            raise UserError(f"split '{split}' is not one of {', '.join(SPLITS)}")
        if (path is None) == (remote is None):
            raise UserError("give either the folder of a prepared data set or its remote address")
        if remote is not None:
            root = _cache_root(cache)
            manifest, folder = _fetch_manifest(remote.rstrip("/"), root)
            origin: str | None = remote.rstrip("/")
        else:
            assert path is not None
            folder, origin = Path(path), None
            manifest = read_manifest(folder)
            if cache is not None or not os.access(folder, os.W_OK):
                origin = str(folder.resolve())
                folder = _cache_root(cache) / manifest.fingerprint[:24]
        limit = _CacheLimit(cache_limit)
        readers = []
        for number, source in enumerate(manifest.sources):
            source_folder = folder / split / source.name
            try:
                source_folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"cannot write to '{source_folder}': {error.strerror}; give another cache folder"
                ) from error
            address = None if origin is None else f"{origin}/{split}/{source.name}"
            readers.append(_SourceReader(source_folder, address, manifest, number, split, limit))
        return cls(manifest, split, readers, folder, origin)

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    def tokenizer_facts(self) -> dict[str, Any]:
        """What a checkpoint records about the tokenizer."""
        manifest = self.manifest
        return {
            "file": manifest.tokenizer_file,
            "sha256": manifest.tokenizer_sha256,
            "end_of_text_name": manifest.end_of_text_name,
        }

    def tokenizer_files(self) -> list[Path]:
        """The tokenizer's file; an empty list where it cannot be fetched."""
        file = self.folder / self.manifest.tokenizer_file
        if not file.exists() and self._origin is not None:
            with contextlib.suppress(UserError):
                _download(f"{self._origin}/{self.manifest.tokenizer_file}", file)
        return [file] if file.exists() else []

    @property
    def source_names(self) -> list[str]:
        return [source.name for source in self.manifest.sources]

    @property
    def chunk_tokens(self) -> int:
        return self.manifest.chunk_tokens

    @property
    def shard_chunks(self) -> list[list[int]]:
        """Number of chunks of every shard, by source."""
        return [reader.shard_chunks for reader in self._readers]

    def chunk(self, source: int, index: int) -> NDArray[Any]:
        return self.tokens(source, index, 0, self.chunk_tokens)

    def tokens(self, source: int, index: int, start: int, length: int) -> NDArray[Any]:
        """`length` tokens of a chunk from `start`, and no more, are read."""
        assert 0 <= start <= start + length <= self.chunk_tokens
        return self._readers[source].read(index, start, length)

    def shard_file(self, source: int, index: int) -> Path:
        """The file of a chunk, for error messages."""
        return self._readers[source].shard_file(index)


def _cache_root(cache: str | Path | None) -> Path:
    return Path(cache) if cache is not None else Path(tempfile.gettempdir()) / f"xgram-dist-{os.getuid()}"


def _fetch_manifest(remote: str, root: Path) -> tuple[Manifest, Path]:
    """The remote manifest, and the cache folder. The folder is named after the fingerprint of the manifest, so that it
    never mixes two versions of the data."""
    temporary = root / f"manifest-{uuid.uuid4().hex}"
    try:
        temporary.mkdir(parents=True)
        _download(f"{remote}/{MANIFEST}", temporary / MANIFEST)
        manifest = read_manifest(temporary)
    except OSError as error:
        raise UserError(f"cannot write to the cache folder '{root}': {error}") from error
    finally:
        (temporary / MANIFEST).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            temporary.rmdir()
    return manifest, root / manifest.fingerprint[:24]
