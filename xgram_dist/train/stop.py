"""Ctrl-C and SIGTERM: end after the current step."""

import os
import signal
from types import FrameType
from typing import Any


class Stop:
    """Remembers that someone asked the run to end; the second time it ends at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        # Not print: this may interrupt one, and a stream does not let itself be written to twice at a time.
        os.write(2, b"stopping after this step (once more: at once)\n")
