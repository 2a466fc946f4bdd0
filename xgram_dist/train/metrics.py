"""The records of a run: metrics.jsonl, TensorBoard and other loggers, and the status line on screen.

metrics.jsonl holds one JSON object a line with `kind` (train, validation, memory, stragglers, checkpoint, upload, eval,
diagnose, skipped, spike, not_finite, data_change, end), `step` and `seconds` since the process started. It is
unbuffered, so a killed run loses no record. A disk that is full does not end a run: unwritten records are kept and
written with the next one.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xgram_dist.config import Config
from xgram_dist.console import format_duration
from xgram_dist.train.loggers import COMPLETE, FAILED, STOPPED, TENSORBOARD, LoggerProcess
from xgram_dist.train.metrics_file import FILE


class Metrics:
    """Writes the records of a run; held by the first rank."""

    def __init__(self, folder: Path, config: Config, run_id: str):
        self._file = (folder / FILE).open("ab", buffering=0)
        self._unwritten = b""
        self._ended = FAILED  # until the record of its end
        self._board: Any = None
        if TENSORBOARD in config.train.loggers:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, needed only here

            self._board = SummaryWriter(str(folder / TENSORBOARD))  # type: ignore[no-untyped-call]
        others = [name for name in config.train.loggers if name != TENSORBOARD]
        self._loggers = [LoggerProcess(name, folder, config, run_id) for name in others]
        self._start = time.monotonic()

    def write(self, kind: str, step: int, **values: Any) -> None:
        # JSON has no infinity and no NaN; null stands for both.
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        record = {"kind": kind, "step": step, "seconds": round(time.monotonic() - self._start, 3), **clean}
        self._unwritten += json.dumps(record).encode() + b"\n"
        self._flush()
        numbers = {f"{kind}/{name}": value for name, value in clean.items() if isinstance(value, int | float)}
        self._to_board(lambda board: [board.add_scalar(name, value, step) for name, value in numbers.items()])
        for logger in self._loggers:
            logger.log(step, numbers)
        if kind == "end":
            self._ended = COMPLETE if values["complete"] else STOPPED

    def close(self) -> None:
        self._flush()
        self._file.close()
        self._to_board(lambda board: board.close())
        for logger in self._loggers:
            logger.close(self._ended)

    def _flush(self) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) or 0 :]
        except OSError as error:
            _warn(f"cannot write '{self._file.name}': {error.strerror}; its records are kept and written later")

    def _to_board(self, call: Callable[[Any], object]) -> None:
        try:
            if self._board is not None:
                call(self._board)
        except OSError as error:
            self._board = None
            _warn(f"cannot write to TensorBoard: {error.strerror}; metrics.jsonl has every record")


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def perplexity(cross_entropy: float) -> float:
    """exp(cross-entropy), infinite where that overflows."""
    return math.exp(cross_entropy) if cross_entropy < 700 else math.inf


def status_line(step: int, steps: int, values: dict[str, Any], seconds_left: float | None) -> str:
    left = "" if seconds_left is None else f"  {format_duration(seconds_left)} left"
    return (
        f"step {step:>{len(str(steps))}}/{steps}  loss {values['loss']:.4f}  ppl {values['perplexity']:.2f}  "
        f"{values['tokens_per_second']:,.0f} tok/s  lr {values['learning_rate']:.2e}  "
        f"norm {values['gradient_norm']:.3f}{left}"
    )
