"""Jacobian products of α-entmax for α ≤ 2 and of α-normmax, and the derivative of entmax in α, of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import INLINED, strict, strict_helper
from fenchel.kernels.cpu.maps.parameters import power_at
from fenchel.kernels.cpu.maps.steep import steep_product
from fenchel.kernels.cpu.maps.stores import finish_streams, is_streamed, matrix, put, stream_zeros
from fenchel.kernels.cpu.maps.values import moments
from fenchel.kernels.cpu.memory import allocate, borrowed, release

_GROUP = 8  # vectors whose sum is in the precision of the rows
_DENSE = 512  # up to this width a row is not searched for vectors without support
_DENSE_POWERS = 64  # the same where the curvature takes a power


@strict
def entmax_product(
    first: int, last: int, chosen: int, changes: int, target: int, size: int, n: int, powers: Any, like: Any
) -> None:
    """J v = s(v − ⟨s, v⟩/‖s‖₁) with s = p^(1−c) on the support, for each row.

    p, v and the result are at addresses: see ``stores.matrix``.
    """
    powers, like = borrowed(powers), borrowed(like)
    p, v, out = matrix(chosen, size, n, like), matrix(changes, size, n, like), matrix(target, size, n, like)
    room = product_room(n, p)
    for row in range(first, last):
        product_of_row(p, row * n, n, powers, row, v, out, room)
    release_product(room)
    finish_streams()


@strict_helper
def product_room(n: int, like: Any) -> Any:
    """Room for a list of the vectors of a row, and for what is kept of them."""
    return allocate(n // vec.lanes(like) + 1, np.int32), allocate(n, like.dtype)


@strict_helper
def release_product(room: Any) -> None:
    """Give back what ``product_room`` has made."""
    live, kept = room
    release(live)
    release(kept)


@strict
def steep_entmax_product(
    first: int, last: int, chosen: int, changes: int, target: int, size: int, n: int, powers: Any, like: Any
) -> None:
    """As ``entmax_product`` for one c > 1, ∞ included, or one per row, of which those above 1 are taken."""
    powers, like = borrowed(powers), borrowed(like)
    p, v, out = matrix(chosen, size, n, like), matrix(changes, size, n, like), matrix(target, size, n, like)
    p, v, out = p.reshape(-1), v.reshape(-1), out.reshape(-1)
    live = allocate(n // vec.lanes(p) + 1, np.int32)
    for row in range(first, last):
        c = power_at(powers, row)
        if c > 1.0:
            steep_product(p, row * n, n, c, v, out, live)
    release(live)


def product_of_row(p: Any, start: int, n: int, powers: Any, row: int, v: Any, out: Any, room: Any) -> None:
    """``entmax_product`` of one row, n entries from ``start`` on; the room is that of ``product_room``."""
    raise NotImplementedError("for compiled code")


@overload(product_of_row, strict=False, jit_options=INLINED)
def _product_of_row(p: Any, start: Any, n: Any, powers: Any, row: Any, v: Any, out: Any, room: Any) -> Any:
    return _product_without_powers if isinstance(powers.dtype, types.Integer) else _product_by_powers


def _product_by_powers(p: Any, start: int, n: int, powers: Any, row: int, v: Any, out: Any, room: Any) -> None:
    if n <= _DENSE_POWERS:
        _dense_product(p, start, n, powers, row, v, out)
    else:
        _sparse_product(p, start, n, powers, row, v, out, room)


def _product_without_powers(p: Any, start: int, n: int, powers: Any, row: int, v: Any, out: Any, room: Any) -> None:
    if n <= _DENSE:
        _dense_product(p, start, n, powers, row, v, out)
    else:
        _sparse_product(p, start, n, powers, row, v, out, room)


@strict_helper
def _dense_product(p: Any, start: int, n: int, powers: Any, row: int, v: Any, out: Any) -> None:
    lanes = vec.lanes(p)
    zero = vec.splat(p.dtype.type(0))
    end = start + n // lanes * lanes
    rest = n % lanes
    power = curvature_power(powers, row, zero)
    mass, along = zero, zero
    for i in range(start, end, lanes):
        q, g = vec.load(p, i), vec.load(v, i)
        s = curvature(powers, q, power)
        keep_curvature(powers, out, i, s)
        mass += s
        along += s * vec.select(q > 0.0, g, zero)
    q, g, s = zero, zero, zero
    if rest:
        q, g = vec.load_part(p, end, rest, 0.0), vec.load_part(v, end, rest, 0.0)
        s = curvature(powers, q, power)
        mass += s
        along += s * vec.select(q > 0.0, g, zero)
    mean = _mean(vec.sum_everywhere(mass), vec.sum_everywhere(along))
    if rest:
        vec.store_part(out, end, vec.select(s > 0.0, s * (g - mean), s), rest)
    for i in range(start, end, lanes):
        s = curvature_again(powers, out, i, p, i, power)
        vec.store(out, i, vec.select(s > 0.0, s * (vec.load(v, i) - mean), s))


@strict_helper
def _mean(mass: Any, along: Any) -> Any:
    """⟨s, v⟩/‖s‖₁, 0 in an empty row."""
    return along / vec.select((mass > 0.0) | vec.unordered(mass, mass), mass, 1.0)


@strict_helper
def _sparse_product(p: Any, start: int, n: int, powers: Any, row: int, v: Any, out: Any, room: Any) -> None:
    """Of a wide row look at those vectors alone that are not all zero."""
    live, kept = room
    lanes = vec.lanes(p)
    zero = vec.splat(p.dtype.type(0))
    power = curvature_power(powers, row, zero)
    streamed = is_streamed(out, n)
    size, whole = _live_vectors(p, start, n, live, out, streamed), n // lanes
    mass, along = vec.widen(zero), vec.widen(zero)
    for first_of_group in range(0, size, _GROUP):
        m, a = zero, zero
        for j in range(first_of_group, min(first_of_group + _GROUP, size)):
            i = start + live[j] * lanes
            q = vec.load(p, i)
            s = curvature(powers, q, power)
            keep_curvature(powers, kept, j * lanes, s)
            m += s
            a += s * vec.select(q > 0.0, vec.load(v, i), zero)
        mass, along = mass + vec.widen(m), along + vec.widen(a)
    rest = n - whole * lanes
    i = start + whole * lanes
    q, g, s = zero, zero, zero
    if rest:
        q, g = vec.load_part(p, i, rest, 0.0), vec.load_part(v, i, rest, 0.0)
        s = curvature(powers, q, power)
        mass, along = mass + vec.widen(s), along + vec.widen(s * vec.select(q > 0.0, g, zero))
    mean = vec.narrow(_mean(vec.sum_everywhere(mass), vec.sum_everywhere(along)), zero)
    if rest:
        vec.store_part(out, i, vec.select(s > 0.0, s * (g - mean), s), rest)
    end = start
    for j in range(size):
        i = start + live[j] * lanes
        if streamed:
            stream_zeros(out, end, i)
        s = curvature_again(powers, kept, j * lanes, p, i, power)
        put(out, i, vec.select(s > 0.0, s * (vec.load(v, i) - mean), s), streamed)
        end = i + lanes
    if streamed:
        stream_zeros(out, end, start + whole * lanes)


@strict_helper
def _live_vectors(p: Any, start: int, n: int, live: Any, out: Any, streamed: bool) -> Any:
    """List the vectors of a row that are not all zero; the others are set to 0 if not streamed."""
    lanes = vec.lanes(p)
    whole = n // lanes
    zero = vec.splat(p.dtype.type(0))
    size = 0
    for k in range(whole):
        q = vec.load(p, start + k * lanes)
        if not streamed:
            vec.store(out, start + k * lanes, zero)
        live[size] = k
        size += 1 if vec.any_lane((q > 0.0) | vec.unordered(q, q)) else 0
    return size


def curvature_power(powers: Any, row: int, like: Any) -> Any:
    """1 − c of a row as a vector, where it is needed."""
    raise NotImplementedError("for compiled code")


@overload(curvature_power, strict=False, jit_options=INLINED)
def _curvature_power(powers: Any, row: Any, like: Any) -> Any:
    if isinstance(powers.dtype, types.Integer):
        return lambda powers, row, like: like
    return lambda powers, row, like: like + (1.0 - power_at(powers, row))


def curvature(powers: Any, q: Any, power: Any) -> Any:
    """s = q^(1−c) where q > 0, NaN where it is NaN, else 0."""
    raise NotImplementedError("for compiled code")


@overload(curvature, strict=False, jit_options=INLINED)
def _curvature(powers: Any, q: Any, power: Any) -> Any:
    if powers.dtype == types.int8:
        return lambda powers, q, power: vec.select(q > 0.0, 1.0, q)
    if powers.dtype == types.int16:
        return lambda powers, q, power: vec.sqrt(q)
    if powers.dtype == types.int32:
        return lambda powers, q, power: q
    return lambda powers, q, power: vec.select(q > 0.0, vec.exp2(power * vec.log2(vec.maximum(q, 1e-37))), q)


def keep_curvature(powers: Any, kept: Any, k: int, s: Any) -> None:
    """Keep s at element k, if it takes a power or a root."""
    raise NotImplementedError("for compiled code")


@overload(keep_curvature, strict=False, jit_options=INLINED)
def _keep_curvature(powers: Any, kept: Any, k: Any, s: Any) -> Any:
    if _is_cheap(powers):
        return lambda powers, kept, k, s: None
    return lambda powers, kept, k, s: vec.store(kept, k, s)


def curvature_again(powers: Any, kept: Any, k: int, p: Any, i: int, power: Any) -> Any:
    """s as it was kept at element k, or computed once more from p at element i."""
    raise NotImplementedError("for compiled code")


@overload(curvature_again, strict=False, jit_options=INLINED)
def _curvature_again(powers: Any, kept: Any, k: Any, p: Any, i: Any, power: Any) -> Any:
    if _is_cheap(powers):
        return lambda powers, kept, k, p, i, power: curvature(powers, vec.load(p, i), power)
    return lambda powers, kept, k, p, i, power: vec.load(kept, k)


def _is_cheap(powers: Any) -> bool:
    """Whether s is p itself, or 1."""
    return powers.dtype in (types.int8, types.int32)


@strict
def normmax_product(
    first: int, last: int, chosen: int, changes: int, target: int, size: int, n: int, powers: Any, like: Any
) -> None:
    """J v = (N/c)(I − p1ᵀ) diag((p/N)^(1−c)) (I − 1pᵀ) v with N = ‖p‖_α, for each row; 0 at α = ∞.

    With m the largest probability, w = (p/m)^(1−c) is the one power that is needed: (p/m)^α = (p/m)²/w.
    """
    powers, like = borrowed(powers), borrowed(like)
    p, v, out = matrix(chosen, size, n, like), matrix(changes, size, n, like), matrix(target, size, n, like)
    lanes = vec.lanes(p)
    kind = p.dtype.type
    zero = vec.splat(kind(0))
    live = allocate(n // lanes + 1, np.int32)
    for row in range(first, last):
        start = row * n
        c = norm_exponent(powers, row)
        streamed = is_streamed(out, n)
        size, whole = _live_vectors(p, start, n, live, out, streamed), n // lanes
        rest = n - whole * lanes
        tail = start + whole * lanes
        last_p, last_v = vec.load_part(p, tail, rest, 0.0), vec.load_part(v, tail, rest, 0.0)
        largest = last_p
        for j in range(size):
            largest = vec.maximum(vec.load(p, start + live[j] * lanes), largest)
        top = vec.max_lanes(largest)
        top = top if top > 0 else kind(1)
        inverse = kind(1) / top
        sums = vec.widen(zero), vec.widen(zero), vec.widen(zero), vec.widen(zero)
        for first_of_group in range(0, size, _GROUP):
            part = zero, zero, zero, zero
            for j in range(first_of_group, min(first_of_group + _GROUP, size)):
                i = start + live[j] * lanes
                part = _terms(powers, vec.load(p, i), vec.load(v, i), inverse, c, part)
            sums = _added(sums, part)
        if rest:
            sums = _added(sums, _terms(powers, last_p, last_v, inverse, c, (zero, zero, zero, zero)))
        powered, along = vec.sum_lanes(sums[0]), vec.sum_lanes(sums[1])
        weight, weighted = vec.sum_lanes(sums[2]), vec.sum_lanes(sums[3])
        if c == np.inf:
            factor = 0.0
        else:
            norm = powered ** (1.0 / (1.0 + c))  # of p/m
            factor = np.float64(top) / c * norm**c
        slope, mean, balance = kind(factor), kind(along), kind(factor * (weighted - along * weight))
        end = start
        for j in range(size):
            i = start + live[j] * lanes
            if streamed:
                stream_zeros(out, end, i)
            q = vec.load(p, i)
            w = relative_weight(powers, q, inverse, c)
            put(out, i, vec.select(q > 0.0, slope * w * (vec.load(v, i) - mean) - q * balance, q), streamed)
            end = i + lanes
        if streamed:
            stream_zeros(out, end, tail)
        if rest:
            w = relative_weight(powers, last_p, inverse, c)
            found = vec.select(last_p > 0.0, slope * w * (last_v - mean) - last_p * balance, last_p)
            vec.store_part(out, tail, found, rest)
    release(live)
    finish_streams()


@strict_helper
def _added(sums: Any, part: Any) -> Any:
    a, b, c, d = sums
    e, f, g, h = part
    return a + vec.widen(e), b + vec.widen(f), c + vec.widen(g), d + vec.widen(h)


@strict_helper
def _terms(powers: Any, q: Any, g: Any, inverse: Any, c: float, sums: Any) -> Any:
    """(p/m)^α, p·v, w and w·v of one vector, added to sums."""
    powered, along, weight, weighted = sums
    inside = q > 0.0
    e = vec.select(inside, g, 0.0)
    r = q * inverse
    w = relative_weight(powers, q, inverse, c)
    w = vec.select(inside, w, 0.0)
    term = vec.select(inside, r * r / vec.select(inside, w, 1.0), q)
    return powered + term, along + q * e, weight + w, weighted + w * e


def norm_exponent(powers: Any, row: int) -> Any:
    """c of a row, from the array of ``parameters.parameters`` for normmax."""
    raise NotImplementedError("for compiled code")


@overload(norm_exponent, strict=False, jit_options=INLINED)
def _norm_exponent(powers: Any, row: Any) -> Any:
    if powers.dtype == types.int8:
        return lambda powers, row: np.inf
    if powers.dtype == types.int16:
        return lambda powers, row: 1.0
    return lambda powers, row: power_at(powers, row)


def relative_weight(powers: Any, q: Any, inverse: Any, c: float) -> Any:
    """(q·inverse)^(1−c) where q > 0."""
    raise NotImplementedError("for compiled code")


@overload(relative_weight, strict=False, jit_options=INLINED)
def _relative_weight(powers: Any, q: Any, inverse: Any, c: Any) -> Any:
    if powers.dtype == types.int8 or powers.dtype == types.int16:
        return lambda powers, q, inverse, c: q * 0.0 + 1.0
    return _relative_power


def _relative_power(powers: Any, q: Any, inverse: Any, c: float) -> Any:
    least = -vec.exponent_limit(q)
    if c == np.inf:
        return q * 0.0 + 1.0
    return vec.exp2(vec.minimum((1.0 - c) * vec.log2(vec.maximum(q * inverse, 1e-30)), 0.0 - least))


@strict
def entmax_alpha(first: int, last: int, p: Any, powers: Any, v: Any, out: Any) -> None:
    """⟨v, ∂p/∂α⟩ = −⟨v, Jσ⟩ with σ = ∂ln_c(p)/∂c, one value per row."""
    p, powers, v, out = borrowed(p), borrowed(powers), borrowed(v), borrowed(out)
    n = p.shape[1]
    shares, given = p.reshape(-1), v.reshape(-1)
    slopes, products = allocate(n, p.dtype), allocate(n, p.dtype)
    room = product_room(n, p)
    for row in range(first, last):
        total, c = 0.0, power_at(powers, row)
        if c != np.inf:
            q = shares[row * n : row * n + n]
            sensitivities(q, 0, n, c, slopes)
            if c > 1.0:
                steep_product(q, 0, n, c, slopes, products, room[0])
            else:
                product_of_row(q, 0, n, powers, row, slopes, products, room)
            total = dot_on_support(q, 0, n, given[row * n : row * n + n], products)
        out[row] = -total
    release(slopes)
    release(products)
    release_product(room)


@strict_helper
def dot_on_support(p: Any, start: int, n: int, v: Any, w: Any) -> Any:
    """Σ v·w over the support of p, of n entries from ``start`` on."""
    lanes = vec.lanes(p)
    zero = vec.splat(p.dtype.type(0))
    total = vec.widen(zero)
    for i in range(start, start + n, lanes):
        count = min(lanes, start + n - i)
        q, g = vec.load_part(p, i, count, 0.0), vec.load_part(v, i, count, 0.0)
        total += vec.widen(vec.select(q > 0.0, g, q)) * vec.widen(vec.load_part(w, i, count, 0.0))
    return vec.sum_lanes(total)


@strict_helper
def sensitivities(p: Any, start: int, n: int, c: float, out: Any) -> None:
    """∂ ln_c(p)/∂c = log²p ∫₀¹ t exp(xt) dt at x = c·log p, of n entries from ``start`` on; 0 where p = 0."""
    lanes = vec.lanes(p)
    for i in range(0, n, lanes):
        count = min(lanes, n - i)
        q = vec.load_part(p, start + i, count, 0.0)
        log, _, moment = moments(q, c, q * 0.0 + 1.0, 0.0)
        vec.store_part(out, i, vec.select(q > 0.0, log * log * moment, q), count)
