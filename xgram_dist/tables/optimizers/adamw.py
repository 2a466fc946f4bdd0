"""AdamW on table rows: hyperparameters, moments, a step on gathered rows; the dense sweep and the lazy variant.

    DenseAdamW    sweeps all rows every step: untouched rows decay, and their momentum still moves them
    LazyAdamW     updates touched rows only: the others neither decay nor move

Exact AdamW that touches only the rows of a step is in adamw_catchup.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from xgram_dist.tables.optimizers.base import (
    OptimizerState,
    OwnMemory,
    RowBlocks,
    RowOptimizer,
    StateMemory,
    alias,
    compile_pass,
    mark_rows_dynamic,
    row_rates,
)
from xgram_dist.tables.optimizers.rounding import (
    FIRST,
    KEY,
    SECOND,
    VALUES,
    Numbers,
    RowNoise,
    compute_dtype,
    round_to_bf16,
)


@dataclass(frozen=True)
class AdamW:
    """Hyperparameters. Weight decay is decoupled, as in torch.optim.AdamW."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float


class Moments:
    """First and second moment of every row, and the number of steps taken. All AdamW variants save them under the same
    names, so one can resume from another's checkpoint."""

    def __init__(self, values_SW: Tensor, memory: StateMemory):
        self.first, self.second = memory.columns("first"), memory.columns("second")
        # fp32, as the fused kernel requires; exact up to 2^24 steps.
        self.step = torch.zeros((), dtype=torch.float32, device=values_SW.device)

    def nbytes(self) -> int:
        return self.first.nbytes + self.second.nbytes

    def state(self) -> OptimizerState:
        return OptimizerState(columns={"first": self.first, "second": self.second}, replicated={"step": self.step})


def adamw_(
    adamw: AdamW, values: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], step: Tensor, rate: float
) -> None:
    """One step of torch.optim.AdamW on contiguous tensors of one shape, in place. `step` already counts this one."""
    torch._fused_adamw_(
        [values],
        [gradient],
        [moments[0]],
        [moments[1]],
        [],
        [step],
        lr=rate,
        beta1=adamw.betas[0],
        beta2=adamw.betas[1],
        weight_decay=adamw.weight_decay,
        eps=adamw.eps,
        amsgrad=False,
        maximize=False,
    )


class GatheredAdamW(RowOptimizer):
    """AdamW on rows that are gathered, updated and written back."""

    def __init__(
        self,
        values_SW: Tensor,
        num_vip: int,
        adamw: AdamW,
        memory: StateMemory | None = None,
        column_keys_W: Tensor | None = None,
    ):
        """`column_keys_W`: for values or moments in bf16 (rounding.py)."""
        super().__init__(values_SW, num_vip)
        memory = memory or OwnMemory(values_SW)
        self.adamw, self.moments = adamw, Moments(values_SW, memory)
        self.dtype = compute_dtype(values_SW.dtype)
        self._key_bytes = 0
        self.noise: RowNoise | None = None
        if column_keys_W is not None:
            keys_S = memory.steps(KEY)
            self.noise, self._key_bytes = RowNoise(column_keys_W, keys_S), keys_S.nbytes
        self._values = Numbers(values_SW, self.noise, VALUES)
        self._first, self._second = (
            Numbers(moment, self.noise, kind)
            for moment, kind in ((self.moments.first, FIRST), (self.moments.second, SECOND))
        )
        self._one_rate = not 0 < num_vip < memory.max_rows
        self._blocks = RowBlocks(values_SW)
        self._without_decay = AdamW(adamw.betas, adamw.eps, 0.0)

    def nbytes(self) -> int:
        return self.moments.nbytes() + self._key_bytes

    def name_rows(self, rows_R: Tensor, ids_R: Tensor) -> None:
        if self.noise is not None:
            self.noise.name_rows(rows_R, ids_R)

    def state(self) -> OptimizerState:
        return self.moments.state()

    def load_replicated(self, saved: dict[str, Tensor]) -> dict[str, int]:
        self.moments.step.copy_(saved["step"])
        return {}

    def _step_in_blocks(
        self,
        rows_R: Tensor,
        gradient_RW: Tensor,
        rates: tuple[float, float],
        factor: float,
        shrink: tuple[Tensor, Tensor] | None = None,
        values_RW: Tensor | None = None,
    ) -> None:
        """One step on these rows. `shrink`: factors of their moments before the step. `values_RW`: their caught-up
        values, overwritten; without it the table's are current."""
        moments = self.moments
        moments.step.add_(1)
        if factor != 1:
            gradient_RW.mul_(factor)
        rate_R1 = None if self._one_rate else row_rates(rows_R, self.num_vip, rates, self.dtype)
        for block in self._blocks.slices(rows_R):
            rows_B = rows_R[block]
            first_BW, second_BW, values_BW, move_BW = self._blocks.buffers(rows_B, 4)
            self._first.read(rows_B, first_BW)
            self._second.read(rows_B, second_BW)
            if values_RW is None:
                self._values.read(rows_B, values_BW)
            else:
                values_BW = values_RW[block]
            if shrink is not None:
                first_BW.mul_(shrink[0][block])
                second_BW.mul_(shrink[1][block])
            both = first_BW, second_BW
            if rate_R1 is None:
                rate = rates[0] if self.num_vip else rates[1]
                adamw_(self.adamw, values_BW, gradient_RW[block], both, moments.step, rate)
            else:
                # Rates differ by row: a step from 0 at rate 1 gives the movement, which is then scaled.
                adamw_(self._without_decay, move_BW.zero_(), gradient_RW[block], both, moments.step, 1.0)
                values_BW.addcmul_(values_BW, rate_R1[block], value=-self.adamw.weight_decay)
                values_BW.addcmul_(move_BW, rate_R1[block])
            self._first.write(rows_B, first_BW, moments.step)
            self._second.write(rows_B, second_BW, moments.step)
            self._values.write(rows_B, values_BW, moments.step)


class CompiledAdamWStep:
    """The same step as one compiled pass, for rows whose caught-up values are at hand."""

    def __init__(self, optimizer: GatheredAdamW):
        self._optimizer, self._pass = optimizer, compile_pass(_step_rows_)

    def __call__(
        self,
        rows_R: Tensor,
        gradient_RW: Tensor,
        rates: tuple[float, float],
        factor: float,
        shrink: tuple[Tensor, Tensor],
        values_RW: Tensor,
    ) -> None:
        values, moments, adamw = self._optimizer.values, self._optimizer.moments, self._optimizer.adamw
        moments.step.add_(1)
        written = values, alias(moments.first), alias(moments.second)
        tensors = *written, moments.first, moments.second, rows_R, values_RW, gradient_RW
        # Numbers shared by a whole row are computed here: inside the pass they would be computed for each element.
        speed_R1 = row_rates(rows_R, self._optimizer.num_vip, rates, self._optimizer.dtype)
        keep_R1 = 1 - adamw.weight_decay * speed_R1
        bias1, root2 = (1 - beta ** moments.step.double() for beta in adamw.betas)
        root2 = root2.sqrt()
        floor_R1 = torch.full_like(speed_R1, adamw.eps) * root2
        beta1, beta2 = adamw.betas
        old = beta1 * shrink[0], beta2 * shrink[1]
        new = (torch.full_like(speed_R1, weight) for weight in ((1 - beta1) * factor, (1 - beta2) * factor**2))
        numbers = *old, *new, keep_R1, (speed_R1 * (root2 / bias1)).to(speed_R1), floor_R1
        mark_rows_dynamic(rows_R, values_RW, gradient_RW, *numbers)
        noise: tuple[Tensor, ...] = ()
        if self._optimizer.noise is not None:
            of_rows = [self._optimizer.noise.of(rows_R, moments.step, kind) for kind in (VALUES, FIRST, SECOND)]
            mark_rows_dynamic(*of_rows)
            noise = *of_rows, self._optimizer.noise.columns_W
        self._pass(*tensors, *numbers, *noise)


def _step_rows_(
    written_values_SW: Tensor,
    written_first_SW: Tensor,
    written_second_SW: Tensor,
    first_SW: Tensor,
    second_SW: Tensor,
    rows_R: Tensor,
    values_RW: Tensor,
    gradient_RW: Tensor,
    old_first_R1: Tensor,
    old_second_R1: Tensor,
    new_first_R1: Tensor,
    new_second_R1: Tensor,
    keep_R1: Tensor,
    move_R1: Tensor,
    floor_R1: Tensor,
    *noise: Tensor,
) -> None:
    """One AdamW step on distinct rows as a single expression for the compiler: read once, written once. `old_*`,
    `new_*`: weights of the moments so far, and of the gradient and its square. `noise`: for numbers in bf16, that of
    the rows' values and moments, and the keys of the columns."""
    first_RW = old_first_R1 * first_SW[rows_R] + new_first_R1 * gradient_RW
    second_RW = old_second_R1 * second_SW[rows_R] + new_second_R1 * gradient_RW * gradient_RW
    moved_RW = keep_R1 * values_RW - move_R1 * (first_RW / (second_RW.sqrt() + floor_R1))
    written = (written_values_SW, moved_RW), (written_first_SW, first_RW), (written_second_SW, second_RW)
    for kind, (written_SW, numbers_RW) in enumerate(written):
        if written_SW.dtype == torch.bfloat16:
            numbers_RW = round_to_bf16(numbers_RW, noise[kind], noise[-1])
        written_SW.index_copy_(0, rows_R, numbers_RW)


class DenseAdamW(RowOptimizer):
    """A sweep over all rows each step. Four passes over the whole table (values, gradient, two moments), and a gradient
    buffer of the table's size."""

    def __init__(self, values_SW: Tensor, num_vip: int, adamw: AdamW):
        super().__init__(values_SW, num_vip)
        self.adamw, self.moments = adamw, Moments(values_SW, OwnMemory(values_SW))
        self._gradient = torch.zeros_like(values_SW)  # non-zero during `update` only, in the rows of the step

    def update(self, rows_R: Tensor, gradient_RW: Tensor, rates: tuple[float, float], factor: float = 1.0) -> None:
        moments = self.moments
        moments.step.add_(1)
        self._gradient.index_copy_(0, rows_R, gradient_RW if factor == 1 else gradient_RW.mul_(factor))
        for rate, rows in zip(rates, (slice(None, self.num_vip), slice(self.num_vip, None)), strict=True):
            if self.values[rows].numel():
                both = moments.first[rows], moments.second[rows]
                adamw_(self.adamw, self.values[rows], self._gradient[rows], both, moments.step, rate)
        self._gradient.index_fill_(0, rows_R, 0.0)

    def nbytes(self) -> int:
        return self.moments.nbytes() + self._gradient.nbytes

    def state(self) -> OptimizerState:
        return self.moments.state()

    def load_replicated(self, saved: dict[str, Tensor]) -> dict[str, int]:
        self.moments.step.copy_(saved["step"])
        return {}


class LazyAdamW(GatheredAdamW):
    """Updates touched rows only. A row's moments average over the steps that touched it; bias correction counts all
    steps, as in torch.optim.SparseAdam."""

    def update(self, rows_R: Tensor, gradient_RW: Tensor, rates: tuple[float, float], factor: float = 1.0) -> None:
        self._step_in_blocks(rows_R, gradient_RW, rates, factor)
