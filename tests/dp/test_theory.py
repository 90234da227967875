"""The theoretical results on max_Ω dynamic programs (Mensch & Blondel 2018), each a test, on every kind of program."""

import math

import pytest
import torch
from enumeration import NET, PROBLEMS, SHARED, TABLE, Problem, solve

from fenchel import Gini, Hard, Norm, Regularizer, Shannon, Tsallis
from fenchel.dp import LinearChain

every_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=str)
every_omega = pytest.mark.parametrize("omega", [Shannon(), Gini(), Tsallis(1.5)], ids=str)
BATCH = 3


def maximum(problem: Problem, omega: Regularizer, *tensors: torch.Tensor) -> torch.Tensor:
    return problem.sign * problem.build(*tensors, omega).value


@every_problem
@every_omega
def test_the_value_is_convex_in_the_scores(problem: Problem, omega: Regularizer) -> None:
    for seed in range(10):
        a, b = problem.tensors(seed), problem.tensors(seed + 100)
        middle = [0.3 * x + 0.7 * y for x, y in zip(a, b, strict=True)]
        chord = 0.3 * maximum(problem, omega, *a) + 0.7 * maximum(problem, omega, *b)
        assert (maximum(problem, omega, *middle) <= chord + 1e-12).all()


@pytest.mark.parametrize(("problem", "nodes", "choices"), [(SHARED, 14, 3), (TABLE, 13, 3), (NET, 8, 3)], ids=str)
@every_omega
def test_the_error_is_within_its_bounds(problem: Problem, nodes: int, choices: int, omega: Regularizer) -> None:
    # −Ω is at least L = 0, at the vertices, and at most U, at the uniform distribution over the most choices.
    alpha = omega.alpha
    most = math.log(choices) if alpha == 1 else (1 - choices ** (1 - alpha)) / (alpha * (alpha - 1))
    for seed in range(10):
        tensors = problem.tensors(seed)
        error = maximum(problem, omega, *tensors) - maximum(problem, Hard(), *tensors)
        assert (error >= 0).all()
        assert (error <= (nodes - 1) * most).all()


def hard_maximum(problem: Problem, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    answers = problem.answers(tensors, Hard(), BATCH)
    best = [max(score for _, _, score in answer.paths) for answer in answers]
    return problem.sign * torch.tensor(best, dtype=torch.float64)


@every_problem
@pytest.mark.parametrize("omega", [Shannon(), Gini(), 0.3 * Tsallis(1.5), Norm(2.0), Hard()], ids=str)
def test_the_best_path_is_within_the_bounds(problem: Problem, omega: Regularizer) -> None:
    for seed, scale in ((0, 1.0), (1, 0.1), (2, 10.0)):
        tensors = tuple(scale * t for t in problem.tensors(seed))
        bounds, best = problem.build(*tensors, omega).bounds(), hard_maximum(problem, tensors)
        assert (bounds.lower <= best + 1e-12).all()
        assert (best <= bounds.upper + 1e-12).all()
        equal = tuple(0.0 * t for t in tensors)
        width = problem.build(*equal, omega).value.abs().min()  # no path has more to choose from
        assert (bounds.upper - bounds.lower >= width - 1e-12).all()


@pytest.mark.parametrize("omega", [Shannon(), Gini(), 2.0 * Tsallis(1.5), Norm(2.0)], ids=str)
def test_both_bounds_are_attained(omega: Regularizer) -> None:
    lengths = torch.tensor([4, 1, 3])
    equal = LinearChain(torch.zeros(3, 4, 3).double(), torch.zeros(3, 3).double(), lengths, omega=omega).bounds()
    torch.testing.assert_close(equal.lower, torch.zeros(3).double(), rtol=0, atol=1e-12)
    lead = torch.tensor([100.0, 0.0, 0.0], dtype=torch.float64).expand(3, 4, 3)
    clear = LinearChain(lead, torch.zeros(3, 3).double(), lengths, omega=omega).bounds()
    torch.testing.assert_close(clear.upper, 100.0 * lengths.double(), rtol=0, atol=1e-12)
    forbidden = torch.zeros(3, 3).double()
    forbidden[:, 1:] = -torch.inf  # one choice of three at the start, and after it one of one
    single = LinearChain(lead - lead, forbidden, lengths, omega=omega).bounds()
    torch.testing.assert_close(single.lower, torch.zeros(3).double(), rtol=0, atol=1e-12)


@every_problem
def test_bounds_where_there_is_no_path_and_where_there_is_nan(problem: Problem) -> None:
    first, *rest = problem.tensors()
    first[0], first[1] = math.nan, -problem.sign * torch.inf
    bounds = problem.build(first, *rest, Gini()).bounds()
    for each in (bounds.lower, bounds.upper):
        assert each[0].isnan()
        assert each[1] == -problem.sign * torch.inf
        assert each[2].isfinite()


@every_problem
@every_omega
def test_the_recursion_is_max_omega_over_paths_only_for_shannon(problem: Problem, omega: Regularizer) -> None:
    tensors = problem.tensors(6)
    answers = problem.answers(tensors, omega, BATCH)
    scores = [torch.tensor([score for _, _, score in a.paths], dtype=torch.float64) for a in answers]
    over_paths = torch.stack([omega.max(s) for s in scores])
    value = maximum(problem, omega, *tensors)
    if isinstance(omega, Shannon):
        torch.testing.assert_close(value, over_paths)
    else:
        assert (value >= over_paths - 1e-12).all()
        assert (value > over_paths + 1e-6).any()


def test_four_equal_paths() -> None:
    # Two choices of two: ¼ + ¼ by the recursion, ⅜ over all four at once.
    d = LinearChain(torch.zeros(1, 2, 2), torch.zeros(2, 2), omega=Gini())
    assert d.value.item() == pytest.approx(0.5)
    assert Gini().max(torch.zeros(4)).item() == pytest.approx(0.375)


@every_problem
@every_omega
def test_the_gradient_is_the_expected_path(problem: Problem, omega: Regularizer) -> None:
    first, *rest = problem.tensors(7)
    leaf = first.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(problem.build(leaf, *rest, omega).value.sum(), leaf)
    answers = problem.answers((first, *rest), omega, BATCH)
    expected = torch.stack([a.marginals(first[0].numel()) for a in answers]).reshape(first.shape)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    if isinstance(omega, Shannon):  # and that of the Gibbs distribution
        for a in answers:
            weights = torch.softmax(torch.tensor([score for _, _, score in a.paths], dtype=torch.float64), 0)
            torch.testing.assert_close(weights, torch.tensor([p for _, p, _ in a.paths], dtype=torch.float64))


@every_problem
@every_omega
def test_the_gradient_moves_no_faster_than_the_scores(problem: Problem, omega: Regularizer) -> None:
    a, b = problem.tensors(8), problem.tensors(9)
    steps = torch.linspace(0, 1, 401, dtype=torch.float64)

    def farthest(omega: Regularizer) -> float:
        line = [[x + t * (y - x) for x, y in zip(a, b, strict=True)] for t in steps[::8]]
        marginals = torch.stack([problem.build(*point, omega).marginals for point in line])
        return marginals.diff(dim=0).abs().max().item()

    assert farthest(omega) < 0.25  # in fifty steps …
    assert farthest(Hard()) >= 0.5  # … where the best path jumps


def test_the_oracle_knows_a_closed_form() -> None:
    answer = solve([("a", "b", 1.0, 0), ("a", "b", 0.0, 1)], "a", "b", 1.0, 1.0)
    assert answer.value == pytest.approx(math.log(math.e + 1))
