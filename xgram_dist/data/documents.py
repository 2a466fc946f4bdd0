"""Documents of a source: files in, texts (or the reason a line was rejected) out.

In: a file or a folder (any depth) of `.json.gz`, `.jsonl.gz`, `.json.zst`, `.jsonl.zst`, `.jsonl.zstd`,
`.json.zstd`, `.jsonl` or `.parquet`. Only the field `text` matters. Out: for every line either a `Document` or a
`Rejection`, in file order, with bounded memory for files of any size. No content of a file stops the reading: a line
that cannot be read is a rejection with its file and line number.

A file can be read in parts: part i of n reads every n-th block of lines. Several processes can so share one large
file, and the result depends on the file alone.
"""

import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson
import zstandard

from xgram_dist.errors import UserError

GZIP_ENDINGS = (".json.gz", ".jsonl.gz")
ZSTD_ENDINGS = (".json.zst", ".jsonl.zst", ".json.zstd", ".jsonl.zstd")
PLAIN_ENDINGS = (".jsonl",)
PARQUET_ENDINGS = (".parquet",)
ENDINGS = GZIP_ENDINGS + ZSTD_ENDINGS + PLAIN_ENDINGS + PARQUET_ENDINGS

BLOCK_LINES = 64  # lines that stay together when a file is read in parts
MAX_LINE_BYTES = 256 << 20
_READ_BYTES = 1 << 18
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# Reasons of a rejection, as they appear in the summary.
BROKEN = "broken JSON"
MISSING = "missing text"
NOT_TEXT = "text is not a string"
EMPTY = "empty text"
INVALID = "invalid UTF-8"
TOO_LONG = "line too long"
TRUNCATED = "truncated archive"
DAMAGED = "damaged file"


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Rejection:
    reason: str
    file: str
    line: int  # from 1; the row of a parquet file
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


def find_files(path: Path) -> list[Path]:
    """Every readable file of a source, sorted by its path inside the source."""
    if path.is_file():
        if not path.name.endswith(ENDINGS):
            raise UserError(f"'{path}' is not a document file; its name must end in one of {', '.join(ENDINGS)}")
        return [path]
    if not path.is_dir():
        raise UserError(f"source '{path}' does not exist; give a folder or a file")
    paths: list[Path] = []
    for folder, names, files in os.walk(path, followlinks=False):
        names[:] = [name for name in names if not name.startswith(".")]
        paths += [Path(folder, name) for name in files if name.endswith(ENDINGS) and not name.startswith(".")]
    if not paths:
        raise UserError(f"source '{path}' holds no document file; names must end in one of {', '.join(ENDINGS)}")
    return sorted(paths, key=lambda file: file.relative_to(path).as_posix())


def estimated_text_bytes(path: Path) -> int:
    """An estimate from name and size, to split the work evenly: archives unpack to about four times their size."""
    size = path.stat().st_size
    return size if path.name.endswith(PLAIN_ENDINGS) else 4 * size


def read_documents(
    path: Path, part: int = 0, parts: int = 1, report_bytes: Callable[[int], None] | None = None
) -> Iterator[Document | Rejection]:
    """Part `part` of `parts` of one file; `report_bytes(position)` is called with the current offset in the file."""
    assert 0 <= part < parts
    report = report_bytes or (lambda position: None)
    try:
        if path.name.endswith(PARQUET_ENDINGS):
            yield from _read_parquet(path, part, parts, report)
        else:
            yield from _read_lines(path, part, parts, report)
    except PermissionError as error:
        raise UserError(f"cannot read '{path}': {error.strerror}") from error


class _ZstdStream(io.RawIOBase):
    """The frames of a zstd file as one stream. Unlike zstandard's own reader it detects a file cut off in a frame."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame: Any = None
        self._pending = b""  # compressed bytes that follow the last frame
        self._decompressed = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self._decompressed:
            data = self._pending or self._file.read(1 << 16)
            self._pending = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("the file ends within a zstd frame")
                return 0
            if self._frame is None:
                self._frame = self._context.decompressobj()
            self._decompressed = memoryview(self._frame.decompress(data))
            if self._frame.eof:
                self._pending = self._frame.unused_data
                self._frame = None
        count = min(len(target), len(self._decompressed))
        target[:count] = self._decompressed[:count]
        self._decompressed = self._decompressed[count:]
        return count


def _open_stream(path: Path, file: IO[bytes]) -> IO[bytes]:
    if path.name.endswith(GZIP_ENDINGS):
        return io.BufferedReader(gzip.GzipFile(fileobj=file), _READ_BYTES)  # type: ignore[arg-type]
    if path.name.endswith(ZSTD_ENDINGS):
        return io.BufferedReader(_ZstdStream(file), _READ_BYTES)
    return file


def _read_lines(path: Path, part: int, parts: int, report: Callable[[int], None]) -> Iterator[Document | Rejection]:
    number = 0
    with open(path, "rb", buffering=_READ_BYTES) as file:
        stream = _open_stream(path, file)
        try:
            while True:
                line = stream.readline(MAX_LINE_BYTES)
                if not line:
                    break
                number += 1
                in_part = parts == 1 or (number - 1) // BLOCK_LINES % parts == part
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    while line and not line.endswith(b"\n"):
                        line = stream.readline(MAX_LINE_BYTES)
                    if in_part:
                        yield Rejection(TOO_LONG, str(path), number, f"more than {MAX_LINE_BYTES:,} bytes")
                    continue
                if number % BLOCK_LINES == 0:
                    report(file.tell())
                if in_part:
                    item = parse_line(line, str(path), number)
                    if item is not None:
                        yield item
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError, OSError) as error:
            if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
                raise UserError(f"cannot read '{path}' at line {number + 1}: {error}") from error
            # Every part sees the error; the part of the line after the last good one reports it.
            if number // BLOCK_LINES % parts == part:
                reason = TRUNCATED if isinstance(error, EOFError) else DAMAGED
                yield Rejection(reason, str(path), number + 1, str(error))


def parse_line(line: bytes, file: str, number: int) -> Document | Rejection | None:
    """One line of JSON; None for a blank line, which is neither a document nor rejected."""
    if number == 1 and line.startswith(_BYTE_ORDER_MARK):
        line = line[len(_BYTE_ORDER_MARK) :]
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if not line.strip():
            return None
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as reason:
            return Rejection(INVALID, file, number, f"byte {reason.start}")
        return Rejection(BROKEN, file, number, str(error))
    if not isinstance(record, dict):
        return Rejection(BROKEN, file, number, "not an object")
    return _document(record.get("text"), file, number)


def _document(text: Any, file: str, number: int) -> Document | Rejection:
    if text is None:
        return Rejection(MISSING, file, number)
    if not isinstance(text, str):
        return Rejection(NOT_TEXT, file, number, type(text).__name__)
    if not text or text.isspace():
        return Rejection(EMPTY, file, number)
    return Document(text, number)


def _read_parquet(path: Path, part: int, parts: int, report: Callable[[int], None]) -> Iterator[Document | Rejection]:
    import pyarrow
    import pyarrow.parquet

    size = path.stat().st_size
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            rows = max(table.metadata.num_rows, 1)
            if "text" not in table.schema_arrow.names:
                for number in range(1, table.metadata.num_rows + 1):
                    if (number - 1) // BLOCK_LINES % parts == part:
                        yield Rejection(MISSING, str(path), number, "no column 'text'")
                return
            for batch in table.iter_batches(batch_size=BLOCK_LINES, columns=["text"], use_threads=False):
                values = _values(batch.column(0))
                # A batch may end early at the end of a row group, so parts are split by row number.
                for value in values:
                    number += 1
                    if (number - 1) // BLOCK_LINES % parts == part:
                        yield _from_parquet(value, str(path), number)
                report(size * number // rows)
    except (pyarrow.ArrowException, OSError, EOFError) as error:
        if isinstance(error, PermissionError):
            raise
        if number // BLOCK_LINES % parts == part:
            yield Rejection(DAMAGED, str(path), number + 1, str(error).splitlines()[0][:200])


def _values(column: Any) -> list[Any]:
    """A column as Python values; strings as bytes, because Arrow does not validate UTF-8."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pyarrow.types.is_string(column.type):
        column = column.view(pyarrow.binary())
    elif pyarrow.types.is_large_string(column.type):
        column = column.view(pyarrow.large_binary())
    result: list[Any] = column.to_pylist()
    return result


def _from_parquet(value: Any, file: str, number: int) -> Document | Rejection:
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as reason:
            return Rejection(INVALID, file, number, f"byte {reason.start}")
    return _document(value, file, number)
