"""What a row optimizer does.

It owns the update of one tensor `values` [S, W], in place: S rows of this rank, W columns. Shapes in this folder:
R rows of a step, B rows of a block of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass
class RowState:
    """Everything that is needed, beside the values, to go on to the last bit; live tensors, by name."""

    columns: dict[str, Tensor] = field(default_factory=dict)
    """Shaped as the values [S, W]."""
    tables: dict[str, Tensor] = field(default_factory=dict)
    """A number for each row and table [S, J]."""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """A number for each row [S]."""
    whole: dict[str, Tensor] = field(default_factory=dict)
    """Small, and the same on every rank."""


class RowOptimizer(Protocol):
    def settle(self, rows_R: Tensor, *, moments: bool = False) -> None:
        """Before these rows are read: bring values to what they are after all steps so far. With `moments`, the
        optimizer's moments too (when no update follows). Rows are distinct."""

    def open(self, rows_R: Tensor, parts: list[slice], out_RW: Tensor) -> Iterator[None]:
        """The values of these rows after all steps so far, as a copy in the memory given, part after part. The next
        `update` is of this very tensor of rows, unless `close` comes first: then nothing has happened. The copy is not
        to be changed before."""

    def opened(self, rows_R: Tensor) -> Tensor:
        """What `open` gave for these rows, once more; not to be changed."""

    def close(self) -> None:
        """No update follows `open`."""

    def update(self, rows_R: Tensor, gradient_RW: Tensor, rates: tuple[float, float], factor: float = 1.0) -> None:
        """One optimizer step. rates: learning rate of rows < cut and of the others. factor: of the gradient, which is
        used up. Rows are distinct. Every row settled without moments since the last update is among rows_R."""

    def nbytes(self) -> int:
        """Bytes held beside the values."""

    def settle_all(self) -> None:
        """Bring all rows and moments up to date, before values are saved or exported."""

    def exact(self) -> RowState:
        """For a checkpoint; nothing is changed by asking."""

    def restore(self, whole: dict[str, Tensor]) -> None:
        """The other tensors of `exact` have been overwritten with saved ones; these are saved ones of its `whole`."""

    def state(self) -> dict[str, Tensor]:
        """Persistent tensors by name: with `values`, enough to go on bitwise. Settles all rows first. The tensors
        with a dimension have one row for each row of `values`."""

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from `state`; `values` are already those that went with it."""
