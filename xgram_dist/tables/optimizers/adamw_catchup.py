"""Exact AdamW that touches only the rows of a step ("catch-up").

Under AdamW a row without a gradient still moves: it decays, and its momentum carries it on. What it missed depends on
its moments and on the step they belong to. It is applied in closed form when the row is next read (`catchup_math.py`).
The result is that of `DenseAdamW` up to rounding.
"""

import functools

import torch
from torch import Tensor

from xgram_dist.errors import BadFileError
from xgram_dist.tables.optimizers.adamw import AdamW, CompiledAdamWStep, GatheredAdamW
from xgram_dist.tables.optimizers.base import (
    OptimizerState,
    OwnMemory,
    PendingRows,
    StateMemory,
    compile_pass,
    mark_rows_dynamic,
)
from xgram_dist.tables.optimizers.catchup_math import (
    MissedSteps,
    Rounded,
    RowCorrection,
    any_outside,
    as_it_is,
    saved_range,
)
from xgram_dist.tables.optimizers.rounding import VALUES, element_noise, round_to_bf16, row_keys

HISTORY = 4096
"""Steps after which all rows are caught up, which bounds the table of missed steps."""
NEGLIGIBLE_ROOT = {torch.float32: 1e-8, torch.float64: 1e-14}
"""The root of a second moment this small relative to eps counts as zero."""
FLUSH_BELOW = 1e-20
ROWS_AT_ONCE = 4096
"""Rows caught up at once by `catch_up_all`."""


class CaughtUpRows(PendingRows):
    """Rows between fetch and update whose current values are in this copy alone; the table still holds old ones."""

    def __init__(self, optimizer: "CatchUpAdamW", rows_R: Tensor, correction: RowCorrection):
        super().__init__(optimizer.values, rows_R)
        self._optimizer, self._correction = optimizer, correction
        self._caught_up_RW: Tensor | None = None

    def gather(self, segment: slice, out_RW: Tensor) -> None:
        self._caught_up_RW = out_RW
        if self.rows_R[segment].numel():
            self._optimizer.read_caught_up(out_RW[segment], self.rows_R[segment], self._correction[segment])

    def values(self) -> Tensor:
        assert self._caught_up_RW is not None, "values() before gather()"
        return self._caught_up_RW


class CatchUpAdamW(GatheredAdamW):
    def __init__(
        self,
        values_SW: Tensor,
        num_vip: int,
        adamw: AdamW,
        history: int = HISTORY,
        *,
        two_rates: bool | None = None,
        compiled: bool = False,
        memory: StateMemory | None = None,
        column_keys_W: Tensor | None = None,
    ):
        """`two_rates`: VIP rows have another rate, here or on other ranks (default: if both kinds are here).
        `compiled`: catching up is one compiled pass instead of about thirty operations, and so is a step."""
        memory = memory or OwnMemory(values_SW)
        super().__init__(values_SW, num_vip, adamw, memory, column_keys_W)
        self._two_rates = 0 < num_vip < values_SW.shape[0] if two_rates is None else two_rates
        self._missed = MissedSteps(adamw, history, 2 if self._two_rates else 1, self.dtype, values_SW.device)
        # The step that a row's moments belong to, and the step that its values belong to: the same, or the present one.
        self._moments_step, self._values_step = memory.steps("last"), memory.steps("current")
        self._smallest = _smallest_square(adamw.eps, self.dtype)
        self._compiled_read = compile_pass(_caught_up_) if compiled else None
        self._compiled_step = CompiledAdamWStep(self) if compiled else None
        # Skipping current rows needs their number, for which the host would wait on any device but a CPU.
        self._skips_current_rows = values_SW.device.type == "cpu"

    @property
    def sweep_due(self) -> bool:
        return self._missed.full

    # Reading and updating the rows of a step

    def begin(self, rows_R: Tensor) -> CaughtUpRows:
        steps_R = self._values_step.index_select(0, rows_R)
        return CaughtUpRows(self, rows_R, self._missed.since(steps_R.long(), self._rate_groups(rows_R)))

    def read_caught_up(self, out_RW: Tensor, rows_R: Tensor, correction: RowCorrection) -> None:
        """Caught-up values of these rows as a copy; the table does not change."""
        first, second = self.moments.first, self.moments.second
        constants = self.adamw.eps**0.5, self._smallest
        if self._compiled_read is not None:
            per_row = correction.coefficients_RN, correction.floor_R1, correction.shift_R1, correction.decay_R1
            mark_rows_dynamic(out_RW, rows_R, *per_row)
            self._compiled_read(out_RW, self.values, first, second, rows_R, correction, *constants)
            return
        self._values.read(rows_R, out_RW)
        for block in self._blocks.slices(rows_R):
            first_BW, second_BW, *buffers = self._blocks.buffers(rows_R[block], 5)
            self._first.read(rows_R[block], first_BW)
            self._second.read(rows_R[block], second_BW)
            _catch_up_(out_RW[block], first_BW, second_BW, correction[block], buffers, *constants)

    def update_pending(
        self, pending: PendingRows, gradient_RW: Tensor, rates: tuple[float, float], factor: float
    ) -> None:
        rows_R = pending.rows_R
        shrink = self._advance(rows_R, rates)
        step = self._compiled_step or self._step_in_blocks
        step(rows_R, gradient_RW, rates, factor, shrink, pending.values())
        self._finish(rows_R)

    def update(self, rows_R: Tensor, gradient_RW: Tensor, rates: tuple[float, float], factor: float = 1.0) -> None:
        self.catch_up(rows_R)
        shrink = self._advance(rows_R, rates)
        self._step_in_blocks(rows_R, gradient_RW, rates, factor, shrink)
        self._finish(rows_R)

    def _advance(self, rows_R: Tensor, rates: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """Count one more step; what the rows' moments have shrunk by since they were last updated."""
        shrink = self._moment_decay(self._moments_step.index_select(0, rows_R))
        self._missed.advance(rates if self._two_rates else rates[:1] if self.num_vip else rates[1:])
        return shrink

    def _finish(self, rows_R: Tensor) -> None:
        self._moments_step.index_fill_(0, rows_R, self._missed.step)
        self._values_step.index_fill_(0, rows_R, self._missed.step)
        if self.sweeps and self.sweep_due:
            self.catch_up_all()

    # Catching up in place

    def catch_up(self, rows_R: Tensor, *, moments: bool = False) -> None:
        self._catch_up_values(*self._behind(self._values_step, rows_R))
        if moments:
            self._catch_up_moments(*self._behind(self._moments_step, rows_R))

    def catch_up_all(self) -> None:
        if self._missed.step == self._missed.base:
            return
        for rows_R in torch.arange(self.num_rows, device=self.values.device).split(ROWS_AT_ONCE):
            self.catch_up(rows_R, moments=True)
        self.start_over()

    def start_over(self) -> None:
        if self._missed.step != self._missed.base:
            self._missed.start_over()

    def start_(self, values_RW: Tensor, is_vip_R: Tensor, ids_R: Tensor) -> dict[str, int]:
        """A row that starts late went through every `catch_up_all` before: by decay alone, as its moments are 0."""
        if self._missed.base == 0:
            return {}
        groups_R = (~is_vip_R).long() if self._two_rates else torch.zeros_like(is_vip_R, dtype=torch.int64)
        rounded: Rounded = as_it_is
        if self.noise is not None and self.values.dtype == torch.bfloat16:
            rounded = functools.partial(_rounded, row_keys(ids_R), self.noise.columns_W.to(values_RW.device))
        self._missed.decay_initial_(values_RW, groups_R, rounded)
        return {"last": self._missed.base, "current": self._missed.base}

    def _behind(self, steps_S: Tensor, rows_R: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that are behind the present step, and their steps. Current rows may be among them; they do not
        change."""
        steps_R = steps_S.index_select(0, rows_R)
        if self._skips_current_rows:
            behind_R = steps_R != self._missed.step
            return rows_R[behind_R], steps_R[behind_R]
        return rows_R, steps_R

    def _catch_up_values(self, rows_R: Tensor, steps_R: Tensor) -> None:
        if not rows_R.numel():
            return
        correction = self._missed.since(steps_R.long(), self._rate_groups(rows_R))
        for block in self._blocks.slices(rows_R):
            values_BW, first_BW, second_BW, *buffers = self._blocks.buffers(rows_R[block], 6)
            self._values.read(rows_R[block], values_BW)
            self._first.read(rows_R[block], first_BW)
            self._second.read(rows_R[block], second_BW)
            constants = self.adamw.eps**0.5, self._smallest
            _catch_up_(values_BW, first_BW, second_BW, correction[block], buffers, *constants)
            self._values.write(rows_R[block], values_BW, self._missed.step)
        self._values_step.index_fill_(0, rows_R, self._missed.step)

    def _catch_up_moments(self, rows_R: Tensor, steps_R: Tensor) -> None:
        for moment, factor_R1 in zip((self._first, self._second), self._moment_decay(steps_R), strict=True):
            for block in self._blocks.slices(rows_R):
                moment_BW = self._blocks.buffers(rows_R[block], 1)[0]
                moment.read(rows_R[block], moment_BW)
                moment.write(rows_R[block], moment_BW.mul_(factor_R1[block]), self._missed.step)
        self._moments_step.index_fill_(0, rows_R, self._missed.step)

    def _moment_decay(self, steps_R: Tensor) -> tuple[Tensor, Tensor]:
        """[R, 1]: factors of first and second moments between these steps and the present one."""
        gap_R1 = (self._missed.step - steps_R).double()[:, None]
        beta1, beta2 = self.adamw.betas
        shrink = beta1**gap_R1, beta2**gap_R1
        # Flush to zero: denormals make a CPU fifty times slower.
        first, second = (torch.where(factor > FLUSH_BELOW, factor, 0.0).to(self.dtype) for factor in shrink)
        return first, second

    def _rate_groups(self, rows_R: Tensor) -> Tensor:
        """0 for VIP rows and 1 for the others; with one rate, 0 for all."""
        return (rows_R >= self.num_vip).long() if self._two_rates else torch.zeros_like(rows_R)

    # Checkpoints

    def nbytes(self) -> int:
        return super().nbytes() + self._moments_step.nbytes + self._values_step.nbytes

    def state(self) -> OptimizerState:
        state = super().state()
        state.rows = {"last": self._moments_step, "current": self._values_step}
        state.replicated |= self._missed.state()
        return state

    def load_replicated(self, saved: dict[str, Tensor]) -> dict[str, int]:
        super().load_replicated(saved)
        if "sums" in saved:
            self._missed.load(saved)
            return {}
        # Saved by an optimizer whose rows are always current.
        self._missed.restart(int(self.moments.step))
        return {"last": self._missed.step, "current": self._missed.step}


class SavedCatchUp:
    """Catches up rows of a checkpoint without the optimizer that saved them, some rows at a time."""

    def __init__(self, betas: tuple[float, float], eps: float, saved: dict[str, Tensor]):
        """`saved`: the optimizer's `replicated` state."""
        _, entries = saved_range(saved)
        groups = len(saved["sums"])
        dtype = saved["coefficients"].dtype
        # Past decay is in the saved table; the decay rate itself is not needed.
        self._missed = MissedSteps(AdamW(betas, eps, 0.0), max(1, entries - 1), groups, dtype, torch.device("cpu"))
        self._missed.load(saved)
        self._two_rates, self._eps, self._smallest = groups == 2, eps, _smallest_square(eps, dtype)

    def since(self, steps_R: Tensor, is_vip_R: Tensor) -> RowCorrection:
        """`steps_R`: the step that each row's values belong to."""
        if any_outside(steps_R, self._missed.base, self._missed.step):
            raise BadFileError("the saved rows belong to steps that the table of missed steps does not have")
        groups_R = (~is_vip_R).long() if self._two_rates else torch.zeros_like(steps_R, dtype=torch.int64)
        return self._missed.since(steps_R.long(), groups_R)

    def formula_(self, values_RW: Tensor, is_vip_R: Tensor, rounded: Rounded = as_it_is) -> Tensor:
        """Catches up initial values of rows that have no record, in place, and returns them. `rounded`: as in
        `MissedSteps.decay_initial_`."""
        groups_R = (~is_vip_R).long() if self._two_rates else torch.zeros_like(is_vip_R, dtype=torch.int64)
        self._missed.decay_initial_(values_RW, groups_R, rounded)
        correction = self._missed.since(torch.full_like(groups_R, self._missed.base), groups_R)
        zeros_RW = torch.zeros_like(values_RW)
        return self.catch_up_(values_RW, zeros_RW, zeros_RW, correction)

    def catch_up_(self, values_RW: Tensor, first_RW: Tensor, second_RW: Tensor, correction: RowCorrection) -> Tensor:
        """Catches up the values in place, and returns them."""
        buffers = [torch.empty_like(values_RW) for _ in range(3)]
        _catch_up_(values_RW, first_RW, second_RW, correction, buffers, self._eps**0.5, self._smallest)
        return values_RW


def _rounded(keys_R: Tensor, columns_W: Tensor, values_RW: Tensor, step: int) -> Tensor:
    return round_to_bf16(values_RW, element_noise(keys_R, step, VALUES), columns_W)


def _smallest_square(eps: float, dtype: torch.dtype) -> float:
    return max((NEGLIGIBLE_ROOT[dtype] * eps) ** 2, 2 * torch.finfo(dtype).tiny)


def _catch_up_(
    values_BW: Tensor,
    first_BW: Tensor,
    second_BW: Tensor,
    missed: RowCorrection,
    buffers: list[Tensor],
    root_eps: float,
    smallest: float,
) -> None:
    """Applies missed steps to values in place."""
    d_BW, z_BW, sum_BW = buffers
    # sqrt by its inverse, and never of zero: a CPU takes several times as long for sqrt(0).
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
    missed: RowCorrection,
    root_eps: float,
    smallest: float,
) -> None:
    """Gathers rows and applies their missed steps, as a single expression for the compiler."""
    values_RW, first_RW, second_RW = (one[rows_R].to(out_RW.dtype) for one in (values_SW, first_SW, second_SW))
    inverse = 1 / (torch.sqrt(second_RW + smallest) + missed.floor_R1)
    z = missed.shift_R1 + root_eps * torch.sqrt(inverse)
    *lower, highest = missed.coefficients_RN.split(1, dim=1)
    total = highest
    for coefficient_R1 in reversed(lower):
        total = coefficient_R1 + total * z
    out_RW.copy_(values_RW + (values_RW * missed.decay_R1 + total * first_RW * inverse))
