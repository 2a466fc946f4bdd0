"""Folding: tokens whose text is the same after normalisation count as one, when n-grams are hashed.

In: the text of every token. Out: for each token the number of its group, in the order of first tokens; saved as one
`.npz` file. Tokens that are not whole characters, and those beyond the tokenizer's, stay alone.
"""

import hashlib
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.errors import UserError
from xgram_dist.memory.routing.npz import integers, read_arrays, write_arrays

WHAT = "a folding file (training with memory.method = engram writes one)"
BROKEN = "\ufffd"


def normalised(text: str) -> str:
    """NFKC, without accents, lower case, white space as one blank and none at the ends."""
    decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    plain = "".join(letter for letter in decomposed if unicodedata.category(letter) != "Mn").lower()
    return " ".join(plain.split()) or " "


@dataclass(frozen=True, eq=False)
class Folding:
    ids: NDArray[Any]
    """The group of each token of the vocabulary."""

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """What a lookup needs."""
        return [self.ids]

    @staticmethod
    def identity(vocabulary: int) -> "Folding":
        return Folding(np.arange(vocabulary, dtype=np.int32))

    @staticmethod
    def build(text_of: Callable[[int], str], tokens: int, vocabulary: int) -> "Folding":
        """`tokens`: that the tokenizer has; the rest of the vocabulary is padding."""
        groups: dict[str, int] = {}
        ids = np.empty(vocabulary, dtype=np.int32)
        for token in range(vocabulary):
            text = text_of(token) if token < tokens else BROKEN
            # What no text can spell: a key of its own.
            key = f"\0{token}" if BROKEN in text or not text else normalised(text)
            ids[token] = groups.setdefault(key, len(groups))
        return Folding(ids)

    def sha256(self) -> str:
        return hashlib.sha256(self.ids.astype("<i4").tobytes()).hexdigest()

    def save(self, path: Path) -> None:
        write_arrays(path, {"folding": self.ids})

    @staticmethod
    def load(path: Path, vocabulary: int) -> "Folding":
        arrays = read_arrays(path, WHAT)
        if "folding" not in arrays:
            raise UserError(f"{path} is not {WHAT}: it has no 'folding'")
        ids = integers(arrays, "folding", path, vocabulary)
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise UserError(f"{path}: 'folding' holds ids outside the vocabulary of {vocabulary:,}")
        return Folding(ids.astype(np.int32))

    def __str__(self) -> str:
        groups = int(self.ids.max()) + 1
        return f"n-grams over {groups:,} folded ids of {len(self.ids):,} tokens"
