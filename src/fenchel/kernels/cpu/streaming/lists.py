"""Supports as lists: rows of a matrix that hold the entries of their support alone, and products over such lists.

A row of weights that was filtered is packed: the values stand at its front, and their places, as 32-bit integers, at
its end, the first of them last. Other rows hold all their weights. Lists of several rows are a sparse matrix: row r has
the entries ``starts[r]`` to ``starts[r + 1]``; ``firsts[r]``, or ``firsts[0]`` for all rows, is added to their places.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import strict, strict_helper
from fenchel.kernels.cpu.maps.places import count_nonzero, fill, list_nonzero

STRIP = 64
"""Columns of a table that ``scatter`` adds to at a time."""

_CLOSE = 4  # vectors of columns that are summed together


# Rows.


def as_integers(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same memory as 32-bit integers, where packed rows have their places."""
    return x.view(np.int32)


@strict_helper
def write_row(w: Any, count: int, index: Any, size: int, x: Any, slots: Any, row: int) -> Any:
    """Write weights over a row of scores: ``count`` candidates, or all of ``size`` if that is negative.

    Returns:
        how many are not zero, and whether the row is packed.
    """
    n, last = x.shape[1], slots.shape[1] - 1
    if count < 0:
        for i in range(0, size, vec.lanes(x)):
            vec.store_part(x, row * n + i, vec.load(w, i), min(vec.lanes(x), size - i))
        fill(x, row * n + size, n - size, 0.0)
        return count_nonzero(x, row * n, size), False
    if 2 * (count + 1) > n:
        fill(x, row * n, n, 0.0)
        for k in range(count):
            x[row, index[k]] = w[k]
        return count_nonzero(x, row * n, n), False
    found = 0
    for k in range(count):
        if w[k] > 0:
            x[row, found] = w[k]
            slots[row, last - found] = index[k]
            found += 1
    return found, True


@strict
def unpack_rows(first: int, last: int, x: Any, slots: Any, packed: Any, counts: Any) -> None:
    """Replace packed rows by rows with all their weights."""
    n, end = x.shape[1], slots.shape[1] - 1
    values, places = np.empty(n, x.dtype), np.empty(n, np.int32)
    for row in range(first, last):
        if packed[row]:
            for k in range(counts[row]):
                values[k], places[k] = x[row, k], slots[row, end - k]
            fill(x, row * n, n, 0.0)
            for k in range(counts[row]):
                x[row, places[k]] = values[k]


@strict
def copy_lists(first: int, last: int, x: Any, slots: Any, packed: Any, starts: Any, values: Any, places: Any) -> None:
    """Copy the entries of rows that are not zero to lists."""
    n, end = x.shape[1], slots.shape[1] - 1
    index = np.empty(n, np.int32)
    for row in range(first, last):
        start, count = starts[row], starts[row + 1] - starts[row]
        if packed[row]:
            for k in range(count):
                values[start + k], places[start + k] = x[row, k], slots[row, end - k]
        else:
            list_nonzero(x, row * n, n, index)
            for k in range(count):
                values[start + k], places[start + k] = x[row, index[k]], index[k]


# Lists.


@strict
def sort_by_place(starts: Any, places: Any, firsts: Any, bounds: Any, rows: Any, order: Any) -> None:
    """The transpose of lists: place j has the entries ``bounds[j]`` to ``bounds[j + 1]``, which are in these rows.

    ``order`` says which entry of the lists each of them is. ``bounds`` has two elements more than there are places.
    """
    bounds[:] = 0
    for row in range(starts.size - 1):
        head = firsts[row if firsts.size > 1 else 0]
        for i in range(starts[row], starts[row + 1]):
            bounds[head + places[i] + 2] += 1
    for j in range(2, bounds.size):
        bounds[j] += bounds[j - 1]
    for row in range(starts.size - 1):
        head = firsts[row if firsts.size > 1 else 0]
        for i in range(starts[row], starts[row + 1]):
            j = head + places[i] + 1
            rows[bounds[j]] = row
            order[bounds[j]] = i
            bounds[j] += 1


@strict
def combine(
    first: int, last: int, starts: Any, values: Any, places: Any, firsts: Any, table: Any, more: int, out: Any
) -> None:
    """The rows Σ value · table[place], which are added to ``out`` if ``more``."""
    width, lanes = table.shape[1], vec.lanes(table)
    close = _CLOSE * lanes
    for row in range(first, last):
        begin, end = starts[row], starts[row + 1]
        if more and begin == end:
            continue
        head = firsts[row if firsts.size > 1 else 0]
        for left in range(0, width - close + 1, close):
            _combine_columns(begin, end, values, places, head, table, left, more, out, row)
        for left in range(width // close * close, width, lanes):
            _combine_few_columns(begin, end, values, places, head, table, left, more, out, row)


@strict_helper
def _combine_columns(
    begin: int, end: int, values: Any, places: Any, head: int, table: Any, left: int, more: int, out: Any, row: int
) -> None:
    """_CLOSE vectors of columns."""
    width, lanes = table.shape[1], vec.lanes(table)
    to = row * width + left
    zero = vec.splat(table.dtype.type(0))
    a, b, c, d = zero, zero, zero, zero
    if more:
        a, b, c, d = (
            vec.load(out, to),
            vec.load(out, to + lanes),
            vec.load(out, to + 2 * lanes),
            vec.load(out, to + 3 * lanes),
        )
    for i in range(begin, end):
        k, value = (head + places[i]) * width + left, values[i]
        a = vec.fma(vec.load(table, k), value, a)
        b = vec.fma(vec.load(table, k + lanes), value, b)
        c = vec.fma(vec.load(table, k + 2 * lanes), value, c)
        d = vec.fma(vec.load(table, k + 3 * lanes), value, d)
    vec.store(out, to, a)
    vec.store(out, to + lanes, b)
    vec.store(out, to + 2 * lanes, c)
    vec.store(out, to + 3 * lanes, d)


@strict_helper
def _combine_few_columns(
    begin: int, end: int, values: Any, places: Any, head: int, table: Any, left: int, more: int, out: Any, row: int
) -> None:
    """One vector of columns, or the part of one that there is."""
    width = table.shape[1]
    size = min(vec.lanes(table), width - left)
    a = vec.splat(table.dtype.type(0))
    if more:
        a = vec.load_part(out, row * width + left, size, 0.0)
    for i in range(begin, end):
        a = vec.fma(vec.load_part(table, (head + places[i]) * width + left, size, 0.0), values[i], a)
    vec.store_part(out, row * width + left, a, size)


@strict
def scatter(first: int, last: int, bounds: Any, rows: Any, values: Any, table: Any, out: Any) -> None:
    """Add value · table[j] to the rows of the entries of each place j, some strips of columns; ``table`` is read once.

    Each strip adds in the order of the places, so that sums do not depend on the number of threads.
    """
    width, lanes = table.shape[1], vec.lanes(table)
    for j in range(bounds.size - 1):
        if bounds[j] == bounds[j + 1]:
            continue
        for left in range(first * STRIP, min(last * STRIP, width), lanes):
            size = min(lanes, width - left)
            source = vec.load_part(table, j * width + left, size, 0.0)
            for i in range(bounds[j], bounds[j + 1]):
                to = rows[i] * width + left
                vec.store_part(out, to, vec.fma(source, values[i], vec.load_part(out, to, size, 0.0)), size)


@strict
def dot_rows(
    first: int,
    last: int,
    starts: Any,
    places: Any,
    firsts: Any,
    left: Any,
    right: Any,
    factors: Any,
    more: Any,
    out: Any,
) -> None:
    """⟨left[row], right[place]⟩ · factor + more of every entry; without factors and more where these are empty."""
    width, lanes = left.shape[1], vec.lanes(left)
    zero = vec.splat(left.dtype.type(0))
    for row in range(first, last):
        head = firsts[row if firsts.size > 1 else 0]
        for i in range(starts[row], starts[row + 1]):
            at = (head + places[i]) * width
            total = zero
            for j in range(0, width - lanes + 1, lanes):
                total = vec.fma(vec.load(left, row * width + j), vec.load(right, at + j), total)
            rest = width % lanes
            if rest:
                j = width - rest
                a, b = vec.load_part(left, row * width + j, rest, 0.0), vec.load_part(right, at + j, rest, 0.0)
                total = vec.fma(a, b, total)
            dot = vec.sum_lanes(total)
            if factors.size > 0:
                dot *= factors[i]
            if more.size > 0:
                dot += more[i]
            out[i] = dot
