"""The solution of a block of rows z (R, B) that is in registers: largest score 0, −inf where there is none.

Sums and maxima are (R, 1). A row that has converged stays as it is, so that no row depends on its neighbours.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl

from fenchel.kernels.gpu.arithmetic import ANY, LOG2_E, STEEP, TOTAL, advance, jit, mass

_STEPS: Any = tl.constexpr(200)  # far more than it takes


@jit
def any_row(condition: tl.tensor) -> Any:
    """1 if a condition (R, 1) holds in some row, else 0."""
    return tl.max(tl.max(tl.where(condition, 1, 0), axis=1), axis=0)


@jit
def shift(z: tl.tensor) -> Any:
    """Rows less their largest score; that score; rows without a score; rows with NaN or +inf."""
    usable, top, bad = usable_rows(z)
    return z - tl.where(usable, top, 0.0), top, (usable == 0) & (bad == 0), bad


@jit
def usable_rows(z: tl.tensor) -> Any:
    """Rows with a score and without NaN or +inf; the largest score; rows with NaN or +inf."""
    bad = tl.max(tl.where((z != z) | (z == float("inf")), 1, 0), axis=1, keep_dims=True) > 0
    top = tl.max(tl.where(z != z, float("-inf"), z), axis=1, keep_dims=True)
    return (bad == 0) & (top > float("-inf")), top, bad


@jit
def solve(
    z: tl.tensor, c: tl.tensor, usable: tl.tensor, KIND: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr
) -> Any:
    """The weights p of each row, and its offset A; c = α − 1 is one number, or one per row (R, 1)."""
    if KIND == TOTAL:
        # One row per program: all its threads take the same branch.
        if c > 1.0:
            p, offset = solve_steep(z, tl.maximum(c, 1.0), usable, EPS)
        else:
            p, offset = solve_flat(z, tl.minimum(c, 1.0), usable, ANY, NORM, EPS)
    elif KIND == STEEP:
        p, offset = solve_steep(z, c, usable, EPS)
    else:
        p, offset = solve_flat(z, c, usable, KIND, NORM, EPS)
    return p, offset


@jit
def exponents(c: tl.tensor, NORM: tl.constexpr) -> Any:
    """Scale and h of a rule, see ``arithmetic``."""
    if NORM:
        h = tl.where(c == float("inf"), 1.0, c / (1.0 + c))
        return h * 0.0 + 1.0, h
    c = tl.where(tl.abs(c) < 1e-20, 1e-20, c)  # so near to softmax nothing changes any more
    return c, c


@jit
def solve_flat(
    z: tl.tensor, c: tl.tensor, usable: tl.tensor, KIND: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr
) -> Any:
    """``solve`` by Newton's method on the offset, for α ≤ 2 of entmax and every α of normmax."""
    TERMS: tl.constexpr = 5 if EPS > 1e-10 else 11
    scale, h = exponents(c, NORM)
    offset = tl.sum(z * 0.0, axis=1, keep_dims=True)  # of the right type: NaN in rows that are not usable, set below
    offset = tl.where(offset == 0.0, offset, 0.0)
    moving = usable
    go = any_row(moving)
    taken = 0
    while go > 0:
        p, s = mass(z - offset, scale, h, KIND, TERMS)
        S = tl.sum(p, axis=1, keep_dims=True)
        step = advance(S, tl.sum(s, axis=1, keep_dims=True), scale, h, KIND, TERMS)
        step = tl.where(moving, step, 0.0)
        offset += step
        moving = moving & (step > 8 * EPS * tl.maximum(offset, 1.0))
        taken += 1
        go = any_row(moving) * tl.where(taken < _STEPS, 1, 0)
    p, s = mass(z - offset, scale, h, KIND, TERMS)
    D = tl.sum(s, axis=1, keep_dims=True)
    D = tl.where(D > 0.0, D, 1.0)
    if NORM:
        p = s / D
    else:
        # The offset is only as fine as its own last digit; p can be finer.
        rest = (tl.sum(p, axis=1, keep_dims=True) - 1.0) / D
        p = tl.maximum(p - s * rest, 0.0)
        offset += rest
    return p, offset


@jit
def solve_steep(z: tl.tensor, c: tl.tensor, usable: tl.tensor, EPS: tl.constexpr) -> Any:
    """``solve`` for c > 1, ∞ included: p rises so steeply at the threshold that all is measured from a score there.

    First the smallest score of the support: the smallest at which the mass of those above it is below 1, by bisection
    between scores. Then the smallest probability w, by Newton's method: p = (c(z − least) + w^c)^(1/c) is convex in w.
    """
    TINY: tl.constexpr = 1e-37 if EPS > 1e-10 else 1e-300
    zero = tl.sum(tl.where(z == z, 0.0, 0.0).to(z.dtype), axis=1, keep_dims=True)
    inside, outside = zero, zero - 1.0 / c
    go = any_row(usable)
    while go > 0:
        middle = 0.5 * (inside + outside)
        lower = tl.max(tl.where(z <= middle, z, float("-inf")), axis=1, keep_dims=True)
        upper = tl.min(tl.where((z > middle) & (z > outside), z, 0.0), axis=1, keep_dims=True)
        pivot = tl.where(lower > outside, lower, upper)
        moving = usable & (pivot < inside)
        gap = z - pivot
        above = tl.exp2(tl.log2(tl.where(gap > 0.0, gap * c, 1.0)) / c)
        below = tl.sum(tl.where(gap > 0.0, above, 0.0), axis=1, keep_dims=True) < 1.0
        inside = tl.where(moving & below, pivot, inside)
        outside = tl.where(moving & (below == 0), pivot, outside)
        go = any_row(moving)
    gap = z - inside
    at, over = gap == 0.0, gap > 0.0
    w = 1.0 / tl.maximum(tl.sum(tl.where(at | over, 1.0, 0.0).to(z.dtype), axis=1, keep_dims=True), 1.0)
    moving = usable & (inside < 0.0)
    before = zero + float("inf")
    go = any_row(moving)
    taken = 0
    while go > 0:
        share, power, slope = steep_shares(gap, at, over, w, c, TINY)
        excess = tl.sum(share, axis=1, keep_dims=True) - 1.0
        moving = moving & (tl.abs(excess) > 2 * EPS) & (tl.abs(excess) < before)
        before = tl.abs(excess)
        w = tl.where(moving, tl.maximum(w - excess / tl.sum(slope, axis=1, keep_dims=True), 0.5 * w), w)
        taken += 1
        go = any_row(moving) * tl.where(taken < _STEPS, 1, 0)
    share, power, slope = steep_shares(gap, at, over, w, c, TINY)
    return share, inside + (1.0 - power) / c


@jit
def steep_shares(gap: tl.tensor, at: tl.tensor, over: tl.tensor, w: tl.tensor, c: tl.tensor, TINY: tl.constexpr) -> Any:
    """p of each entry, w^c, and the derivative of p in w."""
    log_w = tl.log2(w)
    power = tl.where(log_w < 0.0, tl.exp2(tl.where(log_w < 0.0, log_w * c, 0.0)), 1.0)
    above = tl.log2(tl.maximum(tl.where(over, gap * c, 0.0) + power, TINY)) / c
    share = tl.where(over, tl.exp2(above), tl.where(at, w, 0.0))
    slope = tl.where(over, tl.exp2((c - 1.0) * (log_w - above)), tl.where(at, 1.0, 0.0))
    return share, power, slope


@jit
def project(z: tl.tensor, u: tl.tensor, k: tl.tensor, usable: tl.tensor, top: tl.tensor, EPS: tl.constexpr) -> Any:
    """min([z − τ]₊, u) with sum k, for a block of rows with largest scores ``top``; u is a block, or one number.

    First the smallest score of the support: the smallest at which the mass Σ min([z − score]₊, u) is below the budget,
    by bisection between scores. Scores enter by their distance d from it alone, which keeps all digits. What is left, Σ
    min(d + x, u) = k on the support, is concave in x: Newton's steps from 0 grow to the solution and do not pass it.
    """
    least = tl.min(tl.where(z > float("-inf"), z, float("inf")), axis=1, keep_dims=True)
    inside, outside = top, top + float("-inf")
    go = any_row(usable)
    while go > 0:
        low = tl.maximum(outside, least)
        middle = tl.minimum(low + 0.5 * (inside - low), inside)
        lower = tl.max(tl.where(z <= middle, z, float("-inf")), axis=1, keep_dims=True)
        upper = tl.min(tl.where((z > middle) & (z > outside), z, float("inf")), axis=1, keep_dims=True)
        pivot = tl.where(lower > outside, lower, upper)
        moving = usable & (pivot < inside)
        total = tl.sum(tl.minimum(tl.maximum(z - pivot, 0.0), u), axis=1, keep_dims=True)
        below = total < k
        inside = tl.where(moving & below, pivot, inside)
        outside = tl.where(moving & (below == 0), pivot, outside)
        go = any_row(moving)
    d = z - inside
    support = d >= 0.0
    x = top * 0.0
    growing = usable
    # A new name: Triton 3.7 fails to compile a loop whose condition is carried before other variables.
    again = any_row(growing)
    while again > 0:
        free = support & (d + x < u)
        count = tl.sum(tl.where(free, 1.0, 0.0).to(z.dtype), axis=1, keep_dims=True)
        total = tl.sum(tl.where(support, tl.minimum(d + x, u), 0.0), axis=1, keep_dims=True)
        step = tl.where(growing & (count > 0.0), (k - total) / tl.maximum(count, 1.0), 0.0)
        growing = growing & (step > 4 * EPS * tl.maximum(x, k / tl.maximum(count, 1.0)))
        x += tl.where(step > 0.0, step, 0.0)
        again = any_row(growing)
    free = support & (d + x < u)
    count = tl.maximum(tl.sum(tl.where(free, 1.0, 0.0).to(z.dtype), axis=1, keep_dims=True), 1.0)
    full = tl.where(support & (free == 0), u, 0.0)
    rest = k - tl.sum(full, axis=1, keep_dims=True)  # apart: a few free entries beside many would drown in rounding
    p = tl.where(free, d + x, 0.0)
    for _ in range(2):  # the second time for what was lost in rounding
        missing = (rest - tl.sum(p, axis=1, keep_dims=True)) / count
        p = tl.where(free, tl.minimum(tl.maximum(p + missing, 0.0), u), 0.0)
    return full + p


@jit
def cap(z: tl.tensor, u: tl.tensor, k: tl.tensor) -> Any:
    """min(e^(z − τ), u) with sum k, for a block of rows; u is a block, or one number.

    The factor of the weights grows from below until no other entry reaches its bound: the sum is concave in it, so that
    no step passes the solution. Weights are relative to the largest free one, and keep their digits.
    """
    full = z != z
    w = z * 0.0
    factor = k
    go = 1
    while go > 0:
        free = (z > float("-inf")) & (full == 0)
        origin = tl.max(tl.where(free, z, float("-inf")), axis=1, keep_dims=True)
        w = tl.where(free, tl.exp2(tl.where(free, z - origin, 0.0) * LOG2_E), 0.0)
        rest = tl.sum(w, axis=1, keep_dims=True)
        left = k - tl.sum(tl.where(full, u, 0.0), axis=1, keep_dims=True)
        factor = tl.maximum(left, 0.0) / tl.where(rest > 0.0, rest, 1.0)
        reached = free & (w * factor >= u)
        full = full | reached
        go = any_row(reached)
    return tl.where(full, u, w * factor)
