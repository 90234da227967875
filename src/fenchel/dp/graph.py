"""Paths through a directed graph without cycles: the smoothed recursion and its random walk, in torch operations.

Nodes are sorted by level, the length of the longest way to them, and a level is handled at once: its nodes' incoming
scores are one (batch, nodes, choices) tensor, over whose last dimension max_Ω is the value and argmax_Ω the walk's
probabilities. Everything is differentiable to any order, in both modes, on every device.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fenchel._torch import apply_function, nested_forward_mode
from fenchel.regularizers.base import Regularizer, simplified

Indices = np.ndarray[Any, np.dtype[np.int64]]


class Sized(Protocol):
    """An object with a number of bytes."""

    @property
    def nbytes(self) -> int: ...


S = TypeVar("S", bound=Sized)


def remembered(limit: int = 2**25) -> Callable[[Callable[..., S]], Callable[..., S]]:
    """Decorator that keeps the latest results of a function, as many as fit into ``limit`` bytes.

    A result that is larger than that is not kept.
    """

    def wrap(function: Callable[..., S]) -> Callable[..., S]:
        kept: OrderedDict[Hashable, tuple[S, int]] = OrderedDict()
        lock = threading.Lock()

        @functools.wraps(function)
        def call(*key: Hashable) -> S:
            with lock:
                if key in kept:
                    kept.move_to_end(key)
                    return kept[key][0]
            found = function(*key)
            size = found.nbytes
            with lock:
                if size <= limit:
                    kept[key] = found, size
                while sum(each for _, each in kept.values()) > limit:
                    kept.popitem(last=False)
            return found

        call.forget = kept.clear  # type: ignore[attr-defined]
        return call

    return wrap


@dataclass(frozen=True)
class Level:
    """The nodes ``first``, …, ``first + len(edges) - 1`` and their incoming edges, padded to one length.

    Args:
        first: the number of its first node.
        edges: (nodes, choices), the score of each incoming edge; padding has the last score of all, which is −inf.
        sources: (nodes, choices), the nodes that edges come from; (nodes, choices, 2) for hyperedges.
        reads: the earlier levels that contain the sources.
        places: as sources, their positions in these levels, one level after the other.
        degrees: (nodes,), how many incoming edges each node has; what follows in its row is padding.
    """

    first: int
    edges: Indices
    sources: Indices
    reads: tuple[int, ...]
    places: Indices
    degrees: Indices


class Graph:
    """A graph with one source, its nodes sorted by level.

    Graphs are kept for later calls, and therefore in NumPy arrays: a tensor that was made under a transformation of
    functions, in inference mode or on fake data could not be used outside.

    Args:
        sources: (E,), the node that each edge comes from; (E, 2) for hyperedges, which come from two, and whose value
            is the sum of theirs. The source of the graph, of value 0, stands for none.
        targets: (E,), the node that each edge goes to. Every node but one, the source, is the target of an edge.
        levels: (nodes,), 0 for the source, and greater at the target of an edge than at its source.
        edges: (E,), the index of each edge's score; 0, 1, … if not given.
        scores: the number of scores.
    """

    def __init__(
        self,
        sources: Indices,
        targets: Indices,
        levels: Indices,
        edges: Indices | None = None,
        scores: int | None = None,
    ) -> None:
        edges = np.arange(len(sources)) if edges is None else edges
        self.scores = len(sources) if scores is None else scores
        by_level = np.argsort(levels, kind="stable")
        self.ranks = np.empty(len(levels), dtype=np.int64)
        self.ranks[by_level] = np.arange(len(levels))
        self._firsts = np.searchsorted(levels[by_level], np.arange(levels.max() + 2))
        heads = self.ranks[targets]
        order = np.argsort(heads, kind="stable")
        self._edges, self._tails, self._heads = edges[order], self.ranks[sources][order], heads[order]
        self._cuts = np.searchsorted(self._heads, self._firsts)

    @property
    def nbytes(self) -> int:
        """The number of bytes once all properties have been computed."""
        degrees = np.bincount(self._heads, minlength=len(self.ranks))
        padded = int((np.maximum.reduceat(degrees, self._firsts[:-1]) * np.diff(self._firsts)).sum())
        arity = self._tails.size // max(len(self._tails), 1)
        return 8 * (len(self.ranks) + (2 + arity) * len(self._edges) + 2 * (1 + arity) * padded + self.scores)

    @cached_property
    def levels(self) -> list[Level]:
        """All levels but that of the source, first to last."""
        return [self._level(i) for i in range(1, len(self._firsts) - 1)]

    @cached_property
    def widths(self) -> list[int]:
        """The number of choices of each level, padding included."""
        return [level.edges.size for level in self.levels]

    @cached_property
    def order(self) -> Indices:
        """The indices of the scores of all levels, one level after the other."""
        return np.concatenate([level.edges.reshape(-1) for level in self.levels])

    @cached_property
    def place(self) -> Indices:
        """The position of each score in ``order``; its length for a score without an edge."""
        found = np.full(self.scores + 1, len(self.order))
        found[self.order] = np.arange(len(self.order))
        return found[:-1]

    def _level(self, number: int) -> Level:
        first, end = self._firsts[number], self._firsts[number + 1]
        some = slice(self._cuts[number], self._cuts[number + 1])
        edges, tails, heads = self._edges[some], self._tails[some], self._heads[some] - first
        begin = np.searchsorted(heads, np.arange(end - first))
        column = np.arange(len(heads)) - begin[heads]
        shape = (end - first, int(column.max()) + 1)
        origins = np.searchsorted(self._firsts, tails, side="right") - 1
        reads = np.unique(origins)
        offsets = np.cumsum([0, *(self._firsts[reads + 1] - self._firsts[reads])])
        places = tails - self._firsts[origins] + offsets[np.searchsorted(reads, origins)]
        padded = []
        for values, fill in ((edges, self.scores), (tails, 0), (places, 0)):
            padded.append(np.full((*shape, *values.shape[1:]), fill))
            padded[-1][heads, column] = values
        degrees = np.diff(np.append(begin, len(heads)))
        return Level(int(first), padded[0], padded[1], tuple(reads.tolist()), padded[2], degrees)


def tensor_on(device: torch.device, indices: Indices) -> Tensor:
    """An array of indices as a tensor on a device."""
    return torch.from_numpy(indices).to(device)


class _Invalidate(torch.autograd.Function):
    """See ``_invalidate``. The operation is linear in x, and its derivative is the same operation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, invalid: Tensor) -> Tensor:
        return torch.where(invalid & (x != 0), torch.nan, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _invalidate(grad, *ctx.saved_tensors), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        with nested_forward_mode():  # for the levels of forward mode around this one
            return _invalidate(tangent, *ctx.saved_tensors)


def _invalidate(x: Tensor, invalid: Tensor) -> Tensor:
    """x with NaN in place of entries other than 0 of invalid rows, and the same in its derivatives.

    Zeros stay zeros, so that a row whose result has no weight adds 0 to a gradient.
    """
    result: Tensor = apply_function(_Invalidate, x, invalid)
    return result


Choose = Callable[[int, Tensor, Tensor], Tensor]
"""Function that chooses an incoming edge of each node, given the index of a level, nodes of it, and a mask of the walks
that pass through the level."""


@dataclass(frozen=True)
class Walk:
    """A random walk from the end of the graph back to its source, for scores of shape (batch, scores).

    Args:
        graph: the graph.
        omega: smooths every maximum.
        values: max_Ω over all paths to each node, one tensor (batch, nodes) per level, the source's first.
        choices: the incoming scores of each level's nodes, (batch, nodes, choices).
        ends: (batch,), the node that each walk starts from; the last if None.
        invalid: (batch,), which batch elements have a score of NaN or +inf. All their results are NaN.
    """

    graph: Graph
    omega: Regularizer
    values: Sequence[Tensor]
    choices: Sequence[Tensor]
    ends: Tensor | None
    invalid: Tensor

    @property
    def value(self) -> Tensor:
        """max_Ω over all paths, (batch,)."""
        return self._mark_invalid(self._at_ends(self.values))

    def marginals(self) -> Tensor:
        """The probability that a walk takes each edge, (batch, scores)."""
        levels = self.graph.levels
        mass = [self._starts(i) for i in range(len(self.values))]
        walked: list[Tensor] = []
        for i in range(len(levels) - 1, -1, -1):
            level = levels[i]
            taken = mass[i + 1].unsqueeze(-1) * _argmax(self.omega, level, self.choices[i])
            walked.append(taken.flatten(1))
            sizes = [self.values[r].shape[-1] for r in level.reads]
            passed = torch.zeros_like(torch.cat([self.values[r] for r in level.reads], -1))
            for places in level.places.reshape(walked[-1].shape[-1], -1).T:
                passed = passed.index_add(1, tensor_on(taken.device, places.copy()), walked[-1])
            for r, part in zip(level.reads, torch.split(passed, sizes, -1), strict=True):
                mass[r] = mass[r] + part
        return self._mark_invalid(self._by_edge(walked[::-1], 0.0))

    def probs(self) -> Tensor:
        """The probability of each edge given its target, (batch, scores)."""
        each = [_argmax(self.omega, level, z) for level, z in zip(self.graph.levels, self.choices, strict=True)]
        return self._mark_invalid(self._by_edge([p.flatten(1) for p in each], 0.0))

    def slack(self) -> Tensor:
        """How much the value can be above the best score, (batch,): the largest sum over a path of max(−Ω)."""
        found = [torch.zeros_like(self.values[0])]
        for level, z in zip(self.graph.levels, self.choices, strict=True):
            possible = z > -torch.inf
            most = _max(self.omega, level, torch.where(possible, 0.0, z))
            before = torch.where(possible, _added_at_sources(found, level), 0.0).amax(-1)
            found.append(torch.where(possible.any(-1), most, 0.0) + before)
        return self._mark_invalid(self._at_ends(found))

    def log_probs(self) -> Tensor:
        """The log-probability of each edge given its target, (batch, scores)."""
        return self._mark_invalid(self._by_edge([each.flatten(1) for each in self.log_choices()], -torch.inf))

    def entropy(self) -> Tensor:
        """Shannon's entropy of the walk in nats, (batch,)."""
        return self._expected([-each for each in self.log_choices()])

    def cross_entropy(self, other: Walk) -> Tensor:
        """E[−log q] for another walk q through the same graph, (batch,); +inf if a path of this walk has q = 0."""
        return self._expected([-each for each in other.log_choices()], other)

    def divergence(self, other: Walk) -> Tensor:
        """Kullback and Leibler's divergence from another walk through the same graph, (batch,), in nats."""
        costs = []
        for log_p, log_q in zip(self.log_choices(), other.log_choices(), strict=True):
            costs.append(torch.where(log_p == -torch.inf, 0.0, log_p) - log_q)
        found = self._expected(costs, other)
        return found + torch.where(found < 0, -found, 0.0).detach()  # what is below 0 is rounding

    def log_choices(self) -> list[Tensor]:
        """The log-probabilities of all choices, level by level."""
        return [_log_argmax(self.omega, level, z) for level, z in zip(self.graph.levels, self.choices, strict=True)]

    def _expected(self, costs: Sequence[Tensor], other: Walk | None = None) -> Tensor:
        """The expected sum of the costs of all choices, (batch,).

        +inf where a choice of infinite cost has a probability above 0; the derivatives are then those of the others.
        """
        found = [torch.zeros_like(self.values[0])]
        lost = [torch.zeros_like(self.values[0], dtype=torch.bool)]
        for level, z, cost in zip(self.graph.levels, self.choices, costs, strict=True):
            p = _argmax(self.omega, level, z)
            taken, finite = p > 0, cost < torch.inf
            total = _added_at_sources(found, level) + torch.where(taken & finite, cost, 0.0)
            found.append(torch.where(taken, p * total, 0.0).sum(-1))
            lost.append((taken & (_added_at_sources(lost, level) | ~finite)).any(-1))
        value = self._at_ends(found) + torch.where(self._at_ends(lost), torch.inf, 0.0)
        return self._mark_invalid(value if other is None else other._mark_invalid(value))

    @torch.no_grad()
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n walks of each batch element: (n, batch, levels), the edge into each level, −1 where it is skipped."""
        draws = self._draw(n, generator)

        def draw(i: int, nodes: Tensor, _: Tensor) -> Tensor:
            p = rows_of_nodes(_argmax(self.omega, self.graph.levels[i], self.choices[i]), nodes)
            below = p.cumsum(-1)
            number = (below <= (draws[i] * below[..., -1]).unsqueeze(-1)).sum(-1)
            last = p.shape[-1] - 1 - (p > 0).int().flip(-1).argmax(-1)
            return torch.minimum(number, last)  # rounding of the sums must not lead to an edge of probability 0

        return self._trace_back(draw, n)

    def _draw(self, n: int, generator: torch.Generator | None) -> Sequence[Tensor]:
        """Random numbers for each choice of n walks: (n, batch) per level."""
        shape = (len(self.graph.levels), n, len(self.invalid))
        return list(uniform(shape, self.values[0], generator))

    @torch.no_grad()
    def best(self) -> Tensor:
        """The walk that takes the best edge at every node: (1, batch, levels), edges as in ``sample``."""
        return self._trace_back(lambda i, nodes, _: rows_of_nodes(self.choices[i], nodes).argmax(-1), 1)

    @torch.no_grad()
    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """The k most probable walks, (k, batch, levels), edges as in ``sample``, and their log-probabilities."""
        start = torch.full_like(self.values[0], -torch.inf).unsqueeze(-1).repeat(1, 1, k)
        start[..., 0] = 0.0
        found, picks = [start], []
        for level, each in zip(self.graph.levels, self.log_choices(), strict=True):
            ways = at_sources(found, level) + each.unsqueeze(-1)  # (batch, nodes, choices, k)
            logs, pick = ways.flatten(2).sort(dim=-1, descending=True, stable=True)
            found.append(logs[..., :k])
            picks.append(pick[..., :k])
        ranks = torch.arange(k, device=start.device).unsqueeze(-1).expand(k, len(start))

        def follow(i: int, nodes: Tensor, here: Tensor) -> Tensor:
            nonlocal ranks
            pick = rows_of_nodes(picks[i], nodes).gather(-1, ranks.unsqueeze(-1)).squeeze(-1)
            ranks = torch.where(here, pick % k, ranks)
            return pick // k

        return self._trace_back(follow, k), torch.where(self.invalid, torch.nan, self._at_ends(found).t())

    def _trace_back(self, choose: Choose, n: int) -> Tensor:
        """Follow n walks from the ends to the source, level by level: (n, batch, levels), edges as in ``sample``."""
        node = self._ends().expand(n, -1)
        edges: list[Tensor] = []
        for i in range(len(self.graph.levels) - 1, -1, -1):
            level = self.graph.levels[i]
            here = (node >= level.first) & (node < level.first + len(level.edges))
            nodes = torch.where(here, node - level.first, 0)
            number = choose(i, nodes, here)
            edges.append(torch.where(here, tensor_on(node.device, level.edges)[nodes, number], -1))
            node = torch.where(here, tensor_on(node.device, level.sources)[nodes, number], node)
        return torch.stack(edges[::-1], -1)

    def _ends(self) -> Tensor:
        """The node that each walk starts from, (batch,)."""
        last = sum(v.shape[1] for v in self.values) - 1
        return torch.full_like(self.invalid, last, dtype=torch.long) if self.ends is None else self.ends

    def _at_ends(self, each: Sequence[Tensor]) -> Tensor:
        """Of values for the nodes of all levels, those at the end of each batch element, (batch, …)."""
        if self.ends is None:
            return each[-1][:, -1]
        found = torch.cat(list(each), 1)
        return found[torch.arange(len(found), device=found.device), self.ends]

    def _starts(self, i: int) -> Tensor:
        """The probability that a walk starts at each node of a level: 1 at the ends, else 0."""
        values = self.values[i]
        if self.ends is None:
            seed = torch.zeros_like(values)
            if i == len(self.values) - 1:
                seed = torch.cat([seed[:, :-1], torch.ones_like(values[:, -1:])], -1)
            return seed
        first = self.graph.levels[i - 1].first if i else 0
        nodes = torch.arange(first, first + values.shape[1], device=values.device)
        return (self.ends.unsqueeze(-1) == nodes).to(values.dtype)

    def _mark_invalid(self, results: Tensor) -> Tensor:
        """Results (batch, …) with NaN for invalid batch elements, also in derivatives unless their weight is 0."""
        invalid = self.invalid.reshape(-1, *(1,) * (results.dim() - 1))
        return _invalidate(results, invalid) + torch.where(invalid, torch.nan, 0.0).to(results.dtype)

    def _by_edge(self, parts: Sequence[Tensor], otherwise: float) -> Tensor:
        """Values of all choices in the order of the scores, (batch, scores); ``otherwise`` if a score has no edge."""
        found = torch.cat(list(parts), -1)
        found = torch.cat([found, torch.full_like(found[:, :1], otherwise)], -1)
        return found[:, tensor_on(found.device, self.graph.place)]


def walk(graph: Graph, scores: Tensor, omega: Regularizer, ends: Tensor | None = None) -> Walk:
    """Bellman's recursion with max_Ω in place of max: v = max_Ω over incoming edges of (v at the source + score)."""
    omega = simplified(omega)
    nothing = torch.full_like(scores[:, :1], -torch.inf)
    sorted_scores = torch.cat([scores, nothing], -1)[:, tensor_on(scores.device, graph.order)]
    invalid = ~(sorted_scores < torch.inf).all(-1)
    # NaN and +inf become 0, as their gradient of 0 would become NaN.
    sorted_scores = torch.nan_to_num(sorted_scores, 0.0, 0.0, -torch.inf)
    values, choices = [torch.zeros_like(scores[:, :1])], []
    parts = torch.split(sorted_scores, graph.widths, -1)
    for level, part in zip(graph.levels, parts, strict=True):
        choices.append(_added_at_sources(values, level) + part.reshape(len(part), *level.edges.shape))
        values.append(_max(omega, level, choices[-1]))
    return Walk(graph, omega, values, choices, ends, invalid)


def _max(omega: Regularizer, level: Level, z: Tensor) -> Tensor:
    """max_Ω over the choices of each node; −inf where there is none, with derivatives of 0 in the parameters of Ω."""

    def of_rows(rows: Tensor) -> Tensor:
        empty, filled = _fill_empty(rows)
        return torch.where(empty, -torch.inf, omega.max(filled).unsqueeze(-1))

    return _by_degree(omega, level, z, of_rows, lambda rows: rows, -torch.inf)[..., 0]


def _argmax(omega: Regularizer, level: Level, z: Tensor) -> Tensor:
    """argmax_Ω over the choices of each node; zeros where there is none."""

    def of_rows(rows: Tensor) -> Tensor:
        empty, filled = _fill_empty(rows)
        return torch.where(empty, 0.0, omega.argmax(filled))

    return _by_degree(omega, level, z, of_rows, lambda rows: (rows > -torch.inf).to(rows.dtype), 0.0)


def _log_argmax(omega: Regularizer, level: Level, z: Tensor) -> Tensor:
    """log(argmax_Ω) over the choices of each node; −inf where a choice has no probability."""

    def of_rows(rows: Tensor) -> Tensor:
        empty, filled = _fill_empty(rows)
        return torch.where(empty, -torch.inf, omega.log_argmax(filled))

    return _by_degree(omega, level, z, of_rows, lambda rows: torch.where(rows > -torch.inf, 0.0, rows), -torch.inf)


Rows = Callable[[Tensor], Tensor]


def _by_degree(omega: Regularizer, level: Level, z: Tensor, of_rows: Rows, of_one: Rows, padding: float) -> Tensor:
    """A function of the choices of each node, (batch, nodes, choices).

    An Ω without a rule that the library knows may depend on how many entries there are, as an entropy divided by that
    of the uniform distribution does. It gets rows without padding, and none with one entry, at which it is zero.

    Args:
        of_rows: the function, of rows with one number of choices.
        of_one: the same for nodes with one choice.
        padding: of the result.
    """
    if omega.canonical()[0].name is not None:
        return of_rows(z)
    found, order = [], []
    for degree in np.unique(level.degrees).tolist():
        nodes = np.flatnonzero(level.degrees == degree)
        rows = z[:, tensor_on(z.device, nodes), :degree]
        result = of_one(rows) if degree == 1 else of_rows(rows)
        found.append(pad(result, (0, z.shape[-1] - result.shape[-1]), value=padding))
        order.append(nodes)
    return torch.cat(found, 1)[:, tensor_on(z.device, np.argsort(np.concatenate(order)))]


def _fill_empty(z: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows have no choice, (…, 1), and z with zeros in these: no Ω need know such rows."""
    empty = (z == -torch.inf).all(-1, keepdim=True)
    return empty, torch.where(empty, 0.0, z)


def at_sources(each: Sequence[Tensor], level: Level) -> Tensor:
    """Of values for the nodes of earlier levels, those at the sources of a level's edges: (batch, *sources, …)."""
    found = torch.cat([each[r] for r in level.reads], 1) if len(level.reads) > 1 else each[level.reads[0]]
    return found[:, tensor_on(found.device, level.places)]


def _added_at_sources(each: Sequence[Tensor], level: Level) -> Tensor:
    """The same for each edge, (batch, nodes, choices): the sum of two for a hyperedge."""
    found = at_sources(each, level)
    if level.places.ndim == 2:
        return found
    return found.any(3) if found.dtype == torch.bool else found.sum(3)


def uniform(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Random numbers between 0 and 1, in double precision if the device has it."""
    device = like.device if generator is None else generator.device
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=device).to(like)


def rows_of_nodes(values: Tensor, nodes: Tensor) -> Tensor:
    """Of (batch, nodes, …), the rows of nodes (n, batch, …)."""
    element = torch.arange(len(values), device=values.device).reshape(-1, *(1,) * (nodes.dim() - 2))
    return values[element, nodes]
