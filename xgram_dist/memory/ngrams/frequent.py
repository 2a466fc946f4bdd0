"""Frequent n-grams (f-grams): found in the data once, matched in every batch.

In: sequences of tokens. Out: `Grams`, the most frequent n-grams of 2 to `longest` tokens, saved as one `.npz` file; and
for each position of a batch, the longest of them that ends there. Of equally frequent ones the shorter come first, so
with an n-gram its ends are always among them too: a match grows backwards, token by token.
Shapes: G f-grams, N tokens of the longest, S sequences, T sequence.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.errors import UserError
from xgram_dist.memory.routing.npz import integers, read_arrays, whole_number, write_arrays

WHAT = "a file of f-grams (training with memory.method = scone writes one)"
NOTHING = -1
"""In place of a token, before an f-gram that is shorter than the longest."""


@dataclass(frozen=True, eq=False)
class Grams:
    tokens: NDArray[Any]
    """[1 + G, N], at the right; the first stands for none."""

    @property
    def longest(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """What a lookup needs: codes and numbers of each level."""
        return [array for level in self._levels for array in level]

    def sha256(self) -> str:
        return hashlib.sha256(self.tokens.astype("<i4").tobytes()).hexdigest()

    def save(self, path: Path) -> None:
        write_arrays(path, {"tokens": self.tokens.reshape(-1), "longest": np.array(self.longest)})

    @staticmethod
    def load(path: Path, vocabulary: int) -> "Grams":
        arrays = read_arrays(path, WHAT)
        if set(arrays) != {"tokens", "longest"}:
            raise UserError(f"{path} is not {WHAT}: it does not have 'tokens' and 'longest' alone")
        longest, tokens = whole_number(arrays, "longest", path), integers(arrays, "tokens", path)
        if longest < 2 or len(tokens) % longest or not len(tokens) or tokens.max() >= vocabulary:
            raise UserError(f"{path} is not {WHAT} for a vocabulary of {vocabulary:,}")
        return Grams(tokens.reshape(-1, longest).astype(np.int32))

    def __str__(self) -> str:
        return f"{len(self.tokens) - 1:,} f-grams of 2 to {self.longest} tokens"

    @cached_property
    def _levels(self) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """For n = 2, 3, ...: ascending codes of the f-grams of n tokens, and the number of each."""
        levels: list[tuple[NDArray[Any], NDArray[Any]]] = []
        lengths = (self.tokens != NOTHING).sum(1)
        for n in range(2, self.longest + 1):
            numbers = np.flatnonzero(lengths == n)
            ends = self.tokens[numbers, -(n - 1) :]
            place = ends[:, -1].astype(np.int64)
            for level, (codes, _) in enumerate(levels):
                place = np.searchsorted(codes, _code(place, ends[:, -(level + 2)]))
            codes = _code(place, self.tokens[numbers, -n])
            order = np.argsort(codes)
            levels.append((codes[order], numbers[order]))
        return levels

    def match(self, tokens: NDArray[Any]) -> NDArray[Any]:
        """[..., T] -> the f-gram of each position, 0 for none."""
        found = np.zeros(tokens.shape, dtype=np.int64)
        place, alive = tokens.astype(np.int64), np.ones(tokens.shape, dtype=bool)
        for steps, (codes, numbers) in enumerate(self._levels, start=1):
            if not len(codes):
                break
            wanted = _code(place, _back(tokens, steps))
            at = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
            alive &= codes[at] == wanted
            alive[..., :steps] = False
            found[alive] = numbers[at[alive]]
            place = at
        return found


def count_grams(sequences_ST: NDArray[Any], longest: int, grams: int) -> Grams:
    """The `grams` most frequent n-grams, each seen at least twice."""
    place, alive = sequences_ST.astype(np.int64), np.ones(sequences_ST.shape, dtype=bool)
    counts: list[NDArray[Any]] = []
    spelled: list[NDArray[Any]] = []
    before = np.arange(int(sequences_ST.max()) + 1)[:, None]
    for steps in range(1, longest):
        alive[..., :steps] = False
        codes = _code(place, _back(sequences_ST, steps))[alive]
        distinct, number, count = np.unique(codes, return_inverse=True, return_counts=True)
        kept = count >= 2
        renumbered = np.where(kept, np.cumsum(kept) - 1, -1)[number]
        place = np.full(sequences_ST.shape, -1)
        place[alive] = renumbered
        alive &= place >= 0
        ends, first = np.divmod(distinct[kept], _BASE)
        before = np.concatenate((first[:, None], before[ends]), axis=1)
        counts.append(count[kept])
        spelled.append(np.pad(before, ((0, 0), (longest - before.shape[1], 0)), constant_values=NOTHING))
    rows = np.concatenate(spelled)
    order = np.argsort(-np.concatenate(counts), kind="stable")[:grams]  # stable: shorter ones first
    return Grams(np.concatenate((np.full((1, longest), NOTHING), rows[order])).astype(np.int32))


_BASE = 1 << 31


def _code(place: NDArray[Any], token: NDArray[Any]) -> NDArray[Any]:
    """A number for (n-gram, the token before it)."""
    return place.astype(np.int64) * _BASE + token


def _back(tokens: NDArray[Any], steps: int) -> NDArray[Any]:
    """tokens[t - steps]; anything before the sequence."""
    return np.roll(tokens, steps, axis=-1)
