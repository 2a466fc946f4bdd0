"""Hashed, folded and frequent n-grams against plain loops."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from xgram_dist.errors import UserError
from xgram_dist.tables.fgrams import Fgrams, count_grams
from xgram_dist.tables.ngrams import Folding, normalised, primes_from


def test_primes_are_the_next_ones() -> None:
    assert primes_from(2, 5) == (2, 3, 5, 7, 11)
    assert primes_from(24, 3) == (29, 31, 37)
    sieve = [n for n in range(2, 1200) if all(n % d for d in range(2, n))]
    assert primes_from(1000, 5) == tuple(n for n in sieve if n >= 1000)[:5]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" Apple", "apple"),
        ("ÉTAT", "etat"),
        ("ﬁne", "fine"),
        ("a \n\t b", "a b"),
        ("   ", " "),
        ("Ａ", "a"),
        ("数", "数"),
    ],
)
def test_text_is_normalised(text: str, expected: str) -> None:
    assert normalised(text) == expected


def test_tokens_of_one_text_share_an_id_and_broken_ones_stay_alone(tmp_path: Path) -> None:
    texts = ["the", " The", "THE", "cat", "\ufffd", "\ufffd", " ", "\n", "thé", ""]
    folding = Folding.build(lambda token: texts[token], len(texts), 12)
    ids = folding.ids.tolist()
    assert ids[0] == ids[1] == ids[2] == ids[8]
    assert ids[6] == ids[7]
    assert len({ids[0], ids[3], ids[4], ids[5], ids[6], ids[9], ids[10], ids[11]}) == 8
    assert max(ids) == len(set(ids)) - 1
    folding.save(tmp_path / "keys.npz")
    again = Folding.load(tmp_path / "keys.npz", 12)
    assert again.sha256() == folding.sha256() != Folding.identity(12).sha256()
    with pytest.raises(UserError, match="12"):
        Folding.load(tmp_path / "keys.npz", 13)


def slow_grams(sequences: list[list[int]], longest: int) -> Counter[tuple[int, ...]]:
    counts: Counter[tuple[int, ...]] = Counter()
    for row in sequences:
        for n in range(2, longest + 1):
            counts.update(tuple(row[t - n + 1 : t + 1]) for t in range(n - 1, len(row)))
    return counts


@pytest.mark.parametrize(("longest", "most"), [(2, 12), (3, 25), (4, 1000)])
def test_the_most_frequent_n_grams_are_found_and_matched(longest: int, most: int, tmp_path: Path) -> None:
    chooser = random.Random(1)
    sequences = [[chooser.choice([0, 1, 1, 2, 5, 90]) for _ in range(17)] for _ in range(9)]
    grams = count_grams(np.array(sequences), longest, most)
    found = [tuple(int(t) for t in row if t >= 0) for row in grams.tokens]
    assert found[0] == ()
    counts = slow_grams(sequences, longest)
    frequent = sorted((count for count in counts.values() if count >= 2), reverse=True)[:most]
    assert [counts[gram] for gram in found[1:]] == frequent
    assert len(set(found)) == len(found)
    grams.save(tmp_path / "keys.npz")
    again = Fgrams.load(tmp_path / "keys.npz", 91)
    assert again.sha256() == grams.sha256()
    fresh = [[chooser.choice([0, 1, 2, 5, 7, 90]) for _ in range(17)] for _ in range(6)]
    numbers = {gram: number for number, gram in enumerate(found) if gram}
    matched = again.match(np.array(fresh))
    assert (matched > 0).any()
    for row, of_row in zip(fresh, matched, strict=True):
        for t in range(len(row)):
            ends = [tuple(row[t - n + 1 : t + 1]) for n in range(longest, 1, -1) if t + 1 >= n]
            assert of_row[t] == next((numbers[gram] for gram in ends if gram in numbers), 0)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    Folding.identity(5).save(tmp_path / "keys.npz")
    with pytest.raises(UserError, match="not a file of f-grams"):
        Fgrams.load(tmp_path / "keys.npz", 5)
