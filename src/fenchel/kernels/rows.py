"""α-entmax of rows for 1 < α ≤ 2, α-normmax, and their Jacobian products.

Each row is reduced to a threshold. It grows monotonically from a lower bound: for α = 2 and 1.5 by solving for the
support at hand until that stays, else by Newton on the norm of the excess. The last, smallest step is kept apart from
the threshold, which is too coarse for it. Wide rows are filtered first: the maxima of their blocks alone have a
threshold below that of the whole row, and few entries reach it; narrow rows are worked on whole.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fenchel.kernels.compiler import inlined, kernel
from fenchel.kernels.powers import exp2, log2

_NARROW = 512  # whole-row arithmetic up to here, filtering above
_BLOCK = 64  # group of a wide row
_CHUNK = 64  # how far a sum goes in the row's own precision before it moves to double


@inlined
def _top(x: Any) -> tuple[Any, bool]:
    """The largest entry of a row, and whether one is NaN or +inf."""
    kind = x.dtype.type
    top = kind(-np.inf)
    bad = kind(0)
    for i in range(x.size):
        v = x[i]
        top = max(top, v)
        bad += kind(1) if v != v else kind(0)
    return top, bad > 0 or top == np.inf


@inlined
def _block_maxima(x: Any, maxima: Any) -> tuple[int, Any, bool]:
    """The maxima of a wide row's blocks: how many, the largest, and whether an entry is NaN or +inf.

    A subset of the scores has a threshold no larger than that of all: the maxima give a bound that few others reach.
    """
    n = x.size
    kind = x.dtype.type
    bad = kind(0)
    top = kind(-np.inf)
    count = 0
    for first in range(0, n, _BLOCK):
        best = kind(-np.inf)
        for i in range(first, min(first + _BLOCK, n)):
            v = x[i]
            best = max(best, v)
            bad += kind(1) if v != v else kind(0)
        maxima[count] = best
        top = max(top, best)
        count += 1
    return count, top, bad > 0 or top == np.inf


@inlined
def _collect(x: Any, top: Any, line: Any, maxima: Any, z: Any, index: Any) -> int:
    """z = x − top of the entries with z > line, block by block; ``maxima`` are relative to the top."""
    n = x.size
    count = 0
    for block in range((n + _BLOCK - 1) // _BLOCK):
        if maxima[block] > line:
            first = block * _BLOCK
            for i in range(first, min(first + _BLOCK, n)):
                v = x[i] - top
                z[count] = v
                index[count] = i
                count += 1 if v > line else 0
    return count


@inlined
def _subtract(z: Any, n: int, coarse: Any) -> None:
    """z −= coarse in a loop of its own: in one with the fine part the compiler would add the two first."""
    for i in range(n):
        z[i] -= coarse


@inlined
def _line(z: Any, n: int, tau: Any) -> tuple[Any, Any]:
    """τ with Σ [z − τ]₊ = 1, as a coarse and a fine part, from a lower bound."""
    one, zero = z.dtype.type(1), z.dtype.type(0)
    before = math.inf
    while True:
        size, total = 0.0, 0.0
        for first in range(0, n, _CHUNK):
            k, s = zero, zero
            for i in range(first, min(first + _CHUNK, n)):
                d = z[i] - tau
                k += one if d > zero else zero
                s += max(d, zero)
            size += k
            total += s
        step = z.dtype.type((total - 1.0) / size)
        if size >= before:  # the support shrinks until it stays; rounding may let one in again
            return tau, step
        before = size
        tau = tau + step


@inlined
def _parabola(z: Any, n: int, tau: Any) -> tuple[Any, Any]:
    """τ with Σ [z − τ]₊² = 1, as a coarse and a fine part, from a lower bound.

    Newton on the norm of the excess is monotone; the root of the parabola ends it, once that keeps the support.
    """
    kind = z.dtype.type
    one, zero, far = kind(1), kind(0), kind(2)
    enough = 1e-8 if z.itemsize == 4 else 1e-17
    last = False
    for _ in range(200):  # far more than it takes
        size, total, squares, nearest = 0.0, 0.0, 0.0, 2.0
        for first in range(0, n, _CHUNK):
            k, s, q, m = zero, zero, zero, far
            for i in range(first, min(first + _CHUNK, n)):
                d = z[i] - tau
                k += one if d > zero else zero
                m = min(m, d if d > zero else far)
                d = max(d, zero)
                s += d
                q += d * d
            size += k
            total += s
            squares += q
            nearest = min(nearest, np.float64(m))
        excess = squares - 1.0
        root = total * total - size * excess
        step = (squares - math.sqrt(squares)) / total
        if root >= 0.0:
            exact = excess / (total + math.sqrt(root))
            if last:  # at the root but for its rounding, which is what is left
                return tau, kind(exact)
            if exact <= nearest:
                last = True
                step = exact
        if not last and step <= enough:
            return tau, kind(step)
        tau = tau + kind(step)
    return tau, zero


@inlined
def _curve(z: Any, n: int, scale: Any, power: Any, level: float, enough: float) -> float:
    """The level L with Σ [scale·z + L]₊^power = 1, by Newton on the norm (Σ b^power)^(1/power) from an upper bound."""
    kind = z.dtype.type
    one, zero, tiny = kind(1), kind(0), kind(1e-30)
    for _ in range(100):
        high = kind(level)
        total, slope = 0.0, 0.0
        for first in range(0, n, _CHUNK):
            t, s = zero, zero
            for i in range(first, min(first + _CHUNK, n)):
                b = scale * z[i] + high
                on = one if b > tiny else zero
                b = max(b, tiny)
                p = on * exp2(power * log2(b))
                t += p
                s += p / b
            total += t
            slope += s
        total += slope * power * (level - high)
        step = -total * math.expm1(-math.log(total) / power) / slope
        level -= step
        if step < enough:
            break
    return level


@kernel
def sparsemax(first: int, last: int, x: Any, out: Any) -> None:
    """p = [z − τ]₊ for each row."""
    n = x.shape[1]
    kind = x.dtype.type
    zero, start = kind(0), kind(-1)
    wide = n > _NARROW
    maxima = np.empty(n // _BLOCK + 1 if wide else 0, x.dtype)
    z = np.empty(n if wide else 0, x.dtype)
    index = np.empty(n if wide else 0, np.int32)
    for row in range(first, last):
        source, target = x[row], out[row]
        groups, top, bad = _block_maxima(source, maxima) if wide else (0, *_top(source))
        if bad or top == -np.inf:
            target[:] = np.nan if bad else zero
        elif wide:
            for i in range(groups):
                maxima[i] -= top
            tau, fine = _line(maxima, groups, start)
            k = _collect(source, top, tau, maxima, z, index)
            tau, fine = _line(z, k, tau)
            target[:] = zero
            _subtract(z, k, tau)
            for i in range(k):
                target[index[i]] = max(z[i] - fine, zero)
        else:
            for i in range(n):
                target[i] = source[i] - top
            tau, fine = _line(target, n, start)
            _subtract(target, n, tau)
            for i in range(n):
                target[i] = max(target[i] - fine, zero)


@kernel
def entmax15(first: int, last: int, x: Any, out: Any) -> None:
    """p = [z/2 − τ]₊² for each row."""
    n = x.shape[1]
    kind = x.dtype.type
    zero, half, start = kind(0), kind(0.5), kind(-1)
    wide = n > _NARROW
    maxima = np.empty(n // _BLOCK + 1 if wide else 0, x.dtype)
    z = np.empty(n if wide else 0, x.dtype)
    index = np.empty(n if wide else 0, np.int32)
    for row in range(first, last):
        source, target = x[row], out[row]
        groups, top, bad = _block_maxima(source, maxima) if wide else (0, *_top(source))
        if bad or top == -np.inf:
            target[:] = np.nan if bad else zero
        elif wide:
            for i in range(groups):
                maxima[i] = (maxima[i] - top) * half
            tau, fine = _parabola(maxima, groups, start)
            for i in range(groups):
                maxima[i] += maxima[i]
            k = _collect(source, top, tau + tau, maxima, z, index)
            for i in range(k):
                z[i] *= half
            tau, fine = _parabola(z, k, tau)
            target[:] = zero
            _subtract(z, k, tau)
            for i in range(k):
                d = max(z[i] - fine, zero)
                target[index[i]] = d * d
        else:
            for i in range(n):
                target[i] = (source[i] - top) * half
            tau, fine = _parabola(target, n, start)
            _subtract(target, n, tau)
            for i in range(n):
                d = max(target[i] - fine, zero)
                target[i] = d * d


@kernel
def entmax(first: int, last: int, x: Any, powers: Any, out: Any) -> None:
    """p = [1 + c(z − A)]₊^(1/c) for each row, with its own ¼ ≤ c ≤ 1."""
    n = x.shape[1]
    kind = x.dtype.type
    zero, one, tiny = kind(0), kind(1), kind(1e-30)
    wide = n > _NARROW
    maxima = np.empty(n // _BLOCK + 1 if wide else 0, x.dtype)
    z = np.empty(n, x.dtype)
    index = np.empty(n if wide else 0, np.int32)
    for row in range(first, last):
        source, target = x[row], out[row]
        groups, top, bad = _block_maxima(source, maxima) if wide else (0, *_top(source))
        if bad or top == -np.inf:
            target[:] = np.nan if bad else zero
            continue
        c = powers[row]
        r = one / c
        enough = c * (1e-6 if z.itemsize == 4 else 1e-11)
        level = 1.0
        k = n
        if wide:
            for i in range(groups):
                maxima[i] -= top
            level = _curve(maxima, groups, c, r, level, enough)
            k = _collect(source, top, kind(-level / c), maxima, z, index)
        else:
            for i in range(n):
                z[i] = source[i] - top
        level = _curve(z, k, c, r, level, enough)
        high = kind(level)
        rest = kind((level - high) / c)  # what is missing from the level, by the slope of the power
        for i in range(k):
            b = c * z[i] + high
            on = one if b > tiny else zero
            b = max(b, tiny)
            p = on * exp2(r * log2(b))
            z[i] = max(p + p / b * rest, zero)
        if wide:
            target[:] = zero
            for i in range(k):
                target[index[i]] = z[i]
        else:
            target[:] = z


@inlined
def _excess(z: Any, n: int, c: Any, q: Any, level: float, enough: float) -> Any:
    """The level L with Σ [z + L]₊^q = 1; without powers at q = 2."""
    if c == 1:
        tau, fine = _parabola(z, n, z.dtype.type(-level))
        return -(tau + np.float64(fine))
    return _curve(z, n, z.dtype.type(1), q, level, enough)


@kernel
def normmax(first: int, last: int, x: Any, powers: Any, out: Any) -> None:
    """p ∝ b^(1/c) with b = [z + L]₊ and Σ b^(1 + 1/c) = 1, for each row with its own c = α − 1."""
    n = x.shape[1]
    kind = x.dtype.type
    zero, one, tiny = kind(0), kind(1), kind(1e-30)
    wide = n > _NARROW
    maxima = np.empty(n // _BLOCK + 1 if wide else 0, x.dtype)
    z = np.empty(n, x.dtype)
    index = np.empty(n if wide else 0, np.int32)
    for row in range(first, last):
        source, target = x[row], out[row]
        groups, top, bad = _block_maxima(source, maxima) if wide else (0, *_top(source))
        if bad or top == -np.inf:
            target[:] = np.nan if bad else zero
            continue
        c = powers[row]
        q = one + one / c
        enough = 3e-8 if z.itemsize == 4 else 1e-16
        level = 1.0
        k = n
        if wide:
            for i in range(groups):
                maxima[i] -= top
            level = _excess(maxima, groups, c, q, level, enough)
            k = _collect(source, top, kind(-level), maxima, z, index)
        else:
            for i in range(n):
                z[i] = source[i] - top
        level = _excess(z, k, c, q, level, enough)
        high = kind(level)
        if c == 1:
            for i in range(k):
                z[i] = max(z[i] + high, zero)
        else:
            r = one / c
            for i in range(k):
                b = z[i] + high
                on = one if b > tiny else zero
                z[i] = on * exp2(r * log2(max(b, tiny)))
        total = 0.0
        for start in range(0, k, _CHUNK):
            t = zero
            for i in range(start, min(start + _CHUNK, k)):
                t += z[i]
            total += t
        scale = kind(1.0 / total)
        if wide:
            target[:] = zero
            for i in range(k):
                target[index[i]] = z[i] * scale
        else:
            for i in range(n):
                target[i] = z[i] * scale


@kernel
def normmax_product(first: int, last: int, p: Any, powers: Any, v: Any, out: Any) -> None:
    """J v = (N/c)(I − p1ᵀ) diag(w) (I − 1pᵀ) v with N = ‖p‖_α and w = (p/N)^(1−c), for each row."""
    n = p.shape[1]
    kind = p.dtype.type
    one, zero, tiny = kind(1), kind(0), kind(1e-37)
    for row in range(first, last):
        source, g, target = p[row], v[row], out[row]
        c = powers[row]
        alpha = one + c
        largest = zero
        for i in range(n):
            largest = max(largest, source[i])
        inverse = one / largest if largest > zero else one
        mass, along = 0.0, 0.0
        for start in range(0, n, _CHUNK):
            m, a = zero, zero
            if c == 1:
                for i in range(start, min(start + _CHUNK, n)):
                    q, e = source[i], g[i]
                    m += (q * inverse) * (q * inverse)
                    a += q * (e if q != zero else zero)
            else:
                for i in range(start, min(start + _CHUNK, n)):
                    q, e = source[i], g[i]
                    s = exp2(alpha * log2(max(q * inverse, tiny)))
                    m += s if q > zero else q
                    a += q * (e if q != zero else zero)
            mass += m
            along += a
        mean = kind(along)
        norm = largest * mass ** (1.0 / np.float64(alpha))
        factor = kind(norm / c)
        if c == 1:
            for i in range(n):
                q, e = source[i], g[i]
                target[i] = factor * (e - mean) if q > zero else q
        else:
            shift = kind(math.log2(norm)) if norm > 0.0 else zero
            for i in range(n):
                q, e = source[i], g[i]
                w = exp2((one - c) * (log2(max(q, tiny)) - shift))
                target[i] = factor * w * (e - mean) if q > zero else q
        total = 0.0
        for start in range(0, n, _CHUNK):
            t = zero
            for i in range(start, min(start + _CHUNK, n)):
                t += target[i]
            total += t
        balance = kind(total)
        for i in range(n):
            target[i] -= source[i] * balance


@inlined
def _curvature(p: Any, c: Any, out: Any) -> None:
    """out = s = p^(1−c) on the support, 0 off it, NaN where p is NaN."""
    one, zero, tiny = p.dtype.type(1), p.dtype.type(0), p.dtype.type(1e-37)
    n = p.size
    if c == 1:
        for i in range(n):
            q = p[i]
            out[i] = one if q > zero else q
    elif c == 0.5:
        for i in range(n):
            out[i] = np.sqrt(p[i])
    else:
        power = one - c
        for i in range(n):
            q = p[i]
            s = exp2(power * log2(max(q, tiny)))
            out[i] = s if q > zero else q


@kernel
def entmax_product(first: int, last: int, p: Any, powers: Any, v: Any, out: Any) -> None:
    """J v = s(v − ⟨s, v⟩/‖s‖₁) for each row; blocks without support are not read twice."""
    n = p.shape[1]
    kind = p.dtype.type
    zero = kind(0)
    width = _BLOCK if n > _NARROW else n
    live = np.empty(n // width + 1, np.int32)
    for row in range(first, last):
        c = powers[row]
        count = 0
        total, weighted = 0.0, 0.0
        for start in range(0, n, width):
            stop = min(start + width, n)
            q, g, s = p[row, start:stop], v[row, start:stop], out[row, start:stop]
            if n > _NARROW:
                on = zero
                for i in range(q.size):
                    on += zero if q[i] == zero else kind(1)  # NaN counts as support
                if on == zero:
                    s[:] = zero
                    continue
            live[count] = start
            count += 1
            _curvature(q, c, s)
            t, w = zero, zero
            for i in range(q.size):
                weight, along = s[i], g[i]  # both loaded before the choice, or the loop does not vectorise
                t += weight
                w += weight * (along if weight != zero else zero)
            total += t
            weighted += w
        mean = kind(weighted / total) if total != 0.0 else zero
        for k in range(count):
            stop = min(live[k] + width, n)
            g, s = v[row, live[k] : stop], out[row, live[k] : stop]
            for i in range(s.size):
                weight, along = s[i], g[i]
                s[i] = weight * (along - mean) if weight != zero else weight
