"""Ctrl-C, SIGTERM and SIGUSR1 end a run after the current step, with a checkpoint.

A scheduler may signal more than once (Slurm sends SIGUSR1 some time before the limit and SIGTERM at it; some launchers
send each signal twice). Repeated signals are ignored, so that they cannot interrupt the final save. Only a second
Ctrl-C ends the run at once.
"""

import os
import signal
from types import FrameType
from typing import Any


class StopRequest:
    """A context in which the signals are caught. `signal` is the last one received, or None."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is None:
            # os.write, not print: the handler may interrupt a print, and streams are not reentrant.
            os.write(2, b"stopping after this step (press Ctrl-C again to stop now)\n")
        self.signal = number
