"""Ω of Tsallis on rows, max_Ω of rows whose argmax is known, and the derivative of Ω in α.

With c = α − 1, ln_c(p) = (p^c − 1)/c = log p · ∫₀¹ exp(xt) dt at x = c·log p, and Ω(p) = Σ p·ln_c(p)/α, for every α.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import strict, strict_helper

_MOMENTS = tuple(tuple(1 / (math.factorial(k) * (k + order + 1)) for k in range(19)) for order in (0, 1))
_FIRST, _SECOND = _MOMENTS
_GROUP = 8  # vectors whose sum is in the precision of the rows


@strict_helper
def moments(q: Any, c: float, weight: Any, lift: float) -> Any:
    """log q, and ∫₀¹ exp(xt) dt and ∫₀¹ t exp(xt) dt at x = c·log q, times a weight q^lift; for q > 0.

    They are by their series near x = 0. With the weight q (lift 1) nothing overflows for α > 0, however small q is.
    """
    small = q < 1e-30  # subnormal numbers too, which ``log2`` does not take: they are moved up
    log = (vec.log2(vec.select(small, q * 2.0**100, q)) - vec.select(small, 100.0, q * 0.0)) * math.log(2.0)
    x = vec.maximum(log * c, -1e30)
    near = vec.minimum(vec.maximum(x, -1.0), 1.0)
    far = (x > 1.0) | (x < -1.0)
    large = vec.select(far, x, 1.0)
    power = vec.exp2((large + log * lift) * (1 / math.log(2.0)))
    first = vec.select(far, (power - weight) / large, weight * vec.polynomial(near, _FIRST))
    second = vec.select(far, (weight + (large - 1.0) * power) / large / large, weight * vec.polynomial(near, _SECOND))
    return log, first, second


@strict
def entmax_value(first: int, last: int, p: Any, z: Any, powers: Any, out: Any) -> None:
    """Ω of each row p or, if there are scores z, ⟨p, z⟩ − Ω(p), not below the largest score; powers are a column."""
    n, lanes = p.shape[1], vec.lanes(p)
    nothing = p.dtype.type(-np.inf)
    zero = vec.splat(p.dtype.type(0))
    for row in range(first, last):
        c = powers[row, 0]
        value, along = vec.widen(zero), vec.widen(zero)
        top = vec.splat(nothing)
        for start in range(0, n, _GROUP * lanes):
            v, a = zero, zero
            for i in range(start, min(start + _GROUP * lanes, n), lanes):
                count = min(lanes, n - i)
                q = vec.load_part(p, row * n + i, count, 0.0)
                if z.size > 0:
                    s = vec.load_part(z, row * n + i, count, nothing)
                    top = vec.maximum(s, top)
                    a += vec.select((q > 0.0) | (q < 0.0) | vec.unordered(q, q), q * s, zero)
                if c < np.inf and vec.any_lane((q > 0.0) | vec.unordered(q, q)):
                    log, moment, _ = moments(q, c, q, 1.0)
                    v += vec.select(q > 0.0, log * moment, q)
            value, along = value + vec.widen(v), along + vec.widen(a)
        total = vec.sum_lanes(value) / (1.0 + c) if c < np.inf else 0.0
        if z.size > 0:
            largest = np.float64(vec.max_lanes(top))
            total = vec.sum_lanes(along) - total
            total = largest if total < largest else total
            total = largest if largest == -np.inf else total
        out[row] = total


@strict
def entmax_envelope(first: int, last: int, p: Any, powers: Any, out: Any) -> None:
    """−∂Ω/∂α of each row p, with p held fixed; powers are a column."""
    n, lanes = p.shape[1], vec.lanes(p)
    zero = vec.splat(p.dtype.type(0))
    for row in range(first, last):
        c = powers[row, 0]
        value, slope = vec.widen(zero), vec.widen(zero)
        for start in range(0, n if c < np.inf else 0, _GROUP * lanes):
            v, s = zero, zero
            for i in range(start, min(start + _GROUP * lanes, n), lanes):
                q = vec.load_part(p, row * n + i, min(lanes, n - i), 0.0)
                if vec.any_lane((q > 0.0) | vec.unordered(q, q)):
                    log, moment, second = moments(q, c, q, 1.0)
                    v += vec.select(q > 0.0, log * moment, q)
                    s += vec.select(q > 0.0, log * log * second, q)
            value, slope = value + vec.widen(v), slope + vec.widen(s)
        alpha = 1.0 + c
        out[row] = (vec.sum_lanes(value) / alpha - vec.sum_lanes(slope)) / alpha if c < np.inf else 0.0
