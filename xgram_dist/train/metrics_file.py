"""The one reader of metrics.jsonl: of a run that was killed, copied, or edited by hand.

A record is a JSON object with `kind` and `step` (train/metrics.py writes them). A line that is none is left out and
counted. No torch.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xgram_dist.errors import BadFileError
from xgram_dist.untrusted import JsonError, open_file, parse_json

FILE = "metrics.jsonl"
MAX_LINE_BYTES = 1 << 20
MAX_RECORD_DEPTH = 8
MAX_STEP = 10**12
MAX_NUMBER = 1e300
"""Sums of such numbers are still finite."""
REQUIRED_FIELDS = {"train": ("cross_entropy", "tokens_per_second"), "validation": ("loss", "perplexity")}
"""Of a record, by its kind: numbers, or null where they were not finite."""

Record = dict[str, Any]


@dataclass
class MetricsFile:
    records: list[Record] = field(default_factory=list)
    unreadable: int = 0
    """Lines that are no records. The last line of a run that is writing it does not count."""

    def complaint(self, path: Path) -> str | None:
        if not self.unreadable:
            return None
        return f"'{path}': {self.unreadable:,} line(s) are no metrics records and are left out"


def parse_record(line: bytes) -> Record | None:
    """None: the line is no record."""
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        record = parse_json(line, depth=MAX_RECORD_DEPTH)
    except JsonError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= MAX_STEP:
        return None
    if any(isinstance(value, int | float) and not abs(value) <= MAX_NUMBER for value in record.values()):
        return None
    required = REQUIRED_FIELDS.get(record["kind"], ())
    if any(key not in record or (record[key] is not None and number(record, key) is None) for key in required):
        return None
    if record["kind"] == "stragglers" and not _names_stragglers(record):
        return None
    return record


def _names_stragglers(record: Record) -> bool:
    """As train/stragglers.py writes them."""
    phases, nodes = record.get("phases") or {}, record.get("nodes") or {}
    if not isinstance(phases, dict) or not isinstance(nodes, dict):
        return False
    ranks = [record.get("straggler"), *phases.values()]
    slowest = [*ranks, *nodes.values()]
    return (
        all(isinstance(one, dict) and isinstance(one.get("node"), str) for one in slowest)
        and all(_is_seconds(one.get(key)) for one in slowest for key in ("seconds", "median"))
        and all(type(one.get("rank")) is int and abs(one["rank"]) <= MAX_NUMBER for one in ranks)
    )


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_NUMBER


def number(record: Record, key: str) -> float | int | None:
    """A value of a record, if it is a number."""
    value = record.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None


def read_lines(path: Path, tail: int | None = None) -> Iterator[bytes]:
    """The lines with their ends, in pieces of at most `MAX_LINE_BYTES` + 1; only the last `tail` bytes, if given."""
    with os.fdopen(open_file(path), "rb") as file:
        if tail is not None and (size := os.fstat(file.fileno()).st_size) > tail:
            file.seek(size - tail)
        try:
            while line := file.readline(MAX_LINE_BYTES + 1):
                yield line
        except OSError as error:
            raise BadFileError(f"cannot read '{path}': {error.strerror}") from error


def read_metrics(path: Path, tail: int | None = None) -> MetricsFile:
    """The records of a file in order; FileNotFoundError is left to the caller."""
    found = MetricsFile()
    for number_of_line, line in enumerate(read_lines(path, tail)):
        record = parse_record(line) if line.endswith(b"\n") else None
        if record is not None:
            found.records.append(record)
        elif line.endswith(b"\n") and not (tail is not None and number_of_line == 0):
            found.unreadable += 1  # else: cut at its beginning by `tail`, or the run is writing it
    return found
