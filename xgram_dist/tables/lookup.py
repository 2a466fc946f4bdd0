"""The retrieval equation: rows of a slab -> one vector a token, and its backward pass.

    e[q, j] = sum over accesses n of token q:  c[n] * sigmoid(a[row_n, j]) * B[row_n, columns of table j]

The owner of the rows evaluates it, for itself and for every rank that requests a token. A row's gate is the same for
all its readers, so each row is scaled once and the sum runs over whole slab rows. Forward and backward are written out
by hand: nothing of a slab's size is ever allocated, the gradient covers the rows that were read and no others, and sums
run in a fixed order, so results repeat bitwise.

`build_*_accesses` make the index tensors from what planning found (touched_rows.py). No collectives.
Shapes: Q tokens requested from this owner, this rank's own first; N accesses, token by token; R distinct rows of them;
S rows of the shard; W slab width; J tables of a slab with `widths`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from xgram_dist.parallel.device import index_to_device, pin_for, to_device
from xgram_dist.tables.touched_rows import Integers, TouchedRows

# Forward: which rows some tokens read.


class Reads(ABC):
    """What `count` tokens read, as indices into the touched rows R."""

    count: int

    @abstractmethod
    def retrieve(self, scaled_RW: Tensor) -> Tensor:
        """One vector [Q, W] a token, the columns of all tables side by side. May be a view of the rows."""

    def retrieve_into(self, out_QW: Tensor, scaled_RW: Tensor) -> None:
        """The same into existing memory, which may have another dtype or device."""
        out_QW.copy_(pin_for(out_QW.device, self.retrieve(scaled_RW)), non_blocking=True)


@dataclass(frozen=True)
class ReadFirstRows(Reads):
    """Token q reads touched row q, with coefficient 1: a view, no copy."""

    count: int

    def retrieve(self, scaled_RW: Tensor) -> Tensor:
        return scaled_RW[: self.count]


@dataclass(frozen=True)
class ReadOneRow(Reads):
    """Each token reads one row, with coefficient 1."""

    count: int
    row_N: Tensor

    def retrieve(self, scaled_RW: Tensor) -> Tensor:
        return scaled_RW.index_select(0, self.row_N)

    def retrieve_into(self, out_QW: Tensor, scaled_RW: Tensor) -> None:
        if out_QW.dtype == scaled_RW.dtype and out_QW.device == scaled_RW.device:
            torch.index_select(scaled_RW, 0, self.row_N, out=out_QW)
        else:
            super().retrieve_into(out_QW, scaled_RW)


@dataclass(frozen=True)
class ReadWeightedRows(Reads):
    """Each token reads several rows and sums them with coefficients."""

    count: int
    row_N: Tensor
    starts_Q: Tensor
    """First access of each token."""
    coefficients_N: Tensor

    def retrieve(self, scaled_RW: Tensor) -> Tensor:
        return segment_sums(scaled_RW, self.row_N, self.starts_Q, self.coefficients_N)


def scale_rows(out_RW: Tensor, rows_RW: Tensor, gates_RJ: Tensor, widths: list[int]) -> None:
    """Rows times the sigmoid of their gates, table by table."""
    factors_RJ = torch.sigmoid(gates_RJ)
    for j, (out, rows) in enumerate(zip(out_RW.split(widths, dim=1), rows_RW.split(widths, dim=1), strict=True)):
        torch.mul(rows, factors_RJ[:, j : j + 1], out=out)


def segment_sums(values: Tensor, index_N: Tensor, starts: Tensor, coefficients_N: Tensor | None) -> Tensor:
    """For each segment of consecutive indices, the weighted sum of those rows of `values`. Coefficients default to
    1."""
    if index_N.numel() == 0:
        return values.new_zeros(starts.numel(), values.shape[1])
    weights = None if coefficients_N is None else coefficients_N.to(values.dtype)
    return F.embedding_bag(index_N, values, starts, mode="sum", per_sample_weights=weights)


# Both directions: all that a window reads from one shard.


@dataclass
class RowGradient:
    """Gradient of the rows (and gates) that were read, and of no others. `touched_R` holds distinct local rows."""

    touched_R: Tensor
    rows_RW: Tensor
    gates_RJ: Tensor | None
    """None: the table has no gates."""
    factor: float = 1.0
    """The gradient is `factor` times the stored numbers. The next reader multiplies."""


@dataclass(frozen=True)
class Accesses(ABC):
    """All reads of a window from one shard, known before any row is."""

    touched_R: Tensor
    """Distinct local rows that are read: those remote ranks request, ascending, then the rest, ascending."""
    num_remote: int
    """How many of them remote ranks request."""
    remote: Reads
    """Reads for the tokens that remote ranks request."""


@dataclass(frozen=True)
class GatheredAccesses(Accesses):
    """Local tokens are gathered like remote ones."""

    local: Reads
    """Reads for this rank's own tokens."""
    token_N: Tensor
    """The token of each access, sorted by row and then by token."""
    row_starts_R: Tensor
    """First of these accesses for each row."""
    row_coefficients_N: Tensor | None
    """Coefficients in the same order. None: all are 1."""

    def row_gradient(
        self, grads_QW: Tensor, gated: tuple[Tensor, Tensor] | None, widths: list[int], num_ranks: int
    ) -> RowGradient:
        """Gradient of the retrieved vectors -> mean over ranks of the gradient of rows and gates.

        `gated`: for tables with gates, the rows and gates that the forward pass read.
        """
        weights_N = self.row_coefficients_N
        if num_ranks > 1:  # the mean is taken inside the sum: no extra pass
            ones_N = torch.ones_like(self.token_N) if weights_N is None else weights_N
            weights_N = ones_N.to(grads_QW.dtype) / num_ranks
        rows_RW = segment_sums(grads_QW, self.token_N, self.row_starts_R, weights_N)
        if gated is None:
            return RowGradient(self.touched_R, rows_RW, None)
        read_RW, gates_RJ = gated
        scale_rows(rows_RW, rows_RW, gates_RJ, widths)
        pairs = zip(read_RW.split(widths, dim=1), rows_RW.split(widths, dim=1), strict=True)
        inner_RJ = torch.stack([(read * gradient).sum(1) for read, gradient in pairs], dim=1)
        return RowGradient(self.touched_R, rows_RW, inner_RJ * (1 - torch.sigmoid(gates_RJ)))


@dataclass(frozen=True)
class ZeroCopyAccesses(Accesses):
    """Zero-copy read of local rows: the working set begins with the touched rows themselves. A token reads one row,
    without coefficient or gate."""

    remote_token_N: Tensor | None
    """The remote token of each access, sorted by row. None: remote tokens already come in row order, one each."""
    row_starts_R: Tensor
    """First of these accesses for each row that remote ranks request."""

    def row_gradient(self, local_RW: Tensor, remote_QW: Tensor, num_ranks: int) -> RowGradient:
        """Adds the remote gradients to the local one in place. The mean over ranks becomes the gradient's factor."""
        if self.remote_token_N is not None:
            remote_QW = segment_sums(remote_QW, self.remote_token_N, self.row_starts_R, None)
        local_RW[: self.num_remote].add_(remote_QW)
        return RowGradient(self.touched_R, local_RW, None, 1 / num_ranks)


# Index tensors, from the host.


def build_gathered_accesses(
    touched: TouchedRows,
    counts_Q: Integers | None,
    coefficients_N: NDArray[Any] | None,
    num_local: int,
    device: torch.device,
) -> GatheredAccesses:
    """Accesses token by token, `counts_Q` for each token (None: one each, without coefficients). The first `num_local`
    tokens are this rank's own."""
    index_N, num_local_accesses, by_row_N = touched.index_N, touched.num_local_accesses, touched.by_row_N
    token_N = None if counts_Q is None else np.repeat(np.arange(len(counts_Q)), counts_Q)

    def reads(tokens: slice, accesses: slice) -> Reads:
        if counts_Q is None or coefficients_N is None:
            return _one_row_reads(index_N[accesses], device)
        counts = counts_Q[tokens]
        return ReadWeightedRows(
            count=len(counts),
            row_N=index_to_device(index_N[accesses], device),
            starts_Q=index_to_device(np.cumsum(counts) - counts, device),
            coefficients_N=to_device(torch.from_numpy(coefficients_N[accesses]), device),
        )

    return GatheredAccesses(
        touched_R=index_to_device(touched.rows_R, device),
        num_remote=touched.num_remote,
        remote=reads(slice(num_local, None), slice(num_local_accesses, None)),
        local=reads(slice(num_local), slice(num_local_accesses)),
        token_N=index_to_device(by_row_N if token_N is None else token_N[by_row_N], device),
        row_starts_R=index_to_device(touched.row_starts_R, device),
        row_coefficients_N=None
        if coefficients_N is None
        else to_device(torch.from_numpy(coefficients_N[by_row_N]), device),
    )


def build_zero_copy_accesses(touched: TouchedRows, device: torch.device) -> ZeroCopyAccesses:
    """One row a token; this rank's own tokens read the touched rows in place."""
    index_N = touched.index_N[touched.num_local_accesses :]
    return ZeroCopyAccesses(
        touched_R=index_to_device(touched.rows_R, device),
        num_remote=touched.num_remote,
        remote=_one_row_reads(index_N, device),
        remote_token_N=None if _is_arange(index_N) else index_to_device(touched.by_row_N, device),
        row_starts_R=index_to_device(touched.row_starts_R, device),
    )


def _one_row_reads(index_N: Integers, device: torch.device) -> Reads:
    if _is_arange(index_N):
        return ReadFirstRows(len(index_N))
    return ReadOneRow(len(index_N), index_to_device(index_N, device))


def _is_arange(index_N: Integers) -> bool:
    ends_match = len(index_N) == 0 or (index_N[0] == 0 and index_N[-1] == len(index_N) - 1)
    return bool(ends_match) and np.array_equal(index_N, np.arange(len(index_N)))
