"""One pass over a row: its largest entry, and where those entries stand that exceed a line or are not zero.

A row is ``n`` entries of a contiguous array from ``start`` on. Places are counted from there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import strict_helper


@strict_helper
def load_row_part(x: Any, start: int, i: int, n: int, fill: Any) -> Any:
    """The vector at place i of a row, with ``fill`` after its end."""
    if i + vec.lanes(x) <= n:
        return vec.load(x, start + i)
    return vec.load_part(x, start + i, n - i, fill)


@strict_helper
def extremes(x: Any, start: int, n: int) -> Any:
    """The largest and the smallest entry of a row, and whether one is NaN or +inf."""
    kind = x.dtype.type
    high, low = vec.splat(kind(-np.inf)), vec.splat(kind(np.inf))
    bad = high > high
    for i in range(0, n, vec.lanes(x)):
        v = load_row_part(x, start, i, n, kind(-np.inf))
        u = load_row_part(x, start, i, n, kind(np.inf))
        bad = bad | vec.unordered(v, v)
        high, low = vec.maximum(v, high), vec.minimum(u, low)
    top = vec.max_lanes(high)
    return top, -vec.max_lanes(0.0 - low), vec.any_lane(bad) or top == np.inf


@strict_helper
def list_places(found: Any, first: int, index: Any, count: int) -> Any:
    """Append the places of the bits that are set to a list of so many; ``first`` is that of bit 0."""
    while found != 0:
        index[count] = first + vec.lowest_bit(found)
        count += 1
        found &= found - np.uint64(1)
    return count


@strict_helper
def list_above(x: Any, start: int, n: int, first: int, last: int, top: Any, line: Any, index: Any, count: int) -> Any:
    """Append the places from ``first`` to ``last`` at which x − top is not below a line."""
    for i in range(first, min(last, n), vec.lanes(x)):
        v = load_row_part(x, start, i, n, x.dtype.type(-np.inf))
        count = list_places(vec.bits_of((v - top) >= line), i, index, count)
    return count


@strict_helper
def nonzero_bits(p: Any, start: int, i: int, n: int) -> Any:
    """Which entries of the vector at place i of a row are not zero, NaN included, as bits."""
    q = load_row_part(p, start, i, n, p.dtype.type(0))
    return vec.bits_of(((q > 0.0) | (q < 0.0)) | vec.unordered(q, q))


@strict_helper
def list_nonzero(p: Any, start: int, n: int, index: Any) -> Any:
    """List the places of entries that are not zero, NaN included; returns how many there are."""
    count = 0
    for i in range(0, n, vec.lanes(p)):
        count = list_places(nonzero_bits(p, start, i, n), i, index, count)
    return count


@strict_helper
def count_nonzero(p: Any, start: int, n: int) -> Any:
    """How many entries are not zero, NaN included."""
    count = 0
    for i in range(0, n, vec.lanes(p)):
        count += vec.count_bits(nonzero_bits(p, start, i, n))
    return count


@strict_helper
def fill(x: Any, start: int, n: int, value: Any) -> None:
    """Set all entries of a row to a value."""
    lanes = vec.lanes(x)
    v = vec.splat(x.dtype.type(value))
    for i in range(0, n - lanes + 1, lanes):
        vec.store(x, start + i, v)
    rest = n % lanes
    if rest:
        vec.store_part(x, start + n - rest, v, rest)
