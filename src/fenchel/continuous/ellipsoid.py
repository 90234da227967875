"""Densities on an ellipsoid: powers of one minus the squared relative distance from its centre."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from fenchel._checks import check_broadcast, check_number
from fenchel._torch import standard_gamma
from fenchel.continuous.matrices import (
    check_shapes,
    check_value,
    half_logdet,
    in_one_precision,
    mahalanobis,
)
from fenchel.continuous.quadrature import Weight, integrate
from fenchel.continuous.radial import log_ball


class EllipsoidPower(Distribution):
    r"""A density :math:`\propto (1 - \|A^{-1}(t - \mu)\|^2)^k` on an ellipsoid; uniform for k = 0.

    Args:
        loc: the centre, (…, D).
        axes: A, (…, D, D), lower triangular: it maps the unit ball to the ellipsoid.
        power: k > −1; below 0 the density grows without bound towards the surface.

    Example:
        >>> import torch
        >>> from fenchel.continuous import EllipsoidPower
        >>> p = EllipsoidPower(torch.zeros(1), 2 * torch.eye(1))  # uniform on [−2, 2]
        >>> p.log_prob(torch.tensor([[0.0], [1.9], [2.1]])).exp()
        tensor([0.2500, 0.2500, 0.0000])
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {
        "loc": constraints.real_vector,
        "axes": constraints.lower_cholesky,
    }
    has_rsample = True

    def __init__(self, loc: Tensor, axes: Tensor, power: float = 0.0) -> None:
        check_shapes(loc, axes, "axes")
        self.power = check_number(power, "power", -1)
        loc, axes = in_one_precision(loc, axes)
        batch = check_broadcast(
            "the batch dimensions of loc (…, D) and axes (…, D, D)", loc.shape[:-1], axes.shape[:-2]
        )
        self.loc, self.axes = loc.expand(*batch, -1), axes.expand(*batch, -1, -1)
        super().__init__(batch, loc.shape[-1:], validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> EllipsoidPower:
        new: EllipsoidPower = self._get_checked_instance(EllipsoidPower, _instance)  # type: ignore[no-untyped-call]
        shape = torch.Size(batch_shape)
        new.loc, new.axes = self.loc.expand(shape + self.event_shape), self.axes.expand(shape + 2 * self.event_shape)
        new.power = self.power
        Distribution.__init__(new, shape, self.event_shape, validate_args=False)
        return new

    @property
    def _half_dim(self) -> float:
        return self.event_shape[0] / 2

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def support(self) -> constraints.Constraint:
        return Inside(self)

    @property
    def log_peak(self) -> Tensor:
        """The logarithm of the density at ``loc``."""
        return -log_ball(self.power, self._half_dim) - half_logdet(self.axes)

    def log_prob(self, value: Tensor) -> Tensor:
        square = mahalanobis(self.axes, check_value(self, value) - self.loc)
        inside = ~(square >= 1)
        shape = 0.0 if self.power == 0 else self.power * torch.log1p(-torch.where(inside, square, 0.0))
        return torch.where(inside, self.log_peak + shape, -math.inf)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        z = torch.randn(self._extended_shape(sample_shape), dtype=self.loc.dtype, device=self.loc.device)
        rest = 2 * standard_gamma(torch.full_like(z[..., :1], self.power + 1))
        u = z / (z.square().sum(-1, keepdim=True) + rest).sqrt()
        return self.loc + (self.axes @ u.unsqueeze(-1)).squeeze(-1)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def covariance_matrix(self) -> Tensor:
        """The covariance, (…, D, D)."""
        return self.axes @ self.axes.mT / (2 * (self.power + 1 + self._half_dim))

    @property
    def variance(self) -> Tensor:
        return self.axes.square().sum(-1) / (2 * (self.power + 1 + self._half_dim))

    def integrate(self, function: Callable[[Tensor], Tensor], *, nodes: int = 64, angles: int = 64) -> Tensor:
        """E_p[function(t)], as ``BetaGaussian.integrate``."""
        from fenchel.continuous.integrals import expected_basis

        closed = expected_basis(self, function)
        if closed is not None:
            return closed
        weight = Weight(2.0, 2 * self.power, log_ball(self.power, self._half_dim))
        return integrate(function, self.loc, self.axes, weight, nodes, angles)


class Inside(constraints.Constraint):
    """The constraint of points (…, D) at which a density is positive."""

    event_dim = 1

    def __init__(self, density: Distribution) -> None:
        self.density = density
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        return self.density.log_prob(value) > -math.inf
