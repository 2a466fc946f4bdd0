"""Engram's keys: the rows that the n-grams ending at a position hash to.

    hash(layer, order) = xor over the order's positions i of  folded id[t - i] * multiplier[layer, order, i]
    key(layer, order, head) = first row of (layer, order, head) + hash mod rows of the head

Multipliers are odd, and so small that no product leaves 63 bits. Before the sequence, and (with document masking)
before the document, stands an id that no token has. Ids only, in host memory: part of planning.
Shapes: T sequence, K keys of a position: by layer, order, head.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.config.schema import Config
from xgram_dist.memory.layout import ngram_rows, site_layers


@dataclass(frozen=True)
class NgramHash:
    orders: tuple[int, ...]
    multipliers: tuple[tuple[tuple[int, ...], ...], ...]
    """[layer][order][position]"""
    rows: tuple[tuple[int, ...], ...]
    """[order][head]"""
    outside: int
    """The id of what lies before the sequence."""

    @property
    def num_keys(self) -> int:
        return len(self.multipliers) * sum(len(of_order) for of_order in self.rows)


def plan_ngram_hash(config: Config) -> NgramHash:
    engram, vocabulary = config.memory.engram, config.model.vocabulary
    rows = ngram_rows(config)
    return NgramHash(
        orders=engram.orders,
        multipliers=tuple(
            tuple(_multipliers(layer, order, vocabulary) for order in engram.orders)
            for layer in site_layers(config, "ngram")
        ),
        rows=tuple(rows[n * engram.heads : (n + 1) * engram.heads] for n in range(len(engram.orders))),
        outside=vocabulary,
    )


def _multipliers(layer: int, order: int, vocabulary: int) -> tuple[int, ...]:
    limit = 2**63 // (vocabulary + 1) // 2
    found = []
    for position in range(order):
        digest = hashlib.blake2b(f"engram/{layer}/{order}/{position}".encode(), digest_size=8).digest()
        found.append(2 * (int.from_bytes(digest, "little") % limit) + 1)
    return tuple(found)


class NgramKeys:
    """Tokens -> keys."""

    def __init__(self, hashing: NgramHash, folding: NDArray[Any], end_of_text: int | None = None):
        """`folding`: the id of each token. `end_of_text`: where documents are kept apart, the token that ends them."""
        self._hash, self._folding, self._end = hashing, folding.astype(np.int64), end_of_text

    def __call__(self, tokens: NDArray[Any]) -> NDArray[Any]:
        """[..., T] -> [..., T, K]."""
        hashing, ids = self._hash, self._folding[tokens]
        back = [self._moved(ids, tokens, steps) for steps in range(max(hashing.orders))]
        keys = np.empty((*tokens.shape, hashing.num_keys), dtype=np.int32)
        place = first_row = 0
        for of_layer in hashing.multipliers:
            for multipliers, heads in zip(of_layer, hashing.rows, strict=True):
                mixed = back[0] * multipliers[0]
                for moved, multiplier in zip(back[1:], multipliers[1:], strict=False):
                    mixed ^= moved * multiplier
                for rows in heads:
                    keys[..., place] = mixed % rows + first_row
                    place, first_row = place + 1, first_row + rows
        return keys

    def _moved(self, ids: NDArray[Any], tokens: NDArray[Any], steps: int) -> NDArray[Any]:
        """ids[t - steps]."""
        if steps == 0:
            return ids
        moved = np.full_like(ids, self._hash.outside)
        moved[..., steps:] = ids[..., :-steps]
        if self._end is not None:
            ends = (tokens == self._end).astype(np.int64)
            documents = np.cumsum(ends, axis=-1) - ends  # an end-of-text token still belongs to the document it ends
            moved[..., steps:][documents[..., steps:] != documents[..., :-steps]] = self._hash.outside
        return moved
