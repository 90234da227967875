"""Maps and class losses of rows that do not fit into registers.

``wide_kernel`` reads a row once. It writes zeros, and copies the candidates, the entries that can have mass, to a list
of its own; these fit into registers, and are solved there as a narrow row is. The list is in global memory, but small:
the cache holds it. Rows with more candidates than a list has places are left to ``spill_kernel``, which reads them
again in each step of the solution, and is exact too.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fenchel.kernels.gpu import launch as launch_settings
from fenchel.kernels.gpu.arithmetic import ANY, STEEP, TOTAL, advance, jit, mass
from fenchel.kernels.gpu.launch import eps_of, is_light, launch, of_warps
from fenchel.kernels.gpu.losses import class_loss, is_wrong, target
from fenchel.kernels.gpu.places import append
from fenchel.kernels.gpu.solvers import exponents, solve, steep_shares

THREADS = 512
"""Threads of a program: each holds 4 entries of a block, 2 in double precision, and twice as many of a list. More of
them would have too few registers. With logarithms or in double precision ``wide_kernel`` has half as many threads, and
blocks of half the size, so that each thread has twice as many registers."""

_PROGRAMS = 1 << 9  # at most: each has a list
_STEPS: Any = tl.constexpr(200)


def start(x: Tensor, p: Tensor, y: Tensor, loss: Tensor, a: Tensor, stride: int, rules: dict[str, Any]) -> None:
    """Start both kernels; the arguments are those of ``rows.rows_kernel``."""
    rows, n = x.shape
    programs, size, options = lists_of(x)
    spilled = torch.empty(rows, dtype=torch.int32, device=x.device)
    values = torch.empty(programs, size, dtype=x.dtype, device=x.device)
    places = torch.empty(programs, size, dtype=torch.int32, device=x.device)
    common: dict[str, Any] = {**rules, "EPS": eps_of(x.dtype)}
    tensors = x, p, y, loss, a, values, places, spilled
    if is_light(rules["KIND"]) and x.dtype != torch.float64:
        own = {"BLOCK": size // 2, "num_warps": options["num_warps"]}  # to tell of registers makes the assembler spill
    else:
        own = {"BLOCK": size // 4, **of_warps(options["num_warps"] // 2)}
    launch(wide_kernel, (programs,), *tensors, n, rows, stride, CAP=size, **common, **own)
    launch(spill_kernel, (rows,), x, p, y, loss, a, spilled, n, stride, BLOCK=size // 2, **common, **options)


def lists_of(x: Tensor) -> tuple[int, int, dict[str, int]]:
    """How many programs serve wide rows x, how many places their lists have, and the options of their warps."""
    return (
        min(len(x), _PROGRAMS),
        1 << (11 if x.dtype == torch.float64 else 12),
        of_warps(THREADS // launch_settings.LANES),
    )


@jit
def wide_kernel(
    Z: tl.tensor,
    P: tl.tensor,
    Y: tl.tensor,
    L: tl.tensor,
    ALPHA: tl.tensor,
    VALUES: tl.tensor,
    PLACES: tl.tensor,
    SPILLED: tl.tensor,
    n: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    KIND: tl.constexpr,
    EACH: tl.constexpr,
    NORM: tl.constexpr,
    LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    CAP: tl.constexpr,
) -> None:
    """One row after the other. VALUES and PLACES are lists, one per program; SPILLED says which rows are left over."""
    DTYPE: tl.constexpr = tl.float64 if EPS < 1e-10 else tl.float32
    RULE: tl.constexpr = ANY if KIND == TOTAL else KIND
    TERMS: tl.constexpr = 5 if EPS > 1e-10 else 11
    j = tl.arange(0, BLOCK)
    k = tl.arange(0, CAP)[None, :]
    me = tl.program_id(0)
    values = VALUES + me.to(tl.int64) * CAP
    places = PLACES + me.to(tl.int64) * CAP
    for r in range(me, rows, tl.num_programs(0)):
        row = tl.cast(r, tl.int64)
        alpha = tl.load(ALPHA + row * stride).to(tl.float64)
        c = (alpha - 1.0).to(DTYPE)
        scale, h = exponents(c, NORM)
        # Below largest score − margin nothing has mass.
        margin = tl.where(scale > 0.0, 1.0 / tl.where(scale > 0.0, scale, 1.0), float("inf"))
        y, reached, hit, wrong = _target(Z + row * n, Y + row, n, LOSS, DTYPE)
        top = tl.full((), float("-inf"), DTYPE)
        lift = tl.full((), 0.0, DTYPE)  # a lower bound of the offset, relative to the largest score so far
        count = 0
        bad = wrong + (tl.where(is_wrong(alpha, NORM) > 0, 1, 0) if EACH else 0)
        for b in range(0, n, BLOCK):
            inside = b + j < n
            z = tl.load(Z + row * n + b + j, mask=inside, other=float("-inf")).to(DTYPE)
            bad += tl.max(tl.where((z != z) | (z == float("inf")), 1, 0))
            higher = tl.maximum(top, tl.max(tl.where(z != z, float("-inf"), z)))
            lift = tl.where(higher > top, tl.maximum(lift - (higher - top), 0.0), lift)
            top = higher
            u = z - tl.where(top > float("-inf"), top, 0.0)
            slack = 16 * EPS * (1.0 + lift)
            near = (u > lift - margin - slack) & (u > float("-inf"))
            here = tl.sum(near.to(tl.int32))
            if here > BLOCK // 16:
                # The offset of a part of the row is a lower bound of the row's: a few steps towards this block's own.
                if (scale > 0.0) & (scale <= 1.0):
                    for _ in range(3):
                        q, s = mass(u - lift, scale, h, RULE, TERMS)
                        S = tl.sum(q)
                        step = advance(S, tl.sum(s), scale, h, RULE, TERMS)
                        lift += tl.where(S > 1.0, step * (1.0 - 16 * EPS), 0.0)
                    slack = 16 * EPS * (1.0 + lift)
                    near = (u > lift - margin - slack) & (u > float("-inf"))
                    here = tl.sum(near.to(tl.int32))
            if here > 0:
                count = append(values, places, z, b + j, near, count, CAP)
            if LOSS != 1:
                blank = tl.where(b + j == hit, -1.0, 0.0)
                tl.store(P + row * n + b + j, blank.to(P.dtype.element_ty), mask=inside)
        # Two orders need this barrier: the lists are read below by other threads than wrote them, and entries of P are
        # written again below by other threads than wrote the zeros.
        tl.debug_barrier()
        fits = (count <= CAP) & (bad == 0)
        tl.store(SPILLED + r, tl.where((count > CAP) & (bad == 0), 1, 0))  # read by the next kernel, after this one
        if fits:
            held = k < count
            z = tl.load(values + k, mask=held, other=float("-inf")).to(DTYPE)
            z = z - tl.where(top > float("-inf"), top, 0.0)
            largest = tl.max(z, axis=1, keep_dims=True)
            p, offset = solve(z, c, largest > float("-inf"), KIND, NORM, EPS)
            p = tl.where(held, tl.where(largest > float("-inf"), p, 0.0), 0.0)
            at = tl.load(places + k, mask=held, other=0)
            if LOSS == 0:
                tl.store(P + row * n + at, p.to(P.dtype.element_ty), mask=held & (p > 0.0))
            else:
                along = tl.sum(p * tl.where(p == 0.0, 0.0, z), axis=1, keep_dims=True)
                gap = largest * 0.0 + reached - tl.where(top > float("-inf"), top, 0.0)
                loss = class_loss(along, offset, c, gap, largest == float("-inf"), largest != largest, NORM)
                loss = tl.where(y < 0, 0.0, tl.max(loss))
                tl.store(L + r, loss.to(L.dtype.element_ty))
                if LOSS == 2:
                    slope = p - tl.where(at == hit, 1.0, 0.0)
                    written = tl.where(y >= 0, tl.where(p > 0.0, 1, 0), 0) > 0
                    tl.store(P + row * n + at, slope.to(P.dtype.element_ty), mask=held & written)
        if bad > 0:
            _spoil(P, L, row, n, y, LOSS, BLOCK)
        # The next row uses the lists again: no thread may write to them while another still reads.
        tl.debug_barrier()


@jit
def _target(Z: tl.tensor, Y: tl.tensor, n: tl.tensor, LOSS: tl.constexpr, DTYPE: tl.constexpr) -> Any:
    """The class index of a row, its score, the index again, −1 if that score is −inf, and 1 if it does not exist."""
    if LOSS == 0:
        y, reached, wrong = tl.full((), -1, tl.int64), tl.full((), float("-inf"), DTYPE), tl.full((), 0, tl.int32)
    else:
        y, reached, missing = target(Z, Y, n > 0, n, DTYPE)
        wrong = tl.where(missing, 1, 0)
    return y, reached, tl.where(reached > float("-inf"), y, -1), wrong


@jit
def _spoil(
    P: tl.tensor, L: tl.tensor, row: tl.tensor, n: tl.tensor, y: tl.tensor, LOSS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """NaN in a row with NaN, +inf or a wrong α; 0 if its loss is left out."""
    j = tl.arange(0, BLOCK)
    value = float("nan")
    if LOSS != 0:
        value = tl.where(y < 0, 0.0, float("nan"))
        tl.store(L + row, value.to(L.dtype.element_ty))
    if LOSS != 1:
        for b in range(0, n, BLOCK):
            tl.store(P + row * n + b + j, (j * 0.0 + value).to(P.dtype.element_ty), mask=b + j < n)


@jit
def spill_kernel(
    Z: tl.tensor,
    P: tl.tensor,
    Y: tl.tensor,
    L: tl.tensor,
    ALPHA: tl.tensor,
    SPILLED: tl.tensor,
    n: tl.tensor,
    stride: tl.tensor,
    KIND: tl.constexpr,
    EACH: tl.constexpr,
    NORM: tl.constexpr,
    LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """One row per program, read again in each step; rows that ``wide_kernel`` has solved are left alone."""
    r = tl.program_id(0)
    if tl.load(SPILLED + r) > 0:
        row = r.to(tl.int64)
        DTYPE: tl.constexpr = tl.float64 if EPS < 1e-10 else tl.float32
        c = (tl.load(ALPHA + row * stride).to(tl.float64) - 1.0).to(DTYPE)
        z = Z + row * n
        y, reached, hit, _wrong = _target(z, Y + row, n, LOSS, DTYPE)
        top = tl.full((), float("-inf"), DTYPE)
        for b in range(0, n, BLOCK):
            top = tl.maximum(top, tl.max(_part(z, b, n, 0.0, DTYPE, BLOCK)))
        along = tl.full((), 0.0, DTYPE)
        if KIND == STEEP:
            offset, along = _spill_steep(z, P + row * n, n, top, c, y, hit, LOSS, DTYPE, BLOCK, EPS)
        elif KIND == TOTAL:
            if c > 1.0:
                offset, along = _spill_steep(z, P + row * n, n, top, c, y, hit, LOSS, DTYPE, BLOCK, EPS)
            else:
                offset, along = _spill_flat(z, P + row * n, n, top, c, y, hit, ANY, NORM, LOSS, DTYPE, BLOCK, EPS)
        else:
            offset, along = _spill_flat(z, P + row * n, n, top, c, y, hit, KIND, NORM, LOSS, DTYPE, BLOCK, EPS)
        if LOSS != 0:
            loss = class_loss(along, offset, c, reached - top, top != top, top != top, NORM)
            tl.store(L + r, tl.where(y < 0, 0.0, loss).to(L.dtype.element_ty))


@jit
def _part(z: tl.tensor, b: tl.tensor, n: tl.tensor, top: tl.tensor, DTYPE: tl.constexpr, BLOCK: tl.constexpr) -> Any:
    """Some scores of a row less ``top``."""
    j = tl.arange(0, BLOCK)
    return tl.load(z + b + j, mask=b + j < n, other=float("-inf")).to(DTYPE) - top


@jit
def _put(
    P: tl.tensor,
    b: tl.tensor,
    n: tl.tensor,
    p: tl.tensor,
    y: tl.tensor,
    hit: tl.tensor,
    LOSS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write some weights, or the gradient of the loss there."""
    j = tl.arange(0, BLOCK)
    if LOSS == 2:
        p = p - tl.where(b + j == hit, 1.0, 0.0)
        p = tl.where(y < 0, 0.0, p)
    if LOSS != 1:
        tl.store(P + b + j, p.to(P.dtype.element_ty), mask=b + j < n)


@jit
def _spill_flat(
    Z: tl.tensor,
    P: tl.tensor,
    n: tl.tensor,
    top: tl.tensor,
    c: tl.tensor,
    y: tl.tensor,
    hit: tl.tensor,
    KIND: tl.constexpr,
    NORM: tl.constexpr,
    LOSS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
) -> Any:
    """``solvers.solve_flat`` of a row in memory; returns the offset and ⟨p, z⟩."""
    TERMS: tl.constexpr = 5 if EPS > 1e-10 else 11
    scale, h = exponents(c, NORM)
    offset = tl.full((), 0.0, DTYPE)
    go = 1
    taken = 0
    while go > 0:
        S, D = _sums(Z, n, top, offset, scale, h, KIND, DTYPE, BLOCK, TERMS)
        step = advance(S, D, scale, h, KIND, TERMS)
        offset += step
        taken += 1
        go = tl.where((step > 8 * EPS * tl.maximum(offset, 1.0)) & (taken < _STEPS), 1, 0)
    S, D = _sums(Z, n, top, offset, scale, h, KIND, DTYPE, BLOCK, TERMS)
    rest = (S - 1.0) / D
    along = tl.zeros([BLOCK], DTYPE)
    for b in range(0, n, BLOCK):
        z = _part(Z, b, n, top, DTYPE, BLOCK)
        p, s = mass(z - offset, scale, h, KIND, TERMS)
        if NORM:
            p = s / D
        else:
            p = tl.maximum(p - s * rest, 0.0)
        along += p * tl.where(p == 0.0, 0.0, z)
        _put(P, b, n, p, y, hit, LOSS, BLOCK)
    return offset + (0.0 if NORM else rest), tl.sum(along)


@jit
def _sums(
    Z: tl.tensor,
    n: tl.tensor,
    top: tl.tensor,
    offset: tl.tensor,
    scale: tl.tensor,
    h: tl.tensor,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    TERMS: tl.constexpr,
) -> Any:
    """Σp and Σs of a row in memory."""
    S = tl.zeros([BLOCK], DTYPE)
    D = tl.zeros([BLOCK], DTYPE)
    for b in range(0, n, BLOCK):
        p, s = mass(_part(Z, b, n, top, DTYPE, BLOCK) - offset, scale, h, KIND, TERMS)
        S += p
        D += s
    return tl.sum(S), tl.sum(D)


@jit
def _spill_steep(
    Z: tl.tensor,
    P: tl.tensor,
    n: tl.tensor,
    top: tl.tensor,
    c: tl.tensor,
    y: tl.tensor,
    hit: tl.tensor,
    LOSS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
) -> Any:
    """``solvers.solve_steep`` of a row in memory; returns the offset and ⟨p, z⟩."""
    inside = tl.full((), 0.0, DTYPE)
    outside = inside - 1.0 / c
    go = 1
    while go > 0:
        middle = 0.5 * (inside + outside)
        lower = tl.full((), float("-inf"), DTYPE)
        upper = tl.full((), 0.0, DTYPE)
        for b in range(0, n, BLOCK):
            z = _part(Z, b, n, top, DTYPE, BLOCK)
            lower = tl.maximum(lower, tl.max(tl.where(z <= middle, z, float("-inf"))))
            upper = tl.minimum(upper, tl.min(tl.where((z > middle) & (z > outside), z, 0.0)))
        pivot = tl.where(lower > outside, lower, upper)
        go = tl.where(pivot < inside, 1, 0)
        if go > 0:
            total = tl.zeros([BLOCK], DTYPE)
            for b in range(0, n, BLOCK):
                gap = _part(Z, b, n, top, DTYPE, BLOCK) - pivot
                above = tl.exp2(tl.log2(tl.where(gap > 0.0, gap * c, 1.0)) / c)
                total += tl.where(gap > 0.0, above, 0.0)
            below = tl.sum(total) < 1.0
            inside = tl.where(below, pivot, inside)
            outside = tl.where(below, outside, pivot)
    count = tl.zeros([BLOCK], DTYPE)
    for b in range(0, n, BLOCK):
        count += tl.where(_part(Z, b, n, top, DTYPE, BLOCK) >= inside, 1.0, 0.0)
    w = 1.0 / tl.sum(count)
    before = tl.full((), float("inf"), DTYPE)
    go = tl.where(inside < 0.0, 1, 0)
    taken = 0
    while go > 0:
        total = tl.zeros([BLOCK], DTYPE)
        slopes = tl.zeros([BLOCK], DTYPE)
        for b in range(0, n, BLOCK):
            share, slope = _steep_part(_part(Z, b, n, top, DTYPE, BLOCK), inside, w, c, EPS)
            total += share
            slopes += slope
        excess = tl.sum(total) - 1.0
        taken += 1
        go = tl.where((tl.abs(excess) > 2 * EPS) & (tl.abs(excess) < before) & (taken < _STEPS), 1, 0)
        w = tl.where(go > 0, tl.maximum(w - excess / tl.sum(slopes), 0.5 * w), w)
        before = tl.abs(excess)
    along = tl.zeros([BLOCK], DTYPE)
    for b in range(0, n, BLOCK):
        z = _part(Z, b, n, top, DTYPE, BLOCK)
        p, slope = _steep_part(z, inside, w, c, EPS)
        along += p * tl.where(p == 0.0, 0.0, z)
        _put(P, b, n, p, y, hit, LOSS, BLOCK)
    log_w = tl.log2(w)
    power = tl.where(log_w < 0.0, tl.exp2(tl.where(log_w < 0.0, log_w * c, 0.0)), 1.0)
    return inside + (1.0 - power) / c, tl.sum(along)


@jit
def _steep_part(z: tl.tensor, least: tl.tensor, w: tl.tensor, c: tl.tensor, EPS: tl.constexpr) -> Any:
    """p of some entries, and its derivative in w."""
    gap = z - least
    share, _power, slope = steep_shares(gap, gap == 0.0, gap > 0.0, w, c, 1e-37 if EPS > 1e-10 else 1e-300)
    return share, slope
