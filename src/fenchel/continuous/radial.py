"""The distribution of the radius of a β-Gaussian: constants of α and the dimension, precise for every α, also near 1.

With c = α − 1 and u = L⁻¹(t − μ), Σ = L Lᵀ, every β-Gaussian is p(t) = p₀ (1 − c‖u‖²/(2 p₀ᶜ))₊^(1/c), with peak p₀.
Below, k = 1/c is the power of a density with compact support (c > 0), m = −1/c that of one with heavy tails (c < 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel._checks import check_real
from fenchel._quadrature import Array, gauss_legendre
from fenchel._torch import concrete, standard_gamma

_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
_LARGE = 24.0  # above this, Stirling's series has full precision


class Radial:
    """Constants of the distribution of ‖u‖² for one α and one dimension D."""

    def __init__(self, alpha: float, dim: int) -> None:
        self.alpha, self.dim = alpha, dim
        self.c = alpha - 1.0
        self.half_dim = dim / 2
        self.log_constant = self.half_dim * math.log(2 * math.pi) + _log_gammas(self.c, self.half_dim)

    @property
    def is_compact(self) -> bool:
        """Whether the support is an ellipsoid: α > 1."""
        return self.c > 0

    def log_peak(self, half_logdet: Tensor) -> Tensor:
        """log p₀, given ½ log det Σ."""
        return -(half_logdet + self.log_constant) / (1 + self.c * self.half_dim)

    @property
    def spread(self) -> float:
        """The covariance divided by p₀ᶜ Σ; infinite if the tails are too heavy."""
        return 1 / rest if (rest := 1 + self.c * (1 + self.half_dim)) > 0 else math.inf

    @property
    def has_mean(self) -> bool:
        """Whether the tails are light enough for a mean."""
        return 1 + self.c * (self.half_dim + 0.5) > 0

    @property
    def mean_log_drop(self) -> float:
        """E[log p₀ − log p(t)]: the entropy plus log p₀."""
        if self.c == 0:
            return self.half_dim
        power = 1 / abs(self.c)
        if self.c > 0:
            return power * _digammas(power + 1, self.half_dim)
        return power * _digammas(power - self.half_dim, self.half_dim)

    def log_power(self, index: float) -> float:
        """log ∫ p^q of densities with peak 1, q = index; +inf if the integral diverges."""
        if index == self.alpha and math.isfinite(self.spread):  # E[pᶜ], precise however small c is
            return math.log1p(self.c) - math.log1p(self.c * (1 + self.half_dim))
        if index > 0:
            if 1 + self.c / index * self.half_dim <= 0:
                return math.inf
            if abs(step := index - 1) < 1e-3:  # the difference below would cancel; its derivative is integrated
                x, w = gauss_legendre(5)
                slopes = (Radial(1 + self.c / s, self.dim).mean_log_drop / s for s in (1 + step * x).tolist())
                return -step * math.fsum(v * slope for v, slope in zip(w.tolist(), slopes, strict=True))
            return (
                -self.half_dim * math.log(index)
                + _log_gammas(self.c / index, self.half_dim)
                - _log_gammas(self.c, self.half_dim)
            )
        if not self.is_compact or 1 + index / self.c <= 0:
            return math.inf
        k = 1 / self.c
        gammas = (k * index + 1, k + 1 + self.half_dim), (k * index + 1 + self.half_dim, k + 1)
        return sum(map(math.lgamma, gammas[0])) - sum(map(math.lgamma, gammas[1]))

    def each(self, function: Callable[[Radial], float]) -> float:
        """A number that depends on α; in ``Radials`` one number per entry."""
        return function(self)

    @property
    def laws(self) -> list[Radial]:
        """The law of each different α."""
        return [self]


class Radials:
    """The distributions of ‖u‖² for a tensor of α, one per batch entry: ``Radial`` with tensors for numbers.

    Args:
        alpha: of the shape of the batch, without gradients.
        dim: D.
        dtype: of the numbers.
    """

    def __init__(self, alpha: Tensor, dim: int, dtype: torch.dtype) -> None:
        values, self._index = alpha.detach().double().unique(return_inverse=True)  # type: ignore[no-untyped-call]
        self.laws = [Radial(value, dim) for value in values.tolist()]
        self._like = torch.empty(0, dtype=dtype, device=alpha.device)
        self.dim, self.half_dim = dim, dim / 2
        self.c = self.each(lambda law: law.c)

    def each(self, function: Callable[[Radial], float]) -> Tensor:
        """One number per entry."""
        return self._like.new_tensor([function(law) for law in self.laws])[self._index]

    @property
    def is_compact(self) -> Tensor:
        return self.c > 0

    @property
    def log_constant(self) -> Tensor:
        return self.each(lambda law: law.log_constant)

    def log_peak(self, half_logdet: Tensor) -> Tensor:
        return -(half_logdet + self.log_constant) / (1 + self.c * self.half_dim)

    @property
    def spread(self) -> Tensor:
        return self.each(lambda law: law.spread)

    @property
    def has_mean(self) -> Tensor:
        return self.each(lambda law: law.has_mean) > 0

    @property
    def mean_log_drop(self) -> Tensor:
        return self.each(lambda law: law.mean_log_drop)


Law = Radial | Radials
Number = float | Tensor
"""One number, or a tensor with one number per batch entry."""


def by_value(values: Tensor, call: Callable[[Tensor, Any], Tensor]) -> Tensor | None:
    """Results of rows (R, …) by one call per different value of (R,), or pair of (R, 2); None if there are no rows.

    Args:
        values: of the rows.
        call: returns the results of rows, given their indices and the value that they share.
    """
    different, index = values.unique(dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
    found: Tensor | None = None
    for number, value in enumerate(different.tolist()):
        rows = (index == number).nonzero().squeeze(-1)
        part = call(rows, value)
        found = part.new_zeros(len(index), *part.shape[1:]) if found is None else found
        found = found.index_put((rows,), part)
    return found


def over(x: Number, dims: int) -> Number:
    """A number, or a tensor with ``dims`` more dimensions of size 1 at the end."""
    return x[(..., *(None,) * dims)] if isinstance(x, Tensor) else x


def any_entry(condition: bool | Tensor) -> bool:
    """Whether a condition holds for any entry."""
    return bool(condition.any()) if isinstance(condition, Tensor) else condition


def log_shape(y: Tensor, c: Number) -> Tensor:
    """log(1 − c y)/c, −inf where c y ≥ 1, −y for c = 0: log p − log p₀ for y = ½‖u‖²/p₀ᶜ."""
    if not isinstance(c, Tensor):
        if c == 0:
            return -y
        inside = ~(c * y >= 1)  # NaN stays
        return torch.where(inside, torch.log1p(-torch.where(inside, c * y, 0.0)) / c, -math.inf)
    is_gaussian = c == 0
    bent = torch.where(is_gaussian, 1.0, c)
    inside = ~(bent * y >= 1)
    rest = torch.where(inside, torch.log1p(-torch.where(inside, bent * y, 0.0)) / bent, -math.inf)
    return torch.where(is_gaussian, -y, rest)


def radial_factors(normal: Tensor, c: Number, half: float) -> Tensor:
    """Random factors (…, 1) by which standard normal samples (…, D) become samples of u/√p₀ᶜ."""
    if not isinstance(c, Tensor):
        if c == 0:
            return torch.ones_like(normal[..., :1])
        c = normal.new_tensor(c)
    c = c.unsqueeze(-1)
    is_gaussian = c == 0
    power = 1 / torch.where(is_gaussian, 1.0, c).abs()
    shape = torch.where(c > 0, power + 1, torch.where(is_gaussian, 1.0, power - half))
    square = normal.square().sum(-1, keepdim=True)
    rest = 2 * standard_gamma(shape.to(normal.dtype).expand_as(square))
    # ‖z‖²/(‖z‖² + 2g) is a Beta(D/2, k + 1) variable.
    rest = torch.where(c > 0, rest + square, rest)
    return torch.where(is_gaussian, 1.0, (2 * power / rest).sqrt())


def check_alpha(alpha: float | Tensor, dim: int) -> float | Tensor:
    """Check that β-Gaussians of an α, or of each α of a tensor, can be normalised in D dimensions."""
    alpha = check_real(alpha, "alpha")
    wrong: float | None = None
    if isinstance(alpha, Tensor):
        if alpha.requires_grad:
            raise ValueError("alpha must not require gradients: it gets none; pass alpha.detach(), one per batch entry")
        if not concrete(alpha):
            raise ValueError("a tensor alpha must have values that can be read: not in torch.compile or vmap")
        outside = ~((alpha > 1 - 2 / dim) & (alpha < math.inf))
        wrong = alpha[outside][0].item() if bool(outside.any()) else None
    elif not 1 - 2 / dim < alpha < math.inf:
        wrong = alpha
    if wrong is not None:
        raise ValueError(
            f"alpha must satisfy 1 − 2/D < alpha < inf, here alpha > {1 - 2 / dim:g} in {dim} "
            f"dimension{'s' * (dim > 1)}: the density cannot be normalised otherwise; got {wrong}"
        )
    return alpha


def check_one_alpha(alpha: float, dim: int) -> float:
    """Check an α that is a number, as in ``check_alpha``; tensors are refused."""
    if isinstance(alpha, Tensor):
        raise TypeError("alpha must be a number, such as 2.0, and not learned; got Tensor")
    checked = check_alpha(alpha, dim)
    assert isinstance(checked, float)
    return checked


def _log_gammas(c: float, half: float) -> float:
    """(D/2) log k + log Γ(k+1) − log Γ(k+1+D/2) for c > 0, and its continuation for c < 0; 0 for c = 0."""
    if c == 0:
        return 0.0
    power = 1 / abs(c)
    low, high = (power + 1, power + 1 + half) if c > 0 else (power - half, power)
    if power < _LARGE + half:
        return half * math.log(power) + math.lgamma(low) - math.lgamma(high)
    # Stirling's series, in a form without cancellation.
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
    """a log a − a − log Γ(a): the log-density of the logarithm of a gamma variable at its mode."""
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


@lru_cache(maxsize=32)
def double_exponential(count: int) -> tuple[Array, Array, Array]:
    """Nodes x in (0, 1), 1 − x, and weights, for integrands with powers and logarithms at the ends."""
    edge = 3.4
    s, h = np.linspace(-edge, edge, count, retstep=True)
    body = np.pi / 2 * np.sinh(s)
    x, rest = 1 / (1 + np.exp(-2 * body)), 1 / (1 + np.exp(2 * body))
    return x, rest, h * np.pi * np.cosh(s) * x * rest
