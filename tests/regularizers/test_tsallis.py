"""Tsallis: the published facts, the parameter alpha and its derivatives, and independent solvers."""

import math
from collections.abc import Callable

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jacfwd, jacrev

import fenchel
from fenchel import Gini, Hard, Shannon, Tsallis, entmax

ALPHAS = [0.2, 0.9, 1 - 1e-9, 1.0, 1 + 1e-9, 1.01, 1.25, 1.5, 2.0, 2.5, 3.0, 10.0, 50.0]


def test_alpha_1_is_torch_softmax_and_alpha_2_is_the_projection() -> None:
    scores = torch.randn(20, 9, dtype=torch.float64)
    assert torch.equal(entmax(scores, 1.0), scores.softmax(-1))
    p = cvxpy.Variable(9)
    for row in scores[:5].numpy():
        problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(p - row)), [p >= 0, cvxpy.sum(p) == 1])
        problem.solve(solver=cvxpy.CLARABEL, tol_gap_abs=1e-14, tol_gap_rel=1e-14, tol_feas=1e-14)
        assert np.allclose(entmax(torch.from_numpy(row), 2.0), p.value, atol=1e-7)


def test_sparsemax_by_the_sorting_formula() -> None:
    scores = torch.randn(50, 9, dtype=torch.float64)
    for z, p in zip(scores, fenchel.sparsemax(scores), strict=True):
        ordered = z.sort(descending=True).values
        size = max(k for k in range(1, 10) if 1 + k * ordered[k - 1] > ordered[:k].sum())
        tau = (ordered[:size].sum() - 1) / size
        assert torch.allclose(p, (z - tau).clamp_min(0), atol=1e-15)


def test_entmax_15_by_the_quadratic_formula() -> None:
    """002's Algorithm 2, with Eq. 36 as corrected."""
    scores = torch.randn(50, 9, dtype=torch.float64)
    for z, p in zip(scores / 2, entmax(scores, 1.5), strict=True):
        ordered = z.sort(descending=True).values
        for size in range(1, 10):
            mean, spread = ordered[:size].mean(), ordered[:size].var(correction=0) * size
            if spread > 1:
                continue
            tau = mean - ((1 - spread) / size).sqrt()
            if tau <= ordered[size - 1] and (size == 9 or ordered[size] <= tau):
                assert torch.allclose(p, (z - tau).clamp_min(0) ** 2, atol=1e-14)
                break
        else:
            pytest.fail("no support satisfies the formula")


@pytest.mark.parametrize("alpha", [0.5, 1.2, 1.5, 1.8, 3.0])
def test_entmax_solves_its_optimisation_problem(alpha: float) -> None:
    """scipy, from the definition alone: minimize Ω(p) − ⟨p, s⟩ over the simplex."""
    for seed in range(3):
        s = np.random.default_rng(seed).normal(size=4)
        result = optimize.minimize(
            lambda p, s=s: (np.sum(np.maximum(p, 1e-15) ** alpha) - 1) / (alpha * (alpha - 1)) - p @ s,
            np.full(4, 0.25),
            bounds=[(0, 1)] * 4,
            constraints={"type": "eq", "fun": lambda p: p.sum() - 1},
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        p = entmax(torch.from_numpy(s), alpha).numpy()
        ours = (np.sum(p**alpha) - 1) / (alpha * (alpha - 1)) - p @ s
        assert ours <= result.fun + 1e-9
        assert np.allclose(p, result.x, atol=2e-4)


@pytest.mark.parametrize("alpha", [1.01, 1.25, 1.5, 2.0, 3.0, 4.0])
def test_two_scores_saturate_at_one_over_alpha_minus_one(alpha: float) -> None:
    """002, figure 3."""
    edge = 1 / (alpha - 1)
    scores = torch.tensor([[edge * 1.000001, 0.0], [-edge * 1.000001, 0.0], [edge / 3, 0.0]], dtype=torch.float64)
    p = entmax(scores, alpha)
    assert p[0].tolist() == [1, 0]
    assert p[1].tolist() == [0, 1]
    assert p[2, 1] > 0
    assert Tsallis(alpha).margin == pytest.approx(edge)


@pytest.mark.parametrize("alpha", [1.0, 1.25, 1.5, 2.0, 3.0])
def test_the_jacobian_is_proposition_1_of_peters_et_al(alpha: float) -> None:
    scores = torch.randn(7, dtype=torch.float64)
    p = entmax(scores, alpha)
    s = torch.where(p > 0, p ** (2 - alpha), 0.0)
    expected = torch.diag(s) - torch.outer(s, s) / s.sum()
    assert torch.allclose(torch.func.jacrev(lambda z: entmax(z, alpha))(scores), expected, atol=1e-12)


@given(seed=st.integers(0, 10_000), alpha=st.sampled_from(ALPHAS), scale=st.sampled_from([1e-3, 1.0, 30.0]))
def test_the_optimality_conditions_hold(seed: int, alpha: float, scale: float) -> None:
    """∇Ω(p) − s is constant on the support and no smaller off it."""
    scores = scale * torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    p = entmax(scores, alpha)
    on = p > 1e-300
    gradient = p[on].log() if alpha == 1 else torch.expm1((alpha - 1) * p[on].log()) / (alpha - 1)
    level = scores[on] - gradient
    tolerance = 1e-11 * max(1.0, scores.abs().max().item())
    assert level.max() - level.min() < tolerance
    if alpha > 1 and not on.all():
        assert (scores[~on] + 1 / (alpha - 1) <= level.min() + tolerance).all()


def test_entmax_is_continuous_through_alpha_1() -> None:
    scores = torch.randn(30, 8, dtype=torch.float64)
    softmax = scores.softmax(-1)
    for delta in (1e-12, 1e-9, 1e-6):
        # |∂p/∂α| ≤ ½ log²p · p, which is below 0.3
        for alpha in (1 - delta, 1 + delta):
            assert (entmax(scores, alpha) - softmax).abs().max() < delta + 1e-15
            tensor = torch.tensor(alpha, dtype=torch.float64)
            assert (entmax(scores, tensor) - softmax).abs().max() < delta + 1e-15


def test_alpha_inf_is_argmax_for_numbers_and_tensors() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0], [2.0, 1.0, 0.0]])
    expected = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    assert torch.equal(entmax(scores, math.inf), expected)
    alpha = torch.tensor([[math.inf], [2.0]], requires_grad=True)
    p = entmax(scores, alpha)
    assert torch.equal(p, expected)
    p.sum().backward()
    assert alpha.grad is not None
    assert alpha.grad.isfinite().all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_tensor_alpha_gives_what_a_number_gives(alpha: float) -> None:
    scores = torch.randn(5, 20, dtype=torch.float64)
    expected = entmax(scores, alpha)
    for shape in ((), (1,), (5, 1), (1, 1)):
        assert torch.allclose(entmax(scores, torch.full(shape, alpha, dtype=torch.float64)), expected, atol=1e-14)


def test_each_row_and_each_head_may_have_its_own_alpha() -> None:
    alphas = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 50.0, math.inf], dtype=torch.float64)
    scores = torch.randn(7, 9, dtype=torch.float64)
    p = entmax(scores, alphas[:, None])
    assert all(torch.allclose(p[i], entmax(scores[i], float(a)), atol=1e-14) for i, a in enumerate(alphas))
    heads = torch.randn(2, 7, 3, 5, dtype=torch.float64)
    p = entmax(heads, alphas.reshape(7, 1, 1))
    assert all(torch.allclose(p[:, i], entmax(heads[:, i], float(a)), atol=1e-14) for i, a in enumerate(alphas))
    along_0 = entmax(scores.T, alphas[None, :], dim=0)
    assert torch.equal(along_0.T, entmax(scores, alphas[:, None]))


def safe_scores(alpha: float) -> Tensor:
    """Scores whose solution is not next to a kink, where finite differences mean nothing."""
    while True:
        scores = torch.randn(3, 4, dtype=torch.float64)
        p = entmax(scores, alpha)
        nearby = [entmax(scores, alpha + d) > 0 for d in (-2e-3, 2e-3)]
        if p[p > 0].min() > 2e-2 and all(torch.equal(n, p > 0) for n in nearby):
            return scores


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.6, 1 - 1e-9, 1.0, 1 + 1e-9, 1.02, 1.5, 2.0, 2.6, 6.0])
def test_derivatives_in_alpha_are_right_to_second_order(alpha: float) -> None:
    scores = safe_scores(alpha).requires_grad_()
    tensor = torch.full((3, 1), alpha, dtype=torch.float64, requires_grad=True)
    assert gradcheck(entmax, (scores, tensor), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(entmax, (scores, tensor), check_fwd_over_rev=True)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.6, 1.0, 1 + 1e-9, 1.5, 2.0, 2.6])
def test_max_loss_and_omega_are_differentiable_in_alpha(alpha: float) -> None:
    scores = safe_scores(alpha).requires_grad_()
    tensor = torch.full((3, 1), alpha, dtype=torch.float64, requires_grad=True)
    soft = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).expand(3, 4)
    target = torch.tensor([0, 1, 2])
    for f in (
        lambda s, a: Tsallis(a).max(s),
        lambda s, a: Tsallis(a).loss(s, target),
        lambda s, a: Tsallis(a).loss(s, soft),
        lambda s, a: Tsallis(a)(soft) + 0 * s.sum(),
    ):
        assert gradcheck(f, (scores, tensor), check_forward_ad=True)
        assert gradgradcheck(f, (scores, tensor), check_fwd_over_rev=True, fast_mode=True)


def test_one_alpha_for_all_rows_collects_their_gradients() -> None:
    scores, direction = torch.randn(6, 3, 5, dtype=torch.float64), torch.randn(6, 3, 5, dtype=torch.float64)
    shared = torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    each = torch.full((6, 3, 1), 1.4, dtype=torch.float64, requires_grad=True)
    (entmax(scores, shared) * direction).sum().backward()
    (entmax(scores, each) * direction).sum().backward()
    assert shared.grad is not None
    assert each.grad is not None
    assert torch.allclose(shared.grad, each.grad.sum())


@pytest.mark.parametrize("alpha", [0.7, 1.0, 1.5, 2.0, 3.0])
def test_omega_is_the_textbook_formula(alpha: float) -> None:
    p = torch.distributions.Dirichlet(torch.ones(6, dtype=torch.float64)).sample((50,))
    expected = (p * p.log()).sum(-1) if alpha == 1 else ((p**alpha).sum(-1) - 1) / (alpha * (alpha - 1))
    assert torch.allclose(Tsallis(alpha)(p), expected, atol=1e-14)
    assert torch.allclose(Tsallis(torch.tensor(alpha, dtype=torch.float64))(p), expected, atol=1e-14)
    assert torch.allclose(Tsallis(alpha)(p.T, dim=0), expected, atol=1e-14)


def test_omega_of_a_sparse_distribution_has_its_one_sided_slope_at_zero() -> None:
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(Gini()(p), p)
    assert slope[2] == slope[0] - 0.5  # ∂Ω = p + constant
    for alpha in (1.05, 1.5):
        (slope,) = torch.autograd.grad(Tsallis(alpha)(p), p)
        (tensor_slope,) = torch.autograd.grad(Tsallis(torch.tensor(alpha, dtype=torch.float64))(p), p)
        assert torch.allclose(slope, tensor_slope)
        assert (slope[0] - slope[2]).item() == pytest.approx(0.5 ** (alpha - 1) / (alpha - 1))
    (slope,) = torch.autograd.grad(Shannon()(p), p)
    assert slope[2] == -math.inf


def test_the_named_members_are_members() -> None:
    scores, p = torch.randn(4, 6), torch.rand(4, 6).softmax(-1)
    for named, alpha in ((Shannon(), 1.0), (Gini(), 2.0), (Hard(), math.inf)):
        assert torch.equal(named.argmax(scores), Tsallis(alpha).argmax(scores))
        assert torch.equal(named(p), Tsallis(alpha)(p))
    assert (Shannon().margin, Gini().margin, Hard().margin) == (math.inf, 1.0, 0.0)
    assert Tsallis(0.5).margin == math.inf


def test_the_margin_of_a_tensor_alpha_is_a_tensor() -> None:
    margin = Tsallis(torch.tensor([[0.5], [1.0], [1.5], [2.0], [math.inf]])).margin
    assert isinstance(margin, Tensor)
    assert margin.flatten().tolist() == [math.inf, math.inf, 2.0, 1.0, 0.0]


def test_a_fixed_alpha_stays_out_of_the_state_dict_and_a_learnable_one_is_in_it() -> None:
    assert not Tsallis(1.5).state_dict()
    assert not Tsallis(torch.tensor([1.5])).state_dict()
    assert list(Tsallis(1.5, learnable=True).state_dict()) == ["raw_alpha"]
    assert [p.shape for p in Tsallis(torch.nn.Parameter(torch.tensor([1.5, 1.2]))).parameters()] == [(2,)]


@pytest.mark.parametrize("alpha", [1.001, 1.3, 1.999])
def test_a_learnable_alpha_starts_where_told_and_stays_inside_its_bounds(alpha: float) -> None:
    omega = Tsallis(alpha, learnable=True, shape=(3, 1))
    assert isinstance(omega.alpha, Tensor)
    assert torch.allclose(omega.alpha, torch.full((3, 1), alpha))
    optimizer = torch.optim.SGD(omega.parameters(), lr=1e4)
    for _ in range(5):
        optimizer.zero_grad()
        omega.argmax(torch.randn(3, 8)).square().sum().neg().backward()
        optimizer.step()
        assert ((omega.alpha >= 1) & (omega.alpha <= 2)).all()
        assert omega.argmax(torch.randn(3, 8)).isfinite().all()


def test_a_learnable_alpha_is_made_where_there_are_no_data_yet() -> None:
    with torch.device("meta"):
        omegas = [Tsallis(1.5, learnable=True), Tsallis(1.5, learnable=True, shape=(2, 1))]
    assert [str(omega) for omega in omegas] == [
        "Tsallis(alpha=tensor of shape (), learnable, bounds=(1, 2))",
        "Tsallis(alpha=tensor of shape (2, 1), learnable, bounds=(1, 2))",
    ]


@pytest.mark.parametrize(
    ("alpha", "error"),
    [
        (0, ValueError),
        (-1.0, ValueError),
        (math.nan, ValueError),
        ("1.5", TypeError),
        (None, TypeError),
        (True, TypeError),
        (torch.tensor([1.5, 0.0]), ValueError),
        (torch.tensor(math.nan), ValueError),
        (torch.tensor([1, 0]), ValueError),
        (torch.tensor([True, True]), TypeError),
    ],
)
def test_a_bad_alpha_is_named(alpha: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="alpha"):
        entmax(torch.ones(3, 2), alpha)  # type: ignore[arg-type]
    with pytest.raises(error, match="alpha"):
        Tsallis(alpha)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(4,), (3, 4), (3, 1, 1), (2, 1)])
def test_an_alpha_that_is_not_one_value_a_row_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="alpha"):
        entmax(torch.ones(3, 4), torch.full(shape, 1.5))
    with pytest.raises(ValueError, match="alpha"):
        Tsallis(torch.full(shape, 1.5)).loss(torch.ones(3, 4), torch.tensor([0, 1, 2]))


def test_an_alpha_between_the_widest_bounds_starts_where_told() -> None:
    for bounds in ((1.0, 1e30), (1e-30, 2.0), (1e-30, 1e30)):
        omega = Tsallis(1.5, learnable=True, bounds=bounds)
        assert omega.alpha.item() == pytest.approx(1.5, rel=1e-5)
        for raw, end in zip((-200.0, 200.0), bounds, strict=True):
            omega.raw_alpha.data.fill_(raw)
            assert omega.alpha.item() == pytest.approx(end)
            assert torch.allclose(omega.argmax(torch.randn(3, 4)).sum(-1), torch.ones(3))


def test_bad_bounds_are_named() -> None:
    for bounds in ((2.0, 1.0), (0.0, 2.0), (1.0, math.inf), (1.0, 1e308), (1.0, 3e38), (1e-50, 2.0)):
        with pytest.raises(ValueError, match="bounds"):
            Tsallis(1.5, learnable=True, bounds=bounds)
    with pytest.raises(ValueError, match="alpha"):
        Tsallis(1.0, learnable=True)
    with pytest.raises(ValueError, match="shape"):
        Tsallis(1.5, shape=(2, 1))


def test_steep_gradients_are_finite_where_a_probability_is_tiny() -> None:
    """s = p^(2−α) overflows long before the Jacobian does."""
    for dtype in (torch.float32, torch.float64):
        scores = torch.tensor([0.0, -1 / 49 + 1e-7, -1.0], dtype=dtype, requires_grad=True)
        for alpha in (50.0, torch.tensor(50.0, dtype=dtype)):
            p = entmax(scores, alpha)
            (gradient,) = torch.autograd.grad(p[0], scores)
            assert gradient.isfinite().all()
            assert abs(gradient.sum()) <= 1e-5 * gradient.abs().max()


def test_forward_and_reverse_mode_agree_in_alpha_where_the_jacobian_is_huge() -> None:
    """Ties at the smallest probability: J is about p^(2−α) there, and cancels in the derivative by alpha."""
    scores = torch.tensor([0.0, 0.1, 0.0], dtype=torch.float64)
    alpha = torch.tensor(10.0, dtype=torch.float64, requires_grad=True)
    (reverse,) = torch.autograd.grad(entmax(scores, alpha)[0], alpha)
    step = 1e-5
    difference = (entmax(scores, 10 + step)[0] - entmax(scores, 10 - step)[0]) / (2 * step)
    assert reverse.item() == pytest.approx(difference.item(), rel=1e-6)
    _, forward = torch.func.jvp(lambda a: entmax(scores, a)[0], (alpha.detach(),), (torch.ones_like(alpha.detach()),))
    assert reverse.item() == pytest.approx(forward.item(), rel=1e-12)


def test_an_alpha_beyond_the_precision_of_the_scores_is_infinite() -> None:
    for dtype in (torch.float32, torch.float16):
        assert entmax(torch.tensor([1.0, 0.0, 1.0], dtype=dtype), 1e39).tolist() == [0.5, 0.0, 0.5]


def test_gradients_that_overflow_are_large_and_not_nan() -> None:
    scores = torch.zeros(8, requires_grad=True)
    (gradient,) = torch.autograd.grad(entmax(scores, 50.0), scores, torch.arange(8.0))
    assert not gradient.isnan().any()


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.0, 3.0])
def test_the_hessian_of_omega_at_the_boundary(alpha: float) -> None:
    """∂²Ω/∂p² = p^(α−2), also at p = 0."""
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    expected = torch.diag(p ** (alpha - 2))
    for omega in (Tsallis(alpha), Tsallis(torch.tensor(alpha, dtype=torch.float64))):
        assert torch.allclose(torch.func.hessian(omega)(p).diag(), expected.diag())


def test_wide_flat_rows_of_a_steep_map_sum_to_one_in_single_precision() -> None:
    p = entmax(1e-4 * torch.randn(2, 10_000), 2.1)
    assert ((p.double().sum(-1) - 1).abs() < 1e-6).all()


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("alpha", [16.0, 200.0, 1e30])
def test_ties_at_a_large_alpha_have_finite_derivatives(
    kernels: str, dtype: torch.dtype, alpha: float, set_kernels: Callable[[bool], None]
) -> None:
    set_kernels(kernels == "on")
    for width in (2, 10, 1000):
        for scores in (torch.zeros(1, width), 1e-4 * torch.randint(2, (1, width)), 1e-3 * torch.randn(1, width)):
            for a in (alpha, torch.tensor([[alpha]], dtype=dtype, requires_grad=True)):
                s, v = scores.to(dtype).requires_grad_(), torch.randn(1, width, dtype=dtype)
                inputs = (s, a) if isinstance(a, Tensor) else (s,)
                p = fenchel.entmax(s, a)
                plain = torch.autograd.grad(p, inputs, v, retain_graph=True)
                first = torch.autograd.grad(p, inputs, v, create_graph=True)
                second = torch.autograd.grad(sum((g * torch.randn_like(g)).sum() for g in first), inputs)
                assert all(g.isfinite().all() for g in (*plain, *first, *second))


@pytest.mark.parametrize("alpha", [2.5, 4.0, 16.0, 40.0])
def test_derivatives_at_ties_are_those_of_the_closed_form(alpha: float) -> None:
    """At n equal scores J = n^(α−2) (I − 11ᵀ/n), and ∂²⟨v, p⟩ along u, u is (2 − α) n^(2α−3) Σ (v − v̄)(u − ū)²."""
    n = 5
    zero = torch.zeros(n, dtype=torch.float64)
    centring = torch.eye(n, dtype=torch.float64) - 1 / n
    assert torch.allclose(jacrev(lambda s: fenchel.entmax(s, alpha))(zero), n ** (alpha - 2) * centring, rtol=1e-9)
    v, u = centring @ torch.randn(n, dtype=torch.float64), centring @ torch.randn(n, dtype=torch.float64)
    expected = (2 - alpha) * n ** (2 * alpha - 3) * (v * u * u).sum()
    for a in (alpha, torch.tensor(alpha, dtype=torch.float64)):
        for outer in (jacrev, jacfwd):
            second = outer(jacrev(lambda s, a=a: (v * fenchel.entmax(s, a)).sum()))(zero)
            assert torch.allclose(u @ second @ u, expected, rtol=1e-8)


def test_integer_tensors_are_alphas() -> None:
    scores = torch.randn(3, 5, dtype=torch.float64)
    alpha = torch.tensor([[1], [2], [3]])
    for i in range(3):
        assert torch.allclose(fenchel.entmax(scores, alpha)[i], fenchel.entmax(scores[i], i + 1.0), atol=1e-14)
    assert torch.equal(fenchel.normmax(scores, torch.tensor(3)), fenchel.normmax(scores, torch.tensor(3.0)))
    assert torch.allclose(Tsallis(alpha).max(scores)[1], Tsallis(2.0).max(scores)[1], atol=1e-14)
    learned = Tsallis(torch.tensor(2), learnable=True, bounds=(1, 4))
    assert torch.allclose(learned.argmax(scores), fenchel.entmax(scores, 2.0), atol=1e-6)
