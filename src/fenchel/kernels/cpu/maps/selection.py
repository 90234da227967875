"""The support of a row of scores: filter, threshold, excess.

argmax_Ω of entmax and normmax is told by b = [scale·z + L]₊ and w = b^power with Σ w·b = 1, z the scores less their
largest: p = w·b for entmax (scale = c = α − 1, power = 1/c − 1, L = 1 − cA), p ∝ w for normmax (scale 1, power 1/c).

Wide rows are filtered first: the maxima of their blocks alone have a threshold below that of the whole row, and few
entries reach it. Narrow rows are worked on whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fenchel.kernels.cpu.bits import LANES, above, from_ordered, lowest, ones, ordered
from fenchel.kernels.cpu.compiler import inlined, kernel
from fenchel.kernels.cpu.maps.exponents import by_type
from fenchel.kernels.cpu.maps.thresholds import curve, line, parabola, soft, steep

NARROW = 512
"""Whole-row arithmetic up to this width, filtering above; up to a quarter of it where that takes logarithms."""

BLOCK = LANES
"""The group of a wide row that is skipped or read as one."""

BAD = -1
"""In place of a count: the row has a NaN or +inf."""


@inlined
def is_narrow(n: int, power: Any) -> bool:
    """Whether rows of n scores are weighed whole."""
    return n <= (NARROW if power in (0, 1) else NARROW // 4)


@inlined
def buffers(n: int, like: Any) -> tuple[Any, Any, Any, Any]:
    """Room for one row of n scores: block maxima, shifted scores, weights, indices."""
    return (
        np.empty(n // BLOCK + 1, like.dtype),
        np.empty(n + 1, like.dtype),
        np.empty(n + 1, like.dtype),
        np.empty(n + 1, np.int32),
    )


@inlined
def top(x: Any) -> tuple[Any, bool]:
    """The largest entry of a row, and whether one is NaN or +inf."""
    kind = x.dtype.type
    lowest, highest = ordered(kind(-np.inf)), ordered(kind(np.inf))
    high, low = lowest, highest
    for i in range(x.size):
        v = ordered(x[i])
        high = max(high, v)
        low = min(low, v)
    return from_ordered(high), high >= highest or low < lowest


@inlined
def block_maxima(x: Any, maxima: Any) -> tuple[Any, Any, bool]:
    """``top`` of a wide row, and its smallest entry; keeps the maxima of its blocks."""
    n = x.size
    kind = x.dtype.type
    lowest, highest = ordered(kind(-np.inf)), ordered(kind(np.inf))
    high, low = lowest, highest
    for block in range((n + BLOCK - 1) // BLOCK):
        best = lowest
        for i in range(block * BLOCK, min((block + 1) * BLOCK, n)):
            v = ordered(x[i])
            best = max(best, v)
            low = min(low, v)
        maxima[block] = from_ordered(best)
        high = max(high, best)
    return from_ordered(high), from_ordered(low), high >= highest or low < lowest


@inlined
def collect(x: Any, top: Any, line: Any, maxima: Any, index: Any) -> int:
    """Where the entries with x − top > line stand, block by block."""
    n = x.size
    count = 0
    for block in range(n // BLOCK):
        if maxima[block] - top > line:
            count = listed(above(x, block * BLOCK, top, line), block * BLOCK, index, count)
    for i in range(n // BLOCK * BLOCK, n):
        index[count] = i
        count += 1 if x[i] - top > line else 0
    return count


@inlined
def support(p: Any, masks: Any, index: Any, most: int) -> Any:
    """How many entries are not zero and, if that is at most ``most``, where they stand; NaN is not zero."""
    n = p.size
    zero = p.dtype.type(0)
    size = 0
    for block in range(n // BLOCK):
        masks[block] = above(p, block * BLOCK, zero, zero)
        size += ones(masks[block])
    for i in range(n // BLOCK * BLOCK, n):
        size += 1 if p[i] != zero else 0
    if size <= most:
        count = 0
        for block in range(n // BLOCK):
            count = listed(masks[block], block * BLOCK, index, count)
        for i in range(n // BLOCK * BLOCK, n):
            if p[i] != zero:
                index[count] = i
                count += 1
    return size


@inlined
def gather(p: Any, v: Any, masks: Any, index: Any, shares: Any, values: Any) -> int:
    """The support of p if it is small: its size, places, shares, and what v has there; else just the size of p."""
    n: int = p.size
    size: int = support(p, masks, index, n // 8)
    if size > n // 8:
        return n
    for k in range(size):
        shares[k], values[k] = p[index[k]], v[index[k]]
    return size


@inlined
def scatter(products: Any, index: Any, size: int, out: Any) -> None:
    """A row that is zero but for what belongs to a gathered support."""
    out[:] = products.dtype.type(0)
    for k in range(size):
        out[index[k]] = products[k]


@inlined
def listed(mask: Any, start: int, index: Any, count: int) -> int:
    """Put the places of a block's bits on a list."""
    while mask != 0:
        index[count] = start + lowest(mask)
        count += 1
        mask &= mask - np.uint64(1)
    return count


@kernel
def _weigh_whole(z: Any, n: int, scale: Any, power: Any, mass: bool, w: Any) -> Any:
    if power == 0:
        return line(z, n, w)
    level = parabola(z, n, scale, w)
    if mass:
        for i in range(n):
            w[i] *= w[i]
    return level


@kernel
def _weigh_real(z: Any, n: int, scale: Any, power: Any, mass: bool, w: Any) -> Any:
    kind = z.dtype.type
    zero = kind(0)
    if scale != 1 and (power > 3 or power < 0):  # entmax with alpha < 1.25 or > 2, and always its mass
        c = np.float64(scale)
        return 1.0 - c * (steep(z, n, c, w) if c > 1.0 else soft(z, n, c, w))
    if power in (0, 1):
        return _weigh_whole(z, n, scale, power, mass, w)
    # The mass is corrected for the fine part of the level below, weights alone are not.
    enough = (1e-6 if mass else 3e-8) if z.itemsize == 4 else (1e-11 if mass else 1e-16)
    coarse, fine = curve(z, n, scale, power, w, scale * enough)
    if mass:
        rest = (kind(1) + power) * fine
        for i in range(n):
            # Zero comes first: of two equal arguments max returns the first, and off the support this one may be −0.
            w[i] = max(zero, w[i] * max(scale * z[i] + coarse, zero) + w[i] * rest)
    return np.float64(coarse) + np.float64(fine)


weigh = by_type(
    lambda z, n, scale, power, mass, w: _weigh_whole(z, n, scale, power, mass, w),
    lambda z, n, scale, power, mass, w: _weigh_real(z, n, scale, power, mass, w),
    3,
)
"""w·b of scores z ≤ 0 if ``mass``, else w, written to ``w``; returns the level L, a double."""


@kernel
def shift(x: Any, z: Any) -> Any:
    """z = x − max x of a narrow row; how many entries take part, all or none, or BAD; and max x."""
    largest, bad = top(x)
    if bad or largest == -np.inf:
        return BAD if bad else 0, largest
    for i in range(x.size):
        z[i] = x[i] - largest
    return x.size, largest


@kernel
def sift(x: Any, scale: Any, power: Any, maxima: Any, w: Any, z: Any, index: Any) -> Any:
    """As ``shift`` for those entries of a wide row that can be in its support, and their places."""
    if scale < 0:  # alpha < 1: all are
        for i in range(x.size):
            index[i] = i
        return shift(x, z)
    largest, _, bad = block_maxima(x, maxima)
    if bad or largest == -np.inf:
        return BAD if bad else 0, largest
    blocks = (x.size + BLOCK - 1) // BLOCK
    # Above alpha 2 the level is a tiny difference; what is further down than 1/c has no mass in any case.
    level = 1.0
    if scale <= 1:
        for i in range(blocks):
            z[i] = maxima[i] - largest
        level = weigh(z, blocks, scale, power, False, w)
    line = x.dtype.type(-level * (1 + 1e-5) / scale)
    count = collect(x, largest, line, maxima, index)
    for i in range(count):
        z[i] = x[index[i]] - largest
    return count, largest
