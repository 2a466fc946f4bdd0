"""Row-wise Adagrad on the rows that were hit: one number of state for each row and table.

Tables lie side by side in `values`, as column ranges of the given widths; the number is the sum, over the steps that
hit the row, of the mean square of the gradient over the table's columns.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from xgram_dist.optim.rows.blocks import Blocks, gather_parts, row_rates
from xgram_dist.optim.rows.protocol import RowState
from xgram_dist.parallel.ranks import Ranks


class RowAdagrad:
    def __init__(
        self,
        values: Tensor,
        cut: int,
        widths: list[int],
        eps: float,
        weight_decay: float,
        columns: Ranks | None = None,
    ):
        """`columns`: who holds other columns of the same rows, as many of each table."""
        assert sum(widths) == values.shape[1], (widths, values.shape)
        self.values, self.cut, self.widths = values, cut, widths
        self._columns = columns or Ranks()
        self.eps, self.weight_decay = eps, weight_decay
        self.accumulator = values.new_zeros(values.shape[0], len(widths))
        self._blocks = Blocks(values)

    def settle(self, rows_R: Tensor, *, moments: bool = False) -> None:
        """Rows are always up to date."""

    def open(self, rows_R: Tensor, parts: list[slice], out_RW: Tensor) -> Iterator[None]:
        return gather_parts(self.values, rows_R, parts, out_RW)

    def opened(self, rows_R: Tensor) -> Tensor:
        return self.values.index_select(0, rows_R)

    def close(self) -> None:
        """Nothing was begun."""

    def update(self, rows_R: Tensor, gradient_RW: Tensor, rates: tuple[float, float], factor: float = 1.0) -> None:
        rate_R1 = row_rates(rows_R, self.cut, rates, self.values.dtype)
        norms = [torch.linalg.vector_norm(piece, dim=1) for piece in gradient_RW.split(self.widths, dim=1)]
        squares_RJ = self._columns.all_reduce_sum(torch.stack(norms, dim=1).mul_(factor).square_())
        squares_RJ.div_(torch.tensor(self.widths, device=rows_R.device) * self._columns.size)
        self.accumulator.index_add_(0, rows_R, squares_RJ)
        for part in self._blocks.parts(rows_R):
            rows_B, rate_B1, pieces = rows_R[part], rate_R1[part], gradient_RW[part].split(self.widths, dim=1)
            move_BW, values_BW = self._blocks.buffers(rows_B, 2)
            step_BJ = rate_B1 / self.accumulator.index_select(0, rows_B).sqrt_().add_(self.eps)
            for j, (move, piece) in enumerate(zip(move_BW.split(self.widths, dim=1), pieces, strict=True)):
                torch.mul(piece, -factor * step_BJ[:, j : j + 1], out=move)
            if self.weight_decay:
                torch.index_select(self.values, 0, rows_B, out=values_BW)
                move_BW.addcmul_(values_BW, rate_B1, value=-self.weight_decay)
            self.values.index_add_(0, rows_B, move_BW)

    def nbytes(self) -> int:
        return self.accumulator.nbytes

    def exact(self) -> RowState:
        return RowState(tables={"accumulator": self.accumulator})

    def restore(self, whole: dict[str, Tensor]) -> None:
        """There is nothing whole."""

    def settle_all(self) -> None:
        """Rows are always up to date."""

    def state(self) -> dict[str, Tensor]:
        return {"accumulator": self.accumulator}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.accumulator.copy_(state["accumulator"])
