"""The hash that spreads the tokens of a dense bucket over its region.

In: token ids and a multiplier. Out: positions inside a region. hash(t) = (t * multiplier mod 2^64) with the top
bit cleared; the position is the hash modulo the region's rows. View m takes its `paths` multipliers from a
circle of eight, starting at m * paths, so that views of one site collide differently.
"""

import numpy as np
from numpy.typing import NDArray

MULTIPLIERS = (
    11400714819323198485,
    14313749767032793493,
    18397679294719823053,
    13627969195753728349,
    7109453100751438417,
    1609587929392839161,
    15404834773449339307,
    10041221585803275913,
)

_TOP_BIT_CLEARED = np.uint64(2**63 - 1)


def path_multiplier(view: int, path: int, paths: int) -> int:
    """The multiplier of hash path `path` of view `view`, when a token has `paths` paths."""
    return MULTIPLIERS[(view * paths + path) % len(MULTIPLIERS)]


def hash_positions(tokens: NDArray[np.int64], multiplier: int, region_rows: int) -> NDArray[np.int64]:
    """Position of each token inside a region of `region_rows` rows."""
    # Products of uint64 arrays wrap around at 2^64, which is the modulus wanted.
    product = tokens.astype(np.uint64) * np.uint64(multiplier)
    return ((product & _TOP_BIT_CLEARED) % np.uint64(region_rows)).astype(np.int64)
