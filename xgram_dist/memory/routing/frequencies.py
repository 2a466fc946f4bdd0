"""Token frequencies: the file, and what every list of frequencies must satisfy.

In: an `.npz` file with `counts` (integers) or `p` (floats that sum to 1) over the vocabulary. Out: a float64 array of
relative frequencies, filled up with zeros to a larger vocabulary (a model's is often padded beyond its
tokenizer's). Other arrays in the file are not looked at.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgram_dist.errors import UserError
from xgram_dist.memory.routing.npz import read_arrays

WHAT = "a frequency file (.npz with `counts` or `p`; `xgram-dist frequencies` makes one)"

# Wide enough for float32 probabilities, narrow enough to catch percentages and lists that lost tokens.
SUM_TOLERANCE = 1e-4

# A vocabulary is an index of int32 rows, and this many tokens are already more than any tokenizer has.
MAX_VOCABULARY = 2**27


def load_frequencies(path: str | Path, vocabulary: int | None = None) -> NDArray[np.float64]:
    """Relative frequencies of tokens 0 .. vocabulary - 1 (default: as many as the file holds)."""
    arrays = read_arrays(path, WHAT, names={"counts", "p"})
    if len(arrays) != 1:
        held = "both `counts` and `p`" if arrays else "neither `counts` nor `p`"
        raise UserError(f"{path} holds {held}; it must be {WHAT}")
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
            f"{name} has type {frequencies.dtype} and shape {frequencies.shape}; it must list one number a token"
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
