"""Atomic file writes, and `.npz` archives read with checks.

Writes go to a temporary file next to the target, are flushed to disk and renamed, so that a reader sees the old file
or the new one and never half of one.

`read_npz` is safe for files from anywhere: nothing is unpickled, an array is read only after its header agrees with
the bytes present, and every fault becomes a one-sentence `UserError`. `int_array`, `float_array` and `int_scalar`
check type and length of what was read.
"""

import contextlib
import itertools
import math
import os
import secrets
import shutil
import stat
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.errors import BadFileError, UserError
from xgram_dist.untrusted import open_file

Arrays = dict[str, NDArray[Any]]

MAX_NPZ_BYTES = 4 * 2**30
"""More than any vocabulary needs, and small enough to refuse a file built to exhaust memory."""

_PLAIN_KINDS = "biufU"
"""numpy kinds that are stored as plain bytes: booleans, integers, floats, text. Objects would need pickle."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content` (text as UTF-8); missing parent folders are created."""
    data = content.encode("utf-8") if isinstance(content, str) else content

    def write(stream: IO[bytes]) -> None:
        stream.write(data)

    replace_file(path, write)


def write_npz(path: str | Path, arrays: Mapping[str, NDArray[Any]], *, compressed: bool = False) -> None:
    """Replace `path` by an `.npz` archive. The same arrays give the same bytes."""
    assert all(array.dtype.kind in _PLAIN_KINDS for array in arrays.values()), "objects would be pickled"

    def write(stream: IO[bytes]) -> None:
        save = np.savez_compressed if compressed else np.savez
        save(stream, **arrays)  # type: ignore[arg-type]

    replace_file(Path(path), write)


def replace_file(path: Path, write: Callable[[IO[bytes]], None]) -> None:
    """Replace `path` by what `write` writes to a stream; missing parent folders are created."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with create_file(temporary) as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror or error}; choose another path") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def create_file(path: Path, mode: int = 0o666) -> IO[bytes]:
    """A new file to write, never one that is there and never through a link."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode), "wb")


def private_folder(path: Path) -> Path:
    """A folder of this user alone in a place that others can write to; one that is not is refused."""
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise UserError(
                f"'{path}' is not a folder of this user; set TMPDIR (or data.cache) to a folder of your own"
            )
        if found.st_mode & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror}; set TMPDIR to a folder of your own") from error
    return path


def set_aside(path: Path) -> Path:
    """Rename what stands at `path` to the first free `path.unreadable-N`; a link itself, not what it points to."""
    for number in itertools.count(1):
        aside = path.with_name(f"{path.name}.unreadable-{number}")
        if not os.path.lexists(aside):
            path.rename(aside)
            return aside
    raise AssertionError


def remove(path: Path) -> None:
    """Delete what stands at `path`, if anything does: a file, a folder, or a link itself."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make the rename survive a power cut. Best effort: some network file systems do not sync folders."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_npz(path: str | Path, what: str, names: set[str] | None = None) -> Arrays:
    """The arrays of an `.npz` file (only those in `names`, if given); `what` says in errors what the file should be."""
    path = Path(path)
    try:
        descriptor = open_file(path, follow=True)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; give the path of {what}") from None
    except BadFileError as error:
        raise UserError(f"{path} is not a file; give the path of {what}") from error
    try:
        with os.fdopen(descriptor, "rb") as file, zipfile.ZipFile(file) as archive:
            return _read_archive(archive, path, what, names)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); give the path of {what}") from error
    # Damaged or hostile bytes raise many exception types inside zipfile, zlib and numpy.
    except Exception as error:
        raise UserError(f"{path} is not {what}: it is not a readable .npz archive") from error


def _read_archive(archive: zipfile.ZipFile, path: Path, what: str, names: set[str] | None) -> Arrays:
    members = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name == member.filename or name in members:
            raise BadFileError(f"{path} is not {what}: '{member.filename}' is not one plain array")
        if names is None or name in names:
            members[name] = member
    total = sum(member.file_size for member in members.values())
    if total > MAX_NPZ_BYTES:
        raise BadFileError(f"{path} is not {what}: it unpacks to {total:,} bytes; the limit is {MAX_NPZ_BYTES:,}")
    return {name: _read_member(archive, member, path, what) for name, member in members.items()}


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path, what: str) -> NDArray[Any]:
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)  # type: ignore[no-untyped-call]
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, _, dtype = read_header(stream)  # type: ignore[no-untyped-call]
        if dtype.kind not in _PLAIN_KINDS or len(shape) > 1:
            raise BadFileError(
                f"{path} is not {what}: array '{member.filename}' has type {dtype} and {len(shape)} dimensions; "
                f"it must hold plain numbers or text in at most one dimension"
            )
        # The size in the header is checked against the bytes present before that much memory is allocated.
        num_bytes = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or num_bytes != member.file_size - stream.tell():
            raise BadFileError(f"{path} is not {what}: array '{member.filename}' is cut short or too long")
        data = stream.read(num_bytes)
        stream.read(1)  # reaching the end makes zipfile compare the checksum
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def int_array(
    arrays: Mapping[str, NDArray[Any]], name: str, path: str | Path, length: int | None = None
) -> NDArray[np.int64]:
    """Array `name` as one-dimensional int64; `length` values, if given."""
    array = arrays[name]
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise BadFileError(
            f"{path}: '{name}' has type {array.dtype} and {array.ndim} dimensions; it must list integers"
        )
    _check_length(array, name, path, length)
    if array.size and array.dtype == np.uint64 and int(array.max()) > np.iinfo(np.int64).max:
        raise BadFileError(f"{path}: '{name}' holds {array.max()}; the limit is {np.iinfo(np.int64).max}")
    return array.astype(np.int64)


def float_array(
    arrays: Mapping[str, NDArray[Any]], name: str, path: str | Path, length: int | None = None
) -> NDArray[np.float64]:
    """Array `name` as one-dimensional float64, all finite; `length` values, if given."""
    array = arrays[name]
    if array.dtype.kind != "f" or array.ndim != 1:
        raise BadFileError(f"{path}: '{name}' has type {array.dtype} and {array.ndim} dimensions; it must list floats")
    _check_length(array, name, path, length)
    finite = np.isfinite(array)
    if not finite.all():
        index = int(np.flatnonzero(~finite)[0])
        raise BadFileError(f"{path}: '{name}' holds {array[index]} at {index}; every value must be finite")
    return array.astype(np.float64)


def int_scalar(arrays: Mapping[str, NDArray[Any]], name: str, path: str | Path) -> int:
    """The single integer `name`."""
    array = arrays[name]
    if array.dtype.kind not in "iu" or array.size != 1:
        raise BadFileError(f"{path}: '{name}' has type {array.dtype} and {array.size} values; it must be one integer")
    return int(array.reshape(-1)[0])


def _check_length(array: NDArray[Any], name: str, path: str | Path, length: int | None) -> None:
    if length is not None and len(array) != length:
        raise BadFileError(f"{path}: '{name}' has {len(array):,} values; it must have {length:,}")


def process_start(pid: int) -> str | None:
    """Start time of a process; None if it is gone or a zombie. With the pid, it names one process of this boot."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] in "ZX" else fields[19]
