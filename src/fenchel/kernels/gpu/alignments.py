"""Alignments of two series: the smoothed recursion over a table, its gradient, and Hessian-vector products.

One program per table. The cells of one antidiagonal, up to 2048, are in registers, by their row; the loop over
antidiagonals is inside. The walk keeps the value of each cell in double precision, antidiagonal by antidiagonal, with
−inf beside the table; the probabilities of steps are computed again from these. The shorter series is along the rows,
so that there are at most twice as many such places as cells. Values reach the neighbouring row in registers, by
``tl.gather``, into which Triton puts the barriers; no thread reads what another one has written, except where a comment
says so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fenchel.kernels.gpu.arithmetic import jit
from fenchel.kernels.gpu.choices import KINDS, curvature, finite, inverse, number, smooth_three
from fenchel.kernels.gpu.launch import compiled_for, constant, eps_of, launch, warps


class Walk(NamedTuple):
    """What derivatives need: the values of the cells, (B, N + M − 1, the smaller of N and M)."""

    values: Tensor
    dtype: torch.dtype
    alpha: float
    gamma: float


class Table(NamedTuple):
    """What all kernels of alignments read, or write: tensors, sizes, and how far apart tables, rows and columns are."""

    weight: Any
    value: Any
    walk: Any
    lengths: Any
    gamma: Any
    rows: int
    columns: int
    series: int
    """Which of the two is along the rows."""
    apart: int
    down: int
    across: int


class Rules(NamedTuple):
    """What they are compiled for; see ``launch.compiled_for``."""

    KIND: Any
    BLOCK: Any
    """Rows, a power of two."""
    EPS: Any


def forward(costs: Tensor, lengths: Tensor, alpha: float, gamma: float, keep: bool) -> tuple[Tensor, Walk]:
    """Minus the smoothed least cost of each table, in double precision, and the walk.

    Arguments as in ``cpu.dp.alignments.forward``.
    """
    costs = costs.detach()
    batch, rows, columns = costs.shape
    value = torch.empty(batch, dtype=torch.float64, device=costs.device)
    shape = (batch, rows + columns - 1, min(rows, columns)) if keep else (0,)
    values = torch.empty(shape, dtype=torch.float64, device=costs.device)
    walk = Walk(values, costs.dtype, alpha, gamma)
    table, rules = _table(value, value, walk, lengths, costs), _rules(alpha, costs)
    launch(alignment_kernel, (batch,), table, costs, R=rules[0], KEEP=keep, **rules[1])
    return value, walk


def gradient(weight: Tensor, value: Tensor, walk: Walk, lengths: Tensor, shape: torch.Size) -> Tensor:
    """The expected path, (B, N, M), times weights (B,).

    Zeros where the value is −inf or the weight 0, else NaN where the value is.
    """
    cells = torch.zeros(shape, dtype=walk.dtype, device=value.device)
    table, rules = _table(weight, value, walk, lengths, cells), _rules(walk.alpha, cells)
    launch(alignment_gradient_kernel, (shape[0],), table, cells, R=rules[0], **rules[1])
    return cells


def hessian_product(
    weight: Tensor, value: Tensor, walk: Walk, lengths: Tensor, scores: Tensor, alpha: float, gamma: float
) -> tuple[Tensor, Tensor]:
    """The derivatives of the values (B,), and of what ``gradient`` returns, along a direction of −costs."""
    change = torch.empty_like(value)
    cells = torch.zeros(scores.shape, dtype=walk.dtype, device=value.device)
    along = change, scores.double().contiguous(), torch.empty_like(walk.values)
    table, rules = _table(weight, value, walk, lengths, cells), _rules(alpha, cells)
    launch(alignment_hessian_kernel, (len(scores),), table, cells, *along, R=rules[0], **rules[1])
    return change, cells


def _table(weight: Tensor, value: Tensor, walk: Walk, lengths: Tensor, cells: Tensor) -> Table:
    tensors = weight.double().contiguous(), value, walk.values, lengths.contiguous()
    return Table(*tensors, constant(walk.gamma, value.device), *_layout(cells))


def _layout(table: Tensor) -> tuple[int, int, int, int, int, int]:
    """Rows and columns, the series of the rows, and how far two tables, rows and columns are apart in memory."""
    _, rows, columns = table.shape
    apart, down, across = table.stride()
    return (columns, rows, 1, apart, across, down) if rows > columns else (rows, columns, 0, apart, down, across)


def _rules(alpha: float, cells: Tensor) -> tuple[Rules, dict[str, int]]:
    """What kernels are compiled for, and warps."""
    block = max(triton.next_power_of_2(min(cells.shape[1:])), 32)
    return compiled_for(Rules(KINDS[alpha], block, eps_of(cells.dtype))), {"num_warps": warps(block // 2)}


@jit
def _start(X: Table, R: tl.constexpr) -> Any:
    """The number of a table, its sizes, the temperature, and rows of it."""
    b = tl.program_id(0).to(tl.int64)
    n, m = tl.load(X.lengths + 2 * b + X.series), tl.load(X.lengths + 2 * b + 1 - X.series)
    return b, n, m, tl.load(X.gamma), tl.arange(0, R.BLOCK).to(tl.int64)


@jit
def _down(x: tl.tensor, i: tl.tensor, nothing: tl.tensor) -> Any:
    """Entries of the row above."""
    return tl.where(i > 0, tl.gather(x, tl.maximum(i - 1, 0), 0), nothing)


@jit
def _up(x: tl.tensor, i: tl.tensor, BLOCK: tl.constexpr) -> Any:
    """Entries of the row below."""
    return tl.where(i < BLOCK - 1, tl.gather(x, tl.minimum(i + 1, BLOCK - 1), 0), 0.0)


@jit
def _three(across: tl.tensor, above: tl.tensor, left: tl.tensor, gamma: tl.tensor, R: tl.constexpr) -> Any:
    """The probabilities of the ways into cells, from the values of the cells that they come from; the maximum too."""
    top = tl.maximum(tl.maximum(across, above), left)
    base, rate = finite(top), 1.0 / gamma
    x0, x1, x2 = (across - base) * rate, (above - base) * rate, (left - base) * rate
    q0, q1, q2, excess = smooth_three(number(x0, R.EPS), number(x1, R.EPS), number(x2, R.EPS), R.KIND)
    q0, q1, q2 = q0.to(tl.float64), q1.to(tl.float64), q2.to(tl.float64)
    scale = inverse(q0 + q1 + q2)
    return q0 * scale, q1 * scale, q2 * scale, top + gamma * excess.to(tl.float64)


@jit
def _before(X: Table, walk: tl.tensor, d: tl.tensor, i: tl.tensor, nothing: tl.constexpr) -> Any:
    """What stands in a walk before the cells of an antidiagonal: across, above and to the left."""
    one, two = walk + (d - 1) * X.rows + i, walk + (d - 2) * X.rows + i
    here = i < X.rows
    across = tl.load(two - 1, mask=here & (i > 0) & (d > 1), other=nothing)
    above = tl.load(one - 1, mask=here & (i > 0), other=nothing)
    return across, above, tl.load(one, mask=here, other=nothing)


@jit
def alignment_kernel(X: Table, COSTS: tl.tensor, R: tl.constexpr, KEEP: tl.constexpr) -> None:
    """The value of one table, and the values of its cells if KEEP."""
    b, n, m, gamma, i = _start(X, R)
    none = tl.zeros([R.BLOCK], tl.float64) + float("-inf")
    one, two = none, none
    walk = X.walk + b * (X.rows + X.columns - 1) * X.rows
    bad = 0
    for d in range(n + m - 1):
        inside = (i < n) & (i <= d) & (d - i < m)
        cost = tl.load(COSTS + b * X.apart + i * X.down + (d - i) * X.across, mask=inside, other=float("inf"))
        bad += tl.max(tl.where((cost != cost) | (cost == float("-inf")), 1, 0), axis=0)
        _q0, _q1, _q2, reached = _three(_down(two, i, none), _down(one, i, none), one, gamma, R)
        reached = tl.where(i + d == 0, 0.0, reached)
        here = tl.where(inside, reached - cost.to(tl.float64), float("-inf"))
        if KEEP:
            tl.store(walk + d * X.rows + i, here, mask=i < X.rows)  # read by later kernels alone
        two = one
        one = here
    value = tl.max(tl.where(i == n - 1, one, float("-inf")), axis=0)
    tl.store(X.value + b, tl.where(bad > 0, float("nan"), value))


@jit
def alignment_gradient_kernel(X: Table, CELLS: tl.tensor, R: tl.constexpr) -> None:
    """The expected path of one table, from its end to its start. Results hold zeros."""
    b, n, m, gamma, i = _start(X, R)
    weight, value = tl.load(X.weight + b), tl.load(X.value + b)
    walk, cells = X.walk + b * (X.rows + X.columns - 1) * X.rows, CELLS + b * X.apart
    if value > float("-inf"):
        mass = tl.where(i == n - 1, weight, 0.0)
        later = tl.zeros([R.BLOCK], tl.float64)  # what reaches the antidiagonal before the next one
        for back in range(n + m - 2):
            d = n + m - 2 - back
            inside = (i < n) & (i <= d) & (d - i < m)
            tl.store(cells + i * X.down + (d - i) * X.across, mass.to(CELLS.dtype.element_ty), mask=inside)
            v0, v1, v2 = _before(X, walk, d, i, float("-inf"))
            q0, q1, q2, _value = _three(v0, v1, v2, gamma, R)
            next_mass = later + _up(mass * q1, i, R.BLOCK) + mass * q2
            later = _up(mass * q0, i, R.BLOCK)
            mass = next_mass
        tl.store(cells + i, mass.to(CELLS.dtype.element_ty), mask=i == 0)
    elif (value != value) & (weight != 0.0):
        _fill(X, cells, i)


@jit
def _fill(X: Table, CELLS: tl.tensor, i: tl.tensor) -> None:
    """NaN in all cells of a table."""
    lost = (i * 0.0 + float("nan")).to(CELLS.dtype.element_ty)
    for j in range(X.columns):
        tl.store(CELLS + i * X.down + tl.cast(j, tl.int64) * X.across, lost, mask=i < X.rows)


@jit
def alignment_hessian_kernel(
    X: Table, CELLS: tl.tensor, CHANGE: tl.tensor, ALONG: tl.tensor, MOVED: tl.tensor, R: tl.constexpr
) -> None:
    """How the results of ``alignment_gradient_kernel`` change along a direction ALONG, which is laid out as CELLS are.

    MOVED is room for the changes of the cells' values.
    """
    b, n, m, gamma, i = _start(X, R)
    weight, value = tl.load(X.weight + b), tl.load(X.value + b)
    rate = 1.0 / gamma
    nothing = tl.zeros([R.BLOCK], tl.float64)
    size = b * (X.rows + X.columns - 1) * X.rows
    walk, moved, cells, along = X.walk + size, MOVED + size, CELLS + b * X.apart, ALONG + b * X.apart
    if value > float("-inf"):
        one = tl.where(i == 0, tl.load(along), 0.0)
        two = nothing
        tl.store(moved + i, one, mask=i < X.rows)
        for d in range(1, n + m - 1):
            inside = (i < n) & (i <= d) & (d - i < m)
            v0, v1, v2 = _before(X, walk, d, i, float("-inf"))
            q0, q1, q2, _value = _three(v0, v1, v2, gamma, R)
            step = tl.load(along + i * X.down + (d - i) * X.across, mask=inside, other=0.0)
            here = step + q0 * _down(two, i, nothing) + q1 * _down(one, i, nothing) + q2 * one
            here = tl.where(inside, here, 0.0)
            tl.store(moved + d * X.rows + i, here, mask=i < X.rows)
            two = one
            one = here
        tl.store(CHANGE + b, tl.sum(tl.where(i == n - 1, one, 0.0), axis=0))
        # MOVED is read below by other threads than wrote it above.
        tl.debug_barrier()
        mass = tl.where(i == n - 1, weight, 0.0)
        mass_moved, later, later_moved = nothing, nothing, nothing
        for back in range(n + m - 2):
            d = n + m - 2 - back
            inside = (i < n) & (i <= d) & (d - i < m)
            tl.store(cells + i * X.down + (d - i) * X.across, mass_moved.to(CELLS.dtype.element_ty), mask=inside)
            v0, v1, v2 = _before(X, walk, d, i, float("-inf"))
            q0, q1, q2, _value = _three(v0, v1, v2, gamma, R)
            dv0, dv1, dv2 = _before(X, moved, d, i, 0.0)
            k0, k1, k2 = curvature(q0, R.KIND), curvature(q1, R.KIND), curvature(q2, R.KIND)
            mean = (k0 * dv0 + k1 * dv1 + k2 * dv2) * inverse(k0 + k1 + k2)
            part = mass * rate
            next_moved = later_moved + _up(mass_moved * q1 + part * k1 * (dv1 - mean), i, R.BLOCK)
            next_moved += mass_moved * q2 + part * k2 * (dv2 - mean)
            later_moved = _up(mass_moved * q0 + part * k0 * (dv0 - mean), i, R.BLOCK)
            next_mass = later + _up(mass * q1, i, R.BLOCK) + mass * q2
            later = _up(mass * q0, i, R.BLOCK)
            mass = next_mass
            mass_moved = next_moved
        tl.store(cells + i, mass_moved.to(CELLS.dtype.element_ty), mask=i == 0)
    else:
        lost = value != value
        tl.store(CHANGE + b, tl.where(lost, float("nan"), 0.0).to(tl.float64))
        if lost:
            _fill(X, cells, i)
