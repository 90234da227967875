"""Sparsemax and 1.5-entmax of short rows, four at a time.

A pass over a short row takes less time than to add up its lanes, take a root and divide, one after the other. Four rows
that go through the same loops hide each other's waits. A row that is done keeps its level while the others go on, so
its result does not depend on them. The steps are those of ``thresholds.line`` and
``thresholds.parabola``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fenchel.kernels.cpu.compiler import inlined, kernel
from fenchel.kernels.cpu.maps.selection import top

_STEPS = 100  # far more than it takes


@kernel
def quads(first: int, last: int, x: Any, square: bool, out: Any) -> None:
    """p = [z + L]₊, or [z/2 + L]₊² if ``square``, with Σ p = 1 for each row."""
    n = x.shape[1]
    kind = x.dtype.type
    one, zero = kind(1), kind(0)
    if square:
        scale, start, low, near = kind(0.5), kind(0.7), one / np.sqrt(kind(n)), kind(1e-2 if x.itemsize == 4 else 1e-7)
    else:
        scale, start, low, near = one, kind(0.5), one / kind(n), kind(0.05)
    z = np.empty((4, n), x.dtype)
    # Arrays of their own, made once: to ask for memory, or for a part of it, takes as long as a pass.
    empty, waiting = np.empty(4, x.dtype), np.empty(4, np.int64)
    coarse, fine, slope, mass = np.empty(4, x.dtype), np.empty(4, x.dtype), np.empty(4, x.dtype), np.empty(4, x.dtype)
    level, size, total, squares, after = np.empty(4), np.empty(4), np.empty(4), np.empty(4), np.empty(4)
    for head in range(first, last, 4):
        for j in range(4):
            source = x[min(head + j, last - 1)]
            largest, bad = top(source)
            empty[j] = kind(np.nan) if bad else (zero if largest == -np.inf else one)
            if empty[j] == one:
                for i in range(n):
                    z[j, i] = source[i] - largest
            else:
                for i in range(n):
                    z[j, i] = zero
            coarse[j], waiting[j] = start, 1
        # In the rows' own precision, until the exact steps are few.
        for _ in range(_STEPS):
            if square:
                _powers(z, n, scale, coarse, slope, mass)
            else:
                _excess(z, n, coarse, slope, mass)
            left = 0
            for j in range(4):
                change = (mass[j] - (np.sqrt(mass[j]) if square else one)) / slope[j]
                moved = max(min(coarse[j] - change, one), low)
                coarse[j] = moved if waiting[j] else coarse[j]
                waiting[j] *= 1 if abs(change) > near else 0
                left += waiting[j]
            if left == 0:
                break
        # The root for the support at hand, in double, until that stays.
        for j in range(4):
            level[j], waiting[j] = np.float64(coarse[j]), 1
        for _ in range(_STEPS):
            _exact_powers(z, n, 0, scale, level, size, total, squares)
            _exact_powers(z, n, 2, scale, level, size, total, squares)
            for j in range(4):
                step = (total[j] - 1.0) / size[j]
                if square:
                    root = total[j] * total[j] - size[j] * (squares[j] - 1.0)
                    step = (squares[j] - 1.0) / (total[j] + math.sqrt(max(root, 0.0)))
                    if root < 0.0:  # there is none: go on
                        step, size[j] = (squares[j] - math.sqrt(squares[j])) / total[j], -1.0
                if waiting[j]:
                    if x.itemsize == 4:
                        coarse[j] = kind(level[j] - step)
                        fine[j] = kind(level[j] - step - np.float64(coarse[j]))
                    else:  # a double cannot hold the level less the step
                        coarse[j], fine[j] = kind(level[j]), kind(-step)
                    level[j] -= step
            _count(z, n, scale, coarse, fine, after)
            left = 0
            for j in range(4):
                waiting[j] *= 1 if after[j] != size[j] else 0
                left += waiting[j]
            if left == 0:
                break
        for j in range(min(4, last - head)):
            target, a, b = out[head + j], coarse[j], fine[j]
            if empty[j] == one:
                for i in range(n):
                    target[i] = max(max(scale * z[j, i] + a, -one) + b, zero)
                if square:
                    for i in range(n):
                        target[i] *= target[i]
            else:
                target[:] = empty[j]


@inlined
def _excess(z: Any, n: int, level: Any, size: Any, total: Any) -> None:
    """How many of b = [z + level]₊ are positive, and Σ b."""
    one, zero = z.dtype.type(1), z.dtype.type(0)
    a, b, c, d = level[0], level[1], level[2], level[3]
    r, s, t, u = zero, zero, zero, zero
    v, w, x, y = zero, zero, zero, zero
    for i in range(n):
        e, f, g, h = z[0, i] + a, z[1, i] + b, z[2, i] + c, z[3, i] + d
        r += one if e > zero else zero
        s += one if f > zero else zero
        t += one if g > zero else zero
        u += one if h > zero else zero
        v, w, x, y = v + max(e, zero), w + max(f, zero), x + max(g, zero), y + max(h, zero)
    size[0], size[1], size[2], size[3] = r, s, t, u
    total[0], total[1], total[2], total[3] = v, w, x, y


@inlined
def _powers(z: Any, n: int, scale: Any, level: Any, total: Any, squares: Any) -> None:
    """Σ b and Σ b² of b = [scale·z + level]₊."""
    zero = z.dtype.type(0)
    a, b, c, d = level[0], level[1], level[2], level[3]
    r, s, t, u = zero, zero, zero, zero
    v, w, x, y = zero, zero, zero, zero
    for i in range(n):
        e, f = max(scale * z[0, i] + a, zero), max(scale * z[1, i] + b, zero)
        g, h = max(scale * z[2, i] + c, zero), max(scale * z[3, i] + d, zero)
        r, s, t, u = r + e, s + f, t + g, u + h
        v, w, x, y = v + e * e, w + f * f, x + g * g, y + h * h
    total[0], total[1], total[2], total[3] = r, s, t, u
    squares[0], squares[1], squares[2], squares[3] = v, w, x, y


@inlined
def _exact_powers(z: Any, n: int, j: int, scale: Any, level: Any, size: Any, total: Any, squares: Any) -> None:
    """How many of b = [scale·z + level]₊ are positive, Σ b and Σ b² of rows j and j + 1, in double."""
    k = j + 1
    a, b = level[j], level[k]
    r, s, t, u, v, w = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for i in range(n):
        e, f = np.float64(scale * z[j, i]) + a, np.float64(scale * z[k, i]) + b
        r += 1.0 if e > 0.0 else 0.0
        s += 1.0 if f > 0.0 else 0.0
        e, f = max(e, 0.0), max(f, 0.0)
        t, u, v, w = t + e, u + f, v + e * e, w + f * f
    size[j], size[k], total[j], total[k], squares[j], squares[k] = r, s, t, u, v, w


@inlined
def _count(z: Any, n: int, scale: Any, coarse: Any, fine: Any, size: Any) -> None:
    """How many entries are positive at the level of their row."""
    kind = z.dtype.type
    one, zero = kind(1), kind(0)
    a, b, c, d = coarse[0], coarse[1], coarse[2], coarse[3]
    e, f, g, h = fine[0], fine[1], fine[2], fine[3]
    r, s, t, u = zero, zero, zero, zero
    for i in range(n):  # the largest stands between both parts, or the compiler would add them first
        r += one if max(scale * z[0, i] + a, -one) + e > zero else zero
        s += one if max(scale * z[1, i] + b, -one) + f > zero else zero
        t += one if max(scale * z[2, i] + c, -one) + g > zero else zero
        u += one if max(scale * z[3, i] + d, -one) + h > zero else zero
    size[0], size[1], size[2], size[3] = r, s, t, u
