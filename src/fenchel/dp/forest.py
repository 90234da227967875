"""Trees in a hypergraph: the smoothed recursion's random walk where every edge comes from two nodes.

The graph is as in ``graph.py``, with sources (E, 2): the value of a node is max_Ω over its incoming hyperedges of the
score plus the values of both sources. A walk that arrives at a node chooses one hyperedge and goes on from both
sources, so that it ends as a tree, one hyperedge per node that it visits. The source of the graph, of value 0, stands
for "no node": a hyperedge (a, source) is an ordinary edge, and (source, source) belongs to a leaf. A tree program
defines its nodes and hyperedges, gives one score per hyperedge, and gets everything else from here;
:mod:`fenchel.dp.constituency` is an example.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fenchel.dp.graph import Choose, Graph, Walk, at_sources, rows_of_nodes, tensor_on, uniform, walk
from fenchel.regularizers.base import Regularizer


class Forest(Walk):
    """The random walk over trees. Trees are (n, batch, nodes): the hyperedge into each node, −1 if it is not visited.

    Expectations, probabilities and marginals are those of :class:`~fenchel.dp.graph.Walk`.
    """

    def _draw(self, n: int, generator: torch.Generator | None) -> Sequence[Tensor]:
        """Random numbers for each choice of n trees: (n, batch, nodes) per level."""
        sizes = [len(level.edges) for level in self.graph.levels]
        return list(torch.split(uniform((n, len(self.invalid), sum(sizes)), self.values[0], generator), sizes, -1))

    @torch.no_grad()
    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """The k most probable trees and their log-probabilities, (k, batch).

        The r-th best tree of an edge is made of the a-th best of one source and the b-th best of the other, where
        (a + 1)(b + 1) ≤ r + 1: all pairs with a smaller rank on both sides come before it.
        """
        start = torch.full_like(self.values[0], -torch.inf).unsqueeze(-1).repeat(1, 1, k)
        start[..., 0] = 0.0
        pairs = [(a, b) for a in range(k) for b in range(k) if (a + 1) * (b + 1) <= k]
        left, right = torch.tensor(pairs, device=start.device).unbind(-1)
        found, picks = [start], []
        for level, each in zip(self.graph.levels, self.log_choices(), strict=True):
            first, second = at_sources(found, level).unbind(3)  # (batch, nodes, choices, k)
            ways = (first[..., left] + second[..., right] + each.unsqueeze(-1)).flatten(2)
            missing = max(k - ways.shape[-1], 0)
            ways = torch.nn.functional.pad(ways, (0, missing), value=-torch.inf)
            logs, pick = ways.sort(dim=-1, descending=True, stable=True)
            found.append(logs[..., :k])
            picks.append(torch.where(logs > -torch.inf, pick, 0)[..., :k])
        ranks = torch.arange(k, device=start.device)[:, None, None].repeat(1, *self._all_nodes().shape)

        def follow(i: int, nodes: Tensor, here: Tensor) -> Tensor:
            level = self.graph.levels[i]
            own = ranks[..., level.first : level.first + len(level.edges)]
            pick = rows_of_nodes(picks[i], nodes).gather(-1, own.unsqueeze(-1)).squeeze(-1)
            number, pair = pick // len(left), pick % len(left)
            sources = self._sources(i, nodes, number, here)
            for child, rank in zip(sources.unbind(-1), (left[pair], right[pair]), strict=True):
                ranks.scatter_(-1, child, rank)
            return number

        return self._trace_back(follow, k), torch.where(self.invalid, torch.nan, self._at_ends(found).t())

    def _trace_back(self, choose: Choose, n: int) -> Tensor:
        """Follow n trees from their roots to the leaves, level by level: (n, batch, nodes)."""
        visited = self._all_nodes().repeat(n, 1, 1)
        visited.scatter_(-1, self._ends().expand(n, -1).unsqueeze(-1), True)
        edges = []
        for i in range(len(self.graph.levels) - 1, -1, -1):
            level = self.graph.levels[i]
            here = visited[..., level.first : level.first + len(level.edges)]
            nodes = torch.arange(len(level.edges), device=here.device).expand(here.shape)
            number = choose(i, nodes, here)
            visited.scatter_(-1, self._sources(i, nodes, number, here).flatten(-2), True)
            edges.append(torch.where(here, tensor_on(here.device, level.edges)[nodes, number], -1))
        return torch.cat(edges[::-1], -1)

    def _sources(self, i: int, nodes: Tensor, number: Tensor, here: Tensor) -> Tensor:
        """The two sources of chosen hyperedges, (n, batch, nodes, 2); the graph's source where not ``here``."""
        sources = tensor_on(nodes.device, self.graph.levels[i].sources)[nodes, number]
        return torch.where(here.unsqueeze(-1), sources, 0)

    def _all_nodes(self) -> Tensor:
        """False for each node, (batch, nodes)."""
        total = sum(each.shape[1] for each in self.values)
        return torch.zeros((len(self.invalid), total), dtype=torch.bool, device=self.invalid.device)


def forest(graph: Graph, scores: Tensor, omega: Regularizer, ends: Tensor | None = None) -> Forest:
    """The recursion over hyperedges, v = max_Ω over (v at both sources + score), for scores (batch, hyperedges)."""
    found = walk(graph, scores, omega, ends)
    return Forest(found.graph, found.omega, found.values, found.choices, found.ends, found.invalid)
