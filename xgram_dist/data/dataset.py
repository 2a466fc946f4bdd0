"""A prepared data set as random-access chunks of tokens.

In: the folder (or remote address) that `prepare` wrote. Out: `PreparedData` with `chunk(source, index)` and
`tokens(source, index, start, length)`. Shards are fetched, verified and decompressed when they are first read, or
ahead of it (`provide`). No shared memory is used.

The ranks of a node share the decompressed shards. A lock file per shard lets one rank fetch and decompress it; the
shard is written to a temporary file and renamed; the lock of a process that dies is released by the kernel. Every
process verifies a decompressed shard when it first opens it, and decompresses it again if it is damaged. A damaged
compressed shard is an error that names the file; a fetched one is fetched again first (`storage`).
"""

import contextlib
import fcntl
import os
import tempfile
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from xgram_dist.data.manifest import HASH, MANIFEST, SPLITS, Manifest, check_file_name, read_manifest, shards_digest
from xgram_dist.data.storage import fetch, open_store
from xgram_dist.errors import BadFileError, UserError
from xgram_dist.files import create_file, private_folder
from xgram_dist.untrusted import open_file, read_file, read_json, shown

_OPEN_SHARDS = 64  # open files per source
_HEADER_BYTES = 1 << 16  # of a shard, at most, beside its offsets
_TOUCH_SECONDS = 10.0
_ABANDONED_SECONDS = 60.0  # after which a file that is not renamed has lost its writer


class _ShardFile(TypedDict):
    basename: str
    bytes: Annotated[int, Field(strict=True, ge=0, lt=2**32)]
    hashes: dict[str, str]


class _ShardEntry(TypedDict):
    """Of a shard in index.json; it may hold more."""

    format: str
    samples: Annotated[int, Field(strict=True, ge=0, lt=2**30)]
    column_encodings: list[str]
    hashes: list[str]
    raw_data: _ShardFile
    zip_data: _ShardFile


class _Index(TypedDict):
    shards: list[_ShardEntry]


def read_index(path: Path, encoding: str) -> list[dict[str, Any]]:
    """The shards of index.json, checked: no two files have one name, and none is a file that this package writes.
    FileNotFoundError is left to the caller."""
    tree = read_json(path)
    try:
        TypeAdapter(_Index).validate_python(tree)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        what = "is missing" if first["type"] == "missing" else f"is {shown(first['input'])}"
        raise BadFileError(f"'{path}' is damaged: '{place}' {what}; run `xgram-dist prepare` again") from None
    names = set()
    for shard in tree["shards"]:
        raw, packed = (check_file_name(shard[part]["basename"], path) for part in ("raw_data", "zip_data"))
        if not raw.endswith(".mds") or packed != f"{raw}.zstd":
            raise BadFileError(f"'{path}' is damaged: a shard is {shown(raw)} and, compressed, {shown(packed)}")
        if raw in names:
            raise BadFileError(f"'{path}' is damaged: it names the shard {shown(raw)} twice")
        names.add(raw)
        if shard["format"] != "mds" or shard["column_encodings"] != [encoding] or shard["hashes"] != [HASH]:
            raise BadFileError(f"'{path}': a shard is not of hashed '{encoding}'; run `xgram-dist prepare` again")
        if any(HASH not in shard[part]["hashes"] for part in ("raw_data", "zip_data")):
            raise BadFileError(f"'{path}' is damaged: {shown(raw)} has no {HASH}; run `xgram-dist prepare` again")
    return list(tree["shards"])


class _OpenShard:
    """The open decompressed file of one shard, and the byte offset of every chunk in it."""

    def __init__(self, path: Path, samples: int):
        self.path = path
        self.touched = time.monotonic()
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

    @property
    def deleted(self) -> bool:
        return os.fstat(self._handle).st_nlink == 0

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._handle)


class _SourceReader:
    """The shards of one source and split: in `folder`, fetched from `origin` where that is given."""

    def __init__(self, folder: Path, origin: str | None, manifest: Manifest, number: int, split: str, cache: "_Cache"):
        info = manifest.sources[number].split(split)
        self.folder = folder
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._chunk_tokens = manifest.chunk_tokens
        self._cache = cache
        self._address = str(folder) if origin is None else origin
        self._store = open_store(self._address)
        self.is_remote = origin is not None
        self.entries = self._read_index(info.content)
        self.shard_chunks = [int(entry["samples"]) for entry in self.entries]
        if sum(self.shard_chunks) != info.chunks:
            raise UserError(f"'{folder / 'index.json'}' does not agree with {MANIFEST}; run `xgram-dist prepare` again")
        self._first = np.concatenate([[0], np.cumsum(self.shard_chunks)]).astype(np.int64)
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._verified: set[int] = set()  # shards whose file this process has read against its hash
        self._guard = threading.Lock()

    def _read_index(self, content: str) -> list[dict[str, Any]]:
        path = self.folder / "index.json"
        if not path.exists() and self.is_remote:
            _download(self._address, "index.json", path)
        try:
            shards = read_index(path, f"ndarray:{self._dtype.name}:{self._chunk_tokens}")
        except FileNotFoundError:
            raise UserError(f"'{path}' is missing; run `xgram-dist prepare` again") from None
        chunk_bytes = self._chunk_tokens * self._dtype.itemsize + 4
        for shard in shards:
            if shard["raw_data"]["bytes"] > shard["samples"] * chunk_bytes + _HEADER_BYTES:
                raise BadFileError(f"'{path}' is damaged: a shard is larger than its chunks")
        if shards_digest(shards) != content:
            raise UserError(f"'{path}' is not the index {MANIFEST} was written with; run `xgram-dist prepare` again")
        return shards

    def shard_of(self, chunk: int) -> tuple[int, int]:
        """The shard of a chunk, and the chunk's index in the shard."""
        if not 0 <= chunk < self._first[-1]:
            raise IndexError(f"chunk {chunk} of {self._first[-1]}")
        shard = int(np.searchsorted(self._first, chunk, side="right")) - 1
        return shard, chunk - int(self._first[shard])

    def shard_file(self, chunk: int) -> Path:
        return self.folder / str(self.entries[self.shard_of(chunk)[0]]["zip_data"]["basename"])

    def shard_name(self, shard: int) -> str:
        return f"{self._address}/{self.entries[shard]['zip_data']['basename']}"

    def packed_shard(self, shard: int) -> bytes:
        """The compressed shard, verified where it is fetched."""
        info = self.entries[shard]["zip_data"]
        if not self.is_remote:
            path = self.folder / info["basename"]
            try:
                return read_file(path, limit=2 * int(info["bytes"]) + _HEADER_BYTES)
            except FileNotFoundError:
                raise _missing(str(path)) from None
        try:
            return fetch(self._address, self._store, info["basename"], int(info["bytes"]), info["hashes"][HASH])
        except FileNotFoundError:
            raise _missing(self.shard_name(shard)) from None

    def read(self, chunk: int, start: int, length: int) -> NDArray[Any]:
        shard, sample = self.shard_of(chunk)
        with self._guard:
            open_shard = self._open.get(shard)
            if open_shard is None:
                open_shard = self._open[shard] = self._open_shard(shard)
                if len(self._open) > _OPEN_SHARDS:
                    self._open.popitem(last=False)
                self._cache.drop_deleted(self._open)
            else:
                self._open.move_to_end(shard)
            self._cache.touch(open_shard)
            return open_shard.read(sample, self._dtype, start, length)

    def _open_shard(self, number: int) -> _OpenShard:
        raw = self.folder / self.entries[number]["raw_data"]["basename"]
        for _ in range(3):
            self.provide(number)
            with contextlib.suppress(FileNotFoundError):  # another rank has made room in between
                return _OpenShard(raw, self.shard_chunks[number])
        raise UserError(
            f"shard '{raw}' is removed from the cache as soon as it is there; raise data.cache_limit, which must hold "
            f"the shards that all ranks of a node read at a time"
        )

    def provide(self, number: int) -> None:
        """Make sure that the decompressed shard is on disk. The ranks of a node, and the threads of a rank, wait for
        the one that fetches it."""
        entry = self.entries[number]
        raw = self.folder / entry["raw_data"]["basename"]
        if number in self._verified and raw.exists():
            return
        with _locked(raw.with_name(raw.name + ".lock")):
            if not _is_intact(raw, entry["raw_data"]):
                try:
                    raw.unlink(missing_ok=True)  # damaged by a crash or a bad disk; decompress it again
                except OSError as error:
                    raise UserError(f"cannot replace '{raw}': {error.strerror}; remove it") from error
                self._cache.write(raw, self._decompress(number))
        self._verified.add(number)

    def _decompress(self, number: int) -> bytes:
        entry, name = self.entries[number], self.shard_name(number)
        packed = self.packed_shard(number)
        if xxhash.xxh128_hexdigest(packed) != entry["zip_data"]["hashes"][HASH]:
            raise UserError(
                f"shard '{name}' is corrupt: its {HASH} is not the one in index.json; restore the file from a copy, or "
                f"run `xgram-dist prepare --overwrite` again"
            )
        size = int(entry["raw_data"]["bytes"])
        try:
            # A frame that gives its size is unpacked to that size, whatever the limit.
            declared = zstandard.frame_content_size(packed)
            fits = declared in (-1, size)
            raw = bytes(zstandard.ZstdDecompressor().decompress(packed, max_output_size=size)) if fits else b""
        except zstandard.ZstdError:
            raw = b""
        if len(raw) != size or xxhash.xxh128_hexdigest(raw) != entry["raw_data"]["hashes"][HASH]:
            raise UserError(f"shard '{name}' does not decompress to what was written; run `xgram-dist prepare` again")
        return raw


def _missing(name: str) -> UserError:
    return UserError(
        f"shard '{name}' is missing; restore it from a copy, or run `xgram-dist prepare --overwrite` again"
    )


def _is_intact(raw: Path, info: dict[str, Any]) -> bool:
    try:
        data = read_file(raw, limit=info["bytes"])
    except (FileNotFoundError, BadFileError):
        return False
    return len(data) == info["bytes"] and bool(xxhash.xxh128_hexdigest(data) == info["hashes"][HASH])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Neither through a link nor emptied: in a shared folder it may be somebody else's.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror}; give a cache folder that can be written") from error
    with os.fdopen(descriptor, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(address: str, name: str, local: Path) -> None:
    """Fetch a small file to a temporary one and rename it; ranks may do so at the same time."""
    try:
        data = fetch(address, open_store(address), name)
    except FileNotFoundError as error:
        raise UserError(f"{error}; is '{address}' a data set of `xgram-dist prepare`?") from None
    temporary = local.with_name(f"{local.name}.{uuid.uuid4().hex}")
    with create_file(temporary) as file:
        file.write(data)
    os.replace(temporary, local)


class _Cache:
    """The decompressed shards on disk, all ranks of a node together.

    With a limit, the least recently used shards are removed before one is written, under a lock of the whole folder.
    The folder itself is the record of what is there, so a killed rank leaves nothing wrong behind: the kernel releases
    its locks, and the part of a file that it was writing is overwritten or removed by a later writer.
    """

    def __init__(self, folder: Path, limit: int | None):
        self._folder, self.limit = folder, limit

    def write(self, raw: Path, data: bytes) -> None:
        temporary = raw.with_name(f"{raw.name}.part")  # its name is safe: the shard is locked
        try:
            if self.limit is None:
                _write_and_rename(temporary, raw, data)
                return
            with _locked(self._folder / "cache.lock"):
                self._make_room(len(data))
                _write_and_rename(temporary, raw, data)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UserError(
                f"cannot write the decompressed shard '{raw}': {error.strerror}; free space or give another cache"
            ) from error

    def _make_room(self, size: int) -> None:
        assert self.limit is not None
        files = []
        for path in self._folder.rglob("*.mds*"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                if path.name.endswith(".mds.part") and time.time() - stat.st_mtime > _ABANDONED_SECONDS:
                    path.unlink()  # its writer was killed
                elif path.name.endswith((".mds", ".mds.part")):
                    files.append((stat.st_mtime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, file_size, path in sorted(files):
            if total + size <= self.limit:
                break
            if path.name.endswith(".mds"):
                path.unlink(missing_ok=True)  # who has it open can read on; the next reader fetches it again
                total -= file_size

    def touch(self, shard: _OpenShard) -> None:
        """Note that a shard is in use."""
        now = time.monotonic()
        if self.limit is not None and now - shard.touched > _TOUCH_SECONDS:
            shard.touched = now
            with contextlib.suppress(OSError):
                os.utime(shard.path)

    def drop_deleted(self, shards: "OrderedDict[int, _OpenShard]") -> None:
        """Close files that were removed, so that their space is free."""
        if self.limit is not None:
            for number in [number for number, shard in list(shards.items())[:-1] if shard.deleted]:
                del shards[number]


def _write_and_rename(temporary: Path, path: Path, data: bytes) -> None:
    temporary.unlink(missing_ok=True)
    with create_file(temporary) as file:
        file.write(data)
    os.replace(temporary, path)


class PreparedData:
    """One split of a prepared data set."""

    def __init__(
        self,
        manifest: Manifest,
        split: str,
        readers: list[_SourceReader],
        folder: Path,
        origin: str | None = None,
        cache_limit: int | None = None,
    ):
        """`origin`: the folder or address that `folder` is a cache of."""
        self.manifest, self.split, self.folder = manifest, split, folder
        self._readers, self._origin, self._cache_limit = readers, origin, cache_limit

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
        """Open the folder `path`, or the address `remote` (see `storage`) through the folder `cache`.

        A `path` without write permission is read through `cache` too. `cache_limit`: bytes of decompressed shards to
        keep, for all ranks of a node together.
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
            with contextlib.suppress(FileNotFoundError):  # it is copied into every checkpoint
                os.close(open_file(folder / manifest.tokenizer_file))
            if cache is not None or not os.access(folder, os.W_OK):
                origin = str(folder.resolve())
                folder = _cache_root(cache) / manifest.fingerprint[:24]
        shards = _Cache(folder, cache_limit)
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
            readers.append(_SourceReader(source_folder, address, manifest, number, split, shards))
        return cls(manifest, split, readers, folder, origin, cache_limit)

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
                _download(self._origin, self.manifest.tokenizer_file, file)
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

    @property
    def is_remote(self) -> bool:
        """Whether shards are fetched from elsewhere."""
        return self._origin is not None

    def has_room_for(self, blocks: Mapping[int, tuple[Any, list[int]]]) -> bool:
        """Whether shards, by source, fit into half of the cache, beside those in use."""
        if self._cache_limit is None:
            return True
        sizes = (
            self.shard_entry(source, n)["raw_data"]["bytes"] for source, (_, shards) in blocks.items() for n in shards
        )
        return 2 * sum(sizes) <= self._cache_limit

    def provide(self, source: int, shard: int) -> None:
        """Fetch and decompress a shard, unless it is on disk. May be called from any thread."""
        self._readers[source].provide(shard)

    @property
    def packed_bytes(self) -> int:
        """Of all compressed shards."""
        return sum(int(entry["zip_data"]["bytes"]) for reader in self._readers for entry in reader.entries)

    def shard_entry(self, source: int, shard: int) -> dict[str, Any]:
        """A shard's entry in index.json."""
        return self._readers[source].entries[shard]

    def shard_name(self, source: int, shard: int) -> str:
        return self._readers[source].shard_name(shard)

    def packed_shard(self, source: int, shard: int) -> bytes:
        """A compressed shard as it is stored, unverified."""
        return self._readers[source].packed_shard(shard)


def _cache_root(cache: str | Path | None) -> Path:
    if cache is not None:
        return Path(cache)
    return private_folder(Path(tempfile.gettempdir()) / f"xgram-dist-{os.getuid()}")


def _fetch_manifest(remote: str, root: Path) -> tuple[Manifest, Path]:
    """The remote manifest, and the cache folder. The folder is named after the fingerprint of the manifest, so that it
    never mixes two versions of the data."""
    temporary = root / f"manifest-{uuid.uuid4().hex}"
    try:
        temporary.mkdir(parents=True)
        _download(remote, MANIFEST, temporary / MANIFEST)
        manifest = read_manifest(temporary)
    except OSError as error:
        raise UserError(f"cannot write to the cache folder '{root}': {error}") from error
    finally:
        (temporary / MANIFEST).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            temporary.rmdir()
    return manifest, root / manifest.fingerprint[:24]
