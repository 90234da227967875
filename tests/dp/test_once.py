"""A program runs its recursion once, whatever is read of it and in which order; what is kept is bounded."""

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from enumeration import PROBLEMS, Problem
from torch import Tensor
from torch.func import grad

from fenchel import Gini, Regularizer, Shannon, Tsallis
from fenchel.dp import DynamicProgram, LinearChain
from fenchel.dp.graph import remembered

every_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=str)
either_way = pytest.mark.parametrize("compiled", [True, False], ids=["kernels", "torch"])


@pytest.fixture(autouse=True)
def _path(request: pytest.FixtureRequest, set_kernels: Callable[[bool], None]) -> None:
    if hasattr(request.node, "callspec"):
        set_kernels(request.node.callspec.params.get("compiled", True))


def count_runs(d: DynamicProgram) -> list[str]:
    """What a program runs from now on, by name."""
    runs: list[str] = []

    def counted(name: str):
        function = getattr(d, name)

        def call(*args, **kwargs):
            runs.append(name)
            return function(*args, **kwargs)

        return call

    for name in ("_forward", "_gradient", "_walk"):
        setattr(d, name, counted(name))
    return runs


@either_way
@every_problem
def test_results_are_computed_once(problem: Problem, compiled: bool) -> None:
    leaves = [t.requires_grad_() for t in problem.tensors()]
    d = problem.build(*leaves, Gini())
    target = d.map()
    wanted = [problem.build(*leaves, Gini()).value, problem.build(*leaves, Gini()).marginals]
    runs = count_runs(d)
    for _ in range(3):
        torch.testing.assert_close([d.value, d.marginals], wanted)
    d.loss(target)
    d.exact_maximum()
    assert runs == (
        ["_forward", "_gradient"] if compiled else ["_walk", "_walk"]
    )  # value and marginals have a walk each


@either_way
@every_problem
def test_readings_are_differentiated_one_after_the_other(problem: Problem, compiled: bool) -> None:
    leaves = [t.requires_grad_() for t in problem.tensors()]

    def gradients(results: list[Tensor]) -> list[tuple[Tensor, ...]]:
        return [torch.autograd.grad(r.square().sum(), leaves) for r in results]  # each frees its graph

    def fresh() -> DynamicProgram:
        return problem.build(*leaves, Tsallis(1.5))

    wanted = gradients([fresh().value, fresh().marginals])
    d = fresh()
    with torch.no_grad():
        assert not d.value.requires_grad
        assert not d.marginals.requires_grad
    for _ in range(2):
        torch.testing.assert_close(gradients([d.value, d.marginals]), wanted)
    value, marginals = d.value, d.marginals
    torch.testing.assert_close(gradients([marginals, value]), wanted[::-1])
    first = torch.autograd.grad(d.value.square().sum(), leaves, create_graph=True)
    again = torch.autograd.grad(fresh().value.square().sum(), leaves, create_graph=True)
    torch.testing.assert_close(*(torch.autograd.grad(sum(g.square().sum() for g in f), leaves) for f in (first, again)))
    d = fresh()
    with torch.inference_mode():
        assert d.value.is_inference()
        assert d.marginals.is_inference()
    torch.testing.assert_close(gradients([d.value, d.marginals]), wanted)


@either_way
@every_problem
def test_what_users_do_to_a_result_or_an_input_is_seen(problem: Problem, compiled: bool) -> None:
    tensors = problem.tensors()
    d = problem.build(*tensors, Shannon())
    kept = d.value.clone(), d.marginals.clone()
    d.value.zero_()
    d.marginals.zero_()
    torch.testing.assert_close((d.value, d.marginals), kept)
    tensors[0].mul_(0.5)  # as an optimizer does
    other = problem.build(*tensors, Shannon())
    torch.testing.assert_close((d.value, d.marginals), (other.value, other.marginals))


@either_way
@every_problem
def test_a_transformation_reads_what_was_built_outside(problem: Problem, compiled: bool) -> None:
    first, *rest = problem.tensors()
    d = problem.build(first, *rest, Shannon())
    value = d.value
    scale = torch.tensor(2.0).double()
    torch.testing.assert_close(grad(lambda s: (s * d.value).sum())(scale), value.sum())
    inner = grad(lambda t: (problem.build(t, *rest, Shannon()).value + d.value).sum())(first)
    torch.testing.assert_close(inner, problem.sign * problem.sign * d.marginals)


@either_way
@every_problem
@pytest.mark.parametrize("omega", [Shannon(), Tsallis(torch.nn.Parameter(torch.tensor(1.3)))], ids=["number", "tensor"])
def test_programs_are_copied_and_pickled(problem: Problem, omega: Regularizer, compiled: bool) -> None:
    leaves = [
        t.requires_grad_("chain" not in problem.name) for t in problem.tensors()
    ]  # torch copies no views of leaves
    d = problem.build(*leaves, omega)
    value, marginals = d.value, d.marginals
    for twin in (copy.deepcopy(d), pickle.loads(pickle.dumps(d))):
        torch.testing.assert_close((twin.value, twin.marginals), (value, marginals))
        assert twin.sample(2).shape == d.sample(2).shape


def test_a_parameter_of_omega_that_changes_is_seen() -> None:
    unary, step = torch.randn(2, 3, 4).double(), torch.randn(4, 4).double()
    alpha = torch.nn.Parameter(torch.tensor(1.4).double())
    d = LinearChain(unary, step, omega=0.5 * Tsallis(alpha))
    before = torch.autograd.grad(d.value.sum(), alpha)[0]
    with torch.no_grad():
        alpha += 0.3
    other = LinearChain(unary, step, omega=0.5 * Tsallis(1.7))
    torch.testing.assert_close((d.value, d.marginals), (other.value, other.marginals))
    assert torch.autograd.grad(d.value.sum(), alpha)[0] != before


def test_what_is_remembered_is_bounded_by_bytes() -> None:
    made: list[int] = []

    @remembered(1000)
    def zeros(n: int) -> np.ndarray:
        made.append(n)
        return np.zeros(n, dtype=np.uint8)

    for n in (400, 500, 400, 300, 500, 400, 2000, 2000, 400):
        assert len(zeros(n)) == n
    # 500 goes when 300 comes, then 400, then 300; what is too large never stays.
    assert made == [400, 500, 300, 500, 400, 2000, 2000]


@pytest.mark.parametrize("compiled", [False], ids=["torch"])
@every_problem
def test_graphs_say_how_many_bytes_they_take(problem: Problem, compiled: bool) -> None:
    d = problem.build(*problem.tensors(), Gini())
    d.sample()
    graph = d._shape.graph if problem.name == "lattice" else d._graph
    arrays = [each for each in vars(graph).values() if isinstance(each, np.ndarray)]
    arrays += [each for level in graph.levels for each in (level.edges, level.sources, level.places)]
    held = sum(each.nbytes for each in arrays)
    assert graph.nbytes / 2 <= held <= 1.5 * graph.nbytes + 500
