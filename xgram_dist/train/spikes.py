"""What a run read when its loss jumped: RUN/spikes/step-00000120.json, with the documents of that batch.

A spike is a step that was skipped, or whose loss is far above those of the steps before it. Its file lists
micro-batches with their losses, the worst first, and for each sequence the source, the place in the data and the
documents in it. Memory of earlier losses begins anew with each start.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from xgram_dist.data.dataset import PreparedData
from xgram_dist.data.describe import batch_contents
from xgram_dist.data.loader import Loader
from xgram_dist.data.tokenizer import load_tokenizer
from xgram_dist.errors import UserError
from xgram_dist.files import write_atomically
from xgram_dist.optim.clip import SpikeGuard
from xgram_dist.parallel.process_group import ProcessGroup

FOLDER = "spikes"
SIGMAS = 6.0
"""Standard deviations above the mean of the last losses; `train.spike_sigmas` where it is set."""
MAX_FILES = 100
"""Of a start. Later spikes have a record in metrics.jsonl alone."""
MAX_SEQUENCES = 64
"""Of each rank, those of its worst micro-batches."""


class Spikes:
    """Every rank has one; all call `look`, with the same loss."""

    def __init__(self, folder: Path, data: PreparedData, loader: Loader, ranks: ProcessGroup):
        """`ranks`: all, over gloo."""
        self._folder, self._data, self._loader, self._ranks = folder / FOLDER, data, loader, ranks
        self._guard, self._files = SpikeGuard(SIGMAS), 0

    def is_spike(self, loss: float) -> bool:
        """Judge the loss of a step by those before it, then remember it. The norm of gradients jumps more often."""
        return self._guard.is_spike(loss, 0.0)

    def write(self, step: int, facts: dict[str, Any], losses: list[float]) -> str | None:
        """The file of a step, with `losses` of this rank's micro-batches, none where another
        rank has the same ones; its name on the first rank. `facts`: with the
        `position` at which its batch began. All ranks call it: one all-gather."""
        if self._files >= MAX_FILES:
            return None
        self._files += 1
        with_losses = self._ranks.all_gather_object(self._micro_batches(facts["position"], losses))
        if not self._ranks.first:
            return None
        found = sorted((one for rank in with_losses for one in rank), key=lambda one: -_order(one["loss"]))
        path = self._folder / f"step-{step:08d}.json"
        record = {"step": step, **facts, "micro_batches": found}
        with suppress(OSError):  # a full disk costs this record, not the run
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(record, indent=1, ensure_ascii=False, default=str))
            return f"{FOLDER}/{path.name}"
        return None

    def _micro_batches(self, position: int, losses: list[float]) -> list[dict[str, Any]]:
        """Of this rank, the worst first, as many as `MAX_SEQUENCES` allows."""
        if not losses:
            return []
        try:
            files = self._data.tokenizer_files()
            tokenizer = load_tokenizer(files[0], self._data.manifest.end_of_text_name) if files else None
            sequences = batch_contents(self._loader, position, tokenizer)["sequences"]
        except (UserError, OSError):  # a remote that fails now costs this rank's part of the record
            return []
        size = len(sequences) // len(losses)
        worst = sorted(range(len(losses)), key=lambda number: -_order(losses[number]))
        return [
            {
                "rank": self._ranks.rank,
                "micro_batch": number,
                "loss": losses[number] if _order(losses[number]) < float("inf") else None,
                "sequences": sequences[number * size : (number + 1) * size],
            }
            for number in worst[: max(1, MAX_SEQUENCES // size)]
        ]


def _order(loss: float | None) -> float:
    """What is not finite comes first."""
    return loss if loss is not None and abs(loss) < float("inf") else float("inf")
