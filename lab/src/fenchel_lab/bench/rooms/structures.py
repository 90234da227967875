"""SparseMAP and factor graphs, beside one call of their oracles."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import fenchel
from fenchel import factors
from fenchel.structures import DependencyTree, SequentialSubsets, Structure
from fenchel_lab.bench.inputs import SPREADS, normal
from fenchel_lab.bench.workload import Case, Contestant, Goal, Workload


def workloads() -> list[Workload]:
    """In the order of the report."""
    return [_structures(), _factors()]


def _structures() -> Workload:
    one, ours, rows = "one MAP call", "SparseMAP", 256

    def both_ways(s: Tensor, structure: Structure) -> Tensor:
        """The marginals, and their gradient along a fixed direction."""
        s = s.detach().requires_grad_()
        marginals = fenchel.SparseMAP(structure).argmax(s)
        return torch.autograd.grad(marginals, s, torch.linspace(-1, 1, s.numel()).reshape(s.shape))[0]

    def case(label: str, spread: float, structure: Structure, shape: tuple[int, ...]) -> Case:
        def inputs() -> tuple[Tensor]:
            return (spread * normal(rows, *shape),)

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
        [
            Goal(ours, bound, one, "largest", tuple(case.label for case in cases[label]))
            for label, bound in zip(kinds, (25.0, 40.0), strict=True)
        ],
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
        [Case(f"N = {words}, {words} budgets", lambda: (normal(rows, words, words + 1),), backward=False, rows=rows)],
        [],
    )
