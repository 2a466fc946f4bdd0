"""Ctrl-C, SIGTERM and SIGUSR1 end a run after the current step, with a checkpoint.

A scheduler may signal more than once (Slurm sends SIGUSR1 some time before the limit and SIGTERM at it; some launchers
send each signal twice). Repeated signals are ignored, so that they cannot interrupt the final save. Only a second
Ctrl-C ends the run at once. A signal may also be lost: a container or a shell around the rank takes it, or ends on it.
So a job's first process writes into a file, which the first rank looks at, and answers there.
"""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from xgram_dist.errors import BadFileError
from xgram_dist.untrusted import open_itself, read_file

POLL_SECONDS = 0.5
ASKED, ANSWER = "stop", "stopping"
"""What the file holds."""
MAX_BYTES = 100


class StopRequest:
    """A context in which the signals are caught. `signal` is the last one received, or None."""

    def __init__(self, file: str | None = None) -> None:
        """`file`: what asks as a signal does once it holds ASKED."""
        self.signal: int | None = None
        self._file = None if file is None else Path(file)
        self._ended = threading.Event()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, self._handle)
        if self._file is not None:
            threading.Thread(target=self._watch, args=(self._file,), name="stop file", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _watch(self, file: Path) -> None:
        while not self._ended.wait(POLL_SECONDS):
            with suppress(OSError, BadFileError):
                if read_file(file, limit=MAX_BYTES) == ASKED.encode():
                    self._handle(signal.SIGUSR1, None)
                    with open(file, "w", encoding="utf-8", opener=open_itself) as answer:
                        answer.write(ANSWER)
                    return

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is None:
            # os.write, not print: the handler may interrupt a print, and streams are not reentrant.
            os.write(2, b"stopping after this step (press Ctrl-C again to stop now)\n")
        self.signal = number
