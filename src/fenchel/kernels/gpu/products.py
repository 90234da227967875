"""Jacobian products of rows, and the derivative of entmax in alpha, given the result p."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import cdiv

from fenchel.kernels.gpu import wide_products
from fenchel.kernels.gpu.arithmetic import jit
from fenchel.kernels.gpu.jacobians import product, saturated_sum, sensitivity
from fenchel.kernels.gpu.launch import Parameter, as_rows, eps_of, fits, kind_of, launch, per_row, sizes
from fenchel.kernels.gpu.losses import load_alpha


def entmax_product(v: Tensor, z: Any, p: Tensor, alpha: Parameter) -> Tensor:
    """J v of α-entmax given its result p."""
    return _product(v, p, alpha, False, False)[0]


def normmax_product(v: Tensor, z: Any, p: Tensor, alpha: Parameter) -> Tensor:
    """J v of α-normmax given its result p."""
    return _product(v, p, alpha, True, False)[0]


def entmax_pull(v: Tensor, z: Any, p: Tensor, alpha: Parameter) -> tuple[Tensor, Tensor]:
    """J v of α-entmax given its result p, and ⟨v, ∂p/∂α⟩, one value per row, dimension kept."""
    return _product(v, p, alpha, False, True)


def _product(v: Tensor, p: Tensor, alpha: Parameter, norm: bool, pull: bool) -> tuple[Tensor, Tensor]:
    q, g = as_rows(p), as_rows(v)
    rows, n = q.shape
    out, slope = torch.empty_like(q), q.new_empty(rows if pull else 0)
    if q.numel():
        kind = kind_of(alpha, norm)
        a, stride = per_row(alpha, p)
        rules = {"KIND": kind, "EACH": stride > 0, "NORM": norm, "PULL": pull}
        if fits(n, q.dtype, kind):
            size = sizes(n, q.dtype, kind)
            tensors = q, g, out, slope if pull else out, a
            grid = (cdiv(rows, size["R"]),)
            launch(product_kernel, grid, *tensors, n, rows, stride, **rules, **size, EPS=eps_of(q.dtype))
        else:
            wide_products.start(q, g, out, slope, a, stride, rules)
    return out.reshape(p.shape), slope.reshape(*p.shape[:-1], 1) if pull else slope


@jit
def product_kernel(
    P: tl.tensor,
    V: tl.tensor,
    OUT: tl.tensor,
    SLOPE: tl.tensor,
    ALPHA: tl.tensor,
    n: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    KIND: tl.constexpr,
    EACH: tl.constexpr,
    NORM: tl.constexpr,
    PULL: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """R rows per program. V is read where p > 0 only. Arguments as in ``rows.rows_kernel``; SLOPE is for PULL."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    j = tl.arange(0, BLOCK)
    inside = (r < rows)[:, None] & (j < n)[None, :]
    at = r.to(tl.int64)[:, None] * n + j[None, :]
    p = tl.load(P + at, mask=inside, other=0.0)
    v = tl.load(V + at, mask=inside & (p > 0.0), other=0.0)
    p = p.to(tl.float64) if EPS < 1e-10 else p.to(tl.float32)
    v = v.to(p.dtype)
    alpha, c = load_alpha(ALPHA, r, rows, stride, p, KIND, EACH)
    out = product(p, v, c, j, KIND, NORM, BLOCK, EPS)
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=inside)
    if PULL:
        change = product(p, sensitivity(p, c, EPS), c, j, KIND, NORM, BLOCK, EPS)
        slope = saturated_sum(v * change, 0.25 / BLOCK, LIMIT=1.7e308 if EPS < 1e-10 else 3.4e38)
        # One value per row: the block (R, 1) has no other.
        tl.store(SLOPE + r[:, None], -slope.to(SLOPE.dtype.element_ty), mask=(r < rows)[:, None])
