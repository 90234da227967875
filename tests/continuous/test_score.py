"""Densities of any score: SciPy's quadrature and root finding, β-Gaussians, and finite differences."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, optimize
from torch import Tensor, nn

from fenchel.continuous import BetaGaussian, GaussianBasis, ScoreDensity

DOUBLE = torch.float64
Plain = Callable[[float], float]


def waves(t: Tensor) -> Tensor:
    return 3 * torch.sin(17 * t) + 2 * torch.cos(5 * t)


def plain_waves(t: float) -> float:
    return 3 * math.sin(17 * t) + 2 * math.cos(5 * t)


def power(x: float, alpha: float) -> float:
    """exp_{2−α}(x)."""
    if alpha == 1:
        return math.exp(x)
    base = 1 + (alpha - 1) * x
    return base ** (1 / (alpha - 1)) if base > 0 else 0.0


def solved(f: Plain, low: float, high: float, alpha: float) -> tuple[float, list[tuple[float, float]]]:
    """A and the support, from a fine grid, Brent's method and SciPy's quadrature."""
    grid = np.linspace(low, high, 4001)
    values = np.array([f(t) for t in grid])

    def support(a: float) -> list[tuple[float, float]]:
        if alpha <= 1:
            return [(low, high)]
        height = lambda t: 1 + (alpha - 1) * (f(t) - a)  # noqa: E731
        inside = 1 + (alpha - 1) * (values - a) > 0
        ends = [low] if inside[0] else []
        for k in np.flatnonzero(inside[1:] != inside[:-1]):
            ends.append(optimize.brentq(height, grid[k], grid[k + 1], xtol=1e-15))
        if inside[-1]:
            ends.append(high)
        return list(zip(ends[::2], ends[1::2], strict=True))

    def excess(a: float) -> float:
        parts = (
            integrate.quad(lambda t: power(f(t) - a, alpha), *each, epsabs=1e-13, limit=400) for each in support(a)
        )
        return sum(part[0] for part in parts) - 1

    top = float(values.max())
    lower, upper = top - 30, top + 5
    if alpha < 1:
        lower = top + 1 / (alpha - 1) + 1e-3
    a = optimize.brentq(excess, lower, upper, xtol=1e-13)
    return a, support(a)


@pytest.mark.parametrize("alpha", [0.7, 1.0, 1.3, 1.5, 2.0, 2.5])
def test_a_score_with_many_modes_is_normalised_and_has_its_intervals(alpha: float) -> None:
    p = ScoreDensity(waves, -0.5, 1.5, alpha)
    a, support = solved(plain_waves, -0.5, 1.5, alpha)
    assert float(p.log_partition) == pytest.approx(a, abs=1e-9)
    np.testing.assert_allclose(p.support.numpy(), np.array(support), atol=1e-8)
    t = torch.linspace(-0.6, 1.6, 23, dtype=DOUBLE)
    expected = [power(plain_waves(x) - a, alpha) if -0.5 <= x <= 1.5 else 0.0 for x in t.tolist()]
    np.testing.assert_allclose(p.log_prob(t).exp().numpy(), expected, atol=1e-8)
    quad = lambda g: sum(integrate.quad(g, *each, limit=400)[0] for each in support)  # noqa: E731
    density = lambda x: power(plain_waves(x) - a, alpha)  # noqa: E731
    mean = quad(lambda x: x * density(x))
    assert float(p.mean) == pytest.approx(mean, abs=1e-8)
    assert float(p.variance) == pytest.approx(quad(lambda x: (x - mean) ** 2 * density(x)), abs=1e-8)
    entropy = quad(lambda x: -density(x) * math.log(density(x)) if density(x) > 0 else 0.0)
    assert float(p.entropy()) == pytest.approx(entropy, abs=1e-7)
    if alpha != 1:
        tsallis = (1 - quad(lambda x: density(x) ** alpha)) / (alpha * (alpha - 1))
        assert float(p.tsallis_entropy()) == pytest.approx(tsallis, abs=1e-7)
    else:
        assert float(p.tsallis_entropy()) == pytest.approx(entropy, abs=1e-7)


@pytest.mark.parametrize("sigma", [1e-2, 1e-5, 1e-9, 1e-14])
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 3.0])
def test_narrow_quadratic_scores_are_beta_gaussians(alpha: float, sigma: float) -> None:
    if alpha == 1 and sigma == 1e-2:
        sigma = 1e-3  # the Gaussian would be cut at the ends
    loc = 0.3217
    p = ScoreDensity(lambda t: -0.5 * (t - loc) ** 2 / sigma, alpha=alpha)
    q = BetaGaussian(torch.tensor([loc], dtype=DOUBLE), sigma=torch.tensor([[sigma]], dtype=DOUBLE), alpha=alpha)
    t = loc + sigma**0.5 * torch.tensor([0.0, 0.2, 0.5], dtype=DOUBLE)
    torch.testing.assert_close(p.log_prob(t), q.log_prob(t.unsqueeze(-1)), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(p.entropy(), q.entropy(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(p.variance, q.variance.squeeze(-1), atol=0, rtol=1e-5)


def test_a_batch_has_rows_with_different_numbers_of_intervals() -> None:
    speed = torch.tensor([[3.0], [11.0], [25.0]], dtype=DOUBLE)
    p = ScoreDensity(lambda t: 4 * torch.sin(speed * t))
    assert p.batch_shape == (3,)
    assert p.support.shape == (3, 4, 2)
    for row, s in enumerate(speed.flatten().tolist()):
        a, support = solved(lambda t, s=s: 4 * math.sin(s * t), 0, 1, 2.0)  # type: ignore[misc]
        assert float(p.log_partition[row]) == pytest.approx(a, abs=1e-9)
        found = p.support[row]
        assert int((~found[:, 0].isnan()).sum()) == len(support)
        np.testing.assert_allclose(found[: len(support)].numpy(), support, atol=1e-8)
    alone = ScoreDensity(lambda t: 4 * torch.sin(11.0 * t))
    torch.testing.assert_close(p.log_prob(torch.rand(5, 3, dtype=DOUBLE))[:, 1].shape, torch.Size([5]))
    torch.testing.assert_close(p.entropy()[1], alone.entropy())


def test_flat_scores_give_the_uniform_density() -> None:
    p = ScoreDensity(lambda t: torch.zeros_like(t) + 7, 1.0, 3.0, 2.0)
    torch.testing.assert_close(p.support, torch.tensor([[1.0, 3.0]], dtype=DOUBLE))
    torch.testing.assert_close(p.log_prob(torch.tensor([1.5, 2.5])), torch.full((2,), math.log(0.5)))


def test_jumps_and_scores_of_minus_infinity_bound_the_support() -> None:
    def score(t: Tensor) -> Tensor:
        return torch.where((t < 0.2) | ((t > 0.4) & (t < 0.7)), 0.0, -math.inf)

    for alpha in (1.0, 2.0):
        p = ScoreDensity(score, alpha=alpha)
        torch.testing.assert_close(p.log_prob(torch.tensor([0.1, 0.3, 0.5])).exp(), torch.tensor([2.0, 0.0, 2.0]))
    torch.testing.assert_close(p.support, torch.tensor([[0.0, 0.2], [0.4, 0.7]], dtype=DOUBLE), atol=1e-10, rtol=0)


def test_a_row_with_nan_or_infinity_is_nan_and_touches_no_other() -> None:
    level = torch.tensor([[1.0], [math.nan], [math.inf], [-math.inf]], dtype=DOUBLE)
    p = ScoreDensity(lambda t: level - (t - 0.5) ** 2)
    assert p.log_partition.isnan().tolist() == [False, True, True, True]
    assert p.mean.isnan().tolist() == [False, True, True, True]
    assert p.support[1:].isnan().all()
    torch.testing.assert_close(p.mean[0], torch.tensor(0.5, dtype=DOUBLE))


@pytest.mark.parametrize("alpha", [0.7, 1.0, 2.0])
def test_rows_after_one_with_nan_have_quantiles_and_samples(alpha: float) -> None:
    level = torch.tensor([[math.nan], [1.0], [math.inf], [0.0]], dtype=DOUBLE)
    p = ScoreDensity(lambda t: level - (t - 0.5) ** 2, alpha=alpha)
    half = torch.full((4,), 0.5, dtype=DOUBLE)
    for found in (p.cdf(half), p.icdf(half)):
        assert found.isnan().tolist() == [True, False, True, False]
        torch.testing.assert_close(found[1::2], half[1::2])
    assert p.sample().isnan().tolist() == [True, False, True, False]


def test_a_large_batch_in_single_precision_has_the_cdf_of_each_row() -> None:
    centers = torch.linspace(0.2, 0.8, 1500).unsqueeze(-1)
    p = ScoreDensity(lambda t: -2e3 * (t - centers) ** 2, dtype=torch.float32)
    middles = centers.squeeze(-1)
    torch.testing.assert_close(p.cdf(middles), torch.full((1500,), 0.5), atol=2e-5, rtol=0)
    torch.testing.assert_close(p.icdf(torch.full((1500,), 0.5)), middles, atol=2e-5, rtol=0)


# -- expectations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_expected_basis_functions_are_integrals(alpha: float) -> None:
    basis = GaussianBasis.line(4, widths=(0.02, 0.3)).double()
    found = ScoreDensity(waves, alpha=alpha).expectation(basis)
    a, support = solved(plain_waves, 0, 1, alpha)
    for j, (center, width) in enumerate(
        zip(basis.centers.flatten().tolist(), basis.covariances.sqrt().flatten().tolist(), strict=True)
    ):
        value = lambda t: power(plain_waves(t) - a, alpha) * math.exp(-0.5 * ((t - center) / width) ** 2)  # noqa: B023, E731
        total = 0.0
        for low, high in support:
            points = [x for x in (center - 3 * width, center, center + 3 * width) if low < x < high]
            total += integrate.quad(value, low, high, points=points or None, limit=400)[0]
        assert float(found[j]) == pytest.approx(total / (width * math.sqrt(2 * math.pi)), abs=1e-8)


def test_expectations_agree_with_the_closed_form_of_beta_gaussians() -> None:
    basis = GaussianBasis.line(16, widths=(0.003, 0.1)).double()
    loc, sigma = torch.tensor([[0.4], [0.55]], dtype=DOUBLE), torch.tensor([[[0.02]], [[0.001]]], dtype=DOUBLE)
    q = BetaGaussian(loc, sigma=sigma, alpha=2.0)
    p = ScoreDensity(lambda t: -0.5 * (t - loc) ** 2 / sigma.squeeze(-1))
    torch.testing.assert_close(p.expectation(basis), q.expectation(basis), atol=1e-9, rtol=1e-8)


def test_any_module_can_be_integrated() -> None:
    class Powers(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            return torch.cat([t, t**2], -1)

    p = ScoreDensity(waves)
    found = p.expectation(Powers())
    torch.testing.assert_close(found, torch.stack([p.mean, p.variance + p.mean**2]), atol=1e-9, rtol=1e-9)
    with pytest.raises(ValueError, match="one dimension"):
        p.expectation(GaussianBasis.grid(2))


# -- distribution function and samples -------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 2.5])
def test_the_cdf_is_the_integral_and_the_quantiles_are_its_inverse(alpha: float) -> None:
    p = ScoreDensity(waves, alpha=alpha)
    a, support = solved(plain_waves, 0, 1, alpha)
    t = torch.tensor([-0.1, 0.02, 0.11, 0.3, 0.5, 0.52, 0.8, 0.97, 1.2], dtype=DOUBLE)
    expected = [
        sum(
            integrate.quad(lambda x: power(plain_waves(x) - a, alpha), low, min(high, v), limit=400)[0]
            for low, high in support
            if low < v
        )
        for v in t.tolist()
    ]
    np.testing.assert_allclose(p.cdf(t).numpy(), expected, atol=1e-8)
    q = torch.tensor([0.0, 0.01, 0.3, 0.5, 0.77, 0.999, 1.0], dtype=DOUBLE)
    torch.testing.assert_close(p.cdf(p.icdf(q)), q, atol=1e-9, rtol=0)


def test_samples_lie_in_the_support_and_have_the_moments() -> None:
    torch.manual_seed(0)
    speed = torch.tensor([[11.0], [25.0]], dtype=DOUBLE)
    p = ScoreDensity(lambda t: 4 * torch.sin(speed * t))
    x = p.rsample((1000,))
    assert x.shape == (1000, 2)
    assert bool((p.log_prob(x) > -math.inf).all())
    assert bool(((x.mean(0) - p.mean).abs() < 4 * (p.variance / 1000).sqrt()).all())


# -- derivatives -----------------------------------------------------------------------------------------------------


def bumps(centers: Tensor, heights: Tensor) -> Callable[[Tensor], Tensor]:
    """Two bumps per row; smooth, and the support has one or two intervals."""

    def score(t: Tensor) -> Tensor:
        distance = t.unsqueeze(-1) - centers.unsqueeze(-2)
        return (6 * heights.unsqueeze(-2) * torch.exp(-30 * distance**2)).sum(-1)

    return score


RESULTS: dict[str, Callable[[ScoreDensity], Any]] = {
    "log_partition": lambda p: p.log_partition,
    "log_prob": lambda p: p.log_prob(torch.tensor([[0.26, 0.31], [0.68, 0.5]], dtype=DOUBLE)).exp(),
    "entropy": lambda p: p.entropy(),
    "tsallis_entropy": lambda p: p.tsallis_entropy(),
    "expectation": lambda p: p.expectation(GaussianBasis.line(3, widths=(0.2,)).double()),
    "variance": lambda p: p.variance,
    "support": lambda p: torch.where(p.support.isnan(), 0.0, p.support),
    "icdf": lambda p: p.icdf(torch.tensor([[0.1, 0.3], [0.8, 0.9]], dtype=DOUBLE)),
    "cdf": lambda p: p.cdf(torch.tensor([[0.26, 0.31], [0.68, 0.5]], dtype=DOUBLE)),
}


def all_results(shift: Tensor, alpha: float) -> tuple[Tensor, ...]:
    """Every result of densities whose bumps are moved and scaled."""
    centers = torch.tensor([[0.25, 0.7], [0.3, 0.55]], dtype=DOUBLE) + shift[0]
    heights = torch.tensor([[1.0, 1.2], [0.8, 1.1]], dtype=DOUBLE) * (1 + shift[1])
    p = ScoreDensity(bumps(centers, heights), alpha=alpha)
    return tuple(result(p) for name, result in RESULTS.items() if alpha > 1 or name != "support")


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_derivatives_agree_with_finite_differences(alpha: float) -> None:
    shift = torch.tensor([0.01, 0.02], dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: all_results(x, alpha), (shift,), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_second_derivatives_agree_with_finite_differences(alpha: float) -> None:
    shift = torch.tensor([0.01, 0.02], dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda x: tuple(each.sum() for each in all_results(x, alpha)), (shift,), atol=1e-4, rtol=1e-3
    )


def test_the_gradient_of_the_log_partition_is_an_escort_mean() -> None:
    theta = torch.tensor([3.0, -4.0], dtype=DOUBLE, requires_grad=True)
    p = ScoreDensity(lambda t: theta[0] * t + theta[1] * t**2, alpha=1.5)
    (found,) = torch.autograd.grad(p.log_partition, theta)
    a, [(low, high)] = solved(lambda t: 3 * t - 4 * t * t, 0, 1, 1.5)
    weight = lambda t: power(3 * t - 4 * t * t - a, 1.5) ** 0.5  # noqa: E731
    total = integrate.quad(weight, low, high)[0]
    means = [integrate.quad(lambda t, k=k: t**k * weight(t), low, high)[0] / total for k in (1, 2)]  # type: ignore[misc]
    np.testing.assert_allclose(found.numpy(), means, atol=1e-8)


def test_the_log_partition_obeys_the_papers_formula() -> None:
    alpha = 1.5
    p = ScoreDensity(waves, alpha=alpha)
    a, support = solved(plain_waves, 0, 1, alpha)
    escort = lambda t: power(plain_waves(t) - a, alpha) ** (2 - alpha)  # noqa: E731
    total = sum(integrate.quad(escort, *each, limit=200)[0] for each in support)
    mean = sum(integrate.quad(lambda t: escort(t) * plain_waves(t), *each, limit=200)[0] for each in support)
    expected = (1 / (1 - alpha) + mean) / total - 1 / (1 - alpha)  # the definition below equation 7
    assert float(p.log_partition) == pytest.approx(expected, abs=1e-7)


# -- the rest --------------------------------------------------------------------------------------------------------


def test_a_network_in_single_precision_can_be_the_score() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    p = ScoreDensity(lambda t: 5 * network(t.unsqueeze(-1)).squeeze(-1), dtype=torch.float32)
    twin = copy.deepcopy(network).double()
    exact = ScoreDensity(lambda t: 5 * twin(t.unsqueeze(-1)).squeeze(-1))
    torch.testing.assert_close(p.mean, exact.mean.float(), atol=1e-4, rtol=1e-4)
    p.entropy().backward()  # type: ignore[no-untyped-call]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="score must be callable, a torch function of points, got Tensor"):
        ScoreDensity(torch.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="low must be less than high"):
        ScoreDensity(waves, 1.0, 1.0)
    with pytest.raises(ValueError, match="high must satisfy"):
        ScoreDensity(waves, 0.0, math.inf)
    with pytest.raises(ValueError, match="alpha must satisfy"):
        ScoreDensity(waves, alpha=0.0)
    with pytest.raises(ValueError, match=r"score must return floats \(…, n\)"):
        ScoreDensity(lambda t: t.sum())
    with pytest.raises(ValueError, match="value"):
        ScoreDensity(waves).icdf(torch.tensor([1.5]))
    with pytest.raises(ValueError, match="dtype must be"):
        ScoreDensity(waves, dtype=torch.float16)


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_a_single_density_takes_a_single_value(alpha: float) -> None:
    p = ScoreDensity(lambda t: -(t**2), alpha=alpha)
    value = p.log_prob(torch.tensor(0.5))
    assert value.shape == ()
    assert math.isclose(float(value), float(p.log_prob(torch.tensor([0.5, 0.6]))[0]), rel_tol=1e-6)
    total, _ = integrate.quad(lambda t: float(p.log_prob(torch.tensor(t, dtype=torch.float64)).exp()), 0, 1)
    assert math.isclose(total, 1.0, rel_tol=1e-6)
    assert p.log_prob(p.sample()).isfinite()
