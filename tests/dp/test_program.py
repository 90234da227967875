"""The verbs of every dynamic program, against all of its paths; with kernels and without."""

import itertools
import math
from collections.abc import Callable, Hashable

import pytest
import torch
from enumeration import FULL, NODES, PROBLEMS, TARGETS, Edge, Problem, parameters, solve
from scipy import stats
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from fenchel import Custom, Gini, Hard, Norm, Regularizer, Shannon, Tsallis, sparsemax
from fenchel.dp import Alignment, DynamicProgram, Lattice, LinearChain, Monotonic

BATCH = 3
OMEGAS = [Shannon(), Gini(), Tsallis(1.5), Hard(), 0.3 * Gini(), 2.0 * Shannon(), Tsallis(1.2)]
COMPILED = [Shannon(), Gini(), Tsallis(1.5), 0.3 * Gini()]

every_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=str)
every_omega = pytest.mark.parametrize("omega", OMEGAS, ids=lambda o: str(o).replace("\n", ""))
curved = pytest.mark.parametrize("omega", COMPILED, ids=lambda o: str(o).replace("\n", ""))
either_way = pytest.mark.parametrize(
    "compiled", [pytest.param(True, id="kernels"), pytest.param(False, id="torch", marks=pytest.mark.slow)]
)


@pytest.fixture(autouse=True)
def _path(request: pytest.FixtureRequest, set_kernels: Callable[[bool], None]) -> None:
    if hasattr(request.node, "callspec"):
        set_kernels(request.node.callspec.params.get("compiled", True))


def listed(problem: Problem, answer) -> tuple[Tensor, Tensor, Tensor]:
    """All paths of a batch element, most probable first, their probabilities and their scores."""
    paths = sorted(answer.paths, key=lambda each: -each[1])
    states = torch.stack([problem.path(parts) for parts, _, _ in paths])
    return states, *torch.tensor([each[1:] for each in paths], dtype=torch.float64).unbind(-1)


@either_way
@every_problem
@every_omega
def test_every_verb_agrees_with_enumeration(problem: Problem, omega: Regularizer, compiled: bool) -> None:
    tensors = problem.tensors(1)
    d = problem.build(*tensors, omega)
    answers = problem.answers(tensors, omega, BATCH)
    values = problem.sign * torch.tensor([a.value for a in answers], dtype=torch.float64)
    torch.testing.assert_close(d.value, values, rtol=0, atol=1e-12)
    expected = torch.stack([a.marginals(d.marginals[0].numel()) for a in answers]).reshape(d.marginals.shape)
    torch.testing.assert_close(d.marginals, expected, rtol=0, atol=1e-12)
    entropies = torch.tensor([a.entropy() for a in answers], dtype=torch.float64)
    torch.testing.assert_close(d.entropy(), entropies, rtol=0, atol=1e-11)
    k = max(len(a.paths) for a in answers) + 1
    top = d.top(k)
    torch.testing.assert_close(top.probs.sum(-1), torch.ones(BATCH).double(), rtol=0, atol=1e-12)
    assert (top.probs.diff() <= 0).all()
    best = d.map()
    for b, answer in enumerate(answers):
        paths, probs, scores = listed(problem, answer)
        torch.testing.assert_close(top.probs[b, : len(probs)], probs, rtol=0, atol=1e-12)
        assert (top.probs[b, len(probs) :] == 0).all()
        listing = zip(top.paths[b].flatten(1).tolist(), top.probs[b].tolist(), strict=True)
        found = {tuple(p): q for p, q in reversed(list(listing))}  # a chain of no steps has the path of the padding
        for path, probability in zip(paths, probs, strict=True):
            assert found.get(tuple(path.flatten().tolist()), 0.0) == pytest.approx(probability.item(), abs=1e-12)
        given = best.expand(len(paths), *best.shape).clone()  # some path for the other batch elements
        given[:, b] = paths
        torch.testing.assert_close(d.log_prob(given)[:, b], probs.log(), rtol=0, atol=1e-9)
        torch.testing.assert_close(d.loss(given)[:, b], (answer.value - scores).clamp_min(0), rtol=0, atol=1e-12)
        assert torch.equal(best[b], paths[scores.argmax()])


@either_way
@every_problem
@pytest.mark.parametrize("omega", [Shannon(), Gini(), 2.0 * Tsallis(1.5)], ids=["shannon", "gini", "entmax"])
def test_samples_have_the_probabilities_of_the_walk(problem: Problem, omega: Regularizer, compiled: bool) -> None:
    tensors = problem.tensors(2)
    d = problem.build(*tensors, omega)
    n = 2000
    samples = d.sample(n, torch.Generator().manual_seed(5))
    assert samples.shape[:2] == (n, BATCH)
    for b, answer in enumerate(problem.answers(tensors, omega, BATCH)):
        counts: dict[tuple, int] = {}
        for path in samples[:, b].flatten(1).tolist():
            counts[tuple(path)] = counts.get(tuple(path), 0) + 1
        paths, probs, _ = listed(problem, answer)
        seen = torch.tensor([counts.pop(tuple(p.flatten().tolist()), 0) for p in paths]).double()
        assert not counts  # nothing off the list, and …
        assert (seen[probs == 0] == 0).all()  # … nothing off the support
        common = probs * n >= 5
        observed = torch.cat([seen[common], seen[~common].sum().reshape(1)])
        wanted = torch.cat([probs[common] * n, probs[~common].sum().reshape(1) * n])
        kept = wanted > 1e-9
        if kept.sum() > 1:
            assert stats.chisquare(observed[kept], wanted[kept] * observed.sum() / wanted[kept].sum()).pvalue > 1e-3


@every_problem
def test_the_same_generator_gives_the_same_samples(problem: Problem) -> None:
    d = problem.build(*problem.tensors(2), Shannon())
    first, second, third = (d.sample(20, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    assert (d.log_prob(first) > -torch.inf).all()


def leaves(problem: Problem, seed: int = 3) -> tuple[Tensor, ...]:
    return tuple(t.requires_grad_() for t in problem.tensors(seed))


@either_way
@every_problem
@curved
def test_derivatives_of_the_value_and_of_the_marginals(problem: Problem, omega: Regularizer, compiled: bool) -> None:
    inputs = leaves(problem)
    assert gradcheck(lambda *t: problem.build(*t, omega).value, inputs, fast_mode=not compiled)
    assert gradgradcheck(lambda *t: problem.build(*t, omega).value, inputs, fast_mode=True)
    assert gradcheck(lambda *t: problem.build(*t, omega).marginals, inputs, fast_mode=True)


@pytest.mark.slow
@every_problem
def test_third_derivatives(problem: Problem) -> None:
    assert gradgradcheck(lambda *t: problem.build(*t, Shannon()).marginals, leaves(problem), fast_mode=True)


@pytest.mark.slow
@every_problem
@pytest.mark.parametrize("omega", [Shannon(), Tsallis(1.5)], ids=["shannon", "entmax"])
def test_derivatives_of_entropy_loss_and_log_prob(problem: Problem, omega: Regularizer) -> None:
    inputs = leaves(problem)
    path = problem.build(*inputs, omega).top(1).paths[:, 0]
    assert gradcheck(lambda *t: problem.build(*t, omega).entropy(), inputs, fast_mode=True)
    assert gradcheck(lambda *t: problem.build(*t, omega).loss(path), inputs, fast_mode=True)
    assert gradcheck(lambda *t: problem.build(*t, omega).log_prob(path), inputs, fast_mode=True)


def divergences(p, q) -> tuple[float, float]:
    """Cross-entropy and KL of two answers, path by path."""
    there = {tuple(parts): probability for parts, probability, _ in q.paths}
    cross, divergence = 0.0, 0.0
    for parts, probability, _ in p.paths:
        if probability > 0:
            other = there[tuple(parts)]
            cross -= probability * math.log(other) if other > 0 else -math.inf
            divergence += probability * math.log(probability / other) if other > 0 else math.inf
    return cross, divergence


@either_way
@every_problem
@pytest.mark.parametrize(
    ("omega", "other"),
    [(Shannon(), Shannon()), (Gini(), Tsallis(1.2)), (Shannon(), Gini()), (Gini(), 3.0 * Gini()), (Hard(), Shannon())],
    ids=["shannon", "gini, entmax", "shannon, gini", "gini", "hard"],
)
def test_divergences_agree_with_enumeration(
    problem: Problem, omega: Regularizer, other: Regularizer, compiled: bool
) -> None:
    tensors, others = problem.tensors(1), problem.tensors(5)
    p, q = problem.build(*tensors, omega), problem.build(*others, other)
    answers = zip(problem.answers(tensors, omega, BATCH), problem.answers(others, other, BATCH), strict=True)
    cross, divergence = torch.tensor([divergences(*each) for each in answers], dtype=torch.float64).unbind(-1)
    torch.testing.assert_close(p.cross_entropy(q), cross, rtol=0, atol=1e-11)
    torch.testing.assert_close(p.kl_divergence(q), divergence, rtol=0, atol=1e-11)
    assert (p.kl_divergence(p) == 0).all()
    torch.testing.assert_close(p.cross_entropy(p), p.entropy())
    narrow = problem.build(*(t.bfloat16() for t in others), other)
    assert problem.build(*(t.bfloat16() for t in tensors), omega).kl_divergence(narrow).dtype == torch.bfloat16
    assert p.kl_divergence(narrow).dtype == torch.float64


@pytest.mark.slow
@every_problem
def test_derivatives_of_divergences(problem: Problem) -> None:
    both, omega = (*leaves(problem), *leaves(problem, 6)), Tsallis(1.5)
    half = len(both) // 2

    def divergence(*t: Tensor) -> Tensor:  # cross-entropy less entropy, of which another test has the derivatives
        return problem.build(*t[:half], omega).kl_divergence(problem.build(*t[half:], Shannon()))

    assert gradcheck(divergence, both, fast_mode=True)
    assert gradgradcheck(divergence, both, fast_mode=True)
    sparse = problem.build(*both[half:], Gini())
    infinite = problem.build(*both[:half], Shannon()).kl_divergence(sparse)
    assert (infinite == torch.inf).any()
    assert all(g.isfinite().all() for g in torch.autograd.grad(infinite.sum(), both))  # of the paths that are left


def test_divergences_where_there_is_no_path_and_where_there_is_nan() -> None:
    unary, step = torch.randn(4, 3, 2).double(), torch.randn(2, 2).double()
    p, q = unary.clone(), unary.flip(0).clone()
    p[0], q[1], p[2], q[3, 0, 0] = -torch.inf, -torch.inf, math.nan, math.nan
    p.requires_grad_()
    q.requires_grad_()
    for omega in (Shannon(), Gini()):
        divergence = LinearChain(p, step, omega=omega).kl_divergence(LinearChain(q, step, omega=omega))
        assert divergence[0] == 0  # nothing has probability
        assert divergence[1] == torch.inf
        assert divergence[2:].isnan().all()
        for gradient in torch.autograd.grad(divergence[:2].sum(), (p, q)):
            assert gradient.isfinite().all()
            assert (gradient[2:] == 0).all()


def test_divergences_are_between_programs_over_the_same_paths() -> None:
    unary, step, costs = torch.zeros(2, 4, 3), torch.zeros(3, 3), torch.zeros(2, 3, 4)
    d = LinearChain(unary, step, torch.tensor([4, 2]))
    with pytest.raises(ValueError, match=r"other must have the same lengths, \[4, 2\], got \[4, 4\]"):
        d.kl_divergence(LinearChain(unary, step))
    with pytest.raises(ValueError, match=r"other must have scores of the same shape, \(2, 4, 3\), got \(1, 4, 3\)"):
        d.cross_entropy(LinearChain(unary[:1], step))
    with pytest.raises(TypeError, match="other must be a LinearChain as well, got Alignment"):
        d.kl_divergence(Alignment(costs))
    ends = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2])
    net = Lattice(*ends, torch.zeros(1, 3), 3)
    with pytest.raises(ValueError, match="other must have the same sources, targets and num_nodes"):
        net.kl_divergence(Lattice(ends[0], torch.tensor([1, 1, 2]), torch.zeros(1, 3), 3))
    band = Alignment(costs, band=0).kl_divergence(Alignment(costs))
    assert band.isfinite().all()
    assert (Alignment(costs).kl_divergence(Alignment(costs, band=0)) == torch.inf).all()


class Own(Regularizer):
    """A user's own Ω: a learned width times Gini's, as value and choice alone; NaN where all scores are −inf."""

    zero_at_vertices = True

    def __init__(self, width: Tensor) -> None:
        super().__init__()
        self.width = width

    def forward(self, p: Tensor, dim: int = -1) -> Tensor:
        return self.width * (p.square().sum(dim) - 1) / 2

    def argmax(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        free = scores > -torch.inf
        p = sparsemax(torch.where(free, torch.where(free, scores, 0.0) / self.width, -torch.inf), dim, mask)
        return torch.where(free.any(dim, keepdim=True), p, torch.nan)


@every_problem
def test_an_omega_of_a_users_own_needs_its_value_and_its_choice_alone(problem: Problem) -> None:
    width = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    tensors = [t.requires_grad_() for t in problem.tensors(1)]
    own, known = problem.build(*tensors, Own(width)), problem.build(*tensors, width * Gini())
    answers = problem.answers(tuple(tensors), 0.7 * Gini(), BATCH)
    values = problem.sign * torch.tensor([a.value for a in answers], dtype=torch.float64)
    torch.testing.assert_close(own.value, values, rtol=0, atol=1e-12)
    path = known.sample(2, torch.Generator().manual_seed(3))
    assert torch.equal(own.sample(2, torch.Generator().manual_seed(3)), path)
    for mine, theirs in (
        (own.marginals, known.marginals),
        (own.entropy(), known.entropy()),
        (own.log_prob(path), known.log_prob(path)),
        (own.loss(path[0]), known.loss(path[0])),
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
        gradients = [torch.autograd.grad(each.square().sum(), [width, *tensors]) for each in (mine, theirs)]
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


@every_problem
def test_a_custom_omega_that_is_zero_at_vertices_is_taken(problem: Problem) -> None:
    tensors = problem.tensors(1)
    omega = Custom(lambda p: (p.square().sum(-1) - 1) / 2)
    d, gini = problem.build(*tensors, 0.5 * omega), problem.build(*tensors, 0.5 * Gini())
    torch.testing.assert_close(d.value, gini.value, rtol=0, atol=1e-8)
    torch.testing.assert_close(d.marginals, gini.marginals, rtol=0, atol=1e-6)


def along(problem: Problem, d: DynamicProgram, b: int, path: Tensor) -> Tensor:
    """The product of the walk's probabilities along a path, cell by cell, edge by edge or step by step."""
    walk = d.walk[b]
    if isinstance(d, Lattice):
        return walk[path].prod()
    if isinstance(d, Alignment):
        cells = [tuple(c) for c in path.tolist() if c[0] >= 0]
        steps = [(c[0] - a[0], c[1] - a[1]) for a, c in itertools.pairwise([(-1, -1), *cells])]
        kinds = [[(1, 1), (1, 0), (0, 1)].index(step) for step in steps]
        return torch.stack([walk[i, j, kind] for (i, j), kind in zip(cells, kinds, strict=True)]).prod()
    states = path[path >= 0]
    if isinstance(d, Monotonic):
        return walk[states, torch.arange(len(states)), torch.diff(states, prepend=states[:1])].prod()
    if len(states) == 0:
        return torch.tensor(1.0, dtype=torch.float64)
    steps = torch.arange(len(states) - 1)
    return walk[steps, states[:-1], states[1:]].prod() * d.marginals[b, len(states) - 1, states[-1]]


@every_problem
@every_omega
def test_the_walk_has_the_probabilities_of_paths(problem: Problem, omega: Regularizer) -> None:
    tensors = problem.tensors(1)
    d = problem.build(*tensors, omega)
    for b, answer in enumerate(problem.answers(tensors, omega, BATCH)):
        paths, probs, _ = listed(problem, answer)
        found = torch.stack([along(problem, d, b, path) for path in paths])
        torch.testing.assert_close(found, probs, rtol=0, atol=1e-12)


def test_shapes_and_sums_of_walks() -> None:
    lengths = torch.tensor([4, 1, 3])
    walk = LinearChain(torch.randn(3, 4, 5), torch.randn(5, 5), lengths, omega=Gini()).walk
    assert walk.shape == (3, 3, 5, 5)
    inside = torch.arange(1, 4) < lengths[:, None]
    torch.testing.assert_close(walk.sum(-2), inside[..., None].expand(3, 3, 5).float())
    net = PROBLEMS[-1]
    edges = net.build(*net.tensors(), Gini()).walk
    into = torch.zeros(BATCH, NODES).double().index_add(1, TARGETS, edges)
    torch.testing.assert_close(into, torch.tensor([0, 1, 0, 1, 1, 0, 0, 1]).double().expand(BATCH, NODES))
    unary = torch.randn(3, 4, 5)
    unary[0, 0, 0], unary[1] = math.nan, -torch.inf
    walk = LinearChain(unary, torch.randn(5, 5)).walk
    assert walk[0].isnan().all()
    assert (walk[1] == 0).all()
    assert walk[2].isfinite().all()


@pytest.mark.slow
@every_problem
def test_derivatives_of_the_walk_and_of_the_bounds(problem: Problem) -> None:
    inputs = leaves(problem)
    assert gradcheck(lambda *t: problem.build(*t, Gini()).walk, inputs, fast_mode=True)
    assert gradgradcheck(lambda *t: problem.build(*t, Shannon()).walk, inputs, fast_mode=True)
    gamma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda c, *t: problem.build(*t, c * Gini()).bounds().lower, (gamma, *inputs), fast_mode=True)


def normalized_entropy(p: Tensor) -> Tensor:
    """Shannon's negative entropy, −1 at the uniform distribution whatever the number of entries."""
    return -torch.special.entr(p).sum(-1) / math.log(p.shape[-1])


def reachable(edges: list[Edge], source: Hashable, sink: Hashable) -> tuple[list[Edge], Hashable, Hashable]:
    """A graph without the edges that no path from the source reaches; edges are in topological order of targets."""
    seen, kept = {source}, []
    for edge in sorted(edges, key=lambda e: e[1]) if isinstance(source, int) else edges:
        if edge[0] in seen:
            kept.append(edge)
            seen.add(edge[1])
    return kept, source, sink


@every_problem
def test_an_omega_may_depend_on_the_number_of_choices(problem: Problem) -> None:
    tensors = problem.tensors(1)
    d = problem.build(*tensors, 0.4 * Custom(normalized_entropy))
    graphs = [reachable(*problem.edges(b, *tensors)) for b in range(BATCH)]
    answers = [solve(*graph, 1.0, lambda n: 0.4 / math.log(max(n, 2))) for graph in graphs]
    values = problem.sign * torch.tensor([a.value for a in answers], dtype=torch.float64)
    torch.testing.assert_close(d.value, values, rtol=0, atol=1e-8)
    marginals = d.marginals
    expected = torch.stack([a.marginals(marginals[0].numel()) for a in answers]).reshape(marginals.shape)
    torch.testing.assert_close(marginals, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
@every_problem
def test_derivatives_with_a_custom_omega(problem: Problem) -> None:
    width = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    omega = Custom(lambda p: width * (p.pow(3).sum(-1) - 1))

    def value(_: Tensor, *t: Tensor) -> Tensor:
        return problem.build(*t, 0.5 * omega).value

    inputs = (width, *leaves(problem))
    assert gradcheck(value, inputs, fast_mode=True)
    assert gradgradcheck(value, inputs, fast_mode=True)


@every_problem
def test_parameters_of_omega_are_trained(problem: Problem) -> None:
    tensors = problem.tensors(3)
    alpha = torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    gamma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda a, c: problem.build(*tensors, c * Tsallis(a)).value, (alpha, gamma))


@every_problem
@pytest.mark.parametrize("omega", [*COMPILED, Hard()], ids=lambda o: str(o).replace("\n", ""))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
def test_kernels_and_torch_agree(
    problem: Problem, omega: Regularizer, dtype: torch.dtype, tolerance: float, set_kernels: Callable[[bool], None]
) -> None:
    def everything() -> list[Tensor]:
        inputs = tuple(t.requires_grad_() for t in problem.tensors(4, dtype))
        d = problem.build(*inputs, omega)
        first = torch.autograd.grad(d.value.sum(), inputs, create_graph=True)
        generator = torch.Generator().manual_seed(0)
        along = sum((g * torch.randn(g.shape, generator=generator).to(g)).sum() for g in first)
        second = torch.autograd.grad(along, inputs, allow_unused=True, materialize_grads=True)
        return [d.value, d.marginals, *first, *second]

    compiled = everything()
    set_kernels(False)
    torch.testing.assert_close(compiled, everything(), rtol=tolerance, atol=tolerance)
    assert all(each.dtype == dtype for each in compiled)


@pytest.mark.slow
@pytest.mark.parametrize("omega", [*COMPILED, 0.05 * Shannon()], ids=lambda o: str(o).replace("\n", ""))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-11)], ids=str)
def test_kernels_and_torch_agree_on_wide_problems(
    omega: Regularizer, dtype: torch.dtype, tolerance: float, set_kernels: Callable[[bool], None]
) -> None:
    """Antidiagonals and rows of states that fill vectors and leave some over; steps that score alike, or not at all."""
    costs = 3 * torch.rand(3, 37, 21)
    costs[1][torch.rand(37, 21) < 0.1] = torch.inf
    pairs = torch.tensor([[37, 21], [9, 20], [2, 17]])
    unary, lengths = 5 * torch.randn(4, 6, 19), torch.tensor([6, 2, 1, 5])
    steps = [torch.randn(19, 19), 60 * torch.randn(4, 1, 19, 19), torch.randn(4, 5, 19, 19), torch.randn(19, 19)]
    steps[3][torch.rand(19, 19) < 0.3] = -torch.inf
    builds = [(lambda c: Alignment(c, pairs, omega), [costs])]
    builds += [(lambda u, w: LinearChain(u, w, lengths, omega=omega), [unary, w]) for w in steps]

    def everything() -> list[Tensor]:
        found = []
        for build, tensors in builds:
            inputs = [t.to(dtype).clone().requires_grad_() for t in tensors]
            d = build(*inputs)
            possible = d.value.isfinite()
            first = torch.autograd.grad(d.value[possible].sum(), inputs, create_graph=True)
            along = sum((g * torch.arange(g.numel()).reshape(g.shape).cos().to(g)).sum() for g in first)
            found += [d.value, d.marginals, *first, *torch.autograd.grad(along, inputs)]
        return [each.double() for each in found]

    compiled = everything()
    set_kernels(False)
    torch.testing.assert_close(compiled, everything(), rtol=tolerance, atol=10 * tolerance)


def test_any_other_omega_of_the_simplex_will_do() -> None:
    d = PROBLEMS[0].build(*PROBLEMS[0].tensors(), Norm(2.0))
    torch.testing.assert_close(d.marginals.sum(-1)[0], torch.ones(4).double())
    assert d.value.shape == (BATCH,)


def agreeing(b: int, tensors: tuple[Tensor, ...], target: Tensor, omega: Regularizer) -> float:
    """max_Ω over the paths of a chain through the observed states, by a graph without the others."""
    alpha, gamma = parameters(omega)
    edges, first, last = FULL.edges(b, *tensors)
    free = [e for e in edges if isinstance(e[1], str) or int(target[b, e[1][0]]) in (-100, e[1][1])]
    return solve(free, first, last, alpha, gamma).value


@either_way
@every_omega
def test_states_that_are_not_observed_leave_all_paths_that_agree(omega: Regularizer, compiled: bool) -> None:
    tensors = FULL.tensors(1)
    target = torch.tensor([[2, -100, -100, 0], [-100, 0, 0, 0], [-100, 1, 2, 7]])  # lengths 4, 1 and 3
    d = FULL.build(*tensors, omega)
    values = torch.tensor([agreeing(b, tensors, target, omega) for b in range(BATCH)], dtype=torch.float64)
    torch.testing.assert_close(d.loss(target), d.value - values, rtol=0, atol=1e-12)
    assert d.loss(target)[1] == 0  # nothing is observed
    both = torch.stack([target, d.map()])
    torch.testing.assert_close(d.loss(both), torch.stack([d.loss(target), d.loss(d.map())]), rtol=0, atol=1e-12)
    if str(omega) in map(str, COMPILED):
        inputs = leaves(FULL)
        assert gradcheck(lambda *t: FULL.build(*t, omega).loss(target), inputs, fast_mode=True)
        assert gradgradcheck(lambda *t: FULL.build(*t, omega).loss(target), inputs, fast_mode=True)


def test_a_target_that_agrees_with_no_possible_path_has_an_infinite_loss() -> None:
    step = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]]).requires_grad_()
    loss = LinearChain(torch.zeros(2, 3, 2), step).loss(torch.tensor([[0, -100, 1], [0, -100, 0]]))
    assert loss[0] == torch.inf
    assert loss[1].item() == pytest.approx(math.log(2))
    (gradient,) = torch.autograd.grad(loss.sum(), step)
    assert gradient.isfinite().all()


@either_way
def test_a_chain_of_no_steps_reads_no_scores(compiled: bool) -> None:
    """One path, of score 0, whatever stands in the scores; no derivative is NaN."""
    scores = [torch.full((2, 3, 2), math.nan).double(), torch.full((2, 2, 2, 2), math.inf).double()]
    scores += [torch.full((2, 2), math.nan).double(), torch.full((2, 2), math.nan).double()]
    for each in scores:
        each[0] = 0.0
        each.requires_grad_()
    unary, transition, start, end = scores
    d = LinearChain(unary, transition, torch.tensor([3, 0]), start, end)
    target = torch.tensor([[0, 1, 1], [-1, 5, -100]])
    assert d.value[1] == d.loss(target)[1] == d.log_prob(target)[1] == d.entropy()[1] == 0
    assert (d.map()[1] == -1).all()
    assert (d.sample(2)[:, 1] == -1).all()
    assert (d.top(2).paths[1] == -1).all()
    assert d.top(2).probs[1].tolist() == [1, 0]
    assert (d.marginals[1] == 0).all()
    assert (d.transition_marginals[1] == 0).all()
    assert d.kl_divergence(d)[1] == 0
    for result in (d.value, d.marginals.cos(), d.transition_marginals.cos(), d.loss(target), d.entropy()):
        first = torch.autograd.grad(result.sum(), scores, create_graph=True, materialize_grads=True)
        for gradient in (*first, *torch.autograd.grad(sum(g.cos().sum() for g in first), scores)):
            assert (gradient[1] == 0).all()
            assert gradient.isfinite().all()
