"""Whole-document packing: documents stay whole within sequences, what is left of a sequence is padding.

In: tokens of documents, each followed by the end-of-text token. Out: sequences of T tokens, one after the other:

    - A document of at most T tokens is one piece. A longer one is cut into pieces of T; the rest of it is dropped.
    - A piece that does not fit into the open sequence starts a new one.
    - Padding is the end-of-text token. With `model.label_masking` it predicts nothing and is predicted by nothing, so
      it adds nothing to a loss.

This is how the authors of X-gram pack. The default of `prepare` joins documents and cuts anywhere: no padding, but a
sequence may begin in the middle of a document.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


class DocumentPacker:
    def __init__(self, sequence_length: int, end_of_text: int):
        self._length, self._end = sequence_length, end_of_text
        self._open: list[NDArray[Any]] = []  # pieces of the open sequence
        self._filled = 0
        self.dropped = 0
        """Tokens of long documents that did not fill a sequence."""

    def add(self, tokens: NDArray[Any]) -> NDArray[Any]:
        """Whole documents in; the sequences that they complete out, as one array."""
        ends = np.flatnonzero(tokens == self._end) + 1
        done: list[NDArray[Any]] = []
        start = 0
        for end in ends.tolist():
            document, start = tokens[start:end], end
            if len(document) <= self._length:
                self._place(document, done)
                continue
            whole = len(document) // self._length * self._length
            self.dropped += len(document) - whole
            for first in range(0, whole, self._length):
                self._place(document[first : first + self._length], done)
        assert start == len(tokens), "documents end with the end-of-text token"
        return np.concatenate(done) if done else tokens[:0]

    def flush(self) -> NDArray[Any]:
        """The open sequence, padded."""
        done: list[NDArray[Any]] = []
        self._close(done)
        return np.concatenate(done) if done else np.zeros(0, dtype=np.uint32)

    def _place(self, piece: NDArray[Any], done: list[NDArray[Any]]) -> None:
        if self._filled + len(piece) > self._length:
            self._close(done)
        self._open.append(piece)
        self._filled += len(piece)

    def _close(self, done: list[NDArray[Any]]) -> None:
        if self._filled:
            done += self._open
            done.append(np.full(self._length - self._filled, self._end, dtype=self._open[0].dtype))
        self._open, self._filled = [], 0


def count_padding(tokens: NDArray[Any], sequence_length: int, end_of_text: int) -> int:
    """Padding in packed sequences: the end-of-text tokens at the end of each but the first of them, which ends a
    document."""
    sequences_NT = tokens.reshape(-1, sequence_length)
    is_other = sequences_NT[:, ::-1] != end_of_text
    trailing = np.where(is_other.any(axis=1), is_other.argmax(axis=1), sequence_length)
    return int(np.maximum(trailing - 1, 0).sum())
