"""Rows of attention and output layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fenchel.kernels.cpu.compiler import inlined
from fenchel.kernels.cpu.maps.selection import BAD, is_narrow, shift, sift


@inlined
def attained(z: Any, p: Any, k: int, c: float, level: float) -> float:
    """max_Ω of Tsallis, ⟨p, z⟩ − Ω(p), where p^c = cz + L on the support; at least 0, the best score."""
    along = 0.0
    for i in range(k):
        score, share = z[i], p[i]
        along += np.float64(share) * np.float64(score if share > 0 else 0)
    return max((c * along + (1.0 - level) / c) / (1.0 + c), 0.0)


@inlined
def candidates(x: Any, scale: Any, power: Any, maxima: Any, w: Any, z: Any, index: Any) -> Any:
    """What ``shift`` or ``sift`` finds in a row, by its width, and its largest score."""
    if is_narrow(x.size, power):
        return shift(x, z)
    return sift(x, scale, power, maxima, w, z, index)


@inlined
def settle(
    row: int,
    k: int,
    largest: Any,
    value: float,
    x: Any,
    p: Any,
    index: Any,
    scale: Any,
    narrow: bool,
    target: Any,
    loss: Any,
    residual: Any,
) -> None:
    """Loss and residual of one row, whose target may be left out (negative) or impossible (a score of −inf)."""
    kind = x.dtype.type
    label = target[row]
    score = x[row, max(label, 0)]
    if label < 0:
        loss[row] = kind(0)
    elif k == BAD:
        loss[row] = kind(np.nan)
    elif score == -np.inf:
        loss[row] = kind(np.inf)
    else:
        # The gap is not negative; said so, the compiler cannot take its two large parts into the sum.
        loss[row] = kind(value + max(np.float64(largest) - np.float64(score), 0.0))
    if residual.size > 0:
        _place(residual[row], k, index, p, scale, narrow)
        if label >= 0 and score != -np.inf:
            residual[row, label] -= kind(1)


@inlined
def _place(target: Any, k: int, index: Any, p: Any, scale: Any, narrow: bool) -> None:
    """Put the candidates of a row where they belong; the rest is 0, or NaN in a bad row."""
    kind = target.dtype.type
    if k > 0 and narrow:
        for i in range(k):
            target[i] = p[i] * scale
    else:
        target[:] = kind(np.nan) if k == BAD else kind(0)
        if k > 0:
            for i in range(k):
                target[index[i]] = p[i] * scale


_MOMENTS = np.array([1 / (math.factorial(k) * (k + 2)) for k in range(19)])


@inlined
def sensitivity(p: float, c: float) -> Any:
    """∂ ln_c(p)/∂c = log²p ∫₀¹ t exp(xt) dt at x = c·log p; by its series near x = 0."""
    log = math.log(p)
    x = c * log
    if abs(x) > 1.0:
        moment = (1.0 + (x - 1.0) * math.exp(x)) / (x * x)
    else:
        moment = 0.0
        for k in range(18, -1, -1):
            moment = moment * x + _MOMENTS[k]
    return log * log * moment
