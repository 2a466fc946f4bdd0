"""Stage 1 arithmetic: rows of a slab -> one vector a token, and the way back.

    e[q, j] = sum over accesses n of token q:  c[n] * sigmoid(a[row_n, j]) * B[row_n, columns of table j]

A row's gate is the same for all its readers, so rows are scaled once and the sum runs over whole slab rows. Forward
and backward are written out, so that nothing of a slab's size is ever made: the backward gives a gradient for the
rows that were read. This is what the owner of rows computes, whoever asked. Sums run in a fixed order.
Shapes: Q tokens asked for, N accesses, S rows, R rows that are read, W slab width, J tables of a slab with `widths`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Reads:
    """What some of the tokens read."""

    count: int
    """Tokens."""
    place_N: Tensor | None
    """Index into `touched_R` of each access; accesses come token by token. None: they are 0, 1, 2, ..."""
    starts_Q: Tensor | None
    """First access of each token; None where each token reads one row, with coefficient 1."""
    coefficients_N: Tensor | None


@dataclass(frozen=True)
class Accesses:
    """Which rows are read, and for which tokens; all of it known before any row is. Tokens are first those of this
    rank, then those of the others."""

    touched_R: Tensor
    """Rows that are read: distinct; first those that others ask for, ascending, then the rest, ascending."""
    for_others: int
    """How many of them others ask for."""
    others: Reads
    own: Reads | None
    """None: this rank reads its rows where they are."""
    by_row_N: Tensor | None
    """All accesses row by row: the token of each, in the order of the tokens. Where this rank reads its rows where they
    are, those of the others alone; None then: the tokens are in the order of the rows, one each."""
    row_starts_R: Tensor
    """First of them for each row."""
    row_coefficients_N: Tensor | None


def scale_rows(out_RW: Tensor, rows_RW: Tensor, gates_RJ: Tensor, widths: list[int]) -> None:
    """Rows as their readers see them."""
    factors_RJ = torch.sigmoid(gates_RJ)
    for j, (out, rows) in enumerate(zip(out_RW.split(widths, dim=1), rows_RW.split(widths, dim=1), strict=True)):
        torch.mul(rows, factors_RJ[:, j : j + 1], out=out)


def retrieve(scaled_RW: Tensor, reads: Reads) -> Tensor:
    """One vector [Q, W] for each token, the columns of all tables side by side; maybe the rows themselves."""
    if reads.place_N is None:
        return scaled_RW[: reads.count]
    if reads.starts_Q is None:
        return scaled_RW.index_select(0, reads.place_N)
    return segment_sums(scaled_RW, reads.place_N, reads.starts_Q, reads.coefficients_N)


def retrieve_into(out_QW: Tensor, scaled_RW: Tensor, reads: Reads) -> None:
    """The same in memory that is there, which may be of another type or device."""
    alike = out_QW.dtype == scaled_RW.dtype and out_QW.device == scaled_RW.device
    if alike and reads.place_N is not None and reads.starts_Q is None:
        torch.index_select(scaled_RW, 0, reads.place_N, out=out_QW)
    else:
        out_QW.copy_(retrieve(scaled_RW, reads), non_blocking=True)


@dataclass
class RowGradient:
    """The gradient of the rows (and gates) that were read, and of no others. `touched` are distinct."""

    touched: Tensor
    rows: Tensor
    gates: Tensor | None
    factor: float = 1.0
    """Of both: the gradient is so many times what they hold. Multiplied where they are read next."""


def give_back(
    grads_QW: Tensor,
    rows_of: Callable[[], tuple[Tensor, Tensor]] | None,
    accesses: Accesses,
    widths: list[int],
    mean_over: int = 1,
) -> RowGradient:
    """The gradient of `retrieve`'s output as the gradient of the rows and gates that were read. `rows_of`: where there
    are gates, the rows and gates that `retrieve` was given. `mean_over`: ranks, over whose losses the run's is the
    mean."""
    assert accesses.by_row_N is not None
    weights_N = accesses.row_coefficients_N
    if mean_over > 1:  # with the sum, instead of in a pass of its own
        ones_N = torch.ones_like(accesses.by_row_N) if weights_N is None else weights_N
        weights_N = ones_N.to(grads_QW.dtype) / mean_over
    rows_RW = segment_sums(grads_QW, accesses.by_row_N, accesses.row_starts_R, weights_N)
    if rows_of is None:
        return RowGradient(accesses.touched_R, rows_RW, None)
    read_RW, gates_RJ = rows_of()
    scale_rows(rows_RW, rows_RW, gates_RJ, widths)
    pairs = zip(read_RW.split(widths, dim=1), rows_RW.split(widths, dim=1), strict=True)
    inner_RJ = torch.stack([(read * gradient).sum(1) for read, gradient in pairs], dim=1)
    return RowGradient(accesses.touched_R, rows_RW, inner_RJ * (1 - torch.sigmoid(gates_RJ)))


def give_back_in_place(own_RW: Tensor, others_QW: Tensor, accesses: Accesses, mean_over: int = 1) -> RowGradient:
    """The same where this rank reads its rows where they are: the others' gradients are added to its own. The mean is a
    factor for who reads the gradient next."""
    if accesses.by_row_N is not None:
        others_QW = segment_sums(others_QW, accesses.by_row_N, accesses.row_starts_R, None)
    own_RW[: accesses.for_others].add_(others_QW)
    return RowGradient(accesses.touched_R, own_RW, None, 1 / mean_over)


def segment_sums(values: Tensor, index_N: Tensor, starts: Tensor, coefficients_N: Tensor | None) -> Tensor:
    """For each bag of consecutive indices, the weighted sum of those rows of `values`."""
    if index_N.numel() == 0:
        return values.new_zeros(starts.numel(), values.shape[1])
    weights = None if coefficients_N is None else coefficients_N.to(values.dtype)
    return F.embedding_bag(index_N, values, starts, mode="sum", per_sample_weights=weights)
