"""One row into vectors: as it is, or the candidates of a wide one.

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
from fenchel.kernels.cpu.maps.parameters import reach_of

NARROW_WIDTH = 512
"""Up to this width as many rows as a vector has lanes are solved together, by ``batches``."""

FILTERED_WIDTH = 513
"""From this width on a row is filtered before it is solved, if few entries are left."""

_COARSE = 4 * GROUP  # vectors of maxima that are solved for a first level


@strict_helper
def padded(vectors: int) -> int:
    """A number of vectors, rounded up to whole groups."""
    return (vectors + GROUP - 1) // GROUP * GROUP


@strict_helper
def workspace(n: int, like: Any) -> Any:
    """Room for scores, weights, maxima and parameters of a row, on vector boundaries, and for places."""
    lanes = vec.lanes(like)
    size = padded((n + lanes - 1) // lanes)
    tops = 2 * padded(size // GROUP + GROUP)
    room = np.empty((2 * size + tops + 5) * lanes, like.dtype)
    room = room[vec.to_boundary(room) :]
    first, second, third = size * lanes, 2 * size * lanes, (2 * size + tops) * lanes
    index = np.empty(n if n >= FILTERED_WIDTH else 0, np.int32)
    return (room[:first], room[first:second], room[second:third], room[third:]), index


@strict_helper
def load_row(x: Any, row: int, z: Any) -> Any:
    """One row as it is; returns the number of vectors."""
    n, lanes = x.shape[1], vec.lanes(x)
    whole = n // lanes * lanes
    for i in range(0, whole, lanes):
        vec.store(z, i, vec.load(x, row * n + i))
    m = padded((n + lanes - 1) // lanes)
    for i in range(whole, m * lanes):
        z[i] = x[row, i] if i < n else -np.inf
    return m


@strict_helper
def load_candidates(x: Any, row: int, rule: Any, level: Any, z: Any, tops: Any, index: Any) -> Any:
    """Those entries of a wide row that can have mass, and where they stand.

    Returns:
        the number of vectors and of candidates, the largest score, and the level to start from; −1 in place of the
        number of candidates if many are left, or if the row has NaN or infinity.
    """
    n, lanes = x.shape[1], vec.lanes(x)
    size = GROUP * lanes
    groups = n // size
    top, bad = group_maxima(x, row * n, groups * GROUP, tops)
    for i in range(size):  # the last group is not whole
        place = groups * size + i
        z[i] = x[row, place] if place < n else -np.inf
    rest, worse = group_maxima(z, 0, GROUP, tops[groups * lanes :])
    top, bad = vec.max_everywhere(vec.maximum(top, rest)), bad | worse
    if vec.any_lane(bad | (top == np.inf) | (top == -np.inf)):
        return 0, -1, top, level
    groups += 1
    shift(tops, groups, top)
    level = rough_level(tops, groups, True, rule, level)
    line, largest = vec.first_lane(reach_of(rule, level)), vec.first_lane(top)
    most = n // 4
    count = 0
    for group in range(groups):
        if vec.any_lane(vec.load(tops, group * lanes) > line):
            if count > most:
                return 0, -1, top, level
            for i in range(group * size, min(group * size + size, n), lanes):
                if i + lanes <= n:
                    found = vec.bits_of((vec.load(x, row * n + i) - top) > line)
                    while found != 0:
                        place = i + vec.lowest_bit(found)
                        index[count] = place
                        z[count] = x[row, place] - largest
                        count += 1
                        found &= found - np.uint64(1)
                else:
                    for place in range(i, n):
                        if x[row, place] - largest > line:
                            index[count] = place
                            z[count] = x[row, place] - largest
                            count += 1
    if count > most:
        return 0, -1, top, level
    m = padded((count + lanes - 1) // lanes)
    for i in range(count, m * lanes):
        z[i] = -np.inf
    return m, count, top, level


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
