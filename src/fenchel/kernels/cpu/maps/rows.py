"""α-entmax and α-normmax of rows, their Jacobian products and their losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from fenchel.kernels.cpu.bits import pointer
from fenchel.kernels.cpu.compiler import inlined, kernel, strict
from fenchel.kernels.cpu.maps.exponents import alone, exponent
from fenchel.kernels.cpu.maps.narrow_rows import quads
from fenchel.kernels.cpu.maps.selection import (
    BAD,
    BLOCK,
    NARROW,
    buffers,
    gather,
    is_narrow,
    scatter,
    shift,
    sift,
    top,
    weigh,
)
from fenchel.kernels.cpu.powers import exp2, log2


@kernel
def entmax(first: int, last: int, x: Any, powers: Any, out: Any) -> None:
    """p = [1 + c(z − A)]₊^(1/c) for each row, with its own c = α − 1."""
    kind = x.dtype.type
    one = kind(1)
    n = x.shape[1]
    if n <= NARROW and powers.size == 1:
        c = exponent(powers, 0, x)[0]
        if c == one or c == kind(0.5):
            quads(first, last, x, c != one, out)
            return
    maxima, z, p, index = buffers(n, x)
    for row in range(first, last):
        c, _, power = exponent(powers, row, x)
        k, _ = candidates(x[row], c, power, maxima, p, z, index)
        if k > 0:
            weigh(z, k, c, power, True, p)
        _place(out[row], k, index, p, one, is_narrow(n, power))


@kernel
def normmax(first: int, last: int, x: Any, powers: Any, out: Any) -> None:
    """p ∝ b^(1/c) with b = [z + L]₊ and Σ b^(1 + 1/c) = 1, for each row with its own c = α − 1."""
    kind = x.dtype.type
    one = kind(1)
    maxima, z, w, index = buffers(x.shape[1], x)
    for row in range(first, last):
        _, power, _ = exponent(powers, row, x)
        k, _ = candidates(x[row], one, power, maxima, w, z, index)
        scale = one
        if k > 0:
            weigh(z, k, one, power, False, w)
            scale = _inverse_sum(w, k)
        _place(out[row], k, index, w, scale, is_narrow(x.shape[1], power))


@inlined
def attained(z: Any, p: Any, k: int, c: float, level: float) -> float:
    """max_Ω of Tsallis, ⟨p, z⟩ − Ω(p), where p^c = cz + L on the support; at least 0, the best score."""
    along = 0.0
    for i in range(k):
        score, share = z[i], p[i]
        along += np.float64(share) * np.float64(score if share > 0 else 0)
    return max((c * along + (1.0 - level) / c) / (1.0 + c), 0.0)


@kernel
def entmax_loss(first: int, last: int, x: Any, powers: Any, target: Any, loss: Any, residual: Any) -> None:
    """The loss max_Ω(x) − x at a target and, if there is room for it, its gradient p − y; a target < 0 is left out."""
    kind = x.dtype.type
    one = kind(1)
    n = x.shape[1]
    maxima, z, p, index = buffers(n, x)
    for row in range(first, last):
        c, _, power = exponent(powers, row, x)
        k = 0
        largest = kind(0)
        if target[row] >= 0:
            k, largest = candidates(x[row], c, power, maxima, p, z, index)
        value = 0.0
        if k > 0:
            level = weigh(z, k, c, power, True, p)
            value = attained(z, p, k, np.float64(c), level)
        settle(row, k, largest, value, x, p, index, one, is_narrow(n, power), target, loss, residual)


@kernel
def normmax_loss(first: int, last: int, x: Any, powers: Any, target: Any, loss: Any, residual: Any) -> None:
    """As ``entmax_loss`` for normmax, where max_Ω = 1 − L."""
    kind = x.dtype.type
    one = kind(1)
    n = x.shape[1]
    maxima, z, w, index = buffers(n, x)
    for row in range(first, last):
        _, power, _ = exponent(powers, row, x)
        k = 0
        largest = kind(0)
        if target[row] >= 0:
            k, largest = candidates(x[row], one, power, maxima, w, z, index)
        value, scale = 0.0, one
        if k > 0:
            value = max(1.0 - weigh(z, k, one, power, False, w), 0.0)
            scale = _inverse_sum(w, k)
        settle(row, k, largest, value, x, w, index, scale, is_narrow(n, power), target, loss, residual)


@inlined
def candidates(x: Any, scale: Any, power: Any, maxima: Any, w: Any, z: Any, index: Any) -> Any:
    """What ``shift`` or ``sift`` finds in a row, by its width, and its largest score."""
    if is_narrow(x.size, power):
        return shift(x, z)
    return sift(x, scale, power, maxima, w, z, index)


@inlined
def _inverse_sum(w: Any, k: int) -> Any:
    total = 0.0
    for i in range(k):
        total += np.float64(w[i])
    return w.dtype.type(1.0 / total)


@inlined
def settle(
    row: int,
    k: int,
    largest: Any,
    value: float,
    x: Any,
    p: Any,
    index: Any,
    scale: Any,
    narrow: bool,
    target: Any,
    loss: Any,
    residual: Any,
) -> None:
    """Loss and residual of one row, whose target may be left out (negative) or impossible (a score of −inf)."""
    kind = x.dtype.type
    label = target[row]
    score = x[row, max(label, 0)]
    if label < 0:
        loss[row] = kind(0)
    elif k == BAD:
        loss[row] = kind(np.nan)
    elif score == -np.inf:
        loss[row] = kind(np.inf)
    else:
        # The gap is not negative; said so, the compiler cannot take its two large parts into the sum.
        loss[row] = kind(value + max(np.float64(largest) - np.float64(score), 0.0))
    if residual.size > 0:
        _place(residual[row], k, index, p, scale, narrow)
        if label >= 0 and score != -np.inf:
            residual[row, label] -= kind(1)


@inlined
def _place(target: Any, k: int, index: Any, p: Any, scale: Any, narrow: bool) -> None:
    """Put the candidates of a row where they belong; the rest is 0, or NaN in a bad row."""
    kind = target.dtype.type
    if k > 0 and narrow:
        for i in range(k):
            target[i] = p[i] * scale
    else:
        target[:] = kind(np.nan) if k == BAD else kind(0)
        if k > 0:
            for i in range(k):
                target[index[i]] = p[i] * scale


@kernel
def entmax_at(source: int, target: int, like: Any, rows: int, n: int, c: Any) -> None:
    """``entmax`` of floats, such as ``like``, at an address, with one c: to lay out arrays takes longer than a row."""
    x, out = pointer(source, like), pointer(target, like)
    entmax(0, rows, carray(x, (rows, n)), alone(c, like), carray(out, (rows, n)))


@kernel
def normmax_at(source: int, target: int, like: Any, rows: int, n: int, c: Any) -> None:
    """``normmax`` of floats at an address."""
    x, out = pointer(source, like), pointer(target, like)
    normmax(0, rows, carray(x, (rows, n)), alone(c, like), carray(out, (rows, n)))


@kernel
def normmax_product(first: int, last: int, p: Any, powers: Any, v: Any, out: Any) -> None:
    """J v = (N/c)(I − p1ᵀ) diag((p/N)^(1−c)) (I − 1pᵀ) v with N = ‖p‖_α, for each row.

    With m the largest probability, w = (p/m)^(1−c) is the one power that is needed: (p/m)^α = (p/m)²/w.
    """
    n = p.shape[1]
    kind = p.dtype.type
    one, zero, tiny = kind(1), kind(0), kind(1e-30)
    masks, index = np.empty(n // BLOCK + 1, np.uint64), np.empty(n + 1, np.int32)
    shares, values, products = np.empty(n, p.dtype), np.empty(n, p.dtype), np.empty(n, p.dtype)
    for row in range(first, last):
        c, power, _ = exponent(powers, row, p)
        source, g, target = p[row], v[row], out[row]
        size = n if is_narrow(n, power) else gather(source, g, masks, index, shares, values)
        if size < n:
            source, g, target = shares[:size], values[:size], products[:size]
        largest, _ = top(source)
        largest = largest if largest > zero else one
        inverse = one / largest
        powered, along, weight, weighted = 0.0, 0.0, 0.0, 0.0
        if c == one:
            for i in range(size):
                q, e = source[i], g[i]  # loaded before any choice, or the loop does not vectorise
                e = e if q > zero else zero
                powered += np.float64(q * inverse) * np.float64(q * inverse)
                along += np.float64(q) * np.float64(e)
                weight += 1.0 if q > zero else 0.0
                weighted += np.float64(e)
        else:
            for i in range(size):
                q = source[i]
                w = exp2((one - c) * log2(max(q * inverse, tiny)))
                target[i] = w if q > zero else q
            for i in range(size):
                q, w, e = source[i], target[i], g[i]
                e = e if q > zero else zero
                r = q * inverse
                powered += np.float64(r * r / (w if q > zero else one))
                along += np.float64(q * e)
                weight += np.float64(w)
                weighted += np.float64(w * e)
        norm = powered ** (1.0 / (1.0 + c))  # of p/m
        factor = np.float64(largest) / c * norm**c
        slope, mean, balance = kind(factor), kind(along), kind(factor * (weighted - along * weight))
        if c == one:
            for i in range(size):
                q, e = source[i], g[i]
                target[i] = slope * (e - mean) - q * balance if q > zero else q
        else:
            for i in range(size):
                q, w, e = source[i], target[i], g[i]
                target[i] = slope * w * (e - mean) - q * balance if q > zero else q
        if size < n:
            scatter(products, index, size, out[row])


@kernel
def entmax_product(first: int, last: int, p: Any, powers: Any, v: Any, out: Any) -> None:
    """J v = s(v − ⟨s, v⟩/‖s‖₁) for each row; of a wide row with a small support, on that alone."""
    n = p.shape[1]
    kind = p.dtype.type
    zero, one, half = kind(0), kind(1), kind(0.5)
    masks, index = np.empty(n // BLOCK + 1, np.uint64), np.empty(n + 1, np.int32)
    shares, values, products = np.empty(n, p.dtype), np.empty(n, p.dtype), np.empty(n, p.dtype)
    for row in range(first, last):
        c, _, power = exponent(powers, row, p)
        if c > one:
            _steep_product(p[row], np.float64(c), v[row], out[row])
            continue
        if is_narrow(n, power):
            source, g, target = p[row], v[row], out[row]
            total, weighted = zero, zero
            # One branch for each power, with all of its loops: parted, they do not vectorise.
            if c == one:
                for i in range(n):
                    q, e = source[i], g[i]
                    total += one if q > zero else q
                    weighted += e if q > zero else q
                mean = weighted / total if total != zero else zero
                for i in range(n):
                    q, e = source[i], g[i]
                    target[i] = e - mean if q > zero else q
            elif c == half:
                for i in range(n):
                    q, e = source[i], g[i]
                    s = np.sqrt(q)
                    total += s
                    weighted += s * (e if q > zero else zero)
                mean = weighted / total if total != zero else zero
                for i in range(n):
                    q, e = source[i], g[i]
                    target[i] = np.sqrt(q) * (e - mean) if q > zero else q
            else:
                total, weighted = _curvature(source, g, c, target)
                _centre(source, g, c, weighted / total if total != zero else zero, target)
            continue
        source, g, target = p[row], v[row], out[row]
        size = gather(source, g, masks, index, shares, values)
        if size < n:
            source, g, target = shares[:size], values[:size], products[:size]
        mass, along = 0.0, 0.0
        for start in range(0, size, BLOCK):
            stop = min(start + BLOCK, size)
            total, weighted = _curvature(source[start:stop], g[start:stop], c, target[start:stop])
            mass += total
            along += weighted
        _centre(source, g, c, kind(along / mass) if mass != 0.0 else zero, target)
        if size < n:
            scatter(products, index, size, out[row])


@inlined
def _curvature(p: Any, v: Any, c: Any, out: Any) -> tuple[Any, Any]:
    """‖s‖₁ and ⟨s, v⟩ for s = p^(1−c) on the support; s itself goes to ``out`` where it costs a power.

    A loop that stores and sums does not vectorise well, nor does one that loads after a choice.
    """
    kind = p.dtype.type
    one, zero, tiny = kind(1), kind(0), kind(1e-37)
    total, weighted = zero, zero
    if c == one:
        for i in range(p.size):
            q, e = p[i], v[i]
            total += one if q > zero else q
            weighted += e if q > zero else q
    elif c == kind(0.5):
        for i in range(p.size):
            q, e = p[i], v[i]
            s = np.sqrt(q)
            total += s
            weighted += s * (e if q > zero else zero)
    else:
        power = one - c
        for i in range(p.size):
            q = p[i]
            s = exp2(power * log2(max(q, tiny)))
            out[i] = s if q > zero else q
        for i in range(p.size):
            s, e = out[i], v[i]
            total += s
            weighted += s * (e if s > zero else zero)
    return total, weighted


@inlined
def _centre(p: Any, v: Any, c: Any, mean: Any, out: Any) -> None:
    """out = s(v − mean) on the support, p off it: 0 or NaN."""
    kind = p.dtype.type
    zero = kind(0)
    if c == kind(1):
        for i in range(p.size):
            q, e = p[i], v[i]
            out[i] = e - mean if q > zero else q
    elif c == kind(0.5):
        for i in range(p.size):
            q, e = p[i], v[i]
            out[i] = np.sqrt(q) * (e - mean) if q > zero else q
    else:
        for i in range(p.size):
            s, e = out[i], v[i]
            out[i] = s * (e - mean) if s > zero else s


@strict  # infinity and its sign matter here
def _steep_product(p: Any, c: float, v: Any, out: Any) -> None:
    """J v for c > 1, where s = p^(1−c) is huge for small p and J the difference of huge numbers.

    Everything is measured from the smallest probability: its own product is minus the sum of the others (J1 = 0).
    """
    kind = p.dtype.type
    n = p.size
    limit = np.float64(np.finfo(p.dtype).max)
    unit = 2.0**-64  # products are smaller by a power of two until the end, so that no sum overflows
    least, at, bad = math.inf, -1, False
    for i in range(n):
        share = np.float64(p[i])
        bad = bad or share != share
        if 0.0 < share < least:
            least, at = share, i
    if bad or at < 0:
        out[:] = kind(np.nan) if bad else kind(0)
        return
    gaps = np.empty(n)
    for i in range(n):
        gaps[i] = np.float64(v[i]) * unit - np.float64(v[at]) * unit
    mass, along = 0.0, 0.0
    for i in range(n):
        share = np.float64(p[i])
        if share > 0.0:
            relative = (share / least) ** (1.0 - c)
            mass += relative
            along += relative * gaps[i]
    mean = along / max(mass, 1.0)
    total = 0.0
    for i in range(n):
        share = np.float64(p[i])
        value = 0.0
        if share > 0.0 and i != at:
            value = min(share ** (1.0 - c), limit) * (gaps[i] - mean)
            value = min(max(value, -limit * unit), limit * unit)
            total += value
        out[i] = kind(value / unit)
    out[at] = kind(min(max(-total, -limit * unit), limit * unit) / unit)


@kernel
def entmax_alpha(first: int, last: int, p: Any, powers: Any, v: Any, out: Any) -> None:
    """⟨v, ∂p/∂α⟩ = −⟨v, Jσ⟩ with σ = ∂ln_c(p)/∂c, one value a row, for c ≤ 1."""
    kind = p.dtype.type
    n = p.shape[1]
    for row in range(first, last):
        c = np.float64(powers[row if powers.size > 1 else 0])
        mass, along = 0.0, 0.0
        for i in range(n):
            share = np.float64(p[row, i])
            if share != 0.0:
                s = share ** (1.0 - c)
                mass += s
                along += s * sensitivity(share, c)
        mean = along / mass if mass > 0.0 else 0.0
        total = 0.0
        for i in range(n):
            share = np.float64(p[row, i])
            if share != 0.0:
                total -= np.float64(v[row, i]) * share ** (1.0 - c) * (sensitivity(share, c) - mean)
        out[row] = kind(total)


_MOMENTS = np.array([1 / (math.factorial(k) * (k + 2)) for k in range(19)])


@inlined
def sensitivity(p: float, c: float) -> Any:
    """∂ ln_c(p)/∂c = log²p ∫₀¹ t exp(xt) dt at x = c·log p; by its series near x = 0."""
    log = math.log(p)
    x = c * log
    if abs(x) > 1.0:
        moment = (1.0 + (x - 1.0) * math.exp(x)) / (x * x)
    else:
        moment = 0.0
        for k in range(18, -1, -1):
            moment = moment * x + _MOMENTS[k]
    return log * log * moment
