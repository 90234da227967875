"""Grouping regularizers: their problems solved by cvxpy, the groups, strength and its derivatives, masks, grids."""

import math
from collections.abc import Callable
from itertools import pairwise

import cvxpy
import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import jacfwd, jacrev
from torch.testing import assert_close

import fenchel
from fenchel import Fused, Gini, Oscar, Regularizer, TotalVariation2d, fusedmax, oscarmax, sparsemax, tvmax2d
from fenchel.regularizers.solvers import groups

EXACT = {"tol_gap_abs": 1e-12, "tol_gap_rel": 1e-12, "tol_feas": 1e-12}


def edges(kind: str, kept: np.ndarray) -> list[tuple[int, int]]:
    """The pairs of flat positions that a penalty is about."""
    places = [int(i) for i in np.flatnonzero(kept)]
    if kind == "fused":
        return list(pairwise(places))
    if kind == "oscar":
        return [(i, j) for i in places for j in places if i < j]
    height, width = kept.shape
    beside = [(i * width + j, i * width + j + 1) for i in range(height) for j in range(width - 1)]
    below = [(i * width + j, (i + 1) * width + j) for i in range(height - 1) for j in range(width)]
    return [(a, b) for a, b in beside + below if kept.flat[a] and kept.flat[b]]


def penalty(kind: str, p: cvxpy.Variable, kept: np.ndarray) -> cvxpy.Expression:
    a, b = (np.array(ends, dtype=int) for ends in zip(*edges(kind, kept), strict=True))
    return cvxpy.sum(cvxpy.maximum(p[a], p[b]) if kind == "oscar" else cvxpy.abs(p[a] - p[b]))


def quadratic_program(kind: str, scores: np.ndarray, strength: float, kept: np.ndarray) -> tuple[np.ndarray, float]:
    """The joint problem over the simplex, penalty and all."""
    p = cvxpy.Variable(scores.size)
    reward = np.where(kept, scores, 0.0).ravel() @ p - (cvxpy.sum_squares(p) - 1) / 2
    bounds = [p >= 0, cvxpy.sum(p) == 1]
    if not kept.all():
        bounds.append(p[np.flatnonzero(~kept)] == 0)
    value = cvxpy.Problem(cvxpy.Maximize(reward - strength * penalty(kind, p, kept)), bounds).solve(
        solver=cvxpy.CLARABEL, **EXACT
    )
    return p.value.reshape(scores.shape), value


MAPS = {"fused": (fusedmax, Fused, (7,)), "oscar": (oscarmax, Oscar, (7,)), "grid": (tvmax2d, TotalVariation2d, (3, 4))}
every_kind = pytest.mark.parametrize("kind", MAPS)
both_paths = pytest.mark.parametrize("kernels", ["on", "off"])


@every_kind
@both_paths
@pytest.mark.parametrize("strength", [0.02, 0.1, 0.5])
def test_the_answer_is_that_of_the_joint_quadratic_program(
    kind: str, kernels: str, strength: float, set_kernels: Callable[[bool], None]
) -> None:
    """So sparsemax after the proximal map is right for all three, which is not so for every penalty."""
    set_kernels(kernels == "on")
    choose, omega, shape = MAPS[kind]
    generator = np.random.default_rng(0)
    for scale, share in ((0.1, 1.0), (1.0, 1.0), (1.0, 0.7), (3.0, 0.9)):
        scores = scale * generator.normal(size=shape) + 5
        kept = generator.random(shape) < share
        kept.flat[[0, 1]] = True
        s, mask = torch.from_numpy(scores), torch.from_numpy(kept)
        expected, value = quadratic_program(kind, scores, strength, kept)
        assert np.allclose(choose(s, strength, mask=mask).numpy(), expected, atol=1e-7)
        assert omega(strength).max(s, mask=mask).item() == pytest.approx(value, abs=1e-9)


def test_oscarmax_is_not_the_split_on_magnitudes() -> None:
    scores = torch.tensor([0.0, -0.143, -2.859, -0.19], dtype=torch.float64)
    expected = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64) / 3
    assert torch.allclose(oscarmax(scores, 1.0), expected, atol=1e-15)


def test_the_proximal_map_of_variation_is_that_of_a_dense_quadratic_program() -> None:
    z = torch.randn(12, dtype=torch.float64)
    for strength in (0.05, 0.4, 2.0):
        y = cvxpy.Variable(12)
        objective = cvxpy.sum_squares(y - z.numpy()) / 2 + strength * cvxpy.norm1(cvxpy.diff(y))
        cvxpy.Problem(cvxpy.Minimize(objective)).solve(solver=cvxpy.CLARABEL, **EXACT)
        ours = groups.fuse(z, torch.tensor([strength], dtype=torch.float64))
        assert np.allclose(ours.numpy(), y.value, atol=1e-8)


@both_paths
def test_a_flow_proves_that_tvmax2d_is_exact(kernels: str, set_kernels: Callable[[bool], None]) -> None:
    """p is optimal if and only if some flow u, |u| ≤ λ and = λ·sign where p differs, has s − div u − p = τ on the
    support and ≤ τ off it. A linear program finds how nearly that can be met."""
    set_kernels(kernels == "on")
    strength, shape = 0.1, (6, 7)
    pairs = edges("grid", np.ones(shape, dtype=bool))
    n, m = math.prod(shape), len(pairs)
    divergence = np.zeros((n, m))
    for k, (i, j) in enumerate(pairs):
        divergence[i, k], divergence[j, k] = 1, -1
    for scale in (0.1, 0.5, 2.0):
        s = scale * torch.randn(shape, dtype=torch.float64)
        p = tvmax2d(s, strength).numpy().ravel()
        fixed = [strength * np.sign(p[i] - p[j]) for i, j in pairs]
        flows = [(f, f) if f else (-strength, strength) for f in fixed]
        on, rest, ones = p > 0, s.numpy().ravel() - p, np.ones((n, 1))
        below = np.hstack([-divergence, -ones, -ones])  # s − p − div u − τ ≤ ε everywhere …
        above = np.hstack([divergence, ones, -ones])[on]  # … and ≥ −ε on the support
        program = linprog(
            np.eye(m + 2)[-1],
            A_ub=np.vstack([below, above]),
            b_ub=np.concatenate([-rest, rest[on]]),
            bounds=[*flows, (None, None), (0, None)],
            method="highs",
        )
        assert program.status == 0
        assert program.fun < 1e-8


@every_kind
def test_zero_strength_is_sparsemax_and_gini(kind: str) -> None:
    choose, omega, shape = MAPS[kind]
    for strength in (0.0, torch.zeros((1,) * len(shape), dtype=torch.float64)):
        scores = torch.randn(5, *shape, dtype=torch.float64).mul(2).round().div(2).requires_grad_()
        p, q = choose(scores, strength), sparsemax(scores.flatten(1)).view_as(scores)
        assert torch.allclose(p, q, atol=1e-15)
        direction = torch.randn_like(p)
        (g,), (h,) = (torch.autograd.grad(r, scores, direction) for r in (p, q))
        assert torch.allclose(g, h, atol=1e-14)
        assert torch.equal(omega(strength)(p.detach()), Gini()(p.detach().flatten(1)))


@pytest.mark.parametrize(("map_", "omega"), [(fusedmax, Fused), (oscarmax, Oscar)])
def test_a_huge_strength_shares_evenly(map_: object, omega: type[Regularizer]) -> None:
    for strength in (1e3, 1e30):
        for dtype in (torch.float32, torch.float64):
            p = map_(3 * torch.randn(4, 50, dtype=dtype), strength)  # type: ignore[operator]
            assert (p == p[:, :1]).all()
            assert torch.allclose(p, torch.full_like(p, 1 / 50))


@every_kind
@both_paths
def test_the_gradient_takes_means_over_groups(kind: str, kernels: str, set_kernels: Callable[[bool], None]) -> None:
    """Against finite differences of the map itself, at points where groups of every size occur."""
    set_kernels(kernels == "on")
    choose, _, shape = MAPS[kind]
    shape = (4, 5) if kind == "grid" else (16,)
    for scale in (0.1, 0.25):
        scores = scale * torch.randn(shape, dtype=torch.float64)
        strength = 0.02 if kind == "oscar" else 0.1
        p = choose(scores, strength)
        assert len(p[p > 0].unique()) < (p > 0).sum()  # something is fused
        jacobian = jacrev(lambda s: choose(s, strength))(scores).reshape(p.numel(), -1)  # noqa: B023
        step = 1e-7
        units = step * torch.eye(p.numel(), dtype=torch.float64).view(-1, *shape)
        differences = (choose(scores + units, strength) - choose(scores - units, strength)).flatten(1) / (2 * step)
        assert torch.allclose(jacobian, differences, atol=1e-6)


@every_kind
def test_strength_has_right_derivatives_too(kind: str) -> None:
    choose, omega, shape = MAPS[kind]
    shape = (2, 3) if kind == "grid" else (5,)
    scores = (0.4 * torch.randn(2, *shape, dtype=torch.float64)).requires_grad_()
    strength = torch.tensor([0.03, 0.07], dtype=torch.float64).view(2, *[1] * len(shape)).requires_grad_()
    target = torch.tensor([1, 3])
    for f in (choose, lambda s, a: omega(a).max(s), lambda s, a: omega(a).loss(s, target)):
        assert gradcheck(f, (scores, strength), check_forward_ad=True)
        assert gradgradcheck(f, (scores, strength), check_fwd_over_rev=True)
    mask = torch.rand(2, *shape) < 0.7
    assert gradcheck(lambda s, a: choose(s, a, mask=mask), (scores, strength), check_forward_ad=True)
    assert gradcheck(lambda s, a: omega(a).max(s, mask=mask), (scores, strength), check_forward_ad=True)


@every_kind
def test_omega_is_gini_plus_the_penalty(kind: str) -> None:
    _, omega, shape = MAPS[kind]
    p = torch.distributions.Dirichlet(torch.ones(math.prod(shape), dtype=torch.float64)).sample()
    a, b = (p[list(ends)] for ends in zip(*edges(kind, np.ones(shape, dtype=bool)), strict=True))
    price = (torch.maximum(a, b) if kind == "oscar" else (a - b).abs()).sum()
    assert torch.allclose(omega(0.3)(p.view(shape)), (p @ p - 1) / 2 + 0.3 * price)


@every_kind
def test_the_loss_counts_omega_at_the_target(kind: str) -> None:
    _, omega, shape = MAPS[kind]
    scores = torch.randn(6, *shape, dtype=torch.float64)
    target = torch.arange(6)
    y = torch.nn.functional.one_hot(target, math.prod(shape)).double().view(6, *shape)
    by_definition = omega(0.1).max(scores) + omega(0.1)(y) - (scores * y).flatten(1).sum(-1)
    assert torch.allclose(omega(0.1).loss(scores, target), by_definition, atol=1e-14)
    assert torch.allclose(omega(0.1).loss(scores, y), by_definition, atol=1e-14)


def test_the_loss_under_a_mask_is_that_of_the_entries_that_are_left() -> None:
    scores, mask = torch.randn(7, dtype=torch.float64), torch.tensor([True, False, True, True, False, False, True])
    y = torch.tensor([0.5, 0.0, 0.2, 0.0, 0.0, 0.0, 0.3], dtype=torch.float64)
    for omega in (Fused(0.2), Oscar(0.2)):
        assert torch.allclose(omega.loss(scores, y, mask=mask), omega.loss(scores[mask], y[mask]), atol=1e-15)
        index = omega.loss(scores, torch.tensor(3), mask=mask)
        assert torch.allclose(index, omega.loss(scores[mask], torch.tensor(2)), atol=1e-15)
        assert omega.loss(scores, torch.tensor(1), mask=mask) == torch.inf


def test_neighbours_of_masked_entries_become_neighbours_in_a_row_but_not_on_a_grid() -> None:
    scores = torch.tensor([0.3, 5.0, 0.25, -0.3], dtype=torch.float64)
    mask = torch.tensor([True, False, True, True])
    p = fusedmax(scores, 0.05, mask=mask)
    assert p[0] == p[2] > 0
    assert not p.signbit().any()
    jacobian = jacrev(lambda s: fusedmax(s, 0.05, mask=mask))(scores)
    assert torch.equal(jacobian[0], jacobian[2])
    q = tvmax2d(scores[None], 0.05, mask=mask[None])
    assert q[0, 0] > q[0, 2] > 0


@both_paths
@pytest.mark.parametrize("place", [0, 1, 3])
def test_the_margin_of_fused_is_tight(place: int, kernels: str, set_kernels: Callable[[bool], None]) -> None:
    """Worst beside the end; anywhere, the lead must pay for the neighbours and for what the others share of it."""
    set_kernels(kernels == "on")
    strength = 0.25
    margin = Fused(strength).margin
    assert margin == 1.75
    for lead, alone in ((margin, True), (margin - 1e-6, place != 1)):
        scores = torch.zeros(7, dtype=torch.float64)
        scores[place] = lead
        assert (fusedmax(scores, strength)[place] == 1) == alone


def test_the_margin_of_the_grid_is_tight_at_a_cross() -> None:
    strength = 0.25
    cross = torch.tensor([[False, True, False], [True, True, True], [False, True, False]])
    scores = torch.zeros(3, 3, dtype=torch.float64)
    margin = TotalVariation2d(strength).margin
    for lead, alone in ((margin, True), (margin - 1e-6, False)):
        scores[1, 1] = lead
        assert (tvmax2d(scores, strength, cross)[1, 1] == 1) == alone
    for lead, alone in ((1 + 4.5 * strength, True), (1 + 4.5 * strength - 1e-6, False)):
        scores[1, 1] = lead
        assert (tvmax2d(scores, strength)[1, 1] == 1) == alone


@pytest.mark.parametrize("n", [2, 5, 40])
def test_oscar_needs_a_lead_that_grows_with_the_width(n: int) -> None:
    assert Oscar().margin is None
    strength = 0.1
    for lead, alone in ((1 + strength * n / 2 + 1e-12, True), (1 + strength * n / 2 - 1e-6, False)):
        scores = torch.zeros(n, dtype=torch.float64)
        scores[0] = lead
        assert (oscarmax(scores, strength)[0] == 1) == alone


def test_oscarmax_is_even_from_the_strength_that_its_docstring_tells() -> None:
    for n in (3, 50):
        scores = torch.randn(20, n, dtype=torch.float64)
        strength = 2 * (scores.amax(-1) - scores.amin(-1)) / n
        assert torch.allclose(oscarmax(scores, strength[:, None]), torch.full_like(scores, 1 / n), atol=1e-15)


def test_a_line_of_pixels_is_a_row() -> None:
    scores = 0.5 * torch.randn(20, 9, dtype=torch.float64)
    for grid in (scores.unsqueeze(-2), scores.unsqueeze(-1)):
        assert torch.allclose(tvmax2d(grid, 0.1).view_as(scores), fusedmax(scores, 0.1), atol=1e-15)


def test_the_torch_path_of_the_grid_gives_what_the_kernel_gives(set_kernels: Callable[[bool], None]) -> None:
    for strength in (0.0, 0.01, 0.1, 1.0, 1e6):
        for scale, shape in ((0.1, (3, 5, 5)), (1.0, (3, 8, 6)), (1e30, (2, 4, 4)), (1.0, (2, 1, 1)), (1.0, (0, 3, 3))):
            scores = (scale * torch.randn(shape, dtype=torch.float64)).requires_grad_()
            mask = torch.rand(shape) < 0.9
            direction = torch.randn(shape, dtype=torch.float64)
            results = []
            for switch in ("on", "off"):
                set_kernels(switch == "on")
                p = tvmax2d(scores, strength, mask)
                results.append((p, *torch.autograd.grad(p, scores, direction)))
            for ours, theirs in zip(*results, strict=True):
                assert torch.allclose(ours, theirs, atol=1e-13, rtol=0)


def test_derivatives_of_the_grid_agree_in_every_mode() -> None:
    scores = 0.3 * torch.randn(3, 3, dtype=torch.float64)
    first = [mode(tvmax2d)(scores) for mode in (jacrev, jacfwd)]
    assert torch.equal(*first)
    for outer in (jacrev, jacfwd):
        for inner in (jacrev, jacfwd):
            assert (outer(inner(tvmax2d))(scores) == 0).all()
    batch = torch.randn(4, 3, 3, dtype=torch.float64)
    assert torch.equal(torch.func.vmap(tvmax2d)(batch), tvmax2d(batch))


def test_the_grid_is_outside_of_graphs() -> None:
    scores = torch.randn(2, 3, 3)
    with pytest.raises(Exception, match="tvmax2d"):
        torch.compile(tvmax2d, fullgraph=True, backend="eager")(scores)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(tvmax2d, backend="eager")(scores), tvmax2d(scores))
    with pytest.raises(RuntimeError, match="cannot be traced"):
        torch.fx.experimental.proxy_tensor.make_fx(lambda s: tvmax2d(s))(scores)


def test_a_grid_may_stand_in_any_pair_of_dimensions_or_be_flattened() -> None:
    scores, mask = torch.randn(2, 3, 4, 5), torch.rand(2, 3, 4, 5) < 0.9
    omega, flat = TotalVariation2d(0.1), TotalVariation2d(0.1, shape=(4, 5))
    p = omega.argmax(scores, mask=mask)
    assert torch.equal(
        omega.argmax(scores.permute(2, 0, 3, 1), (0, 2), mask.permute(2, 0, 3, 1)).permute(1, 3, 0, 2), p
    )
    assert torch.equal(flat.argmax(scores.flatten(-2), mask=mask.flatten(-2)), p.flatten(-2))
    moved = flat.argmax(scores.flatten(-2).movedim(-1, 0), 0, mask.flatten(-2).movedim(-1, 0))
    assert torch.equal(moved.movedim(0, -1), p.flatten(-2))
    assert torch.equal(flat.max(scores.flatten(-2)), omega.max(scores))
    target = torch.randint(20, (2, 3))
    assert torch.equal(flat.loss(scores.flatten(-2), target), omega.loss(scores, target))
    assert torch.equal((0.5 * flat).argmax(scores.flatten(-2)), tvmax2d(2 * scores).flatten(-2))


def test_attention_over_the_patches_of_an_image() -> None:
    query, key, value = torch.randn(3, 2, 12, 8).unbind()
    output, weights = fenchel.attention(query, key, value, TotalVariation2d(0.1, shape=(3, 4)), return_weights=True)
    scores = query @ key.transpose(-2, -1) / 8**0.5
    assert torch.allclose(weights.view(2, 12, 3, 4), tvmax2d(scores.view(2, 12, 3, 4)), atol=1e-6)
    assert torch.allclose(output, weights @ value)


@pytest.mark.parametrize(
    ("call", "error", "names"),
    [
        (lambda: tvmax2d(torch.ones(3)), ValueError, "scores"),
        (lambda: tvmax2d(torch.ones(2, 0)), ValueError, "scores"),
        (lambda: tvmax2d(torch.ones(2, 2, dtype=torch.long)), TypeError, "scores"),
        (lambda: tvmax2d([[1.0]]), TypeError, "scores"),
        (lambda: tvmax2d(torch.ones(2, 2), mask=torch.ones(3, 3, dtype=torch.bool)), ValueError, "mask"),
        (lambda: tvmax2d(torch.ones(2, 2), torch.ones(2, 1)), ValueError, "strength"),
        (lambda: tvmax2d(torch.ones(2, 2), torch.ones(3, 1, 1)), ValueError, "strength"),
        (lambda: TotalVariation2d().argmax(torch.ones(2, 4), -1), ValueError, "shape"),
        (lambda: TotalVariation2d().argmax(torch.ones(2, 4), (-1, 1)), ValueError, "dim"),
        (lambda: TotalVariation2d().argmax(torch.ones(2, 4), (-1, 5)), ValueError, "dim"),
        (lambda: TotalVariation2d().argmax(torch.ones(2, 4), "all"), TypeError, "dim"),
        (lambda: TotalVariation2d(shape=(2, 3)).argmax(torch.ones(2, 4)), ValueError, "scores"),
        (lambda: TotalVariation2d(shape=(2, 3)).argmax(torch.ones(2, 4), (0, 1)), ValueError, "scores"),
        (lambda: TotalVariation2d(shape=(2, 0)), ValueError, "shape"),
        (lambda: TotalVariation2d().loss(torch.ones(2, 2), torch.ones(2, 3)), ValueError, "target"),
        (lambda: TotalVariation2d().loss(torch.ones(2, 2), torch.tensor(4)), ValueError, "target"),
    ],
)
def test_bad_input_to_grids_is_named(call: object, error: type[Exception], names: str) -> None:
    with pytest.raises(error, match=names):
        call()  # type: ignore[operator]


@every_kind
@pytest.mark.parametrize(
    ("strength", "error"),
    [
        (-0.1, ValueError),
        (math.inf, ValueError),
        (math.nan, ValueError),
        ("1", TypeError),
        (True, TypeError),
        (torch.tensor(-1.0), ValueError),
        (torch.tensor(1), TypeError),
    ],
)
def test_a_bad_strength_is_named(kind: str, strength: object, error: type[Exception]) -> None:
    choose, omega, shape = MAPS[kind]
    with pytest.raises(error, match="strength"):
        choose(torch.ones(shape), strength)
    with pytest.raises(error, match="strength"):
        omega(strength)


@every_kind
def test_a_learnable_strength_is_in_the_state_dict_and_a_fixed_one_is_not(kind: str) -> None:
    _, omega, _ = MAPS[kind]
    assert not omega(0.1).state_dict()
    assert not omega(torch.tensor(0.1)).state_dict()
    assert list(omega(torch.nn.Parameter(torch.tensor(0.1))).state_dict()) == ["strength"]
    assert "strength=0.1" in repr(omega(0.1))


def test_what_is_fused_is_equal_to_the_bit_in_single_precision() -> None:
    scores = torch.randn(50, 200)
    single, double = fusedmax(0.3 * scores, 0.3), fusedmax((0.3 * scores).double(), 0.3)
    assert torch.allclose(single.double(), double, atol=1e-7)
    support: Tensor = double > 0
    assert torch.equal((single[:, 1:] == single[:, :-1]) & support[:, 1:], (double.diff(dim=-1) == 0) & support[:, 1:])


def test_losses_and_modules_take_grids() -> None:
    scores, omega = torch.randn(2, 3, 4, 5), TotalVariation2d(0.1)
    index, soft = torch.randint(20, (2, 3)), torch.randn(2, 3, 4, 5).flatten(-2).softmax(-1).view(2, 3, 4, 5)
    for target in (index, soft):
        expected = omega.loss(scores, target)
        for dim in (-1, (-2, -1)):
            assert torch.equal(fenchel.fy_loss(scores, target, omega, dim=dim, reduction="none"), expected)
        assert torch.equal(fenchel.nn.FenchelYoungLoss(omega, reduction="none")(scores, target), expected)
    assert torch.equal(fenchel.nn.Argmax(omega)(scores), tvmax2d(scores))
    with pytest.raises(ValueError, match="shape must be a pair"):
        TotalVariation2d(0.1, shape=5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scores", "strength", "expected"),
    [
        ([1e20, 0.0], 1e16, [1.0, 0.0]),  # the lead is above twice the strength
        ([0.0, -1e30, -1e30], 1e30, [1 / 3] * 3),
        ([3e30, -1e30, 2e30, 0.0, 1e30], 1e16, [1.0, 0.0, 0.0, 0.0, 0.0]),
        ([3e12, -1e12, 2e12, 0.0, 1e12], 1e16, [0.2] * 5),
        ([3e9, -1e9, 2e9, 0.0, 1e9], 1e10, [0.2] * 5),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_strong_penalties_of_huge_scores_keep_the_sum(
    scores: list[float], strength: float, expected: list[float], dtype: torch.dtype
) -> None:
    wanted = torch.tensor(expected, dtype=dtype)
    assert_close(fenchel.fusedmax(torch.tensor(scores, dtype=dtype), strength), wanted)
