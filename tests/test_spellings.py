"""One Ω in any spelling gives the same answer in every engine that takes one."""

import contextlib
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import fenchel
from fenchel import Capped, Custom, Gini, Hard, KSubsets, LPSparseMAP, Regularizer, Shannon, SparseMAP, Tsallis
from fenchel.continuous import ContinuousAttention, GaussianBasis, LongMemory, MatchedEncoder
from fenchel.dp import Alignment, Constituency, DynamicProgram, Lattice, LinearChain, Monotonic
from fenchel.factors import Xor
from fenchel.hopfield import Hopfield, HopfieldLayer, HopfieldPooling, Memory, capacity, update
from fenchel.seq2seq import Recurrent, Transformer, Vocabulary, sample
from fenchel.streaming import Plan, using
from fenchel.structures import SequentialSubsets, Subsets
from spellings import spellings

N = 6

SPELLINGS = spellings(N)

Answers = dict[str, Tensor]


_tape: list[Tensor] | None = None
"""The inputs that engines draw, which then require gradients; None where no gradients are wanted."""


@contextlib.contextmanager
def taped() -> Iterator[list[Tensor]]:
    global _tape
    _tape = []
    try:
        yield _tape
    finally:
        _tape = None


def normal(*shape: int, seed: int = 0) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if _tape is not None:
        _tape.append(drawn.requires_grad_())
    return drawn


def program(d: DynamicProgram) -> Answers:
    path = d.sample(3, torch.Generator().manual_seed(1))
    return {
        "value": d.value,
        "marginals": d.marginals,
        "map": d.map(),
        "sample": path,
        "log_prob": d.log_prob(path),
        "entropy": d.entropy(),
        "top": d.top(3).probs,
        "loss": d.loss(path[0]),
        "walk": d.walk,
        "lower": d.bounds().lower,
        "upper": d.bounds().upper,
    }


def chain(omega: Regularizer) -> Answers:
    return program(LinearChain(normal(2, 4, 3), normal(3, 3, seed=1), torch.tensor([4, 3]), omega=omega))


def alignment(omega: Regularizer) -> Answers:
    costs = normal(2, 4, 3).square()
    pair = (normal(2, 4, 1), normal(2, 3, 1, seed=1))
    return {
        **program(Alignment(costs, torch.tensor([[4, 3], [3, 3]]), omega=omega)),
        "dtw": fenchel.dp.dtw(*pair, omega=omega),
        "divergence": fenchel.dp.dtw_divergence(*pair, omega=omega),
        "module": fenchel.nn.SoftDTW(0.5, omega=omega)(*pair),
    }


def lattice(omega: Regularizer) -> Answers:
    sources, targets = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([1, 2, 2, 3, 3])
    return program(Lattice(sources, targets, normal(2, 5), 4, omega))


def monotonic(omega: Regularizer) -> Answers:
    d = Monotonic(normal(2, 3, 5), torch.tensor([[3, 5], [2, 4]]), omega)
    return {**program(d), "durations": d.durations()}


def constituency(omega: Regularizer) -> Answers:
    return program(Constituency(normal(2, 4, 4, 2), torch.tensor([4, 3]), omega))


def tagging(omega: Regularizer) -> Answers:
    torch.manual_seed(0)
    crf = fenchel.nn.CRF(3, omega).double()
    scores, tags = normal(2, 4, 3), torch.tensor([[0, 1, 2, 0], [2, 1, -100, 1]])
    mask = torch.tensor([[True, True, True, True], [True, False, True, True]])
    return {
        **program(crf(scores)),
        "partial": crf(scores, mask).loss(tags),
        "decoded": torch.tensor(crf.decode(scores)),
    }


def memory(omega: Regularizer, chunk_size: int | None = None) -> Answers:
    patterns, queries = normal(N, 4), normal(5, 4, seed=1)
    m = Memory(patterns, omega, 0.7, chunk_size)
    found = m.retrieve(queries)
    return {
        "step": m.step(queries),
        "weights": m.weights(queries),
        "state": found.state,
        "steps": found.steps,
        "retrieved": found.weights,
        "energy": m.energy(queries),
    }


def chunked(omega: Regularizer) -> Answers:
    return memory(omega, 4)


def certificate(omega: Regularizer) -> Answers:
    patterns = 2 * normal(N, 4)
    patterns[3] = patterns[1]
    m = Memory(patterns, omega, 2.0)
    each, sets = m.certify(), m.certify(torch.eye(N, dtype=torch.bool))
    bound = capacity(16, 5.0, omega)
    return {
        **{name: getattr(each, name) for name in ("separation", "stationary", "radius", "min_beta")},
        **{f"{name} of sets": getattr(sets, name) for name in ("separation", "stationary", "radius", "min_beta")},
        "capacity": torch.tensor([bound.angle, bound.noise, bound.log_random], dtype=torch.float64),
    }


def attention(omega: Regularizer) -> Answers:
    query, key, value = normal(2, 3, 4), normal(2, N, 4, seed=1), normal(2, N, 5, seed=2)
    mask = torch.ones(3, N, dtype=torch.bool)
    mask[0, 2:] = False
    output, weights = fenchel.attention(query, key, value, omega, attn_mask=mask, return_weights=True)
    sparse = fenchel.attention(query, key, value, omega, return_weights="sparse")[1]
    return {
        "plain": fenchel.attention(query, key, value, omega),
        "masked": output,
        "weights": weights,
        "sparse": sparse.to_dense(),
        "update": update(query, key, value, omega, 2.0),
        "sink": fenchel.attention(query, key, value, omega, sink=torch.tensor(0.5, dtype=torch.float64)),
    }


def long(omega: Regularizer) -> Answers:
    """Attention and a memory that the plan computes by supports, not by a dense matrix."""
    query, key, value = normal(2, 20, 8), normal(2, 300, 8, seed=1), normal(2, 300, 5, seed=2)
    m = Memory(normal(1 << 13, 4), omega, 0.7)
    queries = normal(3, 4, seed=3)
    return {
        "plain": fenchel.attention(query, key, value, omega),
        "causal": fenchel.attention(key, key, value, omega, is_causal=True),
        "step": m.step(queries),
        "energy": m.energy(queries),
    }


def generation(omega: Regularizer) -> Answers:
    scores, generator = normal(4, N), torch.Generator().manual_seed(1)
    return {
        "words": sample(scores, omega, num_samples=20, generator=generator),
        "cooler": sample(scores, omega, temperature=0.5, num_samples=20, generator=generator),
    }


def jagged(omega: Regularizer) -> Answers:
    """Packed rows, and packed sequences for attention: all of one length, which a grid fixes."""
    scores, target = (torch.nested.as_nested_tensor(list(normal(3, N, seed=i)), layout=torch.jagged) for i in (0, 1))
    probabilities = fenchel.sparsemax(target)
    heads = [torch.nested.as_nested_tensor(list(normal(2, N, 3, 4, seed=i)), layout=torch.jagged) for i in range(3)]
    query, key, value = (each.transpose(1, 2) for each in heads)
    return {
        "argmax": omega.argmax(scores).values(),
        "max": omega.max(scores),
        "loss": fenchel.fy_loss(scores, probabilities, omega),
        "attention": fenchel.attention(query, key, value, omega).transpose(1, 2).values(),
    }


def continuous(omega: Regularizer) -> Answers:
    attend = ContinuousAttention(GaussianBasis.line(8), encoder=MatchedEncoder(omega), combined=True).double()
    return {"attended": attend(normal(2, N, 3), normal(2, N, seed=1))}


def loss(omega: Regularizer) -> Answers:
    scores, index = normal(4, N), torch.tensor([0, 5, 2, -100])
    probabilities = fenchel.sparsemax(normal(4, N, seed=1))
    scores.requires_grad_()
    total = fenchel.fy_loss(scores, index, omega)
    return {
        "classes": total,
        "gradient": torch.autograd.grad(total, scores)[0],
        "smoothed": fenchel.fy_loss(scores, index, omega, label_smoothing=0.1),
        "probabilities": fenchel.fy_loss(scores, probabilities, omega),
        "module": fenchel.nn.FenchelYoungLoss(omega)(scores, index),
        "weighted": fenchel.fy_loss(scores, index, omega, weight=torch.arange(1.0, N + 1), reduction="none"),
    }


def layers(omega: Regularizer) -> Answers:
    torch.manual_seed(0)
    own = fenchel.nn.MultiheadAttention(8, 2, batch_first=True, omega=omega, sink=True, dtype=torch.float64)
    hopfield = Hopfield(input_size=8, num_heads=2, omega=omega).double()
    pooling = HopfieldPooling(input_size=8, num_heads=2, omega=omega).double()
    lookup = HopfieldLayer(input_size=8, num_heads=2, quantity=N, omega=omega).double()
    x = normal(2, N, 8)
    output, weights = own(x, x, x)
    return {
        "attention": output,
        "weights": weights,
        "without weights": own(x, x, x, need_weights=False)[0],
        "hopfield": hopfield(x),
        "pooling": pooling(x),
        "lookup": lookup(x),
        "map": fenchel.nn.Argmax(omega)(x[..., :N]),
    }


def model(omega: Regularizer) -> Answers:
    torch.manual_seed(0)
    letters = Vocabulary("abcd")
    assert len(letters) == N
    found = Recurrent(letters, letters, embedding=4, hidden=4, layers=1, attention=omega, output=omega).double().eval()
    smooth = ContinuousAttention(GaussianBasis.line(8), encoder=MatchedEncoder(omega))
    timed = Recurrent(letters, letters, embedding=4, hidden=4, layers=1, attention=smooth, output=omega).double().eval()
    return {
        "loss": found.loss(normal(1, 3, 4), torch.tensor([[0, 2, 1]])),
        "step": found.step(torch.tensor([1]), found.start(["abcdab"]))[0],  # as long as the grid
        "continuous": timed.step(torch.tensor([1]), timed.start(["abcdab"]))[0],
    }


def transformer(omega: Regularizer) -> Answers:
    torch.manual_seed(0)
    letters = Vocabulary("abcd")
    found = Transformer(letters, letters, width=4, num_heads=2, layers=1, attention=omega, output=omega).double().eval()
    return {"step": found.step(torch.tensor([1]), found.start(["abcdab"]))[0]}


def bounded(omega: Regularizer) -> Answers:
    torch.manual_seed(0)
    letters = Vocabulary("abcd")
    found = Recurrent(letters, letters, embedding=4, hidden=4, layers=1, attention=omega, fertility=1.5).double().eval()
    return {
        "step": found.step(torch.tensor([1]), found.start(["abcdab"]))[0],
        "weights": found.attend("abcdab", "abcd"),
    }


def chunks(omega: Regularizer) -> Answers:
    torch.manual_seed(0)
    memory = LongMemory(GaussianBasis.line(8), 4, 2)
    layer = fenchel.nn.LongMemoryAttention(memory, omega=omega).double()
    first = layer(normal(2, N, 4))
    second = layer(normal(2, N, 4, seed=1), first.state)
    return {"first": first.output, "second": second.output, "penalty": second.penalty}


def classifier(omega: Regularizer) -> Answers:
    sklearn = pytest.importorskip("fenchel.integrations.sklearn", exc_type=ImportError)
    features = normal(30, 3).detach().numpy()
    found = sklearn.FenchelYoungClassifier(omega, C=0.1).fit(features, [i % N for i in range(30)])
    return {
        "coefficients": torch.from_numpy(found.coef_),
        "probabilities": torch.from_numpy(found.predict_proba(features)),
        "logarithms": torch.from_numpy(found.predict_log_proba(features)),
    }


ENGINES: list[Callable[[Regularizer], Answers]] = [
    chain,
    alignment,
    lattice,
    monotonic,
    constituency,
    tagging,
    memory,
    chunked,
    certificate,
    attention,
    long,
    generation,
    jagged,
    continuous,
    loss,
    layers,
    model,
    transformer,
    bounded,
    chunks,
    classifier,
]
TABLE = [
    (engine, name)
    for engine in ENGINES
    for name in SPELLINGS
    # A grid has a fixed size; the decoder of a transformer attends to one symbol first.
    if not (name == "grid" and engine in (transformer, long))
]
REFUSED = {"certificate": "margin", "bounded": "with a fertility"}  # what Custom cannot answer


def shown(each: str | Callable[[Regularizer], Answers]) -> str:
    return each if isinstance(each, str) else each.__name__


@pytest.mark.parametrize(("engine", "name"), TABLE, ids=shown)
def test_one_omega_in_any_spelling_has_one_answer(engine: Callable[[Regularizer], Answers], name: str) -> None:
    for gamma in (1.0, 0.5):
        omega, gini = (gamma * each if gamma != 1 else each for each in (SPELLINGS[name], Gini()))
        torch.testing.assert_close(engine(omega), engine(gini), rtol=0, atol=1e-12)


def gradients(engine: Callable[[Regularizer], Answers], omega: Regularizer) -> list[Tensor]:
    """Those of a weighted sum of all answers that have any, in all inputs."""
    with taped() as inputs:
        answers = [each for each in engine(omega).values() if each.requires_grad]
    weights = torch.Generator().manual_seed(5)
    total = torch.zeros((), dtype=torch.float64)
    for each in answers:
        share = torch.randn(each.shape, generator=weights, dtype=torch.float64)
        total = total + (share * torch.where(each.isfinite(), each, 0.0)).sum()
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


# All but those without drawn inputs or gradients, and the loss, whose answers hold its gradient.
@pytest.mark.parametrize(
    ("engine", "name"),
    [row for row in TABLE if row[0] not in (loss, transformer, bounded, classifier, certificate, generation)],
    ids=shown,
)
def test_one_omega_in_any_spelling_has_one_gradient(engine: Callable[[Regularizer], Answers], name: str) -> None:
    expected, found = gradients(engine, 0.5 * Gini()), gradients(engine, 0.5 * SPELLINGS[name])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-11)


OTHERS: list[tuple[Regularizer, Regularizer]] = [
    (Gini(), Tsallis(2)),
    (Gini(), 0.5 * (2.0 * Gini())),
    (Gini(), Capped(2.0, Tsallis(2.0))),
    (Shannon(), Tsallis(1)),
    (Shannon(), Capped(1.0, Shannon())),
    (Shannon(), 2.0 * (0.5 * Tsallis(1.0))),
    (Hard(), Tsallis(math.inf)),
    (Hard(), 1.0 * (1.0 * Hard())),
    (KSubsets(2), SparseMAP(Subsets(2))),
    (KSubsets(2), SparseMAP(SequentialSubsets(2))),
    (KSubsets(2), 0.5 * (2.0 * KSubsets(2.0))),
]


@pytest.mark.parametrize("engine", [chain, memory, chunked, certificate, attention, long, jagged, loss], ids=shown)
@pytest.mark.parametrize(("plain", "spelled"), OTHERS, ids=repr)
def test_any_other_omega_in_two_spellings_has_one_answer_or_one_error(
    engine: Callable[[Regularizer], Answers], plain: Regularizer, spelled: Regularizer
) -> None:
    try:
        expected = engine(0.5 * plain)
    except (TypeError, ValueError) as error:  # a choice of two in a chain, a certificate without a margin
        with pytest.raises(type(error)):
            engine(0.5 * spelled)
    else:
        torch.testing.assert_close(engine(0.5 * spelled), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["dense", "parts", "supports"])
@pytest.mark.parametrize("name", [name for name in SPELLINGS if name != "grid"])
def test_one_omega_in_any_spelling_has_one_answer_by_every_plan(method: str, name: str) -> None:
    with using(Plan(method, rows=8, columns=64)):
        torch.testing.assert_close(long(0.5 * SPELLINGS[name]), long(0.5 * Gini()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", [memory, chunked, continuous], ids=shown)
def test_a_factor_graph_of_one_exclusive_choice_chooses_as_gini_does(
    engine: Callable[[Regularizer], Answers],
) -> None:
    """Its Ω is ½‖p‖², Gini's and a constant: choices agree, and energies differ by a constant."""
    omega = LPSparseMAP(lambda graph, u: graph.add(Xor(u)))
    expected = engine(Gini())
    for name, found in engine(omega).items():
        if name == "energy":
            found = found - found[0] + expected[name][0]
        torch.testing.assert_close(found, expected[name], rtol=0, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("engine", ENGINES, ids=shown)
def test_a_custom_gini_agrees_or_says_what_it_cannot_answer(engine: Callable[[Regularizer], Answers]) -> None:
    omega = Custom(lambda p: (p.square().sum(-1) - 1) / 2)
    if engine.__name__ in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[engine.__name__]):
            engine(omega)
    else:
        torch.testing.assert_close(engine(omega), engine(Gini()), rtol=0, atol=1e-6)
