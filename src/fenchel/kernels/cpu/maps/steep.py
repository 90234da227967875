"""α-entmax for α > 2, of one row or of one row per lane, and its Jacobian product.

p = [1 + c(z − A)]₊^(1/c) rises steeply at the threshold: an error δ there is δ^(1/c) in mass. So the smallest score of
the support is found first, and all is measured from it. Layouts are those of ``newton``: with ``across`` vectors are
stretches of one row, without it every lane is a row of its own, and lanes do not mix.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.extending import overload

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import INLINED, strict_helper
from fenchel.kernels.cpu.maps.blocks import filter_candidates, gather_candidates, load_row, row_maxima, shift
from fenchel.kernels.cpu.maps.places import fill, load_row_part
from fenchel.kernels.cpu.maps.stores import insert

_STEPS = 100  # far more than it takes
_NEAR = 1e-3  # a mass so near to 1 is computed in double
_TINY = 1e-29  # scores nearer to 0 may differ by less than the least float


@strict_helper
def steep_entmax(x: Any, start: int, n: int, c: float, room: Any, index: Any) -> Any:
    """α-entmax of one row for c > 1, ∞ included; the row is n scores of x from ``start`` on.

    The room is that of ``blocks.workspace``, where the result is left.

    Returns:
        the number of candidates, −1 if all entries are there; the largest score, and max_Ω less that. A row with NaN or
        +inf is all NaN, one without any score above −inf all 0.
    """
    z, w, tops, _ = room
    groups, top, bad = row_maxima(x, start, n, z, tops)
    largest = vec.first_lane(top)
    wrong = vec.any_lane(bad) or largest == np.inf
    if wrong or largest == -np.inf:
        fill(w, 0, n, np.nan if wrong else 0.0)
        return -1, largest, np.nan if wrong else 0.0
    shift(tops, groups, top)
    line = vec.splat(x.dtype.type(-1.0 / c))
    count = filter_candidates(x, start, n, top, line, tops, groups, index)
    m = gather_candidates(x, start, top, index, count, z) if count >= 0 else load_row(x, start, n, top, z)
    return count, largest, vec.first_lane(solve_steep(z, m, True, c, w))


@strict_helper
def solve_steep(z: Any, m: int, across: bool, c: float, w: Any) -> Any:
    """Write the probabilities of m vectors of scores, the largest of a row 0, to w; returns max_Ω in double."""
    least, above = _smallest_of_support(z, m, across, c)
    smallest = _smallest_probability(z, m, across, least, above, c, w)
    if c == np.inf:
        return smallest * 0.0
    lanes = vec.lanes(z)
    along = smallest * 0.0
    for i in range(0, m * lanes, lanes):
        p = vec.load(w, i)
        along += vec.widen(p * vec.select(p > 0.0, vec.load(z, i), 0.0))
    if across:
        along = vec.sum_everywhere(along)
    # A = least + (1 − smallest^c)/c, of which ``power`` is 0 where nothing is left of it
    log = vec.log2(smallest)
    power = vec.select(log < 0.0, vec.exp2(log * c), 1.0)
    return vec.maximum((along * c + (vec.widen(least) + (1.0 - power) / c)) / (c + 1.0), 0.0)


@strict_helper
def _smallest_of_support(z: Any, m: int, across: bool, c: float) -> Any:
    """The smallest score of the support, and the mass of those above it if it had none, in double.

    By bisection over the scores: one is in the support if the mass of those above it, measured from it, is below 1.
    """
    lanes = vec.lanes(z)
    inside = vec.splat(z.dtype.type(0))
    outside = inside + z.dtype.type(-1.0 / c)
    active = inside == inside
    for _ in range(2 * m * lanes + 100):
        middle = (inside + outside) * 0.5
        lower, upper = inside - np.inf, inside * 0.0
        for i in range(0, m * lanes, lanes):
            v = vec.load(z, i)
            lower = vec.maximum(vec.select(v <= middle, v, -np.inf), lower)
            upper = vec.minimum(vec.select((v > middle) & (v > outside), v, 0.0), upper)
        if across:
            lower, upper = vec.max_everywhere(lower), 0.0 - vec.max_everywhere(0.0 - upper)
        pivot = vec.select(lower <= outside, upper, lower)
        active = active & (pivot < inside)
        if not vec.any_lane(active):
            break
        mass = _mass_above(z, m, across, pivot, c, 1e-37) - 1.0
        if vec.any_lane(active & (((mass < _NEAR) & (mass > -_NEAR)) | (pivot > -_TINY))):
            # The sign of a number in double survives.
            mass = vec.narrow(_mass_above(z, m, across, vec.widen(pivot), c, 1e-300) - 1.0, pivot)
        inside = vec.select(active & (mass < 0.0), pivot, inside)
        outside = vec.select(active & (mass >= 0.0), pivot, outside)
    return inside, _mass_above(z, m, across, vec.widen(inside), c, 1e-300)


@strict_helper
def _mass_above(z: Any, m: int, across: bool, pivot: Any, c: float, least: float) -> Any:
    """The mass of the scores above a pivot if it had none, in the precision of the pivot; ``least`` has a logarithm."""
    lanes = vec.lanes(z)
    found = pivot * 0.0
    for i in range(0, m * lanes, lanes):
        gap = _as_precise(vec.load(z, i), pivot) - pivot
        if vec.any_lane(gap > 0.0):
            found += vec.select(gap > 0.0, vec.exp2(vec.log2(vec.maximum(gap * c, least)) / c), 0.0)
    return vec.sum_everywhere(found) if across else found


def _as_precise(v: Any, like: Any) -> Any:
    """v, in double precision if ``like`` is."""
    raise NotImplementedError("for compiled code")


@overload(_as_precise, strict=False, jit_options=INLINED)
def _in_precision(v: Any, like: Any) -> Any:
    return (lambda v, like: v) if v == like else lambda v, like: vec.widen(v)


@strict_helper
def _smallest_probability(z: Any, m: int, across: bool, least: Any, above: Any, c: float, p: Any) -> Any:
    """The smallest probability w of a support with smallest score ``least``, in double, and all of them, in ``p``.

    p = (c(z − least) + w^c)^(1/c) is convex in w and not below the mass that it adds to ``above`` at w = 0: Newton from
    where either bound of w is reached is monotone.
    """
    lanes = vec.lanes(z)
    none = vec.splat(z.dtype.type(0))
    inside, equal = none, none
    for i in range(0, m * lanes, lanes):
        v = vec.load(z, i)
        inside += vec.select(v >= least, 1.0, none)
        equal += vec.select(v == least, 1.0, none)
    if across:
        inside, equal = vec.sum_everywhere(inside), vec.sum_everywhere(equal)
    origin, some = vec.widen(least), vec.widen(vec.maximum(equal, 1.0))
    w = vec.minimum(1.0 / vec.widen(vec.maximum(inside, 1.0)), vec.maximum((1.0 - above) / some, 1e-300))
    if not vec.any_lane(least < 0.0):  # only the largest scores, which are equal
        share = vec.narrow(w, none)
        for i in range(0, m * lanes, lanes):
            vec.store(p, i, vec.select(vec.load(z, i) == 0.0, share, none))
        return w
    zero = vec.widen(none)  # not origin · 0, which is −0
    enough = 2.0**-28 if z.itemsize == 4 else 2.0**-51
    before = zero + 1e300
    active = origin < 0.0
    for _ in range(_STEPS):
        log = vec.log2(w)
        power = vec.select(origin < 0.0, vec.select(log < 0.0, vec.exp2(log * c), 1.0), 0.0)
        bend = vec.exp2((c - 1.0) * log)
        total, slope = zero, zero
        for i in range(0, m * lanes, lanes):
            v = vec.load(z, i)
            gap = vec.widen(v) - origin
            equal_share = vec.select(gap == 0.0, w, zero)
            share = equal_share
            if vec.any_lane(gap > 0.0):
                rise = vec.maximum(gap * c + power, 1e-300)
                root = vec.exp2(vec.log2(rise) / c)
                share = vec.select(gap > 0.0, root, equal_share)
                slope += vec.select(gap > 0.0, bend * (root / rise), 0.0)
            slope += vec.select(gap == 0.0, 1.0, zero)
            vec.store(p, i, vec.narrow(share, v))
            total += share
        if across:
            total, slope = vec.sum_everywhere(total), vec.sum_everywhere(slope)
        excess = total - 1.0
        size = vec.maximum(excess, 0.0 - excess)
        active = active & (size > enough) & (size < before)
        if not vec.any_lane(active):
            break
        w = vec.select(active, vec.maximum(w - excess / vec.maximum(slope, 1e-300), w * 0.5), w)
        before = size
    return w


@strict_helper
def steep_product(p: Any, start: int, n: int, c: float, v: Any, out: Any, live: Any) -> None:
    """J v of one row for c > 1, where s = p^(1−c) is huge for small p and J the difference of huge numbers.

    The row is n probabilities of p from ``start`` on. Everything is measured from the smallest probability: its own
    product is minus the sum of the others (J1 = 0). At c = ∞ it is 0. ``live`` has room for the vectors of a row.
    """
    lanes = vec.lanes(p)
    kind = p.dtype.type
    limit = np.float64(np.finfo(p.dtype).max)
    unit = 2.0**-64  # products are smaller by a power of two until the end, so that no sum overflows
    smallest = vec.splat(kind(np.inf))
    bad = smallest < smallest
    size = 0
    for i in range(0, n, lanes):
        q = load_row_part(p, start, i, n, kind(0))
        bad = bad | vec.unordered(q, q)
        smallest = vec.minimum(vec.select(q > 0.0, q, kind(np.inf)), smallest)
        live[size] = i
        size += 1 if vec.any_lane(q > 0.0) else 0
    wrong = vec.any_lane(bad)
    if wrong or c == np.inf or size * lanes < n:
        fill(out, start, n, np.nan if wrong else 0.0)
    if wrong or c == np.inf or size == 0:
        return
    smallest = 0.0 - vec.max_everywhere(0.0 - smallest)
    at, lane = 0, 0
    for k in range(size):
        found = vec.bits_of(load_row_part(p, start, live[k], n, kind(0)) == smallest)
        if found != 0:
            at, lane = live[k], vec.lowest_bit(found)
            break
    origin = np.float64(v[start + at + lane]) * unit
    least = vec.widen(smallest)
    zero = least * 0.0
    inverse = 1.0 / least
    mass, along = zero, zero
    for k in range(size):
        q = load_row_part(p, start, live[k], n, kind(0))
        g = vec.widen(vec.select(q > 0.0, load_row_part(v, start, live[k], n, kind(0)), 0.0)) * unit - origin
        relative = vec.select(vec.widen(q) > 0.0, zero + 1.0, zero)
        if vec.any_lane(q > smallest):
            powers = vec.exp2((1.0 - c) * vec.log2(vec.maximum(vec.widen(q) * inverse, 1.0)))
            relative = vec.select(vec.widen(q) > least, powers, relative)
        mass += relative
        along += relative * g
    mean = vec.sum_everywhere(along) / vec.sum_everywhere(mass)
    most = math.log2(limit)
    largest = vec.exp2(vec.minimum((1.0 - c) * vec.log2(least), most))
    total = zero
    for k in range(size):
        i = live[k]
        q = load_row_part(p, start, i, n, kind(0))
        g = vec.widen(vec.select(q > 0.0, load_row_part(v, start, i, n, kind(0)), 0.0)) * unit - origin
        s = largest
        if vec.any_lane(q > smallest):
            s = vec.exp2(vec.minimum((1.0 - c) * vec.log2(vec.maximum(vec.widen(q), 1e-300)), most))
        value = vec.minimum(vec.maximum(s * (g - mean), -limit * unit), limit * unit)
        value = vec.select(vec.widen(q) > 0.0, value, 0.0)
        if i == at:
            value = insert(value, lane, 0.0)
        total += value
        found = vec.narrow(value * 2.0**64, q)
        if i + lanes <= n:
            vec.store(out, start + i, found)
        else:
            vec.store_part(out, start + i, found, n - i)
    rest = -vec.first_lane(vec.sum_everywhere(total))
    out[start + at + lane] = kind(min(max(rest, -limit * unit), limit * unit) / unit)
