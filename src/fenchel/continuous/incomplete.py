"""Distribution functions on the line: incomplete beta functions, which torch does not have, with their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel.continuous.radial import Array, Radial

Function = Callable[[Tensor], Tensor]


def standard_cdf(x: Tensor, law: Radial) -> Tensor:
    """P(X ≤ x) for X = u/√p₀ᶜ in one dimension."""
    result: Tensor
    if law.c == 0:
        result = torch.special.ndtr(x)
        return result
    result = _Cdf.apply(x, law)  # type: ignore[no-untyped-call]
    return result


def standard_icdf(q: Tensor, law: Radial) -> Tensor:
    """The inverse of ``standard_cdf``."""
    if law.c == 0:
        x: Tensor = torch.special.ndtri(q)
        return x
    return inverse(q, lambda q: _on_host(q, lambda a: _icdf(a, law)), lambda x: standard_density(x, law))


def inverse(q: Tensor, quantile: Function, density: Function) -> Tensor:
    """The quantiles of probabilities, with derivatives of every order: the first is 1/density."""
    result: Tensor = _Inverse.apply(q, quantile, density)  # type: ignore[no-untyped-call]
    return result


def standard_density(x: Tensor, law: Radial) -> Tensor:
    """The derivative of ``standard_cdf``."""
    y = 0.5 * law.c * x.square()
    inside = ~(y >= 1)
    shape = torch.log1p(-torch.where(inside, y, 0.0)) / law.c
    return torch.where(inside, torch.exp(shape - law.log_constant), 0.0)


class _Cdf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, law: Radial) -> Tensor:
        ctx.law = law
        ctx.save_for_backward(x)
        return _on_host(x, lambda a: _cdf(a, law))

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


def _on_host(x: Tensor, function: Callable[[Array], Array]) -> Tensor:
    values = function(x.detach().double().cpu().numpy())
    return torch.as_tensor(values, device=x.device).to(x.dtype)


def _cdf(x: Array, law: Radial) -> Array:
    from scipy import special

    if law.c < 0:
        m = -1 / law.c
        return np.asarray(special.stdtr(2 * m - 1, x * math.sqrt((2 * m - 1) / (2 * m))))
    y = np.minimum(np.abs(x) * math.sqrt(0.5 * law.c), 1.0)
    centre = special.betainc(0.5, 1 / law.c + 1, y * y)
    # Each of the two is known well where it is small.
    tail = np.where(centre < 0.5, 1 - centre, special.betainc(1 / law.c + 1, 0.5, (1 - y) * (1 + y)))
    return np.asarray(np.where(x < 0, 0.5 * tail, 1 - 0.5 * tail))


def _icdf(q: Array, law: Radial) -> Array:
    from scipy import special

    if law.c < 0:
        m = -1 / law.c
        return np.asarray(special.stdtrit(2 * m - 1, q) * math.sqrt(2 * m / (2 * m - 1)))
    k = 1 / law.c
    centre = np.sqrt(special.betaincinv(0.5, k + 1, np.abs(2 * q - 1)))
    # Towards the ends 2q is known better than 1 − 2q.
    edge = np.sqrt(1 - special.betaincinv(k + 1, 0.5, 2 * np.minimum(q, 1 - q)))
    size = np.where(np.abs(2 * q - 1) < 0.5, centre, edge)
    return np.asarray(size * np.sign(q - 0.5) * math.sqrt(2 * k))
