"""Checkpoints on object storage, beside those on disk (`checkpoint.remote`).

    ADDRESS/NAME/step-00000100.json         an index: the files of a checkpoint, their bytes and their pieces
    ADDRESS/NAME/pieces/HASH-BYTES          up to 64 MiB of a file, named by its content
    ADDRESS/NAME/writers/00000007.json      the starts of the run that write here; the highest number holds the place

The index is written last, in one request: until then there is no checkpoint. Pieces are never changed, so that an
upload that breaks off is continued, and a chain (chain.py) uploads its new parts alone. What is read is verified: the
index by its checksum, each piece by its size and hash.

Every start of a run takes the next number. An older start that still runs elsewhere finds a higher one before it writes
an index or deletes anything, and ends (`LostPlaceError`). No torch.
"""

import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import xxhash

from xgram_dist.checkpoint.folder import expired_steps, name_of
from xgram_dist.checkpoint.manifest import FILE, MAX_STEP, Manifest, manifest_checksum
from xgram_dist.data.storage import StorageError, fetch, open_store, retry
from xgram_dist.errors import UserError
from xgram_dist.untrusted import JsonError, is_plain_name, parse_json, shown

T = TypeVar("T")
R = TypeVar("R")

PIECE_BYTES = 64 << 20
MAX_PIECE_BYTES = 1 << 30
"""Of releases to come: a piece is held in memory."""
TRANSFERS = 8
"""At a time. Each holds a piece in memory."""
DELETES = 100
"""Between two looks at whether this start still holds the place."""
FORMAT, VERSION = "xgram-dist remote checkpoint", 1
_FORGOTTEN = "the server does not hold what it has confirmed"
MAX_DEPTH = 4
_INDEX = re.compile(r"step-([0-9]{8,12})\.json")
_PIECE = re.compile(r"[0-9a-f]{32}-([0-9]{1,12})")
_WRITER = re.compile(r"([0-9]{8})\.json")


def _is_piece(name: object) -> bool:
    match = _PIECE.fullmatch(name) if isinstance(name, str) else None
    return match is not None and int(match[1]) <= MAX_PIECE_BYTES


class LostPlaceError(Exception):
    """Another start of the run writes to the address now."""


@dataclass(frozen=True)
class Piece:
    """A part of a file, and the object that holds it."""

    file: str
    offset: int
    object: str

    @property
    def nbytes(self) -> int:
        return int(self.object.partition("-")[2])

    @property
    def hash(self) -> str:
        return self.object.partition("-")[0]


@dataclass(frozen=True)
class Index:
    """A checkpoint: the objects that make up each file."""

    step: int
    files: dict[str, list[str]]

    def pieces(self) -> Iterator[Piece]:
        for name, objects in self.files.items():
            offset = 0
            for one in objects:
                piece = Piece(name, offset, one)
                yield piece
                offset += piece.nbytes

    def objects(self) -> set[str]:
        return {one for objects in self.files.values() for one in objects}

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces())

    def dump(self) -> bytes:
        tree = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return json.dumps({**tree, "checksum": manifest_checksum(tree)}).encode()

    @staticmethod
    def parse(content: bytes) -> "Index":
        """Raises `StorageError`: the same object may come whole when it is asked for again."""
        try:
            tree = parse_json(content, depth=MAX_DEPTH)
        except JsonError:
            tree = None
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise StorageError("it is not an index of a checkpoint")
        if tree.get("checksum") != manifest_checksum(tree):
            raise StorageError("its checksum does not match")
        if tree.get("version") != VERSION:
            raise StorageError(f"it has version {shown(tree.get('version'))}, this release reads {VERSION}", final=True)
        step, files = tree.get("step"), tree.get("files")
        if type(step) is not int or not 0 <= step <= MAX_STEP or not isinstance(files, dict):
            raise StorageError("it is not an index of a checkpoint", final=True)
        if not all(is_plain_name(name) for name in files):
            raise StorageError("it names a file outside its folder", final=True)
        if not all(isinstance(objects, list) and all(map(_is_piece, objects)) for objects in files.values()):
            raise StorageError("it names a piece outside its folder", final=True)
        return Index(step, files)


class RemoteCheckpoints:
    """Those of one run. Calls are tried again as in data/storage.py; then they raise `UserError`."""

    def __init__(self, address: str, name: str):
        """`name`: of the run folder."""
        self.address = f"{address.rstrip('/')}/{name}"
        self._store = open_store(self.address)

    def steps(self) -> list[int]:
        """Ascending."""
        return sorted(int(match[1]) for name in self._names("") if (match := _INDEX.fullmatch(name)))

    def index(self, step: int) -> Index:
        name = f"{name_of(step)}.json"

        def attempt() -> Index:
            index = Index.parse(self._store.get(name))
            if index.step != step:
                raise StorageError(f"it is the index of step {index.step:,}", final=True)
            return index

        return retry(attempt, f"cannot fetch '{self.address}/{name}'")

    def fetch_pieces(self, pieces: list[Piece], folder: Path, progress: Callable[[int], None]) -> None:
        """Into the files of a folder, which are there (`make_files`)."""

        def one(piece: Piece) -> None:
            content = fetch(self.address, self._store, f"pieces/{piece.object}", piece.nbytes, piece.hash)
            with (folder / piece.file).open("r+b") as file:
                file.seek(piece.offset)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            progress(piece.nbytes)

        for _ in in_parallel(one, pieces):
            pass

    def _names(self, folder: str) -> list[str]:
        return retry(lambda: self._store.names(folder), f"cannot list '{self.address}/{folder}'")

    def _delete(self, name: str) -> None:
        retry(lambda: self._store.delete(name), f"cannot delete '{self.address}/{name}'")


def make_files(index: Index, folder: Path) -> None:
    """Empty files in their size."""
    for name, objects in index.files.items():
        with (folder / name).open("wb") as file:
            file.truncate(sum(Piece(name, 0, one).nbytes for one in objects))


class RemoteWriter(RemoteCheckpoints):
    """Holds the place of the run: its newest start."""

    def __init__(self, address: str, name: str):
        super().__init__(address, name)
        self._hashed: dict[tuple[int, ...], list[str]] = {}
        """Objects of local files by inode, size and time: files of a chain are links, and read once."""
        self._there: set[str] = set()
        """Pieces of the checkpoints that are there."""
        self._number: int | None = None

    def take(self) -> None:
        """Become the start of the run that writes here. `check` does it if it was not done."""
        me = {"host": socket.gethostname(), "pid": os.getpid(), "token": secrets.token_hex(8)}
        content = json.dumps({**me, "since": datetime.now(UTC).isoformat(timespec="seconds")}).encode()
        while True:
            older = self._writers()
            number = older[-1] + 1 if older else 1
            if not self._create(_writer(number), content):
                continue  # another start was faster
            for one in older:
                self._delete(_writer(one))
            self._number = number
            return

    def _create(self, name: str, content: bytes) -> bool:
        def attempt() -> bool:
            created = self._store.create(name, content)
            if created and self._store.size(name) != len(content):
                raise StorageError(_FORGOTTEN)
            return created

        return retry(attempt, f"cannot write '{self.address}/{name}'")

    def _writers(self) -> list[int]:
        return sorted(int(match[1]) for name in self._names("writers") if (match := _WRITER.fullmatch(name)))

    def check(self) -> None:
        if self._number is None:
            self.take()
        assert self._number is not None
        newest = max(self._writers(), default=0)
        if newest < self._number:  # someone has cleared the address
            self.take()
        elif newest > self._number:
            raise LostPlaceError(f"another start of this run writes to '{self.address}'")

    def upload(self, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> tuple[int, int]:
        """A complete checkpoint: (its bytes, those that were not there). `progress`: bytes done, of how many."""
        manifest = Manifest.read(folder)
        names = [*manifest.files, FILE]
        sizes = {name: (folder / name).stat().st_size for name in names}
        files: dict[str, list[str]] = {}
        done = new = 0
        parts = []
        for name in names:
            known = self._hashed.get(_identity(folder / name))
            if known is not None and self._there.issuperset(known):
                files[name] = known
                done += sizes[name]
            else:
                files[name] = []
                parts += [(folder / name, offset) for offset in range(0, sizes[name], PIECE_BYTES)]
        for path, one, sent in in_parallel(self._send, parts):
            files[path.name].append(one)
            done, new = done + Piece(path.name, 0, one).nbytes, new + sent
            progress(done, sum(sizes.values()))
        index = Index(int(manifest.run["step"]), files)
        self.check()
        self._put(f"{name_of(index.step)}.json", index.dump())
        self._there |= index.objects()
        self._hashed = {_identity(folder / name): files[name] for name in names}
        return index.nbytes, new

    def _send(self, part: tuple[Path, int]) -> tuple[Path, str, int]:
        """Of a file from some offset on: (the file, the object, bytes sent)"""
        path, offset = part
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read(PIECE_BYTES)
        name = f"{xxhash.xxh128_hexdigest(content)}-{len(content)}"
        sent = name not in self._there and self._put(f"pieces/{name}", content, is_named_by_content=True)
        return path, name, len(content) if sent else 0

    def _put(self, name: str, content: bytes, is_named_by_content: bool = False) -> bool:
        """False: it is there. A server that loses what it has confirmed is found out."""

        def attempt() -> bool:
            if is_named_by_content and self._store.size(name) == len(content):
                return False
            self._store.put(name, content)
            if self._store.size(name) != len(content):
                raise StorageError(_FORGOTTEN)
            return True

        return retry(attempt, f"cannot write '{self.address}/{name}'")

    def expire(self, keep: int, keep_every: int, newest: int) -> None:
        """Retention as on disk. `newest`: the checkpoint of this run that stays in any case."""
        expired = [step for step in expired_steps(self.steps(), keep, keep_every) if step != newest]
        if expired:
            self._remove(expired)

    def clear(self) -> None:
        """Remove all checkpoints."""
        self._remove(self.steps())
        self.sweep()

    def sweep(self) -> None:
        """Remove pieces of no checkpoint, which uploads that broke off have left."""
        self._there = self._needed()
        self._delete_pieces([name for name in self._names("pieces") if name not in self._there])

    def _remove(self, steps: list[int]) -> None:
        """The index first: then there is no such checkpoint."""
        dropped: set[str] = set()
        for step in steps:
            with suppress(UserError, FileNotFoundError):  # it cannot be read: `sweep` finds its pieces
                dropped |= self.index(step).objects()
            self.check()
            self._delete(f"{name_of(step)}.json")
        needed = self._needed()
        self._delete_pieces(sorted(dropped - needed))
        self._there = needed

    def _delete_pieces(self, names: list[str]) -> None:
        for start in range(0, len(names), DELETES):
            self.check()
            for _ in in_parallel(lambda name: self._delete(f"pieces/{name}"), names[start : start + DELETES]):
                pass

    def _needed(self) -> set[str]:
        return {one for step in self.steps() for one in self.index(step).objects()}


def in_parallel(function: Callable[[T], R], items: list[T]) -> Iterator[R]:
    """The results in order. After a failure nothing more is begun."""
    threads = ThreadPoolExecutor(TRANSFERS, thread_name_prefix="transfer")
    try:
        yield from threads.map(function, items)
    finally:
        threads.shutdown(cancel_futures=True)


def _writer(number: int) -> str:
    return f"writers/{number:08d}.json"


def _identity(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
