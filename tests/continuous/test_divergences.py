"""Divergences between β-Gaussians, and their losses, against integrals and samples."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import tanhsinh
from test_density import SIGMA, double, expected, line, log_density, plane
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from fenchel.continuous import (
    BetaGaussian,
    EllipsoidPower,
    generalized_covariance,
    wasserstein2,
)

# -- divergences -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.7, 1.0, 1.5, 2.0, 3.0])
def test_the_loss_is_fenchel_and_youngs(alpha: float) -> None:
    p, q = line(alpha), line(alpha, 0.35, 0.2)
    score = lambda t: -((t - 0.3) ** 2)  # noqa: E731 (½/0.5 = 1)
    conjugate = expected(p, score) + p.tsallis_entropy().item()
    wanted = conjugate - q.tsallis_entropy().item() - expected(q, score)
    assert p.loss(q).item() == pytest.approx(wanted, rel=1e-6)
    assert p.loss(q).item() > 0
    assert p.loss(p).item() == pytest.approx(0, abs=1e-14)
    assert (p.cross_entropy(q) - q.cross_entropy(q)).item() == pytest.approx(p.loss(q).item(), rel=1e-9)


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0])
def test_the_loss_is_a_bregman_divergence_between_nested_supports(alpha: float) -> None:
    q, p = line(alpha, 0.3, 0.5), line(alpha, 0.35, 0.2)
    c = alpha - 1
    gradient = lambda t: np.exp(c * log_density(q, t)) / c  # noqa: E731
    wanted = q.tsallis_entropy().item() - p.tsallis_entropy().item() - expected(p, gradient) + expected(q, gradient)
    assert q.loss(p).item() == pytest.approx(wanted, abs=1e-9)
    apart = line(alpha, 4.0, 0.2)
    bregman = q.tsallis_entropy().item() - apart.tsallis_entropy().item() + expected(q, gradient)
    assert q.loss(apart).item() > bregman + 0.1


def test_the_gradient_of_the_loss_is_the_difference_of_expected_statistics() -> None:
    target = plane(2.0)
    theta = torch.tensor([0.4, 0.1, -0.9, 0.2, -0.7], dtype=torch.float64, requires_grad=True)

    def member(theta: Tensor) -> BetaGaussian:
        precision = -2 * torch.stack([theta[2], theta[3] / 2, theta[3] / 2, theta[4]]).reshape(2, 2)
        sigma = torch.linalg.inv(precision)
        return BetaGaussian(sigma @ theta[:2], sigma=sigma, alpha=2.0)

    # The loss of scores θᵀφ: the score above lacks the constant −½ μᵀΣ⁻¹μ, which moves nothing but Ω* and E[f] alike.
    (grad,) = torch.autograd.grad(member(theta).loss(target), theta)

    def statistics(p: BetaGaussian) -> Tensor:
        second = p.covariance_matrix + p.mean.unsqueeze(-1) * p.mean
        return torch.cat([p.mean, torch.stack([second[0, 0], second[0, 1], second[1, 1]])])

    assert torch.allclose(grad, statistics(member(theta)) - statistics(target), atol=1e-12)


PAIRS = [(1.5, 2.0), (2.0, 1.5), (2.0, 2.0), (3.0, 1.2), (2.0, 1.0), (1.0, 1.0), (2.0, 0.5), (1.0, 0.5), (0.6, 0.4)]


@pytest.mark.parametrize(("alpha", "beta"), PAIRS)
def test_kl_is_an_integral(alpha: float, beta: float) -> None:
    p, q = line(alpha, 0.35, 0.05), line(beta, 0.3, 0.8)
    wanted = expected(p, lambda t: log_density(p, t) - log_density(q, t))
    assert kl_divergence(p, q).item() == pytest.approx(wanted, abs=1e-7)
    assert kl_divergence(p, p).item() == pytest.approx(0, abs=1e-9)


def test_kl_is_infinite_where_mass_lies_outside() -> None:
    assert kl_divergence(line(2.0, 0.0, 1.0), line(2.0, 0.1, 1.0)).item() == math.inf
    assert kl_divergence(line(1.0), line(2.0)).item() == math.inf
    normal = MultivariateNormal(torch.zeros(2).double(), SIGMA)
    ours = BetaGaussian(normal.loc, sigma=SIGMA, alpha=1.0)
    other = MultivariateNormal(torch.ones(2).double(), torch.eye(2).double())
    assert torch.allclose(kl_divergence(ours, other), kl_divergence(normal, other))
    mine = BetaGaussian(other.loc, sigma=other.covariance_matrix, alpha=1.0)
    assert torch.allclose(kl_divergence(normal, mine), kl_divergence(normal, other))
    space = BetaGaussian(torch.zeros(3), sigma=torch.eye(3), alpha=2.0)
    with pytest.raises(NotImplementedError, match="one and two dimensions"):
        kl_divergence(space, space)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_wasserstein_on_the_line_is_the_distance_of_quantiles(alpha: float) -> None:
    p, q = line(alpha), line(alpha, 1.0, 0.1)
    distance = lambda u: (p.icdf(torch.from_numpy(u)) - q.icdf(torch.from_numpy(u))).squeeze(-1).square().numpy()  # noqa: E731
    wanted = tanhsinh(distance, 0, 1).integral.item()
    assert wasserstein2(p, q).item() == pytest.approx(math.sqrt(wanted), rel=1e-7)
    assert wasserstein2(p, p, squared=True).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_wasserstein_is_gelbrichs(dim: int) -> None:
    from scipy.linalg import sqrtm

    densities = []
    for _ in range(2):
        root = torch.randn(dim, dim).double()
        densities.append(BetaGaussian(torch.randn(dim).double(), sigma=root @ root.mT + torch.eye(dim), alpha=1.7))
    p, q = densities
    first, second = p.covariance_matrix.numpy(), q.covariance_matrix.numpy()
    half = sqrtm(first)
    bures = np.trace(first + second - 2 * sqrtm(half @ second @ half)).real
    wanted = (p.loc - q.loc).square().sum().item() + bures
    assert wasserstein2(p, q, squared=True).item() == pytest.approx(wanted, rel=1e-9)
    with pytest.raises(ValueError, match="alpha"):
        wasserstein2(p, BetaGaussian(q.loc, sigma=q.sigma, alpha=2.0))


@pytest.mark.parametrize(
    ("alpha", "beta"), [(2.0, 0.0), (1.5, 0.5), (1.0, 1.0), (1.0, 0.5), (0.7, 1.3), (3.0, -1.0), (3.0, 2.0)]
)
def test_the_escort_is_a_power_of_the_density(alpha: float, beta: float) -> None:
    for p in (line(alpha), plane(alpha)):
        escort = p.escort(beta)
        dim = p.event_shape[0]
        t = p.loc + 0.1 * torch.randn(6, dim).double()
        assert torch.allclose(escort.log_prob(t), beta * p.log_prob(t) - p.log_power(beta), atol=1e-10)
        assert torch.allclose(escort.integrate(lambda t: torch.ones_like(t[..., 0])), torch.ones(()).double())
    if beta == 2 - alpha:
        assert torch.allclose(line(alpha).escort().log_prob(t[:, :1]), line(alpha).escort(beta).log_prob(t[:, :1]))


def test_the_uniform_ellipsoid_has_its_moments_and_samples() -> None:
    p = plane(2.0).escort()
    assert isinstance(p, EllipsoidPower)
    draws = p.sample((40000,))
    assert p.support.check(draws).all()
    assert torch.allclose(draws.mT.cov(), p.covariance_matrix, atol=0.01)
    assert torch.allclose(p.covariance_matrix.diagonal(), p.variance)
    # ERRATA to equation 64: (−2λ)/(D + 2) Σ.
    radius = plane(2.0).support_radius.square()
    assert torch.allclose(p.covariance_matrix, radius / 4 * SIGMA)
    assert p.expand((3,)).log_prob(p.loc).shape == (3,)


@pytest.mark.parametrize("alpha", [0.8, 1.0, 4 / 3, 1.5, 1.7, 2.0])
def test_the_jacobian_of_expected_statistics_is_the_generalized_covariance(alpha: float) -> None:
    psi = lambda t: torch.cat([torch.exp(-t.square().sum(-1, keepdim=True)), torch.sin(t)], -1)  # noqa: E731
    for dim in (1, 2):
        theta = torch.tensor([0.3, -0.2][:dim], dtype=torch.float64)
        precision = torch.tensor([[2.0, 0.3], [0.3, 1.5]], dtype=torch.float64)[:dim, :dim]

        def rho(theta: Tensor, precision: Tensor) -> Tensor:
            sigma = torch.linalg.inv(precision)
            return BetaGaussian(sigma @ theta, sigma=sigma, alpha=alpha).integrate(psi, nodes=80)

        p = BetaGaussian(torch.linalg.solve(precision, theta), sigma=torch.linalg.inv(precision), alpha=alpha)
        phi = lambda t: torch.cat([t, t.square()], -1)  # noqa: E731
        found = generalized_covariance(p, phi, psi, nodes=80)
        for i in range(dim):
            step = torch.zeros(dim, dtype=torch.float64)
            step[i] = 1e-5
            slope = (rho(theta + step, precision) - rho(theta - step, precision)) / 2e-5
            assert torch.allclose(found[i], slope, atol=2e-6)
            bend = torch.diag(step)  # the coefficient of t_i² is −½ P_ii
            slope = (rho(theta, precision - 2 * bend) - rho(theta, precision + 2 * bend)) / 2e-5
            assert torch.allclose(found[dim + i], slope, atol=2e-6)


def test_the_discrete_limit_meets_entmax() -> None:
    import fenchel

    # Scores of a fine grid, each cell of width h: p(t) h is entmax of the score over the cells, at a temperature that
    # the width sets: Ω_α of p·h is h^(α−1) times that of p, but for constants.
    for alpha in (4 / 3, 1.5, 2.0):
        p = line(alpha)
        t = torch.linspace(-3, 3.6, 6601, dtype=torch.float64)
        h = (t[1] - t[0]).item()
        cells = fenchel.entmax(p.score(t.unsqueeze(-1)) * h ** (alpha - 1), alpha)
        assert torch.allclose(cells / h, p.log_prob(t.unsqueeze(-1)).exp(), atol=2e-5)


def test_quantiles_next_to_alpha_one_are_the_gaussians() -> None:
    q = double(1e-12, 1e-6, 0.01, 0.2, 0.5, 0.99)
    normal = torch.special.ndtri(q)
    for step in (1e-12, -1e-12, 1e-9, -1e-9):
        p = line(1 + step, 0.0, 1.0)
        assert torch.allclose(p.icdf(q).squeeze(-1), normal, rtol=0, atol=200 * abs(step))
        assert torch.allclose(p.cdf(normal.unsqueeze(-1)), q, rtol=2000 * abs(step))
        second = p.integrate(lambda t: t.square().squeeze(-1), nodes=20)
        assert torch.allclose(second, p.variance.squeeze(-1), rtol=1e-13)


@pytest.mark.parametrize("alpha", [0.8, 1.5, 2.0])
def test_tsallis_entropies_meet_shannons(alpha: float) -> None:
    p = line(alpha)
    # Their slope in the index at 1, from afar.
    slope = ((p.tsallis_entropy(1.01) - p.tsallis_entropy(0.99)) / 0.02).item()
    middle = p.entropy().item()
    for step in (1e-3, 1e-6, 1e-9, 1e-12):
        above, below = p.tsallis_entropy(1 + step).item(), p.tsallis_entropy(1 - step).item()
        assert above + below - 2 * middle == pytest.approx(0, abs=20 * step**2 + 1e-14)
        assert above - below == pytest.approx(2 * step * slope, rel=1e-2, abs=1e-14)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_wasserstein_distance_of_near_neighbours(dim: int) -> None:
    eye, loc = torch.eye(dim, dtype=torch.float64), torch.zeros(dim, dtype=torch.float64)
    p = BetaGaussian(loc, scale_tril=eye, alpha=1.0)
    for step in (1e-3, 1e-6, 1e-9):
        q = BetaGaussian(loc, scale_tril=(1 + step) * eye, alpha=1.0)
        assert wasserstein2(p, q).item() == pytest.approx(step * math.sqrt(dim), rel=1e-6)


@pytest.mark.parametrize(("alpha", "beta"), [(2.0, 2.0), (1.5, 2.0), (2.0, 1.2), (3.0, 4 / 3)])
def test_kl_between_ellipses_is_an_integral(alpha: float, beta: float) -> None:
    small = torch.tensor([[0.02, -0.005], [-0.005, 0.01]], dtype=torch.float64)
    p = BetaGaussian(double(0.3, -0.05), sigma=small, alpha=alpha)
    q = plane(beta)
    # The surface of p, where its logarithm is not smooth, gets the closer nodes.
    x, w = np.polynomial.legendre.leggauss(120)
    s, w = (1 + x) / 2, w / 2
    r = 1 - (1 - s) ** 4
    angle = 2 * np.pi * np.arange(200) / 200
    root = (p.scale_tril * p.support_radius).numpy()
    t = p.loc.numpy() + (r[:, None, None] * np.stack([np.cos(angle), np.sin(angle)], -1)) @ root.T
    ours, theirs = (d.log_prob(torch.from_numpy(t)).numpy() for d in (p, q))
    area = (w * 4 * (1 - s) ** 3 * r)[:, None] * 2 * np.pi / len(angle) * np.linalg.det(root)
    inside = ours > -math.inf
    wanted = (area * np.exp(ours) * np.subtract(ours, theirs, where=inside, out=np.zeros_like(ours))).sum()
    assert kl_divergence(p, q).item() == pytest.approx(wanted, abs=1e-9)
    assert kl_divergence(q, p).item() == math.inf
    assert kl_divergence(q, q).item() == pytest.approx(0, abs=1e-12)


def test_kl_between_discs_knows_where_they_touch() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    q, small = (BetaGaussian(double(0.0, 0.0), sigma=s * eye) for s in (1.0, 0.1))
    away = (q.support_radius - math.sqrt(0.1) * small.support_radius).item()
    for angle in (0.0, 0.3, 1.0123):
        direction = double(math.cos(angle), math.sin(angle))
        values = [
            kl_divergence(BetaGaussian(away * factor * direction, sigma=0.1 * eye), q).item()
            for factor in (1 - 1e-10, 1 + 1e-10)
        ]
        assert values[0] == pytest.approx(1.06960285, abs=1e-8)
        assert values[1] == math.inf
    loc = torch.tensor([[0.1, 0.2], [5.0, 5.0]], dtype=torch.float64, requires_grad=True)
    outer = eye.clone().requires_grad_()
    value = kl_divergence(BetaGaussian(loc, sigma=0.1 * eye), BetaGaussian(double(0.0, 0.0), sigma=outer))
    assert value[1] == math.inf
    assert all(g.isfinite().all() for g in torch.autograd.grad(value[0], (loc, outer)))
    f = lambda m: kl_divergence(BetaGaussian(m, sigma=0.1 * eye), q)  # noqa: E731
    assert torch.autograd.gradcheck(f, double(0.1, 0.2).requires_grad_())


def test_targets_without_a_covariance_are_infinitely_far() -> None:
    for heavy in (0.0, 0.2):
        assert kl_divergence(line(heavy), line(1.0)).item() == math.inf
        assert line(2.0).loss(line(heavy)).item() == math.inf
    with pytest.raises(ValueError, match=r"alpha must be greater than 0\.333"):
        line(0.2).loss(line(2.0))
    assert line(0.0).variance.isnan()


def test_precisions_may_be_mixed_and_low() -> None:
    mixed = BetaGaussian(torch.zeros(2), sigma=SIGMA)
    assert mixed.rsample().dtype == mixed.log_prob(torch.zeros(2)).dtype == torch.float64
    low = BetaGaussian(torch.zeros(2, dtype=torch.bfloat16), sigma=torch.eye(2, dtype=torch.bfloat16))
    assert low.rsample((3,)).dtype == torch.float32
    assert low.entropy().isfinite()


def test_values_are_looked_at_whatever_torchs_default_is() -> None:
    default = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)  # as torch.compile does
    try:
        with pytest.raises(ValueError, match="sigma must be symmetric and positive definite"):
            BetaGaussian(torch.zeros(1), sigma=-torch.eye(1))
    finally:
        torch.distributions.Distribution.set_default_validate_args(default)
    assert BetaGaussian(torch.zeros(1), sigma=-torch.eye(1), validate_args=False).entropy().isnan()


def test_alpha_is_a_number_of_any_kind() -> None:
    assert BetaGaussian(torch.zeros(1), sigma=torch.eye(1), alpha=np.float32(1.5)).alpha == 1.5
    for alpha in (True, None):
        with pytest.raises(TypeError, match="alpha must be a number"):
            BetaGaussian(torch.zeros(1), sigma=torch.eye(1), alpha=alpha)
    with pytest.raises(TypeError, match="value must be a floating-point tensor, got float"):
        line(2.0).icdf(0.3)
