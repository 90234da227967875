"""The radius of a β-Gaussian: constants of one α and one dimension, right for α next to 1, above and below it.

With c = α − 1 and u = L⁻¹(t − μ), Σ = L Lᵀ, every β-Gaussian is p(t) = p₀ (1 − c‖u‖²/(2 p₀ᶜ))₊^(1/c): its peak p₀ says
the rest. Below, k = 1/c is the power of the density where it is compact (c > 0), m = −1/c where it has heavy tails.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel._checks import is_number
from fenchel._torch import concrete, standard_gamma

Array = np.ndarray[Any, Any]

_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
_LARGE = 24.0  # from here on the series above is right to the last digit


class Radial:
    """Constants of the law of ‖u‖² for one α and one dimension D."""

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
        """The factor of p₀ᶜ Σ in the covariance; infinite if the tails are too heavy."""
        return 1 / rest if (rest := 1 + self.c * (1 + self.half)) > 0 else math.inf

    @property
    def has_mean(self) -> bool:
        """Whether the tails are light enough for a mean."""
        return 1 + self.c * (self.half + 0.5) > 0

    @property
    def log_loss(self) -> float:
        """E[log p₀ − log p(t)]: the entropy minus −log p₀."""
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
            if abs(step := index - 1) < 1e-3:  # the difference below would be of rounding alone; its slope is known
                x, w = gauss_legendre(5)
                slopes = (Radial(1 + self.c / s, self.dim).log_loss / s for s in (1 + step * x).tolist())
                return -step * math.fsum(v * slope for v, slope in zip(w.tolist(), slopes, strict=True))
            return (
                -self.half * math.log(index) + _log_gammas(self.c / index, self.half) - _log_gammas(self.c, self.half)
            )
        if not self.is_compact or 1 + index / self.c <= 0:
            return math.inf
        k = 1 / self.c
        gammas = (k * index + 1, k + 1 + self.half), (k * index + 1 + self.half, k + 1)
        return sum(map(math.lgamma, gammas[0])) - sum(map(math.lgamma, gammas[1]))

    def each(self, function: Callable[[Radial], float]) -> float:
        """A number that follows from α; ``Radials`` has one for every entry."""
        return function(self)


class Radials:
    """The laws of a tensor of α, one per batch entry, with the names of ``Radial``; its numbers are tensors.

    Args:
        alpha: of the shape of the batch, without gradients.
        dim: D.
        dtype: of the numbers.
    """

    def __init__(self, alpha: Tensor, dim: int, dtype: torch.dtype) -> None:
        values, self._index = alpha.detach().double().unique(return_inverse=True)  # type: ignore[no-untyped-call]
        self._laws = [Radial(value, dim) for value in values.tolist()]
        self._like = torch.empty(0, dtype=dtype, device=alpha.device)
        self.dim, self.half = dim, dim / 2
        self.c = self.each(lambda law: law.c)

    def each(self, function: Callable[[Radial], float]) -> Tensor:
        """One number per entry."""
        return self._like.new_tensor([function(law) for law in self._laws])[self._index]

    @property
    def is_compact(self) -> Tensor:
        return self.c > 0

    @property
    def log_constant(self) -> Tensor:
        return self.each(lambda law: law.log_constant)

    def log_peak(self, half_logdet: Tensor) -> Tensor:
        return -(half_logdet + self.log_constant) / (1 + self.c * self.half)

    @property
    def spread(self) -> Tensor:
        return self.each(lambda law: law.spread)

    @property
    def has_mean(self) -> Tensor:
        return self.each(lambda law: law.has_mean) > 0

    @property
    def log_loss(self) -> Tensor:
        return self.each(lambda law: law.log_loss)


Law = Radial | Radials
Number = float | Tensor
"""A number for all, or one per batch entry."""


def over(x: Number, dims: int) -> Number:
    """One number per batch entry, with ``dims`` more dimensions of size 1."""
    return x[(..., *(None,) * dims)] if isinstance(x, Tensor) else x


def some(condition: bool | Tensor) -> bool:
    """Whether a condition holds for any entry."""
    return bool(condition.any()) if isinstance(condition, Tensor) else condition


def log_shape(y: Tensor, c: Number) -> Tensor:
    """log (1 − c y)/c, −inf where c y ≥ 1; −y for c = 0. Of y = ½‖u‖²/p₀ᶜ it is the log-density less its peak."""
    if not isinstance(c, Tensor):
        if c == 0:
            return -y
        inside = ~(c * y >= 1)  # NaN stays
        return torch.where(inside, torch.log1p(-torch.where(inside, c * y, 0.0)) / c, -math.inf)
    flat = c == 0
    bent = torch.where(flat, 1.0, c)
    inside = ~(bent * y >= 1)
    rest = torch.where(inside, torch.log1p(-torch.where(inside, bent * y, 0.0)) / bent, -math.inf)
    return torch.where(flat, -y, rest)


def shrink(normal: Tensor, c: Number, half: float) -> Tensor:
    """Random factors that turn standard normal samples (…, D) into samples of u/√p₀ᶜ."""
    if not isinstance(c, Tensor):
        if c == 0:
            return torch.ones_like(normal[..., :1])
        c = normal.new_tensor(c)
    c = c.unsqueeze(-1)
    flat = c == 0
    power = 1 / torch.where(flat, 1.0, c).abs()
    shape = torch.where(c > 0, power + 1, torch.where(flat, 1.0, power - half))
    square = normal.square().sum(-1, keepdim=True)
    rest = 2 * standard_gamma(shape.to(normal.dtype).expand_as(square))
    # ‖z‖²/(‖z‖² + 2g) is a Beta(D/2, k + 1) variable.
    rest = torch.where(c > 0, rest + square, rest)
    return torch.where(flat, 1.0, (2 * power / rest).sqrt())


def check_alpha(alpha: float | Tensor, dim: int) -> float | Tensor:
    """Check that β-Gaussians of this α, or of each α of a tensor, have finite integrals in D dimensions."""
    if isinstance(alpha, Tensor):
        _check_alphas(alpha, dim)
        return alpha
    if not is_number(alpha):
        raise TypeError(f"alpha must be a number, such as 2.0, or a tensor; got {type(alpha).__name__}")
    if not 1 - 2 / dim < alpha < math.inf:
        raise ValueError(_not_normalised(dim, alpha))
    return float(alpha)


def check_one_alpha(alpha: float, dim: int) -> float:
    """Check one α for all entries, as in ``check_alpha``; tensors are refused."""
    if isinstance(alpha, Tensor):
        raise TypeError("alpha must be a number, such as 2.0, and not learned; got Tensor")
    checked = check_alpha(alpha, dim)
    assert isinstance(checked, float)
    return checked


def _check_alphas(alpha: Tensor, dim: int) -> None:
    if not alpha.is_floating_point():
        raise TypeError(f"alpha must be a number or a floating-point tensor, got {alpha.dtype}")
    if alpha.requires_grad:
        raise ValueError(
            "alpha must not require gradients: there are none in alpha. Pass alpha.detach(), one value per batch entry"
        )
    if not concrete(alpha):
        raise ValueError("a tensor alpha must hold values that can be read: not in torch.compile or torch.func.vmap")
    wrong = ~((alpha > 1 - 2 / dim) & (alpha < math.inf))
    if bool(wrong.any()):
        raise ValueError(_not_normalised(dim, alpha[wrong][0].item()))


def _not_normalised(dim: int, alpha: float) -> str:
    return (
        f"alpha must satisfy 1 − 2/D < alpha < inf, here alpha > {1 - 2 / dim:g} in {dim} dimension{'s' * (dim > 1)}: "
        f"the density cannot be normalised otherwise; got {alpha}"
    )


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


def log_ball(power: float, half: float) -> float:
    """log ∫ (1 − ‖u‖²)^k over the unit ball of D = 2·half dimensions."""
    if power < _LARGE + half:
        return half * math.log(math.pi) + math.lgamma(power + 1) - math.lgamma(power + 1 + half)
    return half * math.log(math.pi / power) + _log_gammas(1 / power, half)


def log_gamma_peak(shape: float) -> float:
    """a log a − a − log Γ(a): of a gamma variable's logarithm, the density at its mode."""
    if shape < _LARGE:
        return shape * math.log(shape) - shape - math.lgamma(shape)
    return 0.5 * math.log(shape / (2 * math.pi)) - _tail(shape)


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
