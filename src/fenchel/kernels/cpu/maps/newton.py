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

import numpy as np
from numba.extending import overload

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import INLINED, strict_helper

GROUP = 8
"""How many vectors are summed, or compared, at once: the number of vectors of a row is a multiple of it."""

_STEPS = 100  # far more than it takes
_FEW = 1  # steps from the level of some entries, or of a part of them, before those that are in double
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
    return _solve_by_logarithms if len(rule) == 3 else _solve_without_logarithms


def approach(z: Any, m: int, across: bool, rule: Any, level: Any) -> Any:
    """A level that is not above the solution, and near it: Newton's method in the precision of the rows."""
    raise NotImplementedError("for compiled code")


@overload(approach, strict=False, jit_options=INLINED)
def _approach(z: Any, m: Any, across: Any, rule: Any, level: Any) -> Any:
    return _approach_by_logarithms if len(rule) == 3 else _approach_without_logarithms


# Without logarithms: power 0 or 1.


def _approach_without_logarithms(z: Any, m: int, across: bool, rule: Any, level: Any) -> Any:
    # With one row per lane the number of steps is fixed: some lane would go on, and the processor cannot foresee when.
    for _ in range(_STEPS if across else _FEW):
        total, slope = _rough_sums(z, m, across, rule, level)
        far = total > _FAR
        if across and not vec.any_lane(far):
            break
        level = vec.select(far, level + step(rule, total - 1.0, slope), level)
    return level


def _solve_without_logarithms(
    z: Any, m: int, across: bool, rule: Any, mass: bool, level: Any, near: float, w: Any
) -> Any:
    fine = vec.splat(z.dtype.type(0))
    before = fine + 1e30
    active = fine == 0.0
    total, slope = vec.widen(fine), vec.widen(fine)
    for _ in range(_STEPS):
        total, slope = _sums(z, m, across, rule, level, fine, mass, w)
        excess = vec.narrow(total - 1.0, level)
        size = _size(excess)
        active = active & (excess > -1.0) & (size > near) & ((size < before) | (size > 0.01))
        if not vec.any_lane(active):
            break
        rest = fine + step(rule, excess, vec.narrow(slope, level))
        after = level + rest
        fine = vec.select(active, (level - after) + rest, fine)
        level = vec.select(active, after, level)
        before = size * 0.5
    return level, fine, total, slope


# By logarithms: any power.


def _approach_by_logarithms(z: Any, m: int, across: bool, rule: Any, level: Any) -> Any:
    """First between two whole powers, which take no logarithm; a step from there ends below the solution."""
    scale, factor, base = rule
    inverse = 1.0 / vec.select(scale > 0.0, scale, 1.0)
    power = 1.0 + factor * inverse
    whole = (scale > 0.0) & (power <= 8.0)
    if vec.any_lane(whole):
        offset = vec.select(base > 0.5, inverse, 0.0)  # the level is A where the base is 1
        found = _approach_by_polynomials(z, m, across, scale, power, whole, level - offset)
        level = vec.select(whole, found + offset, level)
    active = base == base
    for _ in range(_STEPS):
        total, slope = _rough_sums(z, m, across, rule, level)
        active = active & (total > 0.0)
        level = vec.select(active, level + step(rule, total - 1.0, slope), level)
        active = active & (_size(total - 1.0) > 0.3)
        if not vec.any_lane(active):
            break
    return level


@strict_helper
def _approach_by_polynomials(z: Any, m: int, across: bool, scale: Any, power: Any, active: Any, level: Any) -> Any:
    """The level for b^power replaced by its interpolation between the whole powers beside it, up to 8.

    Those above 4 are taken as b⁴ times the powers from 0 to 4.
    """
    lanes = vec.lanes(z)
    zero = vec.splat(z.dtype.type(0))
    tall = power > 4.0
    power = power - vec.select(tall, 4.0, zero)
    none, a = vec.maximum(1.0 - power, 0.0), vec.maximum(1.0 - _size(power - 1.0), 0.0)
    b = vec.maximum(1.0 - _size(power - 2.0), 0.0)
    c, d = vec.maximum(1.0 - _size(power - 3.0), 0.0), vec.maximum(1.0 - _size(power - 4.0), 0.0)
    least = vec.select(power >= 2.0, 2.0, vec.select(power >= 1.0, 1.0, zero))
    least = vec.select(power >= 3.0, vec.select(power >= 4.0, 4.0, zero + 3.0), least)
    bend = 1.0 / vec.maximum(least + vec.select(tall, 4.0, zero), 1.0)  # the sum to this power is a norm
    some = vec.any_lane(active & tall)
    for _ in range(_STEPS):
        total, slope = zero, zero
        for start in range(0, m * lanes, GROUP * lanes):
            for j in range(GROUP):
                u = vec.maximum(scale * (vec.load(z, start + j * lanes) - level), 0.0)
                value = vec.fma(vec.fma(vec.fma(vec.fma(u, d, c), u, b), u, a), u, none)
                up = vec.fma(vec.fma(vec.fma(u, 4.0 * d, 3.0 * c), u, 2.0 * b), u, a)
                if some:
                    square = u * u
                    lift = vec.select(tall, square * square, 1.0)
                    up = up * lift + vec.select(tall, 4.0 * (square * (u * value)), 0.0)
                    value = value * lift
                total += value
                slope += vec.select(u > 0.0, up, zero)
        if across:
            total, slope = vec.sum_everywhere(total), vec.sum_everywhere(slope)
        active = active & (_size(total - 1.0) > _FAR - 1.0) & (total > 0.0)
        if not vec.any_lane(active):
            break
        level = vec.select(active, level + _norm_step(total - 1.0, bend) / (slope * scale), level)
    return level


def _solve_by_logarithms(z: Any, m: int, across: bool, rule: Any, mass: bool, level: Any, near: float, w: Any) -> Any:
    scale, factor, _ = rule
    fine = vec.splat(z.dtype.type(0))
    before = fine + 1e30
    active = fine == 0.0
    total, slope = vec.widen(fine), vec.widen(fine)
    # A linear correction leaves the square of what it corrects.
    enough = math.sqrt(0.25 * near) if mass else near
    for _ in range(_STEPS):
        total, slope = _sums(z, m, across, rule, level, fine, False, w)
        excess = vec.narrow(total - 1.0, level)
        size = _size(excess)
        active = active & (excess > -1.0) & (size > enough) & ((size < before) | (size > 0.01))
        change = step(rule, excess, vec.narrow(slope, level))
        before = size * 0.5
        if not vec.any_lane(active):
            if not mass:
                break
            share = (total - 1.0) / vec.maximum(slope, 1e-300)
            fine = vec.narrow(share / vec.widen(scale + factor), level)
            corrected = _correct(z, m, rule, level, vec.narrow(share, level), w)
            if across:
                corrected = vec.sum_everywhere(corrected)
            after = level + change
            active = (
                (_size(vec.narrow(corrected - 1.0, level)) > near)
                & ((after > level) | (after < level))
                & (excess > -1.0)
            )
            if not vec.any_lane(active):
                break
        level = vec.select(active, level + change, level)
    return level, fine, total, slope


@strict_helper
def _correct(z: Any, m: int, rule: Any, level: Any, share: Any, w: Any) -> Any:
    """w·(b − share) in place of what ``to_correct`` has kept, not below 0, and its sum."""
    scale, _, base = rule
    lanes = vec.lanes(z)
    zero = vec.splat(z.dtype.type(0))
    total = vec.widen(zero)
    for start in range(0, m * lanes, GROUP * lanes):
        t = zero
        for j in range(GROUP):
            i = start + j * lanes
            p = corrected(rule, vec.load(w, i), base + scale * (vec.load(z, i) - level), share)
            vec.store(w, i, p)
            t += p
        total += vec.widen(t)
    return total


# Sums and steps of every rule.


@strict_helper
def _sums(z: Any, m: int, across: bool, rule: Any, level: Any, fine: Any, mass: bool, w: Any) -> Any:
    """Σ w·b and Σ w in double; w·b is written if ``mass``, else w."""
    lanes = vec.lanes(z)
    zero = vec.splat(z.dtype.type(0))
    total, slope = vec.widen(zero), vec.widen(zero)
    for start in range(0, m * lanes, GROUP * lanes):
        t, s = zero, zero
        for j in range(0, GROUP, 2):  # by pairs: a sum that waits for another takes longer than one beside it
            i = start + j * lanes
            u, p = weights(rule, vec.load(z, i), level, fine)
            v, q = weights(rule, vec.load(z, i + lanes), level, fine)
            vec.store(w, i, p if mass else to_correct(rule, u, p))
            vec.store(w, i + lanes, q if mass else to_correct(rule, v, q))
            t += p + q
            s += u + v
        total += vec.widen(t)
        slope += vec.widen(s)
    if across:
        return vec.sum_everywhere(total), vec.sum_everywhere(slope)
    return total, slope


@strict_helper
def _rough_sums(z: Any, m: int, across: bool, rule: Any, level: Any) -> Any:
    """Σ w·b and Σ w in the precision of the rows."""
    lanes = vec.lanes(z)
    zero = vec.splat(z.dtype.type(0))
    total, slope = zero, zero
    for start in range(0, m * lanes, GROUP * lanes):
        t, s = zero, zero
        for j in range(0, GROUP, 2):
            i = start + j * lanes
            u, p = weights(rule, vec.load(z, i), level, zero)
            v, q = weights(rule, vec.load(z, i + lanes), level, zero)
            t += p + q
            s += u + v
        total += t
        slope += s
    if across:
        return vec.sum_everywhere(total), vec.sum_everywhere(slope)
    return total, slope


def weights(rule: Any, z: Any, level: Any, fine: Any) -> Any:
    """w and w·b of one vector of scores, at a level with a fine part (0 for rules by logarithms)."""
    raise NotImplementedError("for compiled code")


@overload(weights, strict=False, jit_options=INLINED)
def _weights(rule: Any, z: Any, level: Any, fine: Any) -> Any:
    return (_weights_of_power_0, _weights_of_power_1, None, _weights_by_logarithms)[len(rule)]


def _weights_of_power_0(rule: Any, z: Any, level: Any, fine: Any) -> Any:
    b = vec.maximum((z - level) - fine, 0.0)
    return vec.select(b > 0.0, 1.0, b), b


def _weights_of_power_1(rule: Any, z: Any, level: Any, fine: Any) -> Any:
    b = rule[0] * vec.maximum((z - level) - fine, 0.0)
    return b, b * b


def _weights_by_logarithms(rule: Any, z: Any, level: Any, fine: Any) -> Any:
    scale, factor, base = rule
    inverse = 1.0 / vec.select((scale > 0.0) | (scale < 0.0), scale, 1.0)
    u = z - level
    b = base + scale * u
    y = factor * vec.log2_ratio(u, scale, inverse, base)
    v = vec.select((b > 0.0) & (y > -vec.exponent_limit(y)), vec.exp2(y), 0.0)
    p = v * vec.select(v > 0.0, b, 0.0)
    if vec.any_lane(scale < 0.0):  # b may be so large that w is too small for a number, and p is not
        y = vec.log2_ratio(u, scale, inverse, base)
        finite = (u > -np.inf) & (b > 0.0) & (y > -vec.exponent_limit(y))
        p = vec.select(scale < 0.0, vec.select(finite, vec.exp2(y), 0.0), p)
    return v, p


def to_correct(rule: Any, w: Any, p: Any) -> Any:
    """What ``corrected`` takes: w or, where the scale is negative, p = w·b."""
    raise NotImplementedError("for compiled code")


@overload(to_correct, strict=False, jit_options=INLINED)
def _to_correct(rule: Any, w: Any, p: Any) -> Any:
    if len(rule) < 3:
        return lambda rule, w, p: w
    return lambda rule, w, p: vec.select(rule[0] < 0.0, p, w)


@strict_helper
def corrected(rule: Any, kept: Any, b: Any, share: Any) -> Any:
    """w·(b − share), not below 0, from what ``to_correct`` has kept."""
    inside = (kept > 0.0) & (b > share)
    rest = b - share
    if vec.any_lane(rule[0] < 0.0):
        rest = vec.select(rule[0] < 0.0, rest / vec.select(inside, b, 1.0), rest)
    return vec.select(inside, kept * rest, 0.0)


def step(rule: Any, excess: Any, slope: Any) -> Any:
    """Newton's step on the norm (Σ w·b)^(1/(1 + power)), of Σ w·b − 1 and Σ w."""
    raise NotImplementedError("for compiled code")


@overload(step, strict=False, jit_options=INLINED)
def _step(rule: Any, excess: Any, slope: Any) -> Any:
    return (_step_of_power_0, _step_of_power_1, None, _step_by_logarithms)[len(rule)]


def _step_of_power_0(rule: Any, excess: Any, slope: Any) -> Any:
    return excess / vec.maximum(slope, 1.0)


def _step_of_power_1(rule: Any, excess: Any, slope: Any) -> Any:
    root = vec.sqrt(excess + 1.0)  # T − √T = (T − 1)·√T/(√T + 1)
    return excess * root / ((root + 1.0) * vec.maximum(slope, 1e-30) * rule[0])


def _step_by_logarithms(rule: Any, excess: Any, slope: Any) -> Any:
    scale, factor = rule[0], rule[1]
    return _norm_step(excess, scale / (scale + factor)) / (vec.maximum(slope, 1e-30) * (scale + factor))


@strict_helper
def _size(x: Any) -> Any:
    """|x|."""
    return vec.maximum(x, 0.0 - x)


@strict_helper
def _norm_step(excess: Any, bend: Any) -> Any:
    """(T − T^(1 − h))/h for T = 1 + excess and h = bend, also at h = 0: Newton's step on T^h times the slope of T."""
    total = vec.maximum(excess + 1.0, 1e-30)
    # What 1 + excess loses by rounding is added to its logarithm.
    logarithm = vec.log2(total) * math.log(2.0) + (excess - (total - 1.0)) / total
    y = bend * logarithm
    series = 1.0 - y * (0.5 - y * (1 / 6 - y * (1 / 24 - y * (1 / 120))))
    direct = (1.0 - vec.exp2(y * (-1 / math.log(2.0)))) / vec.select((y > 0.0) | (y < 0.0), y, 1.0)
    return total * logarithm * vec.select((y < 0.3) & (y > -0.3), series, direct)
