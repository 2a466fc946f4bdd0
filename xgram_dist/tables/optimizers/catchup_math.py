"""Catch-up math: what AdamW does to a row in the steps that do not touch it, in closed form.

A row was last touched at step s, with moments m and v. Steps k = s+1..t without a gradient move it by

    w -> D(s,t) w - m f(x),   x = sqrt(v),   f(x) = sum over k of A[k] b1^(k-s) / (x c[k] + eps)
    D(s,t) = product of (1 - lr[j] wd) over s < j <= t
    A[k] = lr[k] D(k,t) / (1 - b1^k),   c[k] = b2^((k-s)/2) / sqrt(1 - b2^k)

f depends on s and t alone, not on the row, so one table over s serves all rows. With

    d = x + e,   e = kappa eps sqrt(1 - b2^s),   y = sqrt(e / d)   (0: x is large; 1: x is 0)

f(x) d is a smooth function of y on [0, 1], also where c[k] is small, and a polynomial in y - 1/2 approximates it to
rounding (`Curve`). The table holds its Chebyshev coefficients divided by D(base,t) (`MissedSteps`): a step adds one
term to each of the latest entries, the momentum of older entries has died out, and decay changes no entry.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from xgram_dist.errors import BadFileError, UserError
from xgram_dist.parallel.device import to_device
from xgram_dist.tables.optimizers.adamw import AdamW

MAX_DEGREE = 40
MOST_STEPS = 4096
KAPPAS = (1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
# Relative error of the polynomial; weight of the steps left out, with headroom for a rising learning rate.
TOLERANCE = {torch.float32: 5e-7, torch.float64: 1e-12}
NEGLIGIBLE = {torch.float32: 1e-12, torch.float64: 1e-18}


def denominator(y_N: Tensor, c_C: Tensor, kappa: float) -> Tensor:
    """[C, N]: the denominators (x c[k] + eps) / (eps / y^2) of the terms."""
    square_N = y_N.square()
    return torch.addmm(square_N, c_C[:, None], (kappa * (1 - square_N))[None])


def momentum_lifetime(betas: tuple[float, float], dtype: torch.dtype) -> int:
    """Steps after which a row's remaining momentum no longer moves it."""
    beta1, beta2 = betas
    rate = max(beta1, beta1 / math.sqrt(beta2)) if beta2 > 0 else beta1
    if rate == 0:
        return 1
    return MOST_STEPS if rate >= 1 else min(MOST_STEPS, math.ceil(math.log(NEGLIGIBLE[dtype]) / math.log(rate)))


@dataclass(frozen=True)
class Curve:
    """Interpolates a function of y on [0, 1]: values at the nodes @ to_chebyshev @ to_powers are the coefficients of
    (y - 1/2)^n. The product of the two matrices would lose digits."""

    kappa: float
    degree: int
    nodes_N: Tensor
    to_chebyshev_NN: Tensor
    to_powers_NN: Tensor

    @classmethod
    def of(cls, kappa: float, degree: int) -> "Curve":
        angle_N = (torch.arange(degree + 1, dtype=torch.float64) + 0.5) * (math.pi / (degree + 1))
        to_chebyshev_NN = torch.cos(angle_N[:, None] * torch.arange(degree + 1)) * (2 / (degree + 1))
        to_chebyshev_NN[:, 0] /= 2
        to_powers_NN = torch.eye(degree + 1, dtype=torch.float64)
        for n in range(2, degree + 1):
            to_powers_NN[n, 1:] = 2 * to_powers_NN[n - 1, :-1]
            to_powers_NN[n] -= to_powers_NN[n - 2]
        to_powers_NN *= 2.0 ** torch.arange(degree + 1, dtype=torch.float64)
        return cls(kappa, degree, 0.5 + angle_N.cos() / 2, to_chebyshev_NN, to_powers_NN)

    def powers(self, values_XN: Tensor) -> Tensor:
        return values_XN @ self.to_chebyshev_NN @ self.to_powers_NN


@functools.lru_cache
def fit(betas: tuple[float, float], dtype: torch.dtype) -> Curve:
    """The polynomial of least degree that is exact to the rounding of `dtype`, for early and late steps s and short and
    long gaps t - s, at a constant learning rate."""
    tolerance, best = TOLERANCE[dtype], None
    steps = momentum_lifetime(betas, dtype)
    grid_Y = torch.cat((torch.logspace(-6, -1, 30), torch.linspace(0.1, 1, 100))).double()
    for kappa in KAPPAS:
        true_XY = _samples(grid_Y, betas, kappa, steps)
        for degree in range(1, MAX_DEGREE + 1 if best is None else best.degree):
            curve = Curve.of(kappa, degree)
            coefficients_XN = curve.powers(_samples(curve.nodes_N, betas, kappa, steps))
            powers_NY = (grid_Y - 0.5) ** torch.arange(degree + 1)[:, None]
            error_XY = (coefficients_XN @ powers_NY - true_XY).abs()
            # Rounding error: terms of alternating sign exceed their sum.
            rounding_XY = (coefficients_XN.abs() @ powers_NY.abs()) * (torch.finfo(dtype).eps / 2)
            if bool((torch.maximum(error_XY, rounding_XY) <= tolerance * true_XY).all()):
                best = curve
                break
    if best is None:
        raise UserError(
            f"optimizer.betas {betas}: the first is too near the square root of the second to catch up with missed "
            "steps exactly; lower the first, raise the second, or set memory.optimizer=dense"
        )
    return best


def _samples(y_Y: Tensor, betas: tuple[float, float], kappa: float, steps: int) -> Tensor:
    """f(x) d at y for several s and t, summed term by term."""
    beta1, beta2 = betas
    gaps_G = torch.arange(1, steps + 1, dtype=torch.float64)
    chosen = [*(gap - 1 for gap in (1, 2, 4, 8, 16, 32, 64, 128, 256) if gap < steps), steps - 1]
    samples = []
    for last in (1, 2, 5, 20, 1000):
        steps_G = last + gaps_G
        c_G = beta2 ** (gaps_G / 2) * ((1 - beta2**last) / (1 - beta2**steps_G)).sqrt()
        terms_GY = (beta1**gaps_G / (1 - beta1**steps_G))[:, None] / denominator(y_Y, c_G, kappa)
        samples.append(terms_GY.cumsum(0)[chosen])
    return torch.cat(samples)


# The table of missed steps

SMALLEST_DECAY = 1e-6
"""The table restarts when the product of all decays falls below."""


Rounded = Callable[[Tensor, int], Tensor]
"""(values, step) -> the values as they are stored at that step."""


def as_it_is(values_RW: Tensor, step: int) -> Tensor:
    return values_RW


@dataclass(frozen=True)
class RowCorrection:
    """What brings rows from their own step to the present one. With d = sqrt(v) + floor and z = shift + sqrt(eps / d),
    a row moves by decay * w + m / d * (polynomial in z)."""

    coefficients_RN: Tensor
    floor_R1: Tensor
    shift_R1: Tensor
    decay_R1: Tensor

    def __getitem__(self, rows: slice) -> "RowCorrection":
        return RowCorrection(self.coefficients_RN[rows], self.floor_R1[rows], self.shift_R1[rows], self.decay_R1[rows])


MAX_STEP = 2**53
"""Steps are also used as float64."""


def saved_range(saved: dict[str, Tensor]) -> tuple[int, int]:
    """Of `MissedSteps.state`, which somebody else may have written: (base, entries). Values of rows are at a step from
    `base` to `base + entries - 1`."""
    number = {name: tensor for name, tensor in saved.items() if name in ("base", "past_steps")}
    table = {name: saved[name] for name in ("sums", "decays", "coefficients", "product") if name in saved}
    if "base" in number and len(table) == 4 and table["sums"].dim() == 3:
        groups, entries, points = table["sums"].shape
        past = saved["past_decays"].shape[:1] if "past_decays" in saved else (0,)
        shapes = {
            "base": (),
            "past_steps": past,
            "decays": (groups, entries),
            "coefficients": (groups, entries, points),
            "product": (groups,),
            "past_decays": (*past, groups),
        }
        if (
            min(groups, entries, points) > 0
            and all(tuple(saved[name].shape) == tuple(shape) for name, shape in shapes.items() if name in saved)
            and all(one.dtype == torch.int64 and bool(((one >= 0) & (one < MAX_STEP)).all()) for one in number.values())
            and all(one.is_floating_point() and bool(one.isfinite().all()) for one in table.values())
        ):
            return int(number["base"]), entries
    raise BadFileError("the saved table of missed steps is damaged; use another checkpoint")


def any_outside(steps_R: Tensor, first: int, last: int) -> bool:
    """Whether a step of some row is not from `first` to `last`. A number that the rows' type cannot hold would wrap."""
    if steps_R.dtype not in (torch.int32, torch.int64):
        steps_R = steps_R.long()
    largest = torch.iinfo(steps_R.dtype).max
    if steps_R.numel() and first > largest:
        return True
    return bool(((steps_R < min(first, largest)) | (steps_R > min(last, largest))).any())


class MissedSteps:
    """The table of missed steps since `base`, for each learning-rate group."""

    def __init__(self, adamw: AdamW, length: int, groups: int, dtype: torch.dtype, device: torch.device):
        self.adamw, self.length = adamw, length
        curve = fit(adamw.betas, dtype)
        self.degree, self._kappa = curve.degree, curve.kappa
        self._nodes_N = curve.nodes_N.to(device)
        self._to_chebyshev_NN, self._to_powers_NN = curve.to_chebyshev_NN.to(device), curve.to_powers_NN.to(device)
        beta1, beta2 = adamw.betas
        lasting = min(length, momentum_lifetime(adamw.betas, dtype))
        gaps_L = torch.arange(lasting, 0, -1, dtype=torch.float64, device=device)
        self._first_L, self._second_L = beta1**gaps_L, beta2 ** (gaps_L / 2)
        entries, points = length + 1, curve.degree + 1
        self._sums_KTN = torch.zeros(groups, entries, points, dtype=torch.float64, device=device)
        self._decays_KT = torch.ones(groups, entries, dtype=torch.float64, device=device)
        self._coefficients_KTN = torch.zeros(groups, entries, points, dtype=dtype, device=device)
        self._past_decays: list[list[float]] = []
        """Of each history before this one: the decay of a row through all of it, less 1, for each group."""
        self._past_steps: list[int] = []
        """The step at which each of them ended."""
        self.restart(0)

    def start_over(self) -> None:
        """All rows have been caught up: begin a new history."""
        self._past_decays.append([decay - 1 for decay in self._decays])
        self._past_steps.append(self.step)
        self.restart(self.step)

    def decay_initial_(self, values_RW: Tensor, groups_R: Tensor, rounded: Rounded = as_it_is) -> None:
        """Take initial values of rows of these groups from step 0 to `base`, as `catch_up_all` did: one history after
        the other, for the same rounding. `rounded`: values as they are stored at a step."""
        for decays, step in zip(self._past_decays, self._past_steps, strict=True):
            decays_K = to_device(torch.tensor(decays, dtype=torch.float64).to(values_RW.dtype), values_RW.device)
            values_RW.addcmul_(values_RW, decays_K.index_select(0, groups_R)[:, None])
            values_RW.copy_(rounded(values_RW, step))

    def restart(self, step: int) -> None:
        """All rows are at `step`: drop the history before it."""
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
        # Turns coefficients of (y - 1/2)^n into those of z^n, and y^2 m / eps into m / d; negative for descent.
        powers_N = 1 + torch.arange(self.degree + 1, dtype=torch.float64, device=steps_T.device) / 2
        self._units_TN = -(floors_T[:, None] ** powers_N)

    def state(self) -> dict[str, Tensor]:
        used = slice(0, self.step - self.base + 1)
        past = {}
        if self._past_decays:
            past["past_decays"] = torch.tensor(self._past_decays, dtype=torch.float64)
            past["past_steps"] = torch.tensor(self._past_steps)
        return past | {
            "base": torch.tensor(self.base),
            "sums": self._sums_KTN[:, used],
            "decays": self._decays_KT[:, used],
            "coefficients": self._coefficients_KTN[:, used],
            "product": torch.tensor(self._decays, dtype=torch.float64),
        }

    def load(self, saved: dict[str, Tensor]) -> None:
        """Resume from `state`."""
        base, entries = saved_range(saved)
        if entries > self.length + 1 or saved["sums"].shape[0] != len(self._sums_KTN):
            raise UserError(
                "the saved table optimizer had other learning-rate groups or a longer history; resume with the recipe "
                "it was saved with"
            )
        if saved["sums"].shape[2] != self.degree + 1:
            raise UserError("the saved table optimizer had other optimizer.betas; resume with the recipe it had")
        self.restart(base)
        self.step = self.base + entries - 1
        self._decays = saved["product"].tolist()
        self._past_decays = saved["past_decays"].tolist() if "past_decays" in saved else []
        # Only rounding asks for the steps. Checkpoints without them hold no numbers that were rounded.
        self._past_steps = saved["past_steps"].tolist() if "past_steps" in saved else [0] * len(self._past_decays)
        self._sums_KTN[:, :entries] = saved["sums"].to(self._sums_KTN)
        self._decays_KT[:, :entries] = saved["decays"].to(self._decays_KT)
        self._coefficients_KTN[:, :entries] = saved["coefficients"].to(self._coefficients_KTN)

    @property
    def full(self) -> bool:
        return self.step - self.base == self.length or min(self._decays) < SMALLEST_DECAY

    def advance(self, rates: tuple[float, ...]) -> None:
        """Count one more step, at the learning rate of each group."""
        if max(rates) * self.adamw.weight_decay >= 1:
            raise UserError(
                f"the tables' learning rate {max(rates):g} times their weight decay {self.adamw.weight_decay:g} is 1 "
                "or more; lower memory.weight_decay or memory.learning_rate, or set memory.optimizer=dense"
            )
        self.step += 1
        now = self.step - self.base
        latest = min(now, len(self._first_L))
        part = slice(now - latest, now)
        beta1, beta2 = self.adamw.betas
        c_C = self._second_L[-latest:] * self._roots_T[part] / math.sqrt(1 - beta2**self.step)
        terms_CN = self._first_L[-latest:, None] / denominator(self._nodes_N, c_C, self._kappa)
        terms_CN = terms_CN @ self._to_chebyshev_NN
        for group, rate in enumerate(rates):
            self._decays[group] *= 1 - rate * self.adamw.weight_decay
            self._decays_KT[group, now].fill_(self._decays[group])  # assigning a number would copy it from the host
            weight = rate / ((1 - beta1**self.step) * self._decays[group])
            sums_CN = self._sums_KTN[group, part].add_(terms_CN, alpha=weight)
            self._coefficients_KTN[group, part] = (sums_CN @ self._to_powers_NN).mul_(self._units_TN[part])
        self._sums_KTN[:, now] = 0.0
        self._coefficients_KTN[:, now] = 0.0

    def since(self, steps_R: Tensor, groups_R: Tensor) -> RowCorrection:
        """For rows of these learning-rate groups whose values are at these steps. Current rows do not move."""
        entry_R, table_R = steps_R - self.base, groups_R * (self.length + 1)
        decays, coefficients = self._decays_KT.flatten(), self._coefficients_KTN.flatten(0, 1)
        now_R = decays.index_select(0, table_R + (self.step - self.base))
        decay_R = now_R / decays.index_select(0, table_R + entry_R) - 1
        coefficients_RN = coefficients.index_select(0, table_R + entry_R)
        return RowCorrection(
            coefficients_RN.mul_(now_R.to(coefficients.dtype)[:, None]),
            self._floors_T.index_select(0, entry_R)[:, None],
            self._shifts_T.index_select(0, entry_R)[:, None],
            decay_R.to(coefficients.dtype)[:, None],
        )
