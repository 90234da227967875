"""Smoothed choices at the nodes of a dynamic program, in registers: max_Ω and argmax_Ω of the ways into a node.

Scores of ways are summed in double precision. What is left of them here are differences x to the largest one, divided
by γ, in the precision of the scores: 0 for the largest, −inf where there is no way. Probabilities are returned as
weights and their sum, which is in double precision: so rounding does not take from the mass that passes, over
thousands of steps.
"""

from __future__ import annotations

import math
from typing import Any

import triton.language as tl

from fenchel.kernels.gpu.arithmetic import jit

SHANNON: Any = tl.constexpr(1)
GINI: Any = tl.constexpr(2)

KINDS = {1.0: int(SHANNON.value), 2.0: int(GINI.value)}
"""The same, by the α of Tsallis's entropy."""

_LOG2_E: Any = tl.constexpr(math.log2(math.e))
_LN_2: Any = tl.constexpr(math.log(2.0))


@jit
def number(x: tl.tensor, EPS: tl.constexpr) -> Any:
    """A difference of scores in the precision of choices."""
    return x.to(tl.float64) if EPS < 1e-10 else x.to(tl.float32)


@jit
def invalid(x: tl.tensor) -> Any:
    """1 where a score is NaN or +inf."""
    return tl.where((x != x) | (x == float("inf")), 1, 0)


@jit
def finite(top: tl.tensor) -> Any:
    """What scores are compared with: the largest one, or 0 if there is none."""
    return tl.where(top > float("-inf"), top, 0.0)


@jit
def smooth(x: tl.tensor, KIND: tl.constexpr, BLOCK: tl.constexpr) -> Any:
    """The weights of the ways in each column of x (BLOCK, columns), and the excess of max_Ω over the largest."""
    if KIND == SHANNON:
        q = tl.exp2(x * _LOG2_E)
        total = tl.sum(q, axis=0)
        excess = tl.log2(tl.where(total > 0.0, total, 1.0)) * _LN_2
    else:
        # Newton's method from below the threshold: it is there when the support does not change any more.
        threshold = tl.max(x, axis=0) * 0.0 - 1.0
        threshold = tl.where(threshold == threshold, threshold, -1.0)
        before = threshold * 0.0
        going = 1
        taken = 0
        while going > 0:
            inside = x > threshold[None, :]
            count = tl.maximum(tl.sum(tl.where(inside, 1.0, 0.0).to(x.dtype), axis=0), 1.0)
            going = tl.max(tl.where(count != before, 1, 0), axis=0) * tl.where(taken <= BLOCK, 1, 0)
            threshold = (tl.sum(tl.where(inside, x, 0.0), axis=0) - 1.0) / count
            before = count
            taken += 1
        q = tl.maximum(x - threshold[None, :], 0.0)
        gain = tl.sum(tl.where(q > 0.0, q * (x - 0.5 * q), 0.0), axis=0)
        excess = tl.maximum(gain + 0.5, 0.0)
    return q, excess


@jit
def smooth_three(x0: tl.tensor, x1: tl.tensor, x2: tl.tensor, KIND: tl.constexpr) -> Any:
    """``smooth`` for three ways, which are in three blocks."""
    if KIND == SHANNON:
        q0, q1, q2 = tl.exp2(x0 * _LOG2_E), tl.exp2(x1 * _LOG2_E), tl.exp2(x2 * _LOG2_E)
        total = q0 + q1 + q2
        excess = tl.log2(tl.where(total > 0.0, total, 1.0)) * _LN_2
    else:
        more, less = tl.maximum(x0, x1), tl.minimum(x0, x1)
        middle, least = tl.maximum(less, tl.minimum(more, x2)), tl.minimum(less, x2)
        # The threshold is the highest of those of the one, two and three largest.
        threshold = tl.maximum(tl.maximum((middle - 1.0) * 0.5, (middle + least - 1.0) / 3.0), -1.0)
        q0, q1, q2 = tl.maximum(x0 - threshold, 0.0), tl.maximum(x1 - threshold, 0.0), tl.maximum(x2 - threshold, 0.0)
        gain = tl.where(q0 > 0.0, q0 * (x0 - 0.5 * q0), 0.0) + tl.where(q1 > 0.0, q1 * (x1 - 0.5 * q1), 0.0)
        gain += tl.where(q2 > 0.0, q2 * (x2 - 0.5 * q2), 0.0)
        excess = tl.maximum(gain + 0.5, 0.0)
    return q0, q1, q2, excess


@jit
def inverse(total: tl.tensor) -> Any:
    """1 divided by a sum of weights; 0 where there is no way."""
    return tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)


@jit
def curvature(q: tl.tensor, KIND: tl.constexpr) -> Any:
    """s = q^(2−α) on the support: the Jacobian of probabilities q is diag(s) − ssᵀ/‖s‖₁."""
    if KIND == SHANNON:
        s = q
    else:
        s = tl.where(q > 0.0, 1.0, 0.0).to(tl.float64)
    return s
