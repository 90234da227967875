"""Active sets that grow by themselves: the same mixtures as by the oracle alone, which certifies them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fenchel
from fenchel.structures import DependencyTree, SequentialSubsets


class Plain(DependencyTree):
    """The same trees, found by the oracle alone."""

    def explorer(self, batch: torch.Size, shape: torch.Size) -> None:
        return None


def is_tree(y: Tensor, words: Tensor, single_root: bool) -> bool:
    """Whether every word has one head and hangs on the root."""
    if not torch.equal(y.sum(-1), words.double()) or (single_root and y[:, 0].sum() != 1):
        return False
    for m in range(len(y)):
        at, steps = m + 1, 0
        while words[m] and at != 0 and steps <= len(y):
            at, steps = int(y[at - 1].argmax()), steps + 1
        if steps > len(y):
            return False
    return True


def problem(n: int, spread: float, gaps: bool) -> tuple[Tensor, Tensor]:
    scores = spread * torch.randn(4, n, n + 1, dtype=torch.float64)
    mask = torch.rand(4, n, n + 1) > (0.2 if gaps else -1.0)
    mask[:, :, 0] = True
    if gaps:
        mask[1, n // 2 :] = False  # a shorter sentence
        mask[2, n // 3] = False  # a word left out
    return scores, mask


@pytest.mark.parametrize("single_root", [False, True])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize(("n", "spread"), [(2, 1.0), (6, 0.01), (7, 3.0), (20, 1.0), (20, 0.1), (35, 4.0)])
def test_mixtures_are_certified(n: int, spread: float, gaps: bool, single_root: bool) -> None:
    torch.manual_seed(n)
    scores, mask = problem(n, spread, gaps and n > 2)
    structure = DependencyTree(single_root=single_root)
    mixture = fenchel.SparseMAP(structure).solve(scores, mask=mask)
    mu = mixture.marginals
    mixed = (mixture.structures * mixture.weights[..., None, None]).sum(-3)
    torch.testing.assert_close(mixed, mu, rtol=0, atol=1e-12)
    torch.testing.assert_close(mixture.weights.sum(-1), torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-12)
    for row, weight, free in zip(mixture.structures, mixture.weights, mask, strict=True):
        assert all(is_tree(y, free.any(-1), single_root) for y in row[weight > 0])
    # No tree is better for what is left: the mixture is the optimum.
    left = scores - mu
    best = structure.map(left, mask=mask)
    assert float((left * (best - mu)).flatten(1).sum(-1).max()) < 1e-9 * max(1.0, spread)


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_the_oracle_alone_gives_the_same(spread: float) -> None:
    torch.manual_seed(0)
    scores = (spread * torch.randn(8, 12, 13, dtype=torch.float64)).requires_grad_()
    weight = torch.randn(8, 12, 13, dtype=torch.float64)
    grown, plain = (fenchel.SparseMAP(kind()).argmax(scores) for kind in (DependencyTree, Plain))
    torch.testing.assert_close(grown, plain, rtol=0, atol=1e-6)
    ours, theirs = (torch.autograd.grad((p * weight).sum(), scores)[0] for p in (grown, plain))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_fewer_calls_of_the_oracle() -> None:
    torch.manual_seed(0)
    scores = torch.randn(16, 20, 21)
    calls = 0

    class Counted(DependencyTree):
        def oracle(self, *args):  # type: ignore[no-untyped-def]
            best = super().oracle(*args)

            def counted(scores, rows):  # type: ignore[no-untyped-def]
                nonlocal calls
                calls += 1
                return best(scores, rows)

            return counted

    fenchel.SparseMAP(Counted()).argmax(scores)
    assert calls <= 12  # one for every member, some 40, if each is asked for


class PlainSequences(SequentialSubsets):
    """The same subsets, found by the oracle alone."""

    def explorer(self, batch: torch.Size, shape: torch.Size) -> None:
        return None


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("kind", ["number", "positions", "rows", "forbidden"])
def test_sequences_by_the_oracle_alone(kind: str, spread: float) -> None:
    torch.manual_seed(1)
    scores = (spread * torch.randn(6, 30, dtype=torch.float64)).requires_grad_()
    mask = torch.rand(6, 30) > 0.2
    mask[1, 3:] = kind == "forbidden"  # fewer than k, but for pairs that must not be
    transition = {
        "number": 0.5,
        "positions": torch.randn(29, dtype=torch.float64),
        "rows": torch.randn(6, 29, dtype=torch.float64),
        "forbidden": torch.where(torch.rand(29) < 0.3, -torch.inf, torch.randn(29)).double(),
    }[kind]
    weight = torch.randn(6, 30, dtype=torch.float64)
    pair = [each(5, transition) for each in (SequentialSubsets, PlainSequences)]
    grown, plain = (fenchel.SparseMAP(each).argmax(scores, mask=mask) for each in pair)
    torch.testing.assert_close(grown, plain, rtol=0, atol=1e-6)
    ours, theirs = (torch.autograd.grad((p * weight).sum(), scores)[0] for p in (grown, plain))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
