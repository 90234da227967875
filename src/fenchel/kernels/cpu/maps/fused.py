"""Fusedmax of rows and its Jacobian product: the proximal operator of total variation along a row, then sparsemax."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import helper, kernel, strict_helper
from fenchel.kernels.cpu.maps.groups import (
    MORE,
    begin_product,
    begin_row,
    finish_class_loss,
    loss_of_rows,
    map_rows,
    maximum_of,
    product_of_rows,
    subtract_largest,
    threshold,
)
from fenchel.kernels.cpu.maps.places import list_above, load_row_part

_LONGEST = 64  # entries of a stretch whose sum is tried
_STRONG = 0.3  # below this, single entries tell enough
_FEW = 16  # candidates that are not worth another pass


def fused(z: Tensor, strength: float | Tensor) -> Tensor:
    """Compute fusedmax of z (…, n) along the last dimension; strength: a number, or one value per row."""
    return map_rows(_fused_rows, z, strength)


def fused_loss(z: Tensor, index: Tensor, residual: float, strength: float | Tensor) -> tuple[Tensor, Tensor]:
    """The loss of classes for fusedmax of z (…, n), and residual·(p − y)."""
    return loss_of_rows(_fused_rows, z, index, residual, strength)


def fused_product(v: Tensor, z: Tensor, p: Tensor, strength: float | Tensor) -> Tensor:
    """Multiply v (…, n) by the Jacobian of fusedmax, given its result p for z."""
    return product_of_rows(_fused_product_rows, v, z, p, strength)


@helper
def _variation(w: Any, n: int, strength: float, y: Any, inverse: Any, room: Any) -> None:
    """Compute y = argmin ½‖y − w‖² + λ Σ |yᵢ − yᵢ₊₁| (n,), by dynamic programming over the derivative of the optimum.

    That of the first i terms, as a function of yᵢ₊₁, is f(b) = clip(b − wᵢ + f(b)) between −λ and λ: piecewise
    linear and increasing. It is kept as a queue of knots, each with the change of slope and of intercept from its left
    to its right; every entry adds two, at both ends, and removes those that are clipped away. yᵢ is yᵢ₊₁ between
    the two ends, and the nearer of them beyond. Slopes are whole numbers up to n, of which ``inverse`` has 1/k.
    """
    lower, upper, at, slope, rise = room
    left, right = n, n - 1
    for i in range(n):
        bound = strength if i < n - 1 else 0.0
        # From the left, where the derivative of all before is −λ, up to where it is −λ in total …
        a, b = 1.0, -w[i] - (strength if i > 0 else 0.0)
        while left <= right and a * at[left] + b <= -bound:
            a += slope[left]
            b += rise[left]
            left += 1
        lower[i] = (-bound - b) * inverse[int(a)]
        if i == n - 1:
            break
        # … and from the right, down to where it is λ.
        c, d = 1.0, -w[i] + (strength if i > 0 else 0.0)
        while left <= right and c * at[right] + d >= bound:
            c -= slope[right]
            d -= rise[right]
            right -= 1
        upper[i] = (bound - d) * inverse[int(c)]
        left -= 1
        at[left], slope[left], rise[left] = lower[i], a, b + bound
        right += 1
        at[right], slope[right], rise[right] = upper[i], -c, bound - d
    y[n - 1] = lower[n - 1]
    for i in range(n - 2, -1, -1):
        y[i] = min(max(y[i + 1], lower[i]), upper[i])


@helper
def _adjacent(x: Any, masked: bool, i: int, j: int) -> bool:
    """Whether only masked entries lie between positions i and j of a row; −1 and n are the positions of its ends."""
    if j == i + 1:
        return True
    if not masked:
        return False
    k = i + 1
    while k < j and x[k] == -np.inf:
        k += 1
    return k == j


@strict_helper
def _next_above(x: Any, i: int, n: int, top: Any, line: Any) -> Any:
    """The first place from i on at which x − top is above a line; n if there is none."""
    while i < n:
        found = vec.bits_of((load_row_part(x, 0, i, n, x.dtype.type(-np.inf)) - top) > line)
        if found != 0:
            return i + vec.lowest_bit(found)
        i += vec.lanes(x)
    return n


@strict_helper
def _level_of_windows(x: Any, n: int, top: Any, strength: float, sums: Any) -> Any:
    """A level below the threshold of a row, relative to its largest score.

    A stretch of k entries with sum s cannot have more mass than 1, so that k·τ ≥ s − 2λ − 1. Tried are stretches of 1,
    2, 4, … entries that begin anywhere, and the whole row, which has no neighbours.
    """
    lanes = vec.lanes(x)
    nothing = vec.splat(x.dtype.type(-np.inf))
    mass, size = vec.widen(nothing * 0.0), vec.widen(nothing * 0.0)
    mass, size = vec.select(mass < 0.0, mass, 0.0), vec.select(size < 0.0, size, 0.0)
    for i in range(0, n, lanes):
        v = load_row_part(x, 0, i, n, x.dtype.type(-np.inf)) - top
        vec.store(sums, i, v)
        wide = vec.widen(v)
        mass += vec.select(wide > -np.inf, wide, 0.0)
        size += vec.select(wide > -np.inf, size * 0.0 + 1.0, 0.0)
    for i in range((n + lanes - 1) // lanes * lanes, n + _LONGEST + lanes, lanes):
        vec.store(sums, i, nothing)
    level = max(-1.0 - 2.0 * strength, (vec.sum_lanes(mass) - 1.0) / vec.sum_lanes(size))
    length = 1 if strength > _STRONG else n
    while 2 * length <= min(n, _LONGEST):
        best = nothing
        for i in range(0, n, lanes):
            v = vec.load(sums, i) + vec.load(sums, i + length)
            vec.store(sums, i, v)
            best = vec.maximum(v, best)
        length *= 2
        most = np.float64(vec.max_lanes(best))
        level = max(level, (most + 1e-6 * most - 2.0 * strength - 1.0) / length)
    return level


@helper
def _trace(steps: Any, m: int, strength: float, at_end: bool) -> None:
    """Put 1 in place of the steps of entries of a stretch that are chosen, 0 in place of others, from its end on."""
    inside = steps[m - 1] > (0.0 if at_end else strength)
    steps[m - 1] = 1.0 if inside else 0.0
    for k in range(m - 2, -1, -1):
        inside = steps[k] > (-strength if inside else strength)
        steps[k] = 1.0 if inside else 0.0


@strict_helper
def _excursions(x: Any, n: int, top: Any, strength: float, level: float, masked: bool, steps: Any, index: Any) -> int:
    """List the entries of a row whose y is above a level, see ``_variation``; returns how many there are.

    They are the set S with the largest Σ (w − level) − λ·(edges that leave S). For its prefixes let ``step`` be by how
    much it is better that the last entry is in S than that it is not: w − level + clip(step of the entry before). Where
    that is −λ or less, the next one with w > level is searched for.
    """
    count, i, begun = 0, 0, False
    line = x.dtype.type(level - 1e-6 * abs(level))
    while i < n:
        before = -strength
        if begun:
            i = _next_above(x, i, n, top, line)
        else:  # the first entry has one neighbour
            begun, before = True, 0.0
            while masked and x[i] == -np.inf:
                i += 1
        begin, m = count, 0
        closed = False
        while i < n and not closed:
            if not masked or x[i] > -np.inf:
                before = min(max(before, -strength), strength) + ((np.float64(x[i]) - top) - level)
                steps[m], index[begin + m] = before, i
                m += 1
                closed = before <= -strength and begun
            i += 1
        if m > 0:
            _trace(steps, m, strength, not closed)
            for k in range(m):
                index[count] = index[begin + k]
                count += 1 if steps[k] > 0.0 else 0
    return count


@strict_helper
def _narrowed(
    x: Any, ends: Any, top: Any, strength: float, level: float, masked: bool, steps: Any, index: Any, count: int
) -> Any:
    """The same among entries that are listed, of which the others are known not to be above the level."""
    start, kept = 0, 0
    while start < count:
        stop = start
        before = 0.0 if index[start] == ends[0] else -strength
        while stop < count and (stop == start or _adjacent(x, masked, index[stop - 1], index[stop])):
            before = min(max(before, -strength), strength) + ((np.float64(x[index[stop]]) - top) - level)
            steps[stop - start] = before
            stop += 1
        _trace(steps, stop - start, strength, index[stop - 1] == ends[1])
        for k in range(start, stop):
            inside = steps[k - start] > 0.0
            index[kept] = index[k]
            kept += 1 if inside else 0
        start = stop
    return kept


@strict_helper
def _candidates(x: Any, n: int, top: Any, least: Any, strength: float, sums: Any, steps: Any, index: Any) -> Any:
    """List entries of a row among which are all that have mass; returns how many there are.

    With S as in ``_excursions``, max over S of Σ (w − τ) − λ·(edges) is Σ [y − τ]₊, convex in τ and 1 at the threshold:
    Newton's steps from a level below grow to it, and S shrinks.
    """
    masked = least == -np.inf
    if strength == 0.0:
        return list_above(x, 0, n, 0, n, top, x.dtype.type(-MORE), index, 0)
    first, last = 0, n - 1
    while masked and x[first] == -np.inf:
        first += 1
    while masked and x[last] == -np.inf:
        last -= 1
    level = _level_of_windows(x, n, top, strength, sums)
    margin = 1e-9 * (1.0 + strength)
    level -= margin + 1e-6 * abs(level)
    count = _excursions(x, n, top, strength, level, masked, steps, index)
    before = 2 * n
    while count > _FEW and 8 * count < 7 * before:
        before = count
        total, edges = 0.0, 0
        for k in range(count):
            total += np.float64(x[index[k]]) - top
            if k == 0 or not _adjacent(x, masked, index[k - 1], index[k]):
                edges += 2
        edges -= (1 if index[0] == first else 0) + (1 if index[count - 1] == last else 0)
        level = max(level, (total - strength * edges - 1.0) / count - margin - 1e-9 * abs(level))
        count = _narrowed(x, (first, last), top, strength, level, masked, steps, index, count)
    return count


@helper
def _ends(x: Any, masked: bool, label: int) -> int:
    """How many neighbours an entry has that are not masked."""
    if label < 0:
        return 0
    left = 0 if _adjacent(x, masked, -1, label) else 1
    return left if _adjacent(x, masked, label, x.size) else left + 1


@kernel
def _fused_rows(first: int, last: int, x: Any, strengths: Any, out: Any, classes: Any, losses: Any, rate: Any) -> None:
    """Compute fusedmax of each row of x (rows, n): groups of equal values run by run, then their threshold.

    If there are classes, compute their losses, and rate·(p − y) in place of p.
    """
    n = x.shape[1]
    kind = x.dtype.type
    index, sums = np.empty(n + 1, np.int32), np.empty(n + 2 * _LONGEST, x.dtype)
    w, y = np.empty(n + 1), np.empty(n + 1)
    queue = np.empty(n), np.empty(n), np.empty(2 * n + 2), np.empty(2 * n + 2), np.empty(2 * n + 2)
    values, sizes, inverse = np.empty(n), np.empty(n, np.int32), np.empty(n + 2)
    for k in range(1, inverse.size):
        inverse[k] = 1.0 / k
    for row in range(first, last):
        source, target = x[row], out[row]
        going, top, least = begin_row(source, target)
        if not going:
            if classes.size > 0:
                finish_class_loss(row, source, target, target[0], top, 0.0, classes, losses, rate)
            continue
        masked = least == -np.inf
        strength = strengths[row]
        count = _candidates(source, n, top, least, strength, sums, y, index)
        groups, start = 0, 0
        while start < count:
            stop = start + 1
            while stop < count and _adjacent(source, masked, index[stop - 1], index[stop]):
                stop += 1
            length = stop - start
            low, high = np.inf, -np.inf
            for k in range(length):
                w[k] = np.float64(source[index[start + k]]) - top
            if not _adjacent(source, masked, -1, index[start]):
                w[0] -= strength
            if not _adjacent(source, masked, index[stop - 1], n):
                w[length - 1] -= strength
            for k in range(length):
                low, high = min(low, w[k]), max(high, w[k])
            if strength == 0.0 or length * (high - low) <= strength:
                for k in range(length):  # assigning a slice to a slice would take a second more to compile
                    y[k] = w[k] if strength == 0.0 else w[0]
            else:
                _variation(w, length, strength, y, inverse, queue)
            begin = 0
            while begin < length:
                level = y[begin]
                end = begin + 1
                while end < length and y[end] == level:
                    end += 1
                # The groups are known: their means once more, without what the queue has rounded.
                rest = 0.0
                for k in range(begin, end):
                    rest += w[k] - level
                if begin > 0:
                    rest -= strength if level > y[begin - 1] else -strength
                if end < length:
                    rest -= strength if level > y[end] else -strength
                values[groups] = level + rest / (end - begin)
                sizes[groups] = end - begin
                groups += 1
                begin = end
            start = stop
        best = subtract_largest(values, groups)
        tau = threshold(values, sizes, groups)
        k = 0
        for g in range(groups):
            p = kind(max(values[g] - tau, 0.0))
            for _ in range(sizes[g]):
                target[index[k]] = p
                k += 1
        if classes.size > 0:
            at_class = strength * _ends(source, masked, classes[row])
            maximum = maximum_of(values, sizes, groups, best, tau)
            finish_class_loss(row, source, target, maximum, top, at_class, classes, losses, rate)


@kernel
def _fused_product_rows(first: int, last: int, p: Any, x: Any, strengths: Any, v: Any, out: Any) -> None:
    """Compute J v of each row: the mean of v over each group, less its mean over the support."""
    n = p.shape[1]
    kind = p.dtype.type
    index = np.empty(n, np.int32)
    for row in range(first, last):
        source, scores, g, target = p[row], x[row], v[row], out[row]
        count, mean = begin_product(source, g, index, target)
        alone = strengths[row] == 0.0
        start = 0
        while start < count:
            level = source[index[start]]
            part = g[index[start]] - mean
            stop = start + 1
            while (
                stop < count
                and not alone
                and source[index[stop]] == level
                and _adjacent(scores, True, index[stop - 1], index[stop])
            ):
                part += g[index[stop]] - mean
                stop += 1
            share = kind(part / (stop - start))
            for k in range(start, stop):
                target[index[k]] = share
            start = stop
