"""Norm: the published facts, the parameter alpha and its derivatives, and independent solvers."""

import math

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from fenchel import Norm, normmax, sparsemax

ALPHAS = [1.001, 1.2, 2.0, 5.0, 50.0]


@pytest.mark.parametrize("alpha", [1.5, 2.0, 5.0, math.inf])
def test_normmax_solves_its_optimisation_problem(alpha: float) -> None:
    p = cvxpy.Variable(5)
    for seed in range(4):
        s = np.random.default_rng(seed).normal(size=5)
        order = "inf" if math.isinf(alpha) else alpha
        problem = cvxpy.Problem(cvxpy.Maximize(p @ s - cvxpy.norm(p, order)), [p >= 0, cvxpy.sum(p) == 1])
        value = problem.solve(solver=cvxpy.CLARABEL)
        ours = normmax(torch.from_numpy(s), alpha).numpy()
        assert ours @ s - np.linalg.norm(ours, alpha) >= value - 1e-7
        assert np.allclose(ours, p.value, atol=1e-4)


@given(seed=st.integers(0, 10_000), alpha=st.sampled_from(ALPHAS), scale=st.sampled_from([1e-2, 1.0, 20.0]))
def test_the_optimality_conditions_hold(seed: int, alpha: float, scale: float) -> None:
    """∇Ω(p) − s is constant on the support and no smaller off it."""
    scores = scale * torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    p = normmax(scores, alpha)
    on = p > 1e-300
    level = scores[on] - (p[on] / torch.linalg.vector_norm(p, alpha)) ** (alpha - 1)
    tolerance = 1e-12 * max(1.0, scale) * max(1, alpha)
    assert level.max() - level.min() < tolerance
    if not on.all() and alpha > 1.01:  # below, entries vanish by underflow
        assert (scores[~on] <= level.min() + tolerance).all()


def test_at_alpha_inf_it_is_uniform_on_the_support_of_sparsemax() -> None:
    scores = torch.randn(40, 9, dtype=torch.float64)
    support = (sparsemax(scores) > 0).double()
    assert torch.allclose(normmax(scores, math.inf), support / support.sum(-1, keepdim=True), atol=1e-15)


def test_at_alpha_inf_by_enumeration_of_supports() -> None:
    scores = torch.randn(40, 6, dtype=torch.float64)
    ordered, order = scores.sort(descending=True)
    values = ordered.cumsum(-1) / torch.arange(1, 7) - 1 / torch.arange(1.0, 7.0, dtype=torch.float64)
    best = values.argmax(-1)
    for row in range(40):
        p = torch.zeros(6, dtype=torch.float64)
        p[order[row, : best[row] + 1]] = 1 / (best[row].item() + 1)
        assert torch.allclose(normmax(scores[row], math.inf), p)
    assert torch.allclose(Norm(math.inf).max(scores), values.amax(-1) + 1)


def test_a_large_alpha_tends_to_the_uniform_one_and_a_small_one_to_argmax() -> None:
    scores = torch.tensor([1.0, 0.9, 0.5, -2.0], dtype=torch.float64)
    assert torch.allclose(normmax(scores, 1e6), normmax(scores, math.inf), atol=1e-4)
    assert torch.allclose(normmax(scores, 1.01), torch.tensor([1.0, 0.0, 0.0, 0.0]).double(), atol=1e-4)


@pytest.mark.parametrize("alpha", [1.2, 2.0, 5.0, 50.0, math.inf])
def test_a_lead_of_one_takes_all(alpha: float) -> None:
    assert Norm(alpha).margin == 1.0
    assert normmax(torch.tensor([1.0, 0.0, 0.0]), alpha).tolist() == [1, 0, 0]
    assert normmax(torch.tensor([0.9, 0.0], dtype=torch.float64), alpha)[1] > 0


def safe_scores(alpha: float) -> Tensor:
    while True:
        scores = torch.randn(3, 4, dtype=torch.float64)
        p = normmax(scores, alpha)
        nearby = [normmax(scores + 1e-2 * torch.randn_like(scores), alpha) > 0 for _ in range(8)]
        if p[p > 0].min() > 5e-2 and all(torch.equal(n, p > 0) for n in nearby):
            return scores


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1.3, 2.0, 3.5, 5.0, 50.0])
def test_derivatives_are_right_to_second_order_in_alpha_too(alpha: float) -> None:
    scores = safe_scores(alpha).requires_grad_()
    tensor = torch.full((3, 1), alpha, dtype=torch.float64, requires_grad=True)
    assert gradcheck(normmax, (scores, tensor), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(normmax, (scores, tensor), check_fwd_over_rev=True)
    target = torch.tensor([0, 1, 2])
    for f in (lambda s, a: Norm(a).max(s), lambda s, a: Norm(a).loss(s, target)):
        assert gradcheck(f, (scores, tensor), check_forward_ad=True)
        assert gradgradcheck(f, (scores, tensor), check_fwd_over_rev=True)


def test_a_tensor_alpha_gives_what_a_number_gives() -> None:
    alphas = torch.tensor([1.2, 2.0, 5.0, 50.0, math.inf], dtype=torch.float64)
    scores = torch.randn(5, 9, dtype=torch.float64)
    p = normmax(scores, alphas[:, None])
    assert all(torch.allclose(p[i], normmax(scores[i], float(a)), atol=1e-14) for i, a in enumerate(alphas))


@pytest.mark.parametrize("alpha", [1.2, 2.0, 5.0, math.inf])
def test_omega_is_the_textbook_formula(alpha: float) -> None:
    p = torch.distributions.Dirichlet(torch.ones(6, dtype=torch.float64)).sample((50,))
    expected = torch.linalg.vector_norm(p, alpha, dim=-1) - 1
    assert torch.allclose(Norm(alpha)(p), expected, atol=1e-14)
    assert torch.allclose(Norm(torch.tensor(alpha, dtype=torch.float64))(p), expected, atol=1e-14)


def test_omega_has_right_derivatives_at_the_boundary() -> None:
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    hessian = torch.func.hessian(Norm(2.0))(p)
    n = p / p.norm()
    assert torch.allclose(hessian, (torch.eye(3) - torch.outer(n, n)) / p.norm())


@pytest.mark.parametrize(
    ("alpha", "error"),
    [
        (1.0, ValueError),
        (0.5, ValueError),
        (math.nan, ValueError),
        ("2", TypeError),
        (torch.tensor([2.0, 1.0]), ValueError),
        (torch.tensor([1]), ValueError),
        (torch.tensor([True]), TypeError),
    ],
)
def test_a_bad_alpha_is_named(alpha: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="alpha"):
        normmax(torch.ones(2, 3), alpha)  # type: ignore[arg-type]
    with pytest.raises(error, match="alpha"):
        Norm(alpha)  # type: ignore[arg-type]


def test_gradients_of_wide_rows_in_single_precision() -> None:
    """p^α underflows long before the norm does."""
    gradients = []
    for dtype in (torch.float32, torch.float64):
        scores = torch.zeros(9000, dtype=dtype, requires_grad=True)
        gradients.append(torch.autograd.grad(normmax(scores, 10.0)[0], scores)[0].double())
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-4, atol=1e-9)


def test_second_derivatives_in_alpha_where_p_has_zeros() -> None:
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    alpha = torch.tensor(2.0, dtype=torch.float64)
    values = [torch.linalg.vector_norm(p, 2 + d) for d in (-1e-4, 0, 1e-4)]
    difference = (values[0] - 2 * values[1] + values[2]) / 1e-8
    for mode in (torch.func.jacrev, torch.func.jacfwd):
        assert mode(mode(lambda a: Norm(a)(p)))(alpha).item() == pytest.approx(difference.item(), rel=1e-5)
