"""What came before each position of a batch: the tokens, and the vectors of convolutions over hidden states.

vLLM gives every position of every sequence a slot of its key-value cache. Token ids are kept by slot, in host memory. A
position finds the tokens before it through the block table, as attention finds keys. So the history follows a sequence
wherever its cache does: continuous batching, chunked prefill, shared prefixes, preemption. A step of decoding has few
positions, for which numpy takes a third of torch's time.
Shapes: T new positions of all sequences of the batch, R sequences, K tokens before a position.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.parallel.device import index_to_device, to_device

NO_TOKEN = -1


@dataclass(frozen=True)
class Slots:
    """Slots of the key-value cache."""

    new_T: NDArray[Any]
    """Of the new positions; -1: padding."""
    before_TK: NDArray[Any]
    """Of the positions 1, 2, .. K before each."""
    exists_TK: NDArray[Any]
    """False before the beginning of a sequence."""

    @staticmethod
    def find(
        positions_T: NDArray[Any],
        query_starts: NDArray[Any],
        blocks_RB: NDArray[Any],
        new_T: NDArray[Any],
        reach: int,
        block_size: int,
    ) -> "Slots":
        """`query_starts`: of the sequences among the new positions, from 0, and the end of the last. `blocks_RB`: of
        the cache, in the order of positions. `new_T`: slots of the new positions."""
        sequence_T = np.searchsorted(query_starts[1:], np.arange(len(positions_T)), side="right")
        np.minimum(sequence_T, len(blocks_RB) - 1, out=sequence_T)  # padding follows the last sequence
        before_TK = positions_T[:, None] - np.arange(1, reach + 1)
        exists_TK = before_TK >= 0
        np.maximum(before_TK, 0, out=before_TK)
        block_TK, inside_TK = np.divmod(before_TK, block_size)
        before_TK = blocks_RB[sequence_T[:, None], block_TK].astype(np.int64) * block_size + inside_TK
        return Slots(new_T, before_TK, exists_TK)


class TokenHistory:
    """The token of every slot of the key-value cache."""

    def __init__(self, document_end: int | None):
        self.document_end = document_end
        self._tokens: NDArray[Any] | None = None

    def extend(self, tokens_T: NDArray[Any], slots: Slots | None, reach: int, num_slots: int) -> NDArray[Any]:
        """Remember the new tokens; returns them and the `reach` tokens before each [T, 1 + reach], -1 where there is
        none. `slots`: None for a batch without a cache."""
        found = np.full((len(tokens_T), 1 + reach), NO_TOKEN, dtype=np.int64)
        found[:, 0] = tokens_T
        if slots is None:
            return found
        if self._tokens is None:
            # The last one takes the tokens of padding, whose slot is -1.
            self._tokens = np.zeros(num_slots + 1, dtype=np.int64)
        self._tokens[slots.new_T] = tokens_T[: len(slots.new_T)]
        np.copyto(found[:, 1:], self._tokens[slots.before_TK], where=slots.exists_TK)
        return found

    def within_document(self, tokens_TK: NDArray[Any]) -> NDArray[Any]:
        """Tokens of earlier documents replaced by -1."""
        if self.document_end is None:
            return tokens_TK
        ended = (tokens_TK[:, 1:] == self.document_end).cumsum(1) > 0
        return np.concatenate((tokens_TK[:, :1], np.where(ended, NO_TOKEN, tokens_TK[:, 1:])), 1)


class TableTaps:
    """Stands for the cache of short convolutions over vectors of tables: these are functions of tokens, so that nothing
    but the tokens before a position has to be known. Each position is a sequence of one new token."""

    def __init__(self, slots_TK: Tensor, values: dict[str, Tensor], scales: dict[str, Tensor] | None):
        """`slots_TK`: rows of `values` of the new token and those before it; row 0 is zero. `scales`: what normalises
        each of them [U]; None: vectors are read as they are."""
        self.slots_TK, self.values, self.scales = slots_TK, values, scales

    def extend(self, name: str, _: Tensor, reach: int) -> Tensor:
        """[T, reach + 1, W], the oldest first."""
        slots = self.slots_TK[:, : reach + 1].flip(1)
        vectors = torch.nn.functional.embedding(slots, self.values[name])
        return vectors if self.scales is None else vectors * self.scales[name][slots][..., None]


class StateTaps:
    """Stands for the cache of convolutions over hidden states (Engram), which are kept by slot, as tokens are."""

    def __init__(self) -> None:
        self._new_T: Tensor | None = None
        self._before_TK = self._same_document_TK = torch.empty(0)
        self._num_slots = 0
        self._states: dict[str, Tensor] = {}

    def begin(self, slots: Slots | None, same_document_TK: NDArray[Any], num_slots: int, device: torch.device) -> None:
        """A new batch. `same_document_TK`: whether the positions 1, 2, .. before each belong to its document."""
        self._num_slots = num_slots
        self._same_document_TK = to_device(torch.from_numpy(same_document_TK), device)
        self._new_T = None if slots is None else index_to_device(slots.new_T, device)
        self._before_TK = torch.empty(0) if slots is None else index_to_device(slots.before_TK, device)

    def extend(self, name: str, new_T1W: Tensor, reach: int) -> Tensor:
        """[T, reach + 1, W], the oldest first."""
        if self._new_T is None:
            return torch.nn.functional.pad(new_T1W, (0, 0, reach, 0))
        if name not in self._states:
            self._states[name] = new_T1W.new_zeros(self._num_slots + 1, new_T1W.shape[-1])
        states = self._states[name]
        states[self._new_T] = new_T1W[: len(self._new_T), 0]
        before = states[self._before_TK[:, :reach]] * self._same_document_TK[:, :reach, None]
        return torch.cat((before.flip(1), new_T1W), 1)
