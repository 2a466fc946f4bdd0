"""What AdamW does to a row in the steps that do not hit it, in closed form.

A row was last hit at step s; its moments are m, v since. Steps k = s+1..t without a gradient move it by

    w -> D(s,t) w - m f(x),   x = sqrt(v),   f(x) = sum over k of A[k] b1^(k-s) / (x c[k] + eps)
    D(s,t) = product of (1 - lr[j] wd) over s < j <= t
    A[k] = lr[k] D(k,t) / (1 - b1^k),   c[k] = b2^((k-s)/2) / sqrt(1 - b2^k)

f depends on s and t alone, not on the row, so one table over s serves all rows; `curve.py` says how f becomes a
polynomial. The table holds its Chebyshev coefficients, divided by D(base,t): a step adds one term to each of the latest
entries, the others' momentum has died out, and none needs to be touched for the decay.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from xgram_dist.errors import UserError
from xgram_dist.optim.rows.adamw import AdamW
from xgram_dist.optim.rows.curve import denominator, fit, steps_that_count

# The table starts anew when all decays together come to less.
SMALLEST_DECAY = 1e-6


@dataclass(frozen=True)
class Missed:
    """Rows from the step they are at to the present one. With d = sqrt(v) + floor and z = shift + sqrt(eps / d),
    they move by decay * w + m / d * (polynomial of z)."""

    coefficients_RN: Tensor
    floor_R1: Tensor
    shift_R1: Tensor
    decay_R1: Tensor

    def part(self, part: slice) -> "Missed":
        return Missed(self.coefficients_RN[part], self.floor_R1[part], self.shift_R1[part], self.decay_R1[part])


class MissedSteps:
    """The table for the steps since `base`, for rows of several learning rates ("kinds")."""

    def __init__(self, adamw: AdamW, length: int, kinds: int, dtype: torch.dtype, device: torch.device):
        self.adamw, self.length = adamw, length
        curve = fit(adamw.betas, dtype)
        self.degree, self._kappa = curve.degree, curve.kappa
        self._nodes_N = curve.nodes_N.to(device)
        self._to_chebyshev_NN, self._to_powers_NN = curve.to_chebyshev_NN.to(device), curve.to_powers_NN.to(device)
        beta1, beta2 = adamw.betas
        lasting = min(length, steps_that_count(adamw.betas, dtype))
        gaps_L = torch.arange(lasting, 0, -1, dtype=torch.float64, device=device)
        self._first_L, self._second_L = beta1**gaps_L, beta2 ** (gaps_L / 2)
        entries, points = length + 1, curve.degree + 1
        self._sums_KTN = torch.zeros(kinds, entries, points, dtype=torch.float64, device=device)
        self._decays_KT = torch.ones(kinds, entries, dtype=torch.float64, device=device)
        self._coefficients_KTN = torch.zeros(kinds, entries, points, dtype=dtype, device=device)
        self.restart(0)

    def restart(self, step: int) -> None:
        """All rows are at `step`: forget how they came there."""
        self.base = self.step = step
        self._decays = [1.0] * len(self._sums_KTN)
        self._decays_KT[:, 0] = 1.0
        self._sums_KTN[:, 0] = 0.0
        self._coefficients_KTN[:, 0] = 0.0
        steps_T = torch.arange(step, step + self.length + 1, dtype=torch.float64, device=self._sums_KTN.device)
        self._roots_T = (1 - self.adamw.betas[1] ** steps_T.clamp(min=1)).sqrt()
        floors_T = self._kappa * self._roots_T  # in units of eps
        dtype = self._coefficients_KTN.dtype
        self._floors_T = (self.adamw.eps * floors_T).to(dtype)
        self._shifts_T = (-0.5 * floors_T.rsqrt()).to(dtype)
        # What makes coefficients of (y - 1/2)^n those of z^n, and m / d of y^2 m / eps; a negative sign for descent.
        powers_N = 1 + torch.arange(self.degree + 1, dtype=torch.float64, device=steps_T.device) / 2
        self._units_TN = -(floors_T[:, None] ** powers_N)

    def exact(self) -> dict[str, Tensor]:
        used = slice(0, self.step - self.base + 1)
        return {
            "base": torch.tensor(self.base),
            "sums": self._sums_KTN[:, used],
            "decays": self._decays_KT[:, used],
            "coefficients": self._coefficients_KTN[:, used],
            "product": torch.tensor(self._decays, dtype=torch.float64),
        }

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Go on from what `exact` gave."""
        self.restart(int(saved["base"]))
        entries = saved["decays"].shape[1]
        if entries > self.length + 1 or saved["sums"].shape[0] != len(self._sums_KTN):
            raise UserError(
                "the saved table optimizer had other learning-rate groups or a longer history; go on with the recipe "
                "it was saved with"
            )
        self.step = self.base + entries - 1
        self._decays = saved["product"].tolist()
        self._sums_KTN[:, :entries] = saved["sums"].to(self._sums_KTN)
        self._decays_KT[:, :entries] = saved["decays"].to(self._decays_KT)
        self._coefficients_KTN[:, :entries] = saved["coefficients"].to(self._coefficients_KTN)

    @property
    def full(self) -> bool:
        return self.step - self.base == self.length or min(self._decays) < SMALLEST_DECAY

    def advance(self, rates: tuple[float, ...]) -> None:
        """One more step, at the learning rate of each kind."""
        if max(rates) * self.adamw.weight_decay >= 1:
            raise UserError(
                f"the tables' learning rate {max(rates):g} times their weight decay {self.adamw.weight_decay:g} is 1 "
                "or more; lower memory.weight_decay or memory.learning_rate, or take memory.optimizer=dense"
            )
        self.step += 1
        now = self.step - self.base
        latest = min(now, len(self._first_L))
        part = slice(now - latest, now)
        beta1, beta2 = self.adamw.betas
        c_C = self._second_L[-latest:] * self._roots_T[part] / math.sqrt(1 - beta2**self.step)
        terms_CN = self._first_L[-latest:, None] / denominator(self._nodes_N, c_C, self._kappa)
        terms_CN = terms_CN @ self._to_chebyshev_NN
        for kind, rate in enumerate(rates):
            self._decays[kind] *= 1 - rate * self.adamw.weight_decay
            self._decays_KT[kind, now] = self._decays[kind]
            weight = rate / ((1 - beta1**self.step) * self._decays[kind])
            sums_CN = self._sums_KTN[kind, part].add_(terms_CN, alpha=weight)
            self._coefficients_KTN[kind, part] = (sums_CN @ self._to_powers_NN).mul_(self._units_TN[part])
        self._sums_KTN[:, now] = 0.0
        self._coefficients_KTN[:, now] = 0.0

    def since(self, steps_R: Tensor, kinds_R: Tensor) -> Missed:
        """For rows of these kinds that are at these steps. A row at the present step does not move."""
        entry_R, table_R = steps_R - self.base, kinds_R * (self.length + 1)
        decays, coefficients = self._decays_KT.flatten(), self._coefficients_KTN.flatten(0, 1)
        now_R = decays.index_select(0, table_R + (self.step - self.base))
        decay_R = now_R / decays.index_select(0, table_R + entry_R) - 1
        coefficients_RN = coefficients.index_select(0, table_R + entry_R)
        return Missed(
            coefficients_RN.mul_(now_R.to(coefficients.dtype)[:, None]),
            self._floors_T.index_select(0, entry_R)[:, None],
            self._shifts_T.index_select(0, entry_R)[:, None],
            decay_R.to(coefficients.dtype)[:, None],
        )
