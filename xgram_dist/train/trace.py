"""A look at some steps with torch's profiler."""

import torch


class TraceWindow:
    """torch's profiler over some steps, written as a trace that Perfetto and Chrome open."""

    def __init__(self, first: int, steps: int, path: str):
        self.first, self.last, self.path = first, first + steps - 1, path
        self._profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        if step == self.first:
            self._profiler = torch.profiler.profile()
            self._profiler.__enter__()

    def after(self, step: int) -> bool:
        """True when the trace has just been written."""
        if self._profiler is None or step < self.last:
            return False
        self._profiler.__exit__(None, None, None)
        self._profiler.export_chrome_trace(self.path)
        self._profiler = None
        return True
