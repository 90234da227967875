"""What is measured: inputs, contestants and the goals that they must reach.

A workload is data. Its first contestant is what all are compared with; a case gives the inputs that every contestant is
called with; a goal bounds a ratio, or the memory, of one contestant.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import fenchel
from fenchel import factors
from fenchel.bench import translation
from fenchel.continuous import (
    ContinuousAttention,
    Encoder,
    GaussianBasis,
    MatchedEncoder,
    PooledEncoder,
    expectation,
)
from fenchel.hopfield import HopfieldPooling
from fenchel.nn import WordEncoder
from fenchel.structures import DependencyTree, SequentialSubsets, Share, Structure

SHAPES = [(4096, 64), (2048, 512), (256, 4096), (128, 32000), (32, 128000)]
SPREADS = [1.0, 4.0]
MIDDLE = [(2048, 512), (256, 4096)]
CLASSES = 32000
MEGABYTE = 1e6


@dataclass(frozen=True)
class Contestant:
    """A function of a case's inputs.

    Args:
        name: as tables show it.
        function: called with the inputs; None where it is not to be had.
        missing: then, one line that says so and what to do.
    """

    name: str
    function: Callable[..., Tensor] | None
    missing: str = ""


@dataclass(frozen=True)
class Case:
    """Inputs that contestants are called with.

    Args:
        label: as tables show it.
        inputs: makes them, the same at every call.
        options: keyword arguments, the same for all contestants.
        backward: measure the gradient of every floating-point input too.
        grad: whether gradients are enabled at all.
        small: makes small inputs that warm everything up; with these, peak memory is measured too.
        rows: how many a call works on; tables then show rows a second too.
    """

    label: str
    inputs: Callable[[], tuple[Tensor, ...]]
    options: Mapping[str, Any] = field(default_factory=dict)
    backward: bool = True
    grad: bool = True
    small: Callable[[], tuple[Tensor, ...]] | None = None
    rows: int = 0


Statistic = Literal["geometric mean", "largest", "memory"]


@dataclass(frozen=True)
class Goal:
    """A bound: on a ratio of medians between two contestants, or on bytes of memory.

    Args:
        of: the contestant that must reach it.
        at_most: the bound, a ratio or bytes.
        against: the contestant that it is compared with; none for memory.
        statistic: of the ratios, or of the memory, of all cases.
        cases: the labels of the cases that count; all if not given.
    """

    of: str
    at_most: float
    against: str = ""
    statistic: Statistic = "geometric mean"
    cases: tuple[str, ...] = ()

    def covers(self, case: str) -> bool:
        """Whether a case counts."""
        return not self.cases or case in self.cases

    def reduce(self, values: Sequence[float]) -> float:
        """One number of the values of all cases."""
        return statistics.geometric_mean(values) if self.statistic == "geometric mean" else max(values)


@dataclass(frozen=True)
class Workload:
    """Contestants, what they are given, and what must come out."""

    name: str
    title: str
    contestants: Sequence[Contestant]
    cases: Sequence[Case]
    goals: Sequence[Goal]

    @property
    def present(self) -> list[Contestant]:
        """The contestants that can be run."""
        return [each for each in self.contestants if each.function is not None]

    def case(self, label: str) -> Case:
        """The case with a label."""
        return next(each for each in self.cases if each.label == label)

    def contestant(self, name: str) -> Contestant:
        """The contestant of a name."""
        return next(each for each in self.contestants if each.name == name)


class UnknownWorkloadError(LookupError):
    """No workload has the name that was asked for."""


def find(names: Iterable[str] = ()) -> list[Workload]:
    """The workloads called so, in the order asked for; all if none is named."""
    known = {each.name: each for each in workloads()}
    asked = list(dict.fromkeys(names)) or list(known)
    for name in asked:
        if name not in known:
            close = difflib.get_close_matches(name, known)
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            raise UnknownWorkloadError(f"There is no workload called {name!r}.{hint} Workloads: {', '.join(known)}.")
    return [known[name] for name in asked]


def workloads() -> list[Workload]:
    """Every workload, in the order of the report."""
    return [
        _maps(),
        _entmax(),
        _normmax(),
        _bounded(),
        _grouped(),
        _custom(),
        _small(),
        _loss(),
        _linear(),
        _attention(),
        _memory(),
        _pooling(),
        _rationalizer(),
        _structures(),
        _factors(),
        _chain(),
        _growth(),
        _decode(),
        _alignment(),
        _continuous(),
        _plane(),
        _translation(),
        _decoding(),
    ]


# -- maps ------------------------------------------------------------------------------------------------------------

_SOFTMAX = Contestant("torch.softmax", lambda s: torch.softmax(s, -1))
_SPARSEMAX = Contestant("sparsemax", fenchel.sparsemax)
_ENTMAX15 = Contestant("entmax 1.5", fenchel.entmax)


def _maps() -> Workload:
    return Workload(
        "maps",
        "sparsemax and entmax 1.5, forward and backward",
        [_SOFTMAX, _SPARSEMAX, _ENTMAX15, _peer("sparsemax"), _peer("entmax15")],
        _rows(),
        [
            *_bounds(["sparsemax", "entmax 1.5"], 1.0, "torch.softmax"),
            *_bounds(["sparsemax", "entmax 1.5"], 2.0, "torch.softmax", "largest"),
            Goal("sparsemax", 1 / 30, "entmax.sparsemax"),
            Goal("entmax 1.5", 1 / 30, "entmax.entmax15"),
        ],
    )


def _entmax() -> Workload:
    alphas = (1.33, 1.75)
    ours = [Contestant(f"entmax {a:g}", lambda s, a=a: fenchel.entmax(s, a)) for a in alphas]
    peers = [_peer("entmax_bisect", lambda f, s, a=a: f(s, a), f" {a:g}") for a in alphas]
    return Workload(
        "entmax",
        "entmax with any alpha, forward and backward",
        [_SOFTMAX, *ours, *peers],
        _rows(),
        [
            *_bounds([f"entmax {a:g}" for a in alphas], 2.5, "torch.softmax"),
            *(Goal(f"entmax {a:g}", 1 / 80, f"entmax.entmax_bisect {a:g}") for a in alphas),
        ],
    )


def _normmax() -> Workload:
    ours = [Contestant(f"normmax {a:g}", lambda s, a=a: fenchel.normmax(s, a)) for a in (2.0, 5.0)]
    return Workload(
        "normmax",
        "normmax, forward and backward",
        [_SOFTMAX, *ours],
        _rows(),
        _bounds([each.name for each in ours], 4.0, "torch.softmax"),
    )


def _bounded() -> Workload:
    def capped(s: Tensor) -> Tensor:
        return fenchel.constrained_sparsemax(s, 4.0 / s.shape[-1])

    names = ["constrained_sparsemax", "k_subsets 5"]
    return Workload(
        "bounded",
        "bounds and budgets, forward and backward",
        [
            _SOFTMAX,
            Contestant(names[0], capped),
            Contestant(names[1], lambda s: fenchel.k_subsets(s, 5)),
            _peer("budget_bisect", lambda f, s: f(s, budget=5)),
        ],
        _rows(MIDDLE, [1.0]),
        [*_bounds(names, 3.0, "torch.softmax", "largest"), Goal(names[1], 1 / 10, "entmax.budget_bisect")],
    )


def _grouped() -> Workload:
    return Workload(
        "grouped",
        "groups, forward and backward",
        [
            _SOFTMAX,
            Contestant("fusedmax 0.1", fenchel.fusedmax),
            Contestant("oscarmax 0.1", fenchel.oscarmax),
            Contestant("oscarmax 0.001", lambda s: fenchel.oscarmax(s, 0.001)),
        ],
        _rows(MIDDLE, [1.0]),
        [
            *_bounds(["fusedmax 0.1"], 6.0, "torch.softmax", "largest"),
            *_bounds(["oscarmax 0.1", "oscarmax 0.001"], 12.0, "torch.softmax", "largest"),
        ],
    )


def _custom() -> Workload:
    omega = fenchel.Custom(lambda p: 0.5 * (p * p).sum(-1))
    return Workload(
        "custom",
        "an Ω of one's own, ½‖p‖², forward and backward",
        [_SPARSEMAX, Contestant("Custom", omega.argmax)],
        _rows([(256, 64)], [1.0]),
        _bounds(["Custom"], 100.0, "sparsemax"),
    )


def _small() -> Workload:
    row = partial(_scores, 1, 64, 1.0)
    return Workload(
        "small",
        "one row of 64 scores, forward only",
        [_SOFTMAX, _SPARSEMAX, _ENTMAX15],
        [Case("under no_grad", row, backward=False, grad=False), Case("plain tensors", row, backward=False)],
        _bounds(["sparsemax", "entmax 1.5"], 6.0, "torch.softmax", "largest"),
    )


# -- losses ----------------------------------------------------------------------------------------------------------


def _loss() -> Workload:
    return Workload(
        "loss",
        f"losses of 128 rows of {CLASSES} classes, forward and backward",
        [
            Contestant("cross_entropy", F.cross_entropy),
            Contestant("entmax_loss 1.5", fenchel.entmax_loss),
            Contestant("sparsemax_loss", fenchel.sparsemax_loss),
            _peer("entmax15_loss", lambda f, s, y: f(s, y).mean()),
            _peer("sparsemax_loss", lambda f, s, y: f(s, y).mean()),
        ],
        [Case(f"σ = {sigma:g}", partial(_scores, 128, CLASSES, sigma, _classes(128, CLASSES))) for sigma in SPREADS],
        _bounds(["entmax_loss 1.5", "sparsemax_loss"], 1.0, "cross_entropy", "largest"),
    )


def _linear() -> Workload:
    tokens, width = 512, 512
    ours, torchs = "linear_entmax_loss 1.5", "linear + cross_entropy"
    peaked, flat = "peaked, σ = 3.4", "flat, σ = 0.1"

    def inputs(tokens: int, classes: int, sigma: float) -> tuple[Tensor, ...]:
        # A product of `width` independent terms: this weight gives logits of standard deviation sigma.
        weight = _normal(classes, width, seed=1, sigma=sigma / width**0.5)
        return _normal(tokens, width), weight, _classes(tokens, classes)

    def case(label: str, sigma: float) -> Case:
        return Case(label, lambda: inputs(tokens, CLASSES, sigma), small=lambda: inputs(64, 2000, sigma))

    return Workload(
        "linear",
        f"an output layer and its loss: {tokens} tokens × {width} × {CLASSES} classes, forward and backward",
        [
            Contestant(torchs, lambda h, w, y: F.cross_entropy(F.linear(h, w), y)),
            Contestant(ours, fenchel.linear_entmax_loss),
        ],
        [case(peaked, 3.4), case(flat, 0.1)],
        [
            Goal(ours, 0.6, torchs, "largest", (peaked,)),
            Goal(ours, 1.2, torchs, "largest", (flat,)),
            Goal(ours, tokens * CLASSES * 4 / 8, statistic="memory"),  # an eighth of the logits
        ],
    )


# -- attention -------------------------------------------------------------------------------------------------------


def _attention() -> Workload:
    ours, torchs = "attention 1.5", "torch SDPA"
    long = "1 × 16384 × 64"
    decoding = "decoding: 8 × 1 query, 32768 keys × 64"

    def heads(heads: int, keys: int, queries: int | None = None, scale: float = 1.0) -> tuple[Tensor, ...]:
        query = _normal(1, heads, queries or keys, 64, sigma=scale)
        return query, _normal(1, heads, keys, 64, seed=1), _normal(1, heads, keys, 64, seed=2)

    def case(label: str, scale: float, causal: bool) -> Case:
        return Case(label, lambda: heads(4, 4096, scale=scale), {"is_causal": causal})

    cases = [
        case("4 × 4096 × 64", 1.0, False),
        case("queries × 3", 3.0, False),
        case("causal", 1.0, True),
        case("causal, queries × 3", 3.0, True),
        Case(long, lambda: heads(1, 16384), small=lambda: heads(1, 512)),
        Case(decoding, lambda: heads(8, 32768, 1), backward=False, grad=False),
    ]
    bounds = dict(zip((each.label for each in cases), (0.45, 0.35, 0.45, 0.35, 0.45, 0.65), strict=True))
    return Workload(
        "attention",
        "attention, heads × length × width, forward and backward; decoding forward only",
        [Contestant(torchs, F.scaled_dot_product_attention), Contestant(ours, fenchel.attention)],
        cases,
        [
            *(Goal(ours, bound, torchs, "largest", (label,)) for label, bound in bounds.items()),
            Goal(ours, 300 * MEGABYTE, statistic="memory", cases=(long,)),
        ],
    )


# -- memories --------------------------------------------------------------------------------------------------------


def _memory() -> Workload:
    ours, dense = "Memory.step, 1.5-entmax", "two dense products"
    stored, asked, width = 60_000, 1000, 784

    def inputs(sigma: float, known: bool) -> tuple[Tensor, ...]:
        patterns = _normal(stored, width, seed=1)
        noise = _normal(asked, width)
        # Unit noise gives scores of standard deviation sigma beside that of the pattern itself.
        return (patterns[:asked] + noise if known else noise) * (sigma / width**0.5), patterns

    memory: fenchel.hopfield.Memory | None = None

    def step(q: Tensor, x: Tensor) -> Tensor:
        nonlocal memory
        if memory is None or memory.patterns is not x:  # built once: patterns are stored before they are asked for
            memory = fenchel.hopfield.Memory(x)
        return memory.step(q)

    def case(label: str, sigma: float, known: bool) -> Case:
        return Case(label, lambda: inputs(sigma, known), backward=False, grad=False)

    return Workload(
        "memory",
        f"one step of a memory of {stored} × {width} patterns, {asked} queries",
        [
            Contestant(dense, lambda q, x: (q @ x.T) @ x),
            Contestant(ours, step),
        ],
        [
            case("patterns and noise, σ = 3", 3.0, True),
            case("noise alone, σ = 3", 3.0, False),
            case("noise alone, σ = 1", 1.0, False),
        ],
        [Goal(ours, 1.15, dense, "largest")],
    )


def _pooling() -> Workload:
    """The parameters are inputs, so that their gradients are measured too."""
    width, heads = 128, 8
    omegas = {"Shannon": fenchel.Shannon(), "entmax 1.5": fenchel.Tsallis(1.5), "5-subsets": fenchel.KSubsets(5)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = {name: HopfieldPooling(width, num_heads=heads, omega=omega) for name, omega in omegas.items()}

    def pool(layer: HopfieldPooling, instances: Tensor, absent: Tensor, *parameters: Tensor) -> Tensor:
        given = {name: value for (name, _), value in zip(layer.named_parameters(), parameters, strict=True)}
        pooled: Tensor = torch.func.functional_call(layer, given, (instances, absent))
        return pooled

    def inputs(bags: int, most: int) -> tuple[Tensor, ...]:
        sizes = torch.linspace(1, most, bags).long().unsqueeze(1)
        parameters = (each.detach().clone() for each in layers["Shannon"].parameters())
        return _normal(bags, most, width), torch.arange(most) >= sizes, *parameters

    def case(bags: int, most: int) -> Case:
        return Case(f"{bags} bags of up to {most}", partial(inputs, bags, most))

    return Workload(
        "pooling",
        f"HopfieldPooling, {heads} heads, width {width}, forward and backward",
        [Contestant(name, partial(pool, layer)) for name, layer in layers.items()],
        [case(32, 16), case(128, 64), case(16, 1024)],
        _bounds(["entmax 1.5", "5-subsets"], 1.3, "Shannon", "largest"),
    )


def _rationalizer() -> Workload:
    """Gradients of all parameters: a training step but for the optimizer, which is the same for both."""
    texts, length, hidden, share, gamma = 16, 300, 100, 0.2, 0.1
    lengths = torch.full((texts,), length)
    padding = torch.zeros(texts, length, dtype=torch.bool)
    omegas: dict[str, fenchel.Regularizer] = {
        "softmax": fenchel.Shannon(),
        "sequential k-subsets": gamma * fenchel.SparseMAP(SequentialSubsets(Share(share), 0.3 / gamma)),
    }

    def step(name: str, words: Tensor, scale: float) -> Tensor:
        """From the words to the gradient; the query's scale decides how clear the choice is."""
        encoder, pool, head = models[name]
        states = encoder(words, lengths)
        with torch.no_grad():
            pool.pooling_weights.copy_(scale * queries)
        loss = torch.nn.functional.cross_entropy(head(pool(states, padding)), _classes(texts, 2))
        parameters = [*encoder.parameters(), *pool.parameters(), *head.parameters()]
        return torch.autograd.grad(loss, parameters)[0]

    models = {}
    for name, omega in omegas.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            encoder = WordEncoder(_normal(1000, 50), hidden)
            pool = HopfieldPooling(2 * hidden, omega=omega, normalize_state_pattern=False, disable_out_projection=True)
            models[name] = encoder, pool, torch.nn.Linear(2 * hidden, 2)
    queries = _normal(1, 1, 2 * hidden)

    def inputs() -> tuple[Tensor]:
        return (torch.randint(1000, (texts, length), generator=torch.Generator().manual_seed(0)),)

    ours, twin = "sequential k-subsets", "softmax"
    return Workload(
        "rationalizer",
        f"a rationalizer's training step, {texts} × {length} words, {share:.0%} selected, LSTM of 2 × {hidden}",
        [Contestant(twin, partial(step, twin)), Contestant(ours, partial(step, ours))],
        [
            Case(label, inputs, {"scale": scale}, backward=False, rows=texts)
            for label, scale in (("at the start", 0.02), ("half-way", 1.0), ("clear choices", 10.0))
        ],
        [Goal(ours, 4.0, twin, "largest")],
    )


# -- structures ------------------------------------------------------------------------------------------------------


def _structures() -> Workload:
    one, ours, rows = "one MAP call", "SparseMAP", 256

    def both_ways(s: Tensor, structure: Structure) -> Tensor:
        """The marginals, and their gradient along a fixed direction."""
        s = s.detach().requires_grad_()
        marginals = fenchel.SparseMAP(structure).argmax(s)
        return torch.autograd.grad(marginals, s, torch.linspace(-1, 1, s.numel()).reshape(s.shape))[0]

    def case(label: str, spread: float, structure: Structure, shape: tuple[int, ...]) -> Case:
        def inputs() -> tuple[Tensor]:
            return (spread * _normal(rows, *shape),)

        return Case(f"{label}, σ = {spread:g}", inputs, {"structure": structure}, backward=False, rows=rows)

    kinds: dict[str, tuple[Structure, tuple[int, ...]]] = {
        "SequentialSubsets, N = 100, k = 10": (SequentialSubsets(10, 0.5), (100,)),
        "DependencyTree, N = 20": (DependencyTree(), (20, 21)),
    }
    cases = {label: [case(label, spread, *kind) for spread in SPREADS] for label, kind in kinds.items()}
    return Workload(
        "structures",
        f"SparseMAP of {rows} rows, forward and backward",
        [Contestant(one, lambda s, structure: structure.map(s)), Contestant(ours, both_ways)],
        [case for group in cases.values() for case in group],
        [Goal(ours, 25.0, one, "largest", tuple(case.label for case in group)) for group in cases.values()],
    )


def _factors() -> Workload:
    rows, words, budget = 16, 20, 3

    def both_ways(s: Tensor, budgets: bool) -> Tensor:
        """Trees, with a budget for each head or none: marginals, and their gradient along a fixed direction."""
        s = s.detach().requires_grad_()
        graph = fenchel.FactorGraph()
        u = graph.variables(s, batch_dims=1)
        graph.add(factors.DependencyTree(u))
        for head in range(1, words + 1) if budgets else ():
            graph.add(factors.Budget(u[:, head], budget))
        graph.solve()
        return torch.autograd.grad(u.value, s, torch.linspace(-1, 1, s.numel()).reshape(s.shape))[0]

    return Workload(
        "factors",
        f"LP-SparseMAP of {rows} trees with budgets, forward and backward",
        [Contestant(name, partial(both_ways, budgets=name == "budgets")) for name in ("trees alone", "budgets")],
        [Case(f"N = {words}, {words} budgets", lambda: (_normal(rows, words, words + 1),), backward=False, rows=rows)],
        [],
    )


# -- dynamic programs ------------------------------------------------------------------------------------------------

CHAINS, STEPS, STATES = 64, 50, 20


def _chain() -> Workload:
    def torchcrf(package: Any, unary: Tensor, transition: Tensor, target: Tensor) -> Tensor:
        total: Tensor = _field(package, transition)(unary, target, reduction="sum")
        return -total

    def torch_struct(package: Any, unary: Tensor, transition: Tensor, target: Tensor) -> Tensor:
        # The first state's scores go with the first step; potentials are [current, previous]. The partition alone.
        edges = unary[:, 1:, :, None] + transition.t()
        edges = torch.cat([edges[:, :1] + unary[:, :1, None], edges[:, 1:]], 1)
        total: Tensor = package.LinearChainCRF(edges).partition.sum()
        return total

    ours, sparse = "LinearChain, Shannon", "LinearChain, Gini"
    return Workload(
        "chain",
        "losses of chains × steps × states, forward and backward",
        [
            Contestant(ours, partial(_field_loss, omega=fenchel.Shannon())),
            Contestant(sparse, partial(_field_loss, omega=fenchel.Gini())),
            _other("torchcrf", "pytorch-crf", torchcrf),
            _other("torch_struct", "torch-struct", torch_struct),
        ],
        [Case(f"{CHAINS} × {STEPS} × {STATES}", partial(_tags, CHAINS, STEPS))],
        [
            Goal(ours, 1 / 5, "pytorch-crf", "largest"),
            Goal(ours, 1 / 50, "torch-struct", "largest"),
            Goal(sparse, 2.5, ours, "largest"),
        ],
    )


def _growth() -> Workload:
    """Four times the work at once, as more chains or as longer ones, beside four calls: cost is linear in both."""

    def apart(unary: Tensor, transition: Tensor, target: Tensor, omega: fenchel.Regularizer) -> Tensor:
        parts = zip(unary.chunk(4), target.chunk(4), strict=True)
        return torch.stack([_field_loss(u, transition, t, omega) for u, t in parts]).sum()

    def longer(unary: Tensor, transition: Tensor, target: Tensor, omega: fenchel.Regularizer) -> Tensor:
        unary, target = unary.reshape(CHAINS, 4 * STEPS, STATES), target.reshape(CHAINS, -1)
        return _field_loss(unary, transition, target, omega)

    four, many, long = "four calls", "four times the chains", "four times the steps"
    return Workload(
        "growth",
        f"losses of 4 × {CHAINS} chains × {STEPS} steps × {STATES} states, forward and backward",
        [Contestant(name, call) for name, call in ((four, apart), (many, _field_loss), (long, longer))],
        [
            Case(str(omega), lambda: _tags(4 * CHAINS, STEPS), {"omega": omega})
            for omega in (fenchel.Shannon(), fenchel.Gini())
        ],
        _bounds([many, long], 1.25, four, "largest"),
    )


def _decode() -> Workload:
    def torchcrf(package: Any, unary: Tensor, transition: Tensor) -> Tensor:
        _field(package, transition).decode(unary)  # a list of lists
        return unary

    return Workload(
        "decode",
        f"the best path of {CHAINS} chains × {STEPS} steps × {STATES} states",
        [
            Contestant("LinearChain.map", lambda u, w: fenchel.dp.LinearChain(u, w).map()),
            _other("torchcrf", "pytorch-crf", torchcrf),
        ],
        [Case("under no_grad", lambda: _tags(CHAINS, STEPS)[:2], backward=False, grad=False)],
        [Goal("LinearChain.map", 1 / 5, "pytorch-crf", "largest")],
    )


def _alignment() -> Workload:
    def series() -> tuple[Tensor, ...]:
        return _normal(16, 128, 3), _normal(16, 128, 3, seed=1)

    def tslearn(package: Any, x: Tensor, y: Tensor) -> Tensor:
        total: Tensor = package.SoftDTWLossPyTorch(gamma=1.0)(x, y).sum()
        return total

    def pysdtw(package: Any, x: Tensor, y: Tensor) -> Tensor:
        total: Tensor = package.SoftDTW(gamma=1.0, use_cuda=False)(x, y).sum()
        return total

    ours, sparse = "dtw, Shannon", "dtw, Gini"
    return Workload(
        "alignment",
        "soft-DTW of pairs of series, forward and backward",
        [
            Contestant(ours, lambda x, y: fenchel.dp.dtw(x, y).sum()),
            Contestant(sparse, lambda x, y: fenchel.dp.dtw(x, y, omega=fenchel.Gini()).sum()),
            _other("tslearn.metrics", "tslearn", tslearn),
            _other("pysdtw", "pysdtw", pysdtw),
        ],
        [Case("16 × 128 × 128, 3-d", series)],
        [
            Goal(ours, 1 / 4, "tslearn", "largest"),
            Goal(ours, 1 / 4, "pysdtw", "largest"),
            Goal(sparse, 2.5, ours, "largest"),
        ],
    )


def _field_loss(unary: Tensor, transition: Tensor, target: Tensor, omega: fenchel.Regularizer) -> Tensor:
    return fenchel.dp.LinearChain(unary, transition, omega=omega).loss(target).sum()


def _field(package: Any, transition: Tensor) -> Any:
    """A conditional random field of pytorch-crf with these scores of steps, and none of ends."""
    field = package.CRF(transition.shape[0], batch_first=True)
    del field.transitions
    field.transitions = transition
    for name in ("start_transitions", "end_transitions"):
        torch.nn.init.zeros_(getattr(field, name)).requires_grad_(False)
    return field


def _tags(chains: int, steps: int) -> tuple[Tensor, ...]:
    target = torch.randint(STATES, (chains, steps), generator=torch.Generator().manual_seed(3))
    return _normal(chains, steps, STATES), _normal(STATES, STATES, seed=1), target


# -- continuous attention --------------------------------------------------------------------------------------------

DOCUMENTS, WORDS, FUNCTIONS = 256, 512, 128


def _continuous() -> Workload:
    """A query of the length of the document: scores of its words, or a vector that tells where to look."""
    basis = GaussianBasis.line(FUNCTIONS, widths=(0.1, 0.5))
    discrete, ours = "softmax attention", "ContinuousAttention"

    def softmax(query: Tensor, values: Tensor) -> Tensor:
        return (torch.softmax(query, -1).unsqueeze(-2) @ values).squeeze(-2)

    def contestant(name: str, alpha: float, encoder: Encoder) -> Contestant:
        attention = ContinuousAttention(basis, alpha, encoder)
        return Contestant(name, lambda query, values: attention(values, query))

    pooled = [contestant(f"{ours} {alpha:g}", alpha, _still(PooledEncoder(WORDS))) for alpha in (1.0, 1.5, 2.0)]
    return Workload(
        "continuous",
        f"attention over {DOCUMENTS} documents of {WORDS} words × 64 by {FUNCTIONS} functions, forward and backward",
        [Contestant(discrete, softmax), *pooled, contestant("by moments of softmax, 2", 2.0, MatchedEncoder())],
        [
            Case(
                f"{DOCUMENTS} × {WORDS} × 64",
                lambda: (_normal(DOCUMENTS, WORDS), _normal(DOCUMENTS, WORDS, 64, seed=1)),
            )
        ],
        _bounds([each.name for each in pooled], 2.0, discrete, "largest"),
    )


def _still(encoder: Encoder) -> Encoder:
    """The same numbers at every call, and no gradients but those of the inputs."""
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(4))
    return encoder.requires_grad_(False)


def _plane() -> Workload:
    """Expected basis functions alone, on images as the paper has them: ellipses of all sizes over a grid of 10 × 10."""
    basis = GaussianBasis.grid(10, widths=(0.001**0.5,))

    def contestant(alpha: float) -> Contestant:
        def call(loc: Tensor, root: Tensor) -> Tensor:
            sigma = root @ root.mT + 0.002 * torch.eye(2, device=root.device)
            # Shapes are asked for on the meta device, where the basis must be too.
            here = basis if loc.is_cpu else copy.deepcopy(basis).to(loc.device)
            return expectation(loc, sigma, here, alpha)

        return Contestant(f"expectation {alpha:g}", call)

    return Workload(
        "plane",
        f"expected basis functions of {DOCUMENTS} densities of the plane, {len(basis)} functions, forward and backward",
        [contestant(1.0), contestant(1.5), contestant(2.0)],
        [
            Case(
                f"{DOCUMENTS} × {len(basis)}",
                lambda: (0.5 + 0.25 * _normal(DOCUMENTS, 2), _normal(DOCUMENTS, 2, 2, sigma=0.1, seed=1)),
            )
        ],
        [Goal("expectation 2", 10.0, "expectation 1", "largest")],
    )


# -- sequence to sequence --------------------------------------------------------------------------------------------


def _translation() -> Workload:
    size = f"{translation.SENTENCES} sentences × {translation.LENGTH} words, width {translation.WIDTH}"
    return Workload(
        "translation",
        f"a step of training a translation model of {translation.WORDS:,} words, attention and output, after "
        f"{translation.WARM} steps",
        [Contestant("softmax", translation.training(1.0)), Contestant("entmax 1.5", translation.training(1.5))],
        [Case(size, translation.inputs, backward=False)],
        [Goal("entmax 1.5", 1.0, "softmax", "largest")],
    )


def _decoding() -> Workload:
    size = f"{translation.DECODED} sentences, {translation.LONGEST} words each"
    return Workload(
        "decoding",
        f"beam search of 5 with that model, {translation.WORDS:,} words",
        [Contestant("softmax", translation.decoding(1.0)), Contestant("entmax 1.5", translation.decoding(1.5))],
        [Case(size, translation.inputs, backward=False, grad=False)],
        [Goal("entmax 1.5", 1.0, "softmax", "largest")],
    )


# -- what they are made of -------------------------------------------------------------------------------------------


def _rows(shapes: Sequence[tuple[int, int]] = SHAPES, spreads: Sequence[float] = SPREADS) -> list[Case]:
    return [
        Case(f"{rows} × {width}, σ = {sigma:g}", partial(_scores, rows, width, sigma))
        for (rows, width), sigma in itertools.product(shapes, spreads)
    ]


def _bounds(names: Iterable[str], at_most: float, against: str, statistic: Statistic = "geometric mean") -> list[Goal]:
    return [Goal(name, at_most, against, statistic) for name in names]


def _peer(name: str, call: Callable[..., Tensor] | None = None, suffix: str = "") -> Contestant:
    """A function of the entmax package; ``call(function, *inputs)`` if its arguments are not ours."""
    label = f"entmax.{name}{suffix}"
    try:
        function = getattr(importlib.import_module("entmax"), name)
    except ModuleNotFoundError:
        return Contestant(label, None, "entmax is not installed and left out: pip install 'fenchel[bench]' to compare")
    return Contestant(label, function if call is None else lambda *inputs: call(function, *inputs))


def _other(module: str, label: str, call: Callable[..., Tensor]) -> Contestant:
    """A peer of another name than its module; ``call(module, *inputs)``."""
    try:
        package = importlib.import_module(module)
    except ModuleNotFoundError:
        return Contestant(
            label, None, f"{label} is not installed and left out: pip install 'fenchel[bench]' to compare"
        )
    return Contestant(label, partial(call, package))


def _scores(rows: int, width: int, sigma: float, *others: Tensor) -> tuple[Tensor, ...]:
    return _normal(rows, width, sigma=sigma), *others


def _normal(*shape: int, sigma: float = 1.0, seed: int = 0) -> Tensor:
    # In place: a copy would raise the peak of memory before anything is measured.
    return torch.empty(shape).normal_(0.0, sigma, generator=torch.Generator().manual_seed(seed))


def _classes(rows: int, classes: int) -> Tensor:
    return torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(3))
