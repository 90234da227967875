"""Certificates of structures against the enumeration of all structures."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fenchel import KSubsets, SparseMAP
from fenchel.hopfield import Memory
from fenchel.streaming import Plan, using
from fenchel.structures import AtMost, SequentialSubsets, Structure

N = 6


class Runs(Structure):
    """One run of neighbours, or nothing; a user's own structure, of no fixed size and without a mask."""

    def map(self, scores: Tensor) -> Tensor:  # type: ignore[override]
        runs = torch.as_tensor(np.array(all_runs(scores.shape[-1])), dtype=scores.dtype)
        return runs[(scores @ runs.T).argmax(-1)]


class Ranked(Structure):
    """Three of the parts, with a bonus for every pair of parts that is chosen together: all are enumerated."""

    fixed_dims = 1

    def __init__(self, bonus: Tensor) -> None:
        super().__init__()
        self.register_buffer("bonus", bonus)

    def higher(self, structures: Tensor) -> Tensor:
        return torch.einsum("...i,ij,...j->...", structures, self.bonus.to(structures), structures)

    def map(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        sets = torch.as_tensor(np.array(subsets(scores.shape[-1], [3])), dtype=scores.dtype)
        return sets[(scores @ sets.T + self.higher(sets)).argmax(-1)]


def all_runs(n: int) -> list[list[int]]:
    ends = [(i, j) for i in range(n) for j in range(i + 1, n + 1)] + [(0, 0)]
    return [[int(i <= place < j) for place in range(n)] for i, j in ends]


def subsets(n: int, sizes: list[int]) -> list[list[int]]:
    found = [each for k in sizes for each in itertools.combinations(range(n), k)]
    return [[int(i in each) for i in range(n)] for each in found]


def sequential(transition: list[float]) -> tuple[Structure, list[list[int]], list[float]]:
    sets = subsets(N, [3])
    scores = [sum(t for i, t in enumerate(transition) if y[i] and y[i + 1]) for y in sets]
    return SequentialSubsets(3, torch.tensor(transition, dtype=torch.float64)), sets, scores


BONUS = torch.tensor([[0.0, 0.3, 0, 0, -0.2, 0], *[[0.0] * 6] * 3, [0.4, 0, 0, 0, 0, 0.1], [0.0] * 6]).double()
CASES = {
    "attractive": sequential([0.4] * 5),
    "repulsive": sequential([-0.3] * 5),
    "uneven": sequential([0.9, -0.5, 0.0, 0.2, -1.0]),
    "forbidden": sequential([0.2, -math.inf, 0.1, 0.0, -math.inf]),
    "at most": (AtMost(3), subsets(N, [0, 1, 2, 3]), [0.0] * 42),
    "runs": (Runs(), all_runs(N), [0.0] * 22),
    "pairs": (Ranked(BONUS), (own := subsets(N, [3])), [float(np.array(y) @ BONUS.numpy() @ np.array(y)) for y in own]),
}


def enumerated(x: np.ndarray, y: np.ndarray, others: np.ndarray, higher: list[float], weight: float) -> tuple:
    """The least lead in score, and for each other structure its slack in units of the score and ‖Xᵀ(y − y′)‖.

    Args:
        weight: γ/β, of the margin and of the higher-order scores.
    """
    own = higher[int(np.flatnonzero((others == y).all(-1))[0])]
    rest = [(z, h) for z, h in zip(others, higher, strict=True) if (z != y).any() and h > -math.inf]
    q = x.T @ y
    lead = [q @ (x.T @ (y - z)) for z, _ in rest]
    slack = [a + weight * (own - h - y @ (y - z)) for a, (z, h) in zip(lead, rest, strict=True)]
    return min(lead), np.array(slack), np.array([np.linalg.norm(x.T @ (y - z)) for z, _ in rest])


@pytest.mark.parametrize("gamma", [1.0, 0.5])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_the_certificate_agrees_with_all_other_structures(name: str, seed: int, gamma: float) -> None:
    structure, sets, higher = CASES[name]
    x = 2.0 * torch.randn(N, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    y, beta = torch.tensor(sets, dtype=torch.bool), 1.3
    found = Memory(x, gamma * SparseMAP(structure), beta).certify(y)
    spectral, largest = np.linalg.norm(x.numpy(), 2), np.linalg.norm(x.numpy(), axis=-1).max()
    every = np.array(sets)
    positive = 0
    for row, each in enumerate(every):
        if higher[row] == -math.inf:
            assert not bool(found.stationary[row])
            assert float(found.min_beta[row]) == math.inf
            continue
        lead, slack, norm = enumerated(x.numpy(), each, every, higher, gamma / beta)
        assert float(found.separation[row]) == pytest.approx(lead, abs=1e-9)
        assert bool(found.stationary[row]) == (slack.min() >= 0)
        radius, largest_ball = float(found.radius[row]), (slack / norm).min()
        if slack.min() < 0:
            assert radius == -math.inf
            assert not bool(found.exact[row])
            continue
        positive += radius > 0
        assert (radius > 0) == (largest_ball > 0)  # the empty set ties with all others
        assert 0 <= radius <= largest_ball * (1 + 1e-9)
        assert bool(found.exact[row]) == (radius >= largest_ball * (1 - 1e-6))
        # Proposition 5: one least lead and one greatest distance for all.
        apart = np.sqrt((each != every).sum(-1).max())
        margin = slack.min() if min(higher) < 0 or max(higher) > 0 else lead - gamma * apart**2 / (2 * beta)
        assert radius >= margin / min(spectral * apart, largest * apart**2) - 1e-9
    assert positive > 0


def test_one_update_retrieves_from_inside_the_radius() -> None:
    structure, sets, _ = CASES["uneven"]
    x = 2.0 * torch.randn(N, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.tensor(sets, dtype=torch.bool)
    memory = Memory(x, SparseMAP(structure), 1.3)
    found = memory.certify(y)
    kept = found.stationary.nonzero().flatten()
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(20, len(kept), 8, generator=generator, dtype=torch.float64)
    direction /= torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
    states = y[kept].double() @ x + found.radius[kept].unsqueeze(-1) * (1 - 1e-9) * direction
    torch.testing.assert_close(memory.weights(states), y[kept].double().expand(20, -1, -1), rtol=0, atol=1e-6)


def test_single_swaps_give_the_radius_of_all_subsets() -> None:
    """Every other subset is compared, not swaps alone; beyond the radius there is a query that is not retrieved."""
    x = 2.0 * torch.randn(7, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    every = np.array(subsets(7, [3]))
    found = Memory(x, KSubsets(3), 1.3).certify(torch.as_tensor(every, dtype=torch.bool))
    assert bool(found.stationary.any())
    for row in found.stationary.nonzero().flatten().tolist():
        _, slack, norm = enumerated(x.numpy(), every[row], every, [0.0] * len(every), 1 / 1.3)
        assert float(found.radius[row]) == pytest.approx((slack / norm).min())


def test_a_structure_without_a_rival_has_a_ball_of_any_size() -> None:
    found = Memory(torch.eye(3), SparseMAP(SequentialSubsets(3, 0.5))).certify(torch.ones(1, 3, dtype=torch.bool))
    assert found.separation.tolist() == found.radius.tolist() == [math.inf]
    assert found.exact.tolist() == [True]


def test_blocks_of_patterns_and_of_rows_change_nothing() -> None:
    structure, sets, _ = CASES["attractive"]
    x = 2.0 * torch.randn(N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    memory, y = Memory(x, SparseMAP(structure), 1.3), torch.tensor(sets, dtype=torch.bool)
    expected = vars(memory.certify(y))
    with using(Plan(rows=5, columns=4)):
        torch.testing.assert_close(vars(memory.certify(y)), expected)
