"""Fusedmax of rows and its Jacobian product: the proximal operator of total variation along a row, then sparsemax."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fenchel.kernels.cpu.compiler import helper, kernel
from fenchel.kernels.cpu.maps.groups import MORE, begin_product, begin_row, map_rows, product_of_rows, threshold
from fenchel.kernels.cpu.maps.places import list_above


def fused(z: Tensor, strength: float | Tensor) -> Tensor:
    """Compute fusedmax of z (…, n) along the last dimension; strength: a number, or one value per row."""
    return map_rows(_fused_rows, z, strength)


def fused_product(v: Tensor, z: Tensor, p: Tensor, strength: float | Tensor) -> Tensor:
    """Multiply v (…, n) by the Jacobian of fusedmax, given its result p for z."""
    return product_of_rows(_fused_product_rows, v, z, p, strength)


@helper
def _variation(w: Any, n: int, strength: float, y: Any, lower: Any, upper: Any, at: Any, slope: Any, rise: Any) -> None:
    """Compute y = argmin ½‖y − w‖² + λ Σ |yᵢ − yᵢ₊₁| (n,), by dynamic programming over the derivative of the optimum.

    That of the first i terms, as a function of yᵢ₊₁, is f(b) = clip(b − wᵢ + f(b)) between −λ and λ: piecewise
    linear and increasing. It is kept as a queue of knots, each with the change of slope and of intercept from its left
    to its right; every entry adds two, at both ends, and removes those that are clipped away. yᵢ is yᵢ₊₁ between
    the two ends, and the nearer of them beyond.
    """
    left, right = n, n - 1
    for i in range(n):
        bound = strength if i < n - 1 else 0.0
        # From the left, where the derivative of all before is −λ, up to where it is −λ in total …
        a, b = 1.0, -w[i] - (strength if i > 0 else 0.0)
        while left <= right and a * at[left] + b <= -bound:
            a += slope[left]
            b += rise[left]
            left += 1
        lower[i] = (-bound - b) / a
        if i == n - 1:
            break
        # … and from the right, down to where it is λ.
        c, d = 1.0, -w[i] + (strength if i > 0 else 0.0)
        while left <= right and c * at[right] + d >= bound:
            c -= slope[right]
            d -= rise[right]
            right -= 1
        upper[i] = (bound - d) / c
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


@kernel
def _fused_rows(first: int, last: int, x: Any, strengths: Any, out: Any) -> None:
    """Compute fusedmax of each row of x (rows, n): groups of equal values run by run, then their threshold."""
    n = x.shape[1]
    kind = x.dtype.type
    index = np.empty(n, np.int32)
    w, y, lower, upper = np.empty(n), np.empty(n), np.empty(n), np.empty(n)
    at, slope, rise = np.empty(2 * n + 2), np.empty(2 * n + 2), np.empty(2 * n + 2)
    values, sizes = np.empty(n), np.empty(n, np.int32)
    for row in range(first, last):
        source, target = x[row], out[row]
        going, top, least = begin_row(source, target)
        if not going:
            continue
        masked = least == -np.inf
        strength = strengths[row]
        count = list_above(source, 0, n, 0, n, top, kind(-MORE * (1.0 + 4.0 * strength)), index, 0)
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
                _variation(w, length, strength, y, lower, upper, at, slope, rise)
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
        tau = threshold(values, sizes, groups)
        k = 0
        for g in range(groups):
            p = kind(max(values[g] - tau, 0.0))
            for _ in range(sizes[g]):
                target[index[k]] = p
                k += 1


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
