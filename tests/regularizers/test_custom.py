"""Custom: closed forms, a cone solver, brute-force Jacobians; what fn closes over; what must not pass in silence."""

import copy
import warnings
from collections.abc import Callable

import cvxpy
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap

import fenchel
import oracles
from fenchel import Custom, Gini, Norm, Shannon, Tsallis

MATRIX = torch.tensor(np.random.default_rng(0).normal(size=(6, 6)))
MATRIX = MATRIX @ MATRIX.T / 6
WIDE = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def entropy(p: Tensor) -> Tensor:
    return -torch.special.entr(p).sum(-1)


def quadratic(p: Tensor) -> Tensor:
    return 0.5 * p.square().sum(-1) + 0.3 * ((p @ MATRIX) * p).sum(-1)


def tsallis(alpha: float) -> Custom:
    return Custom(lambda p: ((p**alpha - p) / (alpha * (alpha - 1))).sum(-1))


# What is known in closed form (or nearly), as a user would write it, and by how much a solver may miss it.
KNOWN = {
    "gini": (Custom(lambda p: 0.5 * (p * p).sum(-1)), Gini(), 1e-14),
    "shannon": (Custom(entropy), Shannon(), 1e-14),
    "plain p log p": (Custom(lambda p: (p * p.log()).sum(-1)), Shannon(), 1e-14),
    "tsallis 0.5": (tsallis(0.5), Tsallis(0.5), 1e-14),
    "tsallis 1.5": (tsallis(1.5), Tsallis(1.5), 1e-13),
    "tsallis 3": (tsallis(3.0), Tsallis(3.0), 1e-8),  # flat at 0: rounding 1e-16 of a score is 1e-8 of mass
    "norm 1.5": (Custom(lambda p: (p**1.5).sum(-1) ** (2 / 3)), Norm(1.5), 1e-13),
    "norm 2": (Custom(lambda p: p.norm(dim=-1)), Norm(2.0), 1e-12),
    "norm 5": (Custom(lambda p: (p**5).sum(-1) ** 0.2), Norm(5.0), 1e-12),
}
CONES = {
    "quadratic": (quadratic, lambda p: 0.5 * cvxpy.sum_squares(p) + 0.3 * cvxpy.quad_form(p, MATRIX.numpy())),
    "barrier": (lambda p: -p.log().sum(-1), lambda p: -cvxpy.sum(cvxpy.log(p))),
    "mixture": (
        lambda p: entropy(p) + quadratic(p),
        lambda p: -cvxpy.sum(cvxpy.entr(p)) + 0.5 * cvxpy.sum_squares(p) + 0.3 * cvxpy.quad_form(p, MATRIX.numpy()),
    ),
    "cubic": (lambda p: (p**3).sum(-1) + 0.01 * p.square().sum(-1).square(), None),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("spread", [1e-3, 1.0, 10.0, 1e3])
def test_known_maps_are_found(name: str, spread: float) -> None:
    custom, known, tolerance = KNOWN[name]
    scores = spread * torch.randn(8, 12, dtype=torch.float64)
    assert torch.allclose(custom.argmax(scores), known.argmax(scores), atol=tolerance, rtol=0)
    narrow = scores.float()
    assert torch.allclose(custom.argmax(narrow), known.argmax(narrow), atol=1e-6, rtol=0)


def test_entmax_against_fifty_digits() -> None:
    scores = [0.7, 0.1, -0.2, -0.9, 0.65]
    expected = [float(v) for v in oracles.entmax(scores, 1.5)]
    p = tsallis(1.5).argmax(torch.tensor(scores, dtype=torch.float64))
    assert torch.allclose(p, torch.tensor(expected, dtype=torch.float64), atol=1e-15, rtol=0)


@pytest.mark.parametrize("name", [n for n in CONES if CONES[n][1] is not None])
def test_a_cone_solver_finds_the_same(name: str) -> None:
    fn, expression = CONES[name]
    scores = 2 * torch.randn(4, 6, dtype=torch.float64)
    p = Custom(fn).argmax(scores)
    for row, s in zip(p, scores, strict=True):
        x = cvxpy.Variable(6)
        objective = cvxpy.Maximize(s.numpy() @ x - expression(x))
        exact = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-11)
        cvxpy.Problem(objective, [x >= 0, cvxpy.sum(x) == 1]).solve(solver=cvxpy.CLARABEL, **exact)
        assert torch.allclose(row, torch.tensor(x.value), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", CONES)
def test_optimality_conditions(name: str) -> None:
    fn = CONES[name][0]
    scores = torch.randn(20, 6, dtype=torch.float64)
    p = Custom(fn).argmax(scores)
    ascent = scores - torch.func.grad(lambda x: fn(x).sum())(p)
    level = (p * ascent).sum(-1, keepdim=True)
    size = 1 + ascent.abs().amax(-1, keepdim=True)
    assert ((p == 0) | ((ascent - level).abs() < 1e-13 * size)).all()
    assert ((p > 0) | (ascent <= level + 1e-13 * size)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CONES, "norm 2", "plain p log p"])
def test_derivatives_against_finite_differences(name: str) -> None:
    omega = Custom(CONES[name][0]) if name in CONES else KNOWN[name][0]
    scores = torch.tensor([0.5, 0.2, -0.1, 0.1, 0.3, -3.0], dtype=torch.float64, requires_grad=True)
    assert gradcheck(omega.argmax, (scores,), check_forward_ad=True)
    assert gradgradcheck(omega.argmax, (scores,), check_fwd_over_rev=True, fast_mode=True)
    soft = torch.full((6,), 1 / 6, dtype=torch.float64)
    assert gradcheck(lambda s: (omega.max(s), omega.loss(s, soft)), (scores,), check_forward_ad=True)


def test_the_jacobian_is_the_papers() -> None:
    """002, Proposition 2: H⁻¹ − H⁻¹11ᵀH⁻¹ / 1ᵀH⁻¹1 on the support."""
    scores = torch.tensor([0.5, 0.2, -0.1, 0.1, 0.3, -3.0], dtype=torch.float64)
    support = Custom(quadratic).argmax(scores) > 0
    assert 1 < support.sum() < 6
    inverse = torch.linalg.inv((torch.eye(6, dtype=torch.float64) + 0.6 * MATRIX)[support][:, support])
    s = inverse.sum(-1)
    expected = torch.zeros(6, 6, dtype=torch.float64)
    expected[torch.outer(support, support)] = (inverse - torch.outer(s, s) / s.sum()).flatten()
    for jacobian in (jacrev, jacfwd):
        assert torch.allclose(jacobian(Custom(quadratic).argmax)(scores), expected, atol=1e-14, rtol=0)


def test_a_coupling_that_vanishes_at_ties_is_not_overlooked() -> None:
    """At the tie p₀ = p₁ the Hessian of this Ω is diagonal, but its derivative is not."""
    omega = Custom(lambda p: 0.5 * p.square().sum(-1) + 0.1 * (p[..., 0] - p[..., 1]).pow(3))
    scores = torch.tensor([0.2, 0.2, 0.1], dtype=torch.float64, requires_grad=True)
    assert gradgradcheck(omega.argmax, (scores,))


def test_what_is_convex_only_along_the_simplex_will_do() -> None:
    """−½p₀² + Σ p²: concave along the first axis, convex on every line of constant sum."""
    weights = torch.tensor([-0.5, 1.0, 1.0], dtype=torch.float64)
    omega = Custom(lambda p: 0.5 * (weights * p * p).sum(-1))
    scores = torch.tensor([-0.7, 0.0, 0.1], dtype=torch.float64)
    p = omega.argmax(scores)
    grid = torch.cartesian_prod(*[torch.linspace(0, 1, 401, dtype=torch.float64)] * 2)
    grid = torch.cat([grid, 1 - grid.sum(-1, keepdim=True)], -1)
    grid = grid[grid[:, 2] >= 0]
    best = ((grid * scores).sum(-1) - 0.5 * (weights * grid * grid).sum(-1)).max()
    value = omega.max(scores)
    assert torch.allclose(value, (p * scores).sum() - 0.5 * (weights * p * p).sum())
    assert best <= value + 1e-12 <= best + 1e-4


# -- what fn closes over ----------------------------------------------------------------------------------


def family(w: Tensor) -> Custom:
    return Custom(lambda p: 0.5 * (w * p * p).sum(-1) + 0.1 * (w * p).sum(-1).square() + 0.3 * (p**3).sum(-1))


def everything(w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
    omega = family(w)
    soft = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64)
    return (0.7 * omega).argmax(s), omega.loss(s, soft)


W = torch.tensor([1.0, 2.0, 0.7], dtype=torch.float64)
S = torch.tensor([[0.3, 0.6, -0.2]], dtype=torch.float64)


def test_gradients_reach_a_tensor_of_the_enclosing_scope() -> None:
    inputs = (W.clone().requires_grad_(), S.clone().requires_grad_())
    assert gradcheck(everything, inputs, check_forward_ad=True)
    assert gradgradcheck(everything, inputs, check_fwd_over_rev=True, fast_mode=True)


def test_gradients_reach_what_a_captured_tensor_was_made_from() -> None:
    raw = W.log().requires_grad_()
    assert gradcheck(lambda r: everything(r.exp(), S), (raw,))


def test_transforms_see_a_captured_tensor() -> None:
    def f(w: Tensor) -> Tensor:
        return family(w).argmax(S[0])

    first = jacrev(f)(W)
    assert torch.allclose(jacfwd(f)(W), first, atol=1e-13)
    assert torch.allclose(jvp(f, (W,), (S[0],))[1], first @ S[0], atol=1e-13)
    second = [a(b(f))(W) for a in (jacrev, jacfwd) for b in (jacrev, jacfwd)]
    assert second[0].abs().max() > 1e-2
    assert all(torch.allclose(d, second[0], atol=1e-12) for d in second)
    many = torch.stack([W, 2 * W, W.flip(0)])
    assert torch.allclose(vmap(f)(many), torch.stack([f(w) for w in many]), atol=1e-15)
    assert torch.allclose(vmap(jacrev(f))(many)[2], jacrev(f)(many[2]), atol=1e-13)
    many.requires_grad_()
    direction = torch.randn(3, 3, dtype=torch.float64)
    (mapped,) = torch.autograd.grad(vmap(f)(many), many, direction)
    (looped,) = torch.autograd.grad(torch.stack([f(w) for w in many]), many, direction)
    assert torch.allclose(mapped, looped, atol=1e-13)


class Weighted(nn.Module):
    """A quadratic with learned weights, in single precision, through a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3, bias=False)

    def forward(self, p: Tensor) -> Tensor:
        return 0.5 * p.square().sum(-1) + 0.5 * self.mix(p).square().sum(-1)


def test_a_module_is_trained_with_the_model() -> None:
    torch.manual_seed(1)
    omega = Custom(Weighted())
    assert [name for name, _ in omega.named_parameters()] == ["fn.mix.weight"]
    scores, target = torch.randn(16, 3), torch.randint(3, (16,))
    optimizer = torch.optim.SGD(omega.parameters(), lr=0.5)
    losses = []
    for _ in range(5):
        loss = fenchel.fy_loss(scores, target, omega)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    weight = omega.fn.mix.weight
    exact = weight.detach().double()
    p = omega.argmax(scores.double()).detach()
    y = torch.nn.functional.one_hot(target, 3).double()
    by_hand = grad(lambda w: (0.5 * (y @ w.T).square().sum(-1) - 0.5 * (p @ w.T).square().sum(-1)).mean())(exact)
    (found,) = torch.autograd.grad(fenchel.fy_loss(scores, target, omega), weight)
    assert torch.allclose(found.double(), by_hand, atol=1e-6)
    moved = functional_call(omega, {"fn.mix.weight": 2 * weight.detach()}, (torch.eye(3),))
    assert torch.allclose(moved, 0.5 + 2 * weight.detach().square().sum(0), atol=1e-6)
    assert torch.equal(copy.deepcopy(omega).argmax(scores), omega.argmax(scores))


def test_one_parameter_a_head() -> None:
    weight = torch.tensor([1.0, 5.0]).reshape(2, 1, 1)
    omega = Custom(lambda p: 0.5 * weight.squeeze(-1) * p.square().sum(-1))
    scores = torch.randn(3, 2, 4, 5)
    expected = torch.stack([fenchel.sparsemax(scores[:, 0]), fenchel.sparsemax(scores[:, 1] / 5)], 1)
    assert torch.allclose(omega.argmax(scores), expected, atol=1e-6)


class _Hide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, w: Tensor) -> Tensor:
        return w.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


def test_a_gradient_that_would_be_lost_is_an_error() -> None:
    w = W.clone().requires_grad_()
    omega = Custom(lambda p: 0.5 * (_Hide.apply(w) * p * p).sum(-1))
    with pytest.raises(ValueError, match="hides"):
        omega.argmax(S)


# -- the rest of the contract -----------------------------------------------------------------------------


def test_the_loss_counts_omega_at_the_vertices() -> None:
    omega = Custom(lambda p: 0.5 * (p * p).sum(-1) + (p * torch.arange(3)).sum(-1))
    scores, target = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 2])
    vertex = 0.5 + target.double()
    reached = scores.gather(-1, target[:, None]).squeeze(-1)
    assert torch.allclose(omega.loss(scores, target), omega.max(scores) + vertex - reached, atol=1e-14)
    assert torch.allclose(omega.loss(scores, target), Gini().loss(scores - torch.arange(3), target), atol=1e-14)
    assert omega.margin is None


def test_it_serves_losses_and_attention_like_any_other() -> None:
    omega = Custom(lambda p: 0.5 * (p * p).sum(-1))
    scores, target = torch.randn(6, 5), torch.randint(5, (6,))
    mask = torch.rand(6, 5) < 0.8
    mask.scatter_(1, target[:, None], True)
    options = {"mask": mask, "weight": torch.rand(5), "label_smoothing": 0.1}
    assert torch.allclose(
        fenchel.fy_loss(scores, target, omega, **options), fenchel.sparsemax_loss(scores, target, **options), atol=1e-6
    )
    query, key, value = torch.randn(3, 2, 4, 8).unbind()
    expected = fenchel.attention(query, key, value, 0.5 * Gini(), is_causal=True)
    assert torch.allclose(fenchel.attention(query, key, value, 0.5 * omega, is_causal=True), expected, atol=1e-6)


def test_masked_entries_are_zero_in_p() -> None:
    seen = []

    def fn(p: Tensor) -> Tensor:
        seen.append(p.detach().clone())
        return 0.5 * p.square().sum(-1) + 0.1 * p.square().sum(-1).square()

    mask = torch.tensor([True, False, True, True])
    Custom(fn).argmax(torch.randn(3, 4), mask=mask)
    assert all(p.dtype == torch.float64 for p in seen)
    assert all((p[..., 1] == 0).all() for p in seen[1:])  # the first only asks what fn reads


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0, 1.1, 1.5, 1.9])
def test_infinite_derivatives_at_zero_go_with_masks(alpha: float) -> None:
    """Against the maps and losses of Tsallis' entropies, which have solvers and derivatives of their own."""

    def fn(p: Tensor) -> Tensor:
        return entropy(p) if alpha == 1 else (p.pow(alpha) - p).sum(-1) / (alpha * (alpha - 1))

    mask = torch.rand(6, 5) < 0.6
    mask[0], mask[1] = torch.tensor([False, True, False, False, False]), False
    target, weights = torch.randint(5, (6,)), torch.randn(6, 5, dtype=torch.float64)
    for scale in (0.1, 1e10):
        results = []
        for omega in (Custom(fn), Tsallis(alpha)):
            scores = (scale * WIDE).requires_grad_()
            p = omega.argmax(scores, mask=mask)
            (slope,) = torch.autograd.grad((weights * p).sum(), scores, retain_graph=True)
            results.append((p, slope, omega.max(scores, mask=mask), omega.loss(scores, target, mask=mask)))
        for found, expected in zip(*results, strict=True):
            assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "fn",
    [
        lambda p, w: (w * -torch.special.entr(p)).sum(-1),
        lambda p, w: (w * p.pow(1.5)).sum(-1),
        lambda p, w: -(w * p.sqrt()).sum(-1) - 0.3 * (w * p.sqrt()).sum(-1).log(),  # coupled
    ],
    ids=["entropy", "power", "coupled"],
)
def test_infinite_derivatives_at_zero_go_with_masks_in_every_derivative(fn: Callable[..., Tensor]) -> None:
    scores = torch.tensor([[0.3, 0.1, 0.2, 0.0], [0.1, 5.0, 0.0, -0.2]], dtype=torch.float64, requires_grad=True)
    w = torch.tensor([1.0, 1.3, 0.8, 1.1], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, True, False], [True, False, True, True]])
    for verb in ("argmax", "max"):

        def choose(s: Tensor, w: Tensor, verb: str = verb) -> Tensor:
            result: Tensor = getattr(Custom(lambda p: fn(p, w)), verb)(s, mask=mask)
            return result

        assert gradcheck(choose, (scores, w), check_forward_ad=True, fast_mode=True)
        assert gradgradcheck(choose, (scores, w), fast_mode=True)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda p: p.square().sum(), "shape"),
        (lambda p: p.square(), "shape"),
        (lambda p: 1.0, "tensor"),
        (lambda p: p.sum(-1) > 0, "floating"),
        (lambda p: p.square().sum(-1).detach(), "depend on p"),
        (lambda p: (p - 1).log().sum(-1), "finite"),
        (lambda p: -0.5 * p.square().sum(-1), "convex"),
        (lambda p: p[..., 0] * p[..., 1] + p[..., 2].square(), "convex"),
        (lambda p: p.sum(-1), "convex"),
    ],
)
def test_a_function_that_will_not_do_is_an_error(fn: object, message: str) -> None:
    scores = torch.tensor([[0.3, 0.2, 0.0], [0.1, 0.1, 0.1]])
    with pytest.raises(ValueError, match=message):
        Custom(fn).argmax(scores)


def test_errors_name_the_argument() -> None:
    with pytest.raises(TypeError, match="fn"):
        Custom(3)
    with pytest.raises(ValueError, match="tol"):
        Custom(entropy, tol=0.0)
    with pytest.raises(ValueError, match="max_iter"):
        Custom(entropy, max_iter=0)
    with pytest.raises(ValueError, match="entr"):  # 0 · log 0 at a masked entry
        Custom(lambda p: (p * p.log()).sum(-1)).argmax(torch.randn(3), mask=torch.tensor([True, False, True]))
    with pytest.raises(ValueError, match="target"):
        Custom(lambda p: -p.log().sum(-1)).loss(torch.randn(3), torch.tensor(0))


def test_rows_without_a_certificate_are_warned_of() -> None:
    scores = 5 * torch.randn(4, 9, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"rows are not solved.*duality gap is \d"):
        Custom(entropy, max_iter=1).argmax(scores)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Custom(entropy).argmax(scores)


def test_infinite_slopes_and_huge_scores() -> None:
    for fn in (entropy, lambda p: -p.log().sum(-1), lambda p: -p.sqrt().sum(-1)):
        p = Custom(fn).argmax(torch.tensor([[1e30, -1e30, 3e30], [5.0, 5.0 + 2**-20, -1e4]]))
        assert torch.allclose(p[0], torch.tensor([0.0, 0.0, 1.0]), atol=1e-6)
        assert torch.allclose(p[1, :2], torch.tensor([0.5, 0.5]), atol=1e-3)


def test_the_distance_to_a_prior_is_least_at_the_prior() -> None:
    """Without scores every slope vanishes at the solution: nothing is left to measure a gap by."""
    prior = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    for fn in (lambda p: (p - prior).square().sum(-1), lambda p: 1e6 * (p - prior).square().sum(-1).square()):
        p = Custom(fn, max_iter=60).argmax(torch.zeros(2, 4, dtype=torch.float64))
        assert torch.allclose(p, prior.expand(2, 4), atol=1e-4)


def test_it_runs_in_inference_mode_and_without_grad() -> None:
    module = Weighted()
    scores = torch.randn(4, 3)
    expected = Custom(module).argmax(scores).detach()
    with torch.inference_mode():
        assert torch.equal(Custom(module).argmax(scores), expected)
        assert torch.equal(Custom(module).argmax(scores.clone()), expected)
        Custom(module).loss(scores.clone(), torch.zeros(4, dtype=torch.long))
    with torch.no_grad():
        assert torch.equal(Custom(module).argmax(scores), expected)


def test_a_tensor_that_is_read_on_the_way_only_is_found_or_refused() -> None:
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def fn(p: Tensor) -> Tensor:
        penalty = p.square().sum(-1)
        return penalty * w if float(p.detach().max()) > 0.6 else penalty * 2

    with pytest.raises(ValueError, match="hides"):
        Custom(fn).argmax(torch.tensor([3.0, 0.0, 0.0]))


def test_it_shows_what_it_is() -> None:
    assert repr(Custom(quadratic)) == "Custom(quadratic, tol=1e-12, max_iter=100)"
    assert "Weighted" in repr(Custom(Weighted()))
