"""What a rank holds, part by part.

Parts of `step` are there all along; those of the other moments (`compute`: forward and backward; `reduce`: gradients
after the last backward pass; `exchange`: tables around it) come and go, so only the largest moment counts.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Moment = Literal["step", "compute", "reduce", "exchange"]


@dataclass(frozen=True)
class Part:
    key: str
    bytes: float
    moment: Moment = "step"
    host: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def total(parts: list[Part], *, host: bool = False) -> float:
    """Most bytes at one time, of the device or of the host."""
    sums: dict[str, float] = {}
    for part in parts:
        if part.host == host:
            sums[part.moment] = sums.get(part.moment, 0.0) + part.bytes
    return sums.pop("step", 0.0) + max(sums.values(), default=0.0)
