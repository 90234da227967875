"""β-Gaussians against integrals, textbook densities and samples."""

import itertools
import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats as st
import torch
from scipy.integrate import quad, tanhsinh
from torch import Tensor
from torch.distributions import Cauchy, MultivariateNormal, constraints, kl_divergence

from fenchel.continuous import (
    BetaGaussian,
    GaussianBasis,
    expectation,
    generalized_covariance,
    wasserstein2,
)

ALPHAS = [-0.3, 0.0, 0.5, 0.9, 1.0, 1.0001, 4 / 3, 1.5, 1.7, 2.0, 3.0, 10.0]
PLANE = [0.3, 0.8, 1.0, 4 / 3, 1.5, 2.0, 3.5]
SIGMA = torch.tensor([[0.7, 0.3], [0.3, 0.4]], dtype=torch.float64)


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def line(alpha: float, loc: float = 0.3, sigma: float = 0.5) -> BetaGaussian:
    return BetaGaussian(double(loc), sigma=double(sigma).unsqueeze(-1), alpha=alpha)


def plane(alpha: float, sigma: Tensor = SIGMA) -> BetaGaussian:
    return BetaGaussian(torch.tensor([0.2, -0.1], dtype=torch.float64), sigma=sigma, alpha=alpha)


def log_density(p: BetaGaussian, t: np.ndarray) -> np.ndarray:
    return p.log_prob(torch.as_tensor(t, dtype=torch.float64).unsqueeze(-1)).numpy()


def expected(p: BetaGaussian, function: Callable[[np.ndarray], np.ndarray], stop: float | None = None) -> float:
    """E_p[function] on the line, up to a point if one is given, by scipy's double exponential quadrature."""
    radius, loc = (p.support_radius * p.scale_tril.squeeze()).item(), p.loc.item()

    def value(t: np.ndarray) -> np.ndarray:
        density = np.exp(log_density(p, t))
        with np.errstate(all="ignore"):
            return np.where(density > 0, density * function(t), 0.0)

    cuts = [loc - radius, loc, loc + radius] if stop is None else [loc - radius, min(loc, stop), stop]
    return sum(tanhsinh(value, *ends).integral.item() for ends in itertools.pairwise(cuts))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_integral_is_one_and_the_density_is_the_deformed_exponential_of_its_score(alpha: float) -> None:
    p = line(alpha)
    assert expected(p, np.ones_like) == pytest.approx(1, abs=1e-9)
    t = p.loc + double(0.0, 0.1, 0.3).unsqueeze(-1)
    density, score = p.log_prob(t).exp(), p.score(t)
    # log_{2−α} p(t) = f(t) − A, with one A for all t.
    c = alpha - 1
    deformed = density.log() if c == 0 else (density**c - 1) / c
    assert (deformed - score).std() < 1e-11


@pytest.mark.parametrize("alpha", PLANE)
def test_the_integral_over_the_plane_is_one(alpha: float) -> None:
    p = plane(alpha)
    root = p.scale_tril.numpy()
    edge = min(p.support_radius.item(), 60.0 if alpha >= 1 else math.inf)

    def ring(angle: float, r: float) -> float:
        u = np.array([math.cos(angle), math.sin(angle)]) * r
        t = p.loc + torch.from_numpy(root @ u)
        return r * math.exp(p.log_prob(t).item()) * np.linalg.det(root)

    total = quad(lambda r: 2 * math.pi * ring(0.3, r), 0, edge, epsabs=1e-12, limit=200)[0]
    assert total == pytest.approx(1, abs=1e-8)
    assert ring(0.3, 0.5) == pytest.approx(ring(2.0, 0.5), rel=1e-12)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_moments_and_entropies_are_integrals(alpha: float) -> None:
    p = line(alpha)
    assert p.entropy().item() == pytest.approx(expected(p, lambda t: -log_density(p, t)), rel=1e-7)
    if alpha > 1 - 2 / 3:
        assert p.mean.item() == pytest.approx(expected(p, lambda t: t), abs=1e-8)
        assert p.variance.item() == pytest.approx(expected(p, lambda t: (t - 0.3) ** 2), rel=1e-6)
        assert p.covariance_matrix.item() == pytest.approx(p.variance.item(), rel=1e-12)
    if alpha != 1 and alpha > 0.4:
        power = expected(p, lambda t: np.exp((alpha - 1) * log_density(p, t)))
        assert p.tsallis_entropy().item() == pytest.approx((1 - power) / (alpha * (alpha - 1)), abs=1e-7)


def test_heavy_tails_have_no_moments() -> None:
    assert line(0.0).mean.isnan()
    assert line(0.2).mean.item() == pytest.approx(0.3)
    assert line(0.2).variance.item() == math.inf
    assert line(0.2).covariance_matrix.item() == math.inf


@pytest.mark.parametrize("dim", [1, 2, 3, 5])
def test_alpha_near_one_meets_the_gaussian(dim: int) -> None:
    root = torch.randn(dim, dim).double()
    sigma, loc = root @ root.mT + torch.eye(dim), torch.randn(dim).double()
    normal = MultivariateNormal(loc, sigma)
    t = normal.sample((7,))
    exact = BetaGaussian(loc, sigma=sigma, alpha=1.0)
    assert torch.allclose(exact.log_prob(t), normal.log_prob(t), rtol=1e-12)
    assert torch.allclose(exact.entropy(), normal.entropy(), rtol=1e-12)
    assert torch.allclose(exact.covariance_matrix, normal.covariance_matrix, rtol=1e-12)
    for step in (1e-6, 1e-9, 1e-12):
        for alpha in (1 + step, 1 - step):
            near = BetaGaussian(loc, sigma=sigma, alpha=alpha)
            assert torch.allclose(near.log_prob(t), normal.log_prob(t), atol=200 * step + 1e-12)
            assert torch.allclose(near.entropy(), normal.entropy(), atol=200 * step + 1e-12)
            assert torch.allclose(near.tsallis_entropy(), normal.entropy(), atol=200 * step + 1e-12)


NAMED = [
    (2.0, lambda x: 0.75 * (1 - x**2)),  # Epanechnikov
    (1.5, lambda x: 15 / 16 * (1 - x**2) ** 2),  # biweight
    (4 / 3, lambda x: 35 / 32 * (1 - x**2) ** 3),  # triweight
]


@pytest.mark.parametrize(("alpha", "kernel"), NAMED)
def test_kernels_of_density_estimation(alpha: float, kernel: object) -> None:
    # The Σ whose support is [−1, 1]: the radius grows with a power of σ.
    unit = line(alpha, 0.0, 1.0)
    k = 1 / (alpha - 1)
    sigma = unit.support_radius.item() ** (-(2 * k + 1) / (2 * k))
    p = line(alpha, 0.0, sigma**2)
    assert (p.support_radius * sigma).item() == pytest.approx(1, rel=1e-12)
    x = torch.linspace(-0.99, 0.99, 9, dtype=torch.float64).unsqueeze(-1)
    np.testing.assert_allclose(p.log_prob(x).exp(), kernel(x.squeeze(-1).numpy()), rtol=1e-12)
    if alpha == 2.0:
        assert sigma == pytest.approx(math.sqrt(2 / 3))
    peer = st.rdist(2 * k + 2)
    np.testing.assert_allclose(p.log_prob(x).exp(), peer.pdf(x.squeeze(-1).numpy()), rtol=1e-10)
    np.testing.assert_allclose(p.cdf(x), peer.cdf(x.squeeze(-1).numpy()), rtol=1e-9)


def test_epanechnikov_is_sklearns() -> None:
    neighbors = pytest.importorskip("sklearn.neighbors")
    p = line(2.0, 0.0, 2 / 3)
    points = np.linspace(-1.2, 1.2, 11)[:, None]
    peer = neighbors.KernelDensity(kernel="epanechnikov", bandwidth=1.0).fit([[0.0]]).score_samples(points)
    inside = np.abs(points[:, 0]) < 1
    np.testing.assert_allclose(p.log_prob(torch.from_numpy(points))[inside], peer[inside], rtol=1e-9)
    assert (p.log_prob(torch.from_numpy(points))[~inside] == -math.inf).all()


def test_alpha_zero_is_cauchys_and_below_one_is_students() -> None:
    p = line(0.0, 0.3, 1.0)
    scale = 1 / (math.pi * p.log_peak.exp().item())
    t = torch.linspace(-9, 9, 13, dtype=torch.float64).unsqueeze(-1)
    peer = Cauchy(double(0.3), double(scale))
    assert torch.allclose(p.log_prob(t), peer.log_prob(t.squeeze(-1)), rtol=1e-12)
    assert torch.allclose(p.cdf(t), peer.cdf(t.squeeze(-1)), rtol=1e-10)
    heavy = plane(0.5)
    degrees = 2 / 0.5 - 2
    # (1 + ¼ p₀^½ ‖u‖²)^(−2) is Student's (1 + ‖w‖²/ν)^(−(ν + 2)/2).
    shape = heavy.sigma * torch.exp(-0.5 * heavy.log_peak) * 4 / degrees
    peer2 = st.multivariate_t(heavy.loc.numpy(), shape.numpy(), df=degrees)
    t2 = torch.randn(5, 2).double()
    np.testing.assert_allclose(heavy.log_prob(t2), peer2.logpdf(t2.numpy()), rtol=1e-10)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_samples_follow_the_distribution_function(alpha: float) -> None:
    p = line(alpha)
    draws = p.sample((4000,))
    assert draws.shape == (4000, 1)
    assert st.kstest(p.cdf(draws).numpy(), "uniform").pvalue > 1e-3
    if alpha > 1:
        assert p.support.check(draws).all()


@pytest.mark.parametrize("alpha", [0.8, 1.0, 1.5, 2.0])
def test_samples_of_the_plane_have_its_covariance(alpha: float) -> None:
    p = plane(alpha)
    draws = p.sample((40000,))
    if alpha >= 1:
        assert torch.allclose(draws.mT.cov(), p.covariance_matrix, atol=0.02)
    square = torch.linalg.solve_triangular(p.scale_tril, (draws - p.loc).mT, upper=False).square().sum(0)
    c, peak = alpha - 1, p.log_peak.item()
    x = 0.5 * abs(c) * square * math.exp(-c * peak)
    if alpha > 1:
        law = st.beta(1, 1 / c + 1)
    elif alpha < 1:
        law = st.betaprime(1, -1 / c - 1)
    else:
        law, x = st.chi2(2), square
    assert st.kstest(x.numpy(), law.cdf).pvalue > 1e-3


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_distribution_function_integrates_the_density_and_inverts(alpha: float) -> None:
    p = line(alpha)
    q = double(1e-6, 0.01, 0.3, 0.499, 0.5, 0.51, 0.9, 1 - 1e-6)
    t = p.icdf(q)
    assert torch.allclose(p.cdf(t), q, rtol=1e-9)
    assert expected(p, np.ones_like, stop=t[2].item()) == pytest.approx(0.3, abs=1e-8)
    x = (p.loc + double(-0.2, 0.0, 0.3).unsqueeze(-1)).requires_grad_()
    assert torch.autograd.gradcheck(p.cdf, x)
    assert torch.autograd.gradgradcheck(p.cdf, x)
    q = double(0.2, 0.6).requires_grad_()
    assert torch.autograd.gradcheck(p.icdf, q)
    assert torch.autograd.gradgradcheck(p.icdf, q)


@pytest.mark.parametrize("alpha", [0.7, 1.0, 1.5, 2.0])
def test_sampling_has_the_gradient_of_expectations(alpha: float) -> None:
    # E[(t − 1)²] has a known gradient in μ and Σ; the pathwise one must agree on average.
    loc = torch.tensor([0.2, -0.1], dtype=torch.float64, requires_grad=True)
    sigma = SIGMA.clone().requires_grad_()
    p = BetaGaussian(loc, sigma=sigma, alpha=alpha)
    torch.manual_seed(1)
    estimate = (p.rsample((200000,)) - 1).square().sum(-1).mean()
    exact = p.variance.sum() + (loc - 1).square().sum()
    found, wanted = (torch.autograd.grad(v, (loc, sigma), retain_graph=True) for v in (estimate, exact))
    assert torch.allclose(found[0], wanted[0], atol=0.03)
    assert torch.allclose(found[1], wanted[1], atol=0.1)


def test_log_prob_is_differentiable_and_flat_outside() -> None:
    for alpha in (0.7, 1.0, 1.5, 2.0):
        loc = torch.tensor([0.2, -0.1], dtype=torch.float64, requires_grad=True)
        sigma = SIGMA.clone().requires_grad_()
        t = torch.tensor([[0.3, 0.1], [0.1, 0.0]], dtype=torch.float64, requires_grad=True)

        def f(loc: Tensor, sigma: Tensor, t: Tensor, alpha: float = alpha) -> Tensor:
            symmetric = 0.5 * (sigma + sigma.mT)
            return BetaGaussian(loc, sigma=symmetric, alpha=alpha).log_prob(t)

        assert torch.autograd.gradcheck(f, (loc, sigma, t))
        assert torch.autograd.gradgradcheck(f, (loc, sigma, t))
    far = torch.full((1, 2), 50.0, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(plane(2.0).log_prob(far).exp().sum(), far)
    assert (grad == 0).all()


def test_batches_expand_and_broadcast() -> None:
    p = BetaGaussian(torch.zeros(3, 1, 2), sigma=SIGMA.float().expand(4, 2, 2), alpha=1.5)
    assert (p.batch_shape, p.event_shape) == ((3, 4), (2,))
    assert p.rsample((5,)).shape == (5, 3, 4, 2)
    assert p.log_prob(torch.zeros(2)).shape == (3, 4)
    q = p.expand((6, 3, 4))
    assert q.batch_shape == (6, 3, 4)
    assert torch.equal(q.covariance_matrix[2], p.covariance_matrix)
    assert torch.equal(q.entropy()[1], p.entropy())
    by_root = BetaGaussian(p.loc, scale_tril=p.scale_tril, alpha=1.5)
    assert torch.allclose(by_root.sigma, p.sigma, atol=1e-6)
    assert BetaGaussian.support.event_dim == 1
    assert isinstance(BetaGaussian.arg_constraints["sigma"], constraints.Constraint)
    assert p.has_rsample
    independent = torch.distributions.Independent(p, 1)
    assert independent.log_prob(torch.zeros(3, 4, 2)).shape == (3,)


@pytest.mark.parametrize("alpha", [0.9, 1.0, 1.5, 2.0])
def test_moments_can_be_asked_for(alpha: float) -> None:
    mean = torch.tensor([0.5, 2.0], dtype=torch.float64)
    p = BetaGaussian.from_moments(mean, SIGMA, alpha)
    assert torch.allclose(p.covariance_matrix, SIGMA, rtol=1e-12)
    assert torch.equal(p.mean, mean)


# -- errors ----------------------------------------------------------------------------------------------------------


def test_bad_input_is_named() -> None:
    loc, eye = torch.zeros(2), torch.eye(2)
    with pytest.raises(ValueError, match="sigma must be symmetric and positive definite"):
        BetaGaussian(loc, sigma=torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
    with pytest.raises(ValueError, match="sigma must be symmetric"):
        BetaGaussian(loc, sigma=torch.tensor([[1.0, 0.5], [0.0, 1.0]]))
    with pytest.raises(ValueError, match="scale_tril must be lower triangular"):
        BetaGaussian(loc, scale_tril=torch.tensor([[1.0, 0.5], [0.0, 1.0]]))
    with pytest.raises(ValueError, match="exactly one of scale_tril and sigma"):
        BetaGaussian(loc, scale_tril=eye, sigma=eye)
    with pytest.raises(ValueError, match=r"alpha > 0 in 2 dimensions.*got 0"):
        BetaGaussian(loc, sigma=eye, alpha=0.0)
    with pytest.raises(ValueError, match="alpha > -1 in 1 dimension"):
        BetaGaussian(torch.zeros(1), sigma=torch.eye(1), alpha=-1.0)
    with pytest.raises(ValueError, match="alpha"):
        BetaGaussian(loc, sigma=eye, alpha=math.inf)
    with pytest.raises(TypeError, match="alpha must be a number"):
        BetaGaussian(loc, sigma=eye, alpha="2")
    with pytest.raises(TypeError, match="loc must be a floating-point tensor, got"):
        BetaGaussian(torch.zeros(2, dtype=torch.long), sigma=eye)
    with pytest.raises(ValueError, match=r"sigma must have shape \(…, 2, 2\)"):
        BetaGaussian(loc, sigma=torch.eye(3))
    with pytest.raises(ValueError, match=r"value must have shape \(…, 2\)"):
        BetaGaussian(loc, sigma=eye).log_prob(torch.zeros(3))
    with pytest.raises(NotImplementedError, match="D = 2"):
        BetaGaussian(loc, sigma=eye).cdf(loc)
    with pytest.raises(ValueError, match="beta must give"):
        BetaGaussian(loc, sigma=eye, alpha=1.0).escort(0.0)
    with pytest.raises(ValueError, match="index"):
        BetaGaussian(loc, sigma=eye).tsallis_entropy(0.0)
    with pytest.raises(ValueError, match=r"alpha must be greater than 0\.5"):
        BetaGaussian.from_moments(loc, eye, alpha=0.4)


# -- narrow functions, heavy tails, and one alpha per entry ------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.5), (2.0, 0.9), (3.0, -0.5), (1.0, 0.0), (0.5, 0.7)])
@pytest.mark.parametrize("sigma", [1e-3, 1e-8])
def test_kl_to_a_narrow_density_with_heavy_tails_is_an_integral(alpha: float, beta: float, sigma: float) -> None:
    p, q = line(alpha, 0.1, 1.0), line(beta, 0.3, sigma)
    radius = min((p.support_radius * p.scale_tril.squeeze()).item(), math.inf)

    def value(t: np.ndarray) -> np.ndarray:
        log = log_density(p, t)
        with np.errstate(all="ignore"):
            return np.where(log > -500, np.exp(log) * (log - log_density(q, t)), 0.0)

    cuts = np.unique(np.concatenate([0.3 + s * 10.0 ** np.arange(-6, 2.0) for s in (-1, 1)] + [[0.3, 0.1]]))
    ends = [0.1 - radius, *cuts[np.abs(cuts - 0.1) < radius], 0.1 + radius]
    wanted = sum(tanhsinh(value, *both).integral.item() for both in itertools.pairwise(ends))
    assert kl_divergence(p, q).item() == pytest.approx(wanted, rel=1e-8)


def test_kl_to_heavy_tails_has_its_gradient_where_q_is_narrow() -> None:
    for dim, wanted in ((1, 7.228409842285523), (2, None)):
        eye = torch.eye(dim, dtype=torch.float64)
        normal = BetaGaussian(torch.zeros(dim, dtype=torch.float64), sigma=eye, alpha=1.0)
        f = lambda m, s, p=normal: kl_divergence(p, BetaGaussian(m, sigma=s * torch.eye(len(m)).double(), alpha=0.5))  # noqa: E731
        loc = torch.full((dim,), 0.01, dtype=torch.float64, requires_grad=True)
        scale = torch.tensor(1e-3, dtype=torch.float64, requires_grad=True)
        if wanted is not None:
            assert f(torch.zeros_like(loc), scale).item() == pytest.approx(wanted, rel=1e-9)
        assert torch.autograd.gradcheck(f, (loc, scale), eps=1e-7, atol=1e-4)


def test_kl_to_a_needle_with_heavy_tails_is_a_mean_over_the_plane() -> None:
    turn = torch.tensor([[0.8, -0.6], [0.6, 0.8]], dtype=torch.float64)
    needle = turn @ torch.diag(double(1e-6, 0.5)) @ turn.mT
    q = BetaGaussian(double(0.1, -0.2), sigma=0.5 * (needle + needle.mT), alpha=0.6)
    # A Gaussian p in q's own axes: the long one by the trapezoid rule, the short one cut where q peaks.
    p = BetaGaussian(double(0.0, 0.0), sigma=torch.eye(2).double(), alpha=1.0)
    x = np.linspace(-9, 9, 361)
    w = np.exp(-(x**2) / 2)
    centre = turn.mT @ q.loc

    def across(s: np.ndarray) -> np.ndarray:
        u = torch.stack(torch.broadcast_tensors(torch.from_numpy(s)[..., None], torch.from_numpy(x)), -1)
        mean = (q.log_prob(u @ turn.mT) * torch.from_numpy(w)).sum(-1) / w.sum()
        return np.exp(-(s**2) / 2) / math.sqrt(2 * math.pi) * mean.numpy()

    cuts = centre[0].item() + np.array([-20, -1, -1e-1, -1e-2, -1e-3, -1e-4, 0, 1e-4, 1e-3, 1e-2, 1e-1, 1, 20])
    expected_log = sum(tanhsinh(across, *both).integral.item() for both in itertools.pairwise(cuts))
    assert kl_divergence(p, q).item() == pytest.approx(-p.entropy().item() - expected_log, rel=1e-8)


@pytest.mark.parametrize("alpha", [-0.3, 0.5, 0.9, 1.0, 1.5, 3.0])
def test_distribution_functions_are_right_to_their_ends(alpha: float) -> None:
    p = line(alpha, 0.0, 1.0)
    ends = p.icdf(double(0.0, 1.0)).squeeze(-1)
    radius = p.support_radius.item()
    assert torch.allclose(ends, double(-radius, radius), rtol=1e-12)
    far = torch.tensor([[-math.inf], [math.inf]], dtype=torch.float64)
    assert p.cdf(far).tolist() == [0.0, 1.0]
    q = double(5e-324, 1e-300, 1e-100, 1e-17, 0.5, 1 - 2**-53)
    t = p.icdf(q)
    assert (t.nan_to_num().diff(dim=0) >= 0).all()
    finite = t.squeeze(-1).isfinite() & (q > 1e-320)
    if alpha <= 1:  # beyond, what is left of the support is rounded away
        assert torch.allclose(p.cdf(t)[finite], q[finite], rtol=1e-9, atol=0)


NARROW = [(1.0, 0.69, 0.1), (1.0, 5.0, 0.03), (1.0, 30.0, 0.1), (1.01, 5.0, 0.1), (2.0, 3.0, 1e-3), (0.7, 2.0, 0.01)]


@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "sigma", "width"), NARROW)
def test_densities_wider_than_the_function_are_integrated(alpha: float, sigma: float, width: float) -> None:
    p = line(alpha, 0.5, sigma)
    basis = GaussianBasis(double(0.3).unsqueeze(-1), double(width**2).reshape(1, 1, 1))
    bell = st.norm(0.3, width).pdf
    radius = min((p.support_radius * p.scale_tril.squeeze()).item(), math.inf)
    beta = 2 - alpha
    cuts = [0.3 + k * width for k in (-9, -3, 0, 3, 9)] + [0.5 + k * math.sqrt(sigma) for k in (-6, 0, 6)]
    ends = [0.5 - radius, *sorted(c for c in cuts if abs(c - 0.5) < radius), 0.5 + radius]

    def power(q: float, function: Callable[[np.ndarray], np.ndarray]) -> float:
        def value(t: np.ndarray) -> np.ndarray:
            log = log_density(p, t)
            with np.errstate(all="ignore"):
                return np.where(log > -300, np.exp(q * log) * function(t), 0.0)

        return sum(tanhsinh(value, *both).integral.item() for both in itertools.pairwise(ends))

    for function in (basis, lambda t: basis(t)):
        assert p.integrate(function).item() == pytest.approx(power(1.0, bell), rel=1e-8)
    mean = power(beta, lambda t: t) / power(beta, np.ones_like)
    slope = power(beta, lambda t: (t - mean) * bell(t))
    assert generalized_covariance(p, lambda t: t, basis).item() == pytest.approx(slope, rel=1e-6)
    assert generalized_covariance(p, lambda t: t, lambda t: basis(t)).item() == pytest.approx(slope, rel=1e-6)


def test_the_plane_resolves_functions_narrower_than_the_density() -> None:
    eye = torch.eye(2, dtype=torch.float64)
    center, width = double(0.3, -0.2), 0.05
    basis = GaussianBasis(center.unsqueeze(0), width**2 * eye.unsqueeze(0))
    sigma = (2.0 * eye).requires_grad_()
    p = BetaGaussian(double(0.1, 0.2), sigma=sigma, alpha=1.0)
    total = MultivariateNormal(p.loc, sigma + width**2 * eye)
    wanted = total.log_prob(center).exp()
    value = p.integrate(lambda t: basis(t)).squeeze(-1)
    assert value.item() == pytest.approx(wanted.item(), rel=1e-8)
    slopes = [torch.autograd.grad(v, sigma, retain_graph=True)[0] for v in (value, wanted)]
    assert torch.allclose(*slopes, rtol=1e-6)
    # Cov(t, ψ) under a Gaussian is Σ (Σ + Σ_ψ)⁻¹ (centre − μ) times E[ψ].
    for psi in (basis, lambda t: basis(t)):
        found = generalized_covariance(p, lambda t: t, psi).squeeze(-1)
        assert torch.allclose(found, 2.0 / (2.0 + width**2) * (center - p.loc) * wanted, rtol=1e-6)
    needle = GaussianBasis(center.unsqueeze(0), 1e-8 * eye.unsqueeze(0))
    found = generalized_covariance(p, lambda t: t, needle).squeeze(-1)
    assert torch.allclose(found, (center - p.loc) * p.log_prob(center).exp(), rtol=1e-6)


def test_an_integral_that_is_not_reached_is_warned_of() -> None:
    p = plane(1.5)
    with pytest.warns(UserWarning, match="the estimated error"):
        p.integrate(lambda t: torch.sin(1e5 * t[..., 0]).sign())
    with pytest.warns(UserWarning, match="the estimated error"):  # 0.4 % of the mass lies beyond 1e150
        line(-0.97).integrate(lambda t: torch.ones_like(t[..., 0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = line(1.5).integrate(lambda t: (t[..., 0] < 0.4).double())
    assert step.item() == pytest.approx(line(1.5).cdf(double(0.4)).item(), rel=1e-8)


def each_alone(p: BetaGaussian) -> list[BetaGaussian]:
    rows = zip(p.loc.flatten(0, -2), p.scale_tril.flatten(0, -3), p.alpha.flatten().tolist(), strict=True)
    return [BetaGaussian(loc, root, alpha=alpha) for loc, root, alpha in rows]


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, 2])
def test_one_alpha_per_entry_is_each_entry_alone(dim: int) -> None:
    alpha = torch.tensor([[0.7, 1.0, 2.0], [1.0001, 0.9, 1.5]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    loc = torch.randn(3, dim, generator=generator).double()
    root = torch.eye(dim).double() + 0.3 * torch.randn(2, 1, dim, dim, generator=generator).double().tril()
    p = BetaGaussian(loc, root, alpha=alpha)
    wide = BetaGaussian(loc + 0.1, 6 * root, alpha=torch.tensor([0.8, 1.0, 1.2], dtype=torch.float64))
    t = loc + 0.3
    basis = GaussianBasis.line(4) if dim == 1 else GaussianBasis.grid(2)
    bell = lambda t: torch.exp(-0.2 * t.square())  # noqa: E731
    methods: dict[str, Callable[[BetaGaussian, int], Tensor]] = {
        "log_prob": lambda d, i: d.log_prob(t if i < 0 else t[i % 3]),
        "entropy": lambda d, i: d.entropy(),
        "tsallis": lambda d, i: d.tsallis_entropy(),
        "mean": lambda d, i: d.mean,
        "covariance": lambda d, i: d.covariance_matrix,
        "variance": lambda d, i: d.variance,
        "radius": lambda d, i: d.support_radius,
        "conjugate": lambda d, i: d.conjugate(),
        "power": lambda d, i: d.log_power(1.3),
        "escort": lambda d, i: d.escort(0.8).log_prob(t if i < 0 else t[i % 3]),
        "integrate": lambda d, i: d.integrate(bell),
        "basis": lambda d, i: d.integrate(basis),
        "covariances": lambda d, i: generalized_covariance(d, torch.tanh, bell),
        "expectation": lambda d, i: expectation(d.loc, d.sigma, basis, d.alpha),
        "kl": lambda d, i: kl_divergence(d, wide if i < 0 else each_alone(wide)[i]),
        "loss": lambda d, i: d.loss(wide if i < 0 else each_alone(wide)[i]),
        "wasserstein": lambda d, i: wasserstein2(d, BetaGaussian(d.loc + 1, 2 * d.scale_tril, alpha=d.alpha)),
        "moments": lambda d, i: BetaGaussian.from_moments(d.loc, d.sigma, d.alpha).scale_tril,
    }
    if dim == 1:
        methods["cdf"] = lambda d, i: d.cdf(t if i < 0 else t[i % 3])
        methods["icdf"] = lambda d, i: d.icdf(torch.tensor(0.3, dtype=torch.float64))
        methods["ends"] = lambda d, i: d.icdf(torch.tensor(0.0, dtype=torch.float64))
    for name, method in methods.items():
        whole = method(p, -1).flatten(0, 1)
        for i, one in enumerate(each_alone(p)):
            assert torch.allclose(whole[i], method(one, i), rtol=1e-9, atol=1e-12), (name, i)
    assert p.expand((4, 2, 3)).entropy().shape == (4, 2, 3)
    assert repr(p) == f"BetaGaussian(alpha: (2, 3), loc: (2, 3, {dim}), sigma: (2, 3, {dim}, {dim}))"
    draws = p.sample((4000,))
    square = (
        torch.linalg.solve_triangular(p.scale_tril, (draws - p.loc).unsqueeze(-1), upper=False).square().sum((-2, -1))
    )
    x = square * torch.exp((1 - alpha) * p.log_peak)
    for i, a in enumerate(alpha.flatten().tolist()):
        c = a - 1
        law = st.chi2(dim) if c == 0 else None
        law = st.beta(dim / 2, 1 / c + 1, scale=2 / c) if c > 0 else law
        law = st.betaprime(dim / 2, -1 / c - dim / 2, scale=-2 / c) if c < 0 else law
        assert st.kstest(x.flatten(1)[:, i].numpy(), law.cdf).pvalue > 1e-3


def test_a_tensor_alpha_keeps_dtypes_and_gradients_and_is_checked() -> None:
    alpha = torch.tensor([0.5, 1.0, 2.0])
    p = BetaGaussian(torch.zeros(1), sigma=torch.eye(1), alpha=alpha)
    assert p.batch_shape == (3,)
    for value in (p.log_prob(torch.zeros(1)), p.entropy(), p.rsample(), p.cdf(torch.zeros(1)), p.variance):
        assert value.dtype == torch.float32
    f = lambda m, s: BetaGaussian(m, sigma=s, alpha=alpha.double()).log_prob(double(0.1))  # noqa: E731
    assert torch.autograd.gradcheck(f, (double(0.0).requires_grad_(), torch.eye(1).double().requires_grad_()))
    with pytest.raises(ValueError, match="alpha must not require gradients"):
        BetaGaussian(torch.zeros(1), sigma=torch.eye(1), alpha=torch.nn.Parameter(alpha))
    with pytest.raises(ValueError, match=r"alpha > -1 in 1 dimension.*got -2"):
        BetaGaussian(torch.zeros(1), sigma=torch.eye(1), alpha=torch.tensor([1.0, -2.0]))
    with pytest.raises(TypeError, match="floating-point"):
        BetaGaussian(torch.zeros(1), sigma=torch.eye(1), alpha=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="for all entries of the batch, or for none"):
        p.escort()


@pytest.mark.parametrize("alpha", [2.0, 1.6, 1.0])
def test_escorts_have_the_expected_basis_of_quadrature(alpha: float) -> None:
    for p, basis in ((line(alpha), GaussianBasis.line(4).double()), (plane(alpha), GaussianBasis.grid(2).double())):
        escort = p.escort()
        assert torch.allclose(escort.integrate(basis), escort.integrate(lambda t, b=basis: b(t)), rtol=1e-8)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.5])
def test_no_densities_have_no_integrals(alpha: float) -> None:
    p = BetaGaussian(torch.zeros(0, 1), sigma=torch.ones(0, 1, 1), alpha=alpha)
    assert p.integrate(torch.cos).shape == (0, 1)
    assert p.integrate(lambda t: t.sum(-1)).shape == (0,)
    assert generalized_covariance(p, lambda t: t, GaussianBasis.line(4)).shape == (0, 1, 4)


def test_batches_that_do_not_fit_are_told_by_name() -> None:
    loc, sigma = torch.zeros(3, 1), torch.ones(3, 1, 1)
    with pytest.raises(ValueError, match=r"loc .* and alpha .* must broadcast with each other, got .* and \(2,\)$"):
        BetaGaussian(loc, sigma=sigma, alpha=torch.tensor([1.0, 1.5]))
    with pytest.raises(ValueError, match=r"loc .*, sigma .* broadcast with each other, got \(3,\), \(2,\)"):
        BetaGaussian(loc, sigma=sigma[:2])
    assert BetaGaussian(loc, sigma=sigma[:1], alpha=torch.tensor([[1.0], [2.0]])).batch_shape == (2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_functions_with_jumps_are_integrated_in_either_precision(alpha: float, dtype: torch.dtype) -> None:
    p = BetaGaussian(torch.zeros(1, dtype=dtype), sigma=torch.eye(1, dtype=dtype), alpha=alpha)
    found = p.integrate(lambda t: (t > 0.3).to(t.dtype).squeeze(-1))
    half_width = 1.5 ** (1 / 3)  # of the truncated parabola (a² − t²)/2
    parabola = 0.5 - 0.15 * half_width**2 + 0.3**3 / 6
    expected = 0.5 * math.erfc(0.3 / math.sqrt(2)) if alpha == 1 else parabola
    assert found.dtype == dtype
    assert found.item() == pytest.approx(expected, abs=1e-4 if dtype == torch.float32 else 1e-9)
