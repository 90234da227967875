"""Jacobian products of rows that do not fit into registers; see ``wide``.

``wide_product_kernel`` reads p once, and v where p is not zero. ``spill_product_kernel`` serves rows whose support does
not fit into a list, in a few passes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fenchel.kernels.gpu.arithmetic import ANY, LN_2, SPARSEMAX, STEEP, TOTAL, jit, power_of
from fenchel.kernels.gpu.jacobians import curvature, entropy_sensitivity, product, saturated_sum, sensitivity
from fenchel.kernels.gpu.launch import eps_of, launch
from fenchel.kernels.gpu.places import append, free_part, read
from fenchel.kernels.gpu.wide import lists_of


def start(
    p: Tensor,
    v: Tensor,
    out: Tensor,
    slope: Tensor,
    a: Tensor,
    bounds: Tensor,
    stride: int,
    apart: int,
    rules: dict[str, Any],
) -> None:
    """Start both kernels; the arguments are those of ``products.product_kernel``."""
    rows, n = p.shape
    programs, size, options = lists_of(p)
    if rules["PULL"] and p.dtype == torch.float64:
        size //= 2  # for want of registers
    spilled = torch.empty(rows, dtype=torch.int32, device=p.device)
    shares = torch.empty(programs, size, dtype=p.dtype, device=p.device)
    places = torch.empty(programs, size, dtype=torch.int32, device=p.device)
    common: dict[str, Any] = {**rules, "BLOCK": size, "EPS": eps_of(p.dtype), **options}
    common.pop("EACH")
    tensors = p, v, out, slope if rules["PULL"] else out, a, bounds
    listed = *tensors, shares, places, spilled
    launch(wide_product_kernel, (programs,), *listed, n, rows, stride, apart, CAP=size, **common)
    launch(spill_product_kernel, (rows,), *tensors, spilled, n, stride, apart, **common)


@jit
def wide_product_kernel(
    P: tl.tensor,
    V: tl.tensor,
    OUT: tl.tensor,
    SLOPE: tl.tensor,
    ALPHA: tl.tensor,
    UPPER: tl.tensor,
    SHARES: tl.tensor,
    PLACES: tl.tensor,
    SPILLED: tl.tensor,
    n: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    apart: tl.tensor,
    KIND: tl.constexpr,
    NORM: tl.constexpr,
    PULL: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    CAP: tl.constexpr,
) -> None:
    """One row after the other. SHARES and PLACES are lists of the entries that are not zero, one per program."""
    DTYPE: tl.constexpr = tl.float64 if EPS < 1e-10 else tl.float32
    j = tl.arange(0, BLOCK)
    k = tl.arange(0, CAP)
    me = tl.program_id(0)
    own = me.to(tl.int64) * CAP
    for r in range(me, rows, tl.num_programs(0)):
        row = tl.cast(r, tl.int64)
        c = (tl.load(ALPHA + row * stride).to(tl.float64) - 1.0).to(DTYPE)
        count = 0
        for b in range(0, n, BLOCK):
            inside = b + j < n
            p = read(P + row * n + b, j, inside, 0.0, EPS)
            p = free_part(p, UPPER, row * apart + b + j, inside, P.dtype.element_ty, BOUNDED, EPS)
            on = inside & (p != 0.0)
            if tl.max(on.to(tl.int32)) > 0:
                count = append(SHARES + own, PLACES + own, p, b + j, on, count, CAP)
            tl.store(OUT + row * n + b + j, tl.zeros([BLOCK], OUT.dtype.element_ty), mask=inside)
        # Two orders need this barrier: the lists are read below by other threads than wrote them, and entries of OUT
        # are written again below by other threads than wrote the zeros.
        tl.debug_barrier()
        tl.store(SPILLED + r, tl.where(count > CAP, 1, 0))  # read by the next kernel, after this one
        if count <= CAP:
            held = (k < count)[None, :]
            at = (own + k)[None, :]
            p = read(SHARES, at, held, 0.0, EPS)
            to = tl.load(PLACES + at, mask=held, other=0)
            v = read(V + row * n, to, held & (p > 0.0), 0.0, EPS)
            out = product(p, v, c, k, KIND, NORM, CAP, EPS)
            tl.store(OUT + row * n + to, out.to(OUT.dtype.element_ty), mask=held)
            if PULL:
                change = product(p, sensitivity(p, c, NORM, EPS), c, k, KIND, NORM, CAP, EPS)
                slope = saturated_sum(v * change, 0.25 / CAP, LIMIT=1.7e308 if EPS < 1e-10 else 3.4e38)
                tl.store(SLOPE + r, -tl.max(slope).to(SLOPE.dtype.element_ty))
        # The next row uses the lists again: no thread may write to them while another still reads.
        tl.debug_barrier()


@jit
def spill_product_kernel(
    P: tl.tensor,
    V: tl.tensor,
    OUT: tl.tensor,
    SLOPE: tl.tensor,
    ALPHA: tl.tensor,
    UPPER: tl.tensor,
    SPILLED: tl.tensor,
    n: tl.tensor,
    stride: tl.tensor,
    apart: tl.tensor,
    KIND: tl.constexpr,
    NORM: tl.constexpr,
    PULL: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """One row per program; rows that ``wide_product_kernel`` has done are left alone."""
    r = tl.program_id(0)
    if tl.load(SPILLED + r) > 0:
        DTYPE: tl.constexpr = tl.float64 if EPS < 1e-10 else tl.float32
        at = r.to(tl.int64) * n
        upper = r.to(tl.int64) * apart
        c = (tl.load(ALPHA + r.to(tl.int64) * stride).to(tl.float64) - 1.0).to(DTYPE)
        if NORM:
            slope = _spill_norm(P + at, V + at, OUT + at, n, c, KIND, PULL, EPS, BLOCK)
        elif KIND == STEEP:
            slope = _spill_steep(P + at, V + at, OUT + at, n, c, PULL, EPS, BLOCK)
        elif KIND == TOTAL:
            if c > 1.0:
                slope = _spill_steep(P + at, V + at, OUT + at, n, c, PULL, EPS, BLOCK)
            else:
                slope = _spill_flat(P + at, V + at, OUT + at, UPPER + upper, n, c, ANY, PULL, BOUNDED, EPS, BLOCK)
        else:
            slope = _spill_flat(P + at, V + at, OUT + at, UPPER + upper, n, c, KIND, PULL, BOUNDED, EPS, BLOCK)
        if PULL:
            tl.store(SLOPE + r, -slope.to(SLOPE.dtype.element_ty))


@jit
def _part(
    P: tl.tensor,
    V: tl.tensor,
    UPPER: tl.tensor,
    b: tl.tensor,
    n: tl.tensor,
    BOUNDED: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """Some entries of p, 0 where it is at its bound, and of v on the rest of the support."""
    at = b + tl.arange(0, BLOCK)
    p = read(P, at, at < n, 0.0, EPS)
    p = free_part(p, UPPER, at, at < n, P.dtype.element_ty, BOUNDED, EPS)
    return p, read(V, at, p > 0.0, 0.0, EPS)


@jit
def _spill_flat(
    P: tl.tensor,
    V: tl.tensor,
    OUT: tl.tensor,
    UPPER: tl.tensor,
    n: tl.tensor,
    c: tl.tensor,
    KIND: tl.constexpr,
    PULL: tl.constexpr,
    BOUNDED: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """``jacobians.flat_product`` of a row in memory; returns ⟨v, Jσ⟩ if ``PULL``."""
    DTYPE: tl.constexpr = tl.float64 if EPS < 1e-10 else tl.float32
    j = tl.arange(0, BLOCK)
    D = tl.zeros([BLOCK], DTYPE)
    N = tl.zeros([BLOCK], DTYPE)
    M = tl.zeros([BLOCK], DTYPE)
    for b in range(0, n, BLOCK):
        p, v = _part(P, V, UPPER, b, n, BOUNDED, EPS, BLOCK)
        s = curvature(p, c, KIND)
        D += s
        N += s * v
        if PULL:
            M += s * entropy_sensitivity(p, c, EPS)
    total = tl.sum(D)
    total = tl.where(total == 0.0, 1.0, total)  # no entry is between its bounds
    mean, middle = tl.sum(N) / total, tl.sum(M) / total
    slope = tl.zeros([BLOCK], DTYPE)
    for b in range(0, n, BLOCK):
        p, v = _part(P, V, UPPER, b, n, BOUNDED, EPS, BLOCK)
        s = curvature(p, c, KIND)
        tl.store(OUT + b + j, (s * (v - mean)).to(OUT.dtype.element_ty), mask=b + j < n)
        if PULL:
            slope += v * s * (entropy_sensitivity(p, c, EPS) - middle)
    return tl.sum(slope)


@jit
def _spill_steep(
    P: tl.tensor,
    V: tl.tensor,
    OUT: tl.tensor,
    n: tl.tensor,
    c: tl.tensor,
    PULL: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """``jacobians.steep_product`` of a row in memory; returns ⟨v, Jσ⟩ if ``PULL``."""
    DTYPE: tl.constexpr = tl.float64 if EPS < 1e-10 else tl.float32
    LIMIT: tl.constexpr = 1.7e308 if EPS < 1e-10 else 3.4e38
    UNIT: tl.constexpr = 2.0**-40  # no sum of a row overflows
    j = tl.arange(0, BLOCK)
    least = tl.full((), float("inf"), DTYPE)
    first = tl.full((), 0, tl.int32)
    for b in range(0, n, BLOCK):
        p, v = _part(P, V, P, b, n, 0, EPS, BLOCK)
        here = tl.min(tl.where(p > 0.0, p, float("inf")))
        at = b + tl.min(tl.where(p == here, j, BLOCK))
        first = tl.where(here < least, at, first)
        least = tl.minimum(least, here)
    origin = tl.load(V + first).to(DTYPE)
    own = tl.max(entropy_sensitivity(least + tl.zeros([BLOCK], DTYPE), c, EPS))
    D = tl.zeros([BLOCK], DTYPE)
    N = tl.zeros([BLOCK], DTYPE)
    M = tl.zeros([BLOCK], DTYPE)
    for b in range(0, n, BLOCK):
        p, v = _part(P, V, P, b, n, 0, EPS, BLOCK)
        relative = tl.where(p > 0.0, power_of(p / least, 1.0 - c), 0.0)
        D += relative
        N += relative * (v - origin) * UNIT
        if PULL:
            M += relative * (entropy_sensitivity(p, c, EPS) - own)
    total = tl.sum(D)
    mean, middle = tl.sum(N) / total, tl.sum(M) / total
    rest = tl.zeros([BLOCK], DTYPE)
    slope = tl.zeros([BLOCK], DTYPE)
    for b in range(0, n, BLOCK):
        p, v = _part(P, V, P, b, n, 0, EPS, BLOCK)
        s = tl.where(p > 0.0, tl.minimum(power_of(p, 1.0 - c), LIMIT), 0.0)
        value = s * ((v - origin) * UNIT - mean)
        value = tl.where(b + j == first, 0.0, tl.minimum(tl.maximum(value, -LIMIT * UNIT), LIMIT * UNIT))
        value = tl.where(c < float("inf"), value, 0.0)
        rest += value
        tl.store(OUT + b + j, (value / UNIT).to(OUT.dtype.element_ty), mask=(b + j < n) & (b + j != first))
        if PULL:
            # Measured from the smallest probability, as v is: J of a constant is 0.
            change = s * (entropy_sensitivity(p, c, EPS) - own - middle)
            slope += tl.where(b + j == first, 0.0, (v - origin) * change)
    value = tl.minimum(tl.maximum(-tl.sum(rest), -LIMIT * UNIT), LIMIT * UNIT) / UNIT
    tl.store(OUT + first, value.to(OUT.dtype.element_ty))  # the one entry that the loop has left out
    return tl.where(c < float("inf"), tl.sum(slope), 0.0)


@jit
def _spill_norm(
    P: tl.tensor,
    V: tl.tensor,
    OUT: tl.tensor,
    n: tl.tensor,
    c: tl.tensor,
    KIND: tl.constexpr,
    PULL: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """``jacobians.norm_product`` of a row in memory; returns ⟨v, Jσ⟩ if ``PULL``."""
    DTYPE: tl.constexpr = tl.float64 if EPS < 1e-10 else tl.float32
    j = tl.arange(0, BLOCK)
    finite = c < float("inf")
    c = tl.where(finite, c, 1.0)
    largest = tl.full((), 0.0, DTYPE)
    for b in range(0, n, BLOCK):
        p, v = _part(P, V, P, b, n, 0, EPS, BLOCK)
        largest = tl.maximum(largest, tl.max(p))
    powers = tl.zeros([BLOCK], DTYPE)
    logs = tl.zeros([BLOCK], DTYPE)
    along = tl.zeros([BLOCK], DTYPE)
    weights = tl.zeros([BLOCK], DTYPE)
    weighted = tl.zeros([BLOCK], DTYPE)
    for b in range(0, n, BLOCK):
        p, v = _part(P, V, P, b, n, 0, EPS, BLOCK)
        w = tl.where(p > 0.0, power_of(p / largest, 1.0 - c), 0.0)
        power = power_of(p / largest, 1.0 + c)
        powers += power
        along += p * v
        weights += w
        weighted += w * v
        if PULL:
            logs += power * tl.log2(tl.where(p > 0.0, p / largest, 1.0))
    total = tl.sum(powers)
    log_norm = tl.log2(total) / (1.0 + c)
    mean = tl.sum(along)
    factor = tl.where(finite, largest / c * tl.exp2(c * log_norm), 0.0)
    balance = factor * (tl.sum(weighted) - mean * tl.sum(weights))
    shift = c / (1.0 + c) * (tl.sum(logs) / total - log_norm)
    change = tl.full((), 0.0, DTYPE)
    if PULL:
        for b in range(0, n, BLOCK):
            p, v = _part(P, V, P, b, n, 0, EPS, BLOCK)
            change += tl.sum(p * _sensitivity(p, largest, c, log_norm, shift))
    if KIND == SPARSEMAX:
        factor, balance = factor * 0.0, balance * 0.0
    rest = tl.zeros([BLOCK], DTYPE)
    slope = tl.zeros([BLOCK], DTYPE)
    for b in range(0, n, BLOCK):
        p, v = _part(P, V, P, b, n, 0, EPS, BLOCK)
        w = tl.where(p > 0.0, power_of(p / largest, 1.0 - c), 0.0)
        out = factor * w * (v - mean) - p * balance
        tl.store(OUT + b + j, out.to(OUT.dtype.element_ty), mask=b + j < n)
        if PULL:
            moved = factor * w * (_sensitivity(p, largest, c, log_norm, shift) - change)
            rest += moved
            slope += v * moved
    return tl.sum(slope) - mean * tl.sum(rest)


@jit
def _sensitivity(p: tl.tensor, largest: tl.tensor, c: tl.tensor, log_norm: tl.tensor, shift: tl.tensor) -> Any:
    """``jacobians.norm_sensitivity`` of some entries, given the sums over the row."""
    log_r = tl.log2(tl.where(p > 0.0, p / largest, 1.0)) - log_norm
    return tl.where(p > 0.0, tl.exp2(c * log_r) * (log_r - shift), 0.0) * LN_2
