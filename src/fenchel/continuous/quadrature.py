"""Expectations of any function under β-Gaussians and their powers, on the line and in the plane.

The variable of integration is z, where z² is the peak of the log-density minus its value: ½‖u‖² = (1 − exp(−c z²))/c,
or z² for c = 0. As a function of z the integrand is smooth for every α, falls like a Gaussian, and has no end at the
edge of the support. A Gauss-Legendre rule is compared with another of half the nodes; where they differ, panels are
halved until the sum of the parts is stable.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fenchel._checks import check_callable, check_count, check_kind
from fenchel._quadrature import gauss_legendre, ranks, refined
from fenchel._torch import concrete
from fenchel.continuous.radial import Number, log_shape

Function = Callable[[Tensor], Tensor]

_FIRST = 45.0  # nats below the peak at which the first two rules end
_FAR = 30.0  # nats below the peak beyond which the first rules must find nothing
_LAST = 700.0  # nats below the peak at which panels end
_BREAKS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.5, 7.0, 12.0, math.inf)  # ends of the first panels, in standard deviations of z
_SECTORS = 8
_MAX_PANELS = 2000
_CHUNK = 2**16  # points per call of the function
_TOLERANCES = {torch.float64: (1e-9, 1e-10, 1e-6), torch.float32: (1e-5, 1e-5, 1e-3)}
"""Relative tolerances: of the first two rules, of a panel and its parts, and of the result (else a warning)."""


@dataclass(frozen=True)
class Weight:
    """The function (1 − ½ c ‖u‖²)₊^(β/c) and its integral; numbers, or tensors with one number per batch entry.

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
        weight: the density of u, up to a constant factor.
        nodes: the number of radii of the first rule.
        angles: the number of directions, for D = 2.
        resolve: places (n, D) where the function is known to change, and the widths (n,) of these changes.
    """
    if loc.shape[-1] > 2:
        raise NotImplementedError(f"integrals are computed in one and two dimensions, got {loc.shape[-1]}")
    check_callable(function, "function", "a function of points")
    nodes, angles = check_count(nodes, "nodes", 2), check_count(angles, "angles", 2)
    return _Integral(function, loc, root, weight, resolve).value(nodes, angles)


class _Integral:
    """One call of ``integrate``."""

    def __init__(
        self, function: Function, loc: Tensor, root: Tensor, weight: Weight, resolve: tuple[Tensor, Tensor] | None
    ) -> None:
        self.function, self.loc, self.root, self.resolve = function, loc, root, resolve
        self.dim, self.batch = loc.shape[-1], loc.shape[:-1]
        numbers = (weight.c, weight.beta, weight.log_integral)
        c, beta, self.log_integral = (torch.as_tensor(v, dtype=torch.float64, device=loc.device) for v in numbers)
        self.c, self.rate = c, beta + c
        # The scale of z on which the weight falls; for c < 0 the radius grows without bound.
        self.unit = (beta + torch.maximum(c, 0.5 * self.dim * c)).rsqrt()
        largest = 0.5 * math.log(torch.finfo(loc.dtype).max) - 4  # points must not overflow, nor must their squares
        self.limit = torch.where(c < 0, (2 * largest / c.abs()).sqrt() / self.unit, math.inf)

    def value(self, nodes: int, angles: int) -> Tensor:
        fine, size, far = self._fixed(nodes, angles)
        coarse, _, _ = self._fixed(max(nodes // 2, 1), max(angles // 2, 1))
        if not concrete(fine, coarse, self.loc, self.root):
            return fine
        tolerance, _, _ = _tolerances(fine)
        good = ((fine - coarse).abs() <= tolerance * size) & (far <= tolerance * size) & (size > 0) | ~size.isfinite()
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
        """Points u (N, …, D) and weights (N, …) at z = y · unit; in the plane y ≥ 0 and there is an angle."""
        z = y * self.unit
        square = z.square()
        ratio = expm1_ratio(self.c * square)
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
        points = self.loc + (self.root @ u.unsqueeze(-1)).squeeze(-1)
        values = self.function(points)
        check_kind(values, "function", Tensor, what="a function that returns a tensor")
        if values.shape[: points.dim() - 1] != points.shape[:-1]:
            raise ValueError(
                f"function must return (N, …) and any further dimensions for points (N, …, D), got "
                f"{tuple(values.shape)} for points {tuple(points.shape)}"
            )
        return values if values.is_floating_point() else values.to(self.loc.dtype)

    def _fixed(self, nodes: int, angles: int) -> tuple[Tensor, Tensor, Tensor]:
        """Three integrals by one rule: of the function, of its absolute value, and of the latter far from the peak."""
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
        """The integrals of the wanted batch entries by adaptive panels; the others are zero."""
        count, extra = len(wanted), like.shape[len(self.batch) :]
        end = self.limit.expand(self.batch).reshape(-1).clamp_max(math.sqrt(_LAST))
        _, tolerance, accepted = _tolerances(like)

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
        rule = refined(integrand, start, width, rows, count, points, tolerance, _MAX_PANELS, self._coarse())
        terms = integrand(rule.nodes, rule.rows) * rule.weights.unsqueeze(-1).to(like.dtype)
        total = torch.zeros(count, terms.shape[-1], dtype=terms.dtype, device=terms.device)
        size = total.index_add(0, rule.rows, terms.detach().abs())
        error = rule.error + self._beyond(integrand, wanted, end)
        if bool((error > accepted * size).any()):
            worst = (error / size).nan_to_num(0.0).max().item()
            warnings.warn(
                f"integrate: the estimated error is {worst:.1g} of the integral of the absolute values, more than "
                f"{accepted:g}. The function has jumps, or many narrow features, or tails as heavy as the density's",
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
        """Lower corners, sizes and rows of the first panels of the wanted batch entries."""
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
        """Places y (B, n) where the function changes, widths, whether they are in the support; then angles."""
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
        # The denominator bounds the derivative of the radius in y.
        near = width / (2 * unit * torch.exp(-c * square)).clamp_min(1e-300)
        if self.dim == 1:
            return y * u[..., 0].sign(), near, inside
        around = width / (2 * half).sqrt().clamp_min(1e-300)
        return y, near, inside, torch.atan2(u[..., 1], u[..., 0]), around

    def _coarse(self) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """A function that returns which panels contain a change of the integrand and are too wide to resolve it."""
        if self.resolve is None:
            return None
        y, near, inside, *angular = self._features()

        def coarse(start: Tensor, size: Tensor, rows: Tensor) -> Tensor:
            contains = (y[rows] - start[:, :1] - 0.5 * size[:, :1]).abs() <= 0.5 * size[:, :1] + near[rows]
            wide = size[:, :1] > 4 * near[rows]
            if angular:
                angle, around = angular[0][rows], angular[1][rows]
                away = (angle - start[:, 1:] - 0.5 * size[:, 1:] + math.pi) % (2 * math.pi) - math.pi
                contains &= away.abs() <= 0.5 * size[:, 1:] + around
                wide |= size[:, 1:] > 4 * around
            return (contains & wide & inside[rows]).any(-1)

        return coarse


def _places(rows: Tensor, count: int) -> Tensor:
    """The number of entries of the same row before each entry, of the shape of ``rows``."""
    order = rows.argsort(stable=True)
    return torch.empty_like(rows).index_put((order,), ranks(rows[order], count)[0])


def expm1_ratio(x: Tensor) -> Tensor:
    """(1 − exp(−x))/x, 1 at 0."""
    small = x.abs() < 1e-8
    y = torch.where(small, 1.0, x)
    return torch.where(small, 1 - 0.5 * x, -torch.expm1(-y) / y)


def _tolerances(like: Tensor) -> tuple[float, float, float]:
    """The tolerances for the dtype of a tensor."""
    return _TOLERANCES.get(like.dtype, _TOLERANCES[torch.float32])
