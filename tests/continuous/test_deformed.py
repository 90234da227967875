"""Deformed exponentials and logarithms, and the canonical parameters of β-Gaussians."""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import integrate

from fenchel.continuous import BetaGaussian, beta_exp, beta_log

DOUBLE = torch.float64


@pytest.mark.parametrize("beta", [-1.0, 0.0, 0.5, 0.999999, 1.0, 1.000001, 1.5, 3.0])
def test_values_are_those_of_the_definitions(beta: float) -> None:
    x = torch.tensor([-3.0, -1.0, -0.2, 0.0, 0.3, 0.49], dtype=DOUBLE)
    u = torch.tensor([0.1, 0.7, 1.0, 2.0, 9.0], dtype=DOUBLE)
    with mpmath.workdps(40):
        c = 1 - mpmath.mpf(beta)
        base = [1 + c * v for v in x.tolist()]
        powers = [
            mpmath.exp(v) if c == 0 else mpmath.mpf(0) if b <= 0 else b ** (1 / c)
            for v, b in zip(x.tolist(), base, strict=True)
        ]
        logs = [mpmath.log(v) if c == 0 else (mpmath.mpf(v) ** c - 1) / c for v in u.tolist()]
    np.testing.assert_allclose(beta_exp(x, beta).numpy(), [float(v) for v in powers], rtol=1e-12)
    np.testing.assert_allclose(beta_log(u, beta).numpy(), [float(v) for v in logs], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(beta_exp(beta_log(u, beta), beta), u)


def test_the_ends_of_their_domains() -> None:
    assert beta_exp(torch.tensor([0.6, 2.0]), 3.0).tolist() == [math.inf, math.inf]
    assert beta_exp(torch.tensor([-2.0]), 0.0).tolist() == [0.0]
    assert beta_log(torch.tensor([0.0]), 0.5).tolist() == [-2.0]
    assert beta_log(torch.tensor([0.0]), 1.0).tolist() == [-math.inf]
    assert beta_log(torch.tensor([-1.0, -math.inf]), 0.0).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [-1.0, 0.0, 0.5, 0.999999, 1.5, 3.0])
def test_the_derivative_of_the_logarithm_is_a_power_also_at_zero_and_next_to_it(
    beta: float, dtype: torch.dtype
) -> None:
    x = torch.tensor([0.0, 1e-12, 1e-6, 1e-3, 0.5, 1.0, 30.0, 1e6], dtype=dtype, requires_grad=True)
    (found,) = torch.autograd.grad(beta_log(x, beta).sum(), x)
    with mpmath.workdps(40):
        wanted = [float(mpmath.mpf(v) ** -mpmath.mpf(beta)) for v in x.tolist()[1:]]
    at_zero = 0.0 if beta < 0 else 1.0 if beta == 0 else math.inf
    np.testing.assert_allclose(found.numpy(), [at_zero, *wanted], rtol=2e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 1.5])
def test_derivatives_agree_with_finite_differences(beta: float) -> None:
    x = torch.tensor([-3.0, -0.3, 0.4], dtype=DOUBLE, requires_grad=True)
    u = torch.tensor([0.3, 1.0, 2.0], dtype=DOUBLE, requires_grad=True)
    for function, at in ((beta_exp, x), (beta_log, u)):
        assert torch.autograd.gradcheck(lambda v: function(v, beta), (at,))  # noqa: B023
        assert torch.autograd.gradgradcheck(lambda v: function(v, beta), (at,))  # noqa: B023


def test_a_beta_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="beta must satisfy"):
        beta_exp(torch.zeros(1), math.inf)
    with pytest.raises(TypeError, match="x must be"):
        beta_log(torch.ones(1, dtype=torch.long), 0.5)


@pytest.mark.parametrize("alpha", [0.8, 1.0, 1.5, 2.0])
def test_canonical_parameters_give_the_density_of_their_score(alpha: float) -> None:
    theta1, theta2 = torch.tensor([3.0, -1.0], dtype=DOUBLE), torch.tensor([[-2.0, 0.5], [0.5, -1.0]], dtype=DOUBLE)
    p = BetaGaussian.from_canonical(theta1, theta2, alpha)
    t = torch.randn(6, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)) + p.loc
    score = t @ theta1 + ((t @ theta2) * t).sum(-1)
    height = 1 + (alpha - 1) * (score - p.log_partition)
    if alpha == 1:
        expected = (score - p.log_partition).exp()
    else:
        expected = torch.where(height > 0, height.clamp_min(1e-300) ** (1 / (alpha - 1)), 0.0)
    torch.testing.assert_close(p.log_prob(t).exp(), expected)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_the_gradient_of_the_log_partition_is_the_escort_mean(alpha: float) -> None:
    theta = torch.tensor([3.0, -2.0], dtype=DOUBLE, requires_grad=True)
    p = BetaGaussian.from_canonical(theta[:1], theta[1:].unsqueeze(-1), alpha)
    (found,) = torch.autograd.grad(p.log_partition, theta)
    a = float(p.log_partition.detach())

    def escort(t: float) -> float:
        x = 3 * t - 2 * t * t - a
        if alpha == 1:
            return math.exp(x)
        base = 1 + (alpha - 1) * x
        return base ** ((2 - alpha) / (alpha - 1)) if base > 0 else 0.0

    reach = 8.0 if alpha == 1 else float(p.support_radius.detach() * p.scale_tril.detach().squeeze())
    ends = 0.75 - reach, 0.75 + reach
    total = integrate.quad(escort, *ends)[0]
    means = [integrate.quad(lambda t, k=k: t**k * escort(t), *ends)[0] / total for k in (1, 2)]  # type: ignore[misc]
    np.testing.assert_allclose(found.numpy(), means, atol=1e-7)


def test_canonical_parameters_of_a_convex_score_are_refused() -> None:
    with pytest.raises(ValueError, match="-theta2"):
        BetaGaussian.from_canonical(torch.zeros(1), torch.ones(1, 1))


def test_a_tensor_of_alphas_has_the_log_partition_of_each() -> None:
    theta1, theta2 = torch.tensor([[3.0], [3.0]], dtype=DOUBLE), torch.full((2, 1, 1), -2.0, dtype=DOUBLE)
    both = BetaGaussian.from_canonical(theta1, theta2, torch.tensor([1.0, 2.0])).log_partition
    each = [BetaGaussian.from_canonical(theta1[0], theta2[0], alpha).log_partition for alpha in (1.0, 2.0)]
    torch.testing.assert_close(both, torch.stack(each))
