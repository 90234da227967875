"""Newton's method for the level of a row: b = [scale·(z − τ)]₊ and w = b^power with Σ w·b = 1, on vectors.

z ≤ 0 are scores less their largest. p = w·b for entmax (scale = c = α − 1, power = 1/c − 1), p ∝ w for normmax (scale
1, power 1/c). The same code serves two layouts. With ``across`` the vectors of ``z`` are stretches of one row, and sums
go across lanes; without, every lane is a row of its own, vector i holds entry i of each, and lanes do not mix.

(Σ w·b)^(1/(1 + power)) is a norm of b, convex in τ and nearly linear: from a τ below the solution Newton's steps grow
to it and do not pass it. A lane that has converged stays as it is, so that no row depends on its neighbours. Sums of
GROUP vectors are in the precision of the rows, those of groups in double.
"""

from __future__ import annotations

import math
from typing import Any

from numba.extending import overload

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import INLINED, strict_helper

GROUP = 8
"""How many vectors are summed, or compared, at once: the number of vectors of a row is a multiple of it."""

_STEPS = 100  # far more than it takes
_FAR = 1.05  # a sum above this is not near 1


def solve(z: Any, m: int, across: bool, rule: Any, mass: bool, level: Any, near: float, w: Any) -> Any:
    """Find the level of a row, or of one row per lane, and write its weights.

    Args:
        z: m vectors, m a multiple of GROUP; what does not belong to a row is −inf.
        m: how many.
        across: the layout, see the head of this file.
        rule: a tuple of vectors, whose length says what is compiled: none of them for scale 1 and power 0, (scale,) for
            power 1, and (scale, factor, base) for any power, by logarithms. There b = base + scale·(z − level), with
            base 0, where the level is τ, or base 1, where it is A = τ + 1/scale, the better of the two for |scale| < ¼;
            and w = b^(factor/scale), also where the scale is 0 or negative (and base 1).
        mass: whether w·b is written, and not w.
        level: where to start, not above the solution.
        near: how far from 1 the sum may be.
        w: room for m vectors.

    Returns:
        level, what is to be added to it, Σ w·b, Σ w; the sums in double.
    """
    raise NotImplementedError("for compiled code")


@overload(solve, strict=False, jit_options=INLINED)
def _solve(z: Any, m: Any, across: Any, rule: Any, mass: Any, level: Any, near: Any, w: Any) -> Any:
    return (_line, _parabola, None, _curve)[len(rule)]


def approach(z: Any, m: int, across: bool, rule: Any, level: Any) -> Any:
    """A level that is not above the solution, and near it: Newton's method in the precision of the rows."""
    raise NotImplementedError("for compiled code")


@overload(approach, strict=False, jit_options=INLINED)
def _approach(z: Any, m: Any, across: Any, rule: Any, level: Any) -> Any:
    return (_approach_line, _approach_parabola, None, _approach_curve)[len(rule)]


def _approach_line(z: Any, m: int, across: bool, rule: Any, level: Any) -> Any:
    lanes = vec.lanes(z)
    zero = vec.splat(z.dtype.type(0))
    for _ in range(_STEPS):
        total, count = zero, zero
        for start in range(0, m * lanes, GROUP * lanes):
            for j in range(GROUP):
                b = vec.load(z, start + j * lanes) - level
                total += vec.maximum(b, 0.0)
                count += vec.select(b > 0.0, 1.0, zero)
        if across:
            total, count = vec.sum_everywhere(total), vec.sum_everywhere(count)
        far = total > _FAR
        if not vec.any_lane(far):
            break
        level = vec.select(far, level + (total - 1.0) / vec.maximum(count, 1.0), level)
    return level


def _approach_parabola(z: Any, m: int, across: bool, rule: Any, level: Any) -> Any:
    lanes = vec.lanes(z)
    scale = rule[0]
    zero = vec.splat(z.dtype.type(0))
    for _ in range(_STEPS):
        total, slope = zero, zero
        for start in range(0, m * lanes, GROUP * lanes):
            for j in range(GROUP):
                b = vec.maximum(vec.load(z, start + j * lanes) - level, 0.0)
                total = vec.fma(b, b, total)
                slope += b
        if across:
            total, slope = vec.sum_everywhere(total), vec.sum_everywhere(slope)
        root = vec.sqrt(total) * scale
        far = root > _FAR
        if not vec.any_lane(far):
            break
        # (T − √T)/(scale·Σ b) with T = root² and b = scale·(z − level)
        level = vec.select(far, level + (root - 1.0) * root / (slope * scale * scale), level)
    return level


def _approach_curve(z: Any, m: int, across: bool, rule: Any, level: Any) -> Any:
    """First between two whole powers, which take no logarithm; a step from there ends below the solution."""
    lanes = vec.lanes(z)
    scale, factor, base = rule
    zero = vec.splat(z.dtype.type(0))
    power = 1.0 + factor / vec.select(base > 0.5, 1.0, scale)
    a, b = vec.maximum(1.0 - _size(power - 1.0), 0.0), vec.maximum(1.0 - _size(power - 2.0), 0.0)
    c, d = vec.maximum(1.0 - _size(power - 3.0), 0.0), vec.maximum(1.0 - _size(power - 4.0), 0.0)
    whole = (base < 0.5) & (power <= 4.0)
    least = vec.select(power >= 2.0, 2.0, zero + 1.0)
    least = vec.select(power >= 3.0, vec.select(power >= 4.0, 4.0, zero + 3.0), least)
    bend = 1.0 / least  # by which the sum is a norm, convex in the level
    if vec.any_lane(whole):
        active = whole
        for _ in range(_STEPS):
            total, slope = zero, zero
            for start in range(0, m * lanes, GROUP * lanes):
                for j in range(GROUP):
                    u = vec.maximum(scale * (vec.load(z, start + j * lanes) - level), 0.0)
                    high = vec.fma(u, d, c)
                    total = vec.fma(vec.fma(vec.fma(high, u, b), u, a), u, total)
                    up = vec.fma(vec.fma(vec.fma(u, 4.0 * d, 3.0 * c), u, 2.0 * b), u, a)
                    slope += vec.select(u > 0.0, up, zero)
            if across:
                total, slope = vec.sum_everywhere(total), vec.sum_everywhere(slope)
            excess = total - 1.0
            active = active & (_size(excess) > _FAR - 1.0) & (total > 0.0)
            if not vec.any_lane(active):
                break
            step = _norm_step(total, bend) / (slope * scale)
            level = vec.select(active, level + step, level)
    inverse = 1.0 / vec.select((scale > 0.0) | (scale < 0.0), scale, 1.0)
    growth = scale + factor
    active = base == base
    for _ in range(_STEPS):
        total, slope = zero, zero
        for start in range(0, m * lanes, GROUP * lanes):
            t, s = zero, zero
            for j in range(GROUP):
                v, p = weight(vec.load(z, start + j * lanes), scale, inverse, factor, base, level)
                t += p
                s += v
            total += t
            slope += s
        if across:
            total, slope = vec.sum_everywhere(total), vec.sum_everywhere(slope)
        step = _norm_step(total, scale / growth) / (vec.maximum(slope, 1e-30) * growth)
        active = active & (total > 0.0)
        level = vec.select(active, level + step, level)
        active = active & (_size(total - 1.0) > 0.3)
        if not vec.any_lane(active):
            break
    return level


@strict_helper
def _size(x: Any) -> Any:
    """|x|."""
    return vec.maximum(x, 0.0 - x)


@strict_helper
def weight(z: Any, scale: Any, inverse: Any, factor: Any, base: Any, level: Any) -> Any:
    """w and w·b of one vector."""
    u = z - level
    b = base + scale * u
    y = factor * vec.log2_ratio(u, scale, inverse, base)
    v = vec.select((b > 0.0) & (y > -vec.exponent_limit(y)), vec.exp2(y), 0.0)
    return v, v * vec.select(v > 0.0, b, 0.0)


def _line(z: Any, m: int, across: bool, rule: Any, mass: bool, level: Any, near: float, w: Any) -> Any:
    fine = vec.splat(z.dtype.type(0))
    before = vec.widen(fine)
    active = fine == 0.0
    total, count = before, before
    for _ in range(_STEPS):
        total, count = _line_sums(z, m, level, fine, mass, w)
        if across:
            total, count = vec.sum_everywhere(total), vec.sum_everywhere(count)
        excess = total - 1.0
        # The level for the support at hand is exact if that stays.
        active = active & (total > 0.0) & ((excess > near) | (excess < -near)) & ((count > before) | (count < before))
        if not vec.any_lane(active):
            break
        level, fine = _moved(active, level, fine, excess / vec.maximum(count, 1.0))
        before = count
    return level, fine, total, count


@strict_helper
def _line_sums(z: Any, m: int, level: Any, fine: Any, mass: bool, w: Any) -> Any:
    lanes = vec.lanes(z)
    zero = vec.splat(z.dtype.type(0))
    total, count = vec.widen(zero), vec.widen(zero)
    for start in range(0, m * lanes, GROUP * lanes):
        t, k = zero, zero
        for j in range(GROUP):
            i = start + j * lanes
            b = vec.maximum((vec.load(z, i) - level) - fine, 0.0)
            on = vec.select(b > 0.0, 1.0, zero)
            vec.store(w, i, b if mass else on)
            t += b
            k += on
        total += vec.widen(t)
        count += vec.widen(k)
    return total, count


def _parabola(z: Any, m: int, across: bool, rule: Any, mass: bool, level: Any, near: float, w: Any) -> Any:
    scale = rule[0]
    fine = vec.splat(z.dtype.type(0))
    before = vec.widen(fine) + 1e30
    active = fine == 0.0
    total, slope = before, before
    for _ in range(_STEPS):
        total, slope = _parabola_sums(z, m, scale, level, fine, mass, w)
        if across:
            total, slope = vec.sum_everywhere(total), vec.sum_everywhere(slope)
        excess = total - 1.0
        size = vec.maximum(excess, 0.0 - excess)
        active = active & (total > 0.0) & (size > near) & ((size < before) | (size > 0.01))
        if not vec.any_lane(active):
            break
        step = (total - vec.sqrt(total)) / (vec.maximum(slope, 1e-30) * vec.widen(scale))
        level, fine = _moved(active, level, fine, step)
        before = size * 0.5
    return level, fine, total, slope


@strict_helper
def _parabola_sums(z: Any, m: int, scale: Any, level: Any, fine: Any, mass: bool, w: Any) -> Any:
    lanes = vec.lanes(z)
    zero = vec.splat(z.dtype.type(0))
    total, slope = vec.widen(zero), vec.widen(zero)
    for start in range(0, m * lanes, GROUP * lanes):
        t, s = zero, zero
        for j in range(GROUP):
            i = start + j * lanes
            b = scale * vec.maximum((vec.load(z, i) - level) - fine, 0.0)
            square = b * b
            vec.store(w, i, square if mass else b)
            t += square
            s += b
        total += vec.widen(t)
        slope += vec.widen(s)
    return total, slope


@strict_helper
def _moved(active: Any, level: Any, fine: Any, step: Any) -> Any:
    """The level and its fine part after a step, in those lanes that are active."""
    rest = vec.widen(fine) + step
    coarse = vec.narrow(vec.widen(level) + rest, level)
    after = vec.narrow((vec.widen(level) - vec.widen(coarse)) + rest, level)
    return vec.select(active, coarse, level), vec.select(active, after, fine)


def _curve(z: Any, m: int, across: bool, rule: Any, mass: bool, level: Any, near: float, w: Any) -> Any:
    scale, factor, base = rule
    inverse = 1.0 / vec.select((scale > 0.0) | (scale < 0.0), scale, 1.0)
    growth = scale + factor
    fine = vec.splat(z.dtype.type(0))
    before = vec.widen(fine) + 1e30
    active = fine == 0.0
    total, slope = before, before
    # A linear correction leaves the square of what it corrects.
    enough = math.sqrt(0.25 * near) if mass else near
    for _ in range(_STEPS):
        total, slope = _curve_sums(z, m, scale, inverse, factor, base, level, w)
        if across:
            total, slope = vec.sum_everywhere(total), vec.sum_everywhere(slope)
        excess = total - 1.0
        size = vec.maximum(excess, 0.0 - excess)
        active = active & (total > 0.0) & (size > enough) & ((size < before) | (size > 0.01))
        step = vec.narrow(
            _norm_step(total, vec.widen(scale / growth)) / (vec.maximum(slope, 1e-300) * vec.widen(growth)),
            level,
        )
        before = size * 0.5
        if not vec.any_lane(active):
            if not mass:
                break
            share = excess / vec.maximum(slope, 1e-300)
            fine = vec.narrow(share / vec.widen(growth), level)
            corrected = _correct(z, m, scale, base, level, vec.narrow(share, level), w)
            if across:
                corrected = vec.sum_everywhere(corrected)
            size = vec.maximum(corrected - 1.0, 1.0 - corrected)
            after = level + step
            active = (size > near) & ((after > level) | (after < level)) & (total > 0.0)
            if not vec.any_lane(active):
                break
        level = vec.select(active, level + step, level)
    return level, fine, total, slope


@strict_helper
def _curve_sums(z: Any, m: int, scale: Any, inverse: Any, factor: Any, base: Any, level: Any, w: Any) -> Any:
    lanes = vec.lanes(z)
    zero = vec.splat(z.dtype.type(0))
    total, slope = vec.widen(zero), vec.widen(zero)
    for start in range(0, m * lanes, GROUP * lanes):
        t, s = zero, zero
        for j in range(GROUP):
            i = start + j * lanes
            v, p = weight(vec.load(z, i), scale, inverse, factor, base, level)
            vec.store(w, i, v)
            t += p
            s += v
        total += vec.widen(t)
        slope += vec.widen(s)
    return total, slope


@strict_helper
def _correct(z: Any, m: int, scale: Any, base: Any, level: Any, share: Any, w: Any) -> Any:
    """w·(b − share) in place of w, not below 0, and its sum."""
    lanes = vec.lanes(z)
    zero = vec.splat(z.dtype.type(0))
    total = vec.widen(zero)
    for start in range(0, m * lanes, GROUP * lanes):
        t = zero
        for j in range(GROUP):
            i = start + j * lanes
            v = vec.load(w, i)
            b = base + scale * (vec.load(z, i) - level)
            p = vec.select((v > 0.0) & (b > share), v * (b - share), zero)
            vec.store(w, i, p)
            t += p
        total += vec.widen(t)
    return total


@strict_helper
def _norm_step(total: Any, bend: Any) -> Any:
    """(T − T^(1 − h))/h for T = total and h = bend, also at h = 0: Newton's step on T^h times the slope of T."""
    logarithm = vec.log2(vec.maximum(total, 1e-30)) * math.log(2.0)
    y = bend * logarithm
    series = 1.0 - y * (0.5 - y * (1 / 6 - y * (1 / 24 - y * (1 / 120))))
    direct = (1.0 - vec.exp2(y * (-1 / math.log(2.0)))) / vec.select((y > 0.0) | (y < 0.0), y, 1.0)
    return total * logarithm * vec.select((y < 0.3) & (y > -0.3), series, direct)
