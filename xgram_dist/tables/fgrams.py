"""Frequent n-grams (f-grams), SCONE's keys: found in the data once, matched in every batch.

`count_grams` takes sequences of tokens and gives `Fgrams`: the most frequent n-grams of 2 to `longest` tokens, saved as
one `.npz` file. `Fgrams.match` gives, for each position of a batch, the longest f-gram that ends there. Among equally
frequent n-grams the shorter come first, so with an n-gram its suffixes are f-grams too, and a match grows backwards
token by token: level n looks up (match of n - 1 tokens, the token before it).

`FgramLookup` is the `Lookup` of SCONE. It has no tables in training: the network is given the tokens of the distinct
f-grams of a micro-batch, and computes their embeddings. Each micro-batch is a window. No collectives.
Shapes: G f-grams, N tokens of the longest, S sequences, T sequence, U distinct f-grams.
"""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.errors import BadFileError
from xgram_dist.files import int_array, int_scalar, read_npz, write_npz
from xgram_dist.parallel.context_parallel import WHOLE_SEQUENCES, ContextAxis
from xgram_dist.parallel.device import set_thread_device, to_device
from xgram_dist.tables.exchange_plan import Window
from xgram_dist.tables.working_set import WorkingSet

FILE_KIND = "a file of f-grams (training with memory.method = scone writes one)"
NO_TOKEN = -1
"""Padding on the left of f-grams that are shorter than the longest."""


@dataclass(frozen=True, eq=False)
class Fgrams:
    tokens: NDArray[Any]
    """[1 + G, N], padded on the left; number 0 stands for no f-gram."""

    @property
    def longest(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """What a decoder needs to look up keys: codes and numbers of each level."""
        return [array for level in self._levels for array in level]

    def sha256(self) -> str:
        return hashlib.sha256(self.tokens.astype("<i4").tobytes()).hexdigest()

    def save(self, path: Path) -> None:
        write_npz(path, {"tokens": self.tokens.reshape(-1), "longest": np.array(self.longest)})

    @staticmethod
    def load(path: Path, vocabulary: int) -> "Fgrams":
        arrays = read_npz(path, FILE_KIND)
        if set(arrays) != {"tokens", "longest"}:
            raise BadFileError(f"{path} is not {FILE_KIND}: it does not have 'tokens' and 'longest' alone")
        longest, tokens = int_scalar(arrays, "longest", path), int_array(arrays, "tokens", path)
        if longest < 2 or len(tokens) % longest or not len(tokens) or tokens.max() >= vocabulary:
            raise BadFileError(f"{path} is not {FILE_KIND} for a vocabulary of {vocabulary:,}")
        return Fgrams(tokens.reshape(-1, longest).astype(np.int32))

    def __str__(self) -> str:
        return f"{len(self.tokens) - 1:,} f-grams of 2 to {self.longest} tokens"

    @cached_property
    def _levels(self) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """For n = 2, 3, ...: ascending codes of the f-grams of n tokens, and the number of each in `tokens`."""
        levels: list[tuple[NDArray[Any], NDArray[Any]]] = []
        lengths = (self.tokens != NO_TOKEN).sum(1)
        for n in range(2, self.longest + 1):
            numbers = np.flatnonzero(lengths == n)
            suffixes = self.tokens[numbers, -(n - 1) :]
            index = suffixes[:, -1].astype(np.int64)
            for level, (codes, _) in enumerate(levels):
                index = np.searchsorted(codes, _code(index, suffixes[:, -(level + 2)]))
            codes = _code(index, self.tokens[numbers, -n])
            order = np.argsort(codes)
            levels.append((codes[order], numbers[order]))
        return levels

    def match(self, tokens: NDArray[Any], end_of_text: int | None = None) -> NDArray[Any]:
        """[..., T] -> the f-gram of each position, 0 for none. `end_of_text`: with document masking, the token that
        ends a document; no f-gram reaches over it."""
        grams = np.zeros(tokens.shape, dtype=np.int64)
        index, alive = tokens.astype(np.int64), np.ones(tokens.shape, dtype=bool)
        for steps, (codes, numbers) in enumerate(self._levels, start=1):
            if not len(codes):
                break
            previous = _shifted(tokens, steps)
            wanted = _code(index, previous)
            index = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
            alive &= codes[index] == wanted
            if end_of_text is not None:
                alive &= previous != end_of_text
            alive[..., :steps] = False
            grams[alive] = numbers[index[alive]]
        return grams


def count_grams(sequences_ST: NDArray[Any], longest: int, grams: int) -> Fgrams:
    """The `grams` most frequent n-grams, each seen at least twice."""
    index, alive = sequences_ST.astype(np.int64), np.ones(sequences_ST.shape, dtype=bool)
    counts: list[NDArray[Any]] = []
    padded: list[NDArray[Any]] = []
    grams_of_level = np.arange(int(sequences_ST.max()) + 1)[:, None]
    for steps in range(1, longest):
        alive[..., :steps] = False
        codes = _code(index, _shifted(sequences_ST, steps))[alive]
        distinct, number, count = np.unique(codes, return_inverse=True, return_counts=True)
        kept = count >= 2
        renumbered = np.where(kept, np.cumsum(kept) - 1, -1)[number]
        index = np.full(sequences_ST.shape, -1)
        index[alive] = renumbered
        alive &= index >= 0
        suffixes, first = np.divmod(distinct[kept], _BASE)
        grams_of_level = np.concatenate((first[:, None], grams_of_level[suffixes]), axis=1)
        counts.append(count[kept])
        padding = ((0, 0), (longest - grams_of_level.shape[1], 0))
        padded.append(np.pad(grams_of_level, padding, constant_values=NO_TOKEN))
    rows = np.concatenate(padded)
    order = np.argsort(-np.concatenate(counts), kind="stable")[:grams]  # stable: shorter ones first
    return Fgrams(np.concatenate((np.full((1, longest), NO_TOKEN), rows[order])).astype(np.int32))


_BASE = 1 << 31


def _code(index: NDArray[Any], token: NDArray[Any]) -> NDArray[Any]:
    """A number for (n-gram by its index in its level, the token before it)."""
    return index.astype(np.int64) * _BASE + token


def _shifted(tokens: NDArray[Any], steps: int) -> NDArray[Any]:
    """tokens[t - steps]; arbitrary before the sequence."""
    return np.roll(tokens, steps, axis=-1)


# Lookup

GRAMS = "grams"
"""In place of a table's name: the tokens of the distinct f-grams [U, N]."""


class FgramLookup:
    """Implements `Lookup` (working_set.py)."""

    overlap = False

    def __init__(
        self,
        grams: Fgrams,
        device: torch.device,
        end_of_text: int | None = None,
        context: ContextAxis = WHOLE_SEQUENCES,
    ):
        """`end_of_text`: of `Fgrams.match`. `context`: the ranks that share each sequence."""
        self.grams, self.device, self._end, self._context = grams, device, end_of_text, context
        self._thread = ThreadPoolExecutor(1, "plan", set_thread_device, (device,))

    def plan(self, tokens: Tensor, *, whole: bool = False) -> "Future[list[Window]]":
        return self._thread.submit(self._plan, tokens, whole)

    def _plan(self, tokens: Tensor, whole: bool) -> list[Window]:
        size = len(tokens) if whole else 1
        windows = [slice(start, start + size) for start in range(0, len(tokens), size)]
        return [self._window(micro_batches, tokens[micro_batches]) for micro_batches in windows]

    def _window(self, micro_batches: slice, tokens: Tensor) -> Window:
        grams = self._context.select_read_on_host(self.grams.match(tokens.numpy(), self._end))
        # Number 0, no f-gram, is always among the keys.
        keys, index = np.unique(np.append(grams.reshape(-1), 0), return_inverse=True)
        slots = torch.from_numpy(index[:-1].reshape(grams.shape).astype(np.int64))
        return Window(micro_batches, to_device(slots, self.device), len(keys), [], keys)

    def fetch(self, window: Window, *, training: bool = True) -> WorkingSet:
        tokens = torch.from_numpy(self.grams.tokens[window.keys].astype(np.int64))
        return WorkingSet(window, {GRAMS: to_device(tokens, self.device)})

    def give_back(self, working: WorkingSet) -> None:
        pass

    def close(self) -> None:
        self._thread.shutdown()
