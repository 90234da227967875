"""Distribution and quantile functions of β-Gaussians on the line, by SciPy's incomplete beta functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel._quadrature import Array
from fenchel.continuous.radial import Law, Number, log_shape

Function = Callable[[Tensor], Tensor]


def standard_cdf(x: Tensor, law: Law) -> Tensor:
    """P(X ≤ x), of the shape of x, for X = u/√p₀ᶜ in one dimension."""
    if not isinstance(law.c, Tensor) and law.c == 0:
        return 0.5 * torch.erfc(x * -math.sqrt(0.5))
    result: Tensor = _Cdf.apply(x, law)  # type: ignore[no-untyped-call]
    return result


def standard_icdf(q: Tensor, law: Law) -> Tensor:
    """The inverse of ``standard_cdf``."""
    if not isinstance(law.c, Tensor) and law.c == 0:
        x: Tensor = torch.special.ndtri(q)
        return x
    return inverse(q, lambda q: _with_scipy(q, law.c, _icdf), lambda x: standard_density(x, law))


def inverse(q: Tensor, quantile: Function, density: Function) -> Tensor:
    """The quantiles of probabilities q, differentiable: the derivative is 1/density."""
    result: Tensor = _Inverse.apply(q, quantile, density)  # type: ignore[no-untyped-call]
    return result


def standard_density(x: Tensor, law: Law) -> Tensor:
    """The density of X: the derivative of ``standard_cdf``."""
    return torch.exp(log_shape(0.5 * x.square(), law.c) - law.log_constant)


class _Cdf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, law: Law) -> Tensor:
        ctx.law = law
        ctx.save_for_backward(x)
        return _with_scipy(x, law.c, _cdf)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * standard_density(x, ctx.law), None


class _Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, quantile: Function, density: Function) -> Tensor:
        ctx.density = density
        x = quantile(q)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad / ctx.density(x), None, None


def _with_scipy(x: Tensor, c: Number, function: Callable[[Array, Array], Array]) -> Tensor:
    """Apply a function of NumPy arrays to a tensor and c, in double precision on the CPU."""
    exponents = c.double().cpu().numpy() if isinstance(c, Tensor) else np.float64(c)
    values = function(*np.broadcast_arrays(x.detach().double().cpu().numpy(), exponents))
    return torch.as_tensor(values, device=x.device).to(x.dtype)


# For c ≠ 0 and y = ½|c| x² the share b = y (c > 0) or y/(1 + y) (c < 0) is a Beta(½, B) variable, with B = 1/c + 1 or
# −1/c − ½. If the rest 1 − b is tiny, the power law of its distribution is used, because the rest would underflow.


def _second(c: Array) -> Array:
    """The parameter B of the beta distribution."""
    power = 1 / np.abs(c)
    return np.where(c > 0, power + 1, power - 0.5)


def _log_edge(b: Array) -> Array:
    """log P(1 − share ≤ r) − B log r in the limit r → 0."""
    from scipy import special

    return np.asarray(-np.log(b) - special.betaln(b, 0.5))


def _cdf(x: Array, c: Array) -> Array:
    from scipy import special

    is_gaussian, c = c == 0, np.where(c == 0, 1.0, c)
    second = _second(c)
    with np.errstate(all="ignore"):
        y = np.abs(x) * np.sqrt(0.5 * np.abs(c))
        inner = np.minimum(y, 1.0)
        share = np.where(c > 0, inner * inner, np.where(y > 1, 1 / (1 + (1 / y) ** 2), y * y / (1 + y * y)))
        rest = np.where(c > 0, (1 - inner) * (1 + inner), 1 / (1 + y * y))
        # From the share or the rest, whichever is smaller and therefore more precise.
        tail = np.where(share < 0.5, special.betaincc(0.5, second, share), special.betainc(second, 0.5, rest))
        far = (c < 0) & (y > 1e9)
        tail = np.where(far, np.exp(_log_edge(second) - 2 * second * np.log(y)), tail)
        tail = np.where(is_gaussian, special.erfc(np.abs(x) * math.sqrt(0.5)), tail)
    return np.asarray(np.where(x < 0, 0.5 * tail, 1 - 0.5 * tail))


def _icdf(q: Array, c: Array) -> Array:
    from scipy import special

    is_gaussian, c = c == 0, np.where(c == 0, 1.0, c)
    second = _second(c)
    with np.errstate(all="ignore"):
        # Near the ends the tail is more precise than the middle, which is 1 minus twice the tail.
        tail, middle = 2 * np.minimum(q, 1 - q), np.abs(2 * q - 1)
        near = middle < 0.5
        share = np.where(near, special.betaincinv(0.5, second, middle), special.betainccinv(0.5, second, tail))
        rest = np.where(near, 1 - share, special.betaincinv(second, 0.5, tail))
        log_rest = (np.log(tail) - _log_edge(second)) / second
        square = np.where(c > 0, share, share / rest)
        size = np.where((c < 0) & (log_rest < -40), np.exp(-0.5 * log_rest), np.sqrt(square))
        x = size * np.sqrt(2 / np.abs(c)) * np.sign(q - 0.5)
    return np.asarray(np.where(is_gaussian, special.ndtri(q), x))
