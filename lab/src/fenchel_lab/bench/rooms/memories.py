"""Hopfield memories and pooling."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import fenchel
from fenchel.hopfield import HopfieldPooling
from fenchel.structures import SequentialSubsets, Share
from fenchel_lab.bench.inputs import bounds, class_numbers, normal
from fenchel_lab.bench.workload import Case, Contestant, Goal, Workload
from fenchel_lab.models.words import WordEncoder


def workloads() -> list[Workload]:
    """In the order of the report."""
    return [_memory(), _pooling(), _rationalizer()]


def _memory() -> Workload:
    ours, dense = "Memory.step, 1.5-entmax", "two dense products"
    stored, asked, width = 60_000, 1000, 784

    def inputs(sigma: float, known: bool) -> tuple[Tensor, ...]:
        patterns = normal(stored, width, seed=1)
        noise = normal(asked, width)
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
        return normal(bags, most, width), torch.arange(most) >= sizes, *parameters

    def case(bags: int, most: int) -> Case:
        return Case(f"{bags} bags of up to {most}", partial(inputs, bags, most))

    return Workload(
        "pooling",
        f"HopfieldPooling, {heads} heads, width {width}, forward and backward",
        [Contestant(name, partial(pool, layer)) for name, layer in layers.items()],
        [case(32, 16), case(128, 64), case(16, 1024)],
        bounds(["entmax 1.5", "5-subsets"], 1.3, "Shannon", "largest"),
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
        loss = torch.nn.functional.cross_entropy(head(pool(states, padding)), class_numbers(texts, 2))
        parameters = [*encoder.parameters(), *pool.parameters(), *head.parameters()]
        return torch.autograd.grad(loss, parameters)[0]

    models = {}
    for name, omega in omegas.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            encoder = WordEncoder(normal(1000, 50), hidden)
            pool = HopfieldPooling(2 * hidden, omega=omega, normalize_state_pattern=False, disable_out_projection=True)
            models[name] = encoder, pool, torch.nn.Linear(2 * hidden, 2)
    queries = normal(1, 1, 2 * hidden)

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
