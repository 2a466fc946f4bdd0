"""Rates between status lines: tokens a second, seconds a step, time left."""

import time


class Interval:
    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._begin = self._since = time.monotonic()
        self._first: float | None = None  # the first step compiles and allocates; it says nothing of the rate
        self._tokens = self._all_tokens = 0
        self._step = 0

    def add(self, tokens: int) -> None:
        self._tokens += tokens
        if self._first is None:
            self._first = time.monotonic()
        else:
            self._all_tokens += tokens

    def pause(self, seconds: float) -> None:
        """Time that was not training."""
        self._since += seconds
        if self._first is not None:
            self._first += seconds

    def overall(self) -> float:
        """Tokens a second over the run, without the first step."""
        elapsed = time.monotonic() - (self._first or self._begin)
        return self._all_tokens / elapsed if self._all_tokens else 0.0

    def close(self, step: int) -> tuple[dict[str, float], float | None]:
        """Figures since the last call, and seconds left (None while there is nothing to judge by)."""
        now = time.monotonic()
        seconds = now - self._since
        figures = {"tokens_per_second": self._tokens / seconds, "step_seconds": seconds / (step - self._step)}
        self._tokens, self._since, self._step = 0, now, step
        if self._first is None or step < 2:
            return figures, None
        return figures, (self._steps - step) * (now - self._first) / (step - 1)
