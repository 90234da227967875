"""Jacobian products of rows with bounds and a budget, p = min([z − τ]₊, u) with Σp = k. Rows are held in registers."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import cdiv

from fenchel.kernels.gpu.arithmetic import ANY, jit
from fenchel.kernels.gpu.launch import Parameter, as_rows, constant, eps_of, fits, launch, sizes
from fenchel.kernels.table import NotServedError


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
