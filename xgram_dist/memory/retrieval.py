"""Stage 1 arithmetic: rows of a slab -> one vector a token, and the way back.

    e[u, j] = sum over accesses n of token u:  c[n] * sigmoid(a[row_n, j]) * B[row_n, columns of table j]

Forward and backward are written out, so that nothing of a slab's size is ever made: the backward adds into the rows
that were read. This is what the owner of rows computes, whoever asked.
Shapes: U tokens, N accesses, S rows, W slab width, J tables of a slab; `widths` are the J tables' widths.
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


def give_back(
    grads: list[Tensor | None],
    slab_SW: Tensor,
    gates_SJ: Tensor | None,
    accesses: Accesses,
    widths: list[int],
    slab_grad_SW: Tensor,
    gates_grad_SJ: Tensor | None,
) -> None:
    """Add the gradients of `retrieve`'s outputs into the gradients of the rows and gates that were read."""
    full_UW = torch.cat(
        [
            grad if grad is not None else slab_SW.new_zeros(accesses.num_tokens, width)
            for grad, width in zip(grads, widths, strict=True)
        ],
        dim=1,
    )
    if accesses.token_N is None:
        slab_grad_SW.index_add_(0, accesses.rows_N, full_UW)
        return
    grad_NW = full_UW.index_select(0, accesses.token_N)
    weights_NJ = _weights(gates_SJ, accesses, len(widths), slab_SW.dtype)
    if gates_SJ is not None and gates_grad_SJ is not None:
        sigmoid_NJ = torch.sigmoid(gates_SJ.index_select(0, accesses.rows_N))
        products = (grad_NW * slab_SW.index_select(0, accesses.rows_N)).split(widths, dim=1)
        inner_NJ = torch.stack([product.sum(1) for product in products], dim=1)
        gates_grad_SJ.index_add_(0, accesses.rows_N, weights_NJ * (1 - sigmoid_NJ) * inner_NJ)
    for j, piece in enumerate(grad_NW.split(widths, dim=1)):
        piece.mul_(weights_NJ[:, j : j + 1])
    slab_grad_SW.index_add_(0, accesses.rows_N, grad_NW)


def _weights(gates_SJ: Tensor | None, accesses: Accesses, tables: int, dtype: torch.dtype) -> Tensor:
    assert accesses.coefficients_N is not None
    weights = accesses.coefficients_N.to(dtype)[:, None].expand(-1, tables)
    return weights if gates_SJ is None else weights * torch.sigmoid(gates_SJ.index_select(0, accesses.rows_N))
