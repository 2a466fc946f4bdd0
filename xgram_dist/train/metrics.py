"""What a run says: one status line an interval on screen, every record as a JSON line and in TensorBoard.

metrics.jsonl holds one object a line with `kind` (train, validation, memory, checkpoint, eval, diagnose, skipped, end)
and `step`; it is flushed line by line, so a killed run keeps all it has said.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xgram_dist.progress import duration


class Metrics:
    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter  # slow to import, needed only here

        self._file = (folder / "metrics.jsonl").open("ab", buffering=0)
        self._waiting = b""
        self._board: Any = SummaryWriter(str(folder / "tensorboard"))  # type: ignore[no-untyped-call]
        self._start = time.monotonic()

    def write(self, kind: str, step: int, **values: Any) -> None:
        # A loss that is not finite is no JSON number; null says the same to every reader.
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        record = {"kind": kind, "step": step, "seconds": round(time.monotonic() - self._start, 3), **clean}
        self._waiting += json.dumps(record).encode() + b"\n"
        self._flush()
        numbers = {f"{kind}/{name}": value for name, value in clean.items() if isinstance(value, int | float)}
        self._to_board(lambda board: [board.add_scalar(name, value, step) for name, value in numbers.items()])

    def close(self) -> None:
        self._flush()
        self._file.close()
        self._to_board(lambda board: board.close())

    def _flush(self) -> None:
        """A disk that is full does not end a run: what could not be written waits for the next time."""
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) or 0 :]
        except OSError as error:
            _complain(f"cannot write '{self._file.name}': {error.strerror}; what is missing is written when it can be")

    def _to_board(self, work: Callable[[Any], object]) -> None:
        try:
            if self._board is not None:
                work(self._board)
        except OSError as error:
            self._board = None
            _complain(f"cannot write to TensorBoard: {error.strerror}; metrics.jsonl has it all")


def _complain(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def perplexity(cross_entropy: float) -> float:
    """exp, without overflow for a loss that has gone astray."""
    return math.exp(cross_entropy) if cross_entropy < 700 else math.inf


def status_line(step: int, steps: int, values: dict[str, Any], seconds_left: float | None) -> str:
    left = "" if seconds_left is None else f"  {duration(seconds_left)} left"
    return (
        f"step {step:>{len(str(steps))}}/{steps}  loss {values['loss']:.4f}  ppl {values['perplexity']:.2f}  "
        f"{values['tokens_per_second']:,.0f} tok/s  lr {values['learning_rate']:.2e}  "
        f"norm {values['gradient_norm']:.3f}{left}"
    )
