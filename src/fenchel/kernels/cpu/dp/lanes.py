"""Smoothed choices by lanes: max_Ω and argmax_Ω at a node of eight problems at once, in double precision.

The choices of a node are consecutive vectors, one per choice; each lane is a problem of its own, and lanes do not mix.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import strict_helper
from fenchel.kernels.cpu.dp.choices import GINI, HALVES, SHANNON

LANES = 8
"""How many problems there are: the lanes of a vector of doubles."""

_LOG2E, _LN2 = math.log2(math.e), math.log(2.0)
_NEWTON = 60  # a handful is enough


@strict_helper
def smooth_lanes(kind: int, x: Any, start: int, choices: int, top: Any, inverse_gamma: float) -> Any:
    """Replace scores by the probabilities of their choices; return (max_Ω − top) / γ, by lanes.

    Args:
        kind: one of those of ``choices.py``.
        x: the scores, choice d at ``start + d * LANES``; −inf cannot be chosen. A lane of these alone gets zeros.
        start: where they begin.
        choices: how many.
        top: the largest of them.
        inverse_gamma: 1 / γ.
    """
    stop = start + choices * LANES
    base = vec.select(top > -np.inf, top, 0.0)
    zero = base - base
    if kind == SHANNON:
        total = zero
        factor = inverse_gamma * _LOG2E
        for i in range(start, stop, LANES):
            y = (vec.load(x, i) - base) * factor
            e = vec.select(y >= -1022.0, vec.exp2(y), 0.0)
            vec.store(x, i, e)
            total += e
        total = vec.select(total > 0.0, total, 1.0)
        _scale(x, start, stop, 1.0 / total)
        return vec.log2(total) * _LN2
    for i in range(start, stop, LANES):
        vec.store(x, i, (vec.load(x, i) - base) * inverse_gamma)
    if kind == GINI:
        return _gini(x, start, stop, zero)
    if kind == HALVES:
        return _halves(x, start, stop, zero)
    count = zero
    for i in range(start, stop, LANES):
        best = vec.select(vec.load(x, i) == 0.0, 1.0, zero)
        vec.store(x, i, best)
        count += best
    _scale(x, start, stop, 1.0 / vec.maximum(count, 1.0))
    return zero


@strict_helper
def _gini(x: Any, start: int, stop: int, zero: Any) -> Any:
    """Newton's method from below the threshold: it never leaves out an entry of the support."""
    level, before = zero - 1.0, zero
    for _ in range(start, stop + LANES, LANES):
        total, count = zero, zero
        for i in range(start, stop, LANES):
            z = vec.load(x, i)
            inside = z > level
            total += vec.select(inside, z, 0.0)
            count += vec.select(inside, 1.0, zero)
        count = vec.maximum(count, 1.0)
        level = (total - 1.0) / count
        if not vec.any_lane((count > before) | (count < before)):
            break
        before = count
    gain = zero
    for i in range(start, stop, LANES):
        z = vec.load(x, i)
        p = vec.maximum(z - level, 0.0)
        vec.store(x, i, p)
        gain += vec.select(p > 0.0, p * (z - 0.5 * p), 0.0)
    return vec.maximum(gain + 0.5, 0.0)


@strict_helper
def _halves(x: Any, start: int, stop: int, zero: Any) -> Any:
    """Σ [z/2 − level]₊² = 1 by Newton's method from below; a lane that has converged is not changed again."""
    level = zero - 1.0
    active = zero == 0.0
    for _ in range(_NEWTON):
        total, slope = zero, zero
        for i in range(start, stop, LANES):
            r = vec.maximum(0.5 * vec.load(x, i) - level, 0.0)
            total = vec.fma(r, r, total)
            slope += r
        step = vec.select(slope > 0.0, (total - 1.0) / vec.select(slope > 0.0, 2.0 * slope, 1.0), 0.0)
        level += vec.select(active & (step > 0.0), step, 0.0)
        active = active & (step > 2e-16)
        if not vec.any_lane(active):
            break
    gain, cubes = zero, zero
    for i in range(start, stop, LANES):
        z = vec.load(x, i)
        r = vec.maximum(0.5 * z - level, 0.0)
        p = r * r
        vec.store(x, i, p)
        gain += vec.select(r > 0.0, p * z, 0.0)
        cubes = vec.fma(p, r, cubes)
    return vec.maximum(gain - (cubes - 1.0) * (4.0 / 3.0), 0.0)


@strict_helper
def _scale(x: Any, start: int, stop: int, factor: Any) -> None:
    for i in range(start, stop, LANES):
        vec.store(x, i, vec.load(x, i) * factor)


@strict_helper
def curvature(kind: int, p: Any) -> Any:
    """s = p^(2−α) on the support: the Jacobian of the probabilities is diag(s) − ssᵀ/‖s‖₁."""
    if kind == SHANNON:
        return p
    if kind == GINI:
        return vec.select(p > 0.0, 1.0, p - p)
    if kind == HALVES:
        return vec.sqrt(p)
    return p - p
