"""Token frequencies: the file, and how many rows a text of these frequencies is expected to touch.

A frequency file is an `.npz` with `counts` (integers) or `p` (floats that sum to 1) over the vocabulary; other arrays
are ignored. It is read as float64 relative frequencies, padded with zeros to the model's vocabulary, which is often
larger than the tokenizer's.

Expectations treat tokens as independent draws. A row is touched if any token that reads it occurs, so its probability
is that of one outcome as likely as all its readers together.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.errors import UserError
from xgram_dist.files import read_npz
from xgram_dist.tables.routing import Routing

FILE_KIND = "a frequency file (.npz with `counts` or `p`; `xgram-dist frequencies` makes one)"

# Wide enough for float32 probabilities, narrow enough to catch percentages and lists that lost tokens.
SUM_TOLERANCE = 1e-4

# A vocabulary is an index of int32 rows, and this many tokens are already more than any tokenizer has.
MAX_VOCABULARY = 2**27


def load_frequencies(path: str | Path, vocabulary: int | None = None) -> NDArray[np.float64]:
    """Relative frequencies of tokens 0 .. vocabulary - 1 (default: as many as the file holds)."""
    arrays = read_npz(path, FILE_KIND, names={"counts", "p"})
    if len(arrays) != 1:
        held = "both `counts` and `p`" if arrays else "neither `counts` nor `p`"
        raise UserError(f"{path} holds {held}; it must be {FILE_KIND}")
    name, array = next(iter(arrays.items()))
    wanted = "iu" if name == "counts" else "f"
    if array.dtype.kind not in wanted:
        kind = "integers" if name == "counts" else "floats"
        raise UserError(f"{path}: '{name}' has type {array.dtype}; it must hold {kind}")
    frequencies = check_frequencies(array, f"{path}: '{name}'")
    total = float(frequencies.sum())
    if name == "p" and abs(total - 1) > SUM_TOLERANCE:
        raise UserError(f"{path}: 'p' sums to {total:.6g}; it must sum to 1 within {SUM_TOLERANCE:g}")
    if name == "counts":
        frequencies = frequencies / total
    return pad_frequencies(frequencies, vocabulary, path)


def pad_frequencies(frequencies: NDArray[np.float64], vocabulary: int | None, path: str | Path) -> NDArray[np.float64]:
    """Zeros for the tokens from the file's end to `vocabulary`."""
    if vocabulary is None:
        return frequencies
    if vocabulary < len(frequencies):
        raise UserError(
            f"vocabulary is {vocabulary:,}, but {path} holds {len(frequencies):,} tokens; "
            f"it must be at least {len(frequencies):,}, or the file be of another tokenizer"
        )
    if vocabulary > MAX_VOCABULARY:
        raise UserError(f"vocabulary is {vocabulary:,}; the limit is {MAX_VOCABULARY:,}")
    return np.concatenate([frequencies, np.zeros(vocabulary - len(frequencies))])


def check_frequencies(frequencies: NDArray[Any], name: str) -> NDArray[np.float64]:
    """The frequencies as float64, if they list at least one token, are finite, not negative and not all zero."""
    if frequencies.ndim != 1 or len(frequencies) == 0 or frequencies.dtype.kind not in "iuf":
        raise UserError(
            f"{name} has type {frequencies.dtype} and shape {frequencies.shape}; it must list one number for each token"
        )
    if len(frequencies) > MAX_VOCABULARY:
        raise UserError(f"{name} lists {len(frequencies):,} tokens; the limit is {MAX_VOCABULARY:,}")
    values = frequencies.astype(np.float64)
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(bad):
        token = int(bad[0])
        raise UserError(f"{name} is {frequencies[token]} for token {token}; it must be finite and at least 0")
    if not values.sum() > 0:
        raise UserError(f"{name} sums to 0; at least one token must have been seen")
    if not np.isfinite(values.sum()):
        raise UserError(f"{name} sums to infinity; give counts or probabilities")
    return values


# Touched rows


def chance_seen(probabilities: NDArray[Any], tokens: int) -> NDArray[np.float64]:
    """1 - (1 - p)^tokens: the probability that an outcome of probability p occurs among `tokens` draws."""
    assert tokens > 0, tokens
    # Sums of probabilities may exceed 1 by rounding. Small p would vanish in 1 - p; log1p and expm1 keep it.
    with np.errstate(divide="ignore"):
        chance: NDArray[np.float64] = -np.expm1(tokens * np.log1p(-np.minimum(probabilities, 1.0)))
    return chance


LOG_BIN = 0.05
"""Width of a bin of log probabilities, in which `expected_ngrams` counts n-grams."""


def expected_ngrams(frequencies: NDArray[Any], order: int, tokens: int) -> float:
    """Distinct n-grams of `order` tokens in a text of so many, if tokens were independent draws. Real text repeats its
    n-grams more often, so this is an upper bound.

    An n-gram's log probability is the sum of its tokens', so a histogram over n-grams is that over tokens, convolved
    with itself. No list of n-grams is made."""
    probabilities = frequencies[frequencies > 0] / np.sum(frequencies, dtype=np.float64)
    logs = np.log(probabilities)
    lowest = logs.min()
    of_token: NDArray[np.float64] = np.bincount(np.rint((logs - lowest) / LOG_BIN).astype(np.int64)).astype(np.float64)
    counts = of_token
    for _ in range(order - 1):
        counts = np.convolve(counts, of_token)
    bins = np.exp(order * lowest + LOG_BIN * np.arange(len(counts)))
    # Rounding to bins must not change what all probabilities sum to.
    return float(counts @ chance_seen(bins / (counts @ bins), tokens))


def row_probabilities(
    frequencies: NDArray[Any], routing: Routing | None, view: int, num_rows: int
) -> NDArray[np.float64]:
    """For each row, the probability that one token of the text reads it."""
    probabilities: NDArray[np.float64] = frequencies / np.sum(frequencies, dtype=np.float64)
    if routing is None:
        assert len(probabilities) == num_rows, (len(probabilities), num_rows)
        return probabilities
    if len(frequencies) != routing.vocabulary:
        raise UserError(
            f"the frequencies are of {len(frequencies):,} tokens, the routing of {routing.vocabulary:,}; "
            f"use frequencies of the same tokenizer"
        )
    lists = routing.views[view]
    weights = np.repeat(probabilities, np.diff(lists.offsets))
    return np.bincount(lists.rows, weights=weights, minlength=num_rows).astype(np.float64)


def expected_touched_share(frequencies: NDArray[Any], routing: Routing | None, num_rows: int, tokens: int) -> float:
    """Share of the rows that `tokens` tokens touch, mean over the routing's views; rows no token reads count too."""
    views = range(1 if routing is None else routing.num_views)
    chances = [chance_seen(row_probabilities(frequencies, routing, view, num_rows), tokens) for view in views]
    return float(np.mean(chances))
