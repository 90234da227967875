"""Chains and sequential subsets that are searched as paths through a graph: only the way to the answer changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from certificates import best_subset, check_certified, check_chain, normal

from fenchel import SparseMAP
from fenchel.structures import Chain, SequentialSubsets, Share


class HastyChain(Chain):
    """Searched as paths from the second structure on."""

    patience = 1


class HastySubsets(SequentialSubsets):
    """Searched as paths from the second structure on."""

    patience = 1


@pytest.mark.parametrize("spread", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("size", [1e-8, 1e-3, 1.0])
@pytest.mark.parametrize(("steps", "states"), [(2, 2), (9, 3), (6, 6), (25, 4)])
def test_chains_of_every_size(steps: int, states: int, size: float, spread: float) -> None:
    transition, scores = size * normal(states, states, seed=steps), spread * normal(2, steps, states, seed=states)
    check_chain(scores, transition, SparseMAP(HastyChain(transition)))


@pytest.mark.parametrize("size", [1e-7, 0.01, 0.3])
@pytest.mark.parametrize("kind", ["same state", "other state", "integers", "constant", "by step", "forbidden"])
def test_transitions_that_tie(kind: str, size: float) -> None:
    steps, states = 25, 4
    transition = {
        "same state": torch.eye(states),
        "other state": -torch.eye(states),
        "integers": (2 * normal(states, states)).round(),
        "constant": torch.ones(states, states),
        "by step": normal(steps - 1, states, states).round(decimals=1),
        "forbidden": torch.where(torch.eye(states) > 0, -torch.inf, 1.0),
    }[kind].double() * size
    scores = 0.1 * normal(3, steps, states, seed=1)
    scores[1] = (10 * scores[1]).round() / 10
    scores[2] = 0.0
    check_chain(scores, transition, SparseMAP(HastyChain(transition)))


@pytest.mark.parametrize("transition", [1e-8, 1e-4, -1e-4, 0.1, "tensor", "forbidden"])
@pytest.mark.parametrize("spread", [0.01, 1.0])
@pytest.mark.parametrize("k", [1, 8, 22])
def test_subsets_of_every_size(k: int, spread: float, transition: float | str) -> None:
    n = 24
    scores = spread * normal(2, n, seed=k)
    if isinstance(transition, str):
        links = 1e-3 * normal(n - 1, seed=3)
        links[::5] = -torch.inf if transition == "forbidden" and k < 20 else 0.0
    else:
        links = torch.full((n - 1,), transition, dtype=torch.float64)
    t = links.numpy()
    check_certified(
        SparseMAP(HastySubsets(k, links if isinstance(transition, str) else transition)),
        scores,
        lambda left: best_subset(left, t, k),
        lambda y: float(t[(y[:-1] * y[1:]) > 0].sum()),
    )


@pytest.mark.parametrize("seed", range(6))
def test_masks_padding_and_transitions_of_rows_give_the_same(seed: int) -> None:
    torch.manual_seed(seed)
    steps, states, rows = 1 + 2 * seed, 3, 4
    scores, transition = normal(rows, steps, states, seed=seed), 0.01 * normal(rows, max(steps - 1, 1), states, states)
    mask = torch.rand(rows, steps, states) < 0.7
    mask[..., 0] = True
    mask &= (torch.arange(steps) < torch.randint(1, steps + 1, (rows, 1)))[..., None]
    hasty, patient = (SparseMAP(kind(transition)).argmax(scores, mask=mask) for kind in (HastyChain, Chain))
    torch.testing.assert_close(hasty, patient, rtol=0, atol=1e-10)
    scores, links, mask = normal(rows, 12, seed=seed), 0.01 * normal(rows, 11), torch.rand(rows, 12) < 0.7
    hasty, patient = (
        SparseMAP(kind(Share(0.4), links)).argmax(scores, mask=mask) for kind in (HastySubsets, SequentialSubsets)
    )
    torch.testing.assert_close(hasty, patient, rtol=0, atol=1e-10)


def test_few_calls_of_the_oracle() -> None:
    transition, scores = 1e-6 * normal(4, 4), normal(4, 50, 4, seed=1)
    assert SparseMAP(Chain(transition)).solve(scores).iterations.max() < 300
    assert SparseMAP(SequentialSubsets(15, 1e-6)).solve(0.1 * normal(2, 50, seed=1)).iterations.max() < 600


def test_gradients_are_those_of_patient_searches() -> None:
    transition, scores, g = 0.1 * normal(4, 4), normal(3, 12, 4, seed=1), normal(3, 12, 4, seed=2)

    def slopes(kind: type[Chain]) -> list[torch.Tensor]:
        s, t = scores.clone().requires_grad_(), transition.clone().requires_grad_()
        return list(torch.autograd.grad((SparseMAP(kind(t)).argmax(s) * g).sum(), (s, t)))

    for hasty, patient in zip(slopes(HastyChain), slopes(Chain), strict=True):
        torch.testing.assert_close(hasty, patient, rtol=0, atol=1e-9)


def test_graphs_that_are_too_large_are_searched_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    transition, scores = 0.1 * normal(3, 3), normal(2, 8, 3, seed=1)
    wanted = SparseMAP(Chain(transition)).argmax(scores)
    structure = HastyChain(transition)
    structure.largest_graph = 1
    monkeypatch.setattr("fenchel.kernels.cpu.structures.layers.anneal", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(SparseMAP(structure).argmax(scores), wanted, rtol=0, atol=1e-12)


def test_interpreted_loops_find_the_same(set_kernels: Callable[[bool], None]) -> None:
    transition, scores = 1e-3 * normal(2, 2), 0.1 * normal(1, 5, 2, seed=1)
    links, flat = 1e-3 * normal(5), 0.1 * normal(1, 6, seed=1)
    omegas = (SparseMAP(HastyChain(transition)), scores), (SparseMAP(HastySubsets(3, links)), flat)
    wanted = [omega.argmax(s) for omega, s in omegas]
    set_kernels(False)
    for (omega, s), y in zip(omegas, wanted, strict=True):
        np.testing.assert_allclose(omega.argmax(s).numpy(), y.numpy(), atol=1e-9)
