"""Progress, tables and durations on the console.

`Progress` is for anything that takes more than two seconds: a tqdm bar on a terminal, and a plain line every few
seconds elsewhere (a log file, CI). `ByteProgress` prints plain lines between the output of a running job.
"""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from xgram_dist.errors import one_line

MAX_CELL = 400
"""Characters of a cell of a printed table."""


class Progress:
    """Work done so far, with rate and time left.

    `with Progress(total, "MB", "tokenising") as progress: progress.update(3.2, tokens=1200)`. `total` is None where it
    is not known; keyword arguments of `update` are shown as they are.
    """

    def __init__(self, total: float | None, unit: str, title: str, line_seconds: float = 5.0):
        self.total, self.unit, self.title = total, unit, title
        self.done = 0.0
        self.fields: dict[str, Any] = {}
        self._start = time.monotonic()
        self._line_seconds = line_seconds
        self._last_line = self._start
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit=unit, desc=title, unit_scale=True, dynamic_ncols=True, leave=False)

    def update(self, amount: float = 1.0, **fields: Any) -> None:
        self.done += amount
        self.fields.update(fields)
        if self._bar is not None:
            if fields:
                self._bar.set_postfix(self.fields, refresh=False)
            self._bar.update(amount)
        elif time.monotonic() - self._last_line >= self._line_seconds:
            self._last_line = time.monotonic()
            print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = self.done / seconds
        parts = [f"{self.title}: {self.done:,.0f}"]
        if self.total:
            parts[0] += f" of {self.total:,.0f} {self.unit} ({100 * self.done / self.total:.0f} %)"
        else:
            parts[0] += f" {self.unit}"
        parts.append(f"{rate:,.1f} {self.unit}/s")
        if self.total and rate > 0:
            parts.append(f"{format_duration(max(self.total - self.done, 0) / rate)} left")
        parts += [f"{key} {value}" for key, value in self.fields.items()]
        return ", ".join(parts)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


class ByteProgress:
    """A plain line every few seconds about bytes written or read in the background."""

    def __init__(self, title: str, line_seconds: float = 10.0):
        self.title, self._seconds = title, line_seconds
        self._start = self._last = time.monotonic()

    def update(self, done: int, total: int) -> None:
        """`done` of `total` bytes so far."""
        now = time.monotonic()
        if now - self._last < self._seconds or not done:
            return
        self._last = now
        rate = done / (now - self._start)
        print(
            f"{self.title}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB of this rank, {rate / 1e6:,.0f} MB/s, "
            f"{format_duration((total - done) / rate)} left",
            flush=True,
        )


def format_duration(seconds: float) -> str:
    """`42 s`, `3 m 05 s`, `2 h 10 m`, `3 d 04 h`."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def print_table(
    header: list[str],
    rows: list[list[str]],
    print_line: Callable[[str], None] = print,
    left: tuple[int, ...] = (0,),
) -> None:
    """Print a plain text table; the columns in `left` are aligned to the left, the others to the right. Cells may hold
    what somebody has put into a file: control characters are escaped."""
    cells = [[one_line(cell, MAX_CELL) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for index, row in enumerate(cells):
        columns = enumerate(zip(row, widths, strict=True))
        line = [cell.ljust(width) if i in left else cell.rjust(width) for i, (cell, width) in columns]
        print_line("  ".join(line).rstrip())
        if index == 0:
            print_line("  ".join("-" * width for width in widths))
