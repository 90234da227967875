"""Powers, logarithms and Newton's step, for blocks of float32 or float64.

Every row is p = [1 + scale·(z − A)]₊^(1/h), with an offset A ≥ 0 that makes the sum of p equal to 1. For entmax scale =
h = c = α − 1; for normmax scale = 1 and h = c/(1 + c), and the result is proportional to p^(1 − h).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


def jit(function: Callable[..., Any]) -> Any:
    """Let Triton compile a function."""
    return triton.jit(function)


SPARSEMAX: Any = tl.constexpr(1)
"""α = 2 of entmax, and α = ∞ of normmax: h = 1."""

HALF: Any = tl.constexpr(2)
"""α = 1.5 of entmax."""

ANY: Any = tl.constexpr(0)
"""Any h ≤ 1, by logarithms."""

STEEP: Any = tl.constexpr(3)
"""α > 2 of entmax, ∞ included."""

TOTAL: Any = tl.constexpr(4)
"""Any α of entmax, which is known on the device alone; one row per program."""

LOG2_E: Any = tl.constexpr(1.4426950408889634)
LN_2: Any = tl.constexpr(0.6931471805599453)


@jit
def log1p(y: tl.tensor, TERMS: tl.constexpr) -> Any:
    """log(1 + y) for y > −1. Near 0 by a series in y/(2 + y), because fast logarithms have an absolute error there."""
    t = y / (2.0 + y)
    square = t * t
    series = square * 0.0 + 1.0 / (2 * TERMS + 1)
    for k in tl.static_range(TERMS):
        series = series * square + 1.0 / (2 * (TERMS - 1 - k) + 1)
    far = tl.log2(tl.where(y > -1.0, 1.0 + y, 1.0)) * LN_2
    return tl.where(tl.abs(y) < 0.3, 2.0 * t * series, far)


@jit
def mass(u: tl.tensor, scale: tl.tensor, h: tl.tensor, KIND: tl.constexpr, TERMS: tl.constexpr) -> Any:
    """p = [1 + scale·u]₊^(1/h), and s = p^(1 − h), by which it falls as the offset rises."""
    if KIND == SPARSEMAX:
        p = tl.maximum(1.0 + u, 0.0)
        s = tl.where(p > 0.0, 1.0, 0.0).to(u.dtype)
    elif KIND == HALF:
        s = tl.maximum(1.0 + 0.5 * u, 0.0)
        p = s * s
    else:
        y = scale * u
        inside = y > -1.0
        logarithm = log1p(tl.where(inside, y, 0.0), TERMS) / h * LOG2_E
        p = tl.where(inside, tl.exp2(logarithm), 0.0)
        s = tl.where(inside, tl.exp2((1.0 - h) * logarithm), 0.0)
    return p, s


@jit
def advance(S: tl.tensor, D: tl.tensor, scale: tl.tensor, h: tl.tensor, KIND: tl.constexpr, TERMS: tl.constexpr) -> Any:
    """Newton's step on S^h = 1, with S = Σp and D = Σs: (S − S^(1−h))/(scale·D).

    S^h is a norm of the scores: convex in A for h > 0, concave for h < 0. From A = 0 the steps never pass the solution.
    """
    slope = tl.where(D > 0.0, D, 1.0)
    if KIND == SPARSEMAX:
        step = (S - 1.0) / slope
    elif KIND == HALF:
        step = 2.0 * (S - tl.sqrt(S)) / slope
    else:
        logarithm = log1p(S - 1.0, TERMS)
        x = h * logarithm
        near = tl.abs(x) < 0.02
        series = 1.0 - x * (0.5 - x * (1.0 / 6 - x * (1.0 / 24 - x * (1.0 / 120 - x * (1.0 / 720)))))
        ratio = tl.where(near, series, (1.0 - tl.exp2(-x * LOG2_E)) / tl.where(near, 1.0, x))
        step = S * logarithm * (h / scale) * ratio / slope
    return step


@jit
def power_of(p: tl.tensor, exponent: tl.tensor) -> Any:
    """p^exponent where p > 0, p itself elsewhere: 0, or NaN."""
    return tl.where(p > 0.0, tl.exp2(exponent * tl.log2(tl.where(p > 0.0, p, 1.0))), p)


@jit
def moment(x: tl.tensor, TERMS: tl.constexpr) -> Any:
    """∫₀¹ t exp(xt) dt, by its series near 0."""
    near = tl.abs(x) < 1.0
    small = tl.where(near, x, 0.0)
    # Horner's scheme for Σ xᵏ / (k! (k + 2)): the ratio of two terms is (k + 1) / (k (k + 2)).
    series = small * 0.0 + 1.0
    for i in tl.static_range(TERMS):
        # Not a variable k: that would be a number in single precision.
        series = 1.0 + series * small * ((TERMS - i + 1.0) / ((TERMS - i) * (TERMS - i + 2.0)))
    large = tl.where(near, 1.0, x)
    closed = (1.0 + (large - 1.0) * tl.exp2(large * LOG2_E)) / large / large
    return tl.where(near, 0.5 * series, closed)
