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
from fenchel.kernels.gpu.launch import constant, eps_of, launch, warps


class Walk(NamedTuple):
    """What derivatives need: the values of the cells, (B, N + M − 1, the smaller of N and M)."""

    values: Tensor
    dtype: torch.dtype
    alpha: float
    gamma: float


def forward(costs: Tensor, lengths: Tensor, alpha: float, gamma: float, keep: bool) -> tuple[Tensor, Walk]:
    """Minus the smoothed least cost of each table, in double precision, and the walk.

    Arguments as in ``cpu.dp.alignments.forward``.
    """
    costs = costs.detach()
    batch, rows, columns = costs.shape
    value = torch.empty(batch, dtype=torch.float64, device=costs.device)
    shape = (batch, rows + columns - 1, min(rows, columns)) if keep else (0,)
    values = torch.empty(shape, dtype=torch.float64, device=costs.device)
    tensors = costs, lengths.contiguous(), constant(gamma, costs.device), value, values
    rules = {"KIND": KINDS[alpha], "KEEP": keep, "EPS": eps_of(costs.dtype)}
    launch(alignment_kernel, (batch,), *tensors, *_layout(costs), **rules, **_sizes(costs.shape))
    return value, Walk(values, costs.dtype, alpha, gamma)


def gradient(weight: Tensor, value: Tensor, walk: Walk, lengths: Tensor, shape: torch.Size) -> Tensor:
    """The expected path, (B, N, M), times weights (B,).

    Zeros where the value is −inf or the weight 0, else NaN where the value is.
    """
    cells = torch.zeros(shape, dtype=walk.dtype, device=value.device)
    tensors = cells, weight.double().contiguous(), value, walk.values, lengths.contiguous()
    rules = {"KIND": KINDS[walk.alpha], "EPS": eps_of(walk.dtype)}
    numbers = constant(walk.gamma, value.device), *_layout(cells)
    launch(alignment_gradient_kernel, (shape[0],), *tensors, *numbers, **rules, **_sizes(shape))
    return cells


def hessian_product(
    weight: Tensor, value: Tensor, walk: Walk, lengths: Tensor, scores: Tensor, alpha: float, gamma: float
) -> tuple[Tensor, Tensor]:
    """The derivatives of the values (B,), and of what ``gradient`` returns, along a direction of −costs."""
    change = torch.empty_like(value)
    cells = torch.zeros(scores.shape, dtype=walk.dtype, device=value.device)
    along = scores.double().contiguous()
    tensors = cells, change, weight.double().contiguous(), value, walk.values, along, torch.empty_like(walk.values)
    rules = {"KIND": KINDS[alpha], "EPS": eps_of(walk.dtype)}
    numbers = lengths.contiguous(), constant(gamma, value.device), *_layout(cells)
    launch(alignment_hessian_kernel, (len(scores),), *tensors, *numbers, **rules, **_sizes(cells.shape))
    return change, cells


def _layout(table: Tensor) -> tuple[int, int, int, int, int, int]:
    """Rows and columns, the series of the rows, and how far two tables, rows and columns are apart in memory."""
    _, rows, columns = table.shape
    apart, down, across = table.stride()
    return (columns, rows, 1, apart, across, down) if rows > columns else (rows, columns, 0, apart, down, across)


def _sizes(shape: torch.Size) -> dict[str, int]:
    block = max(triton.next_power_of_2(min(shape[1:])), 32)
    return {"BLOCK": block, "num_warps": warps(block // 2)}


@jit
def _down(x: tl.tensor, i: tl.tensor, nothing: tl.tensor) -> Any:
    """Entries of the row above."""
    return tl.where(i > 0, tl.gather(x, tl.maximum(i - 1, 0), 0), nothing)


@jit
def _up(x: tl.tensor, i: tl.tensor, BLOCK: tl.constexpr) -> Any:
    """Entries of the row below."""
    return tl.where(i < BLOCK - 1, tl.gather(x, tl.minimum(i + 1, BLOCK - 1), 0), 0.0)


@jit
def _three(
    across: tl.tensor,
    above: tl.tensor,
    left: tl.tensor,
    gamma: tl.tensor,
    rate: tl.tensor,
    KIND: tl.constexpr,
    EPS: tl.constexpr,
) -> Any:
    """The probabilities of the ways into cells, from the values of the cells that they come from; the maximum too."""
    top = tl.maximum(tl.maximum(across, above), left)
    base = finite(top)
    x0, x1, x2 = (across - base) * rate, (above - base) * rate, (left - base) * rate
    q0, q1, q2, excess = smooth_three(number(x0, EPS), number(x1, EPS), number(x2, EPS), KIND)
    q0, q1, q2 = q0.to(tl.float64), q1.to(tl.float64), q2.to(tl.float64)
    scale = inverse(q0 + q1 + q2)
    return q0 * scale, q1 * scale, q2 * scale, top + gamma * excess.to(tl.float64)


@jit
def _before(
    WALK: tl.tensor,
    d: tl.tensor,
    i: tl.tensor,
    rows: tl.tensor,
    gamma: tl.tensor,
    rate: tl.tensor,
    KIND: tl.constexpr,
    EPS: tl.constexpr,
) -> Any:
    """The probabilities of the ways into the cells of an antidiagonal, from the walk of a table."""
    one, two = WALK + (d - 1) * rows + i, WALK + (d - 2) * rows + i
    here = i < rows
    across = tl.load(two - 1, mask=here & (i > 0) & (d > 1), other=float("-inf"))
    above = tl.load(one - 1, mask=here & (i > 0), other=float("-inf"))
    left = tl.load(one, mask=here, other=float("-inf"))
    q0, q1, q2, _value = _three(across, above, left, gamma, rate, KIND, EPS)
    return q0, q1, q2


@jit
def alignment_kernel(
    COSTS: tl.tensor,
    LENGTHS: tl.tensor,
    GAMMA: tl.tensor,
    VALUE: tl.tensor,
    WALK: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    series: tl.tensor,
    apart: tl.tensor,
    down: tl.tensor,
    across: tl.tensor,
    KIND: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """The value of one table, and the values of its cells if KEEP."""
    b = tl.program_id(0).to(tl.int64)
    n, m = tl.load(LENGTHS + 2 * b + series), tl.load(LENGTHS + 2 * b + 1 - series)
    gamma = tl.load(GAMMA)
    rate = 1.0 / gamma
    i = tl.arange(0, BLOCK).to(tl.int64)
    none = tl.zeros([BLOCK], tl.float64) + float("-inf")
    one, two = none, none
    walk = WALK + b * (rows + columns - 1) * rows
    bad = 0
    for d in range(n + m - 1):
        inside = (i < n) & (i <= d) & (d - i < m)
        cost = tl.load(COSTS + b * apart + i * down + (d - i) * across, mask=inside, other=float("inf"))
        bad += tl.max(tl.where((cost != cost) | (cost == float("-inf")), 1, 0), axis=0)
        _q0, _q1, _q2, reached = _three(_down(two, i, none), _down(one, i, none), one, gamma, rate, KIND, EPS)
        reached = tl.where(i + d == 0, 0.0, reached)
        here = tl.where(inside, reached - cost.to(tl.float64), float("-inf"))
        if KEEP:
            tl.store(walk + d * rows + i, here, mask=i < rows)  # read by later kernels alone
        two = one
        one = here
    value = tl.max(tl.where(i == n - 1, one, float("-inf")), axis=0)
    tl.store(VALUE + b, tl.where(bad > 0, float("nan"), value))


@jit
def alignment_gradient_kernel(
    CELLS: tl.tensor,
    WEIGHT: tl.tensor,
    VALUE: tl.tensor,
    WALK: tl.tensor,
    LENGTHS: tl.tensor,
    GAMMA: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    series: tl.tensor,
    apart: tl.tensor,
    down: tl.tensor,
    across: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """The expected path of one table, from its end to its start. Results hold zeros."""
    b = tl.program_id(0).to(tl.int64)
    n, m = tl.load(LENGTHS + 2 * b + series), tl.load(LENGTHS + 2 * b + 1 - series)
    gamma, weight, value = tl.load(GAMMA), tl.load(WEIGHT + b), tl.load(VALUE + b)
    rate = 1.0 / gamma
    i = tl.arange(0, BLOCK).to(tl.int64)
    walk, cells = WALK + b * (rows + columns - 1) * rows, CELLS + b * apart
    if value > float("-inf"):
        mass = tl.where(i == n - 1, weight, 0.0)
        later = tl.zeros([BLOCK], tl.float64)  # what reaches the antidiagonal before the next one
        for back in range(n + m - 2):
            d = n + m - 2 - back
            inside = (i < n) & (i <= d) & (d - i < m)
            tl.store(cells + i * down + (d - i) * across, mass.to(CELLS.dtype.element_ty), mask=inside)
            q0, q1, q2 = _before(walk, d, i, rows, gamma, rate, KIND, EPS)
            next_mass = later + _up(mass * q1, i, BLOCK) + mass * q2
            later = _up(mass * q0, i, BLOCK)
            mass = next_mass
        tl.store(cells + i, mass.to(CELLS.dtype.element_ty), mask=i == 0)
    elif (value != value) & (weight != 0.0):
        _fill(cells, i, rows, columns, down, across)


@jit
def _fill(
    CELLS: tl.tensor, i: tl.tensor, rows: tl.tensor, columns: tl.tensor, down: tl.tensor, across: tl.tensor
) -> None:
    """NaN in all cells of a table."""
    lost = (i * 0.0 + float("nan")).to(CELLS.dtype.element_ty)
    for j in range(columns):
        tl.store(CELLS + i * down + tl.cast(j, tl.int64) * across, lost, mask=i < rows)


@jit
def alignment_hessian_kernel(
    CELLS: tl.tensor,
    CHANGE: tl.tensor,
    WEIGHT: tl.tensor,
    VALUE: tl.tensor,
    WALK: tl.tensor,
    ALONG: tl.tensor,
    MOVED: tl.tensor,
    LENGTHS: tl.tensor,
    GAMMA: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    series: tl.tensor,
    apart: tl.tensor,
    down: tl.tensor,
    across: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """How the results of ``alignment_gradient_kernel`` change along a direction ALONG, which is laid out as CELLS are.

    MOVED is room for the changes of the cells' values.
    """
    b = tl.program_id(0).to(tl.int64)
    n, m = tl.load(LENGTHS + 2 * b + series), tl.load(LENGTHS + 2 * b + 1 - series)
    gamma, weight, value = tl.load(GAMMA), tl.load(WEIGHT + b), tl.load(VALUE + b)
    rate = 1.0 / gamma
    i = tl.arange(0, BLOCK).to(tl.int64)
    nothing = tl.zeros([BLOCK], tl.float64)
    size = b * (rows + columns - 1) * rows
    walk, moved, cells, along = WALK + size, MOVED + size, CELLS + b * apart, ALONG + b * apart
    if value > float("-inf"):
        one = tl.where(i == 0, tl.load(along), 0.0)
        two = nothing
        tl.store(moved + i, one, mask=i < rows)
        for d in range(1, n + m - 1):
            inside = (i < n) & (i <= d) & (d - i < m)
            q0, q1, q2 = _before(walk, d, i, rows, gamma, rate, KIND, EPS)
            step = tl.load(along + i * down + (d - i) * across, mask=inside, other=0.0)
            here = step + q0 * _down(two, i, nothing) + q1 * _down(one, i, nothing) + q2 * one
            here = tl.where(inside, here, 0.0)
            tl.store(moved + d * rows + i, here, mask=i < rows)
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
            tl.store(cells + i * down + (d - i) * across, mass_moved.to(CELLS.dtype.element_ty), mask=inside)
            q0, q1, q2 = _before(walk, d, i, rows, gamma, rate, KIND, EPS)
            there = moved + (d - 1) * rows + i
            dv0 = tl.load(there - rows - 1, mask=(i < rows) & (i > 0) & (d > 1), other=0.0)
            dv1 = tl.load(there - 1, mask=(i < rows) & (i > 0), other=0.0)
            dv2 = tl.load(there, mask=i < rows, other=0.0)
            k0, k1, k2 = curvature(q0, KIND), curvature(q1, KIND), curvature(q2, KIND)
            mean = (k0 * dv0 + k1 * dv1 + k2 * dv2) * inverse(k0 + k1 + k2)
            part = mass * rate
            next_moved = later_moved + _up(mass_moved * q1 + part * k1 * (dv1 - mean), i, BLOCK)
            next_moved += mass_moved * q2 + part * k2 * (dv2 - mean)
            later_moved = _up(mass_moved * q0 + part * k0 * (dv0 - mean), i, BLOCK)
            next_mass = later + _up(mass * q1, i, BLOCK) + mass * q2
            later = _up(mass * q0, i, BLOCK)
            mass = next_mass
            mass_moved = next_moved
        tl.store(cells + i, mass_moved.to(CELLS.dtype.element_ty), mask=i == 0)
    else:
        lost = value != value
        tl.store(CHANGE + b, tl.where(lost, float("nan"), 0.0).to(tl.float64))
        if lost:
            _fill(cells, i, rows, columns, down, across)
