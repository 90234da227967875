"""What holds for every dynamic program, as for every map: dtypes, spoilt elements, modes, hard numbers."""

import math
from collections.abc import Callable

import pytest
import torch
from enumeration import NODES, PROBLEMS, SOURCES, TARGETS, Problem
from torch import Tensor
from torch.autograd import functional
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from fenchel import Capped, Custom, Fused, Gini, Hard, KSubsets, Regularizer, Shannon, SparseMAP, Tsallis
from fenchel.dp import Alignment, Lattice, LinearChain, alignment, chain, lattice
from fenchel.structures import AtMost

every_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=str)
either_way = pytest.mark.parametrize("compiled", [True, False], ids=["kernels", "torch"])
SMOOTH = [Shannon(), Gini(), Tsallis(1.5)]


def half_square(p: Tensor) -> Tensor:
    return p.square().sum(-1) / 2


def of_four(p: Tensor) -> Tensor:
    return (p * torch.ones(4)).square().sum(-1) - 1


@pytest.fixture(autouse=True)
def _path(request: pytest.FixtureRequest, set_kernels: Callable[[bool], None]) -> None:
    if hasattr(request.node, "callspec"):
        set_kernels(request.node.callspec.params.get("compiled", True))


@either_way
@every_problem
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes_are_kept_and_computed_in_better_ones(
    problem: Problem, dtype: torch.dtype, compiled: bool
) -> None:
    tensors = problem.tensors(0, dtype)
    d, exact = problem.build(*tensors, Gini()), problem.build(*(t.double() for t in tensors), Gini())
    tolerance = 4 * torch.finfo(dtype).eps
    for found, wanted in ((d.value, exact.value), (d.marginals, exact.marginals), (d.entropy(), exact.entropy())):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
    assert d.top(2).probs.dtype == dtype
    assert torch.equal(d.map(), exact.map())


@either_way
@every_problem
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_spoilt_element_spoils_itself_alone(problem: Problem, bad: float, compiled: bool) -> None:
    first, *rest = problem.tensors()
    clean = problem.build(first, *rest, Gini())
    spoilt = first.clone()
    spoilt[0, 0] = problem.sign * bad
    spoilt.requires_grad_()
    d = problem.build(spoilt, *rest, Gini())
    assert d.value[0].isnan()
    assert d.marginals[0].isnan().all()
    torch.testing.assert_close(d.value[1:], clean.value[1:])
    torch.testing.assert_close(d.marginals[1:], clean.marginals[1:])
    d.value.sum().backward()
    assert spoilt.grad is not None
    assert spoilt.grad[1:].isfinite().all()


def learnable(alpha: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(alpha).double())


@pytest.mark.slow
@every_problem
@pytest.mark.parametrize(
    ("omega", "compiled"),
    [(Shannon(), True), (0.7 * Gini(), True), (Shannon(), False), (learnable(0.7) * Tsallis(learnable(1.4)), False)],
    ids=["shannon, kernels", "gini, kernels", "shannon, torch", "learnable, torch"],
)
def test_spoilt_elements_that_are_left_out_add_nothing_to_what_is_shared(
    problem: Problem, omega: Regularizer, compiled: bool
) -> None:
    """Derivatives of first and second order, in shared scores and in parameters of Ω too, are as without them."""
    first, *rest = problem.tensors()
    spoilt = first.clone()
    spoilt[1, 0], spoilt[2, 0] = math.nan, problem.sign * math.inf
    shared = torch.randn(first.shape[1:], dtype=first.dtype)
    found = []
    for own in (first, spoilt):
        leaves = [t.clone().requires_grad_() for t in (own, shared, *rest)]
        d = problem.build(leaves[0] + leaves[1], *leaves[2:], omega)
        leaves += omega.parameters()
        for result in (d.value, d.loss(problem.build(first, *rest, Hard()).map()), d.marginals, d.entropy()):
            gradients = torch.autograd.grad(result[0].square().sum(), leaves, create_graph=True)
            curved = sum((g * torch.arange(g.numel()).reshape(g.shape).cos()).sum() for g in gradients)
            second = torch.autograd.grad(curved, leaves, allow_unused=True, materialize_grads=True)
            assert (gradients[0][1:] == 0).all()
            assert (second[0][1:] == 0).all()
            found.append([*gradients, *second])
    torch.testing.assert_close(found[4:], found[:4])
    for result in (d.value, d.marginals, d.entropy()):  # what is not left out shows
        gradients = torch.autograd.grad(result.sum(), leaves, allow_unused=True)
        assert all(g.isnan().any() for g in gradients if g is not None)


@either_way
@every_problem
@pytest.mark.parametrize("omega", SMOOTH, ids=str)
def test_where_no_path_is_possible_there_is_none(problem: Problem, omega: Regularizer, compiled: bool) -> None:
    first, *rest = problem.tensors()
    first[1] = -problem.sign * torch.inf
    first.requires_grad_()
    d = problem.build(first, *rest, omega)
    assert d.value[1] == -problem.sign * torch.inf
    assert (d.marginals[1] == 0).all()
    assert d.entropy()[1] == 0
    blank = d.map()[1]
    assert not blank.any() if blank.dtype == torch.bool else (blank == -1).all()
    for paths in (d.sample(2)[:, 1], d.top(2).paths[1]):
        assert (paths == blank).all()
    assert (d.top(2).probs[1] == 0).all()
    assert (d.log_prob(d.sample(2))[:, 1] == -torch.inf).all()
    assert (
        problem.build(first.detach().clone().index_fill(0, torch.tensor(1), 0.0), *rest, omega).value.isfinite().all()
    )
    other = problem.build(torch.where(first.isfinite(), first, 0.0).detach(), *rest, omega).map()
    loss = d.loss(other)
    assert loss[1] == torch.inf
    assert loss[[0, 2]].isfinite().all()
    (gradient,) = torch.autograd.grad(d.value[[0, 2]].sum() + d.marginals.square().sum(), first)
    assert gradient.isfinite().all()
    assert (gradient[1] == 0).all()


@either_way
@every_problem
def test_an_empty_batch(problem: Problem, compiled: bool) -> None:
    if problem.name == "lattice":
        d = Lattice(SOURCES, TARGETS, torch.zeros(0, len(SOURCES)), NODES)
    elif problem.name == "alignment":
        d = Alignment(torch.zeros(0, 3, 4))
    else:
        d = LinearChain(torch.zeros(0, 4, 3), torch.zeros(3, 3))
    assert d.value.shape == (0,)
    assert d.marginals.shape[0] == d.map().shape[0] == d.entropy().shape[0] == 0
    assert d.sample(2).shape[:2] == (2, 0)


@either_way
@every_problem
def test_the_default_device_does_not_matter(problem: Problem, compiled: bool) -> None:
    tensors = tuple(t.requires_grad_() for t in problem.tensors())

    def everything() -> list[Tensor]:
        d = problem.build(*tensors, Gini())
        first = torch.autograd.grad(d.value.square().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), tensors)
        verbs = [d.value, d.marginals, d.map(), d.loss(d.map()), d.log_prob(d.map()), d.entropy(), d.kl_divergence(d)]
        return [*first, *second, *verbs, d.top(2).probs]

    wanted = everything()
    with torch.device("meta"):
        torch.testing.assert_close(everything(), wanted)


@either_way
@every_problem
def test_strided_inputs(problem: Problem, compiled: bool) -> None:
    tensors = problem.tensors()
    strewn = [torch.stack([t, t + 1], -1)[..., 0].transpose(0, -1).contiguous().transpose(0, -1) for t in tensors]
    torch.testing.assert_close(problem.build(*strewn, Gini()).marginals, problem.build(*tensors, Gini()).marginals)


@every_problem
@pytest.mark.parametrize("omega", SMOOTH, ids=str)
def test_forward_mode_and_transformations(problem: Problem, omega: Regularizer) -> None:
    first, *rest = problem.tensors()

    def value(t: Tensor) -> Tensor:
        return problem.build(t, *rest, omega).value

    def total(t: Tensor) -> Tensor:
        return value(t).sum()

    direction = torch.randn_like(first)
    marginals = problem.build(first, *rest, omega).marginals
    _, tangent = jvp(value, (first,), (direction,))
    torch.testing.assert_close(tangent, (marginals * direction).flatten(1).sum(-1))
    backward = jacrev(value)(first)
    torch.testing.assert_close(backward, jacfwd(value)(first))
    torch.testing.assert_close(backward.sum(0), marginals)
    several = torch.stack([first, first + direction])
    torch.testing.assert_close(vmap(value)(several), torch.stack([value(t) for t in several]))
    leaf = first.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(total(leaf), leaf, create_graph=True)
    (product,) = torch.autograd.grad(gradient, leaf, direction)
    wanted = (hessian(total)(first).flatten(first.dim()) @ direction.flatten()).reshape(first.shape)
    torch.testing.assert_close(product, wanted)


@every_problem
def test_transformations_nest_and_leave_nothing_behind(problem: Problem) -> None:
    first, *rest = problem.tensors()

    def total(t: Tensor) -> Tensor:
        return problem.build(t, *rest, Shannon()).value.square().sum()

    def gradient(t: Tensor) -> Tensor:
        leaf = t.clone().requires_grad_()
        return torch.autograd.grad(total(leaf), leaf)[0]

    # Graphs are made by the first call, under whichever transformation that is.
    for graph in (chain._graph, alignment._graph, lattice._shape):
        graph.forget()
    mapped = vmap(jacrev(grad(total)))(first.unsqueeze(0))[0]
    step = 1e-5
    columns = []
    for i in range(first.numel()):
        shift = torch.zeros(first.numel()).double()
        shift[i] = step
        shift = shift.reshape(first.shape)
        columns.append((gradient(first + shift) - gradient(first - shift)) / (2 * step))
    wanted = torch.stack(columns, -1).reshape(*first.shape, *first.shape)
    torch.testing.assert_close(mapped, wanted, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(jacrev(jacrev(total))(first), mapped)
    torch.testing.assert_close(jacfwd(jacrev(total))(first), mapped)
    torch.testing.assert_close(vmap(grad(total))(first.unsqueeze(0))[0], gradient(first))
    assert problem.build(first, *rest, Shannon()).sample(2).shape[0] == 2  # outside of them too


@either_way
@every_problem
def test_derivatives_may_be_mapped_over(problem: Problem, compiled: bool) -> None:
    tensors, omega = problem.tensors(), Tsallis(1.5)

    def value(*each: Tensor) -> Tensor:
        return problem.build(*each, omega).value

    def marginals(*each: Tensor) -> Tensor:
        return problem.build(*each, omega).marginals.flatten()[:6]

    for function in (value, marginals):
        row_by_row = functional.jacobian(function, tensors)
        torch.testing.assert_close(functional.jacobian(function, tensors, vectorize=True), row_by_row)
    first, *rest = tensors
    curved = functional.hessian(lambda t: value(t, *rest).sum(), first, vectorize=True)
    torch.testing.assert_close(curved, hessian(lambda t: value(t, *rest).sum())(first))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler, which looks at what comes between graphs
@every_problem
def test_compiled_graphs_break_or_raise(problem: Problem) -> None:
    tensors = problem.tensors()
    target = problem.build(*tensors, Gini()).map()

    def verbs(*each: Tensor) -> list[Tensor]:
        d = problem.build(*each, Gini())
        return [2 * d.value, d.marginals + 1, d.loss(target), d.entropy(), d.log_prob(target), d.map().long()]

    leaves = [t.clone().requires_grad_() for t in tensors]
    found = torch.compile(verbs, backend="eager")(*leaves)
    wanted = verbs(*leaves)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(sum(r.square().sum() for r in results[:4]), leaves) for results in (found, wanted)]
    torch.testing.assert_close(*gradients)
    with pytest.raises(Exception, match="a dynamic program runs step by step"):
        torch.compile(lambda *each: problem.build(*each, Gini()).value, fullgraph=True, backend="eager")(*tensors)


@either_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("omega", SMOOTH, ids=str)
def test_huge_scores_leave_marginals_accurate(omega: Regularizer, dtype: torch.dtype, compiled: bool) -> None:
    # Offsets that cancel along every path, but not in float32: multiples of 1/16 up to 10⁶.
    small = (torch.randn(2, 6, 3) * 16).round() / 16
    step = (torch.randn(3, 3) * 16).round() / 16
    high = torch.tensor([1e6, -1e6, 1e6, -1e6, 1e6, -1e6]).reshape(1, 6, 1)
    plain = LinearChain(small.double(), step.double(), omega=omega)
    d = LinearChain((small + high).to(dtype), step.to(dtype), omega=omega)
    torch.testing.assert_close(d.marginals.double(), plain.marginals, rtol=0, atol=1e-6)
    torch.testing.assert_close(d.value.double(), plain.value, rtol=1e-6, atol=1e-6)
    assert torch.equal(d.map(), plain.map())
    torch.testing.assert_close(d.top(3).probs.double(), plain.top(3).probs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("omega", SMOOTH, ids=str)
def test_long_chains(omega: Regularizer) -> None:
    unary = torch.randn(1, 5000, 3)
    step = torch.randn(3, 3)
    step[0, 1] = -torch.inf
    scores = (unary * 1e3).requires_grad_()
    d = LinearChain(scores, step, omega=omega)
    exact = LinearChain(scores.detach().double(), step.double(), omega=omega)
    marginals = d.marginals
    torch.testing.assert_close(marginals.double(), exact.marginals, rtol=0, atol=1e-5)
    torch.testing.assert_close(marginals.sum(-1), torch.ones(1, 5000), rtol=0, atol=1e-5)
    torch.testing.assert_close(d.value.double(), exact.value, rtol=1e-6, atol=0)
    assert (d.transition_marginals[..., 0, 1] == 0).all()
    d.value.sum().backward()
    torch.testing.assert_close(scores.grad, marginals.detach())


@either_way
def test_what_stands_after_the_end_does_not_matter(compiled: bool) -> None:
    unary, step = torch.randn(3, 4, 3), torch.randn(3, 3, 3, 3)
    lengths = torch.tensor([4, 1, 3])
    after = torch.arange(4) >= lengths[:, None]
    dirty = unary.masked_fill(after[..., None], math.nan).requires_grad_()
    dirty_step = step.masked_fill(after[:, 1:, None, None], math.nan).requires_grad_()
    clean, d = LinearChain(unary, step, lengths, omega=Gini()), LinearChain(dirty, dirty_step, lengths, omega=Gini())
    assert torch.equal(d.value, clean.value)
    assert torch.equal(d.marginals, clean.marginals)
    assert torch.equal(d.map(), clean.map())
    loss = d.loss(clean.map())
    assert torch.equal(loss, clean.loss(clean.map()))
    loss.sum().backward()
    assert dirty.grad.isfinite().all()
    assert dirty_step.grad.isfinite().all()
    costs, pairs = torch.rand(2, 3, 4), torch.tensor([[3, 2], [1, 4]])
    outside = (torch.arange(3)[:, None] >= pairs[:, 0, None, None]) | (torch.arange(4) >= pairs[:, 1, None, None])
    spoilt = costs.masked_fill(outside, math.nan).requires_grad_()
    table = Alignment(spoilt, pairs)
    assert torch.equal(table.value, Alignment(costs, pairs).value)
    table.value.sum().backward()
    assert spoilt.grad.isfinite().all()


UNARY, STEP, COSTS = torch.zeros(2, 4, 3), torch.zeros(3, 3), torch.zeros(2, 3, 4)
EDGES = (torch.tensor([0, 1]), torch.tensor([1, 2]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: LinearChain(UNARY, STEP, torch.tensor([4, -1])), ValueError, r"lengths must be in \[0, 4\].*got -1"),
        (lambda: LinearChain(UNARY, STEP, torch.tensor([5, 4])), ValueError, r"lengths must be in \[0, 4\].*got 5"),
        (lambda: LinearChain(UNARY, STEP, torch.tensor([4])), ValueError, r"lengths must have shape \(2,\)"),
        (lambda: LinearChain(UNARY, STEP, torch.tensor([4.0, 4.0])), TypeError, "lengths must be a tensor of integers"),
        (lambda: LinearChain(UNARY.long(), STEP), TypeError, "unary must be a floating-point tensor"),
        (lambda: LinearChain(UNARY[:, :0], STEP), ValueError, "unary must have shape"),
        (lambda: LinearChain(UNARY, STEP[:2]), ValueError, "transition must have shape"),
        (lambda: LinearChain(UNARY, STEP, start=STEP), ValueError, "start must have shape"),
        (lambda: LinearChain(UNARY, STEP, omega=KSubsets(2)), TypeError, "omega must be over the simplex.*KSubsets"),
        (lambda: LinearChain(UNARY, STEP, omega=Fused(0.1)), TypeError, "omega must be zero at one-hot.*Fused"),
        (lambda: LinearChain(UNARY, STEP, omega=Custom(half_square)), TypeError, "zero at one-hot vectors.*subtract"),
        (lambda: Alignment(COSTS, omega=2.0 * Custom(half_square)), TypeError, r"It is 0.5 there: subtract 0.5"),
        (lambda: Alignment(COSTS, omega=Fused(0.1)), TypeError, r"differ, from 0.1 to 0.2: no constant"),
        (lambda: LinearChain(UNARY, STEP, omega=Capped(0.5)), TypeError, "not every choice may be one-hot"),
        (lambda: LinearChain(UNARY, STEP, omega=Custom(of_four)), TypeError, "cannot be computed for 2 entries"),
        (lambda: LinearChain(UNARY, STEP, omega=SparseMAP(AtMost(2))), TypeError, "do not sum to 1 for every number"),
        (lambda: LinearChain(UNARY, STEP, omega=Tsallis(torch.ones(2))), ValueError, "omega must have one alpha"),
        (
            lambda: LinearChain(UNARY, STEP).loss(torch.full((2, 4), 3)),
            ValueError,
            r"target must hold states in \[0, 2\]",
        ),
        (lambda: LinearChain(UNARY, STEP).loss(torch.zeros(2, 3).long()), ValueError, "target must have shape"),
        (lambda: LinearChain(UNARY, STEP).sample(0), ValueError, "n must be at least 1, got 0"),
        (lambda: LinearChain(UNARY, STEP).top(1.5), TypeError, "k must be an int"),
        (lambda: Alignment(COSTS, torch.tensor([[3, 4], [0, 1]])), ValueError, "lengths must be in"),
        (lambda: Alignment(COSTS, torch.tensor([[3, 4], [4, 4]])), ValueError, "lengths must be in"),
        (lambda: Alignment(COSTS, torch.tensor([3, 4])), ValueError, r"lengths must have shape \(2, 2\)"),
        (lambda: Alignment(COSTS[:, :0]), ValueError, "costs must have shape"),
        (lambda: Alignment(COSTS, band=-1), ValueError, "band must be at least 0"),
        (lambda: Alignment(COSTS).loss(torch.zeros(2, 3, 2).long()), ValueError, "target must go from cell"),
        (
            lambda: Lattice(*EDGES[::-1], torch.zeros(1, 2), 3),
            ValueError,
            "no cycle.*edge 0 goes from node 1 to node 0",
        ),
        (lambda: Lattice(EDGES[0], EDGES[0], torch.zeros(1, 2), 3), ValueError, "no cycle"),
        (lambda: Lattice(*EDGES, torch.zeros(1, 2), 4), ValueError, "no path from node 0 to node 3"),
        (lambda: Lattice(*EDGES, torch.zeros(1, 2), 2), ValueError, r"targets must be nodes in \[0, 1\], got 2"),
        (lambda: Lattice(*EDGES, torch.zeros(1, 3), 3), ValueError, r"sources must have shape \(3,\)"),
        (lambda: Lattice(EDGES[0][:0], EDGES[1][:0], torch.zeros(1, 0), 3), ValueError, "scores must have shape"),
        (lambda: Lattice(*EDGES, torch.zeros(1, 2), 3).loss(torch.tensor([[True, False]])), ValueError, "one path"),
        (lambda: Lattice(*EDGES, torch.zeros(1, 2), 3).loss(torch.tensor([[1, 1]])), TypeError, "boolean"),
        (lambda: Lattice(*EDGES, torch.zeros(1, 2), 1), ValueError, "num_nodes must be at least 2"),
    ],
)
def test_bad_input_is_named(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_program_shows_what_it_is() -> None:
    assert repr(LinearChain(UNARY, STEP)) == "LinearChain(2 chains of up to 4 steps, 3 states, omega=Shannon())"
    assert repr(Alignment(COSTS, band=1)) == "Alignment(2 tables of up to 3 × 4 cells, band=1, omega=Shannon())"
    assert repr(Lattice(*EDGES, torch.zeros(1, 2), 3, Hard())) == "Lattice(1 × 2 edges between 3 nodes, omega=Hard())"
