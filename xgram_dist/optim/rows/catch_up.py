"""AdamW over all rows each step, exactly, that touches only the rows that were hit.

A row that is not hit still moves under AdamW: it decays, and its momentum carries it on. What it missed depends on
its moments and on the step they belong to, and is made up for when the row is next read (`missed.py`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from xgram_dist.optim.rows.adamw import AdamW, GatheredAdamW
from xgram_dist.optim.rows.compiled import any_count, compiled_pass
from xgram_dist.optim.rows.missed import Missed, MissedSteps
from xgram_dist.optim.rows.protocol import RowState

# Steps after which all rows are brought up to date, so that the table of missed steps stays small.
HISTORY = 4096
# A root of a second moment that is this small against eps is nothing.
NOTHING = {torch.float32: 1e-8, torch.float64: 1e-14}
GONE = 1e-20
# Rows that are brought up to date at once.
ROWS_AT_ONCE = 4096


class CatchUpAdamW(GatheredAdamW):
    def __init__(
        self,
        values: Tensor,
        cut: int,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        history: int = HISTORY,
        *,
        two_rates: bool | None = None,
        compiled: bool = False,
    ):
        """`two_rates`: whether rows below the cut may learn at another rate, here or on other ranks. `compiled`: what
        brings rows up to date is one compiled pass instead of some thirty operations, and so is a step."""
        super().__init__(values, cut, AdamW(betas, eps, weight_decay), compiled)
        self._two_rates = 0 < cut < values.shape[0] if two_rates is None else two_rates
        self._missed = MissedSteps(self.adamw, history, 2 if self._two_rates else 1, values.dtype, values.device)
        # The step that a row's moments belong to, and the step that its values belong to: the same or the present.
        self._last = torch.zeros(values.shape[0], dtype=torch.int32, device=values.device)
        self._current = torch.zeros_like(self._last)
        # A device other than a CPU would have to wait for the number of stale rows; it goes through them all.
        self._smallest = _smallest(eps, values.dtype)
        self._opened: tuple[Tensor, Tensor] | None = None
        self._compiled = compiled_pass(_caught_up_) if compiled else None
        self._skips = values.device.type == "cpu"

    def settle(self, rows_R: Tensor, *, moments: bool = False) -> None:
        self._settle_values(*self._stale(self._current, rows_R))
        if moments:
            self._settle_moments(*self._stale(self._last, rows_R))

    def open(self, rows_R: Tensor, parts: list[slice], out_RW: Tensor) -> Iterator[None]:
        steps_R = self._current.index_select(0, rows_R)
        missed = self._missed.since(steps_R.long(), self._kinds(rows_R))
        self._opened = rows_R, out_RW
        for part in parts:
            if rows_R[part].numel():
                self._open_part(out_RW[part], rows_R[part], missed.part(part))
            yield

    def _open_part(self, values_RW: Tensor, rows_R: Tensor, missed: Missed) -> None:
        first, second = self.moments.first, self.moments.second
        constants = self.adamw.eps**0.5, self._smallest
        if self._compiled is not None:
            any_count(values_RW, rows_R, missed.coefficients_RN, missed.floor_R1, missed.shift_R1, missed.decay_R1)
            self._compiled(values_RW, self.values, first, second, rows_R, missed, *constants)
            return
        torch.index_select(self.values, 0, rows_R, out=values_RW)
        for part in self._blocks.parts(rows_R):
            first_BW, second_BW, *buffers = self._blocks.buffers(rows_R[part], 5)
            torch.index_select(first, 0, rows_R[part], out=first_BW)
            torch.index_select(second, 0, rows_R[part], out=second_BW)
            _catch_up_(values_RW[part], first_BW, second_BW, missed.part(part), buffers, *constants)

    def opened(self, rows_R: Tensor) -> Tensor:
        assert self._opened is not None
        assert self._opened[0] is rows_R
        return self._opened[1]

    def close(self) -> None:
        self._opened = None

    def update(self, rows_R: Tensor, gradient_RW: Tensor, rates: tuple[float, float], factor: float = 1.0) -> None:
        values_RW = None
        if self._opened is not None and self._opened[0] is rows_R:
            values_RW = self._opened[1]
        else:
            self.settle(rows_R)
        shrink = self._shrinkage(self._last.index_select(0, rows_R))
        self._missed.advance(rates if self._two_rates else rates[:1] if self.cut else rates[1:])
        self._hit(rows_R, gradient_RW, rates, factor, shrink, values_RW)
        self._opened = None
        self._last.index_fill_(0, rows_R, self._missed.step)
        self._current.index_fill_(0, rows_R, self._missed.step)
        if self._missed.full:
            self.settle_all()

    def nbytes(self) -> int:
        return super().nbytes() + self._last.nbytes + self._current.nbytes

    def settle_all(self) -> None:
        if self._missed.step == self._missed.base:
            return
        for rows_R in torch.arange(self.values.shape[0], device=self.values.device).split(ROWS_AT_ONCE):
            self.settle(rows_R, moments=True)
        self._missed.restart(self._missed.step)

    def exact(self) -> RowState:
        state = self.moments.exact()
        state.rows = {"last": self._last, "current": self._current}
        state.whole |= self._missed.exact()
        return state

    def restore(self, whole: dict[str, Tensor]) -> None:
        self.moments.step.copy_(whole["step"])
        if "sums" in whole:
            self._missed.restore(whole)
        else:  # saved by an optimizer that is always up to date
            self._missed.restart(int(self.moments.step))
            self._last.fill_(self._missed.step)
            self._current.fill_(self._missed.step)

    def state(self) -> dict[str, Tensor]:
        self.settle_all()
        return self.moments.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.moments.load_state(state)
        step = int(self.moments.step)
        self._missed.restart(step)
        self._last.fill_(step)
        self._current.fill_(step)

    def _stale(self, steps_S: Tensor, rows_R: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that are not at the present step, and their steps. Others may be among them: they do not change."""
        steps_R = steps_S.index_select(0, rows_R)
        if self._skips:
            stale_R = steps_R != self._missed.step
            return rows_R[stale_R], steps_R[stale_R]
        return rows_R, steps_R

    def _settle_values(self, rows_R: Tensor, steps_R: Tensor) -> None:
        if not rows_R.numel():
            return
        missed = self._missed.since(steps_R.long(), self._kinds(rows_R))
        for part in self._blocks.parts(rows_R):
            values_BW, first_BW, second_BW, *buffers = self._blocks.buffers(rows_R[part], 6)
            torch.index_select(self.values, 0, rows_R[part], out=values_BW)
            torch.index_select(self.moments.first, 0, rows_R[part], out=first_BW)
            torch.index_select(self.moments.second, 0, rows_R[part], out=second_BW)
            constants = self.adamw.eps**0.5, self._smallest
            _catch_up_(values_BW, first_BW, second_BW, missed.part(part), buffers, *constants)
            self.values.index_copy_(0, rows_R[part], values_BW)
        self._current.index_fill_(0, rows_R, self._missed.step)

    def _kinds(self, rows_R: Tensor) -> Tensor:
        return (rows_R >= self.cut).long() if self._two_rates else torch.zeros_like(rows_R)

    def _settle_moments(self, rows_R: Tensor, steps_R: Tensor) -> None:
        for moment, factor_R1 in zip((self.moments.first, self.moments.second), self._shrinkage(steps_R), strict=True):
            for part in self._blocks.parts(rows_R):
                moment_BW = self._blocks.buffers(rows_R[part], 1)[0]
                torch.index_select(moment, 0, rows_R[part], out=moment_BW)
                moment.index_copy_(0, rows_R[part], moment_BW.mul_(factor_R1[part]))
        self._last.index_fill_(0, rows_R, self._missed.step)

    def _shrinkage(self, steps_R: Tensor) -> tuple[Tensor, Tensor]:
        """[R, 1]: how much smaller first and second moments of these steps are at the present one."""
        gap_R1 = (self._missed.step - steps_R).double()[:, None]
        beta1, beta2 = self.adamw.betas
        shrink = beta1**gap_R1, beta2**gap_R1
        # What is as good as gone is gone: numbers too small for their type cost a CPU fifty times as long.
        first, second = (torch.where(factor > GONE, factor, 0.0).to(self.values.dtype) for factor in shrink)
        return first, second


class SavedCatchUp:
    """Brings rows of a checkpoint up to date, without the optimizer that saved them: some rows at a time."""

    def __init__(self, betas: tuple[float, float], eps: float, saved: dict[str, Tensor]):
        """`saved`: the `whole` of the optimizer's exact state."""
        kinds, entries, _ = saved["sums"].shape
        dtype = saved["coefficients"].dtype
        # What has decayed stands in the saved table: the rate of decay itself is not asked for.
        self._missed = MissedSteps(AdamW(betas, eps, 0.0), max(1, entries - 1), kinds, dtype, torch.device("cpu"))
        self._missed.restore(saved)
        self.two_rates, self._eps, self._smallest = kinds == 2, eps, _smallest(eps, dtype)

    def since(self, steps_R: Tensor, vip_R: Tensor) -> Missed:
        """`steps_R`: the step that each row's values belong to; `vip_R`: whether it is a VIP row."""
        kinds_R = (~vip_R).long() if self.two_rates else torch.zeros_like(steps_R, dtype=torch.int64)
        return self._missed.since(steps_R.long(), kinds_R)

    def settle_(self, values_RW: Tensor, first_RW: Tensor, second_RW: Tensor, missed: Missed) -> Tensor:
        """The values, up to date; in place."""
        buffers = [torch.empty_like(values_RW) for _ in range(3)]
        _catch_up_(values_RW, first_RW, second_RW, missed, buffers, self._eps**0.5, self._smallest)
        return values_RW


def _smallest(eps: float, dtype: torch.dtype) -> float:
    return max((NOTHING[dtype] * eps) ** 2, 2 * torch.finfo(dtype).tiny)


def _catch_up_(
    values_BW: Tensor,
    first_BW: Tensor,
    second_BW: Tensor,
    missed: Missed,
    buffers: list[Tensor],
    root_eps: float,
    smallest: float,
) -> None:
    """Give values the steps they missed, in place."""
    d_BW, z_BW, sum_BW = buffers
    # The root by its inverse, and never of zero: a CPU takes several times as long for the root of zero.
    torch.add(second_BW, smallest, out=d_BW)
    torch.rsqrt(d_BW, out=z_BW)
    d_BW.mul_(z_BW).add_(missed.floor_R1)
    torch.rsqrt(d_BW, out=z_BW)
    torch.add(missed.shift_R1, z_BW, alpha=root_eps, out=z_BW)
    *lower, next_highest, highest = missed.coefficients_RN.split(1, dim=1)
    torch.mul(z_BW, highest, out=sum_BW).add_(next_highest)
    for coefficient_B1 in reversed(lower):
        torch.addcmul(coefficient_B1, sum_BW, z_BW, out=sum_BW)
    sum_BW.mul_(first_BW).div_(d_BW)
    values_BW.addcmul_(values_BW, missed.decay_R1).add_(sum_BW)


def _caught_up_(
    out_RW: Tensor,
    values_SW: Tensor,
    first_SW: Tensor,
    second_SW: Tensor,
    rows_R: Tensor,
    missed: Missed,
    root_eps: float,
    smallest: float,
) -> None:
    """The same, of rows to be gathered, as one expression for a compiler."""
    values_RW, first_RW, second_RW = values_SW[rows_R], first_SW[rows_R], second_SW[rows_R]
    inverse = 1 / (torch.sqrt(second_RW + smallest) + missed.floor_R1)
    z = missed.shift_R1 + root_eps * torch.sqrt(inverse)
    *lower, highest = missed.coefficients_RN.split(1, dim=1)
    total = highest
    for coefficient_R1 in reversed(lower):
        total = coefficient_R1 + total * z
    out_RW.copy_(values_RW + (values_RW * missed.decay_R1 + total * first_RW * inverse))
