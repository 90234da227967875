"""The radius of a β-Gaussian: constants of one α and one dimension, right for α next to 1, above and below it.

With c = α − 1 and u = L⁻¹(t − μ), Σ = L Lᵀ, every β-Gaussian is p(t) = p₀ (1 − c‖u‖²/(2 p₀ᶜ))₊^(1/c): its peak p₀ says
the rest. Below, k = 1/c is the power of the density where it is compact (c > 0), m = −1/c where it has heavy tails.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]

_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
_LARGE = 24.0  # from here on the series above is right to the last digit


class Radial:
    """What the law of ‖u‖² comes to in numbers, for one α and one dimension D."""

    def __init__(self, alpha: float, dim: int) -> None:
        self.alpha, self.dim = alpha, dim
        self.c = alpha - 1.0
        self.half = dim / 2
        self.log_constant = self.half * math.log(2 * math.pi) + _log_gammas(self.c, self.half)

    @property
    def is_compact(self) -> bool:
        """Whether the support is an ellipsoid: α > 1."""
        return self.c > 0

    def log_peak(self, half_logdet: Tensor) -> Tensor:
        """log p₀, of ½ log det Σ."""
        return -(half_logdet + self.log_constant) / (1 + self.c * self.half)

    @property
    def spread(self) -> float:
        """The covariance is so many times p₀ᶜ Σ; infinite if the tails are too heavy."""
        return 1 / rest if (rest := 1 + self.c * (1 + self.half)) > 0 else math.inf

    @property
    def has_mean(self) -> bool:
        """Whether the tails are light enough for a mean."""
        return 1 + self.c * (self.half + 0.5) > 0

    @property
    def log_loss(self) -> float:
        """E[log p₀ − log p(t)]: the entropy is so much above −log p₀."""
        if self.c == 0:
            return self.half
        power = 1 / abs(self.c)
        if self.c > 0:
            return power * _digammas(power + 1, self.half)
        return power * _digammas(power - self.half, self.half)

    def log_power(self, index: float) -> float:
        """log ∫ p^q of densities with peak 1, q = index; +inf if there is no such integral."""
        if index == self.alpha and math.isfinite(self.spread):  # E[pᶜ], to the last digit however small c is
            return math.log1p(self.c) - math.log1p(self.c * (1 + self.half))
        if index > 0:
            if 1 + self.c / index * self.half <= 0:
                return math.inf
            return (
                -self.half * math.log(index) + _log_gammas(self.c / index, self.half) - _log_gammas(self.c, self.half)
            )
        if not self.is_compact or 1 + index / self.c <= 0:
            return math.inf
        k = 1 / self.c
        gammas = (k * index + 1, k + 1 + self.half), (k * index + 1 + self.half, k + 1)
        return sum(map(math.lgamma, gammas[0])) - sum(map(math.lgamma, gammas[1]))

    def shrink(self, normal: Tensor) -> Tensor:
        """What standard normal draws (…, D) are multiplied by to be draws of u/√p₀ᶜ: a gamma variable decides."""
        if self.c == 0:
            return torch.ones_like(normal[..., :1])
        power = 1 / abs(self.c)
        shape = torch.full_like(normal[..., :1], power + 1 if self.c > 0 else power - self.half)
        rest = 2 * torch._standard_gamma(shape)
        if self.c > 0:  # ‖z‖²/(‖z‖² + 2g) is a Beta(D/2, k + 1) variable
            rest = rest + normal.square().sum(-1, keepdim=True)
        return (2 * power / rest).sqrt()

    def nodes(self, count: int) -> tuple[Array, Array]:
        """Gauss's nodes of ‖u‖²/p₀ᶜ, and their weights, which sum to 1."""
        if self.c == 0:
            x, w = gauss_laguerre(count, self.half - 1)
            return 2 * x, w
        power = 1 / abs(self.c)
        if self.c > 0:
            x, w = gauss_jacobi(count, power, self.half - 1)
            return 2 * power * x, w
        x, w = gauss_jacobi(count, self.half - 1, power - self.half - 1)
        return 2 * power * (1 - x) / x, w


def check_alpha(alpha: float, dim: int) -> float:
    """Check that a β-Gaussian of this α has a finite integral in D dimensions."""
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise TypeError(f"alpha must be a number, got {type(alpha).__name__}")
    lower = 1 - 2 / dim
    if not lower < alpha < math.inf:
        raise ValueError(
            f"alpha must satisfy 1 − 2/D < alpha < inf, here alpha > {lower:g} in {dim} dimension{'s' * (dim > 1)}: "
            f"the density cannot be normalised otherwise; got {alpha}"
        )
    return float(alpha)


def _log_gammas(c: float, half: float) -> float:
    """(D/2) log k + log Γ(k+1) − log Γ(k+1+D/2) for c > 0, its continuation below: tends to 0 with c."""
    if c == 0:
        return 0.0
    power = 1 / abs(c)
    low, high = (power + 1, power + 1 + half) if c > 0 else (power - half, power)
    if power < _LARGE + half:
        return half * math.log(power) + math.lgamma(low) - math.lgamma(high)
    # Stirling's series, with the terms that would cancel taken together.
    if c > 0:
        body = (power + 0.5) * math.log1p(1 / power) - (power + 0.5 + half) * math.log1p((1 + half) / power)
    else:
        body = (power - half - 0.5) * math.log1p(-half / power)
    return body + half + _tail(low) - _tail(high)


def _tail(z: float) -> float:
    """log Γ(z) − (z − ½) log z + z − ½ log 2π."""
    return math.fsum(b / z ** (2 * n + 1) for n, b in enumerate(_STIRLING))


def _digammas(z: float, step: float) -> float:
    """ψ(z + step) − ψ(z)."""
    shift = 0.0
    while z < _LARGE:
        shift += 1 / z - 1 / (z + step)
        z += 1
    slopes = [-(2 * n + 1) * b for n, b in enumerate(_STIRLING)]
    tails = math.fsum(s * ((z + step) ** (-2 * n - 2) - z ** (-2 * n - 2)) for n, s in enumerate(slopes))
    return shift + math.log1p(step / z) + step / (2 * z * (z + step)) + tails


# -- quadrature ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=128)
def gauss_jacobi(count: int, a: float, b: float) -> tuple[Array, Array]:
    """Nodes in (0, 1) for the weight (1 − x)^a x^b, and weights that sum to 1, by Golub and Welsch."""
    n = np.arange(count, dtype=float)
    total = 2 * n + a + b
    with np.errstate(divide="ignore", invalid="ignore"):
        diagonal = (b - a) * (a + b) / (total * (total + 2))
    diagonal[0] = (b - a) / (a + b + 2)
    if a + b == 0:
        diagonal[1:] = 0.0
    n, total = n[1:], total[1:]
    with np.errstate(divide="ignore", invalid="ignore"):
        square = 4 * n * (n + a) * (n + b) * (n + a + b) / (total**2 * (total + 1) * (total - 1))
    if count > 1:
        square[0] = 4 * (1 + a) * (1 + b) / ((2 + a + b) ** 2 * (3 + a + b))
    x, w = _golub_welsch(diagonal, np.sqrt(square))
    return np.clip((1 + x) / 2, 1e-300, 1.0), w


@lru_cache(maxsize=128)
def gauss_laguerre(count: int, a: float) -> tuple[Array, Array]:
    """Nodes in (0, ∞) for the weight x^a e^(−x), and weights that sum to 1."""
    n = np.arange(count, dtype=float)
    return _golub_welsch(2 * n + 1 + a, np.sqrt(n[1:] * (n[1:] + a)))


@lru_cache(maxsize=128)
def gauss_legendre(count: int) -> tuple[Array, Array]:
    """Nodes in (0, 1), and weights that sum to 1."""
    x, w = np.polynomial.legendre.leggauss(count)
    return (1 + x) / 2, w / 2


@lru_cache(maxsize=32)
def double_exponential(count: int) -> tuple[Array, Array, Array]:
    """Nodes x in (0, 1), 1 − x, and weights: for functions that have powers and logarithms at the ends."""
    edge = 3.4
    s, h = np.linspace(-edge, edge, count, retstep=True)
    body = np.pi / 2 * np.sinh(s)
    x, rest = 1 / (1 + np.exp(-2 * body)), 1 / (1 + np.exp(2 * body))
    return x, rest, h * np.pi * np.cosh(s) * x * rest


def _golub_welsch(diagonal: Array, beside: Array) -> tuple[Array, Array]:
    x, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
    return x, vectors[0] ** 2
