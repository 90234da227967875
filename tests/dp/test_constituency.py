"""Constituency trees against all trees, listed by plain recursion; kernels against torch operations."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from enumeration import Answer, choose, parameters
from scipy import stats
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacrev, jvp, vmap

from fenchel import Custom, Gini, Hard, KSubsets, Norm, Regularizer, Shannon, Tsallis
from fenchel.dp import Constituency, LinearChain

OMEGAS = [Shannon(), Gini(), Tsallis(1.5), Hard(), 0.3 * Gini(), 2.0 * Shannon(), Tsallis(1.2)]
LENGTHS = torch.tensor([5, 1, 3])
BATCH = len(LENGTHS)

every_omega = pytest.mark.parametrize("omega", OMEGAS, ids=lambda o: str(o).replace("\n", ""))
either_way = pytest.mark.parametrize("compiled", [True, False], ids=["kernels", "torch"])
labelled = pytest.mark.parametrize("labels", [None, 2], ids=["plain", "labels"])


@pytest.fixture(autouse=True)
def _path(request: pytest.FixtureRequest, set_kernels: Callable[[bool], None]) -> None:
    if hasattr(request.node, "callspec"):
        set_kernels(request.node.callspec.params.get("compiled", True))


def made(labels: int | None, seed: int = 0, words: int = 5) -> Tensor:
    shape = (BATCH, words, words) if labels is None else (BATCH, words - 1, words - 1, labels)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lengths_of(scores: Tensor) -> Tensor:
    return LENGTHS.clamp_max(scores.shape[1])


def listed(scores: Tensor, length: int, alpha: float, gamma: float) -> Answer:
    """All trees of one sentence, by the textbook's recursion: one choice per span, of split point and label."""
    words = len(scores)
    flat = scores.reshape(words, words, -1).tolist()
    labels = len(flat[0][0])
    values: dict[tuple[int, int], tuple[float, list[float]]] = {}

    def ways(i: int, j: int) -> list[tuple[int, int]]:
        return list(itertools.product(range(i, j) if i < j else [i], range(labels)))

    def value(i: int, j: int) -> float:
        if (i, j) not in values:
            parts = [0.0 if i == j else value(i, k) + value(k + 1, j) for k, _ in ways(i, j)]
            z = [flat[i][j][label] + part for (_, label), part in zip(ways(i, j), parts, strict=True)]
            values[i, j] = choose(z, alpha, gamma)
        return values[i, j][0]

    def trees(i: int, j: int) -> list[tuple[list[int], float, float]]:
        value(i, j)
        found = []
        for (k, label), p in zip(ways(i, j), values[i, j][1], strict=True):
            here = (i * words + j) * labels + label
            halves = [([], 1.0, 0.0)] if i == j else itertools.product(trees(i, k), trees(k + 1, j))
            for half in halves:
                a, b = (half, ([], 1.0, 0.0)) if i == j else half
                found.append(([here, *a[0], *b[0]], p * a[1] * b[1], flat[i][j][label] + a[2] + b[2]))
        return found

    return Answer(value(0, length - 1), trees(0, length - 1))


def as_path(parts: list[int], shape: torch.Size) -> Tensor:
    path = torch.zeros(shape.numel(), dtype=torch.bool)
    path[parts] = True
    return path.reshape(shape)


def answers(scores: Tensor, omega: Regularizer) -> list[Answer]:
    return [listed(s, n, *parameters(omega)) for s, n in zip(scores.detach(), lengths_of(scores).tolist(), strict=True)]


@labelled
def test_there_are_as_many_trees_as_catalan_says(labels: int | None) -> None:
    for n, catalan in ((1, 1), (2, 1), (3, 2), (4, 5), (5, 14)):
        scores = torch.zeros(n, n) if labels is None else torch.zeros(n, n, labels)
        trees = listed(scores, n, 1.0, 1.0).paths
        assert len(trees) == len({tuple(sorted(t[0])) for t in trees}) == catalan * (labels or 1) ** (2 * n - 1)
        d = Constituency(scores.double().unsqueeze(0))
        assert d.value.item() == pytest.approx(math.log(len(trees)))


@either_way
@labelled
@every_omega
def test_every_verb_agrees_with_enumeration(labels: int | None, omega: Regularizer, compiled: bool) -> None:
    scores = made(labels, 1)
    lengths = lengths_of(scores)
    d = Constituency(scores, lengths, omega)
    known = answers(scores, omega)
    torch.testing.assert_close(d.value, torch.tensor([a.value for a in known], dtype=torch.float64), rtol=0, atol=1e-12)
    expected = torch.stack([a.marginals(scores[0].numel()) for a in known]).reshape(scores.shape)
    torch.testing.assert_close(d.marginals, expected, rtol=0, atol=1e-12)
    entropies = torch.tensor([a.entropy() for a in known], dtype=torch.float64)
    torch.testing.assert_close(d.entropy(), entropies, rtol=0, atol=1e-11)
    best, k = d.map(), max(len(a.paths) for a in known) + 1
    top = d.top(k)
    torch.testing.assert_close(top.probs.sum(-1), torch.ones(BATCH).double(), rtol=0, atol=1e-12)
    assert (top.probs.diff() <= 0).all()
    bounds = d.bounds()
    for b, answer in enumerate(known):
        trees = torch.stack([as_path(parts, scores[0].shape) for parts, _, _ in answer.paths])
        probs, totals = torch.tensor([each[1:] for each in answer.paths], dtype=torch.float64).unbind(-1)
        torch.testing.assert_close(top.probs[b, : len(probs)], probs.sort(descending=True).values, rtol=0, atol=1e-12)
        found = {tuple(p.flatten().tolist()): q.item() for p, q in zip(top.paths[b], top.probs[b], strict=True)}
        for tree, probability in zip(trees, probs.tolist(), strict=True):
            assert found.get(tuple(tree.flatten().tolist()), 0.0) == pytest.approx(probability, abs=1e-12)
        given = best.expand(len(trees), *best.shape).clone()
        given[:, b] = trees
        torch.testing.assert_close(d.log_prob(given)[:, b], probs.log(), rtol=0, atol=1e-9)
        torch.testing.assert_close(d.loss(given)[:, b], (answer.value - totals).clamp_min(0), rtol=0, atol=1e-12)
        assert torch.equal(best[b], trees[totals.argmax()])
        assert bounds.lower[b] - 1e-12 <= totals.max() <= bounds.upper[b] + 1e-12


def test_few_of_many_trees() -> None:
    scores = made(None, 3, 7)
    d = Constituency(scores, torch.tensor([7, 6, 7]))
    many, few = d.top(200), d.top(6)
    assert torch.equal(few.paths, many.paths[:, :6])
    torch.testing.assert_close(few.probs, many.probs[:, :6])


@labelled
@pytest.mark.parametrize("omega", [Shannon(), Gini()], ids=str)
def test_samples_have_the_probabilities_of_the_trees(labels: int | None, omega: Regularizer) -> None:
    scores = made(labels, 2)
    n = 2000
    samples = Constituency(scores, lengths_of(scores), omega).sample(n, torch.Generator().manual_seed(5))
    for b, answer in enumerate(answers(scores, omega)):
        counts: dict[tuple, int] = {}
        for tree in samples[:, b].flatten(1).tolist():
            counts[tuple(tree)] = counts.get(tuple(tree), 0) + 1
        keys = [tuple(as_path(parts, scores[0].shape).flatten().tolist()) for parts, _, _ in answer.paths]
        probs = torch.tensor([p for _, p, _ in answer.paths], dtype=torch.float64)
        seen = torch.tensor([counts.pop(key, 0) for key in keys]).double()
        assert not counts
        assert (seen[probs == 0] == 0).all()
        common = probs * n >= 5
        observed = torch.cat([seen[common], seen[~common].sum().reshape(1)])
        wanted = torch.cat([probs[common] * n, probs[~common].sum().reshape(1) * n])
        kept = wanted > 1e-9
        if kept.sum() > 1:
            assert stats.chisquare(observed[kept], wanted[kept] * n / wanted[kept].sum()).pvalue > 1e-3


@either_way
@labelled
@pytest.mark.parametrize("omega", [Shannon(), Gini(), Tsallis(1.5), 0.3 * Gini()], ids=lambda o: str(o).split("(")[0])
def test_derivatives(labels: int | None, omega: Regularizer, compiled: bool) -> None:
    scores = made(labels, 4).requires_grad_()
    lengths = lengths_of(scores)

    def value(s: Tensor) -> Tensor:
        return Constituency(s, lengths, omega).value

    assert gradcheck(value, scores, fast_mode=not compiled)
    assert gradgradcheck(value, scores, fast_mode=True)
    assert gradcheck(lambda s: Constituency(s, lengths, omega).marginals, scores, fast_mode=True)


def test_derivatives_of_the_other_verbs() -> None:
    scores = made(2, 5).requires_grad_()
    lengths = lengths_of(scores)
    path = Constituency(scores, lengths, Tsallis(1.5)).top(1).paths[:, 0]
    for verb in ("entropy", "walk", "loss", "log_prob"):

        def call(s: Tensor, verb: str = verb) -> Tensor:
            d = Constituency(s, lengths, Tsallis(1.5))
            found = getattr(d, verb)
            return found if verb == "walk" else found() if verb == "entropy" else found(path)

        assert gradcheck(call, scores, fast_mode=True)
    assert gradgradcheck(lambda s: Constituency(s, lengths).marginals, scores, fast_mode=True)
    gamma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda c, s: Constituency(s, lengths, c * Gini()).value, (gamma, scores), fast_mode=True)


@labelled
def test_the_walk_has_the_probabilities_of_trees(labels: int | None) -> None:
    scores = made(labels, 6)
    d = Constituency(scores, lengths_of(scores), Gini())
    walk = d.walk
    assert walk.shape == (*scores.shape[:3], scores.shape[1], *scores.shape[3:])
    for b, answer in enumerate(answers(scores, Gini())):
        for parts, probability, _ in answer.paths:
            tree = as_path(parts, scores[0].shape)
            spans = (tree if labels is None else tree.any(-1)).nonzero().tolist()
            product = 1.0
            for i, j in spans:
                k = next((k for k in range(i, j) if [i, k] in spans and [k + 1, j] in spans), i)
                at = walk[b, i, j, k]
                product *= (at if labels is None else at[tree[i, j]]).item()
            assert product == pytest.approx(probability, abs=1e-12)


def test_divergences() -> None:
    scores, other = made(None, 7), made(None, 8)
    p, q = Constituency(scores, LENGTHS), Constituency(other, LENGTHS, Tsallis(1.2))
    for b, (a, c) in enumerate(zip(answers(scores, Shannon()), answers(other, Tsallis(1.2)), strict=True)):
        pairs = [(x[1], y[1]) for x, y in zip(a.paths, c.paths, strict=True)]
        wanted = sum(x * math.log(x / y) if y > 0 else math.inf for x, y in pairs if x > 0)
        assert p.kl_divergence(q)[b].item() == pytest.approx(wanted, abs=1e-11)
        assert p.cross_entropy(q)[b].item() == pytest.approx(wanted + a.entropy(), abs=1e-11)
    with pytest.raises(ValueError, match="the same lengths"):
        p.kl_divergence(Constituency(other))


@pytest.mark.parametrize("omega", [Shannon(), 0.01 * Shannon(), Gini(), Tsallis(1.5), Hard()], ids=repr)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str)
def test_kernels_and_torch_agree(
    omega: Regularizer, dtype: torch.dtype, tolerance: float, set_kernels: Callable[[bool], None]
) -> None:
    scores = 3 * torch.randn(11, 9, 9, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    lengths = torch.tensor([9, 9, 9, 9, 3, 9, 2, 1, 7, 9, 5])
    scores[0, 2, 5], scores[1, 3, 3], scores[2], scores[3] = -torch.inf, -torch.inf, 100 * scores[2], 1e6 + scores[3]
    scores[5, 0, 4, 1], scores[9, 8, 0], scores[10, 2, 6] = (
        math.nan,
        math.nan,
        math.inf,
    )  # one span, and two that are none
    scores.requires_grad_()

    def everything(scores: Tensor) -> list[Tensor]:
        d = Constituency(scores, lengths, omega)
        possible = d.value.isfinite()
        (first,) = torch.autograd.grad(d.value[possible].sum(), scores, create_graph=True)
        along = (first * torch.arange(first.numel()).reshape(first.shape).cos()).sum()
        (second,) = torch.autograd.grad(along, scores, allow_unused=True, materialize_grads=True)
        return [d.value, d.marginals, first, second]

    compiled = everything(scores)
    set_kernels(False)
    # Torch operations lose digits next to 1e6; without it they keep them. A tree of 9 words has 17 spans.
    expected = everything(torch.cat([scores[:3], scores[3:4] - 1e6, scores[4:]]))
    expected[0] = expected[0] + 17e6 * torch.eye(11)[3].to(dtype)
    torch.testing.assert_close(compiled, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert all(each.dtype == dtype for each in compiled)
    assert compiled[0].isnan().tolist() == [b == 5 for b in range(11)]
    assert compiled[0][1] == -torch.inf
    assert (compiled[1][1] == 0).all()


@either_way
def test_where_no_tree_is_possible_there_is_none(compiled: bool) -> None:
    scores = made(None)
    scores[0, 2, 2] = -torch.inf
    d = Constituency(scores, LENGTHS, Gini())
    assert d.value[0] == -torch.inf
    assert (d.marginals[0] == 0).all()
    assert d.entropy()[0] == 0
    assert not d.map()[0].any()
    assert not d.sample(2)[:, 0].any()
    assert not d.top(2).paths[0].any()
    assert (d.log_prob(d.sample(2))[:, 0] == -torch.inf).all()
    other = Constituency(made(None), LENGTHS).map()
    assert d.loss(other)[0] == torch.inf
    assert d.bounds().lower[0] == d.bounds().upper[0] == -torch.inf


def test_transformations() -> None:
    scores = made(None, 9)

    def value(s: Tensor) -> Tensor:
        return Constituency(s, LENGTHS, Tsallis(1.5)).value

    marginals, direction = Constituency(scores, LENGTHS, Tsallis(1.5)).marginals, torch.randn_like(scores)
    torch.testing.assert_close(jvp(value, (scores,), (direction,))[1], (marginals * direction).sum((1, 2)))
    torch.testing.assert_close(jacrev(value)(scores).sum(0), marginals)
    several = torch.stack([scores, scores + direction])
    torch.testing.assert_close(vmap(value)(several), torch.stack([value(s) for s in several]))
    torch.testing.assert_close(vmap(grad(lambda s: value(s).sum()))(several)[0], marginals)
    leaf = scores.clone().requires_grad_()
    (first,) = torch.autograd.grad(value(leaf).sum(), leaf, create_graph=True)
    (product,) = torch.autograd.grad(first, leaf, direction)
    curved = hessian(lambda s: value(s).sum())(scores)
    torch.testing.assert_close(product, (curved.flatten(3) @ direction.flatten()).reshape(scores.shape))


def test_any_omega_that_answers() -> None:
    scores = made(2, 10)
    lengths = lengths_of(scores)
    gini = Constituency(scores, lengths, 0.5 * Gini())
    own = Constituency(scores, lengths, 0.5 * Custom(lambda p: (p.square().sum(-1) - 1) / 2))
    torch.testing.assert_close(own.value, gini.value, rtol=0, atol=1e-8)
    torch.testing.assert_close(own.marginals, gini.marginals, rtol=0, atol=1e-6)
    spans = Constituency(scores, lengths, Norm(2.0)).marginals.sum((1, 2, 3))
    torch.testing.assert_close(spans, 2 * lengths.double() - 1)


@either_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes_are_kept(dtype: torch.dtype, compiled: bool) -> None:
    scores = made(None).to(dtype)
    d, exact = Constituency(scores, LENGTHS), Constituency(scores.double(), LENGTHS)
    tolerance = 4 * torch.finfo(dtype).eps
    assert d.value.dtype == d.marginals.dtype == dtype
    torch.testing.assert_close(d.value.double(), exact.value, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(d.marginals.double(), exact.marginals, rtol=tolerance, atol=tolerance)


@either_way
def test_an_empty_batch(compiled: bool) -> None:
    d = Constituency(torch.zeros(0, 4, 4))
    assert d.value.shape == (0,)
    assert d.marginals.shape == d.map().shape == (0, 4, 4)
    assert d.sample(2).shape == (2, 0, 4, 4)


@pytest.mark.filterwarnings("ignore")
def test_the_numbers_are_those_of_torch_struct() -> None:
    package = pytest.importorskip("torch_struct")
    scores = torch.randn(4, 7, 7, 3, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([7, 7, 7, 7])
    field, d = package.TreeCRF(scores, lengths), Constituency(scores, lengths)
    torch.testing.assert_close(d.value, field.partition, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d.marginals, field.marginals, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(d.entropy(), field.entropy, rtol=1e-5, atol=1e-5)
    assert torch.equal(d.map(), field.argmax.bool())


SCORES = torch.zeros(2, 3, 3)
CROSSING = torch.eye(3, dtype=torch.bool).repeat(2, 1, 1)
CROSSING[:, 0, 1] = CROSSING[:, 1, 2] = True


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Constituency(torch.zeros(2, 3, 4)), ValueError, r"scores must have shape \(B, N, N\).*\(2, 3, 4\)"),
        (lambda: Constituency(torch.zeros(3, 3)), ValueError, "scores must have shape"),
        (lambda: Constituency(torch.zeros(2, 3, 3, 0)), ValueError, "scores must have shape"),
        (lambda: Constituency(SCORES.long()), TypeError, "scores must be a floating-point tensor"),
        (lambda: Constituency(SCORES, torch.tensor([3, 0])), ValueError, r"lengths must be in \[1, 3\].*got 0"),
        (lambda: Constituency(SCORES, omega=KSubsets(2)), TypeError, "omega must be over the simplex"),
        (lambda: Constituency(SCORES).loss(CROSSING), ValueError, "target must be a binary tree"),
        (lambda: Constituency(SCORES).loss(SCORES), TypeError, "target must be a boolean"),
        (lambda: Constituency(SCORES).loss(CROSSING[:1]), ValueError, r"target must have shape \(…, 2, 3, 3\)"),
        (lambda: Constituency(SCORES).kl_divergence(LinearChain(SCORES, torch.zeros(3, 3))), TypeError, "other"),
    ],
)
def test_bad_input_is_named(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call()


def test_it_shows_what_it_is() -> None:
    assert repr(Constituency(SCORES)) == "Constituency(2 sentences of up to 3 words, omega=Shannon())"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gamma", [1.0, 0.01])
@either_way
def test_scores_far_apart_have_the_values_of_the_formula(dtype: torch.dtype, gamma: float, compiled: bool) -> None:
    """Gaps of hundreds of nats: powers of such scores do not fit into a number. Two words have one tree per labels."""
    inf = math.inf
    far = torch.tensor([[[-1300.0, -650.0], [650.0, 0.0]], [[0.0, 0.0], [-650.0, -650.0]]])
    root = torch.tensor([[[0.0, 0.0], [-1000.0, -inf]], [[0.0, 0.0], [0.0, -inf]]])
    none = torch.tensor([[[0.0, -500.0], [-inf, -inf]], [[0.0, 0.0], [0.0, -500.0]]])
    for scores in (far, root, none):
        s = scores.to(dtype)[None] * gamma
        d = Constituency(s, omega=gamma * Shannon())
        sums = [torch.logsumexp(scores[i, j].double(), -1) for i, j in ((0, 0), (0, 1), (1, 1))]
        right = gamma * sum(sums)
        torch.testing.assert_close(d.value.double(), right[None], rtol=1e-6, atol=0)
        shares = torch.softmax(scores[0, 1].double(), -1) if right > -inf else torch.zeros(2).double()
        torch.testing.assert_close(d.marginals[0, 0, 1].double(), shares, rtol=1e-6, atol=1e-7)
        if right > -inf:
            best = gamma * sum(float(scores[i, j].max()) for i, j in ((0, 0), (0, 1), (1, 1)))
            torch.testing.assert_close(d.loss(d.map()).double(), right[None] - best, rtol=1e-4, atol=1e-4 * gamma)
    plain = torch.zeros(1, 3, 3, dtype=dtype)
    for (i, j), score in {(0, 0): -270, (1, 1): 200, (2, 2): -200, (0, 1): -195, (1, 2): -270, (0, 2): 720}.items():
        plain[0, i, j] = gamma * score
    value = Constituency(plain, omega=gamma * Shannon()).value
    torch.testing.assert_close(value, torch.full_like(value, 255.0 * gamma), rtol=1e-5, atol=0)


@labelled
@pytest.mark.parametrize("omega", [Shannon(), 0.01 * Shannon(), Gini(), Tsallis(1.5)], ids=repr)
def test_a_sentence_does_not_depend_on_the_others_of_its_batch(labels: int | None, omega: Regularizer) -> None:
    """To the last bit, whatever their lengths, and where the powers of another one's scores are too large."""
    lengths = torch.tensor([6, 3, 12, 1, 7, 2, 9, 4, 5, 11])
    shape = (len(lengths), 12, 12) if labels is None else (len(lengths), 12, 12, labels)
    scores, along = torch.randn(2, *shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    scores[4] *= 1e4
    scores.requires_grad_()

    def results(x: Tensor, direction: Tensor, n: Tensor) -> list[Tensor]:
        d = Constituency(x, n, omega=omega)
        (bend,) = torch.autograd.grad((d.marginals * direction).sum(), x)
        return [d.value, d.marginals, bend]

    together = results(scores, along, lengths)
    for b, n in enumerate(lengths.tolist()):
        part = (slice(b, b + 1), slice(n), slice(n))
        for mine, alone in zip(together, results(scores[part], along[part], lengths[b : b + 1]), strict=True):
            here = mine[b : b + 1] if mine.dim() == 1 else mine[part]
            assert torch.equal(here, alone)
