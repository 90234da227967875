"""Densities on the line that maximize a score minus Gini's Ω: triangular, and of any convex function g."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints
from torch.distributions.utils import broadcast_all

from fenchel._checks import check_broadcast, check_callable, check_entries, check_kind, check_positive, check_real
from fenchel.continuous.basis import as_line_basis
from fenchel.continuous.incomplete import inverse
from fenchel.continuous.pieces import Pieces, expected
from fenchel.continuous.radial import double_exponential


class _LineDensity(Distribution):
    """Base class of location-scale families on the line; samples are quantiles of uniform numbers."""

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {
        "loc": constraints.real,
        "scale": constraints.positive,
    }
    has_rsample = True
    loc: Tensor
    scale: Tensor

    def __init__(self, loc: Tensor | float, scale: Tensor | float) -> None:
        loc, scale = check_real(loc, "loc"), check_positive(scale, "scale")
        check_broadcast("loc and scale", *(value.shape for value in (loc, scale) if isinstance(value, Tensor)))
        self.loc, self.scale = broadcast_all(loc, scale)
        super().__init__(self.loc.shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        shape = torch.Size(batch_shape)
        return self._moved(self.loc.expand(shape), self.scale.expand(shape), _instance)

    def _moved(self, loc: Tensor, scale: Tensor, instance: Any = None) -> Any:
        """The density with other locations and scales, of one shape."""
        new: Any = self._get_checked_instance(type(self), instance)  # type: ignore[no-untyped-call]
        new.__dict__.update(self.__dict__, loc=loc, scale=scale)
        Distribution.__init__(new, loc.shape, validate_args=False)
        return new

    def __repr__(self) -> str:
        return f"{type(self).__name__}(loc: {tuple(self.loc.shape)}, scale: {tuple(self.scale.shape)})"

    @property
    def support_radius(self) -> Tensor:
        """Half the length of the support."""
        raise NotImplementedError

    @constraints.dependent_property(is_discrete=False, event_dim=0)
    def support(self) -> constraints.Constraint:
        ends = self.loc - self.support_radius, self.loc + self.support_radius
        return constraints.interval(*ends)  # type: ignore[no-untyped-call]

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def mode(self) -> Tensor:
        return self.loc

    def expectation(self, basis: nn.Module) -> Tensor:
        """E_p[ψ_j(t)], (…, n), of a ``Basis`` of one dimension, or a module that returns (…, n) at points (…, 1).

        By quadrature, in double precision; for a ``GaussianBasis`` no panel is longer than two standard deviations of
        the narrowest function. Differentiable in ``loc``, ``scale`` and the basis.

        Example:
            >>> import torch
            >>> from fenchel.continuous import GaussianBasis, Triangular
            >>> Triangular(0.5, 0.04).expectation(GaussianBasis.line(3, widths=(0.5,)))
            tensor([0.4839, 0.7874, 0.4839])
        """
        functions = as_line_basis(basis)
        loc, radius = (x.double().reshape(-1) for x in (self.loc, self.support_radius))
        ends = torch.stack([loc - radius, loc, loc + radius], -1)
        rows = torch.arange(len(loc), device=loc.device).repeat_interleave(2)
        pieces = Pieces(ends[:, :2].reshape(-1), ends[:, 1:].reshape(-1), rows, len(loc))
        flat = self.loc.double().reshape(-1), self.scale.double().reshape(-1)

        def log_prob(t: Tensor, rows: Tensor) -> Tensor:
            moved: Tensor = self._moved(*(x[rows] for x in flat)).log_prob(t)
            return moved

        found = expected(functions, pieces, log_prob, 1e-11)
        return found.reshape(*self.batch_shape, len(functions)).to(self.loc.dtype)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        shape = self._extended_shape(sample_shape)
        return self.icdf(torch.rand(shape, dtype=self.loc.dtype, device=self.loc.device))


class Triangular(_LineDensity):
    r"""The triangular density, which maximizes the expected score −|t − μ|/b minus Gini's Ω.

    With Shannon's Ω it would be the Laplace density.

    .. math:: \operatorname{argmax}_p \; -\mathbb{E}_p|t - \mu| / b - \Omega_2(p)
              \;=\; \bigl[b^{-1/2} - |t - \mu| / b\bigr]_+

    Args:
        loc: μ, of any shape.
        scale: b > 0, which broadcasts with it; the support has half width √b.

    Example:
        >>> import torch
        >>> from fenchel.continuous import Triangular
        >>> p = Triangular(torch.tensor(0.0), torch.tensor(4.0))
        >>> p.log_prob(torch.tensor([0.0, 1.0, 3.0])).exp()
        tensor([0.5000, 0.2500, 0.0000])

    References: Martins et al. (2020), equation 12.
    """

    @property
    def support_radius(self) -> Tensor:
        return self.scale.sqrt()

    def log_prob(self, value: Tensor) -> Tensor:
        x = (value - self.loc).abs() / self.support_radius
        inside = ~(x >= 1)
        return torch.where(inside, torch.log1p(-torch.where(inside, x, 0.0)) - 0.5 * self.scale.log(), -math.inf)

    def cdf(self, value: Tensor) -> Tensor:
        x = ((value - self.loc) / self.support_radius).clamp(-1, 1)
        return torch.where(x < 0, 0.5 * (1 + x).square(), 1 - 0.5 * (1 - x).square())

    def icdf(self, value: Tensor) -> Tensor:
        check_entries((value >= 0) & (value <= 1), value, "value", "hold probabilities in [0, 1]")
        low = value < 0.5
        # The branch that is not selected is computed at ½, where the slope of its root is finite.
        left, right = torch.where(low, value, 0.5), torch.where(low, 0.5, value)
        x = torch.where(low, (2 * left).sqrt() - 1, 1 - (2 * (1 - right)).sqrt())
        return self.loc + self.support_radius * x

    @property
    def variance(self) -> Tensor:
        return self.scale / 6

    def entropy(self) -> Tensor:
        """The differential (Shannon) entropy, in nats."""
        return 0.5 + 0.5 * self.scale.log()

    def tsallis_entropy(self) -> Tensor:
        """−Ω₂ of the density, (1 − ∫p²)/2."""
        return 0.5 - self.scale.rsqrt() / 3


class LocationScale(_LineDensity):
    r"""The density that sparsemax assigns to the score :math:`-g'(|t - \mu|/\sigma)/\sigma`, g convex.

    .. math:: p(t) = \tfrac1\sigma \bigl[g'(a) - g'(|t - \mu|/\sigma)\bigr]_+, \qquad a g'(a) - g(a) + g(0) = \tfrac12

    g = s³/6 is the truncated parabola, s²/2 the triangular density. The half width a is found by bisection.

    Args:
        loc: μ, of any shape.
        scale: σ > 0, which broadcasts with it.
        g: convex and differentiable on [0, ∞), an elementwise function of torch operations. Tensors that it depends on
            must not require gradients.

    Example:
        >>> import torch
        >>> from fenchel.continuous import LocationScale
        >>> p = LocationScale(torch.tensor(0.0), torch.tensor(2.0), lambda s: s.square() / 2)
        >>> p.support_radius
        tensor(2.)
        >>> p.log_prob(torch.tensor([0.0, 1.0, 3.0])).exp()
        tensor([0.5000, 0.2500, 0.0000])

    References: Martins et al. (2020), equation 13 and appendix E.4.
    """

    def __init__(self, loc: Tensor | float, scale: Tensor | float, g: Callable[[Tensor], Tensor]) -> None:
        super().__init__(loc, scale)
        check_callable(g, "g", "a function of points")
        self.g = g
        value = g(torch.ones(1, dtype=torch.float64, device="cpu"))
        check_kind(value, "g", Tensor, what="an elementwise function that returns a tensor")
        if value.requires_grad:
            raise ValueError(
                "g must not depend on tensors that require gradients: the half width is not differentiable"
            )
        self.half_width = self._solve()
        self._top = float(self._slope(torch.tensor([self.half_width], dtype=torch.float64, device="cpu")))

    @property
    def support_radius(self) -> Tensor:
        return self.half_width * self.scale

    def log_prob(self, value: Tensor) -> Tensor:
        x = (value - self.loc).abs() / self.scale
        inside = ~(x >= self.half_width)
        height = self._top - self._slope(torch.where(inside, x, 0.0))
        return torch.where(inside & ~(height <= 0), height.clamp_min(0).log() - self.scale.log(), -math.inf)

    def cdf(self, value: Tensor) -> Tensor:
        return self._standard_cdf((value - self.loc) / self.scale)

    def icdf(self, value: Tensor) -> Tensor:
        check_entries((value >= 0) & (value <= 1), value, "value", "hold probabilities in [0, 1]")
        x = inverse(value, self._quantile, lambda x: self._top - self._slope(torch.where(x < 0, -x, x)))
        return self.loc + self.scale * x

    @property
    def variance(self) -> Tensor:
        return self.scale.square() * self._moment(lambda s, height: s.square() * height)

    def entropy(self) -> Tensor:
        """The differential (Shannon) entropy, in nats, by quadrature."""
        return self.scale.log() - self._moment(lambda s, height: torch.xlogy(height, height))

    def tsallis_entropy(self) -> Tensor:
        """−Ω₂ of the density, (1 − ∫p²)/2; by quadrature."""
        return 0.5 - 0.5 * self._moment(lambda s, height: height.square()) / self.scale

    def _slope(self, s: Tensor) -> Tensor:
        """g'(s), differentiable if s is."""
        with torch.enable_grad():
            leaf = s if s.requires_grad else s.detach().requires_grad_()
            value = self.g(leaf)
            if value.shape != leaf.shape:
                raise ValueError(
                    f"g must be an elementwise function: got shape {tuple(value.shape)} for {tuple(leaf.shape)}"
                )
            (slope,) = torch.autograd.grad(value.sum(), leaf, create_graph=s.requires_grad)
        return slope

    def _excess(self, s: Tensor) -> Tensor:
        """s g'(s) − g(s) + g(0), increasing from 0."""
        return s * self._slope(s) - self.g(s) + self.g(torch.zeros_like(s))

    def _solve(self) -> float:
        high = torch.ones(1, dtype=torch.float64, device="cpu")
        while not float(self._excess(high)) >= 0.5:
            high = 2 * high
            if not float(high) < 1e100:
                raise ValueError(
                    "g must be convex, with s g'(s) − g(s) + g(0) = ½ for some s: strong convexity is enough"
                )
        low = torch.zeros_like(high)
        while True:
            middle = 0.5 * (low + high)
            if bool((middle <= low) | (middle >= high)):
                return float(high)
            if float(self._excess(middle)) < 0.5:
                low = middle
            else:
                high = middle

    def _standard_cdf(self, x: Tensor) -> Tensor:
        y = torch.where(x < 0, -x, x).clamp_max(self.half_width)  # with a slope at 0, unlike abs
        mass = y * self._top - self.g(y) + self.g(torch.zeros_like(y))
        return torch.where(x < 0, 0.5 - mass, 0.5 + mass)

    def _quantile(self, q: Tensor) -> Tensor:
        x = q.double()
        low, high = torch.full_like(x, -self.half_width), torch.full_like(x, self.half_width)
        for _ in range(60):
            middle = 0.5 * (low + high)
            below = self._standard_cdf(middle) < x
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (0.5 * (low + high)).to(q.dtype)

    def _moment(self, function: Callable[[Tensor, Tensor], Tensor]) -> float:
        """2 ∫₀ᵃ function(s, p(s)) ds of the standard density."""
        x, _, w = (torch.as_tensor(v, device="cpu") for v in double_exponential(121))
        s = self.half_width * x
        height = (self._top - self._slope(s)).clamp_min(0)
        return float(2 * self.half_width * (w * function(s, height)).sum())
