"""Documents of a source: files in, texts (or the reason a line was rejected) out.

In: a file or a folder (any depth) of `.json.gz`, `.jsonl.gz`, `.json.zst`, `.jsonl.zst`, `.jsonl.zstd`,
`.json.zstd`, `.jsonl` or `.parquet`. Only the field `text` matters. Out: for every line either a `Document` or a
`Rejection`, in file order, with bounded memory for files of any size. No content of a file stops the reading: a line
that cannot be read is a rejection with its file and line number.

A file can be read in parts: part i of n reads every n-th block of lines. Several processes can so share one large
file, and the result depends on the file alone.
"""

import os
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson
import zstandard
from isal import isal_zlib

from xgram_dist.errors import UserError, optional_package
from xgram_dist.untrusted import open_file

GZIP_ENDINGS = (".json.gz", ".jsonl.gz")
ZSTD_ENDINGS = (".json.zst", ".jsonl.zst", ".json.zstd", ".jsonl.zstd")
PLAIN_ENDINGS = (".jsonl",)
PARQUET_ENDINGS = (".parquet",)
ENDINGS = GZIP_ENDINGS + ZSTD_ENDINGS + PLAIN_ENDINGS + PARQUET_ENDINGS

BLOCK_LINES = 64  # lines that stay together when a file is read in parts
MAX_LINE_BYTES = 256 << 20
_READ_BYTES = 1 << 19
# What is fed to a decompressor at a time bounds what comes out of it: gzip unpacks to 1,032 times the size at most, and
# zstd to 128 KiB for every 4 bytes.
_GZIP_READ_BYTES, _ZSTD_READ_BYTES = 1 << 16, 1 << 12
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_FAULTS: tuple[type[Exception], ...] = (EOFError, isal_zlib.error, zstandard.ZstdError, OSError)  # type: ignore[assignment]

# Reasons of a rejection, as they appear in the summary.
BROKEN = "broken JSON"
MISSING = "missing text"
NOT_TEXT = "text is not a string"
EMPTY = "empty text"
INVALID = "invalid UTF-8"
TOO_LONG = "line too long"
TRUNCATED = "truncated archive"
DAMAGED = "damaged file"


class Document(NamedTuple):
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
    for file in paths:
        os.close(open_file(file, follow=True))  # a named pipe would be waited for, and a device never ends
    return sorted(paths, key=lambda file: file.relative_to(path).as_posix())


def estimated_text_bytes(path: Path) -> int:
    """An estimate from name and size, to split the work evenly: archives unpack to about four times their size."""
    size = path.stat().st_size
    return size if path.name.endswith(PLAIN_ENDINGS) else 4 * size


class Block(NamedTuple):
    """Up to `BLOCK_LINES` consecutive lines of a file, all of one part."""

    part: int
    items: list[Document | Rejection]


def read_documents(path: Path, part: int = 0, parts: int = 1) -> Iterator[Document | Rejection]:
    """Part `part` of `parts` of one file."""
    assert 0 <= part < parts
    for block in read_blocks(path, parts, {part}):
        yield from block.items


def read_blocks(
    path: Path, parts: int, wanted: Container[int], report_bytes: Callable[[int], None] | None = None
) -> Iterator[Block]:
    """The blocks of the `wanted` parts of one file, in file order, in one pass over it.

    `report_bytes(position)` is called with the current offset in the file.
    """
    report = report_bytes or (lambda position: None)
    try:
        if path.name.endswith(PARQUET_ENDINGS):
            yield from _read_parquet(path, parts, wanted, report)
        else:
            yield from _read_lines(path, parts, wanted, report)
    except PermissionError as error:
        raise UserError(f"cannot read '{path}': {error.strerror}") from error


def _decompressed(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """The content of a file in pieces of some hundred kilobytes."""
    if path.name.endswith(GZIP_ENDINGS):
        yield from _frames(file, lambda: isal_zlib.decompressobj(wbits=31), _GZIP_READ_BYTES, padding=b"\0")
    elif path.name.endswith(ZSTD_ENDINGS):
        yield from _frames(file, zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj, _ZSTD_READ_BYTES)
    else:
        while data := file.read(_READ_BYTES):
            yield data


def _frames(file: IO[bytes], open_frame: Callable[[], Any], read_bytes: int, padding: bytes = b"") -> Iterator[bytes]:
    """The frames of an archive, one after the other. Unlike the libraries' own readers it gives all that can be read
    of a file that is cut off, and then says so."""
    frame: Any = None
    while data := file.read(read_bytes):
        while data:
            if frame is None:
                data = data.lstrip(padding) if padding else data
                if not data:
                    break
                frame = open_frame()
            decompressed = frame.decompress(data)
            data = b""
            if frame.eof:
                data = frame.unused_data
                frame = None
            if decompressed:
                yield decompressed
    if frame is not None:
        raise EOFError("the file ends within a compressed frame")


def _lines(pieces: Iterator[bytes]) -> Iterator[list[bytes | None]]:
    """Lists of whole lines, without their ends; None stands for a line of `MAX_LINE_BYTES` or more."""
    open_line: list[bytes] = []  # pieces of the line that is not complete
    size = 0
    for piece in pieces:
        lines: list[bytes | None] = list(piece.split(b"\n"))
        last = lines.pop()
        assert last is not None
        if lines:
            first = lines[0]
            assert first is not None
            if size + len(first) >= MAX_LINE_BYTES:
                lines[0] = None
            elif open_line:
                lines[0] = b"".join((*open_line, first))
            open_line, size = [], 0
            yield [None if line is not None and len(line) >= MAX_LINE_BYTES else line for line in lines]
        size += len(last)
        if size >= MAX_LINE_BYTES:
            open_line = []  # too long: its bytes are not kept
        elif last:
            open_line.append(last)
    if size:
        yield [None if size >= MAX_LINE_BYTES else b"".join(open_line)]


def _read_lines(path: Path, parts: int, wanted: Container[int], report: Callable[[int], None]) -> Iterator[Block]:
    name = str(path)
    number = 0
    block = Block(0, [])
    with os.fdopen(open_file(path, follow=True), "rb", buffering=_READ_BYTES // 4) as file:
        try:
            for lines in _lines(_decompressed(path, file)):
                report(file.tell())
                for line in lines:
                    if number % BLOCK_LINES == 0:
                        if block.items:
                            yield block
                        block = Block(number // BLOCK_LINES % parts, [])
                        in_part = block.part in wanted
                    number += 1
                    if not in_part:
                        continue
                    if line is None:
                        item: Document | Rejection | None = Rejection(
                            TOO_LONG, name, number, f"more than {MAX_LINE_BYTES:,} bytes"
                        )
                    else:
                        item = parse_line(line, name, number)
                    if item is not None:
                        block.items.append(item)
        except _FAULTS as error:
            if isinstance(error, OSError):
                raise UserError(f"cannot read '{path}' at line {number + 1}: {error}") from error
            # Every part sees the error; the part of the line after the last good one reports it.
            part = number // BLOCK_LINES % parts
            if part in wanted:
                if part != block.part or number % BLOCK_LINES == 0:
                    yield block
                    block = Block(part, [])
                reason = TRUNCATED if isinstance(error, EOFError) else DAMAGED
                block.items.append(Rejection(reason, name, number + 1, str(error)))
    if block.items:
        yield block


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


def _read_parquet(path: Path, parts: int, wanted: Container[int], report: Callable[[int], None]) -> Iterator[Block]:
    with optional_package("a file of documents in Parquet", "parquet"):
        import pyarrow
        import pyarrow.parquet

    size, name = path.stat().st_size, str(path)
    number = 0
    block = Block(0, [])
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=_READ_BYTES) as table:
            rows = max(table.metadata.num_rows, 1)
            # A batch may end early at the end of a row group, so parts are split by row number.
            for values in _parquet_values(table):
                for value in values:
                    if number % BLOCK_LINES == 0:
                        if block.items:
                            yield block
                        block = Block(number // BLOCK_LINES % parts, [])
                    number += 1
                    if block.part in wanted:
                        block.items.append(_from_parquet(value, name, number))
                report(size * number // rows)
    except (pyarrow.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:  # names of columns, too
        if isinstance(error, PermissionError):
            raise
        part = number // BLOCK_LINES % parts
        if part in wanted:
            yield block
            block = Block(part, [Rejection(DAMAGED, name, number + 1, str(error).splitlines()[0][:200])])
    if block.items:
        yield block


class _NoColumn:
    """In place of the values of a table without a column `text`."""


def _parquet_values(table: Any) -> Iterator[list[Any]]:
    """The column `text` in batches; no other column is read."""
    if "text" not in table.schema_arrow.names:
        for _ in range(table.metadata.num_rows):
            yield [_NoColumn]
        return
    for batch in table.iter_batches(batch_size=BLOCK_LINES, columns=["text"], use_threads=False):
        yield _values(batch.column(0))


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
    if value is _NoColumn:
        return Rejection(MISSING, file, number, "no column 'text'")
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as reason:
            return Rejection(INVALID, file, number, f"byte {reason.start}")
    return _document(value, file, number)
