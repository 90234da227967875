"""Rows of numbers: sums, products and maxima on explicit vectors, for active sets and trees.

Arrays are contiguous, and a row is given by the index of its first number. Each loop stands beside what it computes in
numpy, which is what runs while loops are interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import strict_helper

LANES = 8
"""Numbers in a vector: rows of scores have a multiple of it."""

_BLOCK = 4 * LANES
_BITS = 64


def _interpreted_as(plain: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Compile a loop that ``interpreted`` replaces by ``plain``."""

    def compile_loop(function: Callable[..., Any]) -> Any:
        compiled = strict_helper(function)
        compiled.plain = plain
        return compiled

    return compile_loop


def _plain_combine(weights: Any, rows: Any, at: int, stride: int, n: int, out: Any) -> None:
    block = rows.reshape(-1)[at : at + (n - 1) * stride + n]
    steps = (stride * block.itemsize, block.itemsize)
    out[:n] = weights[:n] @ np.lib.stride_tricks.as_strided(block, (n, n), steps)


@_interpreted_as(_plain_combine)
def combine(weights, rows, at, stride, n, out):  # type: ignore[no-untyped-def]
    """Write the sum of n rows of n numbers, ``stride`` apart, times weights (n,): the product with their matrix."""
    for start in range(0, n, _BLOCK):
        a = vec.splat(0.0)
        b, c, d = a, a, a
        left = n - start
        for i in range(n):
            weight, row = weights[i], at + i * stride + start
            a = vec.fma(vec.load_doubles(rows, row, left), weight, a)
            b = vec.fma(vec.load_doubles(rows, row + LANES, left - LANES), weight, b)
            c = vec.fma(vec.load_doubles(rows, row + 2 * LANES, left - 2 * LANES), weight, c)
            d = vec.fma(vec.load_doubles(rows, row + 3 * LANES, left - 3 * LANES), weight, d)
        vec.store_part(out, start, a, left)
        vec.store_part(out, start + LANES, b, left - LANES)
        vec.store_part(out, start + 2 * LANES, c, left - 2 * LANES)
        vec.store_part(out, start + 3 * LANES, d, left - 3 * LANES)


def _plain_dot(rows: Any, at: int, x: Any, n: int) -> float:
    return float(rows.reshape(-1)[at : at + n].astype(np.float64) @ x[:n])


@_interpreted_as(_plain_dot)
def dot(rows, at, x, n):  # type: ignore[no-untyped-def]
    """The inner product of the row at ``at`` and x (n,), in double precision."""
    total = vec.splat(0.0)
    for j in range(0, n, LANES):
        total = vec.fma(vec.load_doubles(rows, at + j, n - j), vec.load_doubles(x, j, n - j), total)
    return vec.sum_lanes(total)


def _plain_add_multiple(rows: Any, at: int, factor: float, v: Any, n: int) -> None:
    rows.reshape(-1)[at : at + n] += factor * v[:n]


@_interpreted_as(_plain_add_multiple)
def add_multiple(rows, at, factor, v, n):  # type: ignore[no-untyped-def]
    """Add a multiple of v (n,) to the row at ``at``."""
    for j in range(0, n, LANES):
        row = vec.fma(vec.load_doubles(v, j, n - j), factor, vec.load_doubles(rows, at + j, n - j))
        vec.store_part(rows, at + j, row, n - j)


def _plain_largest(rows: Any, at: int, width: int) -> int:
    row = rows.reshape(-1)[at : at + width]
    best = int(row.argmax())
    return best if row[best] > -np.inf else -1


@_interpreted_as(_plain_largest)
def largest(rows, at, width):  # type: ignore[no-untyped-def]
    """The first index of the largest number of the row at ``at``; −1 if all are −inf. ``width`` is whole vectors."""
    top = vec.load(rows, at)
    for j in range(at + LANES, at + width, LANES):
        top = vec.maximum(top, vec.load(rows, j))
    top = vec.max_everywhere(top)
    if not vec.first_lane(top) > -np.inf:
        return -1
    for start in range(0, width, _BITS):  # without a branch for each vector: it could not be predicted
        found = np.uint64(0)
        for j in range(start, min(start + _BITS, width), LANES):
            found |= vec.bits_of(vec.load(rows, at + j) == top) << np.uint64(j - start)
        if found != 0:
            return start + vec.lowest_bit(found)
    return -1


def _plain_copy(source: Any, at: int, n: int, rows: Any, to: int) -> None:
    flat = rows.reshape(-1)
    flat[to : to + n] = source.reshape(-1)[at : at + n]
    flat[to + n : to + (n + LANES - 1) // LANES * LANES] = -np.inf


@_interpreted_as(_plain_copy)
def copy(source, at, n, rows, to):  # type: ignore[no-untyped-def]
    """Copy n numbers to the row at ``to``, and fill it up to whole vectors with −inf."""
    for j in range(0, n, LANES):
        vec.store(rows, to + j, vec.load_part(source, at + j, n - j, -np.inf))


def _plain_merge(rows: Any, u: int, a: float, v: int, b: float, to: int, width: int) -> None:
    flat = rows.reshape(-1)
    np.maximum(flat[u : u + width] - a, flat[v : v + width] - b, out=flat[to : to + width])


@_interpreted_as(_plain_merge)
def merge(rows, u, a, v, b, to, width):  # type: ignore[no-untyped-def]
    """Write the larger of the row at u less a and the row at v less b, number by number, to the row at ``to``."""
    for j in range(0, width, LANES):
        vec.store(rows, to + j, vec.maximum(vec.load(rows, u + j) - a, vec.load(rows, v + j) - b))
