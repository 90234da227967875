"""What a mixture must fulfil, told by recursions of their own."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from fenchel import SparseMAP


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def best_sequence(scores: np.ndarray, transition: np.ndarray) -> float:
    """The score of the best sequence of states, by Viterbi's recursion; transitions (S, S) or (T − 1, S, S)."""
    value = scores[0]
    for row, step in zip(
        scores[1:], np.broadcast_to(transition, (len(scores) - 1, *transition.shape[-2:])), strict=True
    ):
        value = (value[:, None] + step).max(0) + row
    return float(value.max())


def best_subset(scores: np.ndarray, transition: np.ndarray, k: int) -> float:
    """The score of the best k positions with transitions between neighbours, by recursion over positions."""
    out, on = np.full(k + 1, -np.inf), np.full(k + 1, -np.inf)
    out[0], on[1] = 0.0, scores[0]
    for score, link in zip(scores[1:], transition, strict=True):
        into = np.full(k + 1, -np.inf)
        into[1:] = np.maximum(out[:-1], on[:-1] + link) + score
        out, on = np.maximum(out, on), into
    return float(max(out[k], on[k]))


def check_certified(omega: SparseMAP, scores: Tensor, best, higher, solved: bool = True) -> None:  # type: ignore[no-untyped-def]
    """Weights are a distribution, and the reported gap is the true one: rounding error, or warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mixture = omega.solve(scores)
    weights, marginals = mixture.weights.double(), mixture.marginals.double()
    assert (weights >= 0).all()
    error = 1e-12 if scores.dtype == torch.float64 else 1e-6
    assert weights.sum(-1).numpy() == pytest.approx(1.0, abs=error)
    for row, mu, p, members, gap in zip(
        scores.double(), marginals, weights, mixture.structures.double(), mixture.gap, strict=True
    ):
        assert torch.allclose((p.reshape(-1, *[1] * mu.dim()) * members).sum(0), mu, atol=error)
        reached = sum(float(w) * higher(y.numpy()) for w, y in zip(p, members, strict=True) if w > 0)
        true = best((row - mu).numpy()) - float(((row - mu) * mu).sum()) - reached
        scale = 1 + float(row.abs().max())
        assert gap.item() == pytest.approx(true, abs=(1e-12 if error < 1e-9 else 1e-4) * scale)
        assert gap.item() < 1e-12 * scale or not solved
    assert bool(caught) != solved


def steps_of(y: np.ndarray, transition: np.ndarray) -> float:
    """The sum of the steps of a sequence of states, as zeros and ones."""
    path = y.argmax(-1)
    steps = np.broadcast_to(transition, (len(path) - 1, *transition.shape[-2:]))
    return float(steps[np.arange(len(path) - 1), path[:-1], path[1:]].sum())


def check_chain(scores: Tensor, transition: Tensor, omega: SparseMAP, solved: bool = True) -> None:
    """``check_certified`` for chains with one transition matrix for all rows."""
    t = transition.double().numpy()
    check_certified(omega, scores, lambda left: best_sequence(left, t), lambda y: steps_of(y, t), solved)
