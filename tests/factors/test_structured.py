"""Structured factors: SparseMAP alone, the local polytope of enumerated structures together with other factors."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from local_polytope import Local, Part, allowed
from scipy.optimize import minimize

import fenchel
from fenchel import FactorGraph, factors, structures
from fenchel.factors import Budget, DependencyTree, Imply, Pair, Sequence, Structured, Xor


def trees(n: int, single_root: bool = False) -> np.ndarray:
    """All dependency trees over n words, as flat arcs [modifier, head]."""
    found = []
    for heads in itertools.product(range(n + 1), repeat=n):
        for m in range(n):
            at, steps = m + 1, 0
            while at and steps <= n:
                at, steps = heads[at - 1], steps + 1
            if at:
                break
        else:
            if not single_root or heads.count(0) == 1:
                arcs = np.zeros((n, n + 1))
                arcs[np.arange(n), list(heads)] = 1
                found.append(arcs.reshape(-1))
    return np.array(found)


def sequences(steps: int, states: int, transition: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All sequences, and the scores of their steps."""
    rows, scores = [], []
    for z in itertools.product(range(states), repeat=steps):
        rows.append(np.eye(states)[list(z)].reshape(-1))
        scores.append(sum(transition[a, b] for a, b in itertools.pairwise(z)))
    return np.array(rows), np.array(scores)


def budgeted(arc_scores: torch.Tensor, budget: int, single_root: bool = False) -> torch.Tensor:
    fg = FactorGraph()
    u = fg.variables(arc_scores, batch_dims=arc_scores.dim() - 2)
    fg.add(DependencyTree(u, single_root=single_root))
    for k in range(1, u.shape[1]):
        fg.add(Budget(u[:, k], budget))
    fg.solve()
    return u.value


def test_the_papers_snippet_runs_as_it_is_written() -> None:
    n = 4
    arc_scores = torch.randn(n, n + 1)
    fg = FactorGraph()
    u = fg.variables(arc_scores)
    fg.add(DependencyTree(u))
    for k in range(n):
        fg.add(Budget(u[:, k], 5))
    fg.solve()
    alone = fenchel.SparseMAP(structures.DependencyTree()).argmax(arc_scores)
    torch.testing.assert_close(u.value, alone, rtol=0, atol=1e-6)  # no head can have more than five


@pytest.mark.parametrize(("n", "budget", "single_root"), [(3, 1, False), (4, 1, True), (4, 2, False), (3, 1, True)])
def test_a_tree_with_budgets_is_the_program_over_the_local_polytope(n: int, budget: int, single_root: bool) -> None:
    rng = np.random.default_rng(n + budget)
    theta = rng.normal(size=(2, n, n + 1)) * 2
    value = budgeted(torch.from_numpy(theta), budget, single_root).numpy()
    local = Local(n * (n + 1), [Part(range(n * (n + 1)), trees(n, single_root))])
    for k in range(1, n + 1):
        local.parts.append(Part([m * (n + 1) + k for m in range(n)], allowed(n, lambda y: sum(y) <= budget)))
    for row in range(2):
        expected, _ = local.solve(theta[row].reshape(-1))
        np.testing.assert_allclose(value[row].reshape(-1), expected, atol=3e-6)


def tagged(scores: torch.Tensor, transition: torch.Tensor) -> torch.Tensor:
    """Two sequences of which the second follows the first where it counts."""
    graph = FactorGraph()
    u = graph.variables(scores)
    graph.add(Sequence(u[0], transition))
    graph.add(Sequence(u[1], transition))
    graph.add(Imply(u[0, 1, 0], u[1, 1, 0]))
    graph.add(Budget([u[0, :, 1], u[1, :, 1]], 2))
    graph.solve()
    return u.value


def test_sequences_with_constraints_are_the_program_over_the_local_polytope() -> None:
    rng = np.random.default_rng(0)
    theta, transition = rng.normal(size=(2, 3, 2)), rng.normal(size=(2, 2))
    rows, scores = sequences(3, 2, transition)
    local = Local(12, [
        Part(range(6), rows, None, scores),
        Part(range(6, 12), rows, None, scores),
        Part([2, 8], allowed(2, lambda y: y[0] <= y[1])),
        Part([1, 3, 5, 7, 9, 11], allowed(6, lambda y: sum(y) <= 2)),
    ])  # fmt: skip
    value = tagged(torch.from_numpy(theta), torch.from_numpy(transition))
    np.testing.assert_allclose(value.numpy().reshape(-1), local.solve(theta.reshape(-1))[0], atol=3e-6)


@pytest.mark.slow
def test_derivatives_in_scores_and_transitions() -> None:
    scores = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    transition = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(tagged, (scores, transition))
    assert torch.autograd.gradcheck(tagged, (scores, transition), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(tagged, (scores, transition), fast_mode=True)
    arcs = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: budgeted(a, 1), (arcs,))


def test_alone_a_structure_is_sparsemap_with_its_derivatives() -> None:
    scores = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    transition = torch.randn(3, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    graph = FactorGraph()
    u = graph.variables(scores, batch_dims=1)
    graph.add(Sequence(u, transition))
    assert int(graph.solve().iterations.max()) == 0
    expected = fenchel.SparseMAP(structures.Chain(transition)).argmax(scores)
    torch.testing.assert_close(u.value, expected, rtol=0, atol=1e-9)
    cotangent = torch.randn_like(scores)
    got = torch.autograd.grad(u.value, (scores, transition), cotangent)
    torch.testing.assert_close(got, torch.autograd.grad(expected, (scores, transition), cotangent))


def test_batches_with_their_own_transitions_are_loops() -> None:
    scores = torch.randn(3, 4, 2, dtype=torch.float64)
    transition = torch.randn(3, 1, 2, 2, dtype=torch.float64, requires_grad=True)

    def call(s: torch.Tensor, t: torch.Tensor, batch_dims: int) -> torch.Tensor:
        graph = FactorGraph()
        u = graph.variables(s, batch_dims=batch_dims)
        graph.add(Sequence(u, t))
        graph.add(Budget(u[:, 0], 1))
        graph.solve()
        return u.value

    together = call(scores, transition, 1)
    alone = torch.stack([call(scores[i], transition[i], 0) for i in range(3)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)
    (got,) = torch.autograd.grad(together.square().sum(), transition)
    (expected,) = torch.autograd.grad(alone.square().sum(), transition)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


def test_shorter_sentences_of_a_batch_are_solved_as_if_alone() -> None:
    arcs = torch.randn(4, 5, dtype=torch.float64)
    padded = torch.stack([arcs, arcs])
    padded[1, 3:, :] = -torch.inf
    padded[1, :, 4:] = -torch.inf
    value = budgeted(padded, 1)
    torch.testing.assert_close(value[0], budgeted(arcs, 1), rtol=0, atol=1e-10)
    torch.testing.assert_close(value[1, :3, :4], budgeted(arcs[:3, :4], 1), rtol=0, atol=1e-10)
    assert value[1, 3:].abs().max() == 0


def test_map_of_a_tree_with_budgets_is_the_best_that_is_allowed() -> None:
    theta = torch.randn(4, 5, dtype=torch.float64)
    fg = FactorGraph()
    u = fg.variables(theta)
    fg.add(DependencyTree(u))
    for k in range(1, 5):
        fg.add(Budget(u[:, k], 1))
    assert bool(fg.map().converged)
    local = Local(20, [Part(range(20), trees(4))])
    for k in range(1, 5):
        local.parts.append(Part([m * 5 + k for m in range(4)], allowed(4, lambda y: sum(y) <= 1)))
    _, best = local.solve(theta.numpy().reshape(-1), quadratic=False)
    assert float((theta * u.value).sum()) == pytest.approx(best, abs=1e-7)


class Runs(structures.Structure):
    """A user's oracle: one run of neighbours, longer ones with a higher score."""

    def __init__(self, bonus: float) -> None:
        super().__init__()
        self.bonus = bonus

    def map(self, scores: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        runs = self.all(scores.shape[-1]).to(scores)
        return runs[(scores @ runs.T + self.higher(runs)).argmax(-1)]

    def higher(self, structures: torch.Tensor) -> torch.Tensor:
        return self.bonus * structures.sum(-1) ** 2

    @staticmethod
    def all(n: int) -> torch.Tensor:
        at = torch.arange(n)
        return torch.stack([(at >= i) & (at < j) for i in range(n) for j in range(i + 1, n + 1)])


def test_a_users_oracle_with_higher_order_scores_is_a_factor() -> None:
    theta = torch.tensor([0.4, -0.3, 0.5, 0.2, -0.6], dtype=torch.float64)
    graph = FactorGraph()
    u = graph.variables(theta)
    graph.add(Structured(u, Runs(0.07)))
    graph.add(Xor(u[0], u[2]))
    graph.solve()
    runs = Runs.all(5).double().numpy()
    local = Local(
        5, [Part(range(5), runs, None, 0.07 * runs.sum(1) ** 2), Part([0, 2], allowed(2, lambda y: sum(y) == 1))]
    )
    np.testing.assert_allclose(u.value.numpy(), local.solve(theta.numpy())[0], atol=3e-6)


def test_impossible_trees_are_infeasible() -> None:
    fg = FactorGraph()
    u = fg.variables(torch.randn(3, 4))
    fg.add(DependencyTree(u))
    fg.add(Budget(u[:, 0], 0))  # nothing on the root
    with pytest.raises(ValueError, match="infeasible"):
        fg.solve()


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda u: DependencyTree(u), ValueError, r"\(…, N, N \+ 1\)"),
    (lambda u: DependencyTree(u[0]), ValueError, "2 dimensions for DependencyTree"),
    (lambda u: Sequence(u, torch.zeros(3, 3)), ValueError, "over the 2 states"),
    (lambda u: Structured(u, "tree"), TypeError, "structure must be"),
    (lambda u: Structured([u], structures.Matching()), TypeError, "one array"),
    (lambda u: Structured(u[0], structures.Subsets(3)), ValueError, "k"),
])  # fmt: skip
def test_bad_arguments_are_named(make: Callable, error: type[Exception], message: str) -> None:
    u = FactorGraph().variables(torch.zeros(4, 2))
    with pytest.raises(error, match=message):
        make(u)


def test_every_factor_of_the_contract_is_there() -> None:
    logic = {"Xor", "AtMostOne", "Or", "Imply", "XorOut", "OrOut", "AndOut", "Budget", "Exactly", "Knapsack"}
    assert logic | {"Pair", "Sequence", "DependencyTree"} <= set(factors.__all__)
    assert issubclass(Pair, factors.Factor)


def test_a_masked_arc_makes_a_tree_with_budgets_infeasible() -> None:
    scores = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores[1:, 0] = -torch.inf  # only the first word may hang on the root …
    for method in ("solve", "map"):
        graph = FactorGraph()
        u = graph.variables(scores)
        graph.add(DependencyTree(u))
        graph.add(Budget(u[0], 0))  # … and it must not hang at all
        with pytest.raises(ValueError, match="infeasible"):
            getattr(graph, method)()


def test_masked_states_make_a_sequence_infeasible_with_what_it_must_hold() -> None:
    scores = torch.zeros(2, 3, 2, dtype=torch.float64)
    scores[1, 1, 1] = -torch.inf
    graph = FactorGraph()
    u = graph.variables(scores, batch_dims=1)
    graph.add(Sequence(u, torch.zeros(2, 2)))
    graph.add(factors.Exactly(u[:, 0], 1))
    graph.add(factors.Exactly(u[:2, 1], 2))
    with pytest.raises(ValueError, match="infeasible constraints, in 1 graphs of the batch, the first 1"):
        graph.solve()


@pytest.mark.parametrize("stuck", [0, 1])
def test_forbidden_steps_are_those_of_each_graph_of_a_batch(stuck: int) -> None:
    transition = torch.zeros(2, 1, 2, 2, dtype=torch.float64)
    transition[stuck, 0, 0, 1] = -torch.inf  # from the first state there is no way to the second
    graph = FactorGraph()
    u = graph.variables(torch.zeros(2, 3, 2, dtype=torch.float64), batch_dims=1)
    graph.add(Sequence(u, transition))
    graph.add(factors.Or(u[0, 0]))
    graph.add(factors.Or(u[2, 1]))
    with pytest.raises(ValueError, match=f"infeasible constraints, in 1 graphs of the batch, the first {stuck}"):
        graph.solve()


class Seen(Runs):
    """Remembers the shapes that its oracle was given."""

    def __init__(self, bonus: float) -> None:
        super().__init__(bonus)
        self.shapes: list[tuple[int, ...]] = []

    def map(self, scores: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.shapes.append(tuple(scores.shape))
        return super().map(scores)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_a_users_oracle_sees_one_flat_batch_dimension(batch: tuple[int, ...]) -> None:
    scores = torch.randn(*batch, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for method in ("solve", "map"):
        structure = Seen(0.05)
        graph = FactorGraph()
        u = graph.variables(scores, batch_dims=len(batch))
        graph.add(Structured(u, structure))
        graph.add(Xor(u[..., 0], u[..., 2]))
        getattr(graph, method)()
        assert structure.shapes
        assert all(len(shape) == 2 and shape[1] == 4 for shape in structure.shapes)


def test_a_hidden_tensor_of_a_users_structure_must_not_require_grad() -> None:
    hidden = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)

    class Closed(Runs):
        def higher(self, structures: torch.Tensor) -> torch.Tensor:
            return hidden * structures.sum(-1) ** 2

    graph = FactorGraph()
    u = graph.variables(torch.zeros(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="must not require grad"):
        Structured(u, Runs(hidden))
    graph.add(Structured(u, Closed(0.0)))
    graph.add(Xor(u[0], u[2]))
    with pytest.raises(ValueError, match="must not require grad"):
        graph.solve()


def test_a_number_is_a_transition_in_double_precision() -> None:
    number = 0.1234567890123456
    scores = torch.tensor([1.2, 0.8, -0.5, 1.0], dtype=torch.float64)
    values = []
    for transition in (number, torch.tensor(number, dtype=torch.float64)):
        graph = FactorGraph()
        u = graph.variables(scores)
        graph.add(Structured(u, structures.SequentialSubsets(2, transition)))
        graph.add(Budget([u[0], u[3]], 1))
        graph.solve()
        values.append(u.value)
    assert float((values[0] * (1 - values[0])).abs().max()) > 0.1
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-12)


def gain(scores: torch.Tensor, mu: torch.Tensor) -> torch.Tensor:
    """The duality gap of trees: what the best tree gains on μ under the scores θ − μ, by one call of the oracle."""
    residual = scores - mu
    best = structures.DependencyTree().map(residual)
    return ((best - mu) * residual).sum((-2, -1))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("sigma", [0.1, 0.3])
def test_trees_of_flat_scores_are_optimal_and_sum_to_one(sigma: float, seed: int) -> None:
    """Budgets that are never tight change nothing, so that the optimality condition is that of trees alone."""
    scores = sigma * torch.randn(6, 20, 21, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mu = budgeted(scores, budget=19)
    torch.testing.assert_close(mu.sum(-1), torch.ones(6, 20, dtype=torch.float64), rtol=0, atol=1e-9)
    assert float(mu.min()) >= 0
    assert float(gain(scores, mu).max()) < 1e-9


def test_budgets_of_flat_trees_are_kept_and_their_prices_explain_the_trees() -> None:
    """KKT: with a price λ ≥ 0 for each head whose budget is spent, μ is the best mixture of trees for θ − λ."""
    scores = 0.2 * torch.randn(4, 12, 13, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mu = budgeted(scores, 1)
    load = mu.sum(-2)[:, 1:]
    assert float((load - 1).max()) < 1e-8
    torch.testing.assert_close(mu.sum(-1), torch.ones(4, 12, dtype=torch.float64), rtol=0, atol=1e-8)
    # The dual function in λ is smooth; its maximum is found by an independent method, scipy's L-BFGS-B.
    omega = fenchel.SparseMAP(structures.DependencyTree())

    def dual(flat: np.ndarray, row: int) -> tuple[float, np.ndarray]:
        price = torch.zeros(13, dtype=torch.float64)
        price[1:] = torch.from_numpy(flat)
        best = omega.argmax(scores[row] - price)
        value = ((scores[row] - price) * best).sum() - best.square().sum() / 2 + price.sum()
        return float(value), (1 - best.sum(0)[1:]).numpy()

    for row in range(4):
        found = minimize(dual, np.zeros(12), (row,), "L-BFGS-B", True, bounds=[(0, None)] * 12, tol=1e-14)
        primal = float((scores[row] * mu[row]).sum() - mu[row].square().sum() / 2)
        assert abs(primal - found.fun) < 1e-7


@pytest.mark.parametrize("scale", [1e4, 1e7, 1e10])
def test_huge_scores_of_trees_with_budgets_choose_the_linear_programs_vertex(scale: float) -> None:
    scores = torch.randn(3, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    local = Local(12, [Part(range(12), trees(3))])
    local.parts += [Part([4 * m + k for m in range(3)], allowed(3, lambda y: sum(y) <= 1)) for k in range(1, 4)]
    expected, _ = local.solve(scores.reshape(-1).numpy(), quadratic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mu = budgeted(scale * scores, 1)
    np.testing.assert_allclose(mu.reshape(-1).numpy(), expected, atol=1e-6)


def test_a_structure_in_a_graph_moves_along_its_whole_face_at_a_tie() -> None:
    """All scores zero: the projector on matrices whose rows and columns sum to zero, in closed form."""
    n = 10
    scores = torch.zeros(n, n, dtype=torch.float64, requires_grad=True)
    graph = FactorGraph()
    u = graph.variables(scores)
    graph.add(Structured(u, structures.Matching()))
    graph.add(Budget(u[0], 2))  # never tight
    graph.solve()
    grad = torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (moved,) = torch.autograd.grad(u.value, scores, grad)
    expected = grad - grad.mean(0) - grad.mean(1, keepdim=True) + grad.mean()
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-7)


def test_a_solution_is_where_the_next_one_begins() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 6, 7, generator=generator, dtype=torch.float64)

    def solved(scores: torch.Tensor, start: factors.Solution | None = None) -> tuple[factors.Solution, torch.Tensor]:
        graph = FactorGraph()
        u = graph.variables(scores, batch_dims=1)
        graph.add(DependencyTree(u))
        for k in range(1, 7):
            graph.add(Budget(u[:, k], 1))
        return graph.solve(start=start), u.value

    first, _ = solved(scores)
    near = scores + 1e-4 * torch.randn(scores.shape, generator=generator, dtype=torch.float64)
    cold, expected = solved(near)
    warm, found = solved(near, first)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
    assert int(warm.iterations.sum()) < int(cold.iterations.sum())
    with pytest.raises(ValueError, match="start must be the solution of a graph with the same variables"):
        solved(scores[:1], first)
    with pytest.raises(TypeError, match="start must be a Solution"):
        solved(scores, found)  # type: ignore[arg-type]


@pytest.mark.parametrize("structure", [structures.Subsets(2), structures.SequentialSubsets(2, 0.3)], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_a_subset_with_too_few_variables_left_is_infeasible(structure: structures.Structure, shared: bool) -> None:
    scores = torch.tensor([[1.0, 0.5, 0.2], [1.0, -torch.inf, -torch.inf]])
    graph = FactorGraph()
    u = graph.variables(scores, batch_dims=1)
    graph.add(Structured(u, structure))
    if shared:
        graph.add(Budget(u, 3))
    with pytest.raises(ValueError, match="2 of its variables must be on, and scores of −inf leave 1 in 1 of 2 graphs"):
        graph.solve()


def test_a_structure_that_is_not_solved_is_warned_of_once() -> None:
    class Forgetful(structures.Structure):
        """Subsets of two, by an oracle that is wrong every other time."""

        calls = 0

        def map(self, scores: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            self.calls += 1
            best = scores.topk(2, dim=-1, largest=self.calls % 2 == 1).indices
            return torch.zeros_like(scores).scatter(-1, best, 1.0)

    graph = FactorGraph()
    u = graph.variables(torch.tensor([0.9, 0.8, 0.1, 0.0], dtype=torch.float64))
    graph.add(Structured(u, Forgetful()))
    graph.add(Budget(u[:2], 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph.solve(max_iter=20)
    messages = [str(w.message) for w in caught]
    assert sum("is not exact" in m for m in messages) == 1
    assert all(m.startswith("FactorGraph") for m in messages)
    assert len(messages) <= 2


class Steps(structures.Structure):
    """A user's own chain, whose transitions are known to the library by three members."""

    event_dim, fixed_dims, transition_dims = 2, 1, 3

    def __init__(self, transition: torch.Tensor) -> None:
        super().__init__()
        self.chain = structures.Chain(transition)

    def map(self, scores, mask=None):
        return self.chain.map(scores, mask)

    def higher(self, structures):
        return self.chain.higher(structures)

    def rows(self, batch, index):
        return Steps(self.chain.rows(batch, index).transition)

    def transitions(self, shape):
        return self.chain.transitions(shape)

    def with_transitions(self, transitions):
        return Steps(transitions)


def test_the_transitions_of_a_users_own_structure_get_gradients() -> None:
    scores, transition = torch.randn(2, 3, 2, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)
    gradients = []
    for make in (Steps, structures.Chain):
        leaf = transition.clone().requires_grad_()
        graph = FactorGraph()
        u = graph.variables(scores, batch_dims=1)
        graph.add(Structured(u, make(leaf)))
        graph.add(Budget(u[:, 0], 2))
        graph.solve()
        u.value.square().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)
    assert gradients[0].abs().sum() > 0
