"""Factor graphs agree with the program over their local polytope: values, maxima, derivatives.

One file, because every test compares with the same program over the local polytope.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from local_polytope import Local, Part, allowed, in_hull
from scipy.optimize import linear_sum_assignment, linprog

from fenchel import FactorGraph
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
    Pair,
    Structured,
    Variables,
    Xor,
    XorOut,
)
from fenchel.structures import Subsets

RULES: dict[str, Callable[[tuple[int, ...]], bool]] = {
    "Xor": lambda y: sum(y) == 1,
    "AtMostOne": lambda y: sum(y) <= 1,
    "Or": lambda y: sum(y) >= 1,
    "Imply": lambda y: y[-1] == 1 or 0 in y[:-1],
    "XorOut": lambda y: sum(y[:-1]) == y[-1],
    "OrOut": lambda y: max(y[:-1]) == y[-1],
    "AndOut": lambda y: min(y[:-1]) == y[-1],
    "Budget": lambda y: sum(y) <= 2,
    "Exactly": lambda y: sum(y) == 2,
}
MAKE: dict[str, Callable[[list[Variables]], Factor]] = {
    "Xor": lambda u: Xor(*u),
    "AtMostOne": lambda u: AtMostOne(*u),
    "Or": lambda u: Or(*u),
    "Imply": lambda u: Imply(*u),
    "XorOut": lambda u: XorOut(*u),
    "OrOut": lambda u: OrOut(*u),
    "AndOut": lambda u: AndOut(*u),
    "Budget": lambda u: Budget(u, 2),
    "Exactly": lambda u: Exactly(u, 2),
}


def add(graph: FactorGraph, local: Local, u: Variables, kind: str, index: list[int], negated: list[bool]) -> None:
    graph.add(MAKE[kind]([~u[i] if flip else u[i] for i, flip in zip(index, negated, strict=True)]))
    local.parts.append(Part(index, allowed(len(index), RULES[kind]), negated))


def add_pair(graph: FactorGraph, local: Local, u: Variables, i: int, j: int, score: float) -> None:
    graph.add(Pair(u[i], u[j], score))
    local.parts.append(Part([i, j], allowed(2, lambda y: True), None, np.array([0, 0, 0, score])))


def same_graph(local: Local, theta: np.ndarray) -> tuple[FactorGraph, Variables]:
    """The graph of a program, factor by factor, with other scores."""
    graph = FactorGraph()
    u = graph.variables(torch.from_numpy(theta))
    rules = {allowed(n, rule).tobytes() + bytes([n]): kind for kind, rule in RULES.items() for n in (2, 3, 4)}
    for part in local.parts:
        if part.scores is not None:
            graph.add(Pair(u[part.index[0]], u[part.index[1]], float(part.scores[-1])))
            continue
        kind = rules[part.vertices.tobytes() + bytes([len(part.index)])]
        flips = part.negated or [False] * len(part.index)
        graph.add(MAKE[kind]([~u[i] if flip else u[i] for i, flip in zip(part.index, flips, strict=True)]))
    return graph, u


def vertex(local: Local, theta: np.ndarray) -> tuple[np.ndarray, float]:
    """A vertex of the local polytope that maximizes the scores, by the simplex method."""
    columns, cost, rows, right = local.count, [-theta], [], []
    for part in local.parts:
        cost.append(np.zeros(len(part.vertices)) if part.scores is None else -part.scores)
    total = sum(len(c) for c in cost)
    for part in local.parts:
        y = part.vertices if part.negated is None else np.where(part.negated, 1 - part.vertices, part.vertices)
        block = np.zeros((1 + y.shape[1], total))
        block[0, columns : columns + len(y)] = 1
        block[1:, columns : columns + len(y)] = y.T
        block[1 + np.arange(y.shape[1]), part.index] = -1
        rows.append(block)
        right += [1.0] + [0.0] * y.shape[1]
        columns += len(y)
    found = linprog(np.concatenate(cost), A_eq=np.concatenate(rows), b_eq=right, bounds=(0, 1), method="highs-ds")
    if found.status != 0:
        raise ValueError(found.message)
    return found.x[: local.count], -found.fun


def loopy(seed: int) -> tuple[FactorGraph, Variables, Local, np.ndarray]:
    """Factors of random kinds over variables that they share, some negated; scores of random size."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(5, 11))
    theta = rng.normal(size=count) * rng.choice([0.5, 2.0, 8.0])
    graph, local = FactorGraph(), Local(count)
    u = graph.variables(torch.from_numpy(theta))
    for kind in rng.choice(list(RULES), 4):
        size = int(rng.integers(2, 5))
        add(graph, local, u, kind, rng.choice(count, size, replace=False).tolist(), (rng.random(size) < 0.3).tolist())
    for _ in range(3):
        i, j = rng.choice(count, 2, replace=False).tolist()
        add_pair(graph, local, u, i, j, float(rng.normal() * 1.5))
    return graph, u, local, theta


@pytest.mark.parametrize("seed", range(25))
def test_loopy_graphs_are_the_program_over_the_local_polytope(seed: int) -> None:
    graph, u, local, theta = loopy(seed)
    try:
        expected, _ = local.solve(theta)
    except ValueError:
        with pytest.raises(ValueError, match="infeasible"):
            graph.solve()
        return
    solution = graph.solve()
    assert bool(solution.converged)
    np.testing.assert_allclose(u.value.numpy(), expected, atol=2e-6)
    assert bool(((u.value >= 0) & (u.value <= 1)).all())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_map_reaches_the_linear_programs_maximum(seed: int) -> None:
    graph, u, local, theta = loopy(seed)
    try:
        _, best = local.solve(theta, quadratic=False)
    except ValueError:
        with pytest.raises(ValueError, match="infeasible"):
            graph.map()
        return
    assert bool(graph.map().converged)
    mu = u.value.numpy()
    reached = float(theta @ mu)
    for part in local.parts:
        if part.scores is not None:
            (p, q), score = mu[part.index], part.scores[-1]
            reached += score * (min(p, q) if score > 0 else max(0.0, p + q - 1))
    assert reached == pytest.approx(best, abs=1e-7)
    plain = Local(local.count, [Part(part.index, part.vertices, part.negated) for part in local.parts])
    assert plain.solve(mu)[0] == pytest.approx(mu, abs=1e-5)  # in the polytope: its own projection


@pytest.mark.parametrize("seed", range(8))
def test_trees_of_factors_are_sparsemap_over_all_that_is_allowed_jointly(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    count = 8
    theta = rng.normal(size=count)
    graph, local = FactorGraph(), Local(count)
    u = graph.variables(torch.from_numpy(theta))
    kinds = rng.choice([k for k in RULES if k != "Exactly"], 2)
    add(graph, local, u, kinds[0], [0, 1, 2], (rng.random(3) < 0.4).tolist())
    add(graph, local, u, kinds[1], [2, 3, 4], (rng.random(3) < 0.4).tolist())
    for i, j in [(4, 5), (5, 6), (3, 7)]:
        add_pair(graph, local, u, i, j, float(rng.normal()))
    expected, _ = Local(count, [local.joint()]).solve(theta)
    graph.solve()
    np.testing.assert_allclose(u.value.numpy(), expected, atol=2e-6)


def test_a_cycle_of_exclusions_is_a_relaxation_and_no_more() -> None:
    graph = FactorGraph()
    u = graph.variables(torch.full((3,), 5.0, dtype=torch.float64))
    for i, j in itertools.combinations(range(3), 2):
        graph.add(AtMostOne(u[i], u[j]))
    graph.map()
    torch.testing.assert_close(u.value, torch.full((3,), 0.5, dtype=torch.float64))  # integers would reach 5, this 7.5


def test_every_variable_is_regularized_once() -> None:
    scores = torch.randn(6, dtype=torch.float64)
    values = []
    for times in (1, 2, 3):
        graph = FactorGraph()
        u = graph.variables(scores)
        for _ in range(times):
            graph.add(Xor(u))
        graph.solve()
        values.append(u.value)
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=1e-14)
    torch.testing.assert_close(values[2], values[0], rtol=0, atol=1e-14)


def test_a_variable_without_a_factor_is_clipped() -> None:
    scores = torch.tensor([-1.0, 0.25, 3.0, 0.5, 0.5], dtype=torch.float64, requires_grad=True)
    graph = FactorGraph()
    u = graph.variables(scores)
    graph.add(Xor(u[3:]))
    graph.solve()
    assert u.value.tolist() == [0.0, 0.25, 1.0, 0.5, 0.5]
    graph.add(AtMostOne(u[3:]))  # now by ADMM
    graph.solve()
    torch.testing.assert_close(u.value, torch.tensor([0.0, 0.25, 1.0, 0.5, 0.5], dtype=torch.float64))
    (grad,) = torch.autograd.grad(u.value.sum(), scores)
    assert grad[:3].tolist() == [0.0, 1.0, 0.0]


def mixed(scores: torch.Tensor, attraction: torch.Tensor, batch_dims: int = 0) -> torch.Tensor:
    """One graph with every kind of factor, overlapping, on a 3 × 4 array of variables."""
    graph = FactorGraph()
    u = graph.variables(scores, batch_dims=batch_dims)
    for row in u:
        graph.add(AtMostOne(row))
    graph.add(Budget(u[:, 0], 2))
    graph.add(Knapsack(u[:, 1], [1.0, 2.0, 0.5], 1.2))
    graph.add(OrOut(u[0, :2], ~u[2, 3]))
    graph.add(AndOut(u[1, ::2], u[0, 3]))
    graph.add(Imply(u[0, 2], u[1, 3]))
    graph.add(XorOut(u[2, 0], u[2, 1], u[1, 1]))
    graph.add(Or(~u[0, 0], u[2, 2]))
    graph.add(Exactly([u[0, 1], ~u[1, 0], u[2, 0]], 1))
    graph.add(Pair(u[0], u[1], attraction))
    graph.solve()
    return u.value


@pytest.mark.slow
def test_derivatives_of_every_order_in_scores_and_higher_order_scores() -> None:
    scores = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    attraction = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(mixed, (scores, attraction))
    assert torch.autograd.gradcheck(mixed, (scores, attraction), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(mixed, (scores, attraction), fast_mode=True)


def test_batches_are_loops() -> None:
    scores = torch.randn(2, 3, 3, 4, dtype=torch.float64, requires_grad=True)
    attraction = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn_like(scores)
    together = mixed(scores, attraction, batch_dims=2)
    alone = torch.stack([torch.stack([mixed(scores[i, j], attraction[i, j]) for j in range(3)]) for i in range(2)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
    got = torch.autograd.grad(together, (scores, attraction), cotangent)
    expected = torch.autograd.grad(alone, (scores, attraction), cotangent)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


def test_one_score_for_the_whole_batch_collects_its_gradient() -> None:
    scores = torch.randn(5, 3, 4, dtype=torch.float64)
    shared = torch.randn(4, dtype=torch.float64, requires_grad=True)
    split = shared.detach().expand(5, 4).clone().requires_grad_()
    (got,) = torch.autograd.grad(mixed(scores, shared, 1).square().sum(), shared)
    (expected,) = torch.autograd.grad(mixed(scores, split, 1).square().sum(), split)
    torch.testing.assert_close(got, expected.sum(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_shape_and_dtype_out_are_those_in(dtype: torch.dtype) -> None:
    scores = torch.randn(2, 3, 4).to(dtype).requires_grad_()
    graph = FactorGraph()
    u = graph.variables(scores, batch_dims=1)
    graph.add(Xor(u))
    graph.add(Budget(u[0], 0))
    graph.solve()
    assert u.value.dtype == dtype
    assert u.value.shape == (2, 3, 4)
    (grad,) = torch.autograd.grad(u.value.float().square().sum(), scores)
    assert grad.dtype == dtype
    assert graph.map().converged.shape == (2,)


def test_slices_and_negations_are_numpys() -> None:
    graph = FactorGraph()
    u = graph.variables(torch.rand(2, 4, 5, dtype=torch.float64), batch_dims=1)
    graph.solve()
    value = u.value
    for key in [1, (slice(None), 2), (slice(None, None, -1), slice(1, 4)), (..., -1), ([0, 2], [1, 3]), None]:
        picked = u[key]
        expected = value.numpy()[:, *(key if isinstance(key, tuple) else (key,))]
        np.testing.assert_array_equal(picked.value.numpy(), expected)
        np.testing.assert_array_equal((~picked).value.numpy(), 1 - expected)
        np.testing.assert_array_equal((~~picked).value.numpy(), expected)
    chosen = torch.rand(4, 5) > 0.5
    np.testing.assert_array_equal(u[chosen].value.numpy(), value[:, chosen].numpy())
    assert len(u) == 4
    assert [row.shape for row in u] == [(5,)] * 4
    assert (~u)[0].negated.all()


def test_negating_everything_mirrors_the_scores() -> None:
    theta = torch.randn(6, dtype=torch.float64)
    values = []
    for flip in (False, True):
        graph = FactorGraph()
        u = graph.variables(1 - theta if flip else theta)
        u = ~u if flip else u
        graph.add(Xor(u[:4]))
        graph.add(Imply(u[2:]))
        graph.add(Pair(u[0], u[5], 0.7))
        graph.solve()
        values.append(u.value)
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-13)


def test_minus_infinity_turns_a_variable_off() -> None:
    theta = torch.randn(6, dtype=torch.float64)
    hard, soft = theta.clone(), theta.clone()
    hard[[1, 4]] = -torch.inf
    hard.requires_grad_()
    graph, same = FactorGraph(), FactorGraph()
    u, v = graph.variables(hard), same.variables(soft)
    for g, x in ((graph, u), (same, v)):
        g.add(Xor(x[:4]))
        g.add(Or(x[3:]))
        g.add(Or(~x[1], x[5]))
    same.add(Exactly(v[[1, 4]], 0))
    graph.solve()
    same.solve()
    torch.testing.assert_close(u.value, v.value, rtol=0, atol=1e-12)
    (grad,) = torch.autograd.grad(u.value.square().sum(), hard)
    assert grad[[1, 4]].tolist() == [0.0, 0.0]
    assert bool(grad.isfinite().all())
    graph.add(Xor(u[[1, 4]]))
    with pytest.raises(ValueError, match="infeasible"):
        graph.solve()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_spoils_its_own_graph_and_no_other(bad: float) -> None:
    scores = torch.randn(3, 4, dtype=torch.float64)
    clean = scores.clone()
    scores[1, 2] = bad
    for overlapping in (False, True):
        values = []
        for s in (scores, clean):
            graph = FactorGraph()
            u = graph.variables(s, batch_dims=1)
            graph.add(Xor(u))
            if overlapping:
                graph.add(Budget(u[:, None][:2], 1))
            graph.solve()
            values.append(u.value)
        assert bool(values[0][1].isnan().all())
        torch.testing.assert_close(values[0][[0, 2]], values[1][[0, 2]], rtol=0, atol=0)


def test_an_empty_batch_is_solved() -> None:
    scores = torch.zeros(0, 3, 4, requires_grad=True)
    value = mixed(scores, torch.zeros(4), batch_dims=1)
    assert value.shape == (0, 3, 4)
    value.sum().backward()


@pytest.mark.parametrize(("first", "second"), [
    (lambda u: Xor(u), lambda u: Exactly(u, 2)),
    (lambda u: Xor(u[:3]), lambda u: Exactly([u[3], *u[:3]], 4)),
    (lambda u: AndOut(u[0], u[1], u[2]), lambda u: Exactly([~u[0], u[2]], 2)),
    (lambda u: Knapsack(u, [2.0] * 4, 3.0), lambda u: Exactly(u, 2)),
])  # fmt: skip
def test_contradictions_are_reported_as_infeasible(first: Callable, second: Callable) -> None:
    for call in (FactorGraph.solve, FactorGraph.map):
        graph = FactorGraph()
        u = graph.variables(torch.randn(4))
        graph.add(first(u))
        graph.add(second(u))
        with pytest.raises(ValueError, match="infeasible"):
            call(graph)


def test_one_infeasible_graph_of_a_batch_is_named() -> None:
    graph = FactorGraph()
    scores = torch.zeros(3, 2)
    scores[1] = -torch.inf
    u = graph.variables(scores, batch_dims=1)
    graph.add(Xor(u))
    with pytest.raises(ValueError, match="1 graphs of the batch, the first 1"):
        graph.solve()


def test_too_few_rounds_are_warned_of_with_the_residual() -> None:
    graph = FactorGraph()
    u = graph.variables(torch.randn(4, 4, dtype=torch.float64) * 3)
    for i in range(4):
        graph.add(Xor(u[i]))
        graph.add(Xor(u[:, i]))
    with pytest.warns(UserWarning, match=r"after max_iter = 1 rounds; the largest residual is \d"):
        solution = graph.solve(max_iter=1, tol=1e-15)
    assert not bool(solution.converged)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bool(graph.solve().converged)


def test_map_has_zero_gradient() -> None:
    scores = torch.randn(5, requires_grad=True)
    graph = FactorGraph()
    u = graph.variables(scores)
    graph.add(Budget(u, 2))
    graph.map()
    u.value.sum().backward()
    assert scores.grad.tolist() == [0.0] * 5
    best = scores.detach().topk(2)
    expected = torch.zeros(5).scatter(0, best.indices, (best.values > 0).float())
    assert u.value.tolist() == expected.tolist()


class Segment(Factor):
    """p₁ = p₂, written by a user as a quadratic program with a score of its own for both."""

    def __init__(self, a: Variables, b: Variables, score: torch.Tensor) -> None:
        super().__init__([a, b], scores=[score], event_dims=[0])

    def qp(self, theta: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        mean = (theta.sum(-1) + tensors[0]) / 2
        return mean.clamp(0, 1).unsqueeze(-1).expand(theta.shape)


def test_a_users_quadratic_program_is_a_factor() -> None:
    def both(scores: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
        graph = FactorGraph()
        u = graph.variables(scores)
        graph.add(Segment(u[0], u[1], bonus))
        graph.add(Budget(u, 1))
        graph.solve()
        return u.value

    scores = torch.tensor([0.5, 0.3, 0.6], dtype=torch.float64, requires_grad=True)
    bonus = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    local = Local(3, [Part([0, 1], np.array([[0.0, 0], [1, 1]]), None, np.array([0, 0.1])),
                      Part([0, 1, 2], allowed(3, RULES["AtMostOne"]))])  # fmt: skip
    np.testing.assert_allclose(
        both(scores, bonus).detach().numpy(), local.solve(np.array([0.5, 0.3, 0.6]))[0], atol=1e-6
    )
    assert torch.autograd.gradcheck(both, (scores, bonus), check_forward_ad=True)
    graph = FactorGraph()
    u = graph.variables(scores.detach())
    graph.add(Segment(u[0], u[1], bonus))
    graph.add(Exactly(~u[:1], 1))
    graph.add(Exactly(u[1:2], 1))
    with pytest.raises(ValueError, match="infeasible"):
        graph.solve()


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda g: g.variables([1.0]), TypeError, "scores must be a floating-point tensor, got list"),
    (lambda g: g.variables(torch.arange(3)), TypeError, "floating-point tensor, got torch.int64"),
    (lambda g: g.variables(torch.zeros(3), batch_dims=2), ValueError, r"batch_dims must be in \[0, 1\]"),
    (lambda g: g.variables(torch.zeros(3), batch_dims=True), TypeError, "batch_dims must be an int"),
    (lambda g: g.variables(torch.zeros(3, 0)), ValueError, "at least one variable"),
    (lambda g: [g.variables(torch.zeros(n, 3), batch_dims=1) for n in (2, 3)], ValueError, "batch dimensions"),
    (lambda g: g.add("Xor"), TypeError, "factor must be a Factor"),
    (lambda g: g.add(Xor(FactorGraph().variables(torch.zeros(3)))), ValueError, "variables of this graph"),
    (lambda g: g.solve(), ValueError, "no variables"),
    (lambda g: g.variables(torch.zeros(3)).value, RuntimeError, "call graph.solve"),
    (lambda g: (g.variables(torch.zeros(3)), g.solve(tol=0)), ValueError, "tol must satisfy 0 < tol"),
    (lambda g: (g.variables(torch.zeros(3)), g.solve(max_iter=0)), ValueError, "max_iter must be"),
    (lambda g: Pair(g.variables(torch.zeros(3)), g.variables(torch.zeros(2)), 1.0), ValueError, "one shape"),
    (lambda g: Pair(g.variables(torch.zeros(3)), 1, 1.0), TypeError, "second must be variables"),
    (lambda g: Pair(g.variables(torch.zeros(3)), g.variables(torch.zeros(3)), "x"), TypeError, "score must be"),
    (lambda g: Pair(*g.variables(torch.zeros(2, 3)), torch.zeros(2)), ValueError, "score must broadcast"),
])  # fmt: skip
def test_bad_arguments_are_named(call: Callable, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(FactorGraph())


def test_adding_a_factor_takes_back_the_values() -> None:
    graph = FactorGraph()
    u = graph.variables(torch.zeros(3))
    graph.solve()
    graph.add(Xor(u))
    with pytest.raises(RuntimeError, match=r"call graph\.solve"):
        _ = u.value


def test_kinds_are_printed_by_size() -> None:
    graph = FactorGraph()
    u = graph.variables(torch.zeros(3, 2))
    graph.add(Xor(u[:, 0]))
    assert repr(graph) == "FactorGraph(6 variables, 1 factors)"
    assert repr(graph.factors[0]) == "Xor(3 variables)"
    assert repr(u) == "Variables(shape=(3, 2))"
    assert repr(graph.solve()) == "Solution(residual=0.0e+00, iterations=0, converged=True)"


@pytest.mark.parametrize(
    ("factor", "scores", "jacobian"),
    [
        (Xor, [0.5, 0.5], [[0.5, -0.5], [-0.5, 0.5]]),
        (lambda u: Exactly(u, 2), [0.5, 0.5, 1.0], [[0.5, -0.5, 0.0], [-0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]),
        (lambda u: Budget(u, 1), [0.0, 2.0], [[0.0, 0.0], [0.0, 0.0]]),
    ],
)
def test_scores_that_meet_the_constraint_exactly_move_along_it(factor, scores, jacobian) -> None:  # type: ignore[no-untyped-def]
    def values(s: torch.Tensor) -> torch.Tensor:
        graph = FactorGraph()
        u = graph.variables(s)
        graph.add(factor(u))
        graph.solve()
        return u.value

    found = torch.autograd.functional.jacobian(values, torch.tensor(scores, dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor(jacobian, dtype=torch.float64))


def test_a_structure_of_negated_variables_respects_what_is_forced_off() -> None:
    graph = FactorGraph()
    u = graph.variables(torch.tensor([0.5, 0.3, -torch.inf], dtype=torch.float64))
    graph.add(Structured(~u, Subsets(2)))
    graph.solve()
    # Of the two other literals one is on: the nearest point to (0.5, 0.3) with sum 1.
    torch.testing.assert_close(u.value, torch.tensor([0.6, 0.4, 0.0], dtype=torch.float64))


def test_a_pair_cannot_be_forbidden_by_its_score() -> None:
    graph = FactorGraph()
    u = graph.variables(torch.tensor([0.5, 0.3]))
    with pytest.raises(ValueError, match="AtMostOne"):
        graph.add(Pair(u[0], u[1], -torch.inf))


@pytest.mark.parametrize("kind", list(MAKE))
def test_lists_of_variables_are_taken_together(kind: str) -> None:
    values = []
    for listed in (False, True):
        graph = FactorGraph()
        u = graph.variables(torch.tensor([0.9, -0.2, 0.7, 0.4], dtype=torch.float64))
        parts = [u[0], ~u[1], u[2:]]
        graph.add(MAKE[kind]([parts] if listed else parts))
        graph.solve()
        values.append(u.value.tolist())
    assert values[0] == values[1]
    with pytest.raises(TypeError, match=r"what graph.variables\(…\) returns"):
        MAKE[kind]([[u[0], 1]])


def exact_value(local: Local, theta: np.ndarray, mu: np.ndarray) -> Fraction:
    """The linear program's objective in rational arithmetic, at the vertex next to μ."""
    near = [Fraction(float(x)).limit_denominator(60) for x in mu]
    assert max(abs(float(x) - y) for x, y in zip(near, mu, strict=True)) < 1e-8
    value = sum((Fraction(float(t)) * x for t, x in zip(theta, near, strict=True)), Fraction(0))
    for part in local.parts:
        if part.scores is not None:
            (p, q), score = (near[i] for i in part.index), Fraction(float(part.scores[-1]))
            value += score * (min(p, q) if score > 0 else max(Fraction(0), p + q - 1))
    return value


WIDE: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "one of 1e10": lambda theta, rng: np.where(np.arange(len(theta)) == rng.integers(len(theta)), 1e10 * theta, theta),
    "one of 1e17": lambda theta, rng: np.where(np.arange(len(theta)) == rng.integers(len(theta)), 1e17 * theta, theta),
    "soft masks": lambda theta, rng: np.where(rng.random(len(theta)) < 0.3, -1e9, theta),
    "offsets": lambda theta, rng: np.where(rng.random(len(theta)) < 0.4, 1e10 + theta, theta),
    "tiny": lambda theta, rng: 1e-6 * theta,
}


@pytest.mark.slow
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("seed", range(5))
def test_map_is_exact_for_scores_of_very_different_size(seed: int, wide: str) -> None:
    _, _, local, theta = loopy(seed)
    theta = WIDE[wide](theta, np.random.default_rng(seed))
    graph, u = same_graph(local, theta)
    # All that dominates 1e6 times over does so at any size: the solver of the oracle gets what it can tell apart.
    try:
        best, _ = vertex(local, np.clip(theta, -1e9, 1e10 + 9))
    except ValueError:
        with pytest.raises(ValueError, match="infeasible"):
            graph.map()
        return
    assert bool(graph.map().converged)
    mu = u.value.numpy()
    assert exact_value(local, theta, mu) >= exact_value(local, theta, best) - Fraction(
        1e-9 * min(1, np.abs(theta).max())
    )
    for part in local.parts:
        literals = mu[list(part.index)]
        literals = literals if part.negated is None else np.where(part.negated, 1 - literals, literals)
        assert in_hull(literals, part.vertices) < 1e-8


@pytest.mark.parametrize("huge", [1e10, 1e17, 1e30])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_score_beyond_all_others_is_as_good_as_a_fixed_variable(huge: float, sign: int) -> None:
    rest = torch.tensor([0.5, 0.2, 0.3, 0.6], dtype=torch.float64)
    for method in ("solve", "map"):
        values = []
        for first in (sign * huge, 50.0 * sign if method == "solve" else 5.0 * sign):
            theta = torch.cat([rest.new_tensor([first]), rest]).requires_grad_()
            graph = FactorGraph()
            u = graph.variables(theta)
            graph.add(Xor(u[:3]))
            graph.add(Xor(u[2:]))
            assert bool(getattr(graph, method)().converged)
            (slope,) = torch.autograd.grad(u.value @ torch.arange(5.0, dtype=torch.float64), theta)
            values.append(torch.cat([u.value.detach(), slope]))
        torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-9)


def test_soft_masks_that_must_be_broken_are_broken_where_it_costs_least() -> None:
    theta = torch.tensor([0.1, 0.5, -1e9, -1.2e9, -1e9], dtype=torch.float64)
    graph = FactorGraph()
    u = graph.variables(theta)
    graph.add(Xor(u[:3]))
    graph.add(Xor(u[2:]))
    graph.map()
    assert u.value.tolist() == pytest.approx([0, 1, 0, 0, 1], abs=1e-9)  # −1e9 + 0.5 against −1e9


def test_scores_on_top_of_a_huge_offset_still_count() -> None:
    theta = torch.tensor([1e10, 1e10 + 0.5, 1e10 - 2, 0.3, 0.6], dtype=torch.float64)
    graph = FactorGraph()
    u = graph.variables(theta)
    graph.add(Xor(u[:3]))
    graph.add(Xor(u[2:]))
    assert bool(graph.solve().converged)
    assert u.value.tolist() == pytest.approx([0.25, 0.75, 0, 0.35, 0.65], abs=1e-8)


@pytest.mark.parametrize("scale", [1e-6, 1e5])
@pytest.mark.parametrize("seed", range(3))
def test_loopy_graphs_converge_whatever_the_scale(seed: int, scale: float) -> None:
    _, _, local, theta = loopy(seed)
    for part in local.parts:
        part.scores = None if part.scores is None else scale * part.scores
    graph, u = same_graph(local, scale * theta)
    try:
        expected, _ = local.solve(scale * theta)
    except ValueError:
        with pytest.raises(ValueError, match="infeasible"):
            graph.solve()
        return
    assert bool(graph.solve().converged)
    np.testing.assert_allclose(u.value.numpy(), expected, atol=1e-5)


def test_a_negated_single_variable_keeps_its_shape() -> None:
    graph = FactorGraph()
    u = graph.variables(torch.tensor([1.0, 0.5, -0.3]))
    a, b, _ = u
    graph.add(Xor(a, b))
    graph.solve()
    assert (~a).value.shape == (~u)[0].value.shape == a.value.shape == ()
    torch.testing.assert_close((~a).value, 1 - a.value)


@pytest.mark.parametrize("n", [3, 12])
def test_rows_and_columns_at_a_tie_move_along_their_whole_face(n: int) -> None:
    """All scores zero: the projector on matrices whose rows and columns sum to zero, in closed form."""
    scores = torch.zeros(n, n, dtype=torch.float64, requires_grad=True)
    graph = FactorGraph()
    u = graph.variables(scores)
    for k in range(n):
        graph.add(Xor(u[k]))
        graph.add(Xor(u[:, k]))
    graph.solve()
    grad = torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (moved,) = torch.autograd.grad(u.value, scores, grad)
    expected = grad - grad.mean(0) - grad.mean(1, keepdim=True) + grad.mean()
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("scale", [1e4, 1e6, 1e10])
def test_rounds_do_not_depend_on_the_size_of_large_scores(scale: float) -> None:
    """Rows choose columns, each column at most once: the best assignment, by scipy."""
    scores = torch.randn(10, 10, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    graph = FactorGraph()
    u = graph.variables(scale * scores)
    for k in range(10):
        graph.add(Xor(u[k]))
        graph.add(Budget(u[:, k], 1))
    solution = graph.solve()
    assert bool(solution.converged)
    assert int(solution.iterations) < 400
    rows, columns = linear_sum_assignment(scores.numpy(), maximize=True)
    expected = torch.zeros_like(scores)
    expected[rows, columns] = 1
    torch.testing.assert_close(u.value, expected, rtol=0, atol=1e-7)
