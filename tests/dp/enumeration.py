"""Every path of a small problem, one by one: textbook recursions in plain Python, sharing no code with the library."""

import itertools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

import oracles
from fenchel import Regularizer
from fenchel.dp import Alignment, DynamicProgram, Lattice, LinearChain, Monotonic

Edge = tuple[Hashable, Hashable, float, int]
"""Source, target, score, and which entry of the flattened marginals it belongs to (−1: none)."""


def choose(z: list[float], alpha: float, gamma: float | Callable[[int], float]) -> tuple[float, list[float]]:
    """max and argmax of scores under γ times the Tsallis negentropy with index α; γ may depend on their number."""
    gamma = gamma(len(z)) if callable(gamma) else gamma
    if not z or max(z) == -math.inf:
        return -math.inf, [0.0] * len(z)
    alive = [i for i, v in enumerate(z) if v > -math.inf]
    if alpha == math.inf:
        best = [i for i in alive if z[i] == max(z)]
        return max(z), [1 / len(best) if i in best else 0.0 for i in range(len(z))]
    found = oracles.entmax([z[i] / gamma for i in alive], alpha)
    p = [0.0] * len(z)
    for i, q in zip(alive, found, strict=True):
        p[i] = float(q)
    if alpha == 1:
        omega = sum(q * math.log(q) for q in p if q > 0)
    else:
        omega = (sum(q**alpha for q in p) - 1) / (alpha * (alpha - 1))
    return sum(q * z[i] for i, q in enumerate(p) if q > 0) - gamma * omega, p


@dataclass
class Answer:
    """The value, and for each path its parts, its probability and its score."""

    value: float
    paths: list[tuple[list[int], float, float]]

    def marginals(self, size: int) -> Tensor:
        total = torch.zeros(size, dtype=torch.float64)
        for parts, probability, _ in self.paths:
            for part in parts:
                if part >= 0:
                    total[part] += probability
        return total

    def entropy(self) -> float:
        return -sum(p * math.log(p) for _, p, _ in self.paths if p > 0)


def solve(
    edges: list[Edge], source: Hashable, sink: Hashable, alpha: float, gamma: float | Callable[[int], float]
) -> Answer:
    """By recursion from the sink, without memory for paths: all of them are listed."""
    into: dict[Hashable, list[Edge]] = {}
    for edge in edges:
        into.setdefault(edge[1], []).append(edge)
    values: dict[Hashable, tuple[float, list[float]]] = {source: (0.0, [])}

    def value(node: Hashable) -> float:
        if node not in values:
            values[node] = choose([value(e[0]) + e[2] for e in into.get(node, [])], alpha, gamma)
        return values[node][0]

    def walks(node: Hashable) -> list[tuple[list[int], float, float]]:
        if node == source:
            return [([], 1.0, 0.0)]
        value(node)
        return [
            ([*parts, edge[3]], probability * p, score + edge[2])
            for edge, p in zip(into.get(node, []), values[node][1], strict=True)
            for parts, probability, score in walks(edge[0])
        ]

    return Answer(value(sink), walks(sink))


@dataclass(frozen=True)
class Problem:
    """A kind of dynamic program: leaf tensors, how to build it from them, and its graph by hand."""

    name: str
    make: Callable[[torch.Generator], tuple[Tensor, ...]]
    build: Callable[..., DynamicProgram]  # build(*tensors, omega)
    edges: Callable[..., tuple[list[Edge], Hashable, Hashable]]  # edges(b, *tensors)
    path: Callable[[list[int]], Tensor]  # one path of its parts
    sign: float = 1.0

    def __str__(self) -> str:
        return self.name

    def tensors(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(t.to(dtype) for t in self.make(generator))

    def answers(self, tensors: tuple[Tensor, ...], omega: Regularizer, batch: int) -> list[Answer]:
        alpha, gamma = parameters(omega)
        detached = [t.detach() for t in tensors]
        return [solve(*self.edges(b, *detached), alpha, gamma) for b in range(batch)]


def parameters(omega: Regularizer) -> tuple[float, float]:
    gamma = 1.0
    while hasattr(omega, "gamma"):
        gamma, omega = gamma * omega.gamma, omega.omega
    return omega.alpha, gamma


# -- chains ------------------------------------------------------------------------------------------------

LENGTHS, NONE = torch.tensor([4, 1, 3]), torch.tensor([4, 2, 0])
STEPS, STATES = 4, 3


def chain_edges(b, unary, transition, start=None, end=None, lengths=LENGTHS):
    length = int(lengths[b])
    if length == 0:
        return [("in", "out", 0.0, -1)], "in", "out"
    transition = transition.expand(len(unary), unary.shape[1] - 1, *transition.shape[-2:])
    states = range(unary.shape[2])

    def at(scores, s):
        return 0.0 if scores is None else float(scores[b, s] if scores.dim() == 2 else scores[s])

    part = unary.shape[2]
    edges = [("in", (0, s), float(unary[b, 0, s]) + at(start, s), s) for s in states]
    for t, p, s in itertools.product(range(1, length), states, states):
        edges.append(((t - 1, p), (t, s), float(unary[b, t, s] + transition[b, t - 1, p, s]), t * part + s))
    edges += [((length - 1, s), "out", at(end, s), -1) for s in states]
    return edges, "in", "out"


def chain_path(parts):
    states = [part % STATES for part in parts if part >= 0]
    return torch.tensor(states + [-1] * (STEPS - len(states)))


SHARED = Problem(
    "chain",
    lambda g: (torch.randn(3, STEPS, STATES, generator=g), torch.randn(STATES, STATES, generator=g)),
    lambda unary, transition, omega: LinearChain(unary, transition, LENGTHS, omega=omega),
    chain_edges,
    chain_path,
)
FULL = Problem(
    "chain with ends, steps of their own",
    lambda g: (
        torch.randn(3, STEPS, STATES, generator=g),
        torch.randn(3, STEPS - 1, STATES, STATES, generator=g),
        torch.randn(STATES, generator=g),
        torch.randn(3, STATES, generator=g),
    ),
    lambda unary, transition, start, end, omega: LinearChain(unary, transition, LENGTHS, start, end, omega),
    chain_edges,
    chain_path,
)

EMPTY = Problem(
    "chain of no steps",
    FULL.make,
    lambda unary, transition, start, end, omega: LinearChain(unary, transition, NONE, start, end, omega),
    lambda b, *tensors: chain_edges(b, *tensors, lengths=NONE),
    chain_path,
)

# -- alignments --------------------------------------------------------------------------------------------

ROWS, COLUMNS = 3, 4
PAIRS = torch.tensor([[ROWS, COLUMNS], [2, 4], [1, 1]])


def table_edges(b, costs, lengths=PAIRS, allowed=lambda i, j, n, m: True):
    n, m = lengths[b].tolist()
    edges = []
    for i, j in itertools.product(range(n), range(m)):
        if allowed(i, j, n, m):
            before = [(i - 1, j - 1), (i - 1, j), (i, j - 1)] if (i, j) != (0, 0) else ["in"]
            part = i * costs.shape[2] + j
            edges += [(c, (i, j), -float(costs[b, i, j]), part) for c in before if c == "in" or min(c) >= 0]
    return edges, "in", (n - 1, m - 1)


def table_path(parts):
    cells = [[part // COLUMNS, part % COLUMNS] for part in parts]
    return torch.tensor(cells + [[-1, -1]] * (ROWS + COLUMNS - 1 - len(cells)))


TABLE = Problem(
    "alignment",
    lambda g: (2 * torch.rand(3, ROWS, COLUMNS, generator=g),),
    lambda costs, omega: Alignment(costs, PAIRS, omega),
    table_edges,
    table_path,
    sign=-1.0,
)

# -- tokens and frames -------------------------------------------------------------------------------------

TOKENS, FRAMES = 3, 6
SIZES = torch.tensor([[TOKENS, FRAMES], [2, 4], [1, 1]])


def frame_edges(b, scores, lengths=SIZES):
    n, m = lengths[b].tolist()
    edges = []
    for i, t in itertools.product(range(n), range(m)):
        before = ["in"] if i == t == 0 else [(i, t - 1), (i - 1, t - 1)]
        part = i * scores.shape[2] + t
        edges += [(c, (i, t), float(scores[b, i, t]), part) for c in before if c == "in" or min(c) >= 0]
    return edges, "in", (n - 1, m - 1)


def frame_path(parts):
    return torch.tensor([part // FRAMES for part in parts] + [-1] * (FRAMES - len(parts)))


SPEECH = Problem(
    "tokens and frames",
    lambda g: (0.7 * torch.randn(3, TOKENS, FRAMES, generator=g),),
    lambda scores, omega: Monotonic(scores, SIZES, omega),
    frame_edges,
    frame_path,
)

# -- lattices ----------------------------------------------------------------------------------------------

SOURCES = torch.tensor([0, 0, 1, 2, 0, 3, 1, 3, 4, 0, 0, 2, 6])
TARGETS = torch.tensor([1, 3, 3, 3, 4, 4, 4, 7, 7, 1, 5, 7, 7])  # two edges are parallel; 2, 5 and 6 are on no path
NODES = 8


def lattice_edges(b, scores):
    edges = [(int(s), int(t), float(scores[b, e]), e) for e, (s, t) in enumerate(zip(SOURCES, TARGETS, strict=True))]
    return edges, 0, NODES - 1


def lattice_path(parts):
    path = torch.zeros(len(SOURCES), dtype=torch.bool)
    path[parts] = True
    return path


NET = Problem(
    "lattice",
    lambda g: (torch.randn(3, len(SOURCES), generator=g),),
    lambda scores, omega: Lattice(SOURCES, TARGETS, scores, NODES, omega),
    lattice_edges,
    lattice_path,
)

PROBLEMS = [SHARED, FULL, EMPTY, TABLE, SPEECH, NET]
