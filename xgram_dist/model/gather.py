"""Reads of the working set: the row of each position, and a backward pass without atomics.

Many positions read the same row: the most frequent token alone may be a ninth of a batch. The gradient of a row is the
sum over the positions that read it. Positions are sorted by row once for a micro-batch (`sort_slots`), and the
gradients of all tables are segment sums in that order (`gather_rows`). Each row is summed by one thread for each
column, in a fixed order, so results repeat bitwise whether or not torch is told to be deterministic.

On a GPU no thread may walk the thousands of positions of a frequent token. There the first `PIECE` positions of a row
are one piece and the further ones are cut into pieces of that length; pieces are summed first, then their sums. All
shapes follow from the number of positions and rows, so the host never waits for the device. On a CPU a row is one
piece: its positions are added in the order in which they occur.

No collectives. Shapes: N positions (B x T, or B x T x K), U rows of the working set, W columns, P pieces beyond the
first of a row, at most N / PIECE.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PIECE = 128
"""Positions that one thread adds up on a GPU."""


class LongRows(NamedTuple):
    """The pieces beyond the first of each row, row by row. Unused entries at the end are empty pieces."""

    piece_starts_P: Tensor
    """First sorted position of each piece."""
    row_starts_P: Tensor
    """First piece of each row that has any, after an entry without pieces: the zero of all other rows."""
    entry_U: Tensor
    """The entry of each row of the working set."""


class Slots(NamedTuple):
    """The row of each position; for a backward pass, also the positions in the order of their rows."""

    rows: Tensor
    """The row of each position, shaped like the positions."""
    order_N: Tensor | None = None
    """Positions sorted by row; stable. None: no backward pass."""
    starts_U: Tensor | None = None
    """First sorted position of each row."""
    long: LongRows | None = None
    """None: every row is one piece."""

    def select(self, positions: slice) -> "Slots":
        """Of these positions of every sequence."""
        rows = self.rows[:, positions]
        return Slots(rows) if self.starts_U is None else sort_slots(rows, self.starts_U.numel())


def sort_slots(rows: Tensor, num_rows: int) -> Slots:
    """`rows`: the row of each position, below `num_rows`."""
    if not torch.is_grad_enabled():
        return Slots(rows)
    piece = None if rows.device.type == "cpu" else PIECE
    return _sorted_slots(rows, num_rows, piece)


def _sorted_slots(rows: Tensor, num_rows: int, piece: int | None) -> Slots:
    """`piece`: most positions in a piece. None: a row is one piece."""
    row_N, order_N = torch.sort(rows.reshape(-1), stable=True)
    rows_U, num_positions = torch.arange(num_rows, device=rows.device), rows.numel()
    starts_U = torch.searchsorted(row_N, rows_U)
    if piece is None or num_positions <= piece:
        return Slots(rows, order_N, starts_U)
    # The first pieces of all rows, then the further ones, which are keyed by row + num_rows.
    position_N = torch.arange(num_positions, device=rows.device)
    rank_N = position_N - starts_U[row_N]
    key_N, again_N = torch.sort(row_N + num_rows * (rank_N >= piece), stable=True)
    order_N, rank_N = order_N[again_N], rank_N[again_N]
    # Sorting moves unused entries, which have the largest value, to the end.
    num_pieces = num_positions // piece
    begins_N = (key_N >= num_rows) & (rank_N % piece == 0)
    piece_starts_P = torch.where(begins_N, position_N, num_positions).sort().values[:num_pieces]
    last_P = piece_starts_P.clamp(max=num_positions - 1)
    begins_row_P = (piece_starts_P < num_positions) & (rank_N[last_P] == piece)
    number_P = torch.arange(num_pieces, device=rows.device)
    row_starts_P = torch.where(begins_row_P, number_P, num_pieces).sort().values
    entry_key_P = torch.where(begins_row_P, key_N[last_P], 2 * num_rows).sort().values
    entry_U = torch.searchsorted(entry_key_P, rows_U + num_rows)
    is_long_U = entry_key_P[entry_U.clamp(max=num_pieces - 1)] == rows_U + num_rows
    long = LongRows(piece_starts_P, F.pad(row_starts_P, (1, 0)), torch.where(is_long_U, entry_U + 1, 0))
    return Slots(rows, order_N, torch.searchsorted(key_N, rows_U), long)


def gather_rows(values_UW: Tensor, slots: Slots) -> Tensor:
    """The row of each position: [positions, W]."""
    if slots.order_N is None or slots.starts_U is None:
        return F.embedding(slots.rows, values_UW)
    return _GatherRows.apply(values_UW, *slots[:3], *(slots.long or ()))  # type: ignore[no-any-return]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_UW: Tensor, rows: Tensor, *sorted_positions: Tensor) -> Tensor:
        ctx.save_for_backward(*sorted_positions)
        return F.embedding(rows, values_UW)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        order_N, starts_U, *long = ctx.saved_tensors
        gradient_NW = gradient.reshape(order_N.numel(), -1)
        if not long:
            return _segment_sum(gradient_NW, order_N, starts_U), *[None] * 3
        piece_starts_P, row_starts_P, entry_U = long
        # One bag for each first piece, then one for each further piece.
        sums = _segment_sum(gradient_NW, order_N, torch.cat((starts_U, piece_starts_P)))
        first_UW, further_PW = sums[: starts_U.numel()], sums[starts_U.numel() :]
        number_P = torch.arange(piece_starts_P.numel(), device=gradient.device)
        long_PW = _segment_sum(further_PW, number_P, row_starts_P)
        return first_UW + F.embedding(entry_U, long_PW), *[None] * 6


def _segment_sum(values_NW: Tensor, order_N: Tensor, starts: Tensor) -> Tensor:
    """Of consecutive rows of `values_NW[order_N]`, each segment up to the start of the next."""
    return F.embedding_bag(order_N, values_NW, starts, mode="sum")
