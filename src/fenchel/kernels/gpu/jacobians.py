"""Jacobian products of a block of rows that is in registers, given the result p."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from fenchel.kernels.gpu.arithmetic import HALF, LN_2, SPARSEMAX, STEEP, TOTAL, jit, moment, power_of


@jit
def product(
    p: tl.tensor,
    v: tl.tensor,
    c: tl.tensor,
    j: tl.tensor,
    KIND: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
) -> Any:
    """J v of a block of rows."""
    if NORM:
        out = norm_product(p, v, c, KIND, EPS)
    elif KIND == TOTAL:
        # One row per program: all its threads take the same branch.
        if c > 1.0:
            out = steep_product(p, v, tl.maximum(c, 1.0), j, BLOCK, EPS)
        else:
            out = flat_product(p, v, c, KIND)
    elif KIND == STEEP:
        out = steep_product(p, v, c, j, BLOCK, EPS)
    else:
        out = flat_product(p, v, c, KIND)
    return out


@jit
def curvature(p: tl.tensor, c: tl.tensor, KIND: tl.constexpr) -> Any:
    """s = p^(1−c) on the support, NaN where p is NaN, else 0."""
    if KIND == SPARSEMAX:
        s = tl.where(p > 0.0, 1.0, p)
    elif KIND == HALF:
        s = tl.sqrt(p)
    else:
        s = power_of(p, 1.0 - c)
    return s


@jit
def flat_product(p: tl.tensor, v: tl.tensor, c: tl.tensor, KIND: tl.constexpr) -> Any:
    """J v = s(v − ⟨s, v⟩/‖s‖₁), for α ≤ 2."""
    s = curvature(p, c, KIND)
    D = tl.sum(s, axis=1, keep_dims=True)
    return s * (v - tl.sum(s * v, axis=1, keep_dims=True) / tl.where(D == 0.0, 1.0, D))


@jit
def steep_product(
    p: tl.tensor, v: tl.tensor, c: tl.tensor, j: tl.tensor, BLOCK: tl.constexpr, EPS: tl.constexpr
) -> Any:
    """J v for α > 2, where s is huge for small p and J the difference of huge numbers; 0 at α = ∞.

    Everything is measured from the smallest probability: its own product is minus the sum of the others (J1 = 0). What
    is too large is the largest number.
    """
    LIMIT: tl.constexpr = 1.7e308 if EPS < 1e-10 else 3.4e38
    UNIT: tl.constexpr = 0.25 / BLOCK  # a power of two, so that no sum overflows
    on = p > 0.0
    least = tl.min(tl.where(on, p, float("inf")), axis=1, keep_dims=True)
    first = tl.min(tl.where(p == least, j[None, :], BLOCK), axis=1, keep_dims=True)
    origin = tl.sum(tl.where(j[None, :] == first, v, 0.0), axis=1, keep_dims=True) * UNIT
    log_p = tl.log2(tl.where(on, p, 1.0))
    relative = tl.where(p == least, 1.0, tl.exp2((1.0 - c) * (log_p - tl.log2(least))))
    relative = tl.where(on, relative, 0.0)
    v = tl.where(on, v * UNIT - origin, 0.0)
    count = tl.maximum(tl.sum(relative, axis=1, keep_dims=True), 1.0)
    mean = tl.sum(relative * v, axis=1, keep_dims=True) / count
    s = tl.minimum(tl.exp2((1.0 - c) * log_p), LIMIT)
    value = tl.minimum(tl.maximum(s * (v - mean), -LIMIT * UNIT), LIMIT * UNIT)
    value = tl.where(on & (j[None, :] != first), value, 0.0)
    rest = tl.minimum(tl.maximum(tl.sum(value, axis=1, keep_dims=True), -LIMIT * UNIT), LIMIT * UNIT)
    out = tl.where(j[None, :] == first, -rest, value) / UNIT
    return tl.where(c < float("inf"), tl.where(on, out, 0.0 * p), 0.0 * p)


@jit
def norm_product(p: tl.tensor, v: tl.tensor, c: tl.tensor, KIND: tl.constexpr, EPS: tl.constexpr) -> Any:
    """J v = (N/c)(I − p1ᵀ) diag((p/N)^(1−c)) (I − 1pᵀ) v with N = ‖p‖_α; 0 at α = ∞."""
    LIMIT: tl.constexpr = 1.7e308 if EPS < 1e-10 else 3.4e38
    if KIND == SPARSEMAX:
        out = 0.0 * p
    else:
        finite = c < float("inf")
        c = tl.where(finite, c, 1.0)
        largest = tl.max(p, axis=1, keep_dims=True)
        largest = tl.where(largest > 0.0, largest, 1.0)
        relative = p / largest
        norm = power_of(tl.sum(power_of(relative, 1.0 + c), axis=1, keep_dims=True), 1.0 / (1.0 + c))
        norm = tl.where(norm == 0.0, 1.0, norm)
        weight = tl.minimum(power_of(relative / norm, 1.0 - c), LIMIT)
        weight = tl.where(p == 0.0, 0.0, weight)
        out = largest * norm / c * weight * (v - tl.sum(p * v, axis=1, keep_dims=True))
        out = out - p * tl.sum(out, axis=1, keep_dims=True)
        out = tl.where(finite, out, 0.0 * p)
    return out


@jit
def sensitivity(p: tl.tensor, c: tl.tensor, NORM: tl.constexpr, EPS: tl.constexpr) -> Any:
    """∂∇Ω(p)/∂α with p held fixed, up to a constant per row; 0 where p is 0, and at α = ∞."""
    if NORM:
        out = norm_sensitivity(p, c)
    else:
        out = entropy_sensitivity(p, c, EPS)
    return out


@jit
def entropy_sensitivity(p: tl.tensor, c: tl.tensor, EPS: tl.constexpr) -> Any:
    """∂ ln_c(p)/∂c = log²p · ∫₀¹ t exp(xt) dt at x = c·log p, entry by entry."""
    log_p = tl.log2(tl.where(p > 0.0, p, 1.0)) * LN_2
    finite = tl.where(c < float("inf"), c, 1.0)
    change = log_p * log_p * moment(finite * log_p, TERMS=9 if EPS > 1e-10 else 18)
    return tl.where(c < float("inf"), tl.where(p > 0.0, change, 0.0), 0.0)


@jit
def norm_sensitivity(p: tl.tensor, c: tl.tensor) -> Any:
    """∂r^c/∂c with r = p/‖p‖_α, whose norm depends on α too: r^c (log r − c/α Σ r^α log r)."""
    finite = c < float("inf")
    c = tl.where(finite, c, 1.0)
    largest = tl.max(p, axis=1, keep_dims=True)
    relative = p / tl.where(largest > 0.0, largest, 1.0)
    total = tl.sum(power_of(relative, 1.0 + c), axis=1, keep_dims=True)
    log_norm = tl.log2(tl.where(total > 0.0, total, 1.0)) / (1.0 + c)
    log_r = tl.log2(tl.where(p > 0.0, relative, 1.0)) - log_norm
    power = tl.where(p > 0.0, tl.exp2(c * log_r), 0.0)
    shift = c / (1.0 + c) * tl.sum(power * relative * tl.exp2(-log_norm) * log_r, axis=1, keep_dims=True)
    return tl.where(finite, power * (log_r - shift) * LN_2, 0.0)


@jit
def saturated_sum(x: tl.tensor, UNIT: tl.constexpr, LIMIT: tl.constexpr) -> Any:
    """Sums of rows; what overflows is the largest number."""
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -LIMIT), LIMIT), x)
    total = tl.sum(x * UNIT, axis=1, keep_dims=True)
    return tl.where(total == total, tl.minimum(tl.maximum(total, -LIMIT * UNIT), LIMIT * UNIT) / UNIT, total)
