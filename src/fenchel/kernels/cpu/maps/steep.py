"""α-entmax for α > 2 and its Jacobian product, of one row, in double.

p = [1 + c(z − A)]₊^(1/c) rises steeply at the threshold: an error δ there is δ^(1/c) in mass. So the smallest score of
the support is found first, and all is measured from it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import strict_helper
from fenchel.kernels.cpu.maps.places import extremes, fill, list_above, list_nonzero
from fenchel.kernels.cpu.memory import allocate, release

_LANES = 8  # of doubles
_STEPS = 100  # far more than it takes


@strict_helper
def steep_room(n: int) -> Any:
    """Room for the candidates of a row of n scores, for their probabilities, and for their places."""
    size = (n + 2 * _LANES) // _LANES * _LANES
    return allocate(size, np.float64), allocate(size, np.float64), allocate(size, np.int32)


@strict_helper
def release_steep(room: Any) -> None:
    """Give back what ``steep_room`` has made."""
    z, p, index = room
    release(z)
    release(p)
    release(index)


@strict_helper
def steep_entmax(x: Any, start: int, n: int, c: float, room: Any) -> Any:
    """α-entmax of one row for c > 1, ∞ included; the row is n scores of x from ``start`` on.

    Returns:
        the number of candidates, whose probabilities and places are in the room, −1 if the row has NaN or +inf; the
        largest score, and max_Ω less that.
    """
    z, p, index = room
    top, _, bad = extremes(x, start, n)
    if bad:
        return -1, top, np.nan
    if top == -np.inf:
        return 0, top, 0.0
    reach = -1.0 / c
    count = list_above(x, start, n, 0, n, top, reach, index, 0)
    if count == 1:
        p[0] = 1.0
        return count, top, 0.0
    for k in range(count):
        z[k] = x[start + index[k]] - top
    size = (count + _LANES - 1) // _LANES * _LANES
    for i in range(count, size):
        z[i] = -np.inf
    least, above = _smallest_of_support(z, size, c, reach)
    w = _smallest_probability(z, size, least, above, c, p, 2.0**-28 if x.itemsize == 4 else 2.0**-51)
    along = 0.0
    for i in range(count):
        along += p[i] * z[i]
    value = 0.0
    if c < np.inf:
        offset = least + (1.0 - math.exp(c * math.log(w))) / c
        value = max((c * along + offset) / (1.0 + c), 0.0)
    return count, top, value


@strict_helper
def _smallest_of_support(z: Any, size: int, c: float, reach: float) -> tuple[float, float]:
    """The smallest score of the support, the smallest at which the mass of those above it is below 1, and that mass.

    By bisection.
    """
    inside, outside, above = 0.0, reach, 0.0
    for _ in range(2 * size + 100):
        middle = 0.5 * (inside + outside)
        lower, upper = vec.splat(-np.inf), vec.splat(0.0)
        for i in range(0, size, _LANES):
            v = vec.load(z, i)
            lower = vec.maximum(vec.select(v <= middle, v, -np.inf), lower)
            upper = vec.minimum(vec.select((v > middle) & (v > outside), v, 0.0), upper)
        pivot = vec.max_lanes(lower)
        if pivot <= outside:
            pivot = -vec.max_lanes(0.0 - upper)
        if pivot >= inside:
            break
        mass = vec.splat(0.0)
        for i in range(0, size, _LANES):
            gap = vec.load(z, i) - pivot
            mass += vec.select(gap > 0.0, vec.exp2(vec.log2(gap * c) / c), 0.0)
        found = vec.sum_lanes(mass)
        if found < 1.0:
            inside, above = pivot, found
        else:
            outside = pivot
    return inside, above


@strict_helper
def _smallest_probability(z: Any, size: int, least: float, above: float, c: float, p: Any, enough: float) -> Any:
    """The smallest probability w of a support with smallest score ``least``, and all of them.

    p = (c(z − least) + w^c)^(1/c) is convex in w and not below the mass that it adds to ``above`` at w = 0: Newton from
    where either bound of w is reached is monotone.
    """
    zero = vec.splat(0.0)
    inside, equal = zero, zero
    for i in range(0, size, _LANES):
        v = vec.load(z, i)
        inside += vec.select(v >= least, 1.0, zero)
        equal += vec.select(v == least, 1.0, zero)
    w = min(1.0 / vec.sum_lanes(inside), max((1.0 - above) / vec.sum_lanes(equal), 1e-300))
    before = math.inf
    for _ in range(_STEPS):
        log = vec.log2(vec.splat(w))
        power = vec.select(log < 0.0, vec.exp2(log * c), 1.0) if least < 0.0 else zero
        total, slope = zero, zero
        for i in range(0, size, _LANES):
            gap = vec.load(z, i) - least
            above = vec.log2(vec.maximum(gap * c + power, 1e-300)) / c
            share = vec.select(gap > 0.0, vec.exp2(above), vec.select(gap == 0.0, w, zero))
            vec.store(p, i, share)
            total += share
            slope += vec.select(gap > 0.0, vec.exp2((c - 1.0) * (log - above)), vec.select(gap == 0.0, 1.0, zero))
        excess = vec.sum_lanes(total) - 1.0
        if least == 0.0 or abs(excess) <= enough or abs(excess) >= before:
            break
        w = max(w - excess / vec.sum_lanes(slope), 0.5 * w)
        before = abs(excess)
    return w


@strict_helper
def steep_product(p: Any, start: int, n: int, c: float, v: Any, out: Any, room: Any) -> None:
    """J v of one row for c > 1, where s = p^(1−c) is huge for small p and J the difference of huge numbers.

    The row is n probabilities of p from ``start`` on. Everything is measured from the smallest probability: its own
    product is minus the sum of the others (J1 = 0). At c = ∞ it is 0.
    """
    kind = p.dtype.type
    limit = np.float64(np.finfo(p.dtype).max)
    unit = 2.0**-64  # products are smaller by a power of two until the end, so that no sum overflows
    relative, _, index = room
    size = list_nonzero(p, start, n, index)
    least, at, bad = math.inf, -1, False
    for k in range(size):
        i = start + index[k]
        share = np.float64(p[i])
        bad = bad or share != share
        if share < least:
            least, at = share, i
    fill(out, start, n, np.nan if bad else 0.0)
    if bad or size < 2 or c == np.inf:
        return
    origin = np.float64(v[at]) * unit
    mass, along = 0.0, 0.0
    for k in range(size):
        i = start + index[k]
        share = np.float64(p[i])
        relative[k] = 1.0 if share == least else (share / least) ** (1.0 - c)
        mass += relative[k]
        along += relative[k] * (np.float64(v[i]) * unit - origin)
    mean = along / mass
    largest = least ** (1.0 - c)
    total = 0.0
    for k in range(size):
        i = start + index[k]
        if i != at:
            s = largest * relative[k] if largest < 1e300 else np.float64(p[i]) ** (1.0 - c)
            value = min(s, limit) * ((np.float64(v[i]) * unit - origin) - mean)
            value = min(max(value, -limit * unit), limit * unit)
            total += value
            out[i] = kind(value / unit)
    out[at] = kind(min(max(-total, -limit * unit), limit * unit) / unit)
