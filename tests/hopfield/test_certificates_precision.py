"""Certificates at their edges: copies, large offsets, structures with transitions, scores beyond all digits."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from fenchel import Gini, KSubsets, Norm, Regularizer, SparseMAP, Tsallis
from fenchel.hopfield import Memory
from fenchel.streaming import Plan, using
from fenchel.structures import SequentialSubsets, Subsets


def interval(x: Tensor, y: tuple[int, ...], transition: list[int]) -> tuple[Fraction, float | Fraction] | None:
    """The β at which no other set of this size beats y by its margin, in exact arithmetic over all of them."""
    rows = [[Fraction(v) for v in row] for row in x.tolist()]
    q = [sum(rows[i][d] for i in y) for d in range(x.shape[1])]
    s = [sum(a * b for a, b in zip(row, q, strict=True)) for row in rows]

    def higher(z: tuple[int, ...]) -> int:
        return sum(t for i, t in enumerate(transition) if i in z and i + 1 in z)

    low, high = Fraction(0), math.inf
    for z in itertools.combinations(range(len(x)), len(y)):
        a = sum(s[i] for i in z) - sum(s[i] for i in y)
        c = len(y) - len(set(y) & set(z)) + higher(z) - higher(y)
        if a < 0:
            low = max(low, Fraction(c) / -a)
        elif a > 0:
            high = min(high, Fraction(-c) / a)
        elif c > 0:
            return None
    return (low, high) if low <= high and high > 0 else None


@pytest.mark.parametrize("seed", range(6))
def test_the_betas_of_a_structure_are_an_interval(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 4, (5, 3), generator=generator).double()
    transition = torch.randint(-3, 5, (4,), generator=generator)
    sets = list(itertools.combinations(range(5), 2))
    y = torch.zeros(len(sets), 5, dtype=torch.bool)
    for row, each in enumerate(sets):
        y[row, list(each)] = True
    omega = SparseMAP(SequentialSubsets(2, transition=transition.double()))
    expected = [interval(x, each, transition.tolist()) for each in sets]
    least = torch.tensor([math.inf if e is None else float(e[0]) for e in expected], dtype=torch.float64)
    for beta in (0.013, 1.07, 1e8):
        found = Memory(x, omega, beta).certify(y)
        torch.testing.assert_close(found.min_beta, least)
        assert found.stationary.tolist() == [e is not None and e[0] <= beta <= e[1] for e in expected]


def test_copies_in_and_out_of_a_structure_tie_at_every_beta() -> None:
    x, y = torch.tensor([[300.0, 0.0], [300.0, 0.0], [0.0, 300.0]]), torch.tensor([[True, False, True]])
    for beta in (1e-3, 1.0, 1e8, 1e15):
        found = Memory(x, SparseMAP(SequentialSubsets(2)), beta).certify(y)
        assert found.min_beta.tolist() == [math.inf]
        assert found.stationary.tolist() == [False]


def test_a_structure_that_only_small_betas_keep() -> None:
    x = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 4.0], [2.0, 2.0, 4.0]])
    omega = SparseMAP(SequentialSubsets(2, transition=torch.tensor([4.0, 0.0, 0.0])))
    for beta, stays in ((0.1, True), (1.0, True), (1.01, False), (100.0, False)):
        found = Memory(x, omega, beta).certify(torch.tensor([[True, True, False, False]]))
        assert found.stationary.tolist() == [stays]
        assert found.min_beta.tolist() == [0.0]


def radii(x: Tensor, lead: float) -> Tensor:
    """By differences, pair after pair."""
    radius = torch.full((len(x),), math.inf).double()
    for i, j in itertools.permutations(range(len(x)), 2):
        apart = x[i] - x[j]
        radius[i] = min(radius[i], (x[i] @ apart - lead) / torch.linalg.vector_norm(apart))
    return radius


@pytest.mark.parametrize("exact", [1 << 36, 0])
@pytest.mark.parametrize("offset", [0.0, 1e4, 1e8])
def test_a_common_offset_leaves_the_radius_right(offset: float, exact: int) -> None:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[20:] = x[:20] + (1e-2 if offset == 1e4 else 1e-5) * x[20:]  # and pairs that are close
    x = x + offset
    dtype = torch.float32 if exact == 0 and offset < 1e8 else torch.float64
    x = x.to(dtype)
    with using(Plan(columns=16, exact=exact)):
        found = Memory(x, Gini(), 2.0).certify()
    torch.testing.assert_close(found.radius, radii(x.double(), 0.5), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    "omega", [Gini(), Tsallis(1.5), Norm(2.0), KSubsets(1), 0.5 * KSubsets(1), SparseMAP(Subsets(1))], ids=str
)
def test_single_patterns_are_certified_in_one_way(omega: Regularizer) -> None:
    x = torch.tensor([[3.0, 0.0], [3.0, 0.0], [0.0, 2.0], [-1.0, -1.0]])
    same = 1.0 * KSubsets(1) if isinstance(omega, SparseMAP) else omega
    every = Memory(x, same, 1.0).certify()
    order = torch.tensor([3, 0, 1, 1, 2])
    some = Memory(x, omega, 1.0).certify(torch.eye(4).bool()[order])
    for name in ("separation", "stationary", "radius", "min_beta"):
        assert torch.equal(getattr(some, name), getattr(every, name)[order]), name
    assert every.stationary.tolist()[:2] == [True, True]
