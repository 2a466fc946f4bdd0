"""Files that may come from anybody: opened, read and parsed with limits. Standard library only.

A file inside a folder that was copied or downloaded (a checkpoint, a data set, a run) is opened with `open_file`:
a regular file, never through a link, and without waiting for a fifo. A path that the user typed may be a link
(`follow=True`), for model hubs keep their files behind links. `read_file` bounds the bytes, `parse_json` the depth,
`check_name` keeps a name from a file inside its folder, `check_address` keeps credentials out of addresses. What is
wrong with a file is a `BadFileError`: one line, control characters escaped, cut to `errors.MAX_MESSAGE` characters.
Nothing here writes; `open_itself` is for those who do.
"""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

from xgram_dist.errors import BadFileError, UserError, one_line

MAX_JSON_BYTES = 256 << 20
"""Of any JSON file: the manifest of a checkpoint of some thousand ranks."""
MAX_JSON_DEPTH = 32
MAX_SHOWN = 60
"""Characters of a value that a message shows."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_OPENING = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a link",
}


class JsonError(ValueError):
    """Why a text is not JSON that this package reads; fit to be shown."""


def shown(value: object, limit: int = MAX_SHOWN) -> str:
    """A value from a file, for a message."""
    # A number of thousands of digits cannot be written out, and a nested list is not worth it.
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return "a number of more than 70 digits"
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value):,}"
    if isinstance(value, str) and len(value) > limit:
        value = value[: limit - 3] + "..."
    return one_line(repr(value), limit + 2)


def open_file(path: Path, *, follow: bool = False, error: type[BadFileError] = BadFileError) -> int:
    """A descriptor of a regular file; FileNotFoundError is left to the caller. `follow`: the path may be a link."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        kind = stat.S_IFMT((os.stat if follow else os.lstat)(path).st_mode)
        if kind != stat.S_IFREG:  # not opened at all: opening some devices has effects
            _refuse_kind(path, kind, error)
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        if path.is_symlink():
            raise error(f"'{path}' is a link to a file that is missing; put the file in its place") from None
        raise
    except ValueError:  # a NUL in the path, or half of a surrogate pair
        raise error(f"'{path}' cannot be the name of a file") from None
    except OSError as fault:
        raise error(f"cannot read '{path}': {fault.strerror}") from fault
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:  # replaced in between
        os.close(descriptor)
        _refuse_kind(path, kind, error)
    return descriptor


def _refuse_kind(path: Path, kind: int, error: type[BadFileError]) -> NoReturn:
    raise error(f"'{path}' is {_KINDS.get(kind, 'no file')}, not a regular file; put the file itself in its place")


def open_itself(path: str, flags: int) -> int:
    """The opener of a file to write in a folder that may have come from anybody: not what a link points to, and
    without waiting for the reader of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def read_file(
    path: Path,
    *,
    limit: int = MAX_JSON_BYTES,
    follow: bool = False,
    error: type[BadFileError] = BadFileError,
) -> bytes:
    """All of a regular file of at most `limit` bytes; FileNotFoundError is left to the caller."""
    with os.fdopen(open_file(path, follow=follow, error=error), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise error(f"'{path}' has {size:,} bytes, the limit is {limit:,}; it is not what it should be")
        try:
            return file.read(limit)
        except OSError as fault:
            raise error(f"cannot read '{path}': {fault.strerror}") from fault


def parse_json(data: bytes, *, depth: int | None = MAX_JSON_DEPTH) -> Any:
    """JSON in UTF-8 with finite numbers and whole characters, at most `depth` levels deep (None: as Python's parser
    allows); else a JsonError."""
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise JsonError(f"it is nested deeper than {depth or 'some hundred'} levels") from None
    except UnicodeDecodeError as error:
        raise JsonError(f"byte {error.start} is not UTF-8") from None
    except JsonError:
        raise
    except ValueError as error:
        raise JsonError(one_line(str(error), 100)) from None
    if depth is not None:
        _check_depth(text, depth)
    if "\\ud" in text or "\\uD" in text:
        _check_characters(value)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise JsonError(f"the number {one_line(text, 40)} is too large")
    return value


def _check_depth(text: str, limit: int) -> None:
    if text.count("[") + text.count("{") <= limit:
        return
    level = 0
    for match in _OPENING.finditer(text):
        level += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if level > limit:
            raise JsonError(f"it is nested deeper than {limit} levels")


def _check_characters(value: Any) -> None:
    """Half of a surrogate pair cannot be written or printed."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise JsonError("it holds half of a character") from None


def read_json(
    path: Path,
    *,
    limit: int = MAX_JSON_BYTES,
    depth: int = MAX_JSON_DEPTH,
    follow: bool = False,
    error: type[BadFileError] = BadFileError,
) -> Any:
    """The value of a JSON file; FileNotFoundError is left to the caller."""
    data = read_file(path, limit=limit, follow=follow, error=error)
    try:
        return parse_json(data, depth=depth)
    except JsonError as fault:
        raise error(f"'{path}' is not valid JSON: {fault}") from None


def is_plain_name(name: object) -> bool:
    """Whether a name from a file is one component that stays in its folder."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_name(path: Path, name: object, error: type[BadFileError] = BadFileError) -> str:
    """A file name that the file at `path` gives."""
    if not isinstance(name, str) or not is_plain_name(name):
        raise error(f"'{path}' names a file {shown(name)}, which is not a plain name: it could lie outside its folder")
    return name


def check_address(address: str) -> None:
    """Before an address is written or shown anywhere. A secret may hold a slash, so that a colon is all that is left of
    it before the first one; no bucket has a colon."""
    scheme, found, rest = address.partition("://")
    host = rest.partition("/")[0]
    if found and scheme not in ("abfs", "abfss", "sftp") and ("@" in host or (":" in host and "@" in rest)):
        raise UserError(f"an address of '{scheme}://' must not hold credentials; set them in the environment instead")
