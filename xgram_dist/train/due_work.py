"""Validation, diagnosis and evaluation at the steps where they are due: each is made once, in disturbed runs too.

Callbacks come before the save of the same step, because they may catch up table rows in place: a checkpoint holds the
state after them, and its run resumes bit for bit. A run that is asked to stop makes what is due first if that took
little time before. Otherwise it saves at once, and the resumed run makes what has no record yet. All ranks call every
method, and do the same.
"""

import time
from collections.abc import Callable
from typing import Any

from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.train.callbacks import Callback

STOP_SECONDS = 20.0
"""What is due before a stop may take as long; schedulers give at least 30 s between their signal and the kill."""

Report = Callable[[Callback, int, dict[str, Any], str, float], None]
"""(callback, step, values, sentence, seconds)"""


class DueWork:
    def __init__(self, callbacks: list[Callback], agreement: ProcessGroup, report: Report):
        """`agreement`: all ranks, over gloo."""
        self.callbacks, self._agreement, self._report = callbacks, agreement, report
        self._seconds: dict[str, float] = {}
        """How long each kind last took."""

    def due(self, step: int) -> list[Callback]:
        return [callback for callback in self.callbacks if callback.due(step)]

    def run(self, step: int) -> None:
        for callback in self.due(step):
            self.make(callback, step)

    def run_before_stop(self, step: int) -> None:
        """Unless it would take long, by what it took before: then the resumed run makes it."""
        due = self.due(step)
        seconds = sum(self._seconds.get(callback.kind, STOP_SECONDS) for callback in due)
        fits = self._agreement.first and seconds < STOP_SECONDS  # clocks of ranks differ: the first decides
        if self._agreement.all_reduce_integers(int(fits), 0)[0]:
            self.run(step)

    def run_missing(self, step: int, recorded: set[str]) -> None:
        """On resume: what was due at the checkpoint's step. `recorded`: kinds of its records, on the first rank."""
        recorded = self._agreement.all_gather_object(recorded)[0]
        for callback in self.due(step):
            if callback.kind not in recorded:
                self.make(callback, step)

    def make(self, callback: Callback, step: int) -> dict[str, Any]:
        start = time.monotonic()
        values, sentence = callback.run(step)
        self._seconds[callback.kind] = time.monotonic() - start
        self._report(callback, step, values, sentence, self._seconds[callback.kind])
        return values

    def close(self) -> None:
        for callback in self.callbacks:
            callback.close()
