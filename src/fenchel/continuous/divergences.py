"""How far β-Gaussians are from each other: Wasserstein, Kullback and Leibler, and generalized covariances."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, register_kl

from fenchel.continuous.density import BetaGaussian, broadcast_shapes
from fenchel.continuous.radial import double_exponential


def generalized_covariance(
    density: BetaGaussian,
    phi: Callable[[Tensor], Tensor],
    psi: Callable[[Tensor], Tensor],
    beta: float | None = None,
    nodes: int = 64,
    angles: int = 64,
) -> Tensor:
    r"""The β-covariance of two statistics, by quadrature for D = 1 and 2.

    .. math:: \Bigl(\int p^\beta\Bigr) \bigl(\mathbb{E}[\phi \psi^\top] - \mathbb{E}[\phi]\, \mathbb{E}[\psi]^\top\bigr)

    with expectations under the escort distribution p^β/∫p^β. With β = 2 − α (if None) and φ the statistics of a score
    θᵀφ(t) it is the Jacobian of E_p[ψ] in θ.

    Args:
        density: p.
        phi: takes points (N, …, D), returns (N, …, M).
        psi: takes points (N, …, D), returns (N, …, n).
        beta: 2 − α if None.
        nodes: how many radii the quadrature has.
        angles: how many directions, for D = 2.

    Returns:
        (…, M, n).

    References: Martins et al. (2020), equation 17 and Proposition 3.
    """
    beta = 2.0 - density.alpha if beta is None else beta
    escort = density.escort(beta)

    def average(function: Callable[[Tensor], Tensor]) -> Tensor:
        return escort.integrate(function, nodes, angles)

    first, second = average(phi), average(psi)
    # Centred before they are multiplied: narrow densities far from zero would lose everything.
    joint = average(lambda t: (phi(t) - first).unsqueeze(-1) * (psi(t) - second).unsqueeze(-2))
    return density.log_power(beta).exp()[..., None, None] * joint


def wasserstein2(p: BetaGaussian, q: BetaGaussian, squared: bool = False) -> Tensor:
    r"""The 2-Wasserstein distance of two β-Gaussians of one α, in closed form.

    .. math:: W_2^2 = \|\mu_p - \mu_q\|^2
              + \operatorname{tr}\bigl(C_p + C_q - 2 (C_p^{1/2} C_q C_p^{1/2})^{1/2}\bigr)

    C are the densities' own covariances: between members of one elliptical family the best transport is linear.

    Args:
        p: a density with a finite covariance.
        q: another, of the same alpha.
        squared: return W₂², which is differentiable where p = q too.

    References: Gelbrich (1990).
    """
    if p.alpha != q.alpha:
        raise ValueError(f"q must have p's alpha, {p.alpha:g}: there is no closed form otherwise; got {q.alpha:g}")
    if not math.isfinite(p._law.spread):
        raise ValueError(
            f"alpha must leave the densities a covariance, got {p.alpha:g} in {p.event_shape[0]} dimensions"
        )
    roots = [math.sqrt(d._law.spread) * d._scaled_root for d in (p, q)]
    shapes = roots[0].square().sum((-2, -1)) + roots[1].square().sum((-2, -1)) - 2 * _nuclear(roots[0].mT @ roots[1])
    value = (p.loc - q.loc).square().sum(-1) + shapes + (shapes.clamp_min(0) - shapes).detach()
    return value if squared else value.sqrt()


def _nuclear(m: Tensor) -> Tensor:
    """The sum of the singular values of matrices with positive determinant."""
    if m.shape[-1] == 1:
        return m[..., 0, 0]
    if m.shape[-1] == 2:  # (s₁ + s₂)² = ‖M‖² + 2 det M: smooth where singular values are equal
        det = m[..., 0, 0] * m[..., 1, 1] - m[..., 0, 1] * m[..., 1, 0]
        return (m.square().sum((-2, -1)) + 2 * det).sqrt()
    total: Tensor = torch.linalg.svdvals(m).sum(-1)
    return total


# -- divergences -----------------------------------------------------------------------------------------------------


@register_kl(BetaGaussian, BetaGaussian)  # type: ignore[no-untyped-call, untyped-decorator]
def _kl_beta_gaussian(p: BetaGaussian, q: BetaGaussian) -> Tensor:
    return _kl(p, q)


def _kl(p: BetaGaussian, q: BetaGaussian) -> Tensor:
    r"""KL(p ‖ q): closed for a Gaussian q, quadrature else; +inf where p has mass outside of q's support."""
    if p.event_shape != q.event_shape:
        raise ValueError(f"p and q must have one dimension, got {p.event_shape[0]} and {q.event_shape[0]}")
    if q.alpha == 1:
        return q.loss(p) if p.alpha == 1 else q.cross_entropy(p) - p.entropy()
    if q._law.is_compact:
        return _nested_kl(p, q)
    if p.event_shape[0] > 2:
        raise NotImplementedError("KL to a density with heavy tails is computed in one and two dimensions only")
    return -p.entropy() - p.integrate(q.log_prob, nodes=200)


def _nested_kl(p: BetaGaussian, q: BetaGaussian) -> Tensor:
    batch = broadcast_shapes(p.batch_shape, q.batch_shape)
    if not p._law.is_compact:
        return torch.full(batch, math.inf, dtype=p.loc.dtype, device=p.loc.device)
    if p.event_shape[0] > 1:
        raise NotImplementedError("KL to a density with compact support is computed in one dimension only")
    # In units of q's half width: p's interval is b + a[−1, 1], inside of [−1, 1] or not.
    width = q.support_radius * q.scale_tril[..., 0, 0]
    a = p.support_radius * p.scale_tril[..., 0, 0] / width
    b = (p.loc - q.loc)[..., 0] / width
    x, rest, weights = (torch.as_tensor(v, dtype=a.dtype, device=a.device) for v in double_exponential(121))
    k = 1 / p._law.c
    weights = weights * (x * rest) ** k
    weights = weights / weights.sum()
    a, b = a.unsqueeze(-1), b.unsqueeze(-1)
    # 1 ± (b + a y) with y = 1 − 2·rest = 2x − 1, written from the ends of both intervals so that nothing cancels there.
    above, below = 1 - b - a, 1 + b - a
    slack = -8 * torch.finfo(a.dtype).eps
    nested = ((above >= slack) & (below >= slack)).squeeze(-1)
    terms = (above.clamp_min(0) + 2 * a * rest).log() + (below.clamp_min(0) + 2 * a * x).log()
    expected = q.log_peak + (weights * terms).sum(-1) / q._law.c
    return torch.where(nested, -p.entropy() - expected, math.inf)


@register_kl(BetaGaussian, MultivariateNormal)  # type: ignore[no-untyped-call, untyped-decorator]
def _kl_to_normal(p: BetaGaussian, q: MultivariateNormal) -> Tensor:
    return _kl(p, BetaGaussian(q.loc, scale_tril=q.scale_tril, alpha=1.0, validate_args=False))


@register_kl(MultivariateNormal, BetaGaussian)  # type: ignore[no-untyped-call, untyped-decorator]
def _kl_from_normal(p: MultivariateNormal, q: BetaGaussian) -> Tensor:
    return _kl(BetaGaussian(p.loc, scale_tril=p.scale_tril, alpha=1.0, validate_args=False), q)
