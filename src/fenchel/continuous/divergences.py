"""Wasserstein distance and Kullback-Leibler divergence between β-Gaussians, and generalized covariances."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, register_kl

from fenchel._checks import check_callable, check_kind, check_number
from fenchel.continuous.basis import GaussianBasis, ValueFunction
from fenchel.continuous.density import BetaGaussian, check_covariance, per_pair_of_alphas
from fenchel.continuous.matrices import broadcast_shapes
from fenchel.continuous.quadrature import expm1_ratio
from fenchel.continuous.radial import double_exponential, log_shape, over

_ANGLES = 256  # the number of rays in the plane, for KL between compact densities
_NODES = {1: 401, 2: 141}  # nodes on each side of a cut, by dimension, for KL to densities with heavy tails
_LAST = 40.0  # nats below the peak at which that rule ends


def generalized_covariance(
    density: BetaGaussian,
    phi: Callable[[Tensor], Tensor],
    psi: Callable[[Tensor], Tensor],
    *,
    beta: float | None = None,
    nodes: int = 64,
    angles: int = 64,
) -> Tensor:
    r"""The β-covariance (…, M, n) of two statistics under a density, by quadrature for D = 1 and 2.

    .. math:: \Bigl(\int p^\beta\Bigr) \bigl(\mathbb{E}[\phi \psi^\top] - \mathbb{E}[\phi]\, \mathbb{E}[\psi]^\top\bigr)

    with expectations under the escort distribution p^β/∫p^β. For β = 2 − α and a score θᵀφ(t) it is the Jacobian of
    E_p[ψ] in θ.

    Args:
        density: p.
        phi: takes points (N, …, D), returns (N, …, M).
        psi: takes points (N, …, D), returns (N, …, n).
        beta: 2 − α if None.
        nodes: the number of radii of the first rule.
        angles: the number of directions, for D = 2.

    Returns:
        (…, M, n).

    Example:
        For α = 1 it is the covariance:

        >>> import torch
        >>> from fenchel.continuous import BetaGaussian, generalized_covariance
        >>> p = BetaGaussian(torch.zeros(1), sigma=torch.tensor([[0.25]]), alpha=1.0)
        >>> generalized_covariance(p, lambda t: t, lambda t: t)
        tensor([[0.2500]])

    References: Martins et al. (2020), equation 17 and Proposition 3.
    """
    check_kind(density, "density", BetaGaussian)
    if beta is not None:
        check_number(beta, "beta")
    density._check_escort(beta)
    for name, statistic in (("phi", phi), ("psi", psi)):
        check_callable(statistic, name, "a function of points")
        value = statistic(density.loc[None])
        check_kind(value, name, Tensor, what="a function that returns a tensor")
        if value.shape[:-1] != (1, *density.batch_shape):
            raise ValueError(
                f"{name} must return (N, …, n) for points (N, …, D), got {tuple(value.shape)} for points "
                f"{(1, *density.loc.shape)}"
            )
    narrow = _features(phi, psi)

    def average(function: Callable[[Tensor], Tensor]) -> Tensor:
        return density._average(function, beta, nodes, angles, narrow)

    first, second = average(phi), average(psi)

    def joint(t: Tensor) -> Tensor:
        # Statistics are centred before they are multiplied, because the difference of the moments of narrow densities
        # would cancel. They are integrated too, so that panels resolve what is narrow in the product.
        x, y = phi(t), psi(t)
        both = ((x - first).unsqueeze(-1) * (y - second).unsqueeze(-2)).flatten(-2)
        return torch.cat([both, x.to(both.dtype), y.to(both.dtype)], -1)

    size = first.shape[-1], second.shape[-1]
    found = average(joint)[..., : size[0] * size[1]]
    found = found.reshape(*found.shape[:-1], *size)
    return density._log_power(beta).exp()[..., None, None] * found


def _features(*functions: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:
    """Centres (n, D) and smallest widths (n,) of the Gaussians of basis functions; None for other functions."""
    bases = [f.basis if isinstance(f, ValueFunction) else f for f in functions]
    found = [
        (basis.centers, torch.linalg.eigvalsh(basis.covariances).amin(-1).sqrt())
        for basis in bases
        if isinstance(basis, GaussianBasis)
    ]
    return (torch.cat([c for c, _ in found]), torch.cat([w for _, w in found])) if found else None


def wasserstein2(p: BetaGaussian, q: BetaGaussian, *, squared: bool = False) -> Tensor:
    r"""The 2-Wasserstein distance of two β-Gaussians of one α, in closed form.

    .. math:: W_2^2 = \|\mu_p - \mu_q\|^2
              + \operatorname{tr}\bigl(C_p + C_q - 2 (C_p^{1/2} C_q C_p^{1/2})^{1/2}\bigr)

    C are the covariances of the densities. Within an elliptical family the optimal transport is linear.

    Args:
        p: a density with a finite covariance.
        q: another density, of the same alpha.
        squared: whether to return W₂², which is differentiable where p = q too.

    Example:
        >>> import torch
        >>> from fenchel.continuous import BetaGaussian, wasserstein2
        >>> p = BetaGaussian(torch.zeros(1), sigma=torch.eye(1))
        >>> wasserstein2(p, BetaGaussian(torch.tensor([2.0]), sigma=torch.eye(1)))
        tensor(2.)

    References: Gelbrich (1990).
    """
    for name, density in (("p", p), ("q", q)):
        check_kind(density, name, BetaGaussian)
    alphas = [torch.as_tensor(d.alpha, dtype=torch.float64, device=d.loc.device) for d in (p, q)]
    if bool((alphas[0] != alphas[1]).any()):
        raise ValueError(f"q must have p's alpha, {p.alpha}: there is no closed form otherwise; got {q.alpha}")
    check_covariance(p._law, "a covariance")
    roots = [over(d._law.each(lambda one: math.sqrt(one.spread)), 2) * d._scaled_root for d in (p, q)]
    value = (p.loc - q.loc).square().sum(-1) + _rotated_distance(*roots)
    return value if squared else value.sqrt()


def _rotated_distance(a: Tensor, b: Tensor) -> Tensor:
    """min ‖A − B R‖² over rotations R, for triangular roots with a positive diagonal: tr(AAᵀ + BBᵀ) − 2‖BᵀA‖₊."""
    if a.shape[-1] == 1:
        return (a - b).square().sum((-2, -1))
    k = b.mT @ a
    if a.shape[-1] == 2:
        cos, sin = k[..., 0, 0] + k[..., 1, 1], k[..., 1, 0] - k[..., 0, 1]
        turn = torch.stack([cos, -sin, sin, cos], -1) / torch.hypot(cos, sin).unsqueeze(-1)
        return (a - b @ turn.reshape(k.shape)).square().sum((-2, -1))
    value: Tensor = a.square().sum((-2, -1)) + b.square().sum((-2, -1)) - 2 * torch.linalg.svdvals(k).sum(-1)
    with torch.no_grad():  # the same value without cancellation; the derivatives are those of the formula above
        left, _, right = torch.linalg.svd(k)
        exact: Tensor = (a - b @ (left @ right)).square().sum((-2, -1))
    return value + (exact - value).detach()


# -- divergences -----------------------------------------------------------------------------------------------------


def _kl(p: BetaGaussian, q: BetaGaussian) -> Tensor:
    r"""KL(p ‖ q), (…): closed for a Gaussian q, else by quadrature; +inf if p has mass outside of q's support."""
    if p.event_shape != q.event_shape:
        raise ValueError(f"p and q must have one dimension, got {p.event_shape[0]} and {q.event_shape[0]}")
    if isinstance(p.alpha, Tensor) or isinstance(q.alpha, Tensor):
        return per_pair_of_alphas(p, q, _kl)
    if q.alpha == 1 and not p._law.spread < math.inf:
        return -q.expected_score(p)  # infinite
    if q.alpha == 1:
        return q.loss(p) if p.alpha == 1 else q.cross_entropy(p) - p.entropy()
    if q._law.is_compact:
        return _nested_kl(p, q)
    if p.event_shape[0] > 2:
        raise NotImplementedError("KL to a density with heavy tails is computed in one and two dimensions only")
    both = [BetaGaussian(d.loc.double(), d.scale_tril.double(), alpha=d.alpha, validate_args=False) for d in (p, q)]
    value = -both[0].entropy() - both[1].log_peak - _expected_shape(*both)
    return value.to(torch.promote_types(p.loc.dtype, q.loc.dtype))


def _expected_shape(p: BetaGaussian, q: BetaGaussian) -> Tensor:
    """E_p[log q − log q₀] for a q with heavy tails: the expectation of −log(1 + ‖A u − b‖²)/|c|, for q of any width.

    u has the standard law of p, which is isotropic, and is rotated so that the columns of A are orthogonal. In each
    entry of u the integrand is nearly singular where A u is near b. Intervals are cut there, and their rule has most of
    its nodes next to the cut.
    """
    c, dim = p._law.c, p.event_shape[0]
    assert isinstance(c, float)
    batch = broadcast_shapes(p.batch_shape, q.batch_shape)
    scale = torch.exp(-0.5 * q._law.c * q.log_peak) * math.sqrt(-0.5 * q._law.c)
    root = (q.scale_tril / scale[..., None, None]).expand(*batch, dim, dim)
    shape = torch.linalg.solve_triangular(root, p._scaled_root.expand(*batch, dim, dim), upper=False)
    middle = torch.linalg.solve_triangular(root, (q.loc - p.loc).expand(*batch, dim).unsqueeze(-1), upper=False)
    with torch.no_grad():
        turn = torch.linalg.svd(shape).Vh.mT
    shape, middle = (shape @ turn)[..., None, :, :], middle.mT  # (…, 1, D, D) and (…, 1, D)
    with torch.no_grad():
        nearest = (shape * middle.unsqueeze(-1)).sum(-2) / shape.square().sum(-2)  # (…, 1, D)
        u, weights = _rule_with_cut(nearest.squeeze(-2), c)
    square = ((shape @ u.unsqueeze(-1)).squeeze(-1) - middle).square().sum(-1)
    return (weights * torch.log1p(square)).sum(-1) / q._law.c


def _rule_with_cut(place: Tensor, c: float) -> tuple[Tensor, Tensor]:
    """Nodes u (…, N, D) and weights (…, N) of the standard law of c, with intervals cut at a place (…, D), D ≤ 2.

    With z as in ``fenchel.continuous.quadrature``, u₁ belongs to z₁, and u₂ is exp(−½ c z₁²) times what belongs to z₂.
    """
    dim = place.shape[-1]
    x, _, w = (torch.as_tensor(v, dtype=place.dtype, device=place.device) for v in double_exponential(_NODES[dim]))
    tail = 1 + max(c, 0.5 * dim * c)  # how fast the weight falls in z²
    end = math.sqrt(min(_LAST / tail, 600 / max(-c, 1e-300)))

    def along(place: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z, u and weights for a cut at u = place, with a new last dimension."""
        cut = (-log_shape(0.5 * place.square(), c)).sqrt().clamp_max(end) * place.sign()
        low, high = (cut + end).unsqueeze(-1), (end - cut).unsqueeze(-1)
        z = torch.cat([cut.unsqueeze(-1) - low * x, cut.unsqueeze(-1) + high * x], -1)
        ratio = expm1_ratio(c * z.square())
        slope = torch.exp(-(1 + c) * z.square()) * (2 / ratio).sqrt()
        return z, z * (2 * ratio).sqrt(), torch.cat([low * w, high * w], -1) * slope

    z, first, weights = along(place[..., 0])
    if dim == 1:
        return first.unsqueeze(-1), weights / weights.sum(-1, keepdim=True)
    shrunk = torch.exp(-0.5 * c * z.square())
    _, second, across = along(place[..., 1:] / shrunk)
    weights = (weights * shrunk).unsqueeze(-1) * across
    u = torch.stack([first.unsqueeze(-1).expand_as(second), second * shrunk.unsqueeze(-1)], -1)
    return u.flatten(-3, -2), (weights / weights.sum((-2, -1), keepdim=True)).flatten(-2)


def _nested_kl(p: BetaGaussian, q: BetaGaussian) -> Tensor:
    """KL(p ‖ q) for a q with compact support; finite only if the support of p lies inside."""
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
    # 1 − ‖b + r w‖² is computed from its value at the surface of p's support, without cancellation.
    x, rest, weights = (torch.as_tensor(v, dtype=gap.dtype, device=gap.device) for v in double_exponential(121))
    weights = weights * (rest * (1 + x)) ** (1 / p._law.c) * x ** (dim - 1)
    slope, square = 2 * (middle * rays).sum(-1, keepdim=True), rays.square().sum(-1, keepdim=True)
    inside = gap.unsqueeze(-1) + rest * (slope + (1 + x) * square)
    terms = torch.where(nested[..., None, None], inside, 1.0).log().mean(-2)
    expected = q.log_peak + (weights / weights.sum() * terms).sum(-1) / q._law.c
    return torch.where(nested, -p.entropy() - expected, math.inf)


def _directions(middle: Tensor, shape: Tensor) -> Tensor:
    """Directions e (…, N, D): evenly spaced; in the plane also those that maximize ‖b + B e‖, by Newton's method."""
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


register_kl(BetaGaussian, BetaGaussian)(_kl)  # type: ignore[no-untyped-call]


@register_kl(BetaGaussian, MultivariateNormal)  # type: ignore[no-untyped-call, untyped-decorator]
def _kl_to_normal(p: BetaGaussian, q: MultivariateNormal) -> Tensor:
    return _kl(p, BetaGaussian(q.loc, scale_tril=q.scale_tril, alpha=1.0, validate_args=False))


@register_kl(MultivariateNormal, BetaGaussian)  # type: ignore[no-untyped-call, untyped-decorator]
def _kl_from_normal(p: MultivariateNormal, q: BetaGaussian) -> Tensor:
    return _kl(BetaGaussian(p.loc, scale_tril=p.scale_tril, alpha=1.0, validate_args=False), q)
