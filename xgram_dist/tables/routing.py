"""A routing: which rows of a table every token reads, and with which coefficients.

One routing serves all layers and sites. Its views differ only in how hashed tokens collide. The vector of a token is
the sum over its rows of coefficient * gate(row) * table[row]. Rows lie in regions:

    row 0 ..                                                                         .. num_rows - 1
    | VIP base rows | VIP copies | region of bucket 0 | ... | region of bucket B-1 | unused rest |

The most frequent tokens (VIP) have rows of their own. The others are spread over frequency-balanced buckets: a token of
a sparse bucket has rows of its own too, the tokens of a dense bucket are hashed into its region and share rows.

`routing_build.py` builds a routing from token frequencies, `routing_import.py` from a published token map,
`routing_io.py` reads and writes the file, `routing_statistics.py` describes it.
"""

import hashlib
import json
import math
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from xgram_dist.errors import UserError
from xgram_dist.untrusted import shown

MAX_ROWS = 2**31 - 1
"""Rows are stored as int32."""
MAX_COPIES = 64
"""Additional rows of a token. All slots of all tokens are in memory while a routing is built."""
MAX_PATHS = 8
"""As many as there are hash multipliers (routing_build.py)."""
VIP, OUTSIDE = -1, -2
"""In place of a bucket: the VIP region, and rows that are in no region."""

FORMAT, VERSION = "xgram-dist routing", 1
"""Of the file; both are part of the content hash."""


@dataclass(frozen=True)
class RoutingSettings:
    """What decides a routing, besides the token frequencies."""

    vip: int = 200  # tokens with rows of their own, the most frequent ones
    buckets: int = 32  # frequency buckets that share out the other rows
    compression: float = 0.5  # rows / vocabulary; 1 is the plain table: row = token id, no hashing, no gate
    paths: int = 2  # hash paths of a token in a dense bucket
    alpha: float = 0.5  # a token weighs frequency^alpha when buckets are filled
    copies: int = 3  # additional rows a VIP or sparse token may have
    decay: float = 0.8  # the c-th additional row weighs decay^c, the first row 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            wanted: tuple[type, ...] = (int,) if field.type is int else (int, float)
            if isinstance(value, bool) or not isinstance(value, wanted):
                kind = "a whole number" if field.type is int else "a number"
                raise UserError(f"routing {field.name} is {shown(value)}; it must be {kind}")
        _at_least("vip", self.vip, 0)
        _at_least("buckets", self.buckets, 1)
        _at_least("copies", self.copies, 0)
        _at_least("paths", self.paths, 1)
        if self.paths > MAX_PATHS:
            raise UserError(f"routing paths is {self.paths}; there are {MAX_PATHS} hash multipliers, use fewer")
        if self.copies > MAX_COPIES:
            raise UserError(f"routing copies is {self.copies}; it must be at most {MAX_COPIES}")
        for name in ("compression", "alpha", "decay"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise UserError(f"routing {name} is {value}; it must be above 0 and at most 1")

    @property
    def gated(self) -> bool:
        """Whether rows are shared and so carry a gate; the plain table of compression 1 has none."""
        return self.compression < 1

    def num_rows(self, vocabulary: int) -> int:
        """floor(compression * vocabulary), forgiving the rounding of the product.

        In floating point 0.29 * 100 is a little less than 29; a person who writes 0.29 means 29 rows.
        """
        return math.floor(self.compression * vocabulary * (1 + 1e-14))


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"routing {name} is {value}; it must be at least {least}")


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
class Routing:
    """Token -> rows, for every view; arrays are read-only."""

    vocabulary: int
    num_rows: int
    views: tuple[View, ...]
    vip_rows: int  # the VIP region is rows 0 .. vip_rows - 1
    bucket_start: NDArray[np.int64]  # first row of every bucket's region
    bucket_rows: NDArray[np.int64]  # rows of every bucket's region
    bucket_sparse: NDArray[np.bool_]  # whether a bucket gives each token rows of its own
    settings: RoutingSettings
    gated: bool  # False for the plain table: row = token id, coefficient 1, and no gate
    source: str  # "frequencies" or "token map"

    def __post_init__(self) -> None:
        for array in (self.bucket_start, self.bucket_rows, self.bucket_sparse):
            array.setflags(write=False)

    @property
    def num_views(self) -> int:
        return len(self.views)

    def sha256(self) -> str:
        """Hash of the map itself: equal maps have equal hashes, whatever their settings and source."""
        return self._sha256

    @cached_property
    def _sha256(self) -> str:
        numbers = [self.vocabulary, self.num_rows, self.vip_rows, int(self.gated), len(self.views)]
        digest = hashlib.sha256(json.dumps([FORMAT, VERSION, *numbers]).encode())
        layout = [self.bucket_start, self.bucket_rows, self.bucket_sparse]
        for array in [*layout, *(part for view in self.views for part in (view.offsets, view.rows, view.coefficients))]:
            # Little-endian on every machine; the length in front keeps consecutive arrays apart.
            digest.update(len(array).to_bytes(8, "little"))
            digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()


def region_of_rows(routing: Routing, rows: NDArray[np.int32]) -> NDArray[np.int64]:
    """The bucket in whose region each row lies, `VIP` for the VIP region, `OUTSIDE` for unused rows."""
    region = np.searchsorted(routing.bucket_start, rows, side="right").astype(np.int64) - 1
    if len(routing.bucket_start):
        beyond = rows >= (routing.bucket_start + routing.bucket_rows)[region]
        region[(region < 0) | beyond] = OUTSIDE
    else:
        region[:] = OUTSIDE
    region[rows < routing.vip_rows] = VIP
    return region
