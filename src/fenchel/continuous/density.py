"""β-Gaussians: the densities that α-entmax assigns to a quadratic score, in any dimension."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints
from torch.distributions.utils import lazy_property

from fenchel._checks import check_broadcast, check_entries, check_floats, check_number, check_one_given
from fenchel._torch import concrete
from fenchel.continuous.deformed import log_of
from fenchel.continuous.ellipsoid import EllipsoidPower, Inside
from fenchel.continuous.incomplete import standard_cdf, standard_icdf
from fenchel.continuous.matrices import (
    broadcast_shapes,
    check_positive_definite,
    check_shapes,
    check_value,
    check_values,
    half_logdet,
    in_one_precision,
    mahalanobis,
    matrix_root,
)
from fenchel.continuous.quadrature import Function, Weight, integrate
from fenchel.continuous.radial import (
    Law,
    Number,
    Radial,
    Radials,
    any_entry,
    by_value,
    check_alpha,
    log_shape,
    over,
    radial_factors,
)


class BetaGaussian(Distribution):
    r"""The density (…) over ℝᴰ that maximizes the expectation of a quadratic score minus Tsallis's Ω.

    .. math:: \operatorname{argmax}_p \; \mathbb{E}_p[f(t)] - \Omega_\alpha(p), \qquad
              f(t) = -\tfrac12 (t-\mu)^\top \Sigma^{-1} (t-\mu)

    It is :math:`[(\alpha-1)(f(t) - \tau)]_+^{1/(\alpha-1)}`, with the τ for which it integrates to 1. For α > 1 the
    support is an ellipsoid; α = 4/3 is the triweight, 3/2 the biweight and 2 the truncated parabola (Epanechnikov's
    kernel) or paraboloid. α = 1 is the Gaussian. For 1 − 2/D < α < 1 it is Student's density, with heavy tails; on the
    line α = 0 is Cauchy's.

    Args:
        loc: μ, (…, D).
        scale_tril: a lower triangular root of Σ, (…, D, D), with a positive diagonal; either this or ``sigma``.
        sigma: Σ, the matrix of the score, (…, D, D). The covariance of the density is ``covariance_matrix``.
        alpha: a number greater than 1 − 2/D, or a tensor (…) with one such number per batch entry.
        validate_args: whether to check the values of loc and Σ.

    Both loc and Σ are converted to the wider of their dtypes, float32 at least.

    The α of a batch may lie on both sides of 1. There is no gradient in ``alpha``: a tensor that requires one is
    refused. ``escort`` raises a ValueError if 2 − α is positive for some entries of a batch and not for others.

    Points outside of the support have ``log_prob`` −inf. ``rsample`` has gradients in ``loc`` and Σ.

    Example:
        >>> import torch
        >>> from fenchel.continuous import BetaGaussian
        >>> p = BetaGaussian(torch.zeros(1), sigma=torch.tensor([[2 / 3]]), alpha=2.0)  # Epanechnikov's kernel
        >>> p.support_radius * p.scale_tril.squeeze()
        tensor(1.)
        >>> p.log_prob(torch.tensor([[0.0], [0.5], [1.5]])).exp()
        tensor([0.7500, 0.5625, 0.0000])

    References: Martins et al. (2020), section 2.4 and appendix E; Martins et al. (2022).
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {
        "loc": constraints.real_vector,
        "scale_tril": constraints.lower_cholesky,
        "sigma": constraints.positive_definite,
    }
    has_rsample = True

    def __init__(
        self,
        loc: Tensor,
        scale_tril: Tensor | None = None,
        sigma: Tensor | None = None,
        alpha: float | Tensor = 2.0,
        validate_args: bool | None = None,
    ) -> None:
        check_one_given(scale_tril=scale_tril, sigma=sigma)
        name, matrix = ("sigma", sigma) if scale_tril is None else ("scale_tril", scale_tril)
        assert matrix is not None
        check_shapes(loc, matrix, name)
        self.alpha = check_alpha(alpha, loc.shape[-1])
        loc, matrix = in_one_precision(loc, matrix)
        # Not torch's default for all distributions: the first torch.compile of a process turns that off.
        if validate_args is not False and concrete(loc, matrix):
            check_values(loc, matrix, name)
        alphas = self.alpha.shape if isinstance(self.alpha, Tensor) else torch.Size()
        shapes = loc.shape[:-1], matrix.shape[:-2], alphas
        batch = check_broadcast(f"the batch dimensions of loc (…, D), {name} (…, D, D) and alpha (…)", *shapes)
        if isinstance(self.alpha, Tensor):
            self.alpha = self.alpha.to(loc.device).expand(batch)
        self.loc = loc.expand(*batch, -1)
        root = matrix_root(matrix) if scale_tril is None else matrix
        self.scale_tril = root.expand(*batch, -1, -1)
        if sigma is not None:
            self.sigma = matrix.expand(*batch, -1, -1)
        super().__init__(batch, loc.shape[-1:], validate_args=False)

    @classmethod
    def from_canonical(cls, theta1: Tensor, theta2: Tensor, alpha: float | Tensor = 2.0) -> BetaGaussian:
        r"""The β-Gaussian with the score :math:`f_\theta(t) = \theta_1^\top t + t^\top \theta_2 t`.

        Args:
            theta1: Σ⁻¹μ, (…, D).
            theta2: −½Σ⁻¹, (…, D, D), symmetric and negative definite.
            alpha: as in the constructor.

        Example:
            >>> import torch
            >>> from fenchel.continuous import BetaGaussian
            >>> p = BetaGaussian.from_canonical(torch.tensor([50.0]), torch.tensor([[-50.0]]), alpha=1.0)
            >>> p.loc, p.sigma
            (tensor([0.5000]), tensor([[0.0100]]))

        References: Martins et al. (2020), section 2.3.
        """
        check_shapes(theta1, theta2, "theta2")
        theta1, theta2 = in_one_precision(theta1, theta2)
        if concrete(theta2):
            check_positive_definite(-theta2, "-theta2")
        root = torch.linalg.cholesky_ex(-(theta2 + theta2.mT)).L  # of Σ⁻¹
        loc = torch.cholesky_solve(theta1.unsqueeze(-1), root).squeeze(-1)
        return cls(loc, sigma=torch.cholesky_inverse(root), alpha=alpha)

    @classmethod
    def from_moments(cls, mean: Tensor, covariance: Tensor, alpha: float | Tensor = 2.0) -> BetaGaussian:
        """The β-Gaussian with a given mean (…, D) and covariance (…, D, D).

        Example:
            >>> import torch
            >>> from fenchel.continuous import BetaGaussian
            >>> BetaGaussian.from_moments(torch.zeros(1), torch.tensor([[0.04]]), alpha=1.5).variance
            tensor([0.0400])
        """
        check_shapes(mean, covariance, "covariance")
        mean, covariance = in_one_precision(mean, covariance)
        alpha = check_alpha(alpha, mean.shape[-1])
        law = law_of(alpha, mean)
        check_covariance(law, "a covariance")
        if concrete(covariance):
            check_values(mean, covariance, "covariance")
        # Cov = spread p₀ᶜ Σ, and p₀ depends on det Σ: the determinant first, then the matrix.
        root = matrix_root(covariance)
        rest = 1 + law.c * law.half_dim
        log_spread = law.each(lambda one: math.log(one.spread))
        logdet = rest * (half_logdet(root) - law.half_dim * log_spread) + law.half_dim * law.c * law.log_constant
        scale = torch.exp(-0.5 * (law.c * law.log_peak(logdet) + log_spread))
        return cls(mean, scale_tril=root * scale[..., None, None], alpha=alpha)

    def expand(self, batch_shape: Any, _instance: Any = None) -> BetaGaussian:
        new: BetaGaussian = self._get_checked_instance(BetaGaussian, _instance)  # type: ignore[no-untyped-call]
        shape = torch.Size(batch_shape)
        new.alpha = self.alpha.expand(shape) if isinstance(self.alpha, Tensor) else self.alpha
        new.loc = self.loc.expand(shape + self.event_shape)
        new.scale_tril = self.scale_tril.expand(shape + 2 * self.event_shape)
        if "sigma" in self.__dict__:
            new.sigma = self.sigma.expand(shape + 2 * self.event_shape)
        Distribution.__init__(new, shape, self.event_shape, validate_args=False)
        return new

    def __repr__(self) -> str:
        alpha = f"alpha: {tuple(self.alpha.shape)}" if isinstance(self.alpha, Tensor) else f"alpha={self.alpha:g}"
        return f"BetaGaussian({alpha}, loc: {tuple(self.loc.shape)}, sigma: {tuple(self.scale_tril.shape)})"

    # -- shape -------------------------------------------------------------------------------------------------------

    @lazy_property
    def _law(self) -> Law:
        return law_of(self.alpha, self.loc)

    @lazy_property
    def sigma(self) -> Tensor:
        """The matrix Σ of the score, (…, D, D)."""
        return self.scale_tril @ self.scale_tril.mT

    @property
    def log_peak(self) -> Tensor:
        """The logarithm of the density at ``loc``."""
        return self._law.log_peak(half_logdet(self.scale_tril))

    @property
    def _scaled_root(self) -> Tensor:
        """√p₀ᶜ L, the matrix that maps samples of u/√p₀ᶜ to samples of t − μ, (…, D, D)."""
        return _matrices(torch.exp(0.5 * self._law.c * self.log_peak)) * self.scale_tril

    @property
    def support_radius(self) -> Tensor:
        """R: the support is where (t−μ)ᵀ Σ⁻¹ (t−μ) < R²; inf for α ≤ 1."""
        law = self._law
        root = law.each(lambda one: math.sqrt(2 / one.c) if one.is_compact else math.inf)
        return root * torch.exp(0.5 * law.c * self.log_peak)

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def support(self) -> constraints.Constraint:
        return Inside(self) if any_entry(self._law.is_compact) else constraints.real_vector

    # -- density -----------------------------------------------------------------------------------------------------

    def log_prob(self, value: Tensor) -> Tensor:
        value = check_value(self, value)
        c, peak = self._law.c, self.log_peak
        y = 0.5 * mahalanobis(self.scale_tril, value - self.loc) * torch.exp(-c * peak)
        return peak + log_shape(y, c)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        law = self._law
        normal = torch.randn(self._extended_shape(sample_shape), dtype=self.loc.dtype, device=self.loc.device)
        u = normal * radial_factors(normal, law.c, law.half_dim)
        return self.loc + (self._scaled_root @ u.unsqueeze(-1)).squeeze(-1)

    def cdf(self, value: Tensor) -> Tensor:
        """The probability (…) of the interval up to value (…, 1), for D = 1."""
        self._check_line("cdf")
        x = (check_value(self, value) - self.loc).squeeze(-1) / self._unit
        return standard_cdf(x, self._law)

    def icdf(self, value: Tensor) -> Tensor:
        """The quantiles (…, 1) of probabilities (…), for D = 1."""
        self._check_line("icdf")
        check_floats(value, "value")
        check_entries((value >= 0) & (value <= 1), value, "value", "hold probabilities in [0, 1]")
        value = value.expand(broadcast_shapes(value.shape, self.batch_shape))
        return self.loc + (self._unit * standard_icdf(value, self._law)).unsqueeze(-1)

    @property
    def _unit(self) -> Tensor:
        """√p₀ᶜ L for D = 1, (…)."""
        return self._scaled_root[..., 0, 0]

    def _check_line(self, name: str) -> None:
        if self.event_shape[0] != 1:
            raise NotImplementedError(f"{name} exists for D = 1 only, got D = {self.event_shape[0]}")

    # -- moments and entropies ---------------------------------------------------------------------------------------

    @property
    def mean(self) -> Tensor:
        shift = self._law.each(lambda one: 0.0 if one.has_mean else math.nan)
        return self.loc if not isinstance(shift, Tensor) and shift == 0 else self.loc + over(shift, 1)

    @property
    def mode(self) -> Tensor:
        return self.loc

    @property
    def log_partition(self) -> Tensor:
        r"""A_α(θ), (…), with which the density is :math:`\exp_{2-\alpha}(\theta_1^\top t + t^\top \theta_2 t - A)`.

        θ₁ = Σ⁻¹μ and θ₂ = −½Σ⁻¹. Its gradient in θ is the mean of (t, t tᵀ) under the escort distribution.
        """
        height = 0.5 * mahalanobis(self.scale_tril, self.loc)
        return height - log_of(self.log_peak, self._law.c)

    @property
    def _spread(self) -> Number:
        """The covariance divided by p₀ᶜ Σ; NaN where there is no mean."""
        return self._law.each(lambda one: one.spread if one.has_mean else math.nan)

    @property
    def covariance_matrix(self) -> Tensor:
        """The covariance of the density, a multiple of Σ; inf if it diverges, NaN if there is no mean either."""
        root = self._scaled_root
        spread = _matrices(torch.as_tensor(self._spread, dtype=root.dtype, device=root.device))
        finite = torch.where(spread.isfinite(), spread, 0.0) * (root @ root.mT)
        return torch.where(spread.isfinite(), finite, spread)

    @property
    def variance(self) -> Tensor:
        return over(self._spread, 1) * self._scaled_root.square().sum(-1)

    def entropy(self) -> Tensor:
        """The differential (Shannon) entropy, in nats."""
        return self._law.mean_log_drop - self.log_peak

    def tsallis_entropy(self, index: float | None = None) -> Tensor:
        r"""−Ω of the density, :math:`(1 - \int p^q) / (q(q-1))`, q = ``index`` > 0, by default α; Shannon's for 1."""
        law = self._law
        if index is not None:
            check_number(index, "index", 0)
        if index is None and any_entry(law.c <= -1):
            raise ValueError("index must be greater than 0: pass one, as alpha is not")
        slope = law.each(lambda one: one.c if index is None else index - 1)
        power = slope * self.log_peak + law.each(lambda one: one.log_power(one.alpha if index is None else index))
        scale = (1 + slope) * slope
        if not isinstance(scale, Tensor):
            return self.entropy() if scale == 0 else -torch.expm1(power) / scale
        return torch.where(scale == 0, self.entropy(), -torch.expm1(power) / torch.where(scale == 0, 1.0, scale))

    def log_power(self, index: float) -> Tensor:
        """log ∫ p(t)^q dt, q = ``index``: +inf where the integral diverges."""
        return self._log_power(index)

    def _log_power(self, index: float | None) -> Tensor:
        """``log_power``, with q = 2 − α if the index is None."""
        law = self._law
        slope = law.each(lambda one: _escort(one, index) - 1)
        return slope * self.log_peak + law.each(lambda one: one.log_power(_escort(one, index)))

    def escort(self, beta: float | None = None) -> BetaGaussian | EllipsoidPower:
        r"""The escort distribution :math:`p^\beta / \int p^\beta`, with β = 2 − α if none is given.

        It has the same support. For β > 0 it is a β-Gaussian with 1 + (α−1)/β in place of α; for β = 0 it is uniform.

        Example:
            >>> import torch
            >>> from fenchel.continuous import BetaGaussian
            >>> p = BetaGaussian(torch.zeros(1), sigma=torch.tensor([[2 / 3]]), alpha=2.0)  # support [−1, 1]
            >>> p.escort().log_prob(torch.tensor([[0.5]])).exp()  # uniform
            tensor([0.5000])
        """
        law = self._law
        self._check_escort(beta)
        power = law.each(lambda one: _escort(one, beta))
        positive = torch.as_tensor(power, device=self.loc.device) > 0
        if bool(positive.all()):
            # [1 + c f/p₀ᶜ]^(β/c) is a β-Gaussian with c/β in place of c, and Σ scaled so that the support is the same.
            c = law.c / power
            scale = torch.exp(0.5 * c * self._log_power(beta)) * law.each(lambda one: _escort(one, beta) ** -0.5)
            alpha = law.each(lambda one: 1 + one.c / _escort(one, beta))
            root = self.scale_tril * _matrices(scale)
            return BetaGaussian(self.loc, scale_tril=root, alpha=alpha, validate_args=False)
        if bool(positive.any()):
            raise ValueError("beta must be greater than 0 for all entries of the batch, or for none")
        ratio = law.each(lambda one: _escort(one, beta) / one.c)
        if isinstance(ratio, Tensor):
            if bool((ratio != ratio.flatten()[0]).any()):
                raise ValueError("beta must be greater than 0 where entries differ in alpha")
            ratio = ratio.flatten()[0].item()
        return EllipsoidPower(self.loc, self.scale_tril * _matrices(self.support_radius), ratio)

    def _check_escort(self, beta: float | None) -> None:
        for law in self._law.laws:
            power = _escort(law, beta)
            if not math.isfinite(law.log_power(power)):
                raise ValueError(f"beta must give p^beta a finite integral, for alpha = {law.alpha:g}; got {power}")

    def integrate(self, function: Callable[[Tensor], Tensor], *, nodes: int = 64, angles: int = 64) -> Tensor:
        """E_p[function(t)]: in closed form for a ``GaussianBasis``, by quadrature for any function in D = 1 and 2.

        A rule is compared with another of half its nodes. Where they differ by more than 1e-9 (single precision: 1e-5)
        of E_p[|function|], the domain is divided until the sum of the parts is stable. A warning is given where the
        estimated error is above 1e-6 (1e-3). Features narrower than a thousandth of the density can be overlooked.
        The result is differentiable in the parameters of the density and of the function.

        Args:
            function: takes points (N, …, D) and returns (N, …) and any further dimensions.
            nodes: the number of radii of the first rule.
            angles: the number of directions, for D = 2.

        Example:
            >>> import torch
            >>> from fenchel.continuous import BetaGaussian
            >>> p = BetaGaussian(torch.zeros(1), sigma=torch.tensor([[2 / 3]]), alpha=2.0)
            >>> p.integrate(lambda t: t.square().squeeze(-1)), p.variance
            (tensor(0.2000), tensor([0.2000]))
        """
        from fenchel.continuous.integrals import expected_basis

        closed = expected_basis(self, function)
        return self._average(function, 1.0, nodes, angles) if closed is None else closed

    def _average(self, function: Function, beta: float | None, nodes: int, angles: int, *narrow: Any) -> Tensor:
        """The expectation under the escort distribution of β, by default 2 − α, by quadrature."""
        law = self._law
        weight = Weight(
            law.c,
            law.each(lambda one: _escort(one, beta)),
            law.each(lambda one: one.log_constant + one.log_power(_escort(one, beta))),
        )
        return integrate(function, self.loc, self._scaled_root, weight, nodes, angles, *narrow)

    def expectation(self, basis: nn.Module) -> Tensor:
        """E_p[ψ_j(t)], (…, n), of a ``Basis`` or of a module that returns (…, n) at points (…, D); as ``integrate``."""
        return self.integrate(basis)

    # -- losses ------------------------------------------------------------------------------------------------------

    def score(self, value: Tensor) -> Tensor:
        """The score f(t) = −½ (t−μ)ᵀ Σ⁻¹ (t−μ), (…), of points (…, D)."""
        return -0.5 * mahalanobis(self.scale_tril, check_value(self, value) - self.loc)

    def expected_score(self, target: Distribution) -> Tensor:
        """E[f(t)] under another density, from its mean and covariance; −inf if it has no covariance."""
        if isinstance(target, BetaGaussian):
            spread, root, middle = target._law.spread, target._scaled_root, target.loc
        else:
            spread, root, middle = 1.0, matrix_root(target.covariance_matrix), target.mean  # type: ignore[attr-defined]
        relative = torch.linalg.solve_triangular(self.scale_tril, root, upper=False)
        spread = torch.as_tensor(spread, dtype=root.dtype, device=root.device)
        finite = torch.where(spread < math.inf, spread, 0.0)
        value = self.score(middle) - 0.5 * finite * relative.square().sum((-2, -1))
        return torch.where(spread < math.inf, value, -math.inf)

    def conjugate(self) -> Tensor:
        r"""Ω*(f): the value of the maximum that this density attains, :math:`\mathbb{E}_p[f] - \Omega_\alpha(p)`."""
        law = self._law
        check_covariance(law, "a finite maximum")
        expected = -0.5 * law.spread * law.dim * torch.exp(law.c * self.log_peak)
        return expected + self.tsallis_entropy()

    def cross_entropy(self, target: Distribution) -> Tensor:
        r"""The part of the loss that depends on this density, :math:`\Omega_\alpha^*(f) - \mathbb{E}_q[f]`.

        For α = 1 that is −E_q[log p].

        Args:
            target: q, with a ``mean`` and a ``covariance_matrix``.
        """
        return self.conjugate() - self.expected_score(target)

    def loss(self, target: BetaGaussian) -> Tensor:
        r"""The Fenchel-Young loss of the score f against another density q.

        .. math:: L_\Omega(f, q) = \Omega_\alpha^*(f) + \Omega_\alpha(q) - \mathbb{E}_q[f]

        It is ≥ 0, and zero exactly if q is this density. If the support of this density contains that of q, it is the
        Bregman divergence of Ω from this density to q; otherwise it is larger, and still finite. For α = 1 it is
        KL(q ‖ p). It is infinite if q has no covariance.

        Args:
            target: q, a β-Gaussian of any α.

        Example:
            >>> import torch
            >>> from fenchel.continuous import BetaGaussian
            >>> p = BetaGaussian(torch.zeros(1), sigma=torch.eye(1))
            >>> p.loss(BetaGaussian(torch.tensor([[0.0], [1.0]]), sigma=torch.eye(1)))
            tensor([0.0000, 0.5000])
        """
        if isinstance(self.alpha, Tensor) or isinstance(target.alpha, Tensor):
            return per_pair_of_alphas(self, target, BetaGaussian.loss)
        if not target._law.spread < math.inf:
            return self.cross_entropy(target)  # infinite: there is no E_q[f]
        value = self.cross_entropy(target) - target.tsallis_entropy(self.alpha)
        # Clamped, because rounding can make the sum negative; the gradient is that of the sum.
        return value + (value.clamp_min(0) - value).detach()


# -- helpers ---------------------------------------------------------------------------------------------------------


def law_of(alpha: float | Tensor, loc: Tensor) -> Law:
    """The distribution of the radius for an α, or for one per batch entry, in the dimension and dtype of ``loc``."""
    dim = loc.shape[-1]
    return Radials(alpha, dim, loc.dtype) if isinstance(alpha, Tensor) else Radial(alpha, dim)


def per_pair_of_alphas(
    p: BetaGaussian, q: BetaGaussian, function: Callable[[BetaGaussian, BetaGaussian], Tensor]
) -> Tensor:
    """A function of two densities whose α differ between batch entries, (…): one call per different pair of α."""
    batch = broadcast_shapes(p.batch_shape, q.batch_shape)
    flat = [_flattened(d, batch) for d in (p, q)]
    alphas = torch.stack(
        [torch.as_tensor(d.alpha, dtype=torch.float64, device=d.loc.device).expand(batch) for d in (p, q)], -1
    )

    def of_rows(rows: Tensor, pair: list[float]) -> Tensor:
        return function(*(_selected(*d, rows, a) for d, a in zip(flat, pair, strict=True)))

    found = by_value(alphas.reshape(-1, 2), of_rows)
    return p.loc.new_zeros(batch) if found is None else found.reshape(batch)


def _flattened(density: BetaGaussian, batch: torch.Size) -> tuple[Tensor, Tensor]:
    new = density.expand(batch)
    return new.loc.reshape(-1, new.loc.shape[-1]), new.scale_tril.reshape(-1, *new.scale_tril.shape[-2:])


def _selected(loc: Tensor, root: Tensor, rows: Tensor, alpha: float) -> BetaGaussian:
    return BetaGaussian(loc[rows], scale_tril=root[rows], alpha=alpha, validate_args=False)


def _escort(law: Radial, beta: float | None) -> float:
    """The power β of the escort distribution, by default 2 − α."""
    return 1 - law.c if beta is None else float(beta)


def check_covariance(law: Law, what: str) -> None:
    """Raise a ValueError unless the densities have a covariance."""
    for one in law.laws:
        if not math.isfinite(one.spread):
            lower = 1 - 2 / (one.dim + 2)
            raise ValueError(
                f"alpha must be greater than {lower:g} in {one.dim} dimensions for {what}, got {one.alpha:g}"
            )


def _matrices(x: Tensor) -> Tensor:
    """One number per batch entry as (…, 1, 1), to be multiplied with matrices."""
    return x[..., None, None]
