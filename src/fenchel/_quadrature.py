"""Adaptive quadrature of many integrands at once, with error estimates and derivatives of every order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

POINTS = 16
TOLERANCE = 1e-11
MAX_DEPTH = 40
"""The largest number of times that a panel is halved."""
MAX_PANELS = 200
"""The number of unfinished panels of an integrand above which no more panels are halved."""
DROP = 40.0
"""Nats below the peak at which a log-concave integrand is cut off: a relative error below e⁻⁴⁰."""

Array = np.ndarray[Any, Any]
Function = Callable[[Tensor, Tensor], Tensor]
"""f(x, row): values (Q,) at points x (Q,), each of the integrand with the index row (Q,)."""


@dataclass(frozen=True)
class Rule:
    """Nodes and weights of ``count`` integrals.

    Args:
        nodes: (Q,), or (Q, d).
        weights: (Q,).
        rows: (Q,), the index of the integrand of each node.
        error: (count, …), the estimated error of each integral.
    """

    nodes: Tensor
    weights: Tensor
    rows: Tensor
    error: Tensor

    def log_integral(self, log_values: Tensor) -> Tensor:
        """log ∫ exp(f) for values of f at the nodes (Q,), one number per integrand; differentiable in these values."""
        top = torch.full_like(self.error, -torch.inf).scatter_reduce(0, self.rows, log_values.detach(), "amax")
        top = torch.where(top.isfinite(), top, 0.0)
        scaled = (log_values - top[self.rows]).exp() * self.weights
        return torch.zeros_like(self.error).index_add(0, self.rows, scaled).log() + top

    def moved(self, ends: Function) -> Rule:
        """The same rule with derivatives of the nodes in parameters that the ends of the panels depend on.

        The integral and its derivatives do not depend on where panels end. If ends move with a steep part of the
        integrand, smaller terms cancel in the derivatives.

        Args:
            ends: a function of ends (P,) and rows (P,) that returns the same ends, with derivatives.
        """
        nodes, weights = self.nodes.reshape(-1, POINTS), self.weights.reshape(-1, POINTS)
        row, first, last = self.rows[::POINTS], nodes[:, :1], nodes[:, -1:]
        start, end = (ends(v.squeeze(-1), row).unsqueeze(-1) for v in (first, last))
        share = (nodes - first) / (last - first)
        moved = start + (end - start) * share
        stretched = weights * ((end - start) / (last - first))
        return Rule(moved.reshape(-1), stretched.reshape(-1), self.rows, self.error)


@lru_cache(maxsize=128)
def gauss_legendre(n: int) -> tuple[Array, Array]:
    """Nodes and weights of Gauss-Legendre quadrature on [0, 1], (n,) each."""
    x, w = np.polynomial.legendre.leggauss(n)
    return (x + 1) / 2, w / 2


def gauss_lobatto(n: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights of Gauss-Lobatto quadrature on [0, 1], (n,) each; both ends are nodes."""
    legendre = np.polynomial.Legendre.basis(n - 1)
    slope = legendre.deriv()
    x = np.sort(slope.roots().real)
    x = np.concatenate([[-1.0], x - slope(x) / slope.deriv()(x), [1.0]])
    w = 2 / (n * (n - 1) * legendre(x) ** 2)
    return like.new_tensor((x + 1) / 2), like.new_tensor(w / 2)


@torch.no_grad()
def adapted(function: Function, breaks: Tensor) -> Rule:
    """A rule for functions of one variable, by ``refined``.

    Args:
        function: the integrands, with largest values of about 1.
        breaks: (count, P), ascending ends of the first panels.
    """
    count = len(breaks)
    rows = torch.arange(count, device=breaks.device).unsqueeze(-1).expand(-1, breaks.shape[1] - 1).reshape(-1)
    start, width = breaks[:, :-1].reshape(-1, 1), breaks.diff(dim=-1).reshape(-1, 1)
    rule = refined(lambda x, row: function(x.squeeze(-1), row), start, width, rows, count)
    return Rule(rule.nodes.squeeze(-1), rule.weights, rule.rows, rule.error)


@torch.no_grad()
def refined(
    function: Function,
    start: Tensor,
    width: Tensor,
    rows: Tensor,
    count: int,
    points: int = POINTS,
    tolerance: float = TOLERANCE,
    max_panels: int = MAX_PANELS,
    coarse: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Rule:
    """A rule for functions of d variables: panels are halved in every direction until the sum of the parts is stable.

    The ends of panels are nodes, so that a steep fall near the end of a wide panel is noticed.

    Args:
        function: values (Q, …) at points (Q, d), of rows (Q,). Several values per point use the same panels.
        start: (P, d), the lower corners of the first panels.
        width: (P, d), their sizes; panels without volume are left out.
        rows: (P,), the index of the integrand of each panel.
        count: the number of integrands.
        points: the number of nodes of a panel in each direction.
        tolerance: of the difference, relative to the sum of the absolute integrals of all panels.
        max_panels: the number of unfinished panels of an integrand above which no more panels are halved.
        coarse: a function of (start, width, rows) that returns which panels must be halved in any case.
    """
    dim = start.shape[-1]
    x, w = gauss_lobatto(points, start)
    x = torch.cartesian_prod(*[x] * dim).reshape(-1, dim)
    w = torch.cartesian_prod(*[w] * dim).reshape(-1, dim).prod(-1)
    corner = torch.cartesian_prod(*[start.new_tensor([0.0, 0.5])] * dim).reshape(-1, dim)
    kept = ~(width <= 0).any(-1)  # panels with NaN remain, so that their integral is NaN
    start, width, rows = start[kept], width[kept], rows[kept]

    def panels(start: Tensor, width: Tensor, rows: Tensor) -> Tensor:
        nodes = start.unsqueeze(-2) + width.unsqueeze(-2) * x
        values = function(nodes.reshape(-1, dim), rows.repeat_interleave(len(x)))
        values = values.reshape(len(rows), len(x), *values.shape[1:])
        integral: Tensor = torch.tensordot(w, values.movedim(1, 0).to(w.dtype), 1)
        return integral * _volume(width, integral.dim())

    def children(start: Tensor, width: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        begin = (start.unsqueeze(-2) + width.unsqueeze(-2) * corner).reshape(-1, dim)
        return begin, (width / 2).repeat_interleave(len(corner), 0), rows.repeat_interleave(len(corner))

    whole = panels(start, width, rows)
    done = torch.zeros(count, *whole.shape[1:], dtype=whole.dtype, device=whole.device)
    error, kept_panels = torch.zeros_like(done), []
    for depth in range(MAX_DEPTH):
        parts = children(start, width, rows)
        each = panels(*parts)
        each = each.reshape(len(rows), len(corner), *each.shape[1:])
        difference, size = (each.sum(1) - whole).abs(), each.abs().sum(1)
        total = done.index_add(0, rows, size)[rows]
        split = (difference > tolerance * total).reshape(len(rows), difference[:1].numel()).any(-1)
        if coarse is not None:
            split |= coarse(start, width, rows)
        # Halving does not reduce rounding errors; they stay in the estimated error.
        split &= (torch.bincount(rows, minlength=count)[rows] <= max_panels) & (depth < MAX_DEPTH - 1)
        over = ~split
        done = done.index_add(0, rows[over], size[over])
        error = error.index_add(0, rows[over], difference[over])
        chosen = over.repeat_interleave(len(corner))
        kept_panels.append(tuple(v[chosen] for v in parts))
        start, width, rows = (v[~chosen] for v in parts)
        whole = each[split].flatten(0, 1)
        if not len(rows):
            break
    begin, size, owner = (torch.cat(each) for each in zip(*kept_panels, strict=True))
    nodes = begin.unsqueeze(-2) + size.unsqueeze(-2) * x
    weights = _volume(size, 1).unsqueeze(-1) * w
    return Rule(nodes.reshape(-1, dim), weights.reshape(-1), owner.repeat_interleave(len(x)), error)


def ranks(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The rank of each entry among those of its row, (Q,), and the number of entries of each row, (count,).

    Args:
        rows: (Q,), ascending, the row of each entry.
        count: the number of rows.
    """
    counts = torch.bincount(rows, minlength=count)
    return torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows], counts


def _volume(width: Tensor, dims: int) -> Tensor:
    return width.prod(-1).reshape(-1, *(1,) * (dims - 1))


@torch.no_grad()
def log_concave(log_function: Function, lower: Tensor, upper: Tensor, marks: Tensor | None = None) -> Rule:
    """A rule for exp of concave functions on [lower, upper], (count,) each.

    The peak is found by a search that uses concavity, however narrow it is. Panels also end at ``marks`` (count, M).
    """
    peak, highest = _peak(log_function, lower, upper)
    left = _cut(log_function, lower, peak, highest)
    right = _cut(log_function, upper, peak, highest)
    rows = torch.arange(len(peak), device=peak.device)
    highest = torch.where(highest.isfinite(), highest, 0.0)
    thirds = [(2 * left + peak) / 3, (left + 2 * peak) / 3, peak, (2 * peak + right) / 3, (peak + 2 * right) / 3]
    breaks = torch.stack([left, *thirds, right], -1)
    if marks is not None:
        marks = torch.minimum(torch.maximum(marks, left.unsqueeze(-1)), right.unsqueeze(-1))
        breaks = torch.cat([breaks, marks], -1).sort(-1).values
    return adapted(lambda x, row: (log_function(x, row) - highest[row]).exp(), breaks.cummax(-1).values[rows])


def _grid(function: Function, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Evenly spaced points from a to b, and the values there, (count, POINTS + 1) each."""
    t = torch.linspace(0, 1, POINTS + 1, dtype=a.dtype, device=a.device)
    x = a.unsqueeze(-1) * (1 - t) + b.unsqueeze(-1) * t
    rows = torch.arange(len(a), device=a.device).repeat_interleave(POINTS + 1)
    return x, function(x.reshape(-1), rows).reshape(x.shape)


def _peak(function: Function, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """A point whose value is within about one nat of the maximum, and that value, (count,) each."""
    for _ in range(2 * MAX_DEPTH):
        x, values = _grid(function, lower, upper)
        best = values.argmax(-1, keepdim=True)
        low, high = (best - 1).clamp_min(0), (best + 1).clamp_max(POINTS)
        lower, upper = x.gather(-1, low).squeeze(-1), x.gather(-1, high).squeeze(-1)
        top = values.gather(-1, best)
        flat = (top - values.gather(-1, low) < 1) & (top - values.gather(-1, high) < 1)
        if bool((flat.squeeze(-1) | (upper <= lower) | top.squeeze(-1).isnan()).all()):
            break
    return x.gather(-1, best).squeeze(-1), top.squeeze(-1)


def _cut(function: Function, end: Tensor, peak: Tensor, highest: Tensor) -> Tensor:
    """The end of the interval, or a nearer point beyond which the function is at least ``DROP`` below its peak."""
    inner, outer = peak, end
    for _ in range(2 * MAX_DEPTH):
        x, values = _grid(function, inner, outer)
        dropped = (highest.unsqueeze(-1) - values) >= DROP
        first = dropped.to(torch.int8).argmax(-1, keepdim=True)
        any_dropped = dropped.any(-1)
        drop_there = highest - values.gather(-1, first).squeeze(-1)
        outer = torch.where(any_dropped, x.gather(-1, first).squeeze(-1), outer)
        inner = torch.where(any_dropped, x.gather(-1, (first - 1).clamp_min(0)).squeeze(-1), inner)
        near = (outer - inner).abs() <= (inner - peak).abs()  # at most half of the rest is beyond the cut
        if bool((~any_dropped | (drop_there < 2 * DROP) | drop_there.isnan() | near).all()):
            break
    return outer


def line(function: Callable[[Tensor], Tensor], breaks: Tensor) -> Tensor:
    """Integrals (*batch) of functions between the first and the last of their breaks (P, *batch).

    All panels of all functions are halved together.

    Args:
        function: values (N, *batch) at points (N, *batch).
        breaks: ascending ends of the first panels.
    """
    with torch.no_grad():
        coarse = _composite(function, breaks)
        for _ in range(7):
            breaks = torch.cat([breaks[:1], torch.stack([(breaks[1:] + breaks[:-1]) / 2, breaks[1:]], 1).flatten(0, 1)])
            fine = _composite(function, breaks)
            converged = (fine - coarse).abs() <= TOLERANCE * (1 + fine.abs())
            if bool((converged | ~fine.isfinite()).all()):
                break
            coarse = fine
    return _composite(function, breaks)


def _composite(function: Callable[[Tensor], Tensor], breaks: Tensor) -> Tensor:
    """Integrals by Gauss-Legendre quadrature between neighbouring breaks."""
    x, w = (breaks.new_tensor(each).reshape(-1, *[1] * breaks.dim()) for each in gauss_legendre(POINTS))
    width = breaks.diff(dim=0)
    nodes, weights = breaks[:-1] + width * x, width * w
    return (function(nodes.flatten(0, 1)) * weights.flatten(0, 1)).sum(0)
