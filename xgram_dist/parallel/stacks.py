"""Python stacks of every rank of a run, on request: what each is doing now.

    RUN/stacks/request        written by `xgram-dist status RUN --stacks`, or by a rank that waits for long
    RUN/stacks/rank-3.txt     the answer of rank 3: host, process, step, phase, then the stacks of all its threads

Ranks look at the request every POLL_SECONDS, in the watchdog's thread. Files instead of signals: they reach every node
that has the run folder.
"""

import faulthandler
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from xgram_dist.errors import BadFileError, one_line
from xgram_dist.untrusted import read_file

REQUEST = "request"
MAX_BYTES, MAX_LINE = 16 << 20, 500
"""Of an answer, and of the characters of a line of it."""
POLL_SECONDS = 1.0


class StackDumps:
    """Of one rank: answers requests."""

    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank = folder, rank
        self._answered = self._requested()

    def request(self) -> None:
        """All ranks dump their stacks, this one too. Best effort: it is for people who look for a fault."""
        with suppress(OSError):
            request_stacks(self.folder)

    def answer(self, doing: str) -> None:
        """Write this rank's stacks if they have been requested since the last call. `doing`: its step and phase."""
        requested = self._requested()
        if requested == self._answered:
            return
        self._answered = requested
        temporary = self.folder / f".rank-{self.rank}.{os.getpid()}.part"
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
            with temporary.open("x", encoding="utf-8") as file:
                now = time.strftime("%Y-%m-%d %H:%M:%S")
                file.write(f"rank {self.rank} on {socket.gethostname()}, process {os.getpid()}, {now}: {doing}\n")
                file.flush()
                faulthandler.dump_traceback(file=file)
            temporary.rename(self.folder / f"rank-{self.rank}.txt")

    def _requested(self) -> int | None:
        try:
            return (self.folder / REQUEST).stat().st_mtime_ns
        except OSError:
            return None


def request_stacks(folder: Path) -> int:
    """The time of the request, by the clock of the file system."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / REQUEST
    with suppress(FileNotFoundError):
        path.unlink()  # a link is not followed
    path.touch(exist_ok=False)
    return path.stat().st_mtime_ns


def collect_stacks(folder: Path, ranks: int, seconds: float) -> dict[int, str]:
    """Request the stacks of all ranks; what has been written after `seconds`, or as soon as all have answered."""
    requested, end, found = request_stacks(folder), time.monotonic() + seconds, dict[int, str]()
    while len(found) < ranks and time.monotonic() < end:
        time.sleep(0.1)
        found = read_stacks(folder, requested)
    return found


def read_stacks(folder: Path, since: int = 0) -> dict[int, str]:
    """By rank: those written after `since`."""
    found = {}
    for path in folder.glob("rank-*.txt"):
        rank = path.stem.removeprefix("rank-")
        with suppress(OSError, BadFileError):
            if rank.isascii() and rank.isdigit() and len(rank) < 10 and path.stat().st_mtime_ns >= since:
                text = read_file(path, limit=MAX_BYTES).decode(errors="replace")
                found[int(rank)] = "\n".join(one_line(line, MAX_LINE) for line in text.splitlines())
    return dict(sorted(found.items()))
