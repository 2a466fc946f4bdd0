"""SCONE's lookup: no tables in training, but the f-grams of each micro-batch, matched ahead of time.

What the network is given are the tokens of the distinct f-grams, from which its side network makes their embeddings.
Each micro-batch is a window. No collectives.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from xgram_dist.memory.ngrams.frequent import Grams
from xgram_dist.memory.plan import Window
from xgram_dist.memory.working_set import WorkingSet
from xgram_dist.parallel.device import to_device

GRAMS = "grams"
"""Stands for a table: the tokens of the distinct f-grams [U, N]."""


class GramLookup:
    """Implements `Lookup` (memory/working_set.py)."""

    def __init__(self, grams: Grams, device: torch.device):
        self.grams, self.device = grams, device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plan")

    def plan(self, tokens: Tensor, *, whole: bool = False) -> "Future[list[Window]]":
        return self._thread.submit(self._plan, tokens, whole)

    def _plan(self, tokens: Tensor, whole: bool) -> list[Window]:
        size = len(tokens) if whole else 1
        parts = [slice(start, start + size) for start in range(0, len(tokens), size)]
        return [self._window(part, tokens[part]) for part in parts]

    def _window(self, part: slice, tokens: Tensor) -> Window:
        found = self.grams.match(tokens.numpy())
        # Number 0, for none, is always among them.
        keys, slots = np.unique(np.append(found.reshape(-1), 0), return_inverse=True)
        placed = torch.from_numpy(slots[:-1].reshape(found.shape).astype(np.int64))
        return Window(part, to_device(placed, self.device), len(keys), [], keys)

    def fetch(self, window: Window, *, training: bool = True) -> WorkingSet:
        tokens = torch.from_numpy(self.grams.tokens[window.keys].astype(np.int64))
        return WorkingSet(window, {GRAMS: to_device(tokens, self.device)})

    def give_back(self, working: WorkingSet) -> None:
        pass

    def close(self) -> None:
        self._thread.shutdown()
