"""What a run says: one status line an interval on screen, every record as a JSON line and in TensorBoard.

metrics.jsonl holds one object a line with `kind` (train, validation, skipped, end) and `step`; it is flushed line by
line, so a killed run keeps all it has said.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

from xgram_dist.progress import duration


class Metrics:
    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter  # slow to import, needed only here

        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / "tensorboard"))  # type: ignore[no-untyped-call]
        self._start = time.monotonic()

    def write(self, kind: str, step: int, **values: Any) -> None:
        # A loss that is not finite is no JSON number; null says the same to every reader.
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        record = {"kind": kind, "step": step, "seconds": round(time.monotonic() - self._start, 3), **clean}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in clean.items():
            if isinstance(value, int | float):
                self._board.add_scalar(f"{kind}/{name}", value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._file.close()
        self._board.close()  # type: ignore[no-untyped-call]


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
