"""Expectations of any function under β-Gaussians and their powers, on the line and in the plane.

With z² the difference of the log-density from its peak, ½‖u‖² = (1 − exp(−c z²))/c, or z² for c = 0. As a function of z
the integrand is smooth for every α, falls like a Gaussian, and does not end with the support. One Gauss-Legendre rule
is compared with another of half the nodes; where they disagree, panels are halved until whole and parts agree.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fenchel._checks import check_count
from fenchel._quadrature import refined
from fenchel._torch import concrete
from fenchel.continuous.radial import Number, gauss_legendre, log_shape

Function = Callable[[Tensor], Tensor]

_FIRST = 45.0  # nats below the peak where the first rules end
_FAR = 30.0  # nats: what lies beyond must not count in the first rules
_LAST = 700.0  # where panels end
_BREAKS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.5, 7.0, 12.0, math.inf)  # of the first panels, in deviations
_SECTORS = 8
_CROWDED = 2000
_CHUNK = 2**16  # points at a time
_GOALS = {torch.float64: (1e-9, 1e-10, 1e-6), torch.float32: (1e-5, 1e-5, 1e-3)}
"""Relative differences: of the first two rules, of a panel and its parts, and what is warned of."""


@dataclass(frozen=True)
class Weight:
    """(1 − ½ c ‖u‖²)₊^(β/c) with its integral: a number for all, or one per batch entry.

    Args:
        c: α − 1.
        beta: the power of the density.
        log_integral: the logarithm of the integral over u.
    """

    c: Number
    beta: Number
    log_integral: Number


def integrate(
    function: Function,
    loc: Tensor,
    root: Tensor,
    weight: Weight,
    nodes: int,
    angles: int,
    resolve: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """E[function(loc + root u)] for D = 1 and 2; a warning where the estimated error is too large.

    Args:
        function: takes points (N, …, D), returns (N, …) and any further dimensions.
        loc: (…, D).
        root: (…, D, D).
        weight: the density of u, but for a constant.
        nodes: how many radii the first rule has.
        angles: how many directions, for D = 2.
        resolve: places (n, D) where the function is known to change, and over what widths (n,).
    """
    if loc.shape[-1] > 2:
        raise NotImplementedError(f"integrals are computed in one and two dimensions, got {loc.shape[-1]}")
    nodes, angles = check_count(nodes, "nodes", 2), check_count(angles, "angles", 2)
    return _Integral(function, loc, root, weight, resolve).value(nodes, angles)


class _Integral:
    def __init__(
        self, function: Function, loc: Tensor, root: Tensor, weight: Weight, resolve: tuple[Tensor, Tensor] | None
    ) -> None:
        self.function, self.loc, self.root, self.resolve = function, loc, root, resolve
        self.dim, self.batch = loc.shape[-1], loc.shape[:-1]
        numbers = (weight.c, weight.beta, weight.log_integral)
        c, beta, self.log_integral = (torch.as_tensor(v, dtype=torch.float64, device=loc.device) for v in numbers)
        self.c, self.rate = c, beta + c
        # How fast the weight falls in z; the radius grows without bound for c < 0.
        self.unit = (beta + torch.maximum(c, 0.5 * self.dim * c)).rsqrt()
        largest = 0.5 * math.log(torch.finfo(loc.dtype).max) - 4  # points must not overflow, nor must their squares
        self.limit = torch.where(c < 0, (2 * largest / c.abs()).sqrt() / self.unit, math.inf)

    def value(self, nodes: int, angles: int) -> Tensor:
        fine, size, far = self._fixed(nodes, angles)
        coarse, _, _ = self._fixed(max(nodes // 2, 1), max(angles // 2, 1))
        if not concrete(fine, coarse, self.loc, self.root):
            return fine
        agree, _, _ = _goals(fine)
        good = ((fine - coarse).abs() <= agree * size) & (far <= agree * size) & (size > 0) | ~size.isfinite()
        extra = fine.dim() - len(self.batch)
        rows = ~(good.flatten(-extra).all(-1) if extra else good)
        if self.resolve is not None:
            _, near, inside, *_ = self._features()
            rows |= ((near < 0.25) & inside).any(-1).reshape(self.batch)
        if not bool(rows.any()):
            return fine
        refined_value = self._refined(rows.flatten(), fine)
        return torch.where(rows.reshape((*self.batch, *(1,) * extra)), refined_value, fine)

    def _points(self, y: Tensor, angle: Tensor | None) -> tuple[Tensor, Tensor]:
        """Points and weights at y deviations of z, (N, …): signed on the line, with an angle in the plane."""
        z = y * self.unit
        square = z.square()
        ratio = decline(self.c * square)
        log_weight = -self.rate * square - self.log_integral
        radius = z * (2 * ratio).sqrt()
        if angle is None:
            weight = torch.exp(log_weight - 0.5 * ratio.log()) * (math.sqrt(2) * self.unit)
            u = radius.unsqueeze(-1)
        else:
            weight = torch.exp(log_weight) * (2 * z * self.unit)
            u = torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
        return u.to(self.loc.dtype), weight

    def _values(self, u: Tensor) -> Tensor:
        values = self.function(self.loc + (self.root @ u.unsqueeze(-1)).squeeze(-1))
        return values if values.is_floating_point() else values.to(self.loc.dtype)

    def _fixed(self, nodes: int, angles: int) -> tuple[Tensor, Tensor, Tensor]:
        """The integral by one rule, that of the absolute values, and the part of the latter far from the peak."""
        line = self.dim == 1
        radii, shares = gauss_legendre(2 * nodes if line else nodes)
        turns = 2 * np.pi * (np.arange(angles) + 0.5) / angles
        if line:
            rule = 2 * radii - 1, 2 * shares, radii
        else:
            rule = np.repeat(radii, angles), np.repeat(shares, angles) * (2 * np.pi / angles), np.tile(turns, nodes)
        column = (-1, *(1,) * len(self.batch))
        x, w, turn = (torch.as_tensor(v, device=self.loc.device).reshape(column) for v in rule)
        end = self.limit.clamp_max(math.sqrt(_FIRST))
        y = x * end
        u, weight = self._points(y, None if line else turn)
        weight = weight * w * end
        values = self._values(u)
        weight = weight.to(values.dtype).reshape(*weight.shape, *(1,) * (values.dim() - weight.dim()))
        terms = torch.where(weight > 0, weight * values, 0.0)
        sizes = terms.detach().abs()
        beyond = (y.square() > torch.clamp_max(end.square() - 1, _FAR)).reshape(
            *y.shape, *(1,) * (values.dim() - y.dim())
        )
        return terms.sum(0), sizes.sum(0), torch.where(beyond, sizes, 0.0).sum(0)

    def _refined(self, wanted: Tensor, like: Tensor) -> Tensor:
        count, extra = len(wanted), like.shape[len(self.batch) :]
        end = self.limit.expand(self.batch).reshape(-1).clamp_max(math.sqrt(_LAST))
        _, tolerance, goal = _goals(like)

        def integrand(nodes: Tensor, rows: Tensor) -> Tensor:
            step = max(_CHUNK // count, 1)
            starts = range(0, max(len(rows), 1), step)
            return torch.cat([chunk(nodes[i : i + step], rows[i : i + step]) for i in starts])

        def chunk(nodes: Tensor, rows: Tensor) -> Tensor:
            place = _places(rows, count)
            grid = nodes.new_zeros(int(place.max()) + 1 if len(place) else 0, count, nodes.shape[-1])
            grid[place, rows] = nodes
            grid = grid.reshape(len(grid), *self.batch, grid.shape[-1])
            u, weight = self._points(grid[..., 0], grid[..., 1] if self.dim == 2 else None)
            values = self._values(u).reshape(len(grid), count, -1)[place, rows]
            weight = weight.reshape(len(grid), count)[place, rows].to(values.dtype).unsqueeze(-1)
            return torch.where(weight > 0, weight * values, 0.0)

        start, width, rows = self._panels(wanted, end)
        points = 16 if self.dim == 1 else 10
        rule = refined(integrand, start, width, rows, count, points, tolerance, _CROWDED, self._coarse())
        terms = integrand(rule.nodes, rule.rows) * rule.weights.unsqueeze(-1).to(like.dtype)
        total = torch.zeros(count, terms.shape[-1], dtype=terms.dtype, device=terms.device)
        size = total.index_add(0, rule.rows, terms.detach().abs())
        error = rule.error + self._beyond(integrand, wanted, end)
        if bool((error > goal * size).any()):
            worst = (error / size).nan_to_num(0.0).max().item()
            warnings.warn(
                f"integrate: the estimated error is {worst:.1g} of the integral of the absolute values, more than "
                f"{goal:g}. The function has jumps, or many narrow features, or tails as heavy as the density's",
                stacklevel=5,
            )
        return total.index_add(0, rule.rows, terms).reshape((*self.batch, *extra))

    @torch.no_grad()
    def _beyond(self, integrand: Callable[[Tensor, Tensor], Tensor], wanted: Tensor, end: Tensor) -> Tensor:
        """An estimate of the integral beyond the last panels, which matters for very heavy tails."""
        rows = wanted.nonzero().squeeze(-1)
        sides = [-1.0, 1.0] if self.dim == 1 else [2 * math.pi * (k + 0.5) / _SECTORS for k in range(_SECTORS)]
        total: Tensor | float = 0.0
        for side in sides:
            last = end[rows] * (side if self.dim == 1 else 1.0)
            nodes = torch.stack([last, torch.full_like(last, side)][: self.dim], -1)
            total = total + integrand(nodes, rows).abs() / (2 * end[rows]).unsqueeze(-1)
        assert isinstance(total, Tensor)
        share = 1.0 if self.dim == 1 else 2 * math.pi / _SECTORS
        return total.new_zeros(len(wanted), total.shape[-1]).index_add(0, rows, share * total)

    def _panels(self, wanted: Tensor, end: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The initial panels of the rows that are refined."""
        breaks = torch.minimum(end.unsqueeze(-1), end.new_tensor(_BREAKS))[wanted]
        rows = wanted.nonzero().expand(-1, len(_BREAKS) - 1)
        start, width = breaks[:, :-1], breaks.diff(dim=-1)
        if self.dim == 1:
            start, width, rows = (torch.cat(v, -1) for v in ((start, -breaks[:, 1:]), (width, width), (rows, rows)))
            return start.reshape(-1, 1), width.reshape(-1, 1), rows.reshape(-1)
        sector = 2 * math.pi / _SECTORS
        first = (sector * torch.arange(_SECTORS, device=end.device, dtype=end.dtype)).expand(*start.shape, -1)
        start = torch.stack([start.unsqueeze(-1).expand_as(first), first], -1)
        width = torch.stack([width.unsqueeze(-1).expand_as(first), torch.full_like(first, sector)], -1)
        return start.reshape(-1, 2), width.reshape(-1, 2), rows.unsqueeze(-1).expand_as(first).reshape(-1)

    def _features(self) -> tuple[Tensor, ...]:
        """Places where the function changes, y (B, n) and angles, their widths, and whether they are in the support."""
        assert self.resolve is not None
        loc, root = self.loc.detach().double(), self.root.detach().double()
        places, widths = (v.detach().double() for v in self.resolve)
        d = (places - loc.unsqueeze(-2)).unsqueeze(-1)
        u = torch.linalg.solve_triangular(root.unsqueeze(-3), d, upper=False).squeeze(-1)
        u = u.reshape(-1, *u.shape[-2:])
        width = widths / torch.linalg.matrix_norm(root, 2).reshape(-1, 1)
        unit, c = (v.expand(self.batch).reshape(-1, 1) for v in (self.unit, self.c))
        half = 0.5 * u.square().sum(-1)
        inside = c * half < 1
        square = -log_shape(torch.where(inside, half, 0.0), c)
        y = square.sqrt() / unit
        # The radius grows with y by at most so much.
        near = width / (2 * unit * torch.exp(-c * square)).clamp_min(1e-300)
        if self.dim == 1:
            return y * u[..., 0].sign(), near, inside
        around = width / (2 * half).sqrt().clamp_min(1e-300)
        return y, near, inside, torch.atan2(u[..., 1], u[..., 0]), around

    def _coarse(self) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """Which panels contain a place where the function changes, and are too wide to resolve it."""
        if self.resolve is None:
            return None
        y, near, inside, *turned = self._features()

        def coarse(start: Tensor, size: Tensor, rows: Tensor) -> Tensor:
            held = (y[rows] - start[:, :1] - 0.5 * size[:, :1]).abs() <= 0.5 * size[:, :1] + near[rows]
            wide = size[:, :1] > 4 * near[rows]
            if turned:
                angle, around = turned[0][rows], turned[1][rows]
                away = (angle - start[:, 1:] - 0.5 * size[:, 1:] + math.pi) % (2 * math.pi) - math.pi
                held &= away.abs() <= 0.5 * size[:, 1:] + around
                wide |= size[:, 1:] > 4 * around
            return (held & wide & inside[rows]).any(-1)

        return coarse


def _places(rows: Tensor, count: int) -> Tensor:
    """How many entries of the same row come before each entry."""
    order = rows.argsort(stable=True)
    counts = torch.bincount(rows, minlength=count)
    first = counts.cumsum(0) - counts
    place = torch.empty_like(rows)
    place[order] = torch.arange(len(rows), device=rows.device) - first[rows[order]]
    return place


def decline(x: Tensor) -> Tensor:
    """(1 − exp(−x))/x, 1 at 0."""
    small = x.abs() < 1e-8
    y = torch.where(small, 1.0, x)
    return torch.where(small, 1 - 0.5 * x, -torch.expm1(-y) / y)


def _goals(like: Tensor) -> tuple[float, float, float]:
    return _GOALS.get(like.dtype, _GOALS[torch.float32])
