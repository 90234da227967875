"""Rows into vectors and back: narrow rows as lanes, one row as it is, or the candidates of a wide one.

Every reader leaves scores less their largest in ``z``, as ``newton`` takes them, and the maxima of groups of vectors in
``tops``. These are entries of the row, so that the level which they alone have is not above that of the row, and near
it: where the iteration begins, and what a candidate of a wide row must exceed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import strict_helper
from fenchel.kernels.cpu.maps.newton import GROUP, approach
from fenchel.kernels.cpu.maps.places import load_row_part
from fenchel.kernels.cpu.maps.stores import list_lanes_above
from fenchel.kernels.cpu.memory import allocate, release

NARROW_WIDTH = 2048
"""Up to this width as many rows as a vector has lanes are solved together, by ``batches``."""

_COARSE = 4 * GROUP  # vectors of maxima that are solved for a first level


@strict_helper
def padded(vectors: int) -> int:
    """A number of vectors, rounded up to whole groups."""
    return (vectors + GROUP - 1) // GROUP * GROUP


@strict_helper
def workspace(n: int, like: Any) -> Any:
    """Room for scores, weights, maxima and parameters of a row, on vector boundaries, and for places.

    ``release_workspace`` gives it back.
    """
    lanes = vec.lanes(like)
    size = padded((n + lanes - 1) // lanes)
    tops = 2 * padded(size // GROUP + GROUP)
    room = allocate((2 * size + tops + 4) * lanes, like.dtype)
    first, second, third = size * lanes, 2 * size * lanes, (2 * size + tops) * lanes
    return (room[:first], room[first:second], room[second:third], room[third:]), allocate(n + lanes, np.int32)


@strict_helper
def release_workspace(room: Any, index: Any) -> None:
    """Give back what ``workspace`` has made."""
    release(room[0])
    release(index)


@strict_helper
def load_row(x: Any, start: int, n: int, top: Any, z: Any) -> Any:
    """One row less a number, as whole groups; returns the number of vectors."""
    lanes = vec.lanes(x)
    for i in range(0, n, lanes):
        vec.store(z, i, load_row_part(x, start, i, n, x.dtype.type(-np.inf)) - top)
    return pad(z, (n + lanes - 1) // lanes)


@strict_helper
def row_maxima(x: Any, start: int, n: int, z: Any, tops: Any) -> Any:
    """The maxima of groups of one row; returns how many groups there are, the largest entry, and whether one is NaN."""
    lanes = vec.lanes(x)
    size = GROUP * lanes
    groups = n // size
    top, bad = group_maxima(x, start, groups * GROUP, tops)
    if groups * size < n:  # the last group is not whole
        load_row(x, start + groups * size, n - groups * size, 0.0, z)
        rest, worse = group_maxima(z, 0, GROUP, tops[groups * lanes :])
        groups, top, bad = groups + 1, vec.maximum(rest, top), bad | worse
    return groups, vec.max_everywhere(top), bad


@strict_helper
def filter_candidates(x: Any, start: int, n: int, top: Any, line: Any, tops: Any, groups: int, index: Any) -> Any:
    """List the entries of a row that can have mass; returns how many there are, −1 if these are many."""
    lanes = vec.lanes(x)
    size = GROUP * lanes
    count = 0
    for group in range(groups):
        if vec.any_lane(vec.load(tops, group * lanes) >= line):
            for i in range(group * size, min((group + 1) * size, n), lanes):
                v = load_row_part(x, start, i, n, x.dtype.type(-np.inf)) - top
                count += list_lanes_above(index, count, i, v, line)
            if count > n // 16 + group * size // 4:
                return -1
    return count


@strict_helper
def gather_candidates(x: Any, start: int, top: Any, index: Any, count: int, z: Any) -> Any:
    """Candidates less the largest score, as whole groups; returns the number of vectors."""
    lanes, largest = vec.lanes(x), vec.first_lane(top)
    for k in range(count):
        z[k] = x[start + index[k]] - largest
    m = (count + lanes - 1) // lanes
    for k in range(count, m * lanes):
        z[k] = -np.inf
    return pad(z, m)


@strict_helper
def group_maxima(x: Any, start: int, m: int, tops: Any) -> Any:
    """Lane by lane the maxima of groups of vectors, of all m vectors, and where there is a NaN."""
    lanes = vec.lanes(x)
    best = vec.splat(x.dtype.type(-np.inf))
    bad = best > best
    for group in range(m // GROUP):
        i = start + group * GROUP * lanes
        a, b, c, d = vec.load(x, i), vec.load(x, i + lanes), vec.load(x, i + 2 * lanes), vec.load(x, i + 3 * lanes)
        i += 4 * lanes
        e, f, g, h = vec.load(x, i), vec.load(x, i + lanes), vec.load(x, i + 2 * lanes), vec.load(x, i + 3 * lanes)
        bad = bad | (vec.unordered(a, b) | vec.unordered(c, d)) | (vec.unordered(e, f) | vec.unordered(g, h))
        top = vec.maximum(
            vec.maximum(vec.maximum(a, b), vec.maximum(c, d)), vec.maximum(vec.maximum(e, f), vec.maximum(g, h))
        )
        vec.store(tops, group * lanes, top)
        best = vec.maximum(top, best)
    return best, bad


@strict_helper
def shift(z: Any, m: int, top: Any) -> None:
    """z less the largest score of each row."""
    lanes = vec.lanes(z)
    for i in range(0, m * lanes, lanes):
        vec.store(z, i, vec.load(z, i) - top)


@strict_helper
def pad(z: Any, m: int) -> Any:
    """Fill up the last group after m vectors; returns how many there are then."""
    lanes = vec.lanes(z)
    nothing = vec.splat(z.dtype.type(-np.inf))
    for i in range(m * lanes, padded(m) * lanes, lanes):
        vec.store(z, i, nothing)
    return padded(m)


@strict_helper
def rough_level(tops: Any, m: int, across: bool, rule: Any, level: Any) -> Any:
    """A level that is not above that of the row: the one that m vectors of maxima have, roughly."""
    lanes = vec.lanes(tops)
    first = 0
    while m > _COARSE:
        m = pad(tops[first * lanes :], m)
        group_maxima(tops, first * lanes, m, tops[(first + m) * lanes :])
        first, m = first + m, m // GROUP
    found = tops[first * lanes :]
    m = pad(found, m)
    return approach(found, m, across, rule, level)
