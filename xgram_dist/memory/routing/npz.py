"""Reading and writing `.npz` files of plain arrays.

Reading is for files of strangers: nothing is unpickled, an array is read only after its header agrees with the
bytes that are there, and whatever is wrong with the file becomes one sentence. Writing is aside, flushed to disk and
renamed, so that a reader sees the old file or the new one and never half of one.
"""

import contextlib
import math
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.errors import UserError

Arrays = dict[str, NDArray[Any]]

# More than any vocabulary needs, and small enough that a file made to exhaust memory is turned away.
MAX_BYTES = 4 * 2**30

# Truth values, integers, floats and text; no objects (they would need pickle), no records.
_PLAIN_KINDS = "biufU"


def read_arrays(path: str | Path, what: str, names: set[str] | None = None) -> Arrays:
    """The arrays of an `.npz` file (only those in `names`, when given); `what` is what the file should be."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"there is no file {path}; give the path of {what}")
    if not path.is_file():
        raise UserError(f"{path} is not a file; give the path of {what}")
    try:
        with zipfile.ZipFile(path) as archive:
            return _read_archive(archive, path, what, names)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); give the path of {what}") from error
    # What broken or hostile bytes can raise inside zipfile, zlib and numpy is not one exception type.
    except Exception as error:
        raise UserError(f"{path} is not {what}: it is not a readable .npz archive") from error


def _read_archive(archive: zipfile.ZipFile, path: Path, what: str, names: set[str] | None) -> Arrays:
    members = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        if name == member.filename or name in members:
            raise UserError(f"{path} is not {what}: '{member.filename}' is not one plain array")
        if names is None or name in names:
            members[name] = member
    total = sum(member.file_size for member in members.values())
    if total > MAX_BYTES:
        raise UserError(f"{path} is not {what}: it unpacks to {total:,} bytes; the limit is {MAX_BYTES:,}")
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
            raise UserError(
                f"{path} is not {what}: array '{member.filename}' has type {dtype} and {len(shape)} dimensions; "
                f"it must hold plain numbers or text in at most one dimension"
            )
        # The header's promise is checked against the bytes present before anything of that size is allocated.
        num_bytes = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or num_bytes != member.file_size - stream.tell():
            raise UserError(f"{path} is not {what}: array '{member.filename}' is cut short or too long")
        data = stream.read(num_bytes)
        stream.read(1)  # reaching the end makes zipfile compare the checksum
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def write_arrays(path: str | Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write an `.npz` file: aside, flushed, renamed. The same arrays give the same bytes."""
    assert all(array.dtype.kind in _PLAIN_KINDS for array in arrays.values()), "objects would be pickled"
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(aside, "wb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(aside, path)
        _flush_folder(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror or error}); choose another place") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut; some network file systems refuse, and then it is best effort."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def integers(
    arrays: Mapping[str, NDArray[Any]], name: str, path: str | Path, length: int | None = None
) -> NDArray[np.int64]:
    """Array `name` as int64, one-dimensional, of `length` when given."""
    array = arrays[name]
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise UserError(f"{path}: '{name}' has type {array.dtype} and {array.ndim} dimensions; it must list integers")
    _check_length(array, name, path, length)
    if array.size and array.dtype == np.uint64 and int(array.max()) > np.iinfo(np.int64).max:
        raise UserError(f"{path}: '{name}' holds {array.max()}; the limit is {np.iinfo(np.int64).max}")
    return array.astype(np.int64)


def floats(
    arrays: Mapping[str, NDArray[Any]], name: str, path: str | Path, length: int | None = None
) -> NDArray[np.float64]:
    """Array `name` as float64, one-dimensional, finite, of `length` when given."""
    array = arrays[name]
    if array.dtype.kind != "f" or array.ndim != 1:
        raise UserError(f"{path}: '{name}' has type {array.dtype} and {array.ndim} dimensions; it must list floats")
    _check_length(array, name, path, length)
    finite = np.isfinite(array)
    if not finite.all():
        place = int(np.flatnonzero(~finite)[0])
        raise UserError(f"{path}: '{name}' holds {array[place]} at {place}; every value must be finite")
    return array.astype(np.float64)


def whole_number(arrays: Mapping[str, NDArray[Any]], name: str, path: str | Path) -> int:
    """The single integer `name`."""
    array = arrays[name]
    if array.dtype.kind not in "iu" or array.size != 1:
        raise UserError(f"{path}: '{name}' has type {array.dtype} and {array.size} values; it must be one integer")
    return int(array.reshape(-1)[0])


def _check_length(array: NDArray[Any], name: str, path: str | Path, length: int | None) -> None:
    if length is not None and len(array) != length:
        raise UserError(f"{path}: '{name}' has {len(array):,} values; it must have {length:,}")
