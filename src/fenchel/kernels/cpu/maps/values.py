"""Ω of Tsallis on rows, max_Ω of rows whose argmax is known, and the derivative of Ω in α.

With c = α − 1, ln_c(p) = (p^c − 1)/c = log p · ∫₀¹ exp(xt) dt at x = c·log p, and Ω(p) = Σ p·ln_c(p)/α, for every α. At
p = argmax_Ω(z) all of the support has ln_c(p) = z − A: one entry tells A, and max_Ω = (c⟨p, z⟩ + A)/α.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import INLINED, strict, strict_helper
from fenchel.kernels.cpu.maps.parameters import power_at
from fenchel.kernels.cpu.maps.places import load_row_part
from fenchel.kernels.cpu.maps.stores import compress_above
from fenchel.kernels.cpu.memory import allocate, borrowed, release

_MOMENTS = tuple(tuple(1 / (math.factorial(k) * (k + order + 1)) for k in range(19)) for order in (0, 1))
_FIRST, _SECOND = _MOMENTS
_SHORT_FIRST, _SHORT_SECOND = (series[:12] for series in _MOMENTS)  # what is left out is below 2e-10
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
    inverse = 1.0 / large
    first, second = (power - weight) * inverse, (weight + (large - 1.0) * power) * inverse * inverse
    if vec.any_lane((x <= 1.0) & (x >= -1.0)):
        first = vec.select(far, first, weight * series(near, 0))
        second = vec.select(far, second, weight * series(near, 1))
    return log, first, second


def series(x: Any, order: int) -> Any:
    """∫₀¹ exp(xt) dt, or ∫₀¹ t exp(xt) dt if ``order`` is 1, for |x| ≤ 1, in the precision of x."""
    raise NotImplementedError("for compiled code")


@overload(series, strict=False, jit_options=INLINED)
def _series(x: Any, order: Any) -> Any:
    if x.dtype == types.float32:
        return lambda x, order: vec.polynomial(x, _SHORT_SECOND) if order else vec.polynomial(x, _SHORT_FIRST)
    return lambda x, order: vec.polynomial(x, _SECOND) if order else vec.polynomial(x, _FIRST)


@strict
def entmax_value(first: int, last: int, p: Any, z: Any, powers: Any, out: Any) -> None:
    """Ω of each row p or, if there are scores z, ⟨p, z⟩ − Ω(p), not below the largest score."""
    n = p.shape[1]
    for row in range(first, last):
        if z.size > 0:
            top, maximum = _maximum(p, z, row * n, n, power_at(powers, row))
            out[row] = top + maximum
        else:
            out[row] = _value(p, row * n, n, power_at(powers, row))


@strict
def entmax_losses(first: int, last: int, p: Any, z: Any, y: Any, index: Any, powers: Any, out: Any) -> None:
    """The losses of targets, given p = argmax_Ω(z): of probabilities y, where p becomes p − y, or of classes.

    Scores are finite, or NaN, beside probabilities. A class that is negative is left out; one at −inf has loss +inf.
    """
    n, lanes = p.shape[1], vec.lanes(p)
    for row in range(first, last):
        c = power_at(powers, row)
        top, maximum = _maximum(p, z, row * n, n, c)
        if y.size > 0:
            loss = maximum + _value(y, row * n, n, c) - _lead(y, z, row * n, n, top)
            out[row] = 0.0 if loss < 0.0 else loss
            for i in range(0, n, lanes):
                part, at = min(lanes, n - i), row * n + i
                vec.store_part(p, at, vec.load_part(p, at, part, 0.0) - vec.load_part(y, at, part, 0.0), part)
            continue
        label = index[row]
        score = np.float64(z[row, max(label, 0)])
        if label < 0:
            out[row] = 0.0
        elif score == -np.inf and maximum == maximum:
            out[row] = np.inf
        else:
            out[row] = maximum + max(top - score, 0.0)


@strict_helper
def _lead(y: Any, z: Any, start: int, n: int, top: float) -> Any:
    """⟨y, z − top⟩."""
    lanes = vec.lanes(z)
    zero = vec.splat(z.dtype.type(0))
    largest = z.dtype.type(top)
    total = vec.widen(zero)
    for group in range(0, n, _GROUP * lanes):
        a = zero
        for i in range(group, min(group + _GROUP * lanes, n), lanes):
            q = vec.load_part(y, start + i, min(lanes, n - i), 0.0)
            a += q * (vec.load_part(z, start + i, min(lanes, n - i), largest) - largest)
        total += vec.widen(a)
    return vec.sum_lanes(total)


@strict_helper
def _value(p: Any, start: int, n: int, c: float) -> float:
    lanes = vec.lanes(p)
    zero = vec.splat(p.dtype.type(0))
    value = vec.widen(zero)
    end = -1.0 / (math.log(2.0) * c) if c > 0.0 else -np.inf  # log2 p, below which the difference is as right as it is
    for group in range(0, n if c < np.inf else 0, _GROUP * lanes):
        v = zero
        for i in range(group, min(group + _GROUP * lanes, n), lanes):
            q = vec.load_part(p, start + i, min(lanes, n - i), 0.0)
            bits = vec.log2(vec.maximum(q, 1e-37))
            if vec.any_lane((bits > end) | vec.unordered(q, q)):
                log, moment, _ = moments(q, c, q, 1.0)
                v += vec.select(q > 0.0, log * moment, q)
            else:
                v += vec.select(q > 0.0, (vec.exp2(bits * (1.0 + c)) - q) / c, zero)
        value += vec.widen(v)
    return vec.sum_lanes(value) / (1.0 + c) if c < np.inf else 0.0


@strict_helper
def _maximum(p: Any, z: Any, start: int, n: int, c: float) -> tuple[float, float]:
    """The largest score, and how much larger max_Ω is."""
    lanes = vec.lanes(p)
    nothing = p.dtype.type(-np.inf)
    zero = vec.splat(p.dtype.type(0))
    top, share = zero + nothing, zero
    for i in range(0, n, lanes):
        top = vec.maximum(vec.load_part(z, start + i, min(lanes, n - i), nothing), top)
        share = vec.maximum(vec.load_part(p, start + i, min(lanes, n - i), 0.0), share)
    top, share = vec.max_everywhere(top), vec.max_everywhere(share)
    largest = np.float64(vec.first_lane(top))
    if largest == -np.inf:
        return largest, 0.0
    along = vec.widen(zero)
    for group in range(0, n, _GROUP * lanes):
        a = zero
        for i in range(group, min(group + _GROUP * lanes, n), lanes):
            q = vec.load_part(p, start + i, min(lanes, n - i), 0.0)
            s = vec.load_part(z, start + i, min(lanes, n - i), nothing) - top
            a += vec.select((q > 0.0) | (q < 0.0) | vec.unordered(q, q), q * s, zero)
        along += vec.widen(a)
    total = vec.sum_lanes(along)
    if c < np.inf:
        q = vec.widen(vec.select(share > 0.0, share, 1.0))
        log, moment, _ = moments(q, c, vec.select(q > 0.0, 1.0, q), 0.0)
        offset = -vec.first_lane(log * moment)
        total = (c * total + offset) / (1.0 + c)
    return largest, 0.0 if total < 0.0 else total


@strict
def entmax_envelope(first: int, last: int, p: Any, powers: Any, out: Any) -> None:
    """−∂Ω/∂α of each row p, with p held fixed."""
    p, powers, out = borrowed(p), borrowed(powers), borrowed(out)
    n, lanes = p.shape[1], vec.lanes(p)
    zero = vec.splat(p.dtype.type(0))
    support = allocate(n + 2 * lanes, p.dtype)
    for row in range(first, last):
        c = power_at(powers, row)
        size, bad = 0, zero > zero
        for i in range(0, n, lanes):
            q = load_row_part(p, row * n, i, n, 0.0)
            bad = bad | vec.unordered(q, q)
            size += compress_above(support, size, q, zero)
        vec.store(support, size, zero)
        value, slope = vec.widen(zero), vec.widen(zero)
        for start in range(0, size if c < np.inf else 0, _GROUP * lanes):
            v, s = zero, zero
            for i in range(start, min(start + _GROUP * lanes, size), lanes):
                q = vec.load(support, i)
                log, moment, second = moments(q, c, q, 1.0)
                v += vec.select(q > 0.0, log * moment, zero)
                s += vec.select(q > 0.0, log * log * second, zero)
            value, slope = value + vec.widen(v), slope + vec.widen(s)
        alpha = 1.0 + c
        found = (vec.sum_lanes(value) / alpha - vec.sum_lanes(slope)) / alpha if c < np.inf else 0.0
        out[row] = np.nan if vec.any_lane(bad) and c < np.inf else found
    release(support)
