"""AdamW on the rows that were hit: the others wait, and neither decay nor move.

Moments of a row are averages over the steps that hit it; bias correction goes by the count of all steps, as in
torch.optim.SparseAdam.
"""

from torch import Tensor

from xgram_dist.optim.rows.adamw import AdamW, GatheredAdamW


class LazyAdamW(GatheredAdamW):
    def __init__(self, values: Tensor, cut: int, betas: tuple[float, float], eps: float, weight_decay: float):
        super().__init__(values, cut, AdamW(betas, eps, weight_decay))

    def settle(self, rows_R: Tensor, *, moments: bool = False) -> None:
        """Rows are always up to date."""

    def update(self, rows_R: Tensor, gradient_RW: Tensor, rates: tuple[float, float], factor: float = 1.0) -> None:
        self._hit(rows_R, gradient_RW, rates, factor)

    def settle_all(self) -> None:
        """Rows are always up to date."""

    def state(self) -> dict[str, Tensor]:
        return self.moments.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.moments.load_state(state)
