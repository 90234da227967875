"""Expectations of Gaussian basis functions under β-Gaussians, which continuous attention needs.

For α ≤ 1 the density is a Gaussian or a mixture of Gaussians, and so is the expectation. For α > 1 the support is
mapped to the unit interval or the unit disc: E = C ∫ (1 − ‖u‖²)^k N(A u; d, Σ_j) du, k = 1/(α−1), with d = μ_j − μ and
the ellipse A Aᵀ of the support. All quantities are centred, so that no large moments are subtracted. On the line, and
along every chord of the disc, the integral has a closed form for small integers k. A quadrature rule sums over chords
along the long axis of the Gaussian; few are needed, however thin it is.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel._checks import check_broadcast, check_floats
from fenchel._quadrature import Array, gauss_legendre
from fenchel._torch import apply_function, concrete, tracks_forward
from fenchel.continuous.basis import Basis, GaussianBasis, ValueFunction
from fenchel.continuous.density import BetaGaussian
from fenchel.continuous.ellipsoid import EllipsoidPower
from fenchel.continuous.matrices import check_positive_definite
from fenchel.continuous.radial import (
    Radial,
    any_entry,
    by_value,
    check_alpha,
    check_one_alpha,
    double_exponential,
    log_ball,
    log_gamma_peak,
)
from fenchel.kernels import usable

CLOSED = 4
"""The largest power that is integrated in closed form; the moments of higher powers would cancel."""

_DEVIATIONS = 8.4  # standard deviations beyond which a Gaussian is negligible in double precision
_DEVIATIONS_SINGLE = 5.7  # the same in single precision
_WIDE_RULE = tuple(zip(*(v.tolist() for v in gauss_legendre(24)), strict=True))
_NODES = 48  # nodes of the Gauss-Legendre rule over that part of a Gaussian
_SMOOTH_RULE = tuple((x, 1 - x, w) for x, w in zip(*(v.tolist() for v in gauss_legendre(_NODES)), strict=True))
_CHORDS = [v.tolist() for v in gauss_legendre(_NODES)]
_MAX_RADIUS = 1 - 1e-12  # of the disc, in forward mode: derivatives are infinite at 1
_EDGE_RULE = tuple(zip(*(v.tolist() for v in double_exponential(161)), strict=True))
_NEGLIGIBLE = 40.0  # nats; exp(−40) is negligible


def expectation(loc: Tensor, sigma: Tensor, basis: GaussianBasis, alpha: float | Tensor = 2.0) -> Tensor:
    r"""Expectations (…, n) of basis functions under the density that maximizes a quadratic score minus Tsallis's Ω.

    .. math:: r_j = \mathbb{E}_p[\psi_j(t)], \qquad
              p = \operatorname{argmax}_p \; \mathbb{E}_p[f(t)] - \Omega_\alpha(p), \qquad
              f(t) = -\tfrac12 (t-\mu)^\top \Sigma^{-1} (t-\mu)

    In closed form on the line for α = 1, 2, 3/2, 4/3 and 5/4, and in any dimension for α = 1; by quadrature for other
    α > 1. In the plane the integral along every chord is closed for the same α, and a quadrature rule sums over the
    chords. Densities with heavy tails (α < 1) are mixtures of Gaussians, in any dimension. Computed in double precision
    for α ≠ 1; derivatives of every order in ``loc``, ``sigma`` and the basis. The Jacobian in the canonical parameters
    is the generalized covariance.

    Args:
        loc: μ, (…, D).
        sigma: Σ of the score, (…, D, D), positive definite.
        basis: n functions of D dimensions; D ≤ 2 for alpha > 1.
        alpha: a number greater than 1 − 2/D, or a tensor (…) with one per batch entry, without gradients.

    Returns:
        (…, n), in the dtype of ``loc``.

    Example:
        >>> import torch
        >>> from fenchel.continuous import GaussianBasis, expectation
        >>> basis = GaussianBasis.line(3, widths=(0.1,))
        >>> expectation(torch.tensor([0.5]), torch.tensor([[0.01]]), basis, alpha=2.0)
        tensor([0.0039, 2.5534, 0.0039])

    References: Martins et al. (2020), appendix G; Martins et al. (2022).
    """
    if isinstance(alpha, Tensor):
        return _per_alpha(loc, sigma, basis, alpha)
    law = _check(loc, sigma, basis, alpha)
    shape = check_broadcast("the batch dimensions of loc and sigma", loc.shape[:-1], sigma.shape[:-2])
    full = torch.promote_types(torch.promote_types(loc.dtype, sigma.dtype), torch.float32)
    if law.c != 0:
        full = torch.float64
    loc_, sigma_ = loc.to(full).expand(*shape, -1), sigma.to(full).expand(*shape, -1, -1)
    centers, covariances = basis.centers.to(full), basis.covariances.to(full)
    if law.c == 0:
        result = _gaussian(loc_, sigma_, centers, covariances)
    elif law.c < 0:
        result = _heavy(loc_, sigma_, centers, covariances, law)
    else:
        axes, power = _support(sigma_, law), _power(law)
        if _compiled(loc_, axes, centers, covariances, power):
            narrow = loc.dtype != torch.float64
            result = apply_function(_Compact, loc_, axes, centers, covariances, round(power), narrow)
        else:
            result = _compact(loc_, axes, centers, covariances, power)
    return result.to(loc.dtype)


def _check(loc: Tensor, sigma: Tensor, basis: GaussianBasis, alpha: float) -> Radial:
    if not isinstance(basis, GaussianBasis):
        raise TypeError(f"basis must be a GaussianBasis, got {type(basis).__name__}")
    dim = basis.dim
    check_floats(loc, "loc", "…", dim)
    check_floats(sigma, "sigma", "…", dim, dim)
    alpha = check_one_alpha(alpha, dim)
    if alpha > 1 and dim > 2:
        raise ValueError(f"alpha must be at most 1 in more than two dimensions, got {alpha} for {dim}")
    if concrete(sigma):
        _check_sigma(sigma)
    return Radial(alpha, dim)


def _check_sigma(sigma: Tensor) -> None:
    """Check that matrices are positive definite; NaN is allowed."""
    s = sigma.detach().double()  # the determinant of a thin matrix would cancel in single precision
    if s.shape[-1] == 1:
        good = ~(s <= 0)
    elif s.shape[-1] == 2:
        a, b, c = s[..., 0, 0], s[..., 1, 0], s[..., 1, 1]
        good = ~((a <= 0) | (a * c - b * b <= 0) | ((b - s[..., 0, 1]).abs() > 1e-4 * (a * c).abs().sqrt()))
    else:
        check_positive_definite(s, "sigma")
        return
    if not bool(good.all()):
        wrong = s[~good.flatten(-2).all(-1)] if s.shape[-1] == 1 else s[~good]
        raise ValueError(f"sigma must be symmetric and positive definite, got {wrong[0].tolist()}")


def _per_alpha(loc: Tensor, sigma: Tensor, basis: GaussianBasis, alpha: Tensor) -> Tensor:
    """``expectation`` for a tensor of α: one call per different value."""
    check_alpha(alpha, basis.dim)
    _check(loc, sigma, basis, 1.0)
    what = "the batch dimensions of loc and sigma, and alpha,"
    shape = check_broadcast(what, loc.shape[:-1], sigma.shape[:-2], alpha.shape)
    flat = loc.expand(*shape, -1).reshape(-1, basis.dim), sigma.expand(*shape, -1, -1).reshape(-1, basis.dim, basis.dim)
    each = alpha.to(loc.device).double().expand(shape).reshape(-1)
    found = by_value(each, lambda rows, value: expectation(flat[0][rows], flat[1][rows], basis, value))
    return loc.new_zeros(*shape, len(basis)) if found is None else found.reshape(*shape, len(basis))


def expected_functions(loc: Tensor, sigma: Tensor, basis: Basis, alpha: float) -> Tensor:
    """``expectation`` for any basis, (…, n): by quadrature unless the functions are Gaussian."""
    if isinstance(basis, GaussianBasis):
        return expectation(loc, sigma, basis, alpha)
    return BetaGaussian(loc, sigma=sigma, alpha=alpha).integrate(basis).to(loc.dtype)


def expected_basis(density: BetaGaussian | EllipsoidPower, function: Any) -> Tensor | None:
    """The expectation of a ``GaussianBasis`` or a ``ValueFunction``; None for other functions."""
    if isinstance(function, ValueFunction):
        if function.coefficients.dim() != 2:
            return None
        basis = expected_basis(density, function.basis)
        return None if basis is None else basis.to(function.coefficients.dtype) @ function.coefficients
    if not isinstance(function, GaussianBasis) or function.dim != density.loc.shape[-1]:
        return None
    loc = density.loc
    if isinstance(density, BetaGaussian):
        if function.dim > 2 and any_entry(density._law.is_compact):
            return None
        root = density.scale_tril.double()
        return expectation(loc, root @ root.mT, function, density.alpha)
    if function.dim > 2 or density.power < 0:
        return None
    axes, twin = density.axes.double(), function._in_double()
    return _compact(loc.double(), axes @ axes.mT, twin.centers, twin.covariances, density.power).to(loc.dtype)


# -- Gaussians and mixtures of them ----------------------------------------------------------------------------------


def _gaussian(loc: Tensor, sigma: Tensor, centers: Tensor, covariances: Tensor) -> Tensor:
    """N(μ; μ_j, Σ + Σ_j), (…, n)."""
    d = centers - loc.unsqueeze(-2)
    total = sigma.unsqueeze(-3) + covariances
    if loc.shape[-1] == 1:
        variance = total[..., 0, 0]
        return torch.exp(-0.5 * d.squeeze(-1).square() / variance) * (2 * math.pi * variance).rsqrt()
    if loc.shape[-1] == 2:
        a, b, c = total[..., 0, 0], 0.5 * (total[..., 0, 1] + total[..., 1, 0]), total[..., 1, 1]
        x, y = d[..., 0], d[..., 1]
        det = a * c - b * b
        return torch.exp(-0.5 * (c * x * x - 2 * b * x * y + a * y * y) / det) * det.rsqrt() / (2 * math.pi)
    root = torch.linalg.cholesky_ex(total).L
    square = torch.linalg.solve_triangular(root, d.unsqueeze(-1), upper=False).square().sum((-2, -1))
    log = -0.5 * square - root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    value: Tensor = torch.exp(log - 0.5 * loc.shape[-1] * math.log(2 * math.pi))
    return value


def _heavy(loc: Tensor, sigma: Tensor, centers: Tensor, covariances: Tensor, law: Radial) -> Tensor:
    """Expectations for α < 1: a Gaussian whose precision is a gamma variable, which is integrated out."""
    m = -1 / law.c
    spread = m * torch.exp(law.c * law.log_peak(_half_logdet(sigma)))[..., None, None] * sigma
    nodes, weights = (torch.as_tensor(v, device=loc.device) for v in _gamma_nodes(m - law.half_dim, law.half_dim))
    each = spread.unsqueeze(-3) / nodes[:, None, None]  # (…, nodes, D, D)
    parts = _gaussian(loc.unsqueeze(-2), each, centers, covariances)
    return (weights.unsqueeze(-1) * parts).sum(-2)


@lru_cache(maxsize=32)
def _gamma_nodes(shape: float, half: float) -> tuple[Any, Any]:
    """Nodes and weights for a gamma variable g and functions that fall like g^(D/2) towards 0: trapezoids in log g."""
    step = 0.28 / math.sqrt(1 + shape / 3)
    x = step * np.arange(-4000, 4001)  # log g/shape
    log = -shape * _excess(np.minimum(x, 100.0))
    falling = log + half * np.minimum(x, 0.0)
    kept = falling > falling.max() - 42
    return shape * np.exp(x[kept]), step * np.exp(log[kept] + log_gamma_peak(shape))


def _excess(x: Array) -> Array:
    """exp(x) − 1 − x, precise for small x."""
    series = x * x * np.polynomial.polynomial.polyval(x, [1 / math.factorial(i) for i in range(2, 16)])
    return np.where(np.abs(x) < 0.5, series, np.expm1(x) - x)


# -- compact support -------------------------------------------------------------------------------------------------


def _half_logdet(sigma: Tensor) -> Tensor:
    if sigma.shape[-1] == 1:
        return 0.5 * sigma[..., 0, 0].log()
    if sigma.shape[-1] == 2:
        off = 0.5 * (sigma[..., 0, 1] + sigma[..., 1, 0])
        return 0.5 * (sigma[..., 0, 0] * sigma[..., 1, 1] - off * off).log()
    value: Tensor = torch.linalg.cholesky_ex(sigma).L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return value


def _support(sigma: Tensor, law: Radial) -> Tensor:
    """R²Σ, the matrix of the ellipse of the support."""
    return 2 / law.c * torch.exp(law.c * law.log_peak(_half_logdet(sigma)))[..., None, None] * sigma


def _power(law: Radial) -> float:
    """k = 1/(α − 1), made an integer if it differs from one by rounding only."""
    power = 1 / law.c
    return float(round(power)) if abs(power - round(power)) < 1e-12 * power else power


def _compact(loc: Tensor, axes: Tensor, centers: Tensor, covariances: Tensor, power: float) -> Tensor:
    """Expectations for compact support in torch operations, for every device and derivatives of every order."""
    if loc.shape[-1] == 1:
        return _on_line(loc, axes, centers, covariances, power)
    return _on_plane(loc, axes, centers, covariances, power)


def _on_line(loc: Tensor, axes: Tensor, centers: Tensor, covariances: Tensor, power: float) -> Tensor:
    a = axes[..., 0, 0].sqrt().unsqueeze(-1)
    place, width = (centers[:, 0] - loc) / a, covariances[:, 0, 0].sqrt() / a
    return math.exp(-log_ball(power, 0.5)) / a * _chord(place, width, power)


def _on_plane(loc: Tensor, axes: Tensor, centers: Tensor, covariances: Tensor, power: float) -> Tensor:
    # A and L are the lower triangular roots of the ellipse and of a function's Σ. With N = L⁻¹A its precision is NᵀN.
    a11, a21, a22 = (v.unsqueeze(-1) for v in _root(axes))
    l11, l21, l22 = _root(covariances)
    n11, n22 = a11 / l11, a22 / l22
    n21 = (a21 - l21 * n11) / l22
    d = centers - loc.unsqueeze(-2)
    x = d[..., 0] / a11
    y = (d[..., 1] - a21 * x) / a22
    return (power + 1) / math.pi / (a11 * a22) * _chords(x, y, n11, n21, n22, power)


def _root(m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The lower triangular root of 2 × 2 matrices: 11, 21, 22."""
    first = m[..., 0, 0].sqrt()
    below = 0.5 * (m[..., 0, 1] + m[..., 1, 0]) / first
    return first, below, (m[..., 1, 1] - below * below).sqrt()


def _chords(x: Tensor, y: Tensor, n11: Tensor, n21: Tensor, n22: Tensor, power: float) -> Tensor:
    """∫ (1 − ‖u‖²)^k N(u; (x, y), (NᵀN)⁻¹) du over the disc, by chords along the Gaussian's long axis.

    A chord at s = sin φ has half length cos φ; along it the integral is that of the line. The number of nodes does not
    depend on the data, and is enough for arbitrarily thin Gaussians.
    """
    with torch.no_grad():
        turn = 0.5 * torch.atan2(2 * n21 * n22, n11 * n11 + n21 * n21 - n22 * n22)
        cos, sin = turn.cos(), turn.sin()  # of the short axis
    along1, along2 = -sin * n11, cos * n22 - sin * n21  # N times the long axis
    across1, across2 = cos * n11, sin * n22 + cos * n21
    precision = along1 * along1 + along2 * along2
    tilt = (across1 * along1 + across2 * along2) / precision
    middle, beside = cos * x + sin * y, cos * y - sin * x
    width, narrow = precision.rsqrt(), precision.sqrt() / (n11 * n22)
    with torch.no_grad():
        angle, share = _chord_nodes(middle, beside, narrow, width, _radius(power))
    s, half = angle.sin(), angle.cos()
    middle, beside, narrow, width, tilt = (v.unsqueeze(-1) for v in (middle, beside, narrow, width, tilt))
    bell = torch.exp(-0.5 * ((s - middle) / narrow).square()) / (narrow * math.sqrt(2 * math.pi))
    chord = _chord((beside - tilt * (s - middle)) / half, width / half, power)
    # The first factor is (cos φ)^(2k+1), precise for large k too.
    return (share * torch.exp((power + 0.5) * torch.log1p(-s * s)) * bell * chord).sum(-1)


def _chord_nodes(middle: Tensor, beside: Tensor, narrow: Tensor, width: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Nodes φ (…, n, N) and their weights, with separate panels for chords that end inside of the Gaussian."""
    # Forward mode differentiates here even without gradients, and asin has an infinite slope at 1.
    radius = min(radius, _MAX_RADIUS)
    low, high = ((middle + side * narrow).clamp(-radius, radius).asin() for side in (-_DEVIATIONS, _DEVIATIONS))
    last = (beside.abs() - _DEVIATIONS * width).clamp(0, _MAX_RADIUS).acos()
    inner = (beside.abs() + _DEVIATIONS * width).clamp(0, _MAX_RADIUS).acos()
    low, high = low.clamp(-last, last), high.clamp(-last, last)
    ends = torch.stack([low, (-inner).clamp(low, high), inner.clamp(low, high), high], -1)
    nodes, weights = low.new_tensor(_CHORDS)
    start, length = ends[..., :-1].unsqueeze(-1), ends.diff(dim=-1).unsqueeze(-1)
    return (start + length * nodes).flatten(-2), (length * weights).flatten(-2)


# -- along a chord ---------------------------------------------------------------------------------------------------


def _chord(place: Tensor, width: Tensor, power: float) -> Tensor:
    """∫ (1 − r²)^k N(r; place, width²) dr from −1 to 1."""
    if power == round(power) and power <= CLOSED:
        narrow = width <= 1
        closed = _closed(torch.where(narrow, place, 0.0), torch.where(narrow, width, 1.0), round(power))
        wide = _quadrature(torch.where(narrow, 0.0, place), torch.where(narrow, 1.0, width), power)
        return torch.where(narrow, closed, wide)
    return _windowed(place, width, power)


def _closed(place: Tensor, width: Tensor, power: int) -> Tensor:
    """``_chord`` by the moments m_i = ∫ r^i N: m_i = place m_{i−1} + (i−1) width² m_{i−2} − width² [r^(i−1) N]."""
    v, u = (1 - place) / width, (-1 - place) / width
    ends = [torch.exp(-0.5 * z * z) * (width / math.sqrt(2 * math.pi)) for z in (v, u)]  # width² N
    flip = u + v < 0  # erfc is precise for positive arguments
    near, far = torch.where(flip, -v, u), torch.where(flip, -u, v)
    moments = [0.5 * (torch.erfc(near / math.sqrt(2)) - torch.erfc(far / math.sqrt(2)))]
    moments.append(place * moments[0] - (ends[0] - ends[1]))
    variance = width * width
    coefficients = [math.comb(power, i // 2) * (-1.0) ** (i // 2) * (i % 2 == 0) for i in range(2 * power + 1)]
    for i in range(2, len(coefficients)):
        edge = ends[0] - (-1.0) ** (i - 1) * ends[1]
        moments.append(place * moments[-1] + (i - 1) * variance * moments[-2] - edge)
    return sum(c * m for c, m in zip(coefficients, moments, strict=False) if c)  # type: ignore[return-value]


def _quadrature(place: Tensor, width: Tensor, power: float) -> Tensor:
    """Gauss-Legendre quadrature, for Gaussians wider than the interval."""
    total = torch.zeros_like(place)
    for x, w in _WIDE_RULE:
        r = 2 * x - 1
        share = 2 * w * (1 - r * r) ** power
        total = total + share * torch.exp(-0.5 * ((r - place) / width).square())
    return total / (width * math.sqrt(2 * math.pi))


def _windowed(place: Tensor, width: Tensor, power: float) -> Tensor:
    """Quadrature over the part of the interval that a Gaussian covers, for powers without a closed form."""
    radius = _radius(power)
    with torch.no_grad():
        low = (place - _DEVIATIONS * width).clamp(-radius, radius)
        high = (place + _DEVIATIONS * width).clamp(-radius, radius)
    length = high - low
    total = torch.zeros_like(place)
    smooth = radius < 1 or power == round(power)
    for x, rest, w in _SMOOTH_RULE if smooth else _EDGE_RULE:
        r = low + x * length
        if radius < 1:
            shape = torch.exp(power * torch.log1p(-r * r))
        else:
            below, above = (low + 1) + x * length, (1 - high) + rest * length  # 1 + r and 1 − r, from the nearer end
            shape = (below * above).pow(power)
        total = total + w * shape * torch.exp(-0.5 * ((r - place) / width).square())
    return length * total / (width * math.sqrt(2 * math.pi))


def _radius(power: float) -> float:
    """The radius beyond which (1 − r²)^k is negligible: 1, or less for large powers."""
    return 1.0 if power < _NEGLIGIBLE else math.sqrt(-math.expm1(-_NEGLIGIBLE / power))


# -- compiled --------------------------------------------------------------------------------------------------------


def _compiled(loc: Tensor, axes: Tensor, centers: Tensor, covariances: Tensor, power: float) -> bool:
    """Whether a kernel serves this power and these tensors; kernels have no derivatives in the basis."""
    if power != round(power) or power > CLOSED or loc.numel() == 0 or tracks_forward():
        return False
    if torch.is_grad_enabled() and (centers.requires_grad or covariances.requires_grad):
        return False
    return usable("continuous", loc, axes, centers, covariances)


class _Compact(torch.autograd.Function):
    """``_compact`` by kernels, which compute the derivatives together with the values."""

    @staticmethod
    def forward(
        ctx: Any, loc: Tensor, axes: Tensor, centers: Tensor, covariances: Tensor, power: int, narrow: bool
    ) -> Tensor:
        from fenchel.kernels.cpu import continuous

        batch, dim, keep = loc.shape[:-1], loc.shape[-1], any(ctx.needs_input_grad)
        reach = _DEVIATIONS_SINGLE if narrow else _DEVIATIONS
        if dim == 1:
            rows = loc.reshape(-1), axes.reshape(-1), centers.reshape(-1), covariances.reshape(-1)
            value, slopes = continuous.line(*rows, power, reach, keep)
        else:
            flat = loc.reshape(-1, 2), axes.reshape(-1, 2, 2)
            value, slopes = continuous.plane(*flat, centers, covariances, power, reach, keep)
        ctx.power, ctx.slopes = power, slopes
        ctx.save_for_backward(loc, axes, centers, covariances)
        return value.reshape(*batch, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        loc, axes, centers, covariances = ctx.saved_tensors
        if torch.is_grad_enabled():  # higher derivatives by torch operations
            leaves = [t if t.requires_grad else t.detach().requires_grad_() for t in (loc, axes)]
            value = _compact(leaves[0], leaves[1], centers, covariances, ctx.power)
            return *torch.autograd.grad(value, leaves, grad, create_graph=True), None, None, None, None
        found = (grad.reshape(len(ctx.slopes), 1, -1) @ ctx.slopes).squeeze(-2)
        if loc.shape[-1] == 1:
            first, second = found[:, :1], found[:, 1:]
        else:
            first, second = found[:, :2], found[:, [2, 3, 3, 4]]
        return first.reshape(loc.shape), second.reshape(axes.shape), None, None, None, None
