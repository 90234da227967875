"""Maps and class losses of rows: each row is read once, solved in registers, and written once."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton import cdiv

from fenchel.kernels.gpu import wide
from fenchel.kernels.gpu.arithmetic import jit
from fenchel.kernels.gpu.launch import Parameter, as_rows, eps_of, fits, kind_of, launch, per_row, sizes
from fenchel.kernels.gpu.losses import class_loss, is_wrong, load_alpha, target
from fenchel.kernels.gpu.places import block_of_rows, read
from fenchel.kernels.gpu.solvers import shift, solve
from fenchel.kernels.table import exact_dtype


def entmax(z: Tensor, alpha: Parameter) -> Tensor:
    """α-entmax along the last dimension; a number, or one value per row."""
    return _map(z, alpha, False)


def normmax(z: Tensor, alpha: Parameter) -> Tensor:
    """α-normmax along the last dimension; a number, or one value per row."""
    return _map(z, alpha, True)


def entmax_loss(z: Tensor, index: Tensor, residual: float, alpha: Parameter) -> tuple[Tensor, Tensor]:
    """The loss of rows with class indices and, if asked for, its gradient p − y (else an empty tensor)."""
    return _loss(z, index, residual, alpha, False)


def normmax_loss(z: Tensor, index: Tensor, residual: float, alpha: Parameter) -> tuple[Tensor, Tensor]:
    """As ``entmax_loss`` for normmax."""
    return _loss(z, index, residual, alpha, True)


def _map(z: Tensor, alpha: Parameter, norm: bool) -> Tensor:
    x = as_rows(z)
    p = torch.empty_like(x)
    if x.numel():
        _start(x, p, x, x, alpha, z, norm, 0)
    return p.reshape(z.shape)


def _loss(z: Tensor, index: Tensor, residual: float, alpha: Parameter, norm: bool) -> tuple[Tensor, Tensor]:
    x = as_rows(z)
    loss = x.new_empty(len(x), dtype=exact_dtype(x))
    slope = torch.empty_like(x) if residual else x.new_empty(0, x.shape[1])
    if x.numel():
        _start(x, slope if residual else x, index.contiguous(), loss, alpha, z, norm, 2 if residual else 1)
    slope = slope if residual == 1 else slope.mul_(residual)
    return loss.reshape(z.shape[:-1]), slope.reshape(z.shape) if residual else slope


def _start(x: Tensor, p: Tensor, y: Tensor, loss: Tensor, alpha: Parameter, z: Tensor, norm: bool, step: int) -> None:
    rows, n = x.shape
    kind = kind_of(alpha, norm)
    a, stride = per_row(alpha, z)
    rules = {"KIND": kind, "EACH": stride > 0 or isinstance(alpha, Tensor), "NORM": norm, "LOSS": step}
    if not fits(n, x.dtype, kind, plain=step == 0):
        wide.start(x, p, y, loss, a, stride, rules)
        return
    size = sizes(n, x.dtype, kind)
    grid = (cdiv(rows, size["R"]),)
    launch(rows_kernel, grid, x, p, y, loss, a, n, rows, stride, **rules, **size, EPS=eps_of(x.dtype))


@jit
def rows_kernel(
    Z: tl.tensor,
    P: tl.tensor,
    Y: tl.tensor,
    L: tl.tensor,
    ALPHA: tl.tensor,
    n: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    KIND: tl.constexpr,
    EACH: tl.constexpr,
    NORM: tl.constexpr,
    LOSS: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """R rows per program, each within one block.

    Args:
        Z: scores (rows, n).
        P: the weights (LOSS 0), or the gradient p − y of the loss (LOSS 2).
        Y: class indices, for losses; negative where a row is left out.
        L: the losses.
        ALPHA: α of row r is at ``r·stride``.
        n: entries of a row.
        rows: how many there are.
        stride: 0 if all rows share α.
        KIND: see ``arithmetic``.
        EACH: whether α is a tensor, whose values nobody has checked.
        NORM: whether this is normmax.
        LOSS: 0 for the map, 1 for the loss, 2 for the loss and its gradient.
        R: rows of a program.
        BLOCK: a power of 2, not below n.
        EPS: rounding of the arithmetic.
    """
    r, j, inside, at = block_of_rows(n, rows, R, BLOCK)
    z = read(Z, at, inside, float("-inf"), EPS)
    alpha, c = load_alpha(ALPHA, r, rows, stride, z, KIND, EACH)
    z, top, empty, bad = shift(z)
    if EACH:
        bad = (tl.where(bad, 1, 0) + is_wrong(alpha, NORM)) > 0
    if LOSS != 0:
        y, reached, wrong = target(Z + r.to(tl.int64) * n, Y + r, r < rows, n, z.dtype)
        y, wrong = y[:, None], wrong[:, None]
        bad = bad | wrong
    p, offset = solve(z, c, (tl.where(empty, 1, 0) + tl.where(bad, 1, 0)) == 0, KIND, NORM, EPS)
    p = tl.where(empty, 0.0, tl.where(bad, float("nan"), p))
    if LOSS == 0:
        tl.store(P + at, p.to(P.dtype.element_ty), mask=inside)
    else:
        reached = reached[:, None] - tl.where(top > float("-inf"), top, 0.0)
        along = tl.sum(p * tl.where(p == 0.0, 0.0, z), axis=1, keep_dims=True)
        loss = class_loss(along, offset, c, reached, empty, bad, NORM)
        loss = tl.where(y < 0, 0.0, loss)
        # One value per row: the block (R, 1) has no other.
        tl.store(L + r[:, None], loss.to(L.dtype.element_ty), mask=(r < rows)[:, None])
        if LOSS == 2:
            own = tl.where((j[None, :] == y) & (reached > float("-inf")), 1.0, 0.0)
            slope = tl.where(y < 0, 0.0, p - own)
            tl.store(P + at, slope.to(P.dtype.element_ty), mask=inside)
