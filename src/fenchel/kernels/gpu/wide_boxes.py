"""Rows with bounds and a budget that do not fit into registers.

``wide_project_kernel`` reads a row once and copies the entries that can have mass to a list, as ``wide.wide_kernel``
does. Rows with more of them than a list has places are left to ``spill_project_kernel``, which reads them again in each
step. For Shannon's entropy every entry has mass, so that all rows are left to it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fenchel.kernels.gpu.arithmetic import LOG2_E, jit
from fenchel.kernels.gpu.launch import launch
from fenchel.kernels.gpu.places import append, read, read_bounds
from fenchel.kernels.gpu.solvers import project
from fenchel.kernels.gpu.wide import lists_of

_HALVINGS: Any = tl.constexpr(10)


def start(x: Tensor, p: Tensor, bounds: Tensor, k: Tensor, apart: int, stride: int, rules: dict[str, Any]) -> None:
    """Start the kernels; the arguments are those of ``boxes.project_kernel``."""
    rows, n = x.shape
    entropic = rules["ENTROPIC"]
    programs, size, options = lists_of(x)
    common: dict[str, Any] = {"EACH": rules["EACH"], "EPS": rules["EPS"], "BLOCK": size // 2, **options}
    if entropic:
        spilled = torch.ones(rows, dtype=torch.int32, device=x.device)
    else:
        spilled = torch.empty(rows, dtype=torch.int32, device=x.device)
        lists = torch.empty(programs, size, dtype=x.dtype, device=x.device)
        places = torch.empty(programs, size, dtype=torch.int32, device=x.device)
        tensors = x, p, bounds, k, lists, places, spilled
        launch(wide_project_kernel, (programs,), *tensors, n, rows, apart, stride, CAP=size, **common)
    launch(spill_project_kernel, (rows,), x, p, bounds, k, spilled, n, apart, stride, ENTROPIC=entropic, **common)


@jit
def wide_project_kernel(
    Z: tl.tensor,
    P: tl.tensor,
    UPPER: tl.tensor,
    BUDGET: tl.tensor,
    VALUES: tl.tensor,
    PLACES: tl.tensor,
    SPILLED: tl.tensor,
    n: tl.tensor,
    rows: tl.tensor,
    apart: tl.tensor,
    stride: tl.tensor,
    EACH: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    CAP: tl.constexpr,
) -> None:
    """One row after the other. VALUES and PLACES are lists, one per program; SPILLED says which rows are left over."""
    TYPE: tl.constexpr = P.dtype.element_ty
    DTYPE: tl.constexpr = tl.float64 if EPS < 1e-10 else tl.float32
    j = tl.arange(0, BLOCK)
    me = tl.program_id(0)
    values = VALUES + me.to(tl.int64) * CAP
    places = PLACES + me.to(tl.int64) * CAP
    for r in range(me, rows, tl.num_programs(0)):
        row = tl.cast(r, tl.int64)
        k = tl.load(BUDGET + row * stride).to(DTYPE)
        floor = k * 0.0 + float("-inf")  # the threshold is not below it
        count = 0
        bad = 0
        for b in range(0, n, BLOCK):
            inside = b + j < n
            z = read(Z + row * n + b, j, inside, float("-inf"), EPS)
            u = tl.minimum(read_bounds(UPPER + row * apart + b, j, inside, DTYPE, EACH, EPS), k)
            bad += tl.max(tl.where((z != z) | (z == float("inf")), 1, 0))
            if tl.sum((z > floor).to(tl.int32)) > BLOCK // 16:
                # The threshold of a part of the row is a lower bound of the row's: bisection towards this block's own.
                # A sum of so many terms is right to the last few digits, because every difference is.
                u_most = tl.max(u + z * 0.0) if EACH else u
                low = tl.min(tl.where(z > float("-inf"), z, float("inf"))) - u_most
                low, high = tl.maximum(low, floor), tl.max(tl.where(z != z, float("-inf"), z))
                for _ in range(_HALVINGS):
                    middle = low + 0.5 * (high - low)
                    held = tl.where(z > middle, tl.minimum(z - middle, u), 0.0)
                    much = tl.sum(held) > k * (1.0 + 64 * EPS)
                    floor = tl.where(much, tl.maximum(floor, middle), floor)
                    low, high = tl.where(much, middle, low), tl.where(much, high, middle)
            near = z > floor
            if tl.max(near.to(tl.int32)) > 0:
                count = append(values, places, z, b + j, near, count, CAP)
            tl.store(P + row * n + b + j, tl.zeros([BLOCK], TYPE), mask=inside)
        # Two orders need this barrier: the lists are read below by other threads than wrote them, and entries of P are
        # written again below by other threads than wrote the zeros.
        tl.debug_barrier()
        tl.store(SPILLED + r, tl.where((count > CAP) & (bad == 0), 1, 0))  # read by the next kernel, after this one
        if bad > 0:
            for b in range(0, n, BLOCK):
                tl.store(P + row * n + b + j, (j * 0.0 + float("nan")).to(TYPE), mask=b + j < n)
        elif (count > 0) & (count <= CAP):
            i = tl.arange(0, CAP)[None, :]
            held = i < count
            z = read(values, i, held, float("-inf"), EPS)
            at = tl.load(places + i, mask=held, other=0)
            u = tl.minimum(read_bounds(UPPER + row * apart, at, held, DTYPE, EACH, EPS), k)
            largest = tl.max(z, axis=1, keep_dims=True)
            p = project(z, u, largest * 0.0 + k, largest == largest, largest, EPS)
            tl.store(P + row * n + at, p.to(TYPE), mask=held & (p > 0.0))
        # The next row uses the lists again: no thread may write to them while another still reads.
        tl.debug_barrier()


@jit
def spill_project_kernel(
    Z: tl.tensor,
    P: tl.tensor,
    UPPER: tl.tensor,
    BUDGET: tl.tensor,
    SPILLED: tl.tensor,
    n: tl.tensor,
    apart: tl.tensor,
    stride: tl.tensor,
    EACH: tl.constexpr,
    ENTROPIC: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row per program, read again in each step; rows that ``wide_project_kernel`` has solved are left alone.

    Nothing that is written here is read here: the only order that counts is that between the kernels.
    """
    r = tl.program_id(0)
    if tl.load(SPILLED + r) > 0:
        row = r.to(tl.int64)
        DTYPE: tl.constexpr = tl.float64 if EPS < 1e-10 else tl.float32
        k = tl.load(BUDGET + row * stride).to(DTYPE)
        top = k * 0.0 + float("-inf")
        least = k * 0.0 + float("inf")
        bad = 0
        j = tl.arange(0, BLOCK)
        for b in range(0, n, BLOCK):
            z = read(Z + row * n + b, j, b + j < n, float("-inf"), EPS)
            bad += tl.max(tl.where((z != z) | (z == float("inf")), 1, 0))
            top = tl.maximum(top, tl.max(tl.where(z != z, float("-inf"), z)))
            least = tl.minimum(least, tl.min(tl.where(z > float("-inf"), z, float("inf"))))
        if (bad > 0) | (top == float("-inf")):
            value = tl.where(bad > 0, float("nan"), 0.0)
            for b in range(0, n, BLOCK):
                tl.store(P + row * n + b + j, (j * 0.0 + value).to(P.dtype.element_ty), mask=b + j < n)
        elif ENTROPIC:
            _spill_cap(Z + row * n, P + row * n, UPPER + row * apart, n, k, top, EACH, EPS, BLOCK)
        else:
            _spill_project(Z + row * n, P + row * n, UPPER + row * apart, n, k, least, top, EACH, EPS, BLOCK)


@jit
def _part(
    Z: tl.tensor,
    UPPER: tl.tensor,
    b: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    EACH: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> Any:
    """Some scores and their bounds; where they are in the row, and which of them exist."""
    at = b + tl.arange(0, BLOCK)
    z = read(Z, at, at < n, float("-inf"), EPS)
    return z, tl.minimum(read_bounds(UPPER, at, at < n, z.dtype, EACH, EPS), k), at, at < n


@jit
def _spill_project(
    Z: tl.tensor,
    P: tl.tensor,
    UPPER: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    least: tl.tensor,
    top: tl.tensor,
    EACH: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``solvers.project`` of a row in memory."""
    TYPE: tl.constexpr = P.dtype.element_ty
    inside, outside = top, top * 0.0 + float("-inf")
    go = 1
    while go > 0:
        low = tl.maximum(outside, least)
        middle = tl.minimum(low + 0.5 * (inside - low), inside)
        lower, upper = k * 0.0 + float("-inf"), k * 0.0 + float("inf")
        for b in range(0, n, BLOCK):
            z, u, at, real = _part(Z, UPPER, b, n, k, EACH, EPS, BLOCK)
            lower = tl.maximum(lower, tl.max(tl.where(z <= middle, z, float("-inf"))))
            upper = tl.minimum(upper, tl.min(tl.where((z > middle) & (z > outside), z, float("inf"))))
        pivot = tl.where(lower > outside, lower, upper)
        go = tl.where(pivot < inside, 1, 0)
        if go > 0:
            total = k * 0.0
            for b in range(0, n, BLOCK):
                z, u, at, real = _part(Z, UPPER, b, n, k, EACH, EPS, BLOCK)
                total += tl.sum(tl.minimum(tl.maximum(z - pivot, 0.0), u))
            inside, outside = tl.where(total < k, pivot, inside), tl.where(total < k, outside, pivot)
    x = k * 0.0
    again = 1
    while again > 0:
        count, total = k * 0.0, k * 0.0
        for b in range(0, n, BLOCK):
            z, u, at, real = _part(Z, UPPER, b, n, k, EACH, EPS, BLOCK)
            d = z - inside
            count += tl.sum(tl.where((d >= 0.0) & (d + x < u), 1.0, 0.0).to(z.dtype))
            total += tl.sum(tl.where(d >= 0.0, tl.minimum(d + x, u), 0.0))
        step = tl.where(count > 0.0, (k - total) / tl.maximum(count, 1.0), 0.0)
        again = tl.where(step > 4 * EPS * tl.maximum(x, k / tl.maximum(count, 1.0)), 1, 0)
        x += tl.maximum(step, 0.0)
    count, rest, first = k * 0.0, k, k * 0.0
    for b in range(0, n, BLOCK):
        z, u, at, real = _part(Z, UPPER, b, n, k, EACH, EPS, BLOCK)
        d = z - inside
        free = (d >= 0.0) & (d + x < u)
        count += tl.sum(tl.where(free, 1.0, 0.0).to(z.dtype))
        rest -= tl.sum(tl.where((d >= 0.0) & (free == 0), u, 0.0))
        first += tl.sum(tl.where(free, d + x, 0.0))
    count = tl.maximum(count, 1.0)
    first = (rest - first) / count
    second = k * 0.0
    for b in range(0, n, BLOCK):
        z, u, at, real = _part(Z, UPPER, b, n, k, EACH, EPS, BLOCK)
        d = z - inside
        second += tl.sum(tl.where((d >= 0.0) & (d + x < u), tl.minimum(tl.maximum(d + x + first, 0.0), u), 0.0))
    second = (rest - second) / count
    for b in range(0, n, BLOCK):
        z, u, at, real = _part(Z, UPPER, b, n, k, EACH, EPS, BLOCK)
        d = z - inside
        p = tl.minimum(tl.maximum(d + x + first, 0.0), u)
        p = tl.where(d + x < u, tl.minimum(tl.maximum(p + second, 0.0), u), u)
        tl.store(P + at, tl.where(d >= 0.0, p, 0.0).to(TYPE), mask=real)


@jit
def _spill_cap(
    Z: tl.tensor,
    P: tl.tensor,
    UPPER: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    top: tl.tensor,
    EACH: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``solvers.cap`` of a row in memory: the entries at their bounds are those whose weight reaches them."""
    TYPE: tl.constexpr = P.dtype.element_ty
    origin, factor = top, k * 0.0
    before = -2
    size = -1  # the first step has a factor of 0, at which none but bounds of 0 are reached
    while size > before:
        before = size
        size = 0
        rest, best = k, k * 0.0 + float("-inf")
        for b in range(0, n, BLOCK):
            z, u, at, real = _part(Z, UPPER, b, n, k, EACH, EPS, BLOCK)
            full = (z > float("-inf")) & (_weight(z, origin, factor) >= u)
            size += tl.sum(full.to(tl.int32))
            rest -= tl.sum(tl.where(full, u, 0.0))
            best = tl.maximum(best, tl.max(tl.where(full, float("-inf"), z)))
        if best > float("-inf"):
            total = k * 0.0
            for b in range(0, n, BLOCK):
                z, u, at, real = _part(Z, UPPER, b, n, k, EACH, EPS, BLOCK)
                total += tl.sum(tl.where(_weight(z, origin, factor) >= u, 0.0, _weight(z, best, 1.0)))
            origin, factor = best, tl.maximum(rest, 0.0) / total
    for b in range(0, n, BLOCK):
        z, u, at, real = _part(Z, UPPER, b, n, k, EACH, EPS, BLOCK)
        p = tl.minimum(_weight(z, origin, factor), u)
        tl.store(P + at, tl.where(z > float("-inf"), p, 0.0).to(TYPE), mask=real)


@jit
def _weight(z: tl.tensor, origin: tl.tensor, factor: tl.tensor) -> Any:
    """factor · e^(z − origin), without overflow."""
    return tl.exp2(tl.minimum((z - origin) * LOG2_E, 120.0)) * factor
