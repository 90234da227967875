"""The threshold of a row: b = [scale·z + L]₊ with Σ b^q = 1, for scores z ≤ 0 whose largest is 0.

(Σ b^q)^(1/q) is a norm, convex in L and nearly linear: from either side Newton's first step lands where the following
ones are monotone. The first steps sum in the row's own precision, which vectorises best, the last ones in double.
Sums and stores go in loops of their own: together they do not vectorise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fenchel.kernels.cpu.compiler import inlined
from fenchel.kernels.cpu.powers import exp2, log2

_STEPS = 100  # far more than it takes


@inlined
def line(z: Any, n: int, b: Any) -> float:
    """b = [z + L]₊ with Σ b = 1; returns L. Each step solves for the support at hand, exactly if it stays."""
    kind = z.dtype.type
    one, zero = kind(1), kind(0)
    high, low = kind(0.5), one / kind(n)  # all have at most the best one's excess
    size = zero
    for _ in range(_STEPS):
        k, s = zero, zero
        for i in range(n):
            d = z[i] + high
            k += one if d > zero else zero
            s += max(d, zero)
        change = (s - one) / k
        high = max(min(high - change, one), low)
        if k == size or abs(change) <= kind(0.05):  # near enough for the double steps to be few
            break
        size = k
    level, step = np.float64(high), 0.0
    for _ in range(_STEPS):
        count, total = 0.0, 0.0
        for i in range(n):
            d = np.float64(z[i]) + level
            count += 1.0 if d > 0.0 else 0.0
            total += max(d, 0.0)
        step = (total - 1.0) / count
        if _lift(z, n, one, level, step, b) == count:
            break
        level -= step
    return level - step


@inlined
def parabola(z: Any, n: int, scale: Any, b: Any) -> float:
    """b = [scale·z + L]₊ with Σ b² = 1; returns L."""
    kind = z.dtype.type
    one, zero = kind(1), kind(0)
    near = kind(1e-2 if z.itemsize == 4 else 1e-7)
    high, low = kind(0.7), one / np.sqrt(kind(n))
    for _ in range(_STEPS):
        s, q = zero, zero
        for i in range(n):
            d = max(scale * z[i] + high, zero)
            s += d
            q += d * d
        change = (q - np.sqrt(q)) / s
        high = max(min(high - change, one), low)
        if abs(change) <= near:
            break
    level, step = np.float64(high), 0.0
    for _ in range(_STEPS):
        count, total, squares = 0.0, 0.0, 0.0
        for i in range(n):
            d = np.float64(scale * z[i]) + level
            count += 1.0 if d > 0.0 else 0.0
            d = max(d, 0.0)
            total += d
            squares += d * d
        root = total * total - count * (squares - 1.0)
        if root >= 0.0:  # the root for the support at hand is exact if that stays
            step = (squares - 1.0) / (total + math.sqrt(root))
            if _lift(z, n, scale, level, step, b) == count:
                break
        else:
            step = (squares - math.sqrt(squares)) / total
        level -= step
    return level - step


@inlined
def _lift(z: Any, n: int, scale: Any, level: float, step: float, b: Any) -> float:
    """b = [scale·z + level − step]₊; returns the size of its support."""
    kind = z.dtype.type
    one, zero = kind(1), kind(0)
    if z.itemsize == 4:
        coarse = kind(level - step)
        fine = kind(level - step - np.float64(coarse))
        for i in range(n):  # the largest stands between both parts, or the compiler would add them first
            b[i] = max(max(scale * z[i] + coarse, -one) + fine, zero)
    else:
        for i in range(n):
            b[i] = scale * z[i] + level
        for i in range(n):  # in a loop of its own: a double cannot hold the level less the step
            b[i] = max(b[i] - step, zero)
    size = zero
    for i in range(n):
        size += one if b[i] > zero else zero
    return np.float64(size)


@inlined
def _norm_step(total: float, slope: float, q: float) -> float:
    """Newton's step on total^(1/q), whose slope is total^(1/q − 1)·slope: (total − total^(1 − 1/q)) / slope."""
    x = total - 1.0
    if abs(x) < 0.1:
        return (x / q) * (1.0 + 0.5 * (1.0 - 1.0 / q) * x * (1.0 - (1.0 + 1.0 / q) / 3.0 * x)) / slope
    rooted = exp2(log2(np.float32(total)) * np.float32(-1.0 / q))
    return (total - total * np.float64(rooted)) / slope


@inlined
def _whole_power(z: Any, n: int, scale: Any, q: float) -> Any:
    """The level of the whole power next to q, without any logarithm, to two digits: where to start for q itself."""
    kind = z.dtype.type
    one, zero = kind(1), kind(0)
    m = min(max(math.floor(q + 0.5), 1), 4)
    first, second, third, fourth = kind(m == 1), kind(m == 2), kind(m == 3), kind(m == 4)
    level, low = kind(0.7), kind(n ** (-1.0 / m))
    for _ in range(_STEPS):
        t, s = zero, zero
        for i in range(n):
            b = scale * z[i] + level
            on = one if b > zero else zero
            b = max(b, zero)
            w = first * on + b * (second + b * (third + b * fourth))
            s += w
            t += w * b
        step = kind(_norm_step(np.float64(t), np.float64(s), np.float64(m)))
        level = max(min(level - step, one), low)
        if abs(step) < kind(0.02):
            break
    return level


@inlined
def curve(z: Any, n: int, scale: Any, power: Any, w: Any, enough: float) -> tuple[Any, Any]:
    """The level L with Σ b^q = 1 for q = power + 1, as a coarse and a fine part; w = b^power at the coarse one."""
    kind = z.dtype.type
    one, zero, tiny = kind(1), kind(0), kind(1e-30)
    q = 1.0 + np.float64(power)
    low = kind(n ** (-1.0 / q))
    high = max(_whole_power(z, n, scale, q), low)
    for _ in range(_STEPS):
        t, s = zero, zero
        for i in range(n):
            b = scale * z[i] + high
            on = one if b > tiny else zero
            b = max(b, tiny)
            v = on * exp2(power * log2(b))
            s += v
            t += v * b
        change = kind(_norm_step(np.float64(t), np.float64(s), q))
        high = max(min(high - change, one), low)
        if abs(change) < scale * kind(1e-3):
            break
    level = np.float64(high)
    before = math.inf
    for _ in range(_STEPS):
        high = kind(level)
        for i in range(n):
            b = scale * z[i] + high
            on = one if b > tiny else zero
            w[i] = on * exp2(power * log2(max(b, tiny)))
        total, slope = 0.0, 0.0
        for i in range(n):
            v = w[i]
            slope += np.float64(v)
            total += np.float64(v) * np.float64(max(scale * z[i] + high, zero))
        step = _norm_step(total + q * slope * (level - high), slope, q)
        level -= step
        if abs(step) < enough or abs(step) >= before:
            break
        before = abs(step)
    return high, kind(level - high)


@inlined
def soft(z: Any, n: int, c: float, p: Any) -> float:
    """p = [1 + c(z − A)]₊^(1/c) with Σ p = 1 for c < ¼, negative too; returns A. In double, whatever the row is.

    (Σ p)^c is a norm of b = 1 + c(z − A) if c > 0, and nearly linear in A: Newton from A = 0 is monotone.
    """
    kind = z.dtype.type
    zero = kind(0)
    offset = 0.0
    inverse = 1.0 / c
    before = math.inf
    for _ in range(_STEPS):
        for i in range(n):
            score = z[i]
            b = 1.0 + c * (np.float64(score) - offset)
            on = 1.0 if (b > 0.0) and (score > -np.inf) else 0.0
            p[i] = kind(on * exp2(inverse * log2(min(max(b, 1e-290), 1e290))))
        total, slope = 0.0, 0.0
        for i in range(n):
            share = np.float64(p[i])
            b = 1.0 + c * (np.float64(z[i]) - offset)
            total += share
            slope += share / (b if share > 0.0 else 1.0)
        step = total * (1.0 - math.exp(-c * math.log(total))) / (c * slope)
        small = abs(step) <= 1e-3 * max(offset, 1.0)  # before, steps may grow
        if abs(step) <= (1e-7 if z.itemsize == 4 else 1e-14) * max(offset, 1.0) or (small and abs(step) >= before):
            excess = (total - 1.0) / slope
            for i in range(n):  # what is missing from Σ p = 1 is given to p itself
                share = np.float64(p[i])
                b = 1.0 + c * (np.float64(z[i]) - offset)
                p[i] = max(kind(share - excess * share / (b if share > 0.0 else 1.0)), zero)
            return offset + excess
        before = abs(step)
        offset += step
    return offset


@inlined
def steep(z: Any, n: int, c: float, p: Any) -> Any:
    """p = [1 + c(z − A)]₊^(1/c) with Σ p = 1 for c > 1; returns A.

    By Newton on the smallest probability w of the support: p = (a^c + w^c)^(1/c) with a^c = c(z − zₖ) is convex in w,
    and the small probabilities stay exact where an error δ in the threshold would be δ^(1/c).
    """
    kind = z.dtype.type
    inverse = 1.0 / c
    ordered = np.sort(z[:n])[::-1]
    lowest, highest = 0, n - 1
    while lowest < highest:
        middle = (lowest + highest + 1) // 2
        mass = 0.0
        for i in range(middle):
            mass += (c * (np.float64(ordered[i]) - np.float64(ordered[middle]))) ** inverse
            if mass >= 1.0:
                break
        if mass < 1.0:
            lowest = middle
        else:
            highest = middle - 1
    least = np.float64(ordered[lowest])
    size = 0
    for i in range(n):
        size += 1 if z[i] >= ordered[lowest] else 0
    w = 1.0 / size
    for _ in range(_STEPS):
        total, slope = 0.0, 0.0
        for i in range(size):  # the support is at the front
            share = _hypotenuse((c * (np.float64(ordered[i]) - least)) ** inverse, w, c)
            total += share
            slope += (w / share) ** (c - 1.0) if share > 0.0 else 0.0
        step = (total - 1.0) / max(slope, 1.0)
        w = max(w - step, 0.0)
        if abs(step) <= 1e-16 * w:
            break
    for i in range(n):
        inside = z[i] >= ordered[lowest]
        p[i] = kind(_hypotenuse((c * (np.float64(z[i]) - least)) ** inverse, w, c)) if inside else kind(0)
    return least + (1.0 - w**c) * inverse


@inlined
def _hypotenuse(a: Any, w: Any, c: Any) -> Any:
    """(a^c + w^c)^(1/c) without under- or overflow."""
    longer, shorter = max(a, w), min(a, w)
    return longer * (1.0 + (shorter / longer) ** c) ** (1.0 / c) if longer > 0.0 else 0.0
