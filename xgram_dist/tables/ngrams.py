"""Engram's keys: the rows that the n-grams ending at a position hash to.

In: the tokens of a batch [..., T], and a `Folding`. Out: the distinct n-grams of each order, and their rows in each
hash head. A position has K keys, by layer, order and head.

    id(t)                   = folding[token at t]
    hash(layer, order)      = xor over the order's positions i of  id(t - i) * multiplier[layer, order, i]
    key(layer, order, head) = first row of (layer, order, head) + hash mod rows of the head

Heads have prime numbers of rows, so that two n-grams that collide in one head do not in another. Multipliers are odd,
and so small that no product leaves 63 bits. What lies before the sequence, and (with document masking) before the
document, has an id that no token has, or that of a given token. Keys are computed on the host, as a part of planning
the exchange (requests.py).

A folding gives tokens the same id if their text is the same after normalisation. It is built from the text of every
token and saved as one `.npz` file. Tokens that are not whole characters, and those beyond the tokenizer's, stay alone.
"""

import hashlib
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.errors import UserError
from xgram_dist.files import int_array, read_npz, write_npz
from xgram_dist.tables.touched_rows import MAX_INT32, Integers

# Folding

FILE_KIND = "a folding file (training with memory.method = engram writes one)"
BROKEN = "\ufffd"
"""Stands in a text for bytes that are no whole character."""


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
        """What a decoder needs to look up keys."""
        return [self.ids]

    @staticmethod
    def identity(vocabulary: int) -> "Folding":
        return Folding(np.arange(vocabulary, dtype=np.int32))

    @staticmethod
    def build(text_of: Callable[[int], str], tokens: int, vocabulary: int) -> "Folding":
        """`tokens`: of the tokenizer; the rest of the vocabulary is padding."""
        groups: dict[str, int] = {}
        ids = np.empty(vocabulary, dtype=np.int32)
        for token in range(vocabulary):
            text = text_of(token) if token < tokens else BROKEN
            # A token that no text can spell stays alone.
            key = f"\0{token}" if BROKEN in text or not text else normalised(text)
            ids[token] = groups.setdefault(key, len(groups))
        return Folding(ids)

    def sha256(self) -> str:
        return hashlib.sha256(self.ids.astype("<i4").tobytes()).hexdigest()

    def save(self, path: Path) -> None:
        write_npz(path, {"folding": self.ids})

    @staticmethod
    def load(path: Path, vocabulary: int) -> "Folding":
        arrays = read_npz(path, FILE_KIND)
        if "folding" not in arrays:
            raise UserError(f"{path} is not {FILE_KIND}: it has no 'folding'")
        ids = int_array(arrays, "folding", path, vocabulary)
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise UserError(f"{path}: 'folding' holds ids outside the vocabulary of {vocabulary:,}")
        return Folding(ids.astype(np.int32))

    def __str__(self) -> str:
        groups = int(self.ids.max()) + 1
        return f"n-grams over {groups:,} folded ids of {len(self.ids):,} tokens"


# Hashing


@dataclass(frozen=True)
class NgramHash:
    orders: tuple[int, ...]
    multipliers: tuple[tuple[tuple[int, ...], ...], ...]
    """[layer][order][position]"""
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    """[layer][order][head]"""
    outside: int
    """The id of what lies before the sequence, larger than any token's; not used with a `pad_token`."""
    pad_token: int | None = None
    """The token whose id stands for what lies before the sequence."""

    @property
    def num_keys(self) -> int:
        return sum(len(heads) for orders in self.rows for heads in orders)


def plan_ngram_hash(
    vocabulary: int,
    orders: tuple[int, ...],
    layers: tuple[int, ...],
    head_rows: Sequence[tuple[int, ...]],
    pad_token: int | None = None,
) -> NgramHash:
    """`head_rows`: rows of each hash head of each layer, order by order."""
    heads = len(head_rows[0]) // len(orders)
    return NgramHash(
        orders=orders,
        multipliers=tuple(tuple(_multipliers(layer, order, vocabulary) for order in orders) for layer in layers),
        rows=tuple(tuple(rows[n * heads : (n + 1) * heads] for n in range(len(orders))) for rows in head_rows),
        outside=vocabulary,
        pad_token=pad_token,
    )


@lru_cache
def primes_from(minimum: int, count: int) -> tuple[int, ...]:
    """The first `count` primes that are at least `minimum`, ascending."""
    primes: list[int] = []
    number = max(2, minimum)
    while len(primes) < count:
        if is_prime(number):
            primes.append(number)
        number += 1
    return tuple(primes)


_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""Miller and Rabin's test with these is exact for all numbers below 3 * 10^23."""


def is_prime(number: int) -> bool:
    if any(number % prime == 0 for prime in _WITNESSES):
        return number in _WITNESSES
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in _WITNESSES:
        power = pow(witness, odd, number)
        if power not in (1, number - 1):
            for _ in range(twos - 1):
                power = power * power % number
                if power == number - 1:
                    break
            else:
                return False
    return number > 1


def _multipliers(layer: int, order: int, vocabulary: int) -> tuple[int, ...]:
    limit = 2**63 // (vocabulary + 1) // 2
    multipliers = []
    for position in range(order):
        digest = hashlib.blake2b(f"engram/{layer}/{order}/{position}".encode(), digest_size=8).digest()
        multipliers.append(2 * (int.from_bytes(digest, "little") % limit) + 1)
    return tuple(multipliers)


@dataclass(frozen=True)
class Grams:
    """The distinct n-grams of one order in some tokens."""

    index: Integers
    """The n-gram that ends at each position, shaped like the tokens."""
    ids: list[Integers]
    """The folded ids [G] of the n-grams, from the last token backwards."""

    def select(self, select: Callable[[Integers], Integers]) -> "Grams":
        """The n-grams that end at some of the positions."""
        chosen = select(self.index)
        if chosen is self.index:
            return self
        numbers, index = np.unique(chosen, return_inverse=True)
        return Grams(index.reshape(chosen.shape).astype(np.int32), [ids[numbers] for ids in self.ids])


class NgramKeys:
    """Maps tokens to keys, by way of their distinct n-grams: each is hashed once."""

    def __init__(
        self,
        hashing: NgramHash,
        folding: NDArray[Any],
        end_of_text: int | None = None,
        layers: Sequence[int] | None = None,
    ):
        """`folding`: the id of each token. `end_of_text`: with document masking, the token that ends a document.
        `layers`: which layers of `hashing` have their keys computed; None: all."""
        self._folding, self._end = folding.astype(np.uint64), end_of_text
        chosen = range(len(hashing.rows)) if layers is None else layers
        heads = [head for of_layer in hashing.rows for of_order in of_layer for head in of_order]
        per_layer, firsts = len(heads) // len(hashing.rows), np.cumsum([0, *heads]).tolist()
        self.first_rows = [firsts[layer * per_layer + head] for layer in chosen for head in range(per_layer)]
        """First row of each head, by layer, order and head."""
        self.num_rows = int(firsts[-1])
        """Of all layers."""
        self.hash = replace(
            hashing,
            multipliers=tuple(hashing.multipliers[layer] for layer in chosen),
            rows=tuple(hashing.rows[layer] for layer in chosen),
        )
        pad = hashing.pad_token
        self._outside = np.uint64(hashing.outside) if pad is None else self._folding[pad]

    def grams(self, tokens: Integers) -> list[Grams]:
        """[..., T] -> the n-grams of each order. An n-gram of n tokens is numbered by (the one of its last n - 1
        tokens, the id before them)."""
        ids, base = self._folding[tokens], np.uint64(self.hash.outside + 1)
        found: list[Grams] = []
        for steps in range(max(self.hash.orders)):
            codes = self._shifted(ids, tokens, steps)
            if found:
                codes = found[-1].index.astype(np.uint64) * base + codes
            distinct, index = np.unique(codes, return_inverse=True)
            shorter = distinct // base
            previous = [of_shorter[shorter] for of_shorter in found[-1].ids] if found else []
            found.append(Grams(index.reshape(tokens.shape).astype(np.int32), [*previous, distinct - shorter * base]))
        return [found[order - 1] for order in self.hash.orders]

    def head_rows(self, layer: int, order: int, grams: Grams) -> list[Integers]:
        """The row of each n-gram within each hash head. `layer`, `order`: indices."""
        multipliers = self.hash.multipliers[layer][order]
        mixed = grams.ids[0] * np.uint64(multipliers[0])
        for previous, multiplier in zip(grams.ids[1:], multipliers[1:], strict=True):
            mixed ^= previous * np.uint64(multiplier)
        heads = self.hash.rows[layer][order]
        # numpy divides by a constant four times as fast as it takes the remainder.
        types = [np.int32 if rows <= MAX_INT32 else np.int64 for rows in heads]
        return [
            (mixed - mixed // np.uint64(rows) * np.uint64(rows)).astype(number)
            for rows, number in zip(heads, types, strict=True)
        ]

    def _shifted(self, ids: Integers, tokens: Integers, steps: int) -> Integers:
        """ids[t - steps]."""
        if steps == 0:
            return ids
        shifted = np.full_like(ids, self._outside)
        shifted[..., steps:] = ids[..., :-steps]
        if self._end is not None:
            ends = (tokens == self._end).astype(np.int64)
            documents = np.cumsum(ends, axis=-1) - ends  # an end-of-text token still belongs to the document it ends
            shifted[..., steps:][documents[..., steps:] != documents[..., :-steps]] = self._outside
        return shifted
