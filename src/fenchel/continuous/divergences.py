"""How far β-Gaussians are from each other: Wasserstein, Kullback and Leibler, and generalized covariances."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, register_kl

from fenchel.continuous.density import BetaGaussian, broadcast_shapes
from fenchel.continuous.radial import double_exponential

_ANGLES = 256  # of rays in the plane, for KL between compact densities


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
    value = (p.loc - q.loc).square().sum(-1) + _turned_distance(*roots)
    return value if squared else value.sqrt()


def _turned_distance(a: Tensor, b: Tensor) -> Tensor:
    """min ‖A − B R‖² over rotations R, for triangular roots with a positive diagonal: tr(AAᵀ + BBᵀ) − 2‖BᵀA‖₊."""
    if a.shape[-1] == 1:
        return (a - b).square().sum((-2, -1))
    k = b.mT @ a
    if a.shape[-1] == 2:
        cos, sin = k[..., 0, 0] + k[..., 1, 1], k[..., 1, 0] - k[..., 0, 1]
        turn = torch.stack([cos, -sin, sin, cos], -1) / torch.hypot(cos, sin).unsqueeze(-1)
        return (a - b @ turn.reshape(k.shape)).square().sum((-2, -1))
    value: Tensor = a.square().sum((-2, -1)) + b.square().sum((-2, -1)) - 2 * torch.linalg.svdvals(k).sum(-1)
    with torch.no_grad():  # the same without cancellation; its derivatives would lack those of R
        left, _, right = torch.linalg.svd(k)
        exact: Tensor = (a - b @ (left @ right)).square().sum((-2, -1))
    return value + (exact - value).detach()


# -- divergences -----------------------------------------------------------------------------------------------------


@register_kl(BetaGaussian, BetaGaussian)  # type: ignore[no-untyped-call, untyped-decorator]
def _kl_beta_gaussian(p: BetaGaussian, q: BetaGaussian) -> Tensor:
    return _kl(p, q)


def _kl(p: BetaGaussian, q: BetaGaussian) -> Tensor:
    r"""KL(p ‖ q): closed for a Gaussian q, quadrature else; +inf where p has mass outside of q's support."""
    if p.event_shape != q.event_shape:
        raise ValueError(f"p and q must have one dimension, got {p.event_shape[0]} and {q.event_shape[0]}")
    if q.alpha == 1 and not math.isfinite(p._law.spread):
        return -q.expected_score(p)  # infinite
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
    dim = p.event_shape[0]
    if dim > 2:
        raise NotImplementedError("KL to a density with compact support is computed in one and two dimensions only")
    # Where q's support is the unit ball, p's is b + B u, ‖u‖ ≤ 1, and q ∝ (1 − ‖b + B u‖²)^(1/c).
    root = (q.scale_tril * q.support_radius[..., None, None]).expand(*batch, dim, dim)
    shape = (p.scale_tril * p.support_radius[..., None, None]).expand(*batch, dim, dim)
    shape = torch.linalg.solve_triangular(root, shape, upper=False)
    middle = torch.linalg.solve_triangular(root, (p.loc - q.loc).expand(*batch, dim).unsqueeze(-1), upper=False).mT
    ways = _directions(middle.detach(), shape.detach())
    rays = ways[..., : 2 if dim == 1 else _ANGLES, :] @ shape.mT  # (…, rays, D)
    gap = 1 - (middle + ways @ shape.mT).square().sum(-1)
    nested = gap.amin(-1) >= -8 * torch.finfo(gap.dtype).eps
    gap = gap[..., : rays.shape[-2]].clamp_min(0)
    # 1 − ‖b + r w‖² from what is left at the surface, so that nothing cancels there.
    x, rest, weights = (torch.as_tensor(v, dtype=gap.dtype, device=gap.device) for v in double_exponential(121))
    weights = weights * (rest * (1 + x)) ** (1 / p._law.c) * x ** (dim - 1)
    slope, square = 2 * (middle * rays).sum(-1, keepdim=True), rays.square().sum(-1, keepdim=True)
    inside = gap.unsqueeze(-1) + rest * (slope + (1 + x) * square)
    terms = torch.where(nested[..., None, None], inside, 1.0).log().mean(-2)
    expected = q.log_peak + (weights / weights.sum() * terms).sum(-1) / q._law.c
    return torch.where(nested, -p.entropy() - expected, math.inf)


def _directions(middle: Tensor, shape: Tensor) -> Tensor:
    """Directions (…, N, D): all around, evenly; in the plane then those in which ‖b + B e‖ is largest, by Newton."""
    if middle.shape[-1] == 1:
        return middle.new_tensor([[-1.0], [1.0]]).expand(*middle.shape[:-2], -1, -1)
    angle = torch.arange(_ANGLES, dtype=middle.dtype, device=middle.device) * (2 * math.pi / _ANGLES)
    even = torch.stack([angle.cos(), angle.sin()], -1).expand(*middle.shape[:-2], -1, -1)
    angle = angle.expand(even.shape[:-1])
    for _ in range(6):
        e = torch.stack([angle.cos(), angle.sin()], -1)
        w, turned = e @ shape.mT, torch.stack([-e[..., 1], e[..., 0]], -1) @ shape.mT
        first = ((middle + w) * turned).sum(-1)
        second = turned.square().sum(-1) - ((middle + w) * w).sum(-1)
        angle = angle - torch.where(second < 0, first / second, 0.0).clamp(-0.1, 0.1)
    return torch.cat([even, torch.stack([angle.cos(), angle.sin()], -1)], -2)


@register_kl(BetaGaussian, MultivariateNormal)  # type: ignore[no-untyped-call, untyped-decorator]
def _kl_to_normal(p: BetaGaussian, q: MultivariateNormal) -> Tensor:
    return _kl(p, BetaGaussian(q.loc, scale_tril=q.scale_tril, alpha=1.0, validate_args=False))


@register_kl(MultivariateNormal, BetaGaussian)  # type: ignore[no-untyped-call, untyped-decorator]
def _kl_from_normal(p: MultivariateNormal, q: BetaGaussian) -> Tensor:
    return _kl(BetaGaussian(p.loc, scale_tril=p.scale_tril, alpha=1.0, validate_args=False), q)
