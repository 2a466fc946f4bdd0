"""From candidate slots to access lists.

In: for every token its candidate slots (VIP and sparse tokens), or the region it is hashed into (dense tokens). Out:
for every view the access list of each token as CSR: which rows it reads and with which coefficients.

A token's vector is sum over rows of coefficient * gate(row) * table[row]. Slot weights are normalised by their sum,
and every hash path counts: a slot of a VIP or sparse token is visited by all paths, so its coefficient carries
`paths` times its weight. Hash paths of a dense token that meet in one row are merged and their coefficients summed.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xgram_dist.memory.routing.hashing import hash_positions, path_multiplier

NO_ROW = -1


@dataclass(frozen=True, eq=False)
class View:
    """The access lists of one view: token t reads rows[offsets[t]:offsets[t + 1]], in slot order.

    Rows are int32 (a table has fewer than 2^31 rows) and coefficients float32: they multiply float32 or bfloat16 rows,
    so more digits would be rounded away at the first product. They are computed in float64 and rounded once.
    """

    offsets: NDArray[np.int64]
    rows: NDArray[np.int32]
    coefficients: NDArray[np.float32]

    def __post_init__(self) -> None:
        for array in (self.offsets, self.rows, self.coefficients):
            array.setflags(write=False)

    @property
    def vocabulary(self) -> int:
        return len(self.offsets) - 1

    def tokens(self) -> NDArray[np.int64]:
        """The token of every access."""
        return np.repeat(np.arange(self.vocabulary, dtype=np.int64), np.diff(self.offsets))

    def of_token(self, token: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Rows and coefficients of one token."""
        span = slice(int(self.offsets[token]), int(self.offsets[token + 1]))
        return self.rows[span], self.coefficients[span]


@dataclass(frozen=True, eq=False)
class Slots:
    """Where every token lives, before hashing. A token has either slots or a region to be hashed into."""

    rows: NDArray[np.int64]  # [vocabulary, 1 + copies]; NO_ROW where there is no such slot
    weights: NDArray[np.float64]  # [vocabulary, 1 + copies]; not normalised
    hashed_start: NDArray[np.int64]  # [vocabulary]; first row of a dense token's region, NO_ROW for the others
    region_rows: int


def build_views(slots: Slots, paths: int, views: int) -> tuple[View, ...]:
    """The access lists of `views` views; they differ in the hash multipliers alone."""
    direct_weights = np.where(slots.rows != NO_ROW, slots.weights, 0.0)
    total = direct_weights.sum(axis=1, keepdims=True)
    # Dense tokens have no slots and so no weight; their coefficients come from the hash paths.
    direct: NDArray[np.float64] = direct_weights * (paths / np.where(total > 0, total, 1.0))
    hashed = np.flatnonzero(slots.hashed_start != NO_ROW)
    return tuple(_build_view(slots, direct, hashed, paths, view) for view in range(views))


def _build_view(slots: Slots, direct: NDArray[np.float64], hashed: NDArray[np.int64], paths: int, view: int) -> View:
    vocabulary, num_slots = slots.rows.shape
    width = max(num_slots, paths)
    rows = np.full((vocabulary, width), NO_ROW, dtype=np.int64)
    coefficients = np.zeros((vocabulary, width))
    rows[:, :num_slots] = slots.rows
    coefficients[:, :num_slots] = direct
    if len(hashed):
        rows[hashed, :paths], coefficients[hashed, :paths] = _hash_paths(slots, hashed, paths, view)
    present = rows != NO_ROW
    offsets = np.zeros(vocabulary + 1, dtype=np.int64)
    np.cumsum(present.sum(axis=1), out=offsets[1:])
    return View(offsets, rows[present].astype(np.int32), coefficients[present].astype(np.float32))


def _hash_paths(
    slots: Slots, tokens: NDArray[np.int64], paths: int, view: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Rows and coefficients of the dense tokens, a column a path; a row met again is merged into its first path."""
    positions = [hash_positions(tokens, path_multiplier(view, path, paths), slots.region_rows) for path in range(paths)]
    rows = slots.hashed_start[tokens][:, None] + np.stack(positions, axis=1)
    coefficients = np.ones(rows.shape)
    for path in range(1, paths):
        for earlier in range(path):
            # `rows` of an already merged path is NO_ROW, so a path is merged once, into the first that met its row.
            same = (rows[:, path] == rows[:, earlier]) & (rows[:, path] != NO_ROW)
            coefficients[same, earlier] += coefficients[same, path]
            coefficients[same, path] = 0.0
            rows[same, path] = NO_ROW
    return rows, coefficients
