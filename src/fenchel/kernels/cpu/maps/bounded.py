"""Rows with bounds and a budget: p = min([z − τ]₊, u) with Σp = k, and derivatives, also those of the capped softmax.

A few passes over the row (Newton, false position or bisection) bracket τ; wide rows start from the τ of a sample. The
entries that are free somewhere in the bracket are then collected, and scores are taken relative to the one nearest to
τ, which keeps all digits near τ. There p is linear between breakpoints, so that the last step is exact. Rows on which
this fails, with scores of very different sizes, are solved by sorting.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import helper, kernel, strict_helper
from fenchel.kernels.cpu.maps.places import extremes, list_places, load_row_part
from fenchel.kernels.cpu.maps.simplex import as_rows, each, like
from fenchel.kernels.cpu.threads import over_rows

_WIDE = 1024  # rows wider than this start from a sample …
_SAMPLE = 64  # … of at least so many entries, …
_SPARSE = 16  # … and at least one entry of so many
_START = -0.5  # the first τ, relative to the largest score
_PASSES = 16  # at most, over a whole row, until …
_FEW = 32  # … at most so many entries are undecided, or one of so many
_ROUNDS = 3  # at most, of choosing the score that others are taken relative to
_TURNS = 100  # at most, over collected entries; a few are enough but for adversarial rows
_VECTOR = 32  # entries that a loop processes at a time
_CHUNK = 256  # entries that are summed in the row's own precision before the sum is added in double precision


# -- on tensors -------------------------------------------------------------------------------------------


def project(z: Tensor, upper: float | Tensor, budget: float | Tensor) -> Tensor:
    """Project rows z (…, n) on 0 ≤ p ≤ upper with sum ``budget``."""
    x, out = as_rows(z), like(z)
    over_rows(_project, len(x), x.size, x, bounds_of_rows(upper, x), each(budget, len(x)), as_rows(out))
    return out


def product(v: Tensor, z: Any, p: Tensor, upper: float | Tensor, budget: float | Tensor) -> Tensor:
    """Multiply v by the Jacobian of the projection, given its result p."""
    return _times_jacobian(v, p, upper, False)


def entropic_product(v: Tensor, z: Any, p: Tensor, upper: float | Tensor, budget: float | Tensor) -> Tensor:
    """Multiply v by the Jacobian of the capped softmax, given its result p."""
    return _times_jacobian(v, p, upper, True)


def _times_jacobian(v: Tensor, p: Tensor, upper: float | Tensor, entropic: bool) -> Tensor:
    q, out = as_rows(p), like(p)
    over_rows(_product, len(q), q.size, q, bounds_of_rows(upper, q), as_rows(v), as_rows(out), entropic)
    return out


def pull(v: Tensor, z: Tensor, p: Tensor, upper: float | Tensor, budget: float | Tensor) -> tuple[Tensor, ...]:
    """Multiply v by the derivatives of the projection p of z, in z, bounds and budget."""
    return _times_derivatives(v, z, p, upper, False)


def entropic_pull(v: Tensor, z: Tensor, p: Tensor, upper: float | Tensor, budget: float | Tensor) -> tuple[Tensor, ...]:
    """Multiply v by the derivatives of the capped softmax p of z, in z, bounds and budget."""
    return _times_derivatives(v, z, p, upper, True)


def _times_derivatives(v: Tensor, z: Tensor, p: Tensor, upper: float | Tensor, entropic: bool) -> tuple[Tensor, ...]:
    q, to_z, to_upper, to_budget = as_rows(p), like(p), like(p), like(p[..., :1])
    arrays = (as_rows(z), q, bounds_of_rows(upper, q), as_rows(v), as_rows(to_z), as_rows(to_upper), as_rows(to_budget))
    over_rows(_pull, len(q), q.size, *arrays, entropic)
    return to_z, to_upper, to_budget


def bound_sums(z: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Count the bounds of unmasked entries that are negative or NaN, and sum these bounds: one value each per row."""
    x = as_rows(z)
    wrong, total = np.empty(len(x)), np.empty(len(x))
    over_rows(_bound_sums, len(x), x.size, x, bounds_of_rows(upper, x), wrong, total)
    return torch.from_numpy(wrong).reshape(z.shape[:-1]), torch.from_numpy(total).reshape(z.shape[:-1])


def bounds_of_rows(upper: float | Tensor, x: Any) -> Any:
    """Lay out bounds as rows, (rows, n), or (1, n) if all rows share them."""
    if not isinstance(upper, Tensor):
        return np.full((1, x.shape[1]), upper, dtype=x.dtype)
    upper = upper.detach()
    shared = all(size == 1 or stride == 0 for size, stride in zip(upper.shape[:-1], upper.stride()[:-1], strict=True))
    if shared and x.shape[0]:
        upper = upper[(0,) * (upper.dim() - 1)]
    return as_rows(upper if upper.dim() > 1 else upper.unsqueeze(0))


# -- on arrays --------------------------------------------------------------------------------------------


@helper
def _sums(z: Any, u: Any, t: Any) -> tuple[Any, Any, Any]:
    """Sums over one chunk at the threshold t: Σ min([z − t]₊, u), and how many terms are free, and positive.

    Terms are free strictly between 0 and their bounds.
    """
    # Here and below: loops over a slice of its own vectorise, loops from one index to another may not.
    one, zero = z.dtype.type(1), z.dtype.type(0)
    s, k, a = zero, zero, zero
    for i in range(z.size):
        d, b = z[i] - t, u[i]
        on = one if d > zero else zero
        a += on
        k += on * (one if d < b else zero)
        c = d if d > zero else zero
        s += b if b < c else c
    return s, k, a


@helper
def _sums_apart(z: Any, u: Any, t: Any) -> tuple[Any, Any, Any]:
    """Sums over one chunk at the threshold t: of the free terms, how many these are, and of the terms at their bounds.

    In one sum the rounding error of many bounds would hide the free terms.
    """
    one, zero = z.dtype.type(1), z.dtype.type(0)
    s, k, c = zero, zero, zero
    for i in range(z.size):
        d, b = z[i] - t, u[i]
        on = (one if d > zero else zero) * (one if d < b else zero)
        k += on
        s += d if on > zero else zero
        c += b if d >= b else zero
    return s, k, c


@helper
def _masses(z: Any, u: Any, n: int, t: Any, apart: bool) -> tuple[float, float, float]:
    """Add ``_sums``, or ``_sums_apart``, over the chunks of the first n entries."""
    mass, size, other = 0.0, 0.0, 0.0
    for first in range(0, n, _CHUNK):
        last = min(first + _CHUNK, n)
        zs, us = z[first:last], u[first:last]
        s, k, a = _sums_apart(zs, us, t) if apart else _sums(zs, us, t)
        mass += s
        size += k
        other += a
    return mass, size, other


@helper
def _search(
    z: Any,
    u: Any,
    n: int,
    base: float,
    k: float,
    t: Any,
    low: float,
    high: float,
    slack: float,
    turns: int,
    few: int,
) -> tuple[Any, Any, float, float, bool, float, float]:
    """Find the threshold τ with base + Σ min([z − τ]₊, u) = k, by Newton, false position or bisection.

    Stops when at most ``few`` entries are undecided, or at the exact τ if ``few`` is 0, or after ``turns`` turns.
    Returns τ in a coarse and a fine part, the slope of the mass, the mean of the free entries, whether τ is exact, and
    the bracket of τ.
    """
    kind = z.dtype.type
    eps = 1.2e-7 if z.itemsize == 4 else 2.2e-16
    over, under, before = 0.0, 0.0, math.inf
    stride, method, slope, mean = 0.5, 0, 0.0, math.inf
    above_low, full_high = float(n), 0.0
    for _ in range(turns):
        mass, size, other = _masses(z, u, n, t, few == 0)
        full, above = (other, 0.0) if few == 0 else (0.0, other)
        excess = base + full + mass - k
        step = excess / size if size > 0.0 else 0.0
        mean = mass / size if size > 0.0 else math.inf
        if excess > 0.0:
            low, over, above_low = np.float64(t), excess, above
        else:
            high, under, full_high = np.float64(t), excess, above - size
        slope = (over - under) / (high - low) if over > 0.0 and under < 0.0 else 0.0
        if abs(excess) <= slack or (size > 0.0 and abs(step) <= eps * max(abs(t), mean)):
            return t, kind(step), slope, mean, True, low, high
        if few > 0 and above_low - full_high <= few:
            return t, kind(0), slope, mean, False, low, high
        method = 0 if abs(excess) < 0.5 * before else method + 1
        before = abs(excess)
        new = t + step
        if few > 0 and 2.0 * size < slope:  # a staircase in τ, smooth from afar: both sides of the root of its chord
            new = low + (high - low) * (over / (over - under) + (0.1 if excess > 0.0 else -0.1))
        elif method > 0 or size == 0.0 or not low < new < high:
            if low == -np.inf or high == np.inf:
                new = t + (stride if excess > 0.0 else -stride)
                stride *= 4.0
            elif method % 2 == 1 and over > 0.0 and under < 0.0:
                new = low + (high - low) * (over / (over - under))
            else:
                new = 0.5 * (low + high)
        nearest = kind(new)
        if not low <= nearest <= high:
            nearest = kind(0.5 * (low + high))
        if nearest == t:  # there is no finer τ, so what is missing has to be as small
            return t, kind(step), slope, mean, size > 0.0 and abs(step) <= 4 * eps * max(abs(t), mean), low, high
        t = nearest
    return t, kind(0), slope, mean, False, low, high


@helper
def _padded(count: int) -> int:
    """``count`` rounded up to whole vectors."""
    return (count + _VECTOR - 1) // _VECTOR * _VECTOR


@helper
def _collect(x: Any, z: Any, u: Any, low: Any, high: Any, index: Any, some_x: Any, some_u: Any) -> tuple[int, float]:
    """Copy the undecided entries: above 0 at ``low`` and below their bounds at ``high``.

    Returns how many there are, and the sum of the bounds that are reached at ``high``.
    """
    n, zero = z.size, z.dtype.type(0)
    base = 0.0
    for first in range(0, n, _CHUNK):
        zs, us = z[first : min(first + _CHUNK, n)], u[first : min(first + _CHUNK, n)]
        full = zero
        for i in range(zs.size):
            d, b = zs[i] - high, us[i]
            full += zero if d < b else b
        base += full
    count = _list_undecided(z, u, low, high, index)
    for i in range(count):
        some_x[i], some_u[i] = x[index[i]], u[index[i]]
    for i in range(count, _padded(count)):  # whole vectors: entries of −inf have no mass at any τ
        some_x[i], some_u[i] = -np.inf, 1
    return count, base


@strict_helper
def _list_undecided(z: Any, u: Any, low: Any, high: Any, index: Any) -> int:
    """List the places with z > low and z − high < u; returns how many there are."""
    n, count = z.size, 0
    for i in range(0, n, vec.lanes(z)):
        v, bound = load_row_part(z, 0, i, n, z.dtype.type(-np.inf)), load_row_part(u, 0, i, n, z.dtype.type(0))
        count = list_places(vec.bits_of((v > low) & ((v - high) < bound)), i, index, count)
    return count


@helper
def _ranked(keys: Any) -> Any:
    """Return the order that sorts keys upwards, by Shell's method: NumPy's takes longer to compile."""
    order = np.arange(keys.size)
    gap = keys.size
    while gap > 1:
        gap = max(1, gap * 5 // 11)
        for i in range(gap, keys.size):
            moved, j = order[i], i
            while j >= gap and keys[order[j - gap]] > keys[moved]:
                order[j] = order[j - gap]
                j -= gap
            order[j] = moved
    return order


@helper
def _sorted_projection(x: Any, u: Any, k: float, out: Any) -> None:
    """Project one row by sorting: find the smallest entry of the support, then which bounds are met, in their order."""
    n = x.size
    order = _ranked(-x.astype(np.float64))
    low, high = 0, n - 1
    while low < high:
        middle = (low + high + 1) // 2
        pivot = x[order[middle]]
        mass = math.inf
        if pivot > -np.inf:
            mass = 0.0
            for j in range(middle):
                mass += min(x[order[j]] - pivot, u[order[j]])
        if mass < k:
            low = middle
        else:
            high = middle - 1
    size = low + 1
    pivot = x[order[low]]
    d, bound = np.empty(size), np.empty(size)
    for j in range(size):
        d[j], bound[j] = x[order[j]] - pivot, u[order[j]]
    slack = bound - d
    ranks = _ranked(slack)
    low, high = -1, size - 1
    while low < high:
        middle = (low + high + 1) // 2
        reached = max(slack[ranks[middle]], 0.0)
        mass = 0.0
        for j in range(size):
            mass += min(d[j] + reached, bound[j])
        if mass < k:
            low = middle
        else:
            high = middle - 1
    reached = max(slack[ranks[low]], 0.0) if low >= 0 else 0.0
    free, rest = 0, k
    for j in range(size):
        on = slack[j] > reached
        free += 1 if on else 0
        rest -= d[j] if on else bound[j]
    out[:] = 0
    for j in range(size):
        p = d[j] + rest / free if slack[j] > reached else bound[j]
        out[order[j]] = min(max(p, 0.0), bound[j])


@helper
def _guess(source: Any, u: Any, top: Any, k: float, z: Any, bound: Any) -> tuple[Any, Any]:
    """Estimate τ from a sample of a wide row: returns a score next to τ, and τ relative to that score."""
    n = source.size
    kind = source.dtype.type
    zero = kind(0)
    stride = max(1, min(n // _SAMPLE, _SPARSE))
    count = (n + stride - 1) // stride
    for i in range(count):
        z[i], bound[i] = source[i * stride] - top, u[i * stride]
    share = k * count / n
    t = _search(z, bound, count, 0.0, share, kind(_START), -np.inf, np.inf, 0.05 * share, 12, 4)[0]
    near = zero
    for i in range(count):
        v = z[i]
        near = min(near, v if v >= t else zero)
    pivot = top
    for i in range(count):
        if z[i] == near:
            pivot = source[i * stride]
    return pivot, t - near


@kernel
def _project(first: int, last: int, x: Any, upper: Any, budget: Any, out: Any) -> None:
    """Compute p = min([z − τ]₊, u) with Σp = k for each row."""
    n = x.shape[1]
    kind = x.dtype.type
    zero = kind(0)
    eps = 1.2e-7 if x.itemsize == 4 else 2.2e-16
    some_z, some_u = np.empty(n + _VECTOR, x.dtype), np.empty(n + _VECTOR, x.dtype)
    index = np.empty(n + 1, np.int32)
    few = max(_FEW, n // _FEW)
    for row in range(first, last):
        source, target, k = x[row], out[row], budget[row]
        u = upper[row if upper.shape[0] > 1 else 0]
        top, _, bad = extremes(source, 0, n)
        if bad or top == -np.inf:
            target[:] = np.nan if bad else zero
            continue
        pivot, t = top, kind(_START)
        if n > _WIDE:
            pivot, t = _guess(source, u, top, k, some_z, some_u)
        for i in range(n):
            target[i] = source[i] - pivot
        t, fine, _, mean, found, low, high = _search(target, u, n, 0.0, k, t, -np.inf, np.inf, 0.0, _PASSES, few)
        for _ in range(_ROUNDS):
            if found and abs(t) <= 16.0 * mean:
                break
            if found:  # but too far from the score it is measured from
                low, high = t - 64.0 * eps * abs(t), t + 64.0 * eps * abs(t)
                for i in range(n):
                    target[i] = source[i] - pivot
            count, base = _collect(source, target, u, kind(low), kind(high), index, some_z, some_u)
            near, distance = pivot, kind(np.inf)
            for i in range(count):
                distance = min(distance, abs(some_z[i] - pivot - t))
            for i in range(count):
                if abs(some_z[i] - pivot - t) == distance:
                    near = some_z[i]
            moved = near - pivot
            count = _padded(count)
            for i in range(count):
                some_z[i] -= near
            t -= moved
            pivot = near
            margin = 4.0 * eps * (abs(low) + abs(moved))
            low, high = low - moved - margin, high - moved + margin
            guess = t
            t, fine, _, mean, found, _, _ = _search(some_z, some_u, count, base, k, t, low, high, 0.0, _TURNS, 0)
            if not found:  # the bracket was not to be trusted to the last digit
                for i in range(n):
                    target[i] = source[i] - pivot
                t, fine, _, mean, found, _, _ = _search(target, u, n, 0.0, k, guess, -np.inf, np.inf, 0.0, _TURNS, 0)
            if not found:
                break
        if not found:
            _sorted_projection(source, u, k, target)
            continue
        # The largest of each difference stands between it and the next, or the compiler would take (pivot + t) first.
        largest = top - pivot
        largest_yet = largest - t
        for i in range(n):
            d, b = source[i] - pivot, u[i]
            d = (largest if largest < d else d) - t
            d = (largest_yet if largest_yet < d else d) - fine
            c = b if b < d else d
            target[i] = c if c > zero else zero
        mass = 0.0
        for start in range(0, n, _CHUNK):
            total, ps = zero, target[start : min(start + _CHUNK, n)]
            for i in range(ps.size):
                total += ps[i]
            mass += total
        if not abs(mass - k) <= (1e-4 if x.itemsize == 4 else 1e-10) * k:  # scores too far apart for one threshold
            _sorted_projection(source, u, k, target)


@kernel
def _bound_sums(first: int, last: int, x: Any, upper: Any, wrong: Any, total: Any) -> None:
    """Count the bounds u that are negative or NaN, and sum u, over the unmasked entries of each row."""
    n = x.shape[1]
    one, zero = x.dtype.type(1), x.dtype.type(0)
    for row in range(first, last):
        u = upper[row if upper.shape[0] > 1 else 0]
        bad, mass = 0.0, 0.0
        for start in range(0, n, _CHUNK):
            xs, us = x[row, start : min(start + _CHUNK, n)], u[start : min(start + _CHUNK, n)]
            k, s = zero, zero
            for i in range(xs.size):
                v, b = xs[i], us[i]
                b = zero if v == -np.inf else b
                k += zero if b >= zero else one
                s += b
            bad += k
            mass += s
        wrong[row] = bad
        total[row] = mass


@helper
def _free_sums(q: Any, u: Any, g: Any, entropic: bool) -> tuple[float, float]:
    """Compute ⟨s, v⟩ and ‖s‖₁ of one row: s is 1, or q if ``entropic``, on the free entries, and 0 elsewhere."""
    n, one, zero = q.size, q.dtype.type(1), q.dtype.type(0)
    total, size = 0.0, 0.0
    for start in range(0, n, _CHUNK):
        stop = min(start + _CHUNK, n)
        qs, us, gs = q[start:stop], u[start:stop], g[start:stop]
        s, k = zero, zero
        for i in range(qs.size):
            a, b, e = qs[i], us[i], gs[i]
            on = (one if a > zero else zero) * (one if a < b else zero) * (a if entropic else one)
            k += on
            s += on * e if on > zero else zero
        total += s
        size += k
    return total, size


@helper
def _times_free(q: Any, u: Any, g: Any, mean: Any, entropic: bool, out: Any) -> None:
    """Write s(v − mean) of one row, s as in ``_free_sums``."""
    one, zero = q.dtype.type(1), q.dtype.type(0)
    for i in range(q.size):
        a, b, e = q[i], u[i], g[i]
        on = (one if a > zero else zero) * (one if a < b else zero) * (a if entropic else one)
        out[i] = on * (e - mean) if on > zero else zero


@kernel
def _product(first: int, last: int, p: Any, upper: Any, v: Any, out: Any, entropic: bool) -> None:
    """J v = s(v − ⟨s, v⟩/‖s‖₁) of each row, s as in ``_free_sums``."""
    kind = p.dtype.type
    for row in range(first, last):
        q, g, target = p[row], v[row], out[row]
        u = upper[row if upper.shape[0] > 1 else 0]
        if q[0] != q[0]:
            target[:] = np.nan
            continue
        total, size = _free_sums(q, u, g, entropic)
        _times_free(q, u, g, kind(total / size) if size > 0.0 else kind(0), entropic, target)


@helper
def _corner(x: Any, q: Any, u: Any, g: Any, entropic: bool) -> tuple[float, float]:
    """Return the means of v and of z − Ω′(p) over two entries: the first to leave its bound, and the first to enter.

    They decide where no entry is free.
    """
    leaving, entering = -1, -1
    least, most = np.inf, -np.inf
    for i in range(q.size):
        if q[i] > 0 and q[i] >= u[i]:
            level = np.float64(x[i]) - (math.log(q[i]) if entropic else q[i])
            if level < least:
                leaving, least = i, level
        elif q[i] == 0 and u[i] > 0 and x[i] > most and not entropic:
            entering, most = i, np.float64(x[i])
    if leaving < 0 and entering < 0:
        return 0.0, -np.inf
    if leaving < 0 or entering < 0:
        return np.float64(g[max(leaving, entering)]), least if entering < 0 else most
    return 0.5 * (np.float64(g[leaving]) + g[entering]), 0.5 * (least + most)


@kernel
def _pull(
    first: int, last: int, x: Any, p: Any, upper: Any, v: Any, to_z: Any, to_u: Any, to_k: Any, entropic: bool
) -> None:
    """Multiply v by the derivatives in scores, bounds and budget, for each row."""
    n = p.shape[1]
    kind = p.dtype.type
    one, zero = kind(1), kind(0)
    for row in range(first, last):
        source, q, g = x[row], p[row], v[row]
        out_z, out_u = to_z[row], to_u[row]
        u = upper[row if upper.shape[0] > 1 else 0]
        if q[0] != q[0]:
            out_z[:] = out_u[:] = np.nan
            to_k[row, 0] = np.nan
            continue
        total, size = _free_sums(q, u, g, entropic)
        tau, naught = 0.0, zero
        for i in range(n):
            naught += one if u[i] == zero else zero
        if size > 0.0:
            total /= size
            if naught > zero and not entropic:  # only such bounds ask where τ is
                for i in range(n):
                    if q[i] > zero and q[i] < u[i]:
                        tau += (np.float64(source[i]) - q[i]) / size
        else:
            total, tau = _corner(source, q, u, g, entropic)
        mean, line = kind(total), kind(-np.inf) if entropic else kind(tau)
        to_k[row, 0] = mean
        _times_free(q, u, g, mean, entropic, out_z)
        for i in range(n):
            a, b, e, z = q[i], u[i], g[i], source[i]
            rising = (one if b > zero else zero) + (one if z > line else zero)
            held = (one if a >= b else zero) * rising
            out_u[i] = e - mean if held > zero else zero
