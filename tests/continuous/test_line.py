"""Triangular densities, and those of any convex g, against closed forms and quadrature."""

import math

import numpy as np
import pytest
import scipy.stats as st
import torch
from scipy import integrate
from scipy.integrate import tanhsinh
from torch import Tensor

from fenchel.continuous import BetaGaussian, GaussianBasis, LocationScale, Triangular


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


PEER = st.triang(0.5, loc=0.5 - math.sqrt(0.3), scale=2 * math.sqrt(0.3))


def test_the_triangular_density_is_scipys() -> None:
    p = Triangular(double(0.5), double(0.3))
    t = torch.linspace(-0.5, 1.5, 17, dtype=torch.float64)
    np.testing.assert_allclose(p.log_prob(t).exp(), PEER.pdf(t), atol=1e-14)
    np.testing.assert_allclose(p.cdf(t), PEER.cdf(t), atol=1e-14)
    q = torch.linspace(0, 1, 9, dtype=torch.float64)
    np.testing.assert_allclose(p.icdf(q), PEER.ppf(q), atol=1e-14)
    assert p.variance.item() == pytest.approx(PEER.var(), rel=1e-12)
    assert p.entropy().item() == pytest.approx(PEER.entropy(), rel=1e-12)
    assert (p.log_prob(t)[(t - 0.5).abs() > math.sqrt(0.3)] == -math.inf).all()


def test_the_triangular_density_is_sparsemax_of_its_score() -> None:
    import fenchel

    p = Triangular(double(0.5), double(0.3))
    t = torch.linspace(-1, 2, 3001, dtype=torch.float64)
    h = 1e-3
    cells = fenchel.sparsemax(-(t - 0.5).abs() / 0.3 * h)
    assert torch.allclose(cells / h, p.log_prob(t).exp(), atol=1e-5)
    assert p.tsallis_entropy().item() == pytest.approx(0.5 * (1 - (cells.square().sum() / h).item()), abs=1e-5)


@pytest.mark.parametrize(
    "p",
    [
        Triangular(double(0.5), double(0.3)),
        LocationScale(double(0.5), double(0.3), lambda s: s**3 / 6),
        LocationScale(double(0.5), double(2.0), torch.cosh),
        LocationScale(double(0.5), double(0.1), lambda s: s.exp() + s**1.5),
    ],
    ids=lambda p: type(p).__name__,
)
def test_moments_entropies_and_samples_are_those_of_the_density(p: Triangular | LocationScale) -> None:
    radius = p.support_radius.item()

    def integral(function: object) -> float:
        def value(t: np.ndarray) -> np.ndarray:
            log = p.log_prob(torch.from_numpy(t)).numpy().reshape(t.shape)
            with np.errstate(all="ignore"):
                return np.where(log > -math.inf, np.exp(log) * function(t, log), 0.0)

        return sum(tanhsinh(value, *ends).integral.item() for ends in ((0.5 - radius, 0.5), (0.5, 0.5 + radius)))

    assert integral(lambda t, log: 1.0) == pytest.approx(1, abs=1e-9)
    assert integral(lambda t, log: (t - 0.5) ** 2) == pytest.approx(p.variance.item(), rel=1e-8)
    assert integral(lambda t, log: -log) == pytest.approx(p.entropy().item(), abs=1e-8)
    assert 0.5 * (1 - integral(lambda t, log: np.exp(log))) == pytest.approx(p.tsallis_entropy().item(), abs=1e-8)
    draws = p.sample((3000,))
    assert p.support.check(draws).all()
    assert st.kstest(p.cdf(draws).squeeze(-1).numpy(), "uniform").pvalue > 1e-3
    q = double(0.1, 0.4, 0.8).requires_grad_()
    assert torch.allclose(p.cdf(p.icdf(q)), q, atol=1e-10)
    assert torch.autograd.gradcheck(p.icdf, q)
    assert torch.autograd.gradgradcheck(p.icdf, q)
    t = (0.5 + radius * double(-0.7, 0.2, 0.5)).requires_grad_()
    assert torch.autograd.gradcheck(p.log_prob, t)
    assert torch.autograd.gradcheck(p.cdf, t)
    assert torch.autograd.grad(p.cdf(at := double(0.5).requires_grad_()), at)[0].item() == pytest.approx(
        p.log_prob(double(0.5)).exp().item()
    )


def test_any_g_has_the_truncated_parabola_and_the_triangle_among_its_kin() -> None:
    t = torch.linspace(-2, 2, 9, dtype=torch.float64)
    cubic = LocationScale(double(0.1), double(0.7), lambda s: s**3 / 6)
    # f = −(t−μ)²/(2σ³): the parabola's own σ² is σ³ here.
    parabola = BetaGaussian(double(0.1), sigma=double(0.7**3).unsqueeze(-1))
    assert torch.allclose(cubic.log_prob(t), parabola.log_prob(t.unsqueeze(-1)), atol=1e-12)
    square = LocationScale(double(0.1), double(0.7), lambda s: s.square() / 2)
    assert torch.allclose(square.log_prob(t), Triangular(double(0.1), double(0.49)).log_prob(t), atol=1e-12)


def test_location_and_scale_have_gradients() -> None:
    t = double(0.1, 0.4)
    for make in (Triangular, lambda m, s: LocationScale(m, s, torch.cosh)):
        loc, scale = double(0.2).requires_grad_(), double(0.9).requires_grad_()
        assert torch.autograd.gradcheck(lambda m, s, make=make: make(m, s).log_prob(t), (loc, scale))
        assert torch.autograd.gradcheck(lambda m, s, make=make: make(m, s).icdf(t), (loc, scale))
        assert make(loc, scale).rsample((3,)).requires_grad


def test_batches_and_errors() -> None:
    p = LocationScale(torch.zeros(3, 1), torch.ones(2), torch.cosh)
    assert p.batch_shape == (3, 2)
    assert p.expand((4, 3, 2)).rsample().shape == (4, 3, 2)
    assert Triangular(0.0, 1.0).expand((5,)).log_prob(torch.zeros(5)).shape == (5,)
    with pytest.raises(ValueError, match="scale must satisfy 0 < scale < inf, got"):
        Triangular(torch.zeros(2), torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match="g must be convex"):
        LocationScale(torch.zeros(2), torch.ones(2), lambda s: s)
    with pytest.raises(ValueError, match="g must not depend"):
        LocationScale(torch.zeros(2), torch.ones(2), lambda s: torch.ones((), requires_grad=True) * s**2)
    with pytest.raises(ValueError, match=r"probabilities in \[0, 1\]"):
        p.icdf(torch.tensor(1.5))


@pytest.mark.parametrize("shape", ["triangular", "quartic"])
def test_expected_basis_functions_are_integrals(shape: str) -> None:
    loc, scale = (torch.tensor(v, dtype=torch.float64) for v in ([0.4, 0.7], [0.04, 0.3]))
    p = Triangular(loc, scale) if shape == "triangular" else LocationScale(loc, scale, lambda s: s**4 / 4)
    basis = GaussianBasis.line(3, widths=(0.02,)).double()
    found = p.expectation(basis)
    for row in range(2):
        reach, mean = float(p.support_radius[row]), float(loc[row])
        for j, center in enumerate((0.0, 0.5, 1.0)):

            def value(t: float, j: int = j, row: int = row) -> float:
                at = torch.tensor([t, t], dtype=torch.float64)
                return float(p.log_prob(at)[row].exp() * basis(at[:1, None])[0, j])

            points = [x for x in (mean, center - 0.06, center, center + 0.06) if abs(x - mean) < reach]
            expected = integrate.quad(value, mean - reach, mean + reach, points=points, limit=100)[0]
            assert float(found[row, j]) == pytest.approx(expected, abs=1e-8)


def test_derivatives_of_expectations_agree_with_finite_differences() -> None:
    basis = GaussianBasis.line(3, widths=(0.2,)).double()
    inputs = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.4, 0.05)]
    for make in (Triangular, lambda loc, scale: LocationScale(loc, scale, lambda s: s**3 / 6)):
        assert torch.autograd.gradcheck(lambda *x: make(*x).expectation(basis), inputs)  # noqa: B023
