"""Oscarmax of rows and its Jacobian product: isotonic regression of the sorted scores, then sparsemax."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fenchel.kernels.cpu.compiler import helper, kernel
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
    unmasked,
)
from fenchel.kernels.cpu.maps.places import list_above

_SHORT = 48  # numbers: more are sorted by digits in single precision
_RUN = 16  # numbers: so many are sorted by insertion


def oscar(z: Tensor, strength: float | Tensor) -> Tensor:
    """Compute oscarmax of z (…, n) along the last dimension; strength: a number, or one value per row."""
    return map_rows(_oscar_rows, z, strength)


def oscar_loss(z: Tensor, index: Tensor, residual: float, strength: float | Tensor) -> tuple[Tensor, Tensor]:
    """The loss of classes for oscarmax of z (…, n), and residual·(p − y)."""
    return loss_of_rows(_oscar_rows, z, index, residual, strength)


def oscar_product(v: Tensor, z: Tensor, p: Tensor, strength: float | Tensor) -> Tensor:
    """Multiply v (…, n) by the Jacobian of oscarmax, given its result p for z."""
    return product_of_rows(_oscar_product_rows, v, z, p, strength)


@helper
def _sort_by_digits(bits: Any, n: int, keys: Any, spare: Any, counts: Any) -> None:
    """Sort the first n float32 numbers upwards, given as their bits: counting sort, digit by digit."""
    digit = 8 if n < 2048 else 11
    passes = 4 if n < 2048 else 3
    mask = np.uint32((1 << digit) - 1)
    size = 1 << digit
    counts[: passes * size] = 0
    for i in range(n):
        # The order of floats is that of their bits, backwards if negative.
        b = bits[i]
        key = np.uint32(b ^ (np.uint32(0xFFFFFFFF) if b >> np.uint32(31) else np.uint32(0x80000000)))
        keys[i] = key
        for k in range(passes):
            counts[k * size + ((key >> np.uint32(k * digit)) & mask)] += 1
    for k in range(passes):
        place = 0
        for d in range(k * size, (k + 1) * size):
            c = counts[d]
            counts[d] = place
            place += c
        for i in range(n):
            key = keys[i]
            d = k * size + ((key >> np.uint32(k * digit)) & mask)
            spare[counts[d]] = key
            counts[d] += 1
        keys, spare = spare, keys
    for i in range(n):
        key = keys[i]
        bits[i] = key ^ (np.uint32(0x80000000) if key >> np.uint32(31) else np.uint32(0xFFFFFFFF))


@helper
def _sort_by_merging(a: Any, n: int, spare: Any) -> None:
    """Sort a[:n] upwards: short runs by insertion, then pairs of runs are merged, through ``spare``."""
    for first in range(0, n, _RUN):
        for i in range(first + 1, min(first + _RUN, n)):
            v = a[i]
            j = i
            while j > first and a[j - 1] > v:
                a[j] = a[j - 1]
                j -= 1
            a[j] = v
    width = _RUN
    while width < n:
        for first in range(0, n, 2 * width):
            middle, end = min(first + width, n), min(first + 2 * width, n)
            i, j, k = first, middle, first
            while i < middle and j < end:
                one, other = a[i], a[j]
                less = one <= other
                spare[k] = one if less else other
                i += 1 if less else 0
                j += 0 if less else 1
                k += 1
            for m in range(i, middle):
                spare[k + m - i] = a[m]
            for m in range(k + middle - i, end):
                spare[m] = a[m]
        for k in range(n):
            a[k] = spare[k]
        width *= 2


@helper
def _sort(a: Any, n: int, other: Any, keys: Any, spare: Any, counts: Any) -> None:
    """Sort a[:n] upwards: by digits if long and in single precision, else by merging; the rest are workspaces."""
    if n > _SHORT and a.itemsize == 4:
        _sort_by_digits(a.view(np.uint32), n, keys, spare, counts)
    else:
        _sort_by_merging(a, n, other)


@helper
def _find(edges: Any, count: int, value: Any) -> int:
    """Return the index of the first of the descending edges that are ≤ value; ``count`` if there is none."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if value >= edges[middle]:
            high = middle
        else:
            low = middle + 1
    return low


@kernel
def _oscar_rows(first: int, last: int, x: Any, strengths: Any, out: Any, classes: Any, losses: Any, rate: Any) -> None:
    """Compute oscarmax of each row of x (rows, n): pool adjacent violators among the candidates, then the threshold.

    If there are classes, compute their losses, and rate·(p − y) in place of p.
    """
    n = x.shape[1]
    kind = x.dtype.type
    index = np.empty(n, np.int32)
    ordered = np.empty(n, x.dtype)
    keys, spare, counts = np.empty(n, np.uint32), np.empty(n, np.uint32), np.empty(3 << 11, np.int32)
    edges = np.empty(n, x.dtype)
    z, sums, values, sizes = np.empty(n), np.empty(n), np.empty(n), np.empty(n, np.int32)
    for row in range(first, last):
        source, target = x[row], out[row]
        going, top, least = begin_row(source, target)
        if not going:
            if classes.size > 0:
                finish_class_loss(row, source, target, target[0], top, 0.0, classes, losses, rate)
            continue
        strength = strengths[row]
        masked = least == -np.inf
        kept = unmasked(source, masked)
        if masked:
            least = top
            for i in range(n):
                v = source[i]
                least = min(least, v if v > -np.inf else top)
        if strength > 0.0 and strength * kept >= 2.0 * (np.float64(top) - least):
            # No group of the largest scores has a mean so far above the others that it stays apart: all are pooled.
            share = kind(1.0 / kept)
            total = 0.0
            for i in range(n):
                target[i] = share if source[i] > -np.inf else target[i]
                total += np.float64(source[i]) - top if source[i] > -np.inf else 0.0
            if classes.size > 0:
                at_class = strength * (kept - 1)
                maximum = total / kept + 0.5 * (1.0 - 1.0 / kept) - 0.5 * at_class
                finish_class_loss(row, source, target, maximum, top, at_class, classes, losses, rate)
            continue
        # The penalty raises an entry relative to the largest by at most λ(n − 1). Entries without mass do not count
        # towards n, which excludes further entries.
        line = kind(-MORE * (1.0 + (kept - 1) * strength))
        candidates = list_above(source, 0, n, 0, n, top, line, index, 0)
        count = candidates
        for k in range(count):
            ordered[k] = source[index[k]]
        while True:
            line = kind(-MORE * (1.0 + (count - 1) * strength))
            fewer = 0
            for k in range(count):
                v = ordered[k]
                ordered[fewer] = v
                fewer += 1 if v - top > line else 0
            if fewer == count:
                break
            count = fewer
        _sort(ordered, count, edges, keys, spare, counts)
        for k in range(count):  # in a loop of its own, or the compiler would take the ranks off first
            z[k] = np.float64(ordered[count - 1 - k]) - top
        groups = 0
        for k in range(count):
            level = z[k] + strength * k
            total, size = level, 1
            while groups > 0 and strength > 0.0 and values[groups - 1] <= level:
                groups -= 1
                total += sums[groups]
                size += sizes[groups]
                level = total / size
            sums[groups], sizes[groups], values[groups] = total, size, level
            edges[groups] = ordered[count - 1 - k]
            groups += 1
        k = 0
        for g in range(groups):
            # Once more, without the ranks, which are large beside the scores and known.
            rest, middle = 0.0, strength * (k + 0.5 * (sizes[g] - 1))
            base = values[g] - middle
            for j in range(k, k + sizes[g]):
                rest += z[j] - base
            values[g] += rest / sizes[g]
            k += sizes[g]
        best = subtract_largest(values, groups)
        tau = threshold(values, sizes, groups)
        maximum = maximum_of(values, sizes, groups, best, tau)
        while values[groups - 1] <= tau:
            groups -= 1
        for g in range(groups):
            values[g] -= tau
        lowest = edges[groups - 1]
        for k in range(candidates):
            v = source[index[k]]
            if v >= lowest:
                target[index[k]] = kind(values[_find(edges, groups, v)])
        if classes.size > 0:  # values are larger by λ(kept − 1), which is Ω at every class
            finish_class_loss(row, source, target, maximum, top, 0.0, classes, losses, rate)


@kernel
def _oscar_product_rows(first: int, last: int, p: Any, x: Any, strengths: Any, v: Any, out: Any) -> None:
    """Compute J v of each row: the mean of v over all entries of equal value, less its mean over the support."""
    n = p.shape[1]
    kind = p.dtype.type
    index = np.empty(n, np.int32)
    edges, other = np.empty(n, p.dtype), np.empty(n, p.dtype)
    keys, spare, counts = np.empty(n, np.uint32), np.empty(n, np.uint32), np.empty(3 << 11, np.int32)
    sums, sizes = np.empty(n), np.empty(n, np.int32)
    for row in range(first, last):
        source, g, target = p[row], v[row], out[row]
        count, mean = begin_product(source, g, index, target)
        if count == 0:
            continue
        alone = strengths[row] == 0.0
        even = not alone
        level = source[index[0]]
        for k in range(count):
            even = even and source[index[k]] == level
        if even:  # one group: its mean is that of the support
            continue
        if alone:
            for k in range(count):
                target[index[k]] = kind(g[index[k]] - mean)
            continue
        for k in range(count):
            edges[k] = -source[index[k]]
        _sort(edges, count, other, keys, spare, counts)
        groups = 0
        for k in range(count):
            if k == 0 or edges[k] != edges[groups - 1]:
                edges[groups] = edges[k]
                groups += 1
        for k in range(groups):
            edges[k] = -edges[k]
            sums[k], sizes[k] = 0.0, 0
        for k in range(count):
            i = _find(edges, groups, source[index[k]])
            sums[i] += g[index[k]] - mean
            sizes[i] += 1
        for k in range(count):
            i = _find(edges, groups, source[index[k]])
            target[index[k]] = kind(sums[i] / sizes[i])
