"""Softmax of rows with upper bounds: p = min(e^(z − τ), u) with Σp = k.

e^−τ, a factor of the weights e^(z − origin), grows from below until no other entry reaches its bound. What is left for
the free entries may be far below the largest: then the origin moves to the largest of them, and weights are computed
anew, so that they keep their digits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import strict, strict_helper
from fenchel.kernels.cpu.maps.bounded import bounds_of_rows
from fenchel.kernels.cpu.maps.places import extremes, fill, load_row_part
from fenchel.kernels.cpu.maps.simplex import as_rows, each, like
from fenchel.kernels.cpu.memory import allocate, borrowed, release
from fenchel.kernels.cpu.threads import over_rows

_GROUP = 16  # vectors whose sum is in the precision of the rows
_LITTLE = 1e-3  # weights of free entries that sum to less are computed anew
_LOG2E = 1.4426950408889634


def capped_softmax(z: Tensor, upper: float | Tensor, budget: float | Tensor) -> Tensor:
    """Maximize ⟨p, z⟩ plus the entropy of p over 0 ≤ p ≤ upper with sum ``budget``, for rows z (…, n)."""
    x, out = as_rows(z), like(z)
    over_rows(_cap, len(x), x.size, x, bounds_of_rows(upper, x), each(budget, len(x)), as_rows(out))
    return out


@strict
def _cap(first: int, last: int, x: Any, upper: Any, budget: Any, out: Any) -> None:
    """p = min(e^(z − τ), u) with Σp = k of each row, NaN where a score is NaN or +inf, 0 where nothing is unmasked."""
    x, upper, budget, out = borrowed(x), borrowed(upper), borrowed(budget), borrowed(out)
    n, lanes = x.shape[1], vec.lanes(x)
    kind = x.dtype.type
    scores, bounds, result = x.reshape(-1), upper.reshape(-1), out.reshape(-1)
    w = allocate(n + lanes, x.dtype)
    for row in range(first, last):
        start, at_bounds = row * n, (row if upper.shape[0] > 1 else 0) * n
        k = budget[row]
        top, _, bad = extremes(scores, start, n)
        if bad or top == -np.inf:
            fill(result, start, n, np.nan if bad else 0.0)
            continue
        fill(w, 0, n + lanes, 0.0)
        _weigh(scores, start, bounds, at_bounds, n, kind(0), top, w)
        factor, before = kind(0), -1
        while True:
            full, rest, size = _sums(bounds, at_bounds, n, factor, w)
            if not full < k or (size == before and rest >= _LITTLE):
                break
            before = size
            if rest < _LITTLE:
                origin = _largest_free(scores, start, bounds, at_bounds, n, factor, w)
                if origin == -np.inf:
                    break
                _weigh(scores, start, bounds, at_bounds, n, factor, origin, w)
                factor, before = kind(1e-30), -1
            else:
                factor = max(factor, kind((k - full) / rest))
        for i in range(0, n, lanes):
            p, b = vec.load(w, i) * factor, load_row_part(bounds, at_bounds, i, n, kind(0))
            p = vec.select(p >= b, b, p)
            if i + lanes <= n:
                vec.store(result, start + i, p)
            else:
                vec.store_part(result, start + i, p, n - i)
    release(w)


@strict_helper
def _sums(u: Any, at: int, n: int, factor: Any, w: Any) -> Any:
    """The bounds that entries have reached, the weights of the others, their sums, and how many have reached theirs."""
    lanes = vec.lanes(w)
    zero = vec.splat(w.dtype.type(0))
    full, rest = vec.widen(zero), vec.widen(zero)
    size = 0
    for first in range(0, n, _GROUP * lanes):
        f, r = zero, zero
        for i in range(first, min(first + _GROUP * lanes, n), lanes):
            v, b = vec.load(w, i), load_row_part(u, at, i, n, w.dtype.type(0))
            reached = (v > 0.0) & (v * factor >= b)
            f += vec.select(reached, b, 0.0)
            r += vec.select(reached, zero, v)
            size += vec.count_bits(vec.bits_of(reached))
        full += vec.widen(f)
        rest += vec.widen(r)
    return vec.sum_lanes(full), vec.sum_lanes(rest), size


@strict_helper
def _largest_free(x: Any, start: int, u: Any, at: int, n: int, factor: Any, w: Any) -> Any:
    """The largest score of the entries that have not reached their bounds."""
    kind = x.dtype.type
    best = vec.splat(kind(-np.inf))
    for i in range(0, n, vec.lanes(x)):
        v, b = vec.load(w, i), load_row_part(u, at, i, n, kind(0))
        reached = (v > 0.0) & (v * factor >= b)
        best = vec.maximum(vec.select(reached, -np.inf, load_row_part(x, start, i, n, kind(-np.inf))), best)
    return vec.max_lanes(best)


@strict_helper
def _weigh(x: Any, start: int, u: Any, at: int, n: int, factor: Any, origin: Any, w: Any) -> None:
    """The weights e^(z − origin), infinite where the bound was reached by the weights and the factor of before."""
    kind = x.dtype.type
    for i in range(0, n, vec.lanes(x)):
        v, b = vec.load(w, i), load_row_part(u, at, i, n, kind(0))
        reached = (v > 0.0) & (v * factor >= b)
        gap = load_row_part(x, start, i, n, kind(-np.inf)) - origin
        y = gap * kind(_LOG2E)
        # What the product has lost, and the constant: 2^(y + d) = 2^y (1 + d·ln 2)
        lost = vec.fma(gap, kind(_LOG2E), 0.0 - y) + gap * kind(_LOG2E - np.float64(kind(_LOG2E)))
        above = y > -vec.exponent_limit(y)
        power = vec.exp2(y)
        weight = vec.select(above, vec.fma(power, lost * kind(0.6931471805599453), power), 0.0)
        vec.store(w, i, vec.select(reached, np.inf, weight))
