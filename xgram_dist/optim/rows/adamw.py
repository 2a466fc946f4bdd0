"""What the AdamW optimizers of rows share: hyperparameters, the moments of rows, and a step on gathered rows."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from xgram_dist.optim.rows.blocks import Blocks, gather_parts, row_rates
from xgram_dist.optim.rows.compiled import any_count, compiled_pass, other_name
from xgram_dist.optim.rows.protocol import RowState
from xgram_dist.parallel.device import large_pages


@dataclass(frozen=True)
class AdamW:
    """Hyperparameters. Weight decay is decoupled, as in torch.optim.AdamW."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float


class Moments:
    """First and second moment of every row and the number of steps done; saved and loaded by the same names for all
    AdamW optimizers of rows, so that one can go on where another stopped."""

    def __init__(self, values: Tensor):
        self.first, self.second = (large_pages(torch.empty_like(values)).zero_() for _ in range(2))
        # As the fused kernel wants it; exact up to 2^24 steps.
        self.step = torch.zeros((), dtype=torch.float32, device=values.device)

    def nbytes(self) -> int:
        return self.first.nbytes + self.second.nbytes

    def exact(self) -> RowState:
        return RowState(columns={"first": self.first, "second": self.second}, whole={"step": self.step})

    def state(self) -> dict[str, Tensor]:
        return {"first": self.first, "second": self.second, "step": self.step}

    def load_state(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


def adamw_(
    adamw: AdamW, values: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], step: Tensor, rate: float
) -> None:
    """One step, as torch.optim.AdamW does it, on contiguous tensors of one shape. `step` counts this one too."""
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


class GatheredAdamW:
    """AdamW on rows that are gathered, updated and put back."""

    def __init__(self, values: Tensor, cut: int, adamw: AdamW, compiled: bool = False):
        """`compiled`: a step is one compiled pass instead of some ten operations."""
        self.values, self.cut, self.adamw = values, cut, adamw
        self.moments = Moments(values)
        self._blocks = Blocks(values)
        self._without_decay = AdamW(adamw.betas, adamw.eps, 0.0)
        self._step_rows_ = compiled_pass(_step_rows_) if compiled else None

    def nbytes(self) -> int:
        return self.moments.nbytes()

    def exact(self) -> RowState:
        return self.moments.exact()

    def restore(self, whole: dict[str, Tensor]) -> None:
        self.moments.step.copy_(whole["step"])

    def open(self, rows_R: Tensor, parts: list[slice], out_RW: Tensor) -> Iterator[None]:
        return gather_parts(self.values, rows_R, parts, out_RW)

    def opened(self, rows_R: Tensor) -> Tensor:
        return self.values.index_select(0, rows_R)

    def close(self) -> None:
        """Nothing was begun."""

    def _hit(
        self,
        rows_R: Tensor,
        gradient_RW: Tensor,
        rates: tuple[float, float],
        factor: float,
        shrink: tuple[Tensor, Tensor] | None = None,
        values_RW: Tensor | None = None,
    ) -> None:
        """A step for these rows. Their first and second moments are multiplied with `shrink` before it; `values_RW`:
        what they are, where they are not yet what they should be. It is used up."""
        moments = self.moments
        moments.step.add_(1)
        alike = not 0 < self.cut < self.values.shape[0]
        if self._step_rows_ is not None and values_RW is not None and shrink is not None:
            written = self.values, other_name(moments.first), other_name(moments.second)
            tensors = *written, moments.first, moments.second, rows_R, values_RW, gradient_RW
            # Numbers that are the same for a whole row are made here: in the pass they would be made for each element.
            speed_R1 = row_rates(rows_R, self.cut, rates, self.values.dtype)
            keep_R1 = 1 - self.adamw.weight_decay * speed_R1
            bias1, root2 = (1 - beta ** moments.step.double() for beta in self.adamw.betas)
            root2 = root2.sqrt()
            floor_R1 = torch.full_like(speed_R1, self.adamw.eps) * root2
            beta1, beta2 = self.adamw.betas
            old = beta1 * shrink[0], beta2 * shrink[1]
            new = (torch.full_like(speed_R1, one) for one in ((1 - beta1) * factor, (1 - beta2) * factor**2))
            numbers = *old, *new, keep_R1, (speed_R1 * (root2 / bias1)).to(speed_R1), floor_R1
            any_count(rows_R, values_RW, gradient_RW, *numbers)
            self._step_rows_(*tensors, *numbers)
            return
        if factor != 1:
            gradient_RW.mul_(factor)
        rate_R1 = None if alike else row_rates(rows_R, self.cut, rates, self.values.dtype)
        for part in self._blocks.parts(rows_R):
            rows_B = rows_R[part]
            first_BW, second_BW, values_BW, move_BW = self._blocks.buffers(rows_B, 4)
            torch.index_select(moments.first, 0, rows_B, out=first_BW)
            torch.index_select(moments.second, 0, rows_B, out=second_BW)
            if values_RW is None:
                torch.index_select(self.values, 0, rows_B, out=values_BW)
            else:
                values_BW = values_RW[part]
            if shrink is not None:
                first_BW.mul_(shrink[0][part])
                second_BW.mul_(shrink[1][part])
            both = first_BW, second_BW
            if rate_R1 is None:
                rate = rates[0] if self.cut else rates[1]
                adamw_(self.adamw, values_BW, gradient_RW[part], both, moments.step, rate)
            else:
                # From 0 at rate 1 gives the movement, as the rate is not the same for all rows.
                adamw_(self._without_decay, move_BW.zero_(), gradient_RW[part], both, moments.step, 1.0)
                values_BW.addcmul_(values_BW, rate_R1[part], value=-self.adamw.weight_decay)
                values_BW.addcmul_(move_BW, rate_R1[part])
            moments.first.index_copy_(0, rows_B, first_BW)
            moments.second.index_copy_(0, rows_B, second_BW)
            self.values.index_copy_(0, rows_B, values_BW)


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
) -> None:
    """A step of distinct rows as one expression for a compiler: read once, written once. `old_*`, `new_*`: weights of
    the moments so far, and of the gradient and its square."""
    first_RW = old_first_R1 * first_SW[rows_R] + new_first_R1 * gradient_RW
    second_RW = old_second_R1 * second_SW[rows_R] + new_second_R1 * gradient_RW * gradient_RW
    moved_RW = keep_R1 * values_RW - move_R1 * (first_RW / (second_RW.sqrt() + floor_R1))
    written_values_SW.index_copy_(0, rows_R, moved_RW)
    written_first_SW.index_copy_(0, rows_R, first_RW)
    written_second_SW.index_copy_(0, rows_R, second_RW)
