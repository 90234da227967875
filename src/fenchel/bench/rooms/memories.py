"""Hopfield memories and pooling."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import fenchel
from fenchel.bench.inputs import (
    bounds,
    normal,
)
from fenchel.bench.workload import Case, Contestant, Goal, Workload
from fenchel.hopfield import HopfieldPooling


def workloads() -> list[Workload]:
    """In the order of the report."""
    return [_memory(), _pooling()]


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
