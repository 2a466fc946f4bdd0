"""Stage 1 arithmetic: rows of a slab -> one vector a token, and the way back.

    e[u, j] = sum over accesses n of token u:  c[n] * sigmoid(a[row_n, j]) * B[row_n, columns of table j]

Forward and backward are written out, so that nothing of a slab's size is ever made: the backward gives a gradient for
the rows that were read. This is what the owner of rows computes, whoever asked.
Shapes: U tokens, N accesses, S rows, R rows that were read, W slab width, J tables of a slab with `widths`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Accesses:
    """Which rows are read, with what coefficient, for which token. `coefficients` None: 1, one row a token."""

    rows_N: Tensor
    coefficients_N: Tensor | None
    token_N: Tensor | None
    num_tokens: int


def retrieve(slab_SW: Tensor, gates_SJ: Tensor | None, accesses: Accesses, widths: list[int]) -> list[Tensor]:
    """One contiguous tensor [U, width] for each table of the slab."""
    pieces = slab_SW.index_select(0, accesses.rows_N).split(widths, dim=1)
    if accesses.token_N is None:
        return [piece.contiguous() for piece in pieces]
    weights_NJ = _weights(gates_SJ, accesses, len(widths), slab_SW.dtype)
    outputs = []
    for j, piece in enumerate(pieces):
        out = piece.new_zeros(accesses.num_tokens, piece.shape[1])
        outputs.append(out.index_add_(0, accesses.token_N, piece * weights_NJ[:, j : j + 1]))
    return outputs


@dataclass
class RowGradient:
    """The gradient of the rows (and gates) that were read, and of no others. `touched` are distinct, ascending."""

    touched: Tensor
    rows: Tensor
    gates: Tensor | None


def give_back(
    grads: list[Tensor], slab_SW: Tensor, gates_SJ: Tensor | None, accesses: Accesses, widths: list[int]
) -> RowGradient:
    """The gradients of `retrieve`'s outputs as the gradient of the rows and gates that were read."""
    touched_R, place_N = torch.unique(accesses.rows_N, return_inverse=True)
    full_UW = torch.cat(grads, dim=1)
    rows_RW = full_UW.new_zeros(touched_R.numel(), full_UW.shape[1])
    if accesses.token_N is None:
        return RowGradient(touched_R, rows_RW.index_add_(0, place_N, full_UW), None)
    grad_NW = full_UW.index_select(0, accesses.token_N)
    weights_NJ = _weights(gates_SJ, accesses, len(widths), slab_SW.dtype)
    gates_RJ = None
    if gates_SJ is not None:
        sigmoid_NJ = torch.sigmoid(gates_SJ.index_select(0, accesses.rows_N))
        products = slab_SW.index_select(0, accesses.rows_N).mul_(grad_NW).split(widths, dim=1)
        inner_NJ = torch.stack([product.sum(1) for product in products], dim=1)
        gates_RJ = inner_NJ.new_zeros(touched_R.numel(), len(widths))
        gates_RJ.index_add_(0, place_N, weights_NJ * (1 - sigmoid_NJ) * inner_NJ)
    for j, piece in enumerate(grad_NW.split(widths, dim=1)):
        piece.mul_(weights_NJ[:, j : j + 1])
    return RowGradient(touched_R, rows_RW.index_add_(0, place_N, grad_NW), gates_RJ)


def add(first: RowGradient | None, second: RowGradient) -> RowGradient:
    """The sum of two gradients that may touch different rows."""
    if first is None:
        return second
    touched, place = torch.unique(torch.cat((first.touched, second.touched)), return_inverse=True)
    total = RowGradient(touched, second.rows.new_zeros(touched.numel(), second.rows.shape[1]), None)
    parts = place.split([first.touched.numel(), second.touched.numel()])
    total.rows.index_add_(0, parts[0], first.rows).index_add_(0, parts[1], second.rows)
    if first.gates is not None and second.gates is not None:
        total.gates = second.gates.new_zeros(touched.numel(), second.gates.shape[1])
        total.gates.index_add_(0, parts[0], first.gates).index_add_(0, parts[1], second.gates)
    return total


def _weights(gates_SJ: Tensor | None, accesses: Accesses, tables: int, dtype: torch.dtype) -> Tensor:
    assert accesses.coefficients_N is not None
    weights = accesses.coefficients_N.to(dtype)[:, None].expand(-1, tables)
    return weights if gates_SJ is None else weights * torch.sigmoid(gates_SJ.index_select(0, accesses.rows_N))
