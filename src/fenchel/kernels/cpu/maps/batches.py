"""Narrow rows, as many at a time as a vector has lanes.

What every entry of a row takes (the largest score, the choice of candidates, the result) is done row by row, as the
scores stand in memory. What a row has one of (its largest score, its level) stands in a lane, and so do the candidates
while the level is sought: these few alone are transposed. Sums need not cross lanes, and a branch is taken for all rows
at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import overload

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import INLINED, strict_helper
from fenchel.kernels.cpu.maps.blocks import padded, shift
from fenchel.kernels.cpu.maps.newton import GROUP, approach, corrected, solve, to_correct, weights
from fenchel.kernels.cpu.maps.parameters import offset_of, reach_of, rule_of
from fenchel.kernels.cpu.maps.places import fill, load_row_part
from fenchel.kernels.cpu.maps.steep import solve_steep
from fenchel.kernels.cpu.maps.stores import compress_above, is_streamed, put
from fenchel.kernels.cpu.memory import allocate

_TOPS = 4  # vectors of maxima per row
_FEW = 128  # up to this width, one
_WHOLE = 2  # rows of up to so many vectors are transposed as they are

# Vectors of numbers, one per row: the rule (3), the level to start from, largest scores, levels, their fine parts,
# factors, marks of bad rows.
_TOP, _LEVEL, _FINE, _FACTOR, _MARK, _NUMBERS = 4, 5, 6, 7, 8, 9

LEFT_OUT = -2
"""In place of the class of a row whose gradient is 0."""


@strict_helper
def batch_room(n: int, like: Any) -> Any:
    """Room for candidates as lanes, for their weights, for maxima, for candidates as rows, for numbers, for classes.

    The first part is to be released.
    """
    lanes = vec.lanes(like)
    stride = (n + 2 * lanes) // lanes * lanes
    square, tops = stride * lanes, _TOPS * lanes * lanes
    room = allocate(3 * square + 2 * tops + (_NUMBERS + 2) * lanes, like.dtype)
    second, third, fourth = square, 2 * square, 2 * square + 2 * tops
    fifth = fourth + square
    sixth = fifth + _NUMBERS * lanes
    for k in range(lanes):
        room[sixth + lanes + k] = k
    return room[:second], room[second:third], room[third:fourth], room[fourth:fifth], room[fifth:sixth], room[sixth:]


@strict_helper
def solve_batch(x: Any, row: int, rows: int, powers: Any, norm: bool, room: Any) -> Any:
    """The levels of ``rows`` rows from ``row`` on, left in the room for ``store_batch``, and their candidates.

    Returns:
        the number of vectors of candidates, largest scores, the rule of the rows, the offsets A of their levels.
    """
    z, w, tops, few, numbers = room[:5]
    n, lanes = x.shape[1], vec.lanes(x)
    rule, level = rule_of(powers, row, rows, norm, numbers)
    largest = tops[_TOPS * lanes * lanes :]
    whole = n <= _WHOLE * lanes
    if whole:
        size, m = GROUP, _load_whole(x, row, rows, z, largest, numbers)
    else:
        size, m = _load_maxima(x, row, rows, tops, numbers), 0
    top, bad, safe = _largest(largest, size, numbers)
    shift(largest, size, safe)
    level = approach(largest, size, False, rule, level)
    vec.store(numbers, _TOP * lanes, safe)
    vec.store(numbers, _LEVEL * lanes, reach_of(rule, level))
    if whole:
        shift(z, m, safe)
    else:
        m = padded(_load_candidates(x, row, rows, few, numbers, z))
    level = approach(z, m, False, rule, level)
    level, fine, total, slope = solve(z, m, False, rule, not norm, level, vec.precision(z), w)
    vec.store(numbers, _MARK * lanes, vec.select(bad, np.nan, safe * 0.0))
    vec.store(numbers, _LEVEL * lanes, level)
    vec.store(numbers, _FINE * lanes, fine_part(rule, fine, total, slope))
    if norm:
        vec.store(numbers, _FACTOR * lanes, vec.narrow(1.0 / vec.select(slope > 0.0, slope, 1.0), level))
    return m, top, bad, rule, vec.widen(fine) + offset_of(rule, level)


@strict_helper
def _largest(z: Any, size: int, numbers: Any) -> Any:
    """The largest score of each row out of ``size`` vectors, which rows have NaN or +inf, and what is taken off scores.

    That is such that rows with NaN or +inf, and empty ones, become rows without any entry.
    """
    lanes = vec.lanes(z)
    top = vec.splat(z.dtype.type(-np.inf))
    for i in range(0, size * lanes, lanes):
        top = vec.maximum(vec.load(z, i), top)
    mark = vec.load(numbers, _MARK * lanes)
    bad = vec.unordered(mark, mark) | (top == np.inf)
    return top, bad, vec.select(bad, np.inf, vec.select(top > -np.inf, top, 0.0))


@strict_helper
def solve_steep_batch(x: Any, row: int, rows: int, c: float, room: Any) -> Any:
    """The probabilities of the candidates of ``rows`` rows for c > 1, left in the room for ``store_steep_batch``.

    Returns:
        the largest scores, which rows have NaN or +inf, and max_Ω less the largest scores.
    """
    z, w, tops, few, numbers = room[:5]
    lanes = vec.lanes(x)
    size = _load_maxima(x, row, rows, tops, numbers)
    top, bad, safe = _largest(tops[_TOPS * lanes * lanes :], size, numbers)
    vec.store(numbers, _TOP * lanes, safe)
    # Scores at the line itself have no mass; at c = ∞ the largest are above it.
    vec.store(numbers, _LEVEL * lanes, top * 0.0 - vec.splat(x.dtype.type(max(1.0 / c, 1e-37))))
    m = _load_candidates(x, row, rows, few, numbers, z)
    value = solve_steep(z, m, False, c, w)
    vec.store(numbers, _MARK * lanes, vec.select(bad, np.nan, safe * 0.0))
    for i in range(0, m * lanes, lanes * lanes):
        vec.store_square(w, i, few, i // lanes, few.size // lanes)
    return top, bad, value


@strict_helper
def store_steep_batch(x: Any, row: int, rows: int, room: Any, out: Any) -> None:
    """Write the result of ``solve_steep_batch``."""
    few, numbers = room[3:5]
    n, lanes = x.shape[1], vec.lanes(x)
    kind = x.dtype.type
    for r in range(rows):
        if numbers[_MARK * lanes + r] != numbers[_MARK * lanes + r]:
            out[row + r, :] = kind(np.nan)
            continue
        fill(out, (row + r) * n, n, 0.0)
        top, line = vec.splat(numbers[_TOP * lanes + r]), vec.splat(numbers[_LEVEL * lanes + r])
        place = r * (few.size // lanes)
        for i in range(0, n, lanes):
            v = load_row_part(x, (row + r) * n, i, n, kind(-np.inf)) - top
            found = vec.bits_of(v > line)
            while found != 0:
                out[row + r, i + vec.lowest_bit(found)] = few[place]
                place += 1
                found &= found - np.uint64(1)


@strict_helper
def store_steep_residuals(x: Any, row: int, rows: int, room: Any, rate: Any, out: Any) -> None:
    """Write rate·(p − y) of ``solve_steep_batch`` with the classes in the room; 0 where one is left out."""
    few, numbers, labels = room[3:]
    n, lanes = x.shape[1], vec.lanes(x)
    kind = x.dtype.type
    for r in range(rows):
        label = int(labels[r])
        marked = numbers[_MARK * lanes + r]
        if label == LEFT_OUT or marked != marked:
            fill(out, (row + r) * n, n, 0.0 if label == LEFT_OUT else np.nan)
            continue
        fill(out, (row + r) * n, n, 0.0)
        if label >= 0:
            out[row + r, label] = -rate
        top, line = vec.splat(numbers[_TOP * lanes + r]), vec.splat(numbers[_LEVEL * lanes + r])
        place = r * (few.size // lanes)
        for i in range(0, n, lanes):
            v = load_row_part(x, (row + r) * n, i, n, kind(-np.inf)) - top
            found = vec.bits_of(v > line)
            while found != 0:
                j = i + vec.lowest_bit(found)
                out[row + r, j] = (few[place] - kind(1 if j == label else 0)) * rate
                place += 1
                found &= found - np.uint64(1)


@strict_helper
def _load_whole(x: Any, row: int, rows: int, z: Any, largest: Any, numbers: Any) -> Any:
    """All scores of each row as lanes, −inf after them, maxima of parts, and NaN as the mark of rows that have one.

    Returns:
        the number of vectors.
    """
    n, lanes = x.shape[1], vec.lanes(x)
    nothing = vec.splat(x.dtype.type(-np.inf))
    for i in range(0, n, lanes):
        if (row + lanes) * n + lanes <= x.size:  # what follows the rows may be read
            vec.load_square(x, row * n + i, n, z, i * lanes)
        else:
            part = min(lanes, n - i)
            vec.load_square_part(x, row * n + i, n, rows, part, x.dtype.type(-np.inf), z, i * lanes)
    m = padded(n)
    for i in range(n * lanes, m * lanes, lanes):
        vec.store(z, i, nothing)
    mark = vec.splat(x.dtype.type(0))
    for j in range(GROUP):
        top = nothing
        for i in range(j * lanes, m * lanes, GROUP * lanes):
            v = vec.load(z, i)
            mark = vec.select(vec.unordered(v, v), v, mark)
            top = vec.maximum(v, top)
        vec.store(largest, j * lanes, top)
    vec.store(numbers, _MARK * lanes, mark)
    return m


@strict_helper
def _load_maxima(x: Any, row: int, rows: int, tops: Any, numbers: Any) -> Any:
    """Maxima of parts of each row, as lanes in the second half of ``tops``, and NaN as the mark of rows that have one.

    Returns:
        the number of vectors.
    """
    n, lanes = x.shape[1], vec.lanes(x)
    kind = x.dtype.type
    nothing = vec.splat(kind(-np.inf))
    count = 1 if n <= _FEW else _TOPS
    for r in range(lanes):
        a, b, c, d = nothing, nothing, nothing, nothing
        bad = a > a
        if r < rows:
            i = (row + r) * n
            end = i + n
            while i + 4 * lanes <= end:
                e, f = vec.load(x, i), vec.load(x, i + lanes)
                g, h = vec.load(x, i + 2 * lanes), vec.load(x, i + 3 * lanes)
                bad = bad | vec.unordered(e, f) | vec.unordered(g, h)
                a, b, c, d = vec.maximum(e, a), vec.maximum(f, b), vec.maximum(g, c), vec.maximum(h, d)
                i += 4 * lanes
            while i + lanes <= end:
                e = vec.load(x, i)
                bad = bad | vec.unordered(e, e)
                a = vec.maximum(e, a)
                i += lanes
            if i < end:
                e = vec.load_part(x, i, end - i, kind(-np.inf))
                bad = bad | vec.unordered(e, e)
                b = vec.maximum(e, b)
        numbers[_MARK * lanes + r] = kind(np.nan) if vec.any_lane(bad) else kind(0)
        if count == 1:
            vec.store(tops, r * lanes, vec.maximum(vec.maximum(a, b), vec.maximum(c, d)))
        else:
            i = r * _TOPS * lanes
            vec.store(tops, i, a)
            vec.store(tops, i + lanes, b)
            vec.store(tops, i + 2 * lanes, c)
            vec.store(tops, i + 3 * lanes, d)
    after = _TOPS * lanes * lanes
    for i in range(count):
        vec.load_square(tops, i * lanes, count * lanes, tops, after + i * lanes * lanes)
    return count * lanes


@strict_helper
def _load_candidates(x: Any, row: int, rows: int, few: Any, numbers: Any, z: Any) -> Any:
    """Scores less the largest of their row that are above its level, as lanes; returns the number of vectors.

    After them there is −inf up to the end of a group.
    """
    n, lanes = x.shape[1], vec.lanes(x)
    kind = x.dtype.type
    nothing = vec.splat(kind(-np.inf))
    stride = few.size // lanes
    most = 0
    for r in range(rows):
        top, line = vec.splat(numbers[_TOP * lanes + r]), vec.splat(numbers[_LEVEL * lanes + r])
        place = r * stride
        i = (row + r) * n
        end = i + n
        while i + lanes <= end:
            place += compress_above(few, place, vec.load(x, i) - top, line)
            i += lanes
        if i < end:
            place += compress_above(few, place, vec.load_part(x, i, end - i, kind(-np.inf)) - top, line)
        numbers[_FACTOR * lanes + r] = place - r * stride
        most = max(most, place - r * stride)
    size = (most + lanes - 1) // lanes * lanes
    for r in range(lanes):
        count = int(numbers[_FACTOR * lanes + r]) if r < rows else 0
        for i in range(count, size, lanes):
            vec.store(few, r * stride + i, nothing)
    for i in range(0, size, lanes):
        vec.load_square(few, i, stride, z, i * lanes)
    return most


@strict_helper
def store_batch(x: Any, row: int, rows: int, rule: Any, norm: bool, room: Any, out: Any) -> None:
    """Write the result of ``solve_batch``."""
    n, lanes = x.shape[1], vec.lanes(x)
    kind = x.dtype.type
    numbers = room[4]
    streamed = is_streamed(out, n)
    for r in range(rows):
        if numbers[_MARK * lanes + r] != numbers[_MARK * lanes + r]:
            out[row + r, :] = kind(np.nan)
            continue
        top, factor = vec.splat(numbers[_TOP * lanes + r]), vec.splat(numbers[_FACTOR * lanes + r])
        level, fine = vec.splat(numbers[_LEVEL * lanes + r]), vec.splat(numbers[_FINE * lanes + r])
        mine = rule_at(rule, numbers, r)
        i = (row + r) * n
        end = i + n
        while i + lanes <= end:
            p = result(mine, norm, vec.load(x, i) - top, level, fine)
            put(out, i, p * factor if norm else p, streamed)
            i += lanes
        if i < end:
            p = result(mine, norm, vec.load_part(x, i, end - i, kind(-np.inf)) - top, level, fine)
            vec.store_part(out, i, p * factor if norm else p, end - i)


@strict_helper
def store_residuals(x: Any, row: int, rows: int, rule: Any, norm: bool, room: Any, rate: Any, out: Any) -> None:
    """Write rate·(p − y) of ``solve_batch`` with the classes in the room; 0 where one is left out."""
    n, lanes = x.shape[1], vec.lanes(x)
    kind = x.dtype.type
    numbers, labels = room[4:]
    streamed = is_streamed(out, n)
    places = vec.load(labels, lanes)
    for r in range(rows):
        label, marked = labels[r], numbers[_MARK * lanes + r]
        if label == LEFT_OUT or marked != marked:
            out[row + r, :] = kind(0.0 if label == LEFT_OUT else np.nan)
            continue
        top, factor = vec.splat(numbers[_TOP * lanes + r]), vec.splat(numbers[_FACTOR * lanes + r])
        level, fine = vec.splat(numbers[_LEVEL * lanes + r]), vec.splat(numbers[_FINE * lanes + r])
        mine = rule_at(rule, numbers, r)
        start = (row + r) * n
        for i in range(0, n, lanes):
            p = result(mine, norm, load_row_part(x, start, i, n, kind(-np.inf)) - top, level, fine)
            p = p * factor if norm else p
            p = (p - vec.select(places == label - kind(i), 1.0, p * 0.0)) * rate
            if i + lanes <= n:
                put(out, start + i, p, streamed)
            else:
                vec.store_part(out, start + i, p, n - i)


def fine_part(rule: Any, fine: Any, total: Any, slope: Any) -> Any:
    """What ``result`` takes beside the level: for a rule with logarithms the share of ``newton``'s correction."""
    raise NotImplementedError("for compiled code")


@overload(fine_part, strict=False, jit_options=INLINED)
def _fine_part(rule: Any, fine: Any, total: Any, slope: Any) -> Any:
    if len(rule) < 3:
        return lambda rule, fine, total, slope: fine
    return lambda rule, fine, total, slope: vec.narrow((total - 1.0) / vec.maximum(slope, 1e-300), fine)


def rule_at(rule: Any, numbers: Any, r: int) -> Any:
    """The rule of one row in every lane."""
    raise NotImplementedError("for compiled code")


@overload(rule_at, strict=False, jit_options=INLINED)
def _rule_at(rule: Any, numbers: Any, r: Any) -> Any:
    return _logarithms_at if len(rule) == 3 else lambda rule, numbers, r: rule


def _logarithms_at(rule: Any, numbers: Any, r: int) -> Any:
    lanes = vec.lanes(numbers)
    return vec.splat(numbers[r]), vec.splat(numbers[lanes + r]), vec.splat(numbers[2 * lanes + r])


def result(rule: Any, norm: bool, z: Any, level: Any, fine: Any) -> Any:
    """p of one vector as ``newton.solve`` computes it, for normmax w."""
    raise NotImplementedError("for compiled code")


@overload(result, strict=False, jit_options=INLINED)
def _result(rule: Any, norm: Any, z: Any, level: Any, fine: Any) -> Any:
    return _result_by_logarithms if len(rule) == 3 else _result_without_logarithms


def _result_without_logarithms(rule: Any, norm: bool, z: Any, level: Any, fine: Any) -> Any:
    w, p = weights(rule, z, level, fine)
    return w if norm else p


def _result_by_logarithms(rule: Any, norm: bool, z: Any, level: Any, fine: Any) -> Any:
    if not vec.any_lane(z > reach_of(rule, level)):
        return vec.maximum(level * 0.0, 0.0)
    w, p = weights(rule, z, level, fine)
    if norm:
        return w
    return corrected(rule, to_correct(rule, w, p), rule[2] + rule[0] * (z - level), fine)
