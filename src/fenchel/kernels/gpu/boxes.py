"""Rows with bounds and a budget, Σp = k: p = min([z − τ]₊, u), and p = min(e^(z − τ), u) for Shannon's entropy.

Rows that do not fit into registers are in ``wide_boxes``, Jacobian products in ``products``.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton import cdiv

from fenchel.kernels.gpu import wide_boxes
from fenchel.kernels.gpu.arithmetic import ANY, SPARSEMAX, jit
from fenchel.kernels.gpu.launch import (
    Parameter,
    as_rows,
    eps_of,
    fits,
    launch,
    per_entry,
    per_row,
    sizes,
)
from fenchel.kernels.gpu.places import block_of_rows, read, read_bounds
from fenchel.kernels.gpu.solvers import cap, usable_rows
from fenchel.kernels.gpu.solvers import project as project_rows


def project(z: Tensor, upper: Parameter, budget: Parameter) -> Tensor:
    """Project rows z (…, n) on 0 ≤ p ≤ upper with sum ``budget``."""
    return _start(z, upper, budget, False)


def capped_softmax(z: Tensor, upper: Parameter, budget: Parameter) -> Tensor:
    """Maximize ⟨p, z⟩ plus the entropy of p over 0 ≤ p ≤ upper with sum ``budget``, for rows z (…, n)."""
    return _start(z, upper, budget, True)


def _start(z: Tensor, upper: Parameter, budget: Parameter, entropic: bool) -> Tensor:
    x = as_rows(z)
    p = torch.empty_like(x)
    if x.numel():
        rows, n = x.shape
        k, stride = per_row(budget, z)
        bounds, apart, each = per_entry(upper, z)
        kind = int(ANY.value if each or entropic else SPARSEMAX.value)  # a bound per entry takes registers
        rules = {"EACH": each, "ENTROPIC": entropic, "EPS": eps_of(x.dtype)}
        if fits(n, x.dtype, kind):
            size = sizes(n, x.dtype, kind)
            launch(project_kernel, (cdiv(rows, size["R"]),), x, p, bounds, k, n, rows, apart, stride, **rules, **size)
        else:
            wide_boxes.start(x, p, bounds, k, apart, stride, rules)
    return p.reshape(z.shape)


@jit
def project_kernel(
    Z: tl.tensor,
    P: tl.tensor,
    UPPER: tl.tensor,
    BUDGET: tl.tensor,
    n: tl.tensor,
    rows: tl.tensor,
    apart: tl.tensor,
    stride: tl.tensor,
    EACH: tl.constexpr,
    ENTROPIC: tl.constexpr,
    EPS: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """R rows per program. The budget of row r is at ``r·stride``, the bound of entry j at ``r·apart + j`` if EACH."""
    r, j, inside, at = block_of_rows(n, rows, R, BLOCK)
    z = read(Z, at, inside, float("-inf"), EPS)
    k = read(BUDGET, r.to(tl.int64) * stride, r < rows, 1.0, EPS)[:, None]
    u = read_bounds(UPPER, r.to(tl.int64)[:, None] * apart + j[None, :], inside, z.dtype, EACH, EPS)
    usable, top, bad = usable_rows(z)
    z = tl.where(usable, z, 0.0)
    u = tl.minimum(u, k)  # no entry takes more than all
    if ENTROPIC:
        p = cap(z, u, k)
    else:
        p = project_rows(z, u, k, usable, tl.where(usable, top, 0.0), EPS)
    p = tl.where(usable, p, tl.where(bad, float("nan"), 0.0))
    tl.store(P + at, p.to(P.dtype.element_ty), mask=inside)
