"""Every structure on a small size, with all its members by enumeration: one line each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fenchel.structures import AtMost, Chain, DependencyTree, Matching, SequentialSubsets, Share, Structure, Subsets


def subsets(n: int, sizes: range) -> list[np.ndarray]:
    chosen = (set(c) for k in sizes for c in itertools.combinations(range(n), k))
    return [np.array([float(i in c) for i in range(n)]) for c in chosen]


def paths(steps: int, states: int) -> list[np.ndarray]:
    return [np.eye(states)[list(path)] for path in itertools.product(range(states), repeat=steps)]


def matchings(n: int, m: int) -> list[np.ndarray]:
    if n > m:
        return [y.T for y in matchings(m, n)]
    return [np.eye(m)[list(columns)] for columns in itertools.permutations(range(m), n)]


def is_tree(heads: tuple[int, ...]) -> bool:
    def reaches_root(node: int) -> bool:
        for _ in heads:
            node = heads[node - 1] if node else 0
        return node == 0

    return all(reaches_root(m) for m in range(1, len(heads) + 1))


def is_projective(heads: tuple[int, ...]) -> bool:
    arcs = [(min(m, h), max(m, h)) for m, h in enumerate(heads, 1)]
    return not any(a < c < b < d for (a, b), (c, d) in itertools.permutations(arcs, 2))


def trees(n: int, projective: bool, single: bool) -> Iterator[np.ndarray]:
    for heads in itertools.product(range(n + 1), repeat=n):
        if is_tree(heads) and (is_projective(heads) or not projective) and (heads.count(0) == 1 or not single):
            yield np.eye(n + 1)[list(heads)]


def both_chosen(y: np.ndarray, t: np.ndarray) -> float:
    pairs = (y[:-1] * y[1:]) > 0
    return float(np.broadcast_to(t, pairs.shape)[pairs].sum())


def steps_taken(y: np.ndarray, t: np.ndarray) -> float:
    path = [int(row.argmax()) for row in y if row.any()]
    t = np.broadcast_to(t, (len(y) - 1, *t.shape[-2:])) if len(y) > 1 else t
    return float(sum(t[i, a, b] for i, (a, b) in enumerate(itertools.pairwise(path))))


class Mountain(Structure):
    """A user's structure, by enumeration, without a word of masks: sets of neighbours that hold the middle."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.members = torch.from_numpy(np.stack(mountains(n)))

    def map(self, scores: Tensor) -> Tensor:
        members = self.members.to(scores)
        return members[(scores @ members.T).argmax(-1)]


def mountains(n: int) -> list[np.ndarray]:
    middle, at = n // 2, np.arange(n)
    spans = itertools.product(range(middle + 1), range(middle, n))
    return [((at >= a) & (at <= b)).astype(float) for a, b in spans]


class Weighted(Structure):
    """A user's structure with a higher-order score of its own, and masks: subsets of even size."""

    def __init__(self, n: int, bonus: Tensor) -> None:
        super().__init__()
        self.bonus = bonus if isinstance(bonus, torch.nn.Parameter) else torch.nn.Parameter(bonus)
        self.members = torch.from_numpy(np.stack(subsets(n, range(0, n + 1, 2))))

    def map(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        members = self.members.to(scores)
        total = scores @ members.T + self.higher(members).to(scores)
        if mask is not None:
            total = total.masked_fill((~mask).to(scores) @ members.T > 0, -torch.inf)
        return members[total.argmax(-1)]

    def higher(self, structures: Tensor) -> Tensor:
        return self.bonus.to(structures) * (structures.sum(-1) > 2)


@dataclass(frozen=True)
class Member:
    """A structure on a small size.

    Args:
        name: as tests show it.
        make: the structure, from a transition where it has one.
        shape: of its parts.
        members: all of them.
        higher: the higher-order score of one, given the transition.
        transition: the shape of the transition, None where there is none.
        masks: whether it takes masks.
    """

    name: str
    make: Callable[..., Structure]
    shape: tuple[int, ...]
    members: list[np.ndarray] = field(repr=False)
    higher: Callable[[np.ndarray, np.ndarray], float] | None = None
    transition: tuple[int, ...] | None = None
    masks: bool = True

    def structure(self, transition: Tensor | None = None) -> Structure:
        return self.make() if self.transition is None else self.make(transition)

    def draw(self, generator: torch.Generator, kind: str = "real") -> Tensor | None:
        """A transition, real or full of ties."""
        if self.transition is None:
            return None
        t = torch.randn(self.transition, generator=generator, dtype=torch.float64)
        return t.round() if kind == "integer" else t

    def scores_of(self, transition: Tensor | None) -> np.ndarray:
        """The higher-order scores of all members."""
        if transition is None or self.higher is None:
            return np.zeros(len(self.members))
        t = transition.detach().numpy()
        return np.array([self.higher(y, t) for y in self.members])


def tree_member(projective: bool, single: bool) -> Member:
    name = "DependencyTree" + ", projective" * projective + ", single root" * single
    make = lambda: DependencyTree(projective, single)  # noqa: E731
    return Member(name, make, (3, 4), list(trees(3, projective, single)))


MEMBERS = [
    Member("Subsets", lambda: Subsets(2), (5,), subsets(5, range(2, 3))),
    Member("AtMost", lambda: AtMost(2), (5,), subsets(5, range(3))),
    Member("SequentialSubsets, plain", lambda: SequentialSubsets(2), (5,), subsets(5, range(2, 3))),
    Member(
        "SequentialSubsets",
        lambda t: SequentialSubsets(3, t),
        (6,),
        subsets(6, range(3, 4)),
        both_chosen,
        (5,),
    ),
    Member(
        "SequentialSubsets, one transition",
        lambda t: SequentialSubsets(3, t),
        (6,),
        subsets(6, range(3, 4)),
        both_chosen,
        (),
    ),
    # With a mask, other structures are right: tests/structures/test_share.py.
    Member("Subsets, a share", lambda: Subsets(Share(0.4)), (5,), subsets(5, range(2, 3)), masks=False),
    Member(
        "SequentialSubsets, a share",
        lambda t: SequentialSubsets(Share(0.5), t),
        (6,),
        subsets(6, range(3, 4)),
        both_chosen,
        (5,),
        masks=False,
    ),
    Member("Chain", lambda t: Chain(t), (4, 3), paths(4, 3), steps_taken, (3, 3)),
    Member("Chain, a transition a step", lambda t: Chain(t), (3, 3), paths(3, 3), steps_taken, (2, 3, 3)),
    Member("Matching", lambda: Matching(), (3, 3), matchings(3, 3)),
    Member("Matching, wide", lambda: Matching(), (2, 4), matchings(2, 4)),
    Member("Matching, tall", lambda: Matching(), (4, 3), matchings(4, 3)),
    tree_member(False, False),
    tree_member(False, True),
    tree_member(True, False),
    tree_member(True, True),
    Member("a user's", lambda: Mountain(5), (5,), mountains(5), masks=False),
    Member(
        "a user's, higher order",
        lambda t: Weighted(5, t),
        (5,),
        subsets(5, range(0, 6, 2)),
        lambda y, t: float(t) * (y.sum() > 2),
        (),
    ),
]
