r"""Minimize Ω(p) − ⟨p, s⟩ over the simplex for any smooth convex Ω that can be evaluated and differentiated.

Newton's method on a guessed support is exact for quadratics and takes a few steps near a solution. Where it does not
converge, because the guess was poor or the slope of Ω is infinite at the boundary, a primal-dual interior-point method
finds a support, from which Newton's method starts again. The duality gap of each row certifies its result,

.. math:: \max_i (s - \nabla\Omega(p))_i - \langle p, s - \nabla\Omega(p) \rangle \ge
          \Omega(p) - \langle p, s \rangle - \min_q \, (\Omega(q) - \langle q, s \rangle).

Rows keep their shape and their place: ``omega`` is evaluated at all of them in every step, and rows that have converged
do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TINY = 1e-50
"""Used in place of zero where slopes would be infinite; it is below the rounding error of everything else."""

NEWTON_STEPS = 20
BACKTRACKS = 20
ROUNDING = 1e-15
"""A gap below this, relative to the terms that it is the difference of, counts as zero."""


@dataclass(frozen=True)
class Solution:
    """Where Ω(p) − ⟨p, s⟩ is least.

    Args:
        p: the point, with exact zeros off its support.
        curvature: Hessian of Ω there: its diagonal (…, n) if it is diagonal, else (…, n, n).
        gap: the duality gap of each row, (…, 1).
        scale: the size of the terms that the gap is the difference of, (…, 1).
        masked: the value of masked entries where Ω is differentiated: 0, or ``TINY`` if Ω is not smooth at 0.
    """

    p: Tensor
    curvature: Tensor
    gap: Tensor
    scale: Tensor
    masked: float


class View:
    """Ω at a point: its gradient, and its Hessian if asked."""

    def __init__(self, omega: Callable[[Tensor], Tensor], p: Tensor) -> None:
        with torch.enable_grad():
            self._p = p.detach().requires_grad_()
            self.value = omega(self._p)
            if not self.value.requires_grad:
                raise ValueError("fn must be a differentiable function of p: its result does not depend on p")
            (self._gradient,) = torch.autograd.grad(
                self.value.sum(), self._p, create_graph=True, materialize_grads=True
            )
        self.gradient = self._gradient.detach()

    def product(self, v: Tensor) -> Tensor:
        """The Hessian times v."""
        if not self._gradient.requires_grad:
            return torch.zeros_like(v)
        (product,) = torch.autograd.grad(self._gradient, self._p, v, retain_graph=True, materialize_grads=True)
        return product

    def hessian(self) -> Tensor:
        """The whole Hessian, (…, n, n)."""
        n = self._p.shape[-1]
        if not self._gradient.requires_grad:
            return self._p.new_zeros(*self._p.shape, n)
        basis = torch.eye(n, dtype=self._p.dtype, device=self._p.device)
        basis = basis.reshape(n, *(1,) * (self._p.dim() - 1), n).expand(n, *self._p.shape)
        (rows,) = torch.autograd.grad(
            self._gradient, self._p, basis, retain_graph=True, is_grads_batched=True, materialize_grads=True
        )
        hessian = rows.movedim(0, -2)
        return (hessian + hessian.mT) / 2

    def is_smooth(self) -> bool:
        """Whether the gradient and the Hessian are finite, at all entries."""
        finite = self.gradient.isfinite() & self.product(_uneven(self.gradient).expand_as(self.gradient)).isfinite()
        return bool(finite.all())

    def has_diagonal(self, diagonal: Tensor, free: Tensor) -> bool:
        """Whether the Hessian is a positive diagonal matrix, tested by its product with a vector of uneven entries."""
        probe = _uneven(diagonal)
        expected = diagonal * probe
        agrees = (self.product(probe.expand_as(diagonal)) - expected).abs() <= 1e-13 * expected.abs()
        return bool((~free | (agrees & (diagonal > 0))).all())


def _uneven(like: Tensor) -> Tensor:
    """Positive numbers, one per entry, all different, so that no sums of products cancel."""
    return (torch.arange(1, like.shape[-1] + 1, dtype=like.dtype, device=like.device) * 2.4).sin() + 1.5


class _Row:
    """The scores, the mask and Ω of the problem, with what every step computes from them."""

    def __init__(self, omega: Callable[[Tensor], Tensor], scores: Tensor, free: Tensor) -> None:
        self.omega = omega
        self.free = free
        self.scores = torch.where(free, scores, 0.0)
        self.outside = torch.where(free, 0.0, torch.inf)  # subtracted before a maximum over the free entries
        self.diagonal = True
        self.masked = 0.0
        self.floor = torch.full_like(scores, TINY)
        self.unit = torch.zeros_like(scores[..., :1])

    def view(self, p: Tensor) -> View:
        return View(self.omega, torch.where(self.free, torch.maximum(p, self.floor), self.masked))

    def curvature(self, view: View) -> Tensor:
        return view.product(torch.ones_like(self.scores)) if self.diagonal else view.hessian()

    def ascent(self, view: View) -> Tensor:
        """s − ∇Ω, the direction to move mass along; zero at masked entries."""
        return torch.where(self.free, self.scores - view.gradient, 0.0)

    def gap(self, p: Tensor, ascent: Tensor) -> tuple[Tensor, Tensor]:
        """The duality gap of each row and its scale. A gap that is not finite is +inf."""
        size = ascent.abs() + self.scores.abs()
        best = (ascent - ROUNDING * size - self.outside).amax(-1, keepdim=True)  # slopes are not known more precisely
        gap = best - (p * ascent).sum(-1, keepdim=True)
        scale = (p * size).sum(-1, keepdim=True) + self.unit
        return torch.where(gap.isfinite(), gap.clamp_min(0), torch.inf), scale


def minimize(omega: Callable[[Tensor], Tensor], scores: Tensor, free: Tensor, tol: float, max_iter: int) -> Solution:
    """Minimize over the simplex of the free entries of each row, of which there is at least one.

    Args:
        omega: maps (…, n) to (…), without looking at more than one row at a time.
        scores: rows with largest score 0 (in float64).
        free: where p may be positive.
        tol: the relative gap at which the interior-point method stops.
        max_iter: of the interior-point method.
    """
    row = _Row(omega, scores, free)
    p = free / free.sum(-1, keepdim=True).to(scores.dtype)
    view = row.view(p)
    _check_finite(view, free)
    if not bool(free.all()) and not view.is_smooth():
        # Infinite derivatives at masked zeros would reach the other entries as 0 · inf.
        row.masked = TINY
        view = row.view(p)
        _check_finite(view, free)
    # Slopes may cancel at the solution; the size of their terms is then estimated from the slopes at the start.
    row.unit = 0.01 * (p * torch.where(free, view.gradient.abs(), 0.0)).sum(-1, keepdim=True)
    # Tested away from the centre, where the terms that couple entries may cancel.
    aside = row.view(p * _uneven(p) / (p * _uneven(p)).sum(-1, keepdim=True))
    row.diagonal = aside.has_diagonal(row.curvature(aside), free)
    curvature = row.curvature(view)
    q, gap, scale, view = _newton(row, p, free, view, curvature)
    open_rows = gap > ROUNDING * 10 * scale
    if bool(open_rows.any()):
        inner, support = _interior(row, p, open_rows, tol, max_iter)
        # Entries of the interior point outside of its support count as zero, and keep infinite slopes finite.
        row.floor = torch.where(open_rows & (inner < ROUNDING), inner, row.floor)
        inner = torch.where(open_rows, inner, q)
        support = torch.where(open_rows, support, q > 0)
        view = row.view(inner)
        q, gap, scale, view = _newton(row, inner, support, view, row.curvature(view))
    curvature = row.curvature(view)
    if row.diagonal and not view.has_diagonal(curvature, free & (q > 0)):
        curvature = view.hessian()
    _check_convex(curvature, q)
    return Solution(q, curvature, gap, scale, row.masked)


def _check_finite(view: View, free: Tensor) -> None:
    if bool(view.value.isfinite().all()) and bool((view.gradient.isfinite() | ~free).all()):
        return
    masked = "" if bool(free.all()) else "; masked entries are 0 in p, so write p log p as -torch.special.entr(p)"
    raise ValueError(
        "fn must be finite and have a finite gradient inside the simplex: at a point that was visited it has not"
        + masked
    )


def _check_convex(curvature: Tensor, p: Tensor) -> None:
    """At a solution with more than one entry, the Hessian on the support must be positive along the simplex."""
    support = p > 0
    if curvature.dim() == p.dim():
        fine = bool((~support | (curvature > 0)).all())
    else:
        fine = not bool(torch.linalg.cholesky_ex(reduce(curvature, support)[2]).info.any())
    if not fine:
        raise ValueError("fn must be strictly convex on the simplex: at the solution its Hessian is not positive")


def tangent(curvature: Tensor, free: Tensor) -> Callable[[Tensor], Tensor]:
    """v ↦ the d with Σd = 0, zero off the free entries, that maximizes ⟨d, v⟩ − ½ dᵀHd; NaN where there is none."""
    if curvature.dim() == free.dim():
        return lambda v: diagonal_product(v, curvature, free)
    at, inner, reduced = reduce(curvature, free)
    factor, failed = torch.linalg.cholesky_ex(reduced)
    factor = torch.where((failed != 0)[..., None, None], torch.nan, factor)

    def product(v: Tensor) -> Tensor:
        rhs = torch.where(inner, v - v.gather(-1, at), 0.0)
        d = torch.cholesky_solve(rhs.unsqueeze(-1), factor).squeeze(-1)
        return d.scatter(-1, at, -d.sum(-1, keepdim=True))

    return product


def flattest(curvature: Tensor, free: Tensor) -> Tensor:
    """The index of the free entry with the smallest curvature, (…, 1)."""
    diagonal = curvature if curvature.dim() == free.dim() else curvature.diagonal(dim1=-2, dim2=-1)
    return torch.where(free, diagonal.detach(), torch.inf).argmin(-1, keepdim=True)


def diagonal_product(v: Tensor, curvature: Tensor, free: Tensor) -> Tensor:
    """J v for a diagonal Hessian: w(v − ⟨w, v⟩/Σw) with w = 1/h on the free entries.

    Where h is nearly zero that is a difference of huge numbers. So v is taken relative to the flattest entry, and the
    product of that entry is minus the sum of the others.
    """
    at = flattest(curvature, free)
    w = torch.where(free, 1 / curvature, 0.0)
    v = v - v.gather(-1, at)
    d = w * (v - (w * v).sum(-1, keepdim=True) / w.sum(-1, keepdim=True))
    d = d.scatter(-1, at, 0.0)
    return d.scatter(-1, at, -d.sum(-1, keepdim=True))


def reduce(hessian: Tensor, free: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The Hessian along moves of mass between the flattest entry and each of the others.

    Returns the index of the flattest entry, which entries the others are, and the matrix. It is positive definite
    exactly if Ω is strictly convex on the simplex.
    """
    at = flattest(hessian, free)
    inner = free & ~torch.zeros_like(free).scatter(-1, at, True)
    column = hessian.gather(-1, at.unsqueeze(-2).expand(*hessian.shape[:-1], 1))
    corner = column.gather(-2, at.unsqueeze(-1))
    reduced = hessian - column - column.mT + corner
    both = inner.unsqueeze(-1) & inner.unsqueeze(-2)
    return at, inner, torch.where(both, reduced, torch.eye(free.shape[-1], dtype=hessian.dtype, device=hessian.device))


def _times(curvature: Tensor, v: Tensor) -> Tensor:
    return curvature * v if curvature.dim() == v.dim() else (curvature @ v.unsqueeze(-1)).squeeze(-1)


# -- Newton's method on a support -------------------------------------------------------------------------


def _newton(
    row: _Row, p: Tensor, support: Tensor, view: View, curvature: Tensor
) -> tuple[Tensor, Tensor, Tensor, View]:
    """Newton's method on a support: entries that become negative are removed, entries with a higher ascent are added.

    A row continues as long as its gap falls quickly. Returns the best point of each row, its gap, scale and view.
    """
    ascent = row.ascent(view)
    p = torch.where(support, p, 0.0)
    gap, scale = row.gap(p, ascent)
    running = gap > 0
    for step in range(NEWTON_STEPS):
        if not bool(running.any()):
            break
        curvature = row.curvature(view) if step else curvature
        q = torch.where(running, _newton_step(p, support, ascent, curvature), p)
        new = row.view(q)
        new_ascent = row.ascent(new)
        new_gap, new_scale = row.gap(q, new_ascent)
        better = running & (new_gap <= gap)
        running = running & (new_gap < 0.8 * gap) & (new_gap > 4 * ROUNDING * new_scale)
        p, ascent = torch.where(better, q, p), torch.where(better, new_ascent, ascent)
        gap, scale = torch.where(better, new_gap, gap), torch.where(better, new_scale, scale)
        level = (p * ascent).sum(-1, keepdim=True)
        support = (p > 0) | (row.free & (ascent > level + ROUNDING * scale))
        view = new if bool(better.all()) else row.view(p)
    return p, gap, scale, view


def _newton_step(p: Tensor, support: Tensor, ascent: Tensor, curvature: Tensor) -> Tensor:
    """The maximum of the quadratic model at p on a support, which is reduced until no entry is negative."""
    if curvature.dim() == p.dim():
        support = _diagonal_support(p, support, ascent, curvature)
    while True:
        kept = torch.where(support, p, 0.0)
        total = kept.sum(-1, keepdim=True)
        base = torch.where(total > 0, kept / total, support / support.sum(-1, keepdim=True))
        q = base + tangent(curvature, support)(ascent + _times(curvature, p - base))
        negative = q < 0
        if not bool(negative.any()):
            return q / q.sum(-1, keepdim=True)
        support = support & ~negative


def _diagonal_support(p: Tensor, support: Tensor, ascent: Tensor, curvature: Tensor) -> Tensor:
    """Where p + w(ascent − τ) is positive, w = 1/h, for the τ at which that sums to one: Michelot's algorithm."""
    w = 1 / curvature
    full = p + w * ascent
    kept = support.to(p.dtype)
    while True:
        tau = ((kept * full).sum(-1, keepdim=True) - 1) / (kept * w).sum(-1, keepdim=True)
        positive = full > tau * w
        fewer = kept * positive
        if bool((fewer == kept).all()) or not bool(fewer.any(-1).all()):
            return kept > 0
        kept = fewer


# -- the interior-point method ----------------------------------------------------------------------------


def _interior(row: _Row, p: Tensor, running: Tensor, tol: float, max_iter: int) -> tuple[Tensor, Tensor]:
    """Follow a primal-dual path to the solution; return an interior point, and the support by its multipliers."""
    free, count = row.free, row.free.sum(-1, keepdim=True)
    view = row.view(p)
    ascent = row.ascent(view)
    gap, scale = row.gap(p, ascent)
    top = (ascent - row.outside).amax(-1, keepdim=True)
    dual = torch.where(free, top - ascent + gap + 1e-3 * scale, 0.0)
    for _ in range(max_iter):
        if not bool(running.any()):
            break
        curvature = row.curvature(view)
        pull = torch.where(free, dual / p, 0.0)
        move = tangent(curvature + (pull if row.diagonal else torch.diag_embed(pull)), free)
        mean = (p * dual).sum(-1, keepdim=True) / count
        # The predictor step without a barrier determines how much of the barrier is kept.
        dp = move(ascent)
        fraction = torch.minimum(_room(p, dp), _room(dual, -dual - pull * dp))
        reduction = (1 - fraction).pow(3).clamp_min(1e-4)
        # If the barrier were lowered before the point is near its path, the point would stay at the boundary.
        barrier = mean * torch.where(gap > 10 * count * mean + ROUNDING * scale, 1.0, reduction)
        push = torch.where(free, barrier / p, 0.0)
        dp = move(ascent + push)
        ddual = push - dual - pull * dp
        bend = _bend(dp, curvature, running, scale)
        p, view, ascent = _search(row, p, dp, ascent, (bend, pull), running)
        dual = torch.where(running, dual + 0.99 * _room(dual, ddual) * ddual, dual)
        # A multiplier far from the one of the barrier would slow the next steps down.
        dual = torch.where(free, dual.clamp(1e-10 * barrier / p, 1e10 * barrier / p), 0.0)
        last, (gap, scale) = gap, row.gap(p, ascent)
        done = (gap <= 10 * ROUNDING * scale) | ((gap <= tol * scale) & (gap > last / 2))
        running = running & ~(done & ((p * dual).amax(-1, keepdim=True) <= ROUNDING**1.5 * scale))
    diagonal = curvature if row.diagonal else curvature.diagonal(dim1=-2, dim2=-1)
    return p, free & ((dual < diagonal * p) | (p == p.amax(-1, keepdim=True)))


def _room(x: Tensor, dx: Tensor) -> Tensor:
    """The largest fraction in (0, 1] of a step that leaves x positive."""
    ratio = torch.where(dx < 0, -x / dx, torch.inf)
    return ratio.amin(-1, keepdim=True).clamp_max(1.0)


def _bend(dp: Tensor, curvature: Tensor, running: Tensor, scale: Tensor) -> Tensor:
    """dpᵀHdp, which is positive if Ω is strictly convex."""
    bend = (dp * _times(curvature, dp)).sum(-1, keepdim=True)
    length = dp.abs().sum(-1, keepdim=True)
    if bool((running & ~(bend >= -1e-9 * scale * length * length)).any()):
        raise ValueError(
            "fn must be strictly convex on the simplex: along a direction that was visited it has negative curvature"
        )
    return bend


def _search(
    row: _Row, p: Tensor, dp: Tensor, ascent: Tensor, model: tuple[Tensor, Tensor], running: Tensor
) -> tuple[Tensor, View, Tensor]:
    """A step that leaves p positive, and is so short that the quadratic model of Ω holds.

    It is checked by slopes along the line, which are precise near the solution, unlike values, and are needed at the
    new point anyway: the rise of the slope of Ω beyond that of the model must be less than half of the initial slope.
    """
    bend, pull = model
    start = bend + (dp * pull * dp).sum(-1, keepdim=True)
    noise = 1e-14 * (dp.abs() * (ascent.abs() + row.scores.abs())).sum(-1, keepdim=True)
    step = 0.995 * _room(p, dp)
    for _ in range(BACKTRACKS):
        q = torch.where(running, p + step * dp, p)
        q = q / q.sum(-1, keepdim=True)
        view = row.view(q)
        new = row.ascent(view)
        excess = (dp * (ascent - new)).sum(-1, keepdim=True) - step * bend
        too_far = running & (excess > 0.5 * start + noise)
        if not bool(too_far.any()):
            break
        step = torch.where(too_far, step / 2, step)
    _check_finite(view, row.free)
    return q, view, new
