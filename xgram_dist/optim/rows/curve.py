"""The movement of a row that AdamW does not hit, as a polynomial. Names are those of `missed.py`.

With

    d = x + e,   e = kappa eps sqrt(1 - b2^s),   y = sqrt(e / d)   (0: x is large; 1: x is 0)

f(x) d is a smooth function of y on [0, 1], also where c[k] gets small, and a polynomial of y - 1/2 stands for it.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from xgram_dist.errors import UserError

MAX_DEGREE = 40
MOST_STEPS = 4096
KAPPAS = (1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
# Relative error of the polynomial, and the weight (with headroom for a rising learning rate) of the steps left out.
TOLERANCE = {torch.float32: 5e-7, torch.float64: 1e-12}
NEGLIGIBLE = {torch.float32: 1e-12, torch.float64: 1e-18}


def denominator(y_N: Tensor, c_C: Tensor, kappa: float) -> Tensor:
    """[C, N]: (x c[k] + eps) / (eps / y^2), the terms' denominators."""
    square_N = y_N.square()
    return torch.addmm(square_N, c_C[:, None], (kappa * (1 - square_N))[None])


def steps_that_count(betas: tuple[float, float], dtype: torch.dtype) -> int:
    """After so many steps what is left of a row's momentum moves it no more."""
    beta1, beta2 = betas
    rate = max(beta1, beta1 / math.sqrt(beta2)) if beta2 > 0 else beta1
    if rate == 0:
        return 1
    return MOST_STEPS if rate >= 1 else min(MOST_STEPS, math.ceil(math.log(NEGLIGIBLE[dtype]) / math.log(rate)))


@dataclass(frozen=True)
class Curve:
    """How a function of y on [0, 1] is turned to a polynomial: values at nodes @ to_chebyshev @ to_powers are the
    coefficients of (y - 1/2)^n. The two matrices in one would lose digits."""

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
    """The polynomial of least degree that is as exact as `dtype` asks, over last hits early and late and gaps short
    and long, at a constant learning rate."""
    tolerance, best = TOLERANCE[dtype], None
    steps = steps_that_count(betas, dtype)
    grid_Y = torch.cat((torch.logspace(-6, -1, 30), torch.linspace(0.1, 1, 100))).double()
    for kappa in KAPPAS:
        true_XY = _samples(grid_Y, betas, kappa, steps)
        for degree in range(1, MAX_DEGREE + 1 if best is None else best.degree):
            curve = Curve.of(kappa, degree)
            coefficients_XN = curve.powers(_samples(curve.nodes_N, betas, kappa, steps))
            powers_NY = (grid_Y - 0.5) ** torch.arange(degree + 1)[:, None]
            error_XY = (coefficients_XN @ powers_NY - true_XY).abs()
            # What rounding can add: terms of alternating sign, larger than their sum.
            rounding_XY = (coefficients_XN.abs() @ powers_NY.abs()) * (torch.finfo(dtype).eps / 2)
            if bool((torch.maximum(error_XY, rounding_XY) <= tolerance * true_XY).all()):
                best = curve
                break
    if best is None:
        raise UserError(
            f"optimizer.betas {betas}: the first is too near the square root of the second to catch up with missed "
            "steps exactly; lower the first, raise the second, or take memory.optimizer=dense"
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
