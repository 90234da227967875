"""Logic factors are projections onto the hull of what they allow: on a grid of scores, with every negation."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from local_polytope import allowed, in_hull, knapsack_vertices

import fenchel
from fenchel.factors import (
    AndOut,
    AtMostOne,
    Budget,
    Exactly,
    Factor,
    Imply,
    Knapsack,
    Or,
    OrOut,
    Variables,
    Xor,
    XorOut,
)

COSTS = (0.5, 2.0, 1.0, 0.0)


@dataclass(frozen=True)
class Logic:
    make: Callable[[list[Variables]], Factor]
    vertices: Callable[[int], np.ndarray]


def _rule(rule: Callable[[tuple[int, ...]], bool]) -> Callable[[int], np.ndarray]:
    return lambda n: allowed(n, rule)


LOGIC = {
    "xor": Logic(lambda u: Xor(*u), _rule(lambda y: sum(y) == 1)),
    "at most one": Logic(lambda u: AtMostOne(*u), _rule(lambda y: sum(y) <= 1)),
    "or": Logic(lambda u: Or(*u), _rule(lambda y: sum(y) >= 1)),
    "imply": Logic(lambda u: Imply(*u), _rule(lambda y: y[-1] == 1 or 0 in y[:-1])),
    "xor out": Logic(lambda u: XorOut(*u), _rule(lambda y: sum(y[:-1]) == y[-1])),
    "or out": Logic(lambda u: OrOut(*u), _rule(lambda y: max(y[:-1]) == y[-1])),
    "and out": Logic(lambda u: AndOut(*u), _rule(lambda y: min(y[:-1]) == y[-1])),
    "budget 0": Logic(lambda u: Budget(u, 0), _rule(lambda y: sum(y) <= 0)),
    "budget 2": Logic(lambda u: Budget(u, 2), _rule(lambda y: sum(y) <= 2)),
    "budget 9": Logic(lambda u: Budget(u, 9), _rule(lambda y: True)),
    "exactly 0": Logic(lambda u: Exactly(u, 0), _rule(lambda y: sum(y) == 0)),
    "exactly 2": Logic(lambda u: Exactly(u, 2), _rule(lambda y: sum(y) == 2)),
    "knapsack": Logic(lambda u: Knapsack(u, COSTS[: len(u)], 1.25), lambda n: knapsack_vertices(COSTS[:n], 1.25)),
}

every_logic = pytest.mark.parametrize("logic", LOGIC.values(), ids=LOGIC)


def solved(logic: Logic, theta: torch.Tensor, negated: tuple[bool, ...]) -> torch.Tensor:
    graph = fenchel.FactorGraph()
    u = graph.variables(theta, batch_dims=1)
    graph.add(logic.make([~x if flip else x for x, flip in zip(u, negated, strict=True)]))
    solution = graph.solve()
    assert int(solution.iterations.max()) == 0
    return u.value


@every_logic
@pytest.mark.parametrize("n", [2, 3, 4])
def test_it_is_the_projection_onto_the_hull_whatever_is_negated(logic: Logic, n: int) -> None:
    ticks = {2: np.linspace(-1.6, 2.1, 12), 3: np.linspace(-1.3, 1.9, 6), 4: np.array([-1.2, 0.3, 1.1])}[n]
    theta = np.array(list(itertools.product(ticks, repeat=n)))
    theta = theta + np.random.default_rng(0).choice([0.0, 0.05], theta.shape)  # ties, and none
    for negated in itertools.product((False, True), repeat=n):
        p = solved(logic, torch.from_numpy(theta), negated).numpy()
        y = np.where(negated, 1 - logic.vertices(n), logic.vertices(n))
        # the projection is the point of the hull that no vertex sees at less than a right angle
        gain = ((theta - p)[:, None] * (y[None] - p[:, None])).sum(-1)
        assert gain.max() < 1e-12
        assert max(in_hull(row, y) for row in p[:: 1 + len(p) // 40]) < 1e-12


@pytest.mark.slow
@every_logic
def test_derivatives_are_those_of_finite_differences(logic: Logic) -> None:
    for negated in [(False,) * 4, (True, False, False, True), (False, True, True, False)]:
        theta = (torch.randn(3, 4, dtype=torch.float64) * 0.7 + 0.3).requires_grad_()
        call = lambda t, negated=negated: solved(logic, t, negated)  # noqa: E731
        assert torch.autograd.gradcheck(call, (theta,), check_forward_ad=True, fast_mode=any(negated))
        if call(theta).requires_grad:
            assert torch.autograd.gradgradcheck(call, (theta,), fast_mode=True)


def test_at_a_vertex_that_ties_do_not_reach_nothing_moves() -> None:
    theta = torch.tensor([[2.0, 0.5, 0.5, -1.0]], dtype=torch.float64, requires_grad=True)
    p = solved(LOGIC["xor"], theta, (False,) * 4)
    assert p.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    (grad,) = torch.autograd.grad((p * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum(), theta)
    assert grad.tolist() == [[0.0] * 4]


@pytest.mark.parametrize(
    ("make", "reference"),
    [
        (Xor, fenchel.sparsemax),
        (lambda u: Exactly(u, 3), lambda s: fenchel.k_subsets(s, 3)),
    ],
)
def test_alone_they_are_the_maps_we_know(
    make: Callable, reference: Callable, set_kernels: Callable[[bool], None]
) -> None:
    set_kernels(False)
    scores = torch.randn(7, 12, dtype=torch.float64) * 2
    graph = fenchel.FactorGraph()
    u = graph.variables(scores, batch_dims=1)
    graph.add(make(u))
    graph.solve()
    torch.testing.assert_close(u.value, reference(scores), rtol=0, atol=1e-14)


@pytest.mark.parametrize("scale", [1e6, 1e15, 1e30])
def test_huge_scores_and_offsets_keep_their_ties(scale: float) -> None:
    for make, total in [(Xor, 1.0), (lambda u: Budget(u, 2), 2.0), (lambda u: Exactly(u, 2), 2.0)]:
        graph = fenchel.FactorGraph()
        u = graph.variables(torch.tensor([scale, scale, scale, -scale, 0.0], dtype=torch.float64))
        graph.add(make(u))
        graph.solve()
        torch.testing.assert_close(u.value, torch.tensor([total / 3] * 3 + [0, 0], dtype=torch.float64))


def test_a_wide_knapsack_is_the_quadratic_program_of_cvxpy() -> None:
    import cvxpy as cp

    rng = np.random.default_rng(1)
    theta, costs = rng.normal(size=60), rng.uniform(0, 3, 60)
    p = cp.Variable(60)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(p - theta)), [p >= 0, p <= 1, costs @ p <= 7.5])
    problem.solve(solver=cp.CLARABEL)
    graph = fenchel.FactorGraph()
    u = graph.variables(torch.from_numpy(theta))
    graph.add(Knapsack(u, costs, 7.5))
    graph.solve()
    np.testing.assert_allclose(u.value.numpy(), p.value, atol=1e-6)
    assert u.value.numpy() @ costs == pytest.approx(7.5, abs=1e-12)


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda u: Exactly(u, 5), ValueError, "k must be at most the number of variables, 4"),
    (lambda u: Exactly(u, -1), ValueError, "k must be at least 0, got -1"),
    (lambda u: Budget(u, -1), ValueError, "k must be at least 0, got -1"),
    (lambda u: Budget(u, 1.5), TypeError, "k must be an int"),
    (lambda u: Knapsack(u, [1.0], 1.0), ValueError, "costs must have one entry per variable"),
    (lambda u: Knapsack(u, [1.0, 1.0, -1.0, 1.0], 1.0), ValueError, "costs must be finite and not negative"),
    (lambda u: Knapsack(u, [1.0] * 4, -1.0), ValueError, "budget must satisfy 0 <= budget"),
    (lambda u: Knapsack(u, torch.ones(4, requires_grad=True), 1.0), ValueError, "costs must not require grad"),
    (lambda u: Knapsack(u, [1.0] * 4, True), TypeError, "budget must be a number"),
    (lambda u: Xor(), ValueError, "at least one variable"),
    (lambda u: Xor(u[:0]), ValueError, "at least one variable"),
    (lambda u: Xor([1, 2]), TypeError, "variables must be what graph.variables"),
    (lambda u: OrOut(u[0]), ValueError, "OrOut takes at least two variables"),
    (lambda u: Imply(u[0]), ValueError, "Imply takes at least two variables"),
    (lambda u: Xor(u, fenchel.FactorGraph().variables(torch.zeros(2))), ValueError, "must belong to one graph"),
])  # fmt: skip
def test_bad_arguments_are_named(make: Callable, error: type[Exception], message: str) -> None:
    u = fenchel.FactorGraph().variables(torch.zeros(4))
    with pytest.raises(error, match=message):
        make(u)
