"""AdamW over all rows each step: a row that is not hit still decays, and its momentum still moves it.

It passes over the whole table four times a step (values, gradient, two moments) and keeps a gradient of its size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from xgram_dist.optim.rows.adamw import AdamW, Moments, adamw_
from xgram_dist.optim.rows.blocks import gather_parts
from xgram_dist.optim.rows.protocol import RowState


class DenseAdamW:
    def __init__(self, values: Tensor, cut: int, betas: tuple[float, float], eps: float, weight_decay: float):
        self.values, self.cut, self.adamw = values, cut, AdamW(betas, eps, weight_decay)
        self.moments = Moments(values)
        self._gradient = torch.zeros_like(values)  # zero but for the rows of the step, and only during it

    def settle(self, rows_R: Tensor, *, moments: bool = False) -> None:
        """Rows are always up to date."""

    def open(self, rows_R: Tensor, parts: list[slice], out_RW: Tensor) -> Iterator[None]:
        return gather_parts(self.values, rows_R, parts, out_RW)

    def opened(self, rows_R: Tensor) -> Tensor:
        return self.values.index_select(0, rows_R)

    def close(self) -> None:
        """Nothing was begun."""

    def update(self, rows_R: Tensor, gradient_RW: Tensor, rates: tuple[float, float], factor: float = 1.0) -> None:
        moments = self.moments
        moments.step.add_(1)
        self._gradient.index_copy_(0, rows_R, gradient_RW if factor == 1 else gradient_RW.mul_(factor))
        for rate, part in zip(rates, (slice(None, self.cut), slice(self.cut, None)), strict=True):
            if self.values[part].numel():
                both = moments.first[part], moments.second[part]
                adamw_(self.adamw, self.values[part], self._gradient[part], both, moments.step, rate)
        self._gradient.index_fill_(0, rows_R, 0.0)

    def nbytes(self) -> int:
        return self.moments.nbytes() + self._gradient.nbytes

    def exact(self) -> RowState:
        return self.moments.exact()

    def restore(self, whole: dict[str, Tensor]) -> None:
        self.moments.step.copy_(whole["step"])

    def settle_all(self) -> None:
        """Rows are always up to date."""

    def state(self) -> dict[str, Tensor]:
        return self.moments.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.moments.load_state(state)
