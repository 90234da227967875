"""Rows with bounds and a budget, p = min([z − τ]₊, u) with Σp = k; Jacobian products. All are held in registers."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import cdiv

from fenchel.kernels.gpu.arithmetic import ANY, jit
from fenchel.kernels.gpu.launch import Parameter, as_rows, constant, eps_of, fits, launch, per_row, sizes
from fenchel.kernels.gpu.solvers import any_row
from fenchel.kernels.table import NotServedError


def project(z: Tensor, upper: Parameter, budget: Parameter) -> Tensor:
    """Project rows z (…, n) on 0 ≤ p ≤ upper with sum ``budget``."""
    x = as_rows(z)
    p = torch.empty_like(x)
    if x.numel():
        k, stride = per_row(budget, z)
        bounds, each = _bounds(upper, z)
        _start(project_kernel, x, (x, p, bounds, k), (each, each > 0 or isinstance(upper, Tensor), stride))
    return p.reshape(z.shape)


def product(v: Tensor, z: Any, p: Tensor, upper: Parameter, budget: Parameter) -> Tensor:
    """Multiply v by the Jacobian of the projection, given its result p."""
    return _product(v, p, upper, False)


def entropic_product(v: Tensor, z: Any, p: Tensor, upper: Parameter, budget: Parameter) -> Tensor:
    """Multiply v by the Jacobian of the capped softmax, given its result p."""
    return _product(v, p, upper, True)


def _product(v: Tensor, p: Tensor, upper: Parameter, entropic: bool) -> Tensor:
    q, g = as_rows(p), as_rows(v)
    out = torch.empty_like(q)
    if q.numel():
        bounds, each = _bounds(upper, p)
        rest = each, each > 0 or isinstance(upper, Tensor)
        _start(box_product_kernel, q, (q, g, out, bounds), rest, ENTROPIC=entropic)
    return out.reshape(p.shape)


def _bounds(upper: Parameter, like: Tensor) -> tuple[Tensor, int]:
    """Bounds as a tensor, and how far two rows are apart in it: 0 if they share them."""
    if not isinstance(upper, Tensor):
        return constant(float(upper), like.device), 0
    upper = upper.detach()
    shared = all(size == 1 or stride == 0 for size, stride in zip(upper.shape[:-1], upper.stride()[:-1], strict=True))
    if shared:
        return upper[(0,) * (upper.dim() - 1)].contiguous(), 0
    return as_rows(upper), upper.shape[-1]


def _start(kernel: Any, x: Tensor, tensors: tuple[Tensor, ...], strides: tuple[int, ...], **rules: bool) -> None:
    rows, n = x.shape
    kind = int(ANY.value)
    if not fits(n, x.dtype, kind):
        raise NotServedError(f"rows of {n} entries do not fit into registers")
    size = sizes(n, x.dtype, kind)
    grid = (cdiv(rows, size["R"]),)
    launch(kernel, grid, *tensors, n, rows, *map(int, strides), **rules, **size, EPS=eps_of(x.dtype))


@jit
def _load(X: tl.tensor, at: tl.tensor, inside: tl.tensor, other: tl.tensor, EPS: tl.constexpr) -> Any:
    x = tl.load(X + at, mask=inside, other=other)
    return x.to(tl.float64) if EPS < 1e-10 else x.to(tl.float32)


@jit
def project_kernel(
    Z: tl.tensor,
    P: tl.tensor,
    UPPER: tl.tensor,
    BUDGET: tl.tensor,
    n: tl.tensor,
    rows: tl.tensor,
    apart: tl.tensor,
    step: tl.tensor,
    stride: tl.tensor,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """R rows per program. The bound of entry j of row r is at ``r·apart + j·step``, the budget at ``r·stride``."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    j = tl.arange(0, BLOCK)
    inside = (r < rows)[:, None] & (j < n)[None, :]
    at = r.to(tl.int64)[:, None] * n + j[None, :]
    z = _load(Z, at, inside, float("-inf"), EPS)
    k = _load(BUDGET, r.to(tl.int64) * stride, r < rows, 1.0, EPS)[:, None]
    u = _load(UPPER, r.to(tl.int64)[:, None] * apart + j[None, :] * step, inside, 0.0, EPS)
    bad = tl.max(tl.where((z != z) | (z == float("inf")), 1, 0), axis=1, keep_dims=True) > 0
    top = tl.max(tl.where(z != z, float("-inf"), z), axis=1, keep_dims=True)
    usable = (bad == 0) & (top > float("-inf"))
    z = tl.where(usable, z, 0.0)
    u = tl.where(z == float("-inf"), 0.0, tl.minimum(u, k))  # no entry takes more than all
    p = _project(z, u, k, usable, tl.where(usable, top, 0.0), EPS)
    p = tl.where(usable, p, tl.where(bad, float("nan"), 0.0))
    tl.store(P + at, p.to(P.dtype.element_ty), mask=inside)


@jit
def _project(z: tl.tensor, u: tl.tensor, k: tl.tensor, usable: tl.tensor, top: tl.tensor, EPS: tl.constexpr) -> Any:
    """The projection of a block of rows.

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
def box_product_kernel(
    P: tl.tensor,
    V: tl.tensor,
    OUT: tl.tensor,
    UPPER: tl.tensor,
    n: tl.tensor,
    rows: tl.tensor,
    apart: tl.tensor,
    step: tl.tensor,
    ENTROPIC: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """J v = s(v − ⟨s, v⟩/‖s‖₁), with s = 1, or p for the capped softmax, where p is strictly between its bounds."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    j = tl.arange(0, BLOCK)
    inside = (r < rows)[:, None] & (j < n)[None, :]
    at = r.to(tl.int64)[:, None] * n + j[None, :]
    p = _load(P, at, inside, 0.0, EPS)
    u = _load(UPPER, r.to(tl.int64)[:, None] * apart + j[None, :] * step, inside, 0.0, EPS)
    free = (p > 0.0) & (p < u)
    v = _load(V, at, inside & free, 0.0, EPS)
    s = tl.where(free, p if ENTROPIC else p * 0.0 + 1.0, 0.0)
    D = tl.sum(s, axis=1, keep_dims=True)
    mean = tl.sum(s * v, axis=1, keep_dims=True) / tl.where(D == 0.0, 1.0, D)
    out = tl.where(p == p, s * (v - mean), p)
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=inside)
