"""Bounds and budgets beside a QP solver, enumeration, closed forms and finite differences."""

import itertools
import math
from collections.abc import Callable, Iterator

import cvxpy
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jacfwd, jacrev, vmap

import fenchel
from fenchel import Capped, Gini, KSubsets, Shannon, Tsallis, constrained_softmax, constrained_sparsemax, k_subsets
from fenchel.regularizers.bounded import BOUNDED_GINI, BOUNDED_SHANNON
from fenchel.regularizers.operators import pack

MAPS = [(constrained_sparsemax, Gini()), (constrained_softmax, Shannon())]
both = pytest.mark.parametrize(("choose", "base"), MAPS, ids=["sparsemax", "softmax"])


@pytest.fixture(params=["on", "off"], autouse=True)
def _path(request: pytest.FixtureRequest, set_kernels: Callable[[bool], None]) -> None:
    set_kernels(request.param == "on")


def solved(scores: Tensor, upper: Tensor, budget: float, entropic: bool = False) -> Tensor:
    """The maximizer by a general convex solver."""
    p = cvxpy.Variable(len(scores))
    omega = -cvxpy.sum(cvxpy.entr(p)) if entropic else cvxpy.sum_squares(p) / 2
    problem = cvxpy.Problem(
        cvxpy.Maximize(scores.numpy() @ p - omega), [p >= 0, p <= upper.numpy(), cvxpy.sum(p) == budget]
    )
    problem.solve(solver="CLARABEL", tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
    return torch.tensor(p.value)


def bounded_problems(count: int, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Float64 scores and bounds whose faces survive small changes of both, with free and held entries."""
    found = 0
    while found < count:
        scores = torch.randn(width, dtype=torch.float64)
        upper = 0.1 + 0.6 * torch.rand(width, dtype=torch.float64)
        if upper.sum() < 1.3:
            continue

        def faces(s: Tensor, u: Tensor) -> Tensor:
            p = constrained_sparsemax(s, u)
            q = constrained_softmax(s, u)
            return torch.stack([p > 0, p >= u, q >= u])

        here = faces(scores, upper)
        near = [
            faces(scores + 1e-2 * torch.randn_like(scores), upper + 1e-2 * torch.rand_like(upper)) for _ in range(8)
        ]
        if all(torch.equal(here, f) for f in near) and here[1].any() and here[2].any():
            found += 1
            yield scores, upper


@both
def test_the_constrained_maps_solve_their_problem(choose, base) -> None:
    for width in (2, 3, 7):
        scores = 2 * torch.randn(width, dtype=torch.float64)
        upper = 1.5 * torch.rand(width, dtype=torch.float64)
        upper = upper * (1.2 / upper.sum()).clamp_min(1)
        expected = solved(scores, upper, 1.0, entropic=choose is constrained_softmax)
        assert torch.allclose(choose(scores, upper), expected, atol=1e-6)


def test_k_subsets_solves_its_problem_for_whole_and_other_k() -> None:
    for k in (0.3, 1, 2.5, 4, 6.9):
        scores = torch.randn(7, dtype=torch.float64)
        assert torch.allclose(k_subsets(scores, k), solved(scores, torch.ones(7), k), atol=1e-6)


def test_k_subsets_is_sparsemap_over_all_subsets() -> None:
    for n, k in ((4, 2), (5, 3)):
        vertices = np.array([[float(i in c) for i in range(n)] for c in itertools.combinations(range(n), k)])
        scores = 0.7 * torch.randn(n, dtype=torch.float64)
        weights = cvxpy.Variable(len(vertices))
        marginals = vertices.T @ weights
        value = scores.numpy() @ marginals - cvxpy.sum_squares(marginals) / 2
        cvxpy.Problem(cvxpy.Maximize(value), [weights >= 0, cvxpy.sum(weights) == 1]).solve(solver="CLARABEL")
        assert torch.allclose(k_subsets(scores, k), torch.tensor(marginals.value), atol=1e-5)


def test_k_subsets_by_hand() -> None:
    scores = torch.tensor([0, 0.25, 0.5, 0.75, 1])
    assert torch.equal(k_subsets(scores, 2), torch.tensor([0, 0.125, 0.375, 0.625, 0.875]))
    assert torch.equal(k_subsets(scores, 5), torch.ones(5))
    assert torch.equal(k_subsets(scores, 7), torch.ones(5))
    assert torch.equal(k_subsets(scores, math.inf), torch.ones(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_loose_bounds_change_nothing(dtype: torch.dtype) -> None:
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    for spread, width in ((0.1, 5), (1.0, 40), (5.0, 700)):
        scores = (spread * torch.randn(30, width)).to(dtype)
        for upper in (1.0, 1.5, math.inf, torch.full((width,), torch.inf, dtype=dtype), 1 + torch.rand(30, width)):
            for choose, plain in ((constrained_softmax, fenchel.softmax), (constrained_sparsemax, fenchel.sparsemax)):
                mine, theirs = scores.clone().requires_grad_(), scores.clone().requires_grad_()
                p, q = choose(mine, upper), plain(theirs)
                assert torch.allclose(p, q, atol=tolerance, rtol=0)
                direction = torch.randn_like(p)
                p.backward(direction)
                q.backward(direction)
                settled = (p == 0) == (q == 0)  # off the kinks, where an ulp decides
                assert torch.allclose(mine.grad[settled.all(-1)], theirs.grad[settled.all(-1)], atol=10 * tolerance)
        assert torch.allclose(k_subsets(scores, 1), fenchel.sparsemax(scores), atol=tolerance, rtol=0)


def test_bounds_are_kept_to_the_last_digit() -> None:
    for dtype in (torch.float32, torch.float64, torch.float16):
        upper = torch.rand(50, 300).to(dtype) / 100
        p = constrained_sparsemax(torch.randn(50, 300).to(dtype), upper)
        q = constrained_softmax(torch.randn(50, 300).to(dtype), upper)
        for choice in (p, q):
            assert (choice <= upper).all()
            assert (choice == upper).any()
            assert ((choice.double().sum(-1) - 1).abs() < (1e-5 if dtype == torch.float32 else 2e-3)).all()


def test_k_subsets_is_k_hot_exactly_at_a_gap_of_one() -> None:
    for k in (1, 2, 4):
        scores = torch.randn(6, dtype=torch.float64).sort(descending=True).values
        gap = scores[k - 1] - scores[k]
        at = scores + torch.where(torch.arange(6) < k, 1 - gap + 1e-12, 0.0)
        y = (torch.arange(6) < k).double()
        assert torch.equal(k_subsets(at, k), y)
        assert KSubsets(k).loss(at, y) == 0
        below = scores + torch.where(torch.arange(6) < k, 0.99 - gap, 0.0)
        assert not torch.equal(k_subsets(below, k), y)
        assert KSubsets(k).loss(below, y) > 0


def test_scores_far_apart_are_exact() -> None:
    scores = torch.tensor([3e30, 1e30, 1e30, -1e30])
    assert torch.equal(k_subsets(scores, 2), torch.tensor([1, 0.5, 0.5, 0]))
    assert torch.equal(constrained_sparsemax(scores, 0.5), torch.tensor([0.5, 0.25, 0.25, 0]))
    assert torch.equal(constrained_softmax(scores, 0.5), torch.tensor([0.5, 0.25, 0.25, 0]))
    for offset in (0.0, 300.0, 1e5):  # differences of these are exact, so p must be
        z = torch.tensor([offset + 900, offset + 0.5, offset + 0.25, offset])
        assert torch.allclose(k_subsets(z, 2), torch.tensor([1, 7 / 12, 1 / 3, 1 / 12]), atol=1e-7, rtol=0)


def test_a_row_with_less_room_than_k_chooses_all_of_it() -> None:
    scores, mask = torch.randn(3, 5), torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 0, 1], [0, 0, 0, 0, 0]]).bool()
    for k in (3, torch.tensor([[3.0], [9.0], [1.0]])):
        p = k_subsets(scores, k, mask=mask)
        assert torch.allclose(p[0].sum(), torch.tensor(3.0))
        assert torch.equal(p[1:], mask[1:].float())


# -- derivatives ----------------------------------------------------------------------------------------


@pytest.mark.slow
@both
def test_gradients_in_scores_and_bounds(choose, base) -> None:
    for scores, upper in bounded_problems(2, 5):
        inputs = (scores.requires_grad_(), upper.requires_grad_())
        options = {"check_forward_ad": True, "check_batched_grad": True}
        assert gradcheck(choose, inputs, **options)
        assert gradgradcheck(choose, inputs, check_fwd_over_rev=True, check_batched_grad=True)
        assert gradcheck(lambda s, u, base=base: Capped(u, base).max(s), inputs, **options)
        assert gradgradcheck(lambda s, u, base=base: Capped(u, base).max(s), inputs, check_fwd_over_rev=True)
        with torch.no_grad():
            y = 0.999 * choose(scores / 2, upper) + 0.001 * upper / upper.sum()
            y = torch.minimum(y, 0.999 * upper)
            y = y + (1 - y.sum()) * (upper - y) / (upper - y).sum()  # inside the box, also when it moves a little
        assert gradcheck(lambda s, u, y=y, base=base: Capped(u, base).loss(s, y), inputs, check_forward_ad=True)


@pytest.mark.slow
def test_gradients_in_scores_and_k() -> None:
    scores = torch.tensor([[1.3, 0.9, 0.25, 0.1, -0.8], [0.1, 0.2, 0.35, 0.5, 2.0]], dtype=torch.float64)
    k = torch.tensor([[1.7], [2.2]], dtype=torch.float64)
    inputs = (scores.requires_grad_(), k.requires_grad_())
    for f in (k_subsets, lambda s, k: KSubsets(k).max(s), lambda s, k: (0.3 * KSubsets(k)).max(s + 5)):
        assert gradcheck(f, inputs, check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(f, inputs, check_fwd_over_rev=True)


@both
def test_bounds_that_are_shared_get_the_sum_of_gradients(choose, base) -> None:
    scores = torch.randn(4, 3, 6, dtype=torch.float64)
    shared = torch.full((3, 1), 0.3, dtype=torch.float64, requires_grad=True)
    full = shared.detach().expand(4, 3, 6).clone().requires_grad_()
    direction = torch.randn_like(scores)
    choose(scores, shared).backward(direction)
    choose(scores, full).backward(direction)
    assert torch.allclose(shared.grad, full.grad.sum((0, 2), keepdim=True)[0], atol=1e-12)


def test_at_a_corner_the_derivative_is_the_mean_of_both_sides() -> None:
    step = 1e-6
    scores = torch.tensor([3.0, 2.0, 0.5, 0.1], dtype=torch.float64)
    k = torch.tensor([2.0], dtype=torch.float64)
    two_sided = (k_subsets(scores, k + step) - k_subsets(scores, k - step)) / (2 * step)
    for derivative in (jacrev(lambda k: k_subsets(scores, k))(k), jacfwd(lambda k: k_subsets(scores, k))(k)):
        assert torch.allclose(derivative.squeeze(-1), two_sided, atol=1e-9)
    upper = torch.tensor([0.75, 0.25, 0.5, 1.0], dtype=torch.float64)
    columns = []
    for i in range(4):
        change = step * torch.eye(4, dtype=torch.float64)[i]
        higher, lower = constrained_sparsemax(scores, upper + change), constrained_sparsemax(scores, upper - change)
        columns.append((higher - lower) / (2 * step))
    for derivative in (jacrev, jacfwd):
        jacobian = derivative(lambda u: constrained_sparsemax(scores, u))(upper)
        assert torch.allclose(jacobian, torch.stack(columns, -1), atol=1e-9)


def test_beyond_all_entries_nothing_depends_on_k() -> None:
    scores = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    k = torch.tensor([[4.5], [9.0]], dtype=torch.float64, requires_grad=True)
    for f in (k_subsets(scores, k), KSubsets(k).max(scores)):
        (gradient,) = torch.autograd.grad(f.sum(), k, retain_graph=True)
        assert torch.equal(gradient, torch.zeros_like(k))


@both
def test_a_bound_of_zero_excludes_and_its_derivative_is_from_above(choose, base) -> None:
    scores = torch.tensor([2.0, 1.0, -1.0, 0.3], dtype=torch.float64)
    upper = torch.tensor([0.0, 0.8, 0.0, 1.0], dtype=torch.float64)
    p = choose(scores, upper)
    assert p[0] == p[2] == 0
    step = 1e-7
    for i in (0, 2):
        change = step * torch.eye(4, dtype=torch.float64)[i]
        slope = (choose(scores, upper + change) - p) / step
        assert torch.allclose(jacrev(lambda u: choose(scores, u))(upper)[:, i], slope, atol=1e-6)


@both
def test_bounds_map_and_compile(choose, base) -> None:
    scores, upper = torch.randn(4, 3, 6), 0.2 + torch.rand(4, 3, 6)
    assert torch.allclose(vmap(choose)(scores, upper), choose(scores, upper), atol=1e-6)
    assert torch.allclose(
        vmap(choose, (None, 0))(scores[0], upper), choose(scores[0].expand(4, 3, 6), upper), atol=1e-6
    )
    torch._dynamo.reset()
    compiled = torch.compile(choose, fullgraph=True, backend="aot_eager")
    mine, theirs = upper.clone().requires_grad_(), upper.clone().requires_grad_()
    p, q = choose(scores, mine), compiled(scores, theirs)
    assert torch.allclose(p, q, atol=1e-6)
    p.square().sum().backward()
    q.square().sum().backward()
    assert torch.allclose(mine.grad, theirs.grad, atol=1e-5)


def test_operators_keep_what_their_shape_rules_promise() -> None:
    scores = torch.randn(4, 3, 5).permute(2, 0, 1)
    for rules in (BOUNDED_GINI, BOUNDED_SHANNON):
        for upper in (1.0, torch.full_like(scores, 0.5)):
            packed = (*pack((upper, 1.0)), rules.name)
            torch.library.opcheck(torch.ops.fenchel.argmax.default, (scores, *packed), test_utils="test_faketensor")
            args = (scores, torch.softmax(scores, -1), *packed)
            torch.library.opcheck(torch.ops.fenchel.max.default, args, test_utils="test_faketensor")


# -- max, loss and the rest of Ω ------------------------------------------------------------------------


def test_no_choice_scores_better() -> None:
    scores = torch.randn(6, dtype=torch.float64)
    upper = torch.tensor([0.3, 0.2, 0.5, 0.1, 0.9, 0.4], dtype=torch.float64)
    others = [k_subsets(torch.randn(200, 6, dtype=torch.float64), 2.5)]
    others += [choose(torch.randn(200, 6, dtype=torch.float64), upper) for choose, _ in MAPS]
    for omega, q in zip((KSubsets(2.5), Capped(upper), Capped(upper, Shannon())), others, strict=True):
        p, best = omega.argmax(scores), omega.max(scores)
        assert torch.allclose(p @ scores - omega(p), best, atol=1e-14)
        assert (q @ scores - omega(q) <= best + 1e-14).all()
        loss = omega.loss(scores.expand(200, 6), q)
        assert torch.allclose(loss, best + omega(q) - q @ scores, atol=1e-13)
        assert omega.loss(scores, p) < 1e-14


def test_an_offset_of_the_scores_moves_the_maximum_by_what_a_choice_sums_to() -> None:
    scores = torch.randn(2, 4, dtype=torch.float64)
    mask = torch.tensor([[True] * 4, [True, False, False, True]])
    assert torch.allclose(
        KSubsets(3).max(scores + 100, mask=mask) - KSubsets(3).max(scores, mask=mask),
        torch.tensor([300.0, 200.0], dtype=torch.float64),
    )
    omega = 0.5 * KSubsets(3)
    assert torch.allclose(omega.max(scores), 0.5 * KSubsets(3).max(scores / 0.5))
    assert torch.allclose(omega.argmax(scores), k_subsets(scores / 0.5, 3))
    y = torch.tensor([[1.0, 1, 1, 0], [0, 1, 1, 1]], dtype=torch.float64)
    assert torch.allclose(omega.loss(scores, y), omega.max(scores) - (y * scores).sum(-1))


def test_omega_is_its_base_and_zero_at_k_hot_vectors() -> None:
    p = torch.softmax(torch.randn(5, 4), -1)
    for base in (Gini(), Shannon()):
        assert torch.equal(Capped(0.1, base)(p), base(p))
    y = torch.tensor([1.0, 0, 1, 1, 0])
    assert KSubsets(3)(y) == 0
    q = k_subsets(torch.randn(5), 3)
    assert torch.allclose(KSubsets(3)(q), 0.5 * (q.square().sum() - 3))


def test_a_target_beyond_its_bound_is_impossible() -> None:
    scores = torch.randn(3, 4, requires_grad=True)
    omega = Capped(torch.tensor([1.0, 0.5, 0.5, 1.0]))
    loss = omega.loss(scores, torch.tensor([0, 1, 3]))
    assert (loss == torch.inf).tolist() == [False, True, False]
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    assert torch.allclose(gradient, omega.argmax(scores) - torch.eye(4)[[0, 1, 3]], atol=1e-6)
    soft = torch.tensor([[0.2, 0.5, 0.3, 0.0], [0.2, 0.3, 0.5, 0.0], [0.4, 0.6, 0.0, 0.0]])
    assert (omega.loss(scores, soft) == torch.inf).tolist() == [False, False, True]
    assert math.isinf(omega.margin)
    assert Capped(1.0).margin == 1
    assert Capped(torch.ones(4), Shannon()).margin == math.inf


def test_half_precision_rounds_no_target_out_of_its_box() -> None:
    scores = 3 * torch.randn(50, 6).bfloat16()
    omega = Capped(0.3)
    assert omega.loss(scores, omega.argmax(scores)).isfinite().all()


def test_losses_of_k_hot_targets() -> None:
    scores = torch.randn(3, 5, requires_grad=True)
    y = torch.tensor([[1.0, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0.5, 0.5, 0.5, 0.5, 0]])
    omega = KSubsets(2)
    each = fenchel.fy_loss(scores, y, omega, reduction="none")
    assert torch.allclose(each, omega.loss(scores, y))
    (gradient,) = torch.autograd.grad(each.sum(), scores)
    assert torch.allclose(gradient, k_subsets(scores, 2) - y, atol=1e-6)
    smooth = fenchel.fy_loss(scores, y, omega, reduction="none", label_smoothing=0.2)
    assert torch.allclose(smooth, omega.loss(scores, 0.8 * y + 0.2 * 2 / 5), atol=1e-6)
    assert fenchel.fy_loss(scores, y.bfloat16(), omega, label_smoothing=0.1).isfinite()
    index = torch.tensor([1, 0, 4])
    assert torch.allclose(KSubsets(1).loss(scores, index), Gini().loss(scores, index), atol=1e-6)
    assert torch.allclose(fenchel.fy_loss(scores, index, KSubsets(1)), fenchel.sparsemax_loss(scores, index))


def test_a_masked_target_is_impossible_and_one_that_fills_the_row_is_not() -> None:
    scores, mask = torch.randn(2, 4), torch.tensor([True, True, False, False])
    y = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 0]])
    loss = KSubsets(3).loss(scores, y, mask=mask)
    assert loss[0] == 0
    assert loss[1] == torch.inf


def test_modules_and_attention() -> None:
    scores = torch.randn(2, 3, 4)
    assert torch.equal(fenchel.nn.KSubsets(2, dim=1)(scores), k_subsets(scores, 2, dim=1))
    assert torch.equal(fenchel.nn.ConstrainedSparsemax(0.5)(scores), constrained_sparsemax(scores, 0.5))
    upper = torch.full((4,), 0.3)
    assert torch.equal(fenchel.nn.ConstrainedSoftmax(upper)(scores), constrained_softmax(scores, upper))
    query = torch.randn(2, 3, 4)
    _, weights = fenchel.attention(query, query, query, Capped(torch.full((3,), 0.4)), return_weights=True)
    assert (weights <= 0.4).all()
    assert repr(Capped(0.5, Shannon())) == "Capped(\n  upper=0.5\n  (omega): Shannon()\n)"
    assert repr(KSubsets(2)) == "KSubsets(k=2)"


def test_a_learnable_bound_is_a_parameter_and_a_fixed_one_is_not_saved() -> None:
    learnable = Capped(torch.nn.Parameter(torch.full((4,), 0.5)))
    assert list(learnable.state_dict()) == ["upper"]
    learnable.argmax(torch.tensor([2.0, 1.0, 0.5, 0.0])).square().sum().backward()
    assert learnable.upper.grad.abs().sum() > 0
    assert not list(Capped(torch.ones(4)).state_dict())


# -- bad input ------------------------------------------------------------------------------------------


@both
def test_bad_bounds_are_named(choose, base) -> None:
    scores = torch.randn(2, 3)
    for upper, error in (
        (-0.1, ValueError),
        (math.nan, ValueError),
        ("1", TypeError),
        (True, TypeError),
        (torch.ones(3, dtype=torch.long), TypeError),
        (torch.tensor([1.0, -0.1, 1.0]), ValueError),
        (torch.tensor([1.0, torch.nan, 1.0]), ValueError),
        (torch.ones(4), ValueError),
        (torch.ones(2, 2, 3), ValueError),
        (torch.tensor([0.3, 0.3, 0.3]), ValueError),
        (0.33, ValueError),
    ):
        with pytest.raises(error, match="upper"):
            choose(scores, upper)
        with pytest.raises(error, match="upper"):
            Capped(upper, base).max(scores)
    with pytest.raises(ValueError, match=r"sum to at least 1 .* got a row with sum 0\.9"):
        choose(scores, torch.tensor([[1.0, 1.0, 1.0], [0.3, 0.3, 0.3]]))
    choose(scores, torch.tensor([[1 / 3] * 3]))  # less than 1 by rounding alone
    choose(scores.half(), torch.full((3,), 1 / 3).half())


def test_what_stands_in_a_masked_bound_does_not_matter() -> None:
    scores, mask = torch.randn(2, 4), torch.tensor([True, True, True, False])
    clean, dirty = torch.full((4,), 0.5), torch.tensor([0.5, 0.5, 0.5, torch.nan])
    for choose, _ in MAPS:
        results = []
        for upper in (clean, dirty):
            upper = upper.clone().requires_grad_()
            p = choose(scores, upper, mask=mask)
            p.square().sum().backward()
            results.append((p, upper.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        empty = choose(scores, torch.full((4,), -1.0), mask=torch.zeros(4, dtype=torch.bool))
        assert torch.equal(empty, torch.zeros(2, 4))


def test_bad_k_and_bad_targets_are_named() -> None:
    scores = torch.randn(2, 4)
    for k, error in ((-0.5, ValueError), (-1, ValueError), (math.nan, ValueError), ("2", TypeError), (True, TypeError)):
        with pytest.raises(error, match="k must"):
            k_subsets(scores, k)
    with pytest.raises(ValueError, match="k must have size 1 along dim"):
        k_subsets(scores, torch.ones(4))
    with pytest.raises(ValueError, match="k must satisfy"):
        k_subsets(scores, torch.tensor([[1.0], [-1.0]]))
    assert torch.allclose(k_subsets(scores, torch.tensor([[1], [2]])).sum(-1), torch.tensor([1.0, 2.0]))
    for target in (torch.tensor([[1.0, 0, 0, 0]] * 2), torch.tensor([[2.0, 0, 0, 0]] * 2), torch.ones(2, 4)):
        with pytest.raises(ValueError, match=r"entries in \[0, 1\] that sum to k = 2"):
            KSubsets(2).loss(scores, target)
    with pytest.raises(ValueError, match="shape of scores"):
        KSubsets(2).loss(scores, torch.ones(2))
    with pytest.raises(ValueError, match="class indices go with k = 1"):
        KSubsets(2).loss(scores, torch.tensor([0, 1]))
    for omega in (Tsallis(1.5), KSubsets(2)):
        with pytest.raises(ValueError, match="omega must be Gini"):
            Capped(0.5, omega)


def test_a_budget_of_zero_chooses_nothing() -> None:
    scores = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 5, dtype=torch.float64)
    for k in (0, 0.0, torch.tensor(0), torch.zeros(3, 1)):
        p = k_subsets(scores, k)
        assert torch.equal(p, torch.zeros_like(p))
        (slope,) = torch.autograd.grad((weights * p).sum(), scores)
        assert torch.equal(slope, torch.zeros_like(slope))
        omega = KSubsets(k)
        assert torch.equal(omega.max(scores), torch.zeros(3, dtype=torch.float64))
        assert torch.equal(omega.loss(scores, torch.zeros_like(scores)), torch.zeros(3, dtype=torch.float64))
        assert omega.loss(scores, torch.zeros_like(scores)).requires_grad
    mixed = k_subsets(scores, torch.tensor([[0], [2], [9]]))
    assert torch.equal(mixed[0], torch.zeros(5, dtype=torch.float64))
    assert torch.allclose(mixed[1], k_subsets(scores[1], 2))
    assert torch.equal(mixed[2], torch.ones(5, dtype=torch.float64))


def test_a_budget_of_zero_grows_by_its_best_entry() -> None:
    scores = torch.tensor([0.3, 1.0, 0.2], dtype=torch.float64)
    k = torch.tensor([0.0], dtype=torch.float64, requires_grad=True)
    jacobian = torch.autograd.functional.jacobian(lambda k: k_subsets(scores, k), k).squeeze(-1)
    step = k_subsets(scores, 1e-3) / 1e-3
    assert torch.allclose(jacobian, step)
