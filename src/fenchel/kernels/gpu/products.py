"""Jacobian products of rows, and the derivative in alpha, given the result p.

With bounds, entries at their bound do not move, and the free ones do as those of the map without bounds: of sparsemax,
or of softmax for Shannon's entropy.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import cdiv

from fenchel.kernels.gpu import wide_products
from fenchel.kernels.gpu.arithmetic import jit
from fenchel.kernels.gpu.jacobians import product, saturated_sum, sensitivity
from fenchel.kernels.gpu.launch import (
    Parameter,
    as_rows,
    eps_of,
    fits,
    kind_of,
    launch,
    per_entry,
    per_row,
    sizes,
)
from fenchel.kernels.gpu.losses import load_alpha
from fenchel.kernels.gpu.places import block_of_rows, free_part, read
from fenchel.kernels.table import exact_dtype


def entmax_product(v: Tensor, z: Any, p: Tensor, alpha: Parameter) -> Tensor:
    """J v of α-entmax given its result p."""
    return _product(v, p, alpha, False, False)[0]


def normmax_product(v: Tensor, z: Any, p: Tensor, alpha: Parameter) -> Tensor:
    """J v of α-normmax given its result p."""
    return _product(v, p, alpha, True, False)[0]


def entmax_pull(v: Tensor, z: Any, p: Tensor, alpha: Parameter) -> tuple[Tensor, Tensor]:
    """J v of α-entmax given its result p, and ⟨v, ∂p/∂α⟩, one value per row, dimension kept."""
    return _product(v, p, alpha, False, True)


def normmax_pull(v: Tensor, z: Any, p: Tensor, alpha: Parameter) -> tuple[Tensor, Tensor]:
    """As ``entmax_pull`` for normmax."""
    return _product(v, p, alpha, True, True)


def projection_product(v: Tensor, z: Any, p: Tensor, upper: Parameter, budget: Parameter) -> Tensor:
    """J v of the projection on bounds and a budget given its result p."""
    return _product(v, p, 2.0, False, False, upper)[0]


def capped_softmax_product(v: Tensor, z: Any, p: Tensor, upper: Parameter, budget: Parameter) -> Tensor:
    """J v of the softmax with bounds and a budget given its result p."""
    return _product(v, p, 1.0, False, False, upper)[0]


def _product(
    v: Tensor, p: Tensor, alpha: Parameter, norm: bool, pull: bool, upper: Parameter = math.inf
) -> tuple[Tensor, Tensor]:
    q, g = as_rows(p), as_rows(v)
    rows, n = q.shape
    out, slope = torch.empty_like(q), q.new_empty(rows if pull else 0, dtype=exact_dtype(q))
    if q.numel():
        kind = kind_of(alpha, norm)
        a, stride = per_row(alpha, p)
        bounds, apart, differ = per_entry(upper, p)
        bounded = 2 if differ else 0 if upper == math.inf else 1
        rules = {"KIND": kind, "EACH": stride > 0, "NORM": norm, "PULL": pull, "BOUNDED": bounded}
        if fits(n, q.dtype, kind):
            size = sizes(n, q.dtype, kind)
            tensors = q, g, out, slope if pull else out, a, bounds
            grid = (cdiv(rows, size["R"]),)
            launch(product_kernel, grid, *tensors, n, rows, stride, apart, **rules, **size, EPS=eps_of(q.dtype))
        else:
            wide_products.start(q, g, out, slope, a, bounds, stride, apart, rules)
    return out.reshape(p.shape), slope.reshape(*p.shape[:-1], 1) if pull else slope


@jit
def product_kernel(
    P: tl.tensor,
    V: tl.tensor,
    OUT: tl.tensor,
    SLOPE: tl.tensor,
    ALPHA: tl.tensor,
    UPPER: tl.tensor,
    n: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    apart: tl.tensor,
    KIND: tl.constexpr,
    EACH: tl.constexpr,
    NORM: tl.constexpr,
    PULL: tl.constexpr,
    BOUNDED: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """R rows per program. V is read where p > 0 only. Arguments as in ``rows.rows_kernel``; SLOPE is for PULL.

    BOUNDED is 1 if all entries share the bound UPPER, 2 if that of entry j of row r is at ``r·apart + j``, else 0.
    """
    r, j, inside, at = block_of_rows(n, rows, R, BLOCK)
    p = read(P, at, inside, 0.0, EPS)
    p = free_part(p, UPPER, r.to(tl.int64)[:, None] * apart + j[None, :], inside, P.dtype.element_ty, BOUNDED, EPS)
    v = read(V, at, inside & (p > 0.0), 0.0, EPS)
    alpha, c = load_alpha(ALPHA, r, rows, stride, p, KIND, EACH)
    out = product(p, v, c, j, KIND, NORM, BLOCK, EPS)
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=inside)
    if PULL:
        change = product(p, sensitivity(p, c, NORM, EPS), c, j, KIND, NORM, BLOCK, EPS)
        slope = saturated_sum(v * change, 0.25 / BLOCK, LIMIT=1.7e308 if EPS < 1e-10 else 3.4e38)
        # One value per row: the block (R, 1) has no other.
        tl.store(SLOPE + r[:, None], -slope.to(SLOPE.dtype.element_ty), mask=(r < rows)[:, None])
