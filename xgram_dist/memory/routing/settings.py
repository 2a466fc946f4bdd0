"""The settings of a routing, and the regions of physical rows that follow from them.

In: the numbers a person chooses (`RoutingSettings`) and the size of the vocabulary. Out: how many rows a table
has and where its regions lie (`Regions`), or a `UserError` when the rows do not suffice for them.

    row 0 ..                                                                        .. num_rows - 1
    | VIP base rows | VIP copies | region of bucket 0 | ... | region of bucket B-1 | unused rest |
"""

import math
from dataclasses import dataclass, fields

from xgram_dist.errors import UserError
from xgram_dist.memory.routing.hashing import MULTIPLIERS

# Rows are stored as int32: a table of more rows than this is not one this format can describe.
MAX_ROWS = 2**31 - 1

# Additional rows of one token; every token's slots are held in memory at once while a routing is built.
MAX_COPIES = 64


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
                raise UserError(f"routing {field.name} is {value!r}; it must be {kind}")
        _at_least("vip", self.vip, 0)
        _at_least("buckets", self.buckets, 1)
        _at_least("copies", self.copies, 0)
        _at_least("paths", self.paths, 1)
        if self.paths > len(MULTIPLIERS):
            raise UserError(f"routing paths is {self.paths}; there are {len(MULTIPLIERS)} hash multipliers, use fewer")
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


@dataclass(frozen=True)
class Regions:
    """Where the regions of a table with shared rows lie."""

    num_rows: int
    vip_rows: int  # the VIP region is rows 0 .. vip_rows - 1
    region_rows: int  # rows of each bucket's region
    buckets: int

    def start(self, bucket: int) -> int:
        return self.vip_rows + bucket * self.region_rows


def plan_regions(settings: RoutingSettings, num_rows: int) -> Regions:
    """Cut `num_rows` rows into the VIP region and equal bucket regions."""
    if num_rows > MAX_ROWS:
        raise UserError(f"a table of {num_rows:,} rows is too long; a routing holds at most {MAX_ROWS:,} rows")
    vip_rows = settings.vip * (1 + settings.copies)
    if vip_rows > num_rows:
        raise UserError(
            f"routing vip is {settings.vip}, which with copies {settings.copies} needs {vip_rows:,} rows, but the "
            f"table has {num_rows:,}; lower vip or copies, or raise compression"
        )
    region_rows = (num_rows - vip_rows) // settings.buckets
    if region_rows < 1:
        raise UserError(
            f"routing compression leaves {num_rows - vip_rows:,} of {num_rows:,} rows for {settings.buckets} buckets, "
            f"less than one row each; lower buckets or vip, or raise compression above {settings.compression}"
        )
    return Regions(num_rows, vip_rows, region_rows, settings.buckets)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"routing {name} is {value}; it must be at least {least}")
