"""Row-wise Adagrad on touched rows: one number of state a row and table.

Tables lie side by side in `values` as column ranges of the given widths. The accumulator sums, over the steps that
touched the row, the mean square of the gradient over the table's columns. With tables cut by columns: one all-reduce a
step on the tensor axis.
"""

import torch
from torch import Tensor

from xgram_dist.parallel.process_group import ProcessGroup
from xgram_dist.tables.optimizers.base import (
    OptimizerState,
    OwnMemory,
    RowBlocks,
    RowOptimizer,
    StateMemory,
    row_rates,
)


class RowAdagrad(RowOptimizer):
    def __init__(
        self,
        values_SW: Tensor,
        num_vip: int,
        widths: list[int],
        eps: float,
        weight_decay: float,
        columns: ProcessGroup,
        memory: StateMemory | None = None,
    ):
        """`columns`: the ranks that hold the other columns of the same rows, equally many of each table."""
        assert sum(widths) == values_SW.shape[1], (widths, values_SW.shape)
        super().__init__(values_SW, num_vip)
        self.widths, self.eps, self.weight_decay = widths, eps, weight_decay
        self._columns = columns
        self._whole_widths_J = torch.tensor(widths, device=values_SW.device) * columns.size
        self.accumulator = (memory or OwnMemory(values_SW)).tables("accumulator", len(widths))
        self._blocks = RowBlocks(values_SW)

    def update(self, rows_R: Tensor, gradient_RW: Tensor, rates: tuple[float, float], factor: float = 1.0) -> None:
        rate_R1 = row_rates(rows_R, self.num_vip, rates, self.values.dtype)
        norms = [torch.linalg.vector_norm(columns, dim=1) for columns in gradient_RW.split(self.widths, dim=1)]
        squares_RJ = self._columns.all_reduce_sum(torch.stack(norms, dim=1).mul_(factor).square_())
        squares_RJ.div_(self._whole_widths_J)
        self.accumulator.index_add_(0, rows_R, squares_RJ)
        for block in self._blocks.slices(rows_R):
            rows_B, rate_B1, gradients = rows_R[block], rate_R1[block], gradient_RW[block].split(self.widths, dim=1)
            move_BW, values_BW = self._blocks.buffers(rows_B, 2)
            step_BJ = rate_B1 / self.accumulator.index_select(0, rows_B).sqrt_().add_(self.eps)
            for j, (move, gradient) in enumerate(zip(move_BW.split(self.widths, dim=1), gradients, strict=True)):
                torch.mul(gradient, -factor * step_BJ[:, j : j + 1], out=move)
            if self.weight_decay:
                torch.index_select(self.values, 0, rows_B, out=values_BW)
                move_BW.addcmul_(values_BW, rate_B1, value=-self.weight_decay)
            self.values.index_add_(0, rows_B, move_BW)

    def nbytes(self) -> int:
        return self.accumulator.nbytes

    def state(self) -> OptimizerState:
        return OptimizerState(tables={"accumulator": self.accumulator})
