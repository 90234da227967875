"""Any directed graph without cycles, given by its edges."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fenchel._checks import check_count, check_integers, check_mask
from fenchel._torch import concrete, without_transforms
from fenchel.dp.calculus import Inputs, stays_outside
from fenchel.dp.graph import Graph, Indices, Walk, remembered, tensor_on, walk
from fenchel.dp.program import DynamicProgram
from fenchel.regularizers.base import Regularizer


class Lattice(DynamicProgram):
    r"""Paths from node 0 to the last node of a directed graph without cycles.

    .. math:: v_0 = 0, \qquad v_j = {\max_\Omega}_{e = (i, j)} \, (v_i + \theta_e), \qquad \mathrm{value} = v_{N-1}

    One shape, a batch of scores. Nodes and edges that are on no path from source to sink do not matter.

    Args:
        sources: (E,), integers: the node that each edge comes from …
        targets: (E,), … and the one that it goes to, which has a higher number. Edges may be parallel.
        scores: (B, E).
        num_nodes: how many nodes there are: 0 is the source, ``num_nodes - 1`` the sink.
        omega: smooths every maximum; one of the simplex.

    A path is a set of edges: boolean, (…, B, E). ``walk`` is (B, E): the probability of each edge given its target, so
    that the edges into a node sum to 1; zero for edges on no path from source to sink.

    Example:
        >>> import torch
        >>> from fenchel import Gini
        >>> from fenchel.dp import Lattice
        >>> sources, targets = torch.tensor([0, 0, 1, 2, 1]), torch.tensor([1, 2, 3, 3, 2])
        >>> d = Lattice(sources, targets, torch.tensor([[1.0, 0.5, 0.0, 1.2, 0.3]]), num_nodes=4, omega=Gini())
        >>> d.value, d.marginals
        (tensor([2.5100]), tensor([[0.9000, 0.1000, 0.0000, 1.0000, 0.9000]]))
        >>> d.map()
        tensor([[ True, False, False,  True,  True]])

    References: Mensch & Blondel (2018), section 3.
    """

    _step = "lattice"

    def __init__(
        self, sources: Tensor, targets: Tensor, scores: Tensor, num_nodes: int, omega: Regularizer | None = None
    ) -> None:
        (scores,) = self._copied(omega, scores)
        super().__init__(scores, "scores", "(B, E)", omega)
        self.num_nodes = check_count(num_nodes, "num_nodes", 2)
        self._shape = _check_edges(sources, targets, scores.shape[1], self.num_nodes)

    def __repr__(self) -> str:
        batch, edges = self._inputs[0].shape
        return f"Lattice({batch} × {edges} edges between {self.num_nodes} nodes, omega={self.omega})"

    def _path(self, edges: Tensor, possible: Tensor) -> Tensor:
        size = self._inputs[0].shape[1]
        taken = torch.zeros((*edges.shape[:-1], size + 1), dtype=torch.bool, device=edges.device)
        taken = taken.scatter(-1, torch.where(edges < 0, size, edges), True)
        return taken[..., :-1] & possible.unsqueeze(-1)

    def _total(self, path: Tensor, values: Tensor) -> Tensor:
        return torch.where(path, values, 0.0).sum(-1)

    def _score(self, path: Tensor) -> Tensor:
        return self._total(path, self._inputs[0].double())

    def _check_paths(self, other: DynamicProgram) -> None:
        assert isinstance(other, Lattice)
        mine, theirs = self._shape, other._shape
        pairs = (mine.sources, theirs.sources), (mine.targets, theirs.targets)
        if self.num_nodes != other.num_nodes or not all(np.array_equal(*each) for each in pairs):
            raise ValueError(
                "other must have the same sources, targets and num_nodes: probabilities of paths through different "
                "graphs cannot be compared"
            )

    def _blank(self, path: Tensor) -> Tensor:
        return ~check_mask(path, "path", "on the path").any(-1)

    def _check_path(self, path: Tensor, name: str, blank: Tensor | None) -> None:
        check_mask(path, name, "on the path")
        shape = self._inputs[0].shape
        if path.shape[-2:] != shape:
            raise ValueError(f"{name} must have shape (…, {shape[0]}, {shape[1]}): edges; got {tuple(path.shape)}")
        if not concrete(path):
            return
        # One edge out of the source, and out of every other node as many as into it: that is a path.
        flow = torch.zeros((*path.shape[:-1], self.num_nodes), dtype=torch.long, device=path.device)
        flow = flow.index_add(-1, tensor_on(path.device, self._shape.sources), path.long())
        flow = flow.index_add(-1, tensor_on(path.device, self._shape.targets), -path.long())
        wanted = torch.zeros(self.num_nodes, dtype=torch.long, device=path.device)
        wanted[0], wanted[-1] = 1, -1
        wrong = (flow != wanted).any(-1)
        wrong = wrong if blank is None else wrong & ~blank
        if bool(wrong.any()):
            edges = path[wrong][0].nonzero().squeeze(-1).tolist()
            raise ValueError(f"{name} must hold the edges of one path from node 0 to the last, got edges {edges}")

    # -- the recursion -------------------------------------------------------------------------------

    def _forward(self, kernel: Any, inputs: Inputs, keep: bool) -> tuple[Tensor, Tensor]:
        value, walk = kernel.forward(self._sorted(inputs[0]), *self._incoming(), *self._numbers)
        return value, walk

    def _gradient(self, kernel: Any, inputs: Inputs, value: Tensor, walk: Tensor, weight: Tensor) -> Inputs:
        lost = value.isnan() & (weight != 0)
        return (self._unsorted(kernel.gradient(weight, value, walk, *self._incoming()), inputs[0], lost),)

    def _hessian_product(
        self, kernel: Any, inputs: Inputs, value: Tensor, walk: Tensor, weight: Tensor, directions: Inputs
    ) -> tuple[Tensor, Inputs]:
        direction = self._sorted(directions[0])
        change, found = kernel.hessian_product(weight, value, walk, *self._incoming(), direction, *self._numbers)
        return change, (self._unsorted(found, inputs[0], value.isnan()),)

    def _walk(self, inputs: Inputs, omega: Regularizer) -> Walk:
        return walk(self._shape.graph, inputs[0].double(), omega)

    def _collect(self, marginals: Tensor) -> Inputs:
        return (marginals,)

    def _incoming(self) -> tuple[Tensor, Tensor]:
        """The first edge into each node, and the source of each edge, for edges sorted by target."""
        return torch.from_numpy(self._shape.first), torch.from_numpy(self._shape.tails)

    def _sorted(self, scores: Tensor) -> Tensor:
        """Scores (B, E) as (edges on some path, B), sorted by target."""
        return scores[:, tensor_on(scores.device, self._shape.order)].t()

    def _unsorted(self, edges: Tensor, scores: Tensor, lost: Tensor) -> Tensor:
        """Values of sorted edges (edges on some path, B) as (B, E): other edges are 0, or NaN where ``lost``, (B,)."""
        found = torch.where(lost, torch.nan, 0.0).to(edges.dtype).unsqueeze(-1).repeat(1, scores.shape[1])
        found[:, tensor_on(edges.device, self._shape.order)] = edges.t()
        return found


class _Shape(NamedTuple):
    """A graph as it was given, and the part of it that is on some path, with edges sorted by target.

    Args:
        sources: (E,), the source of each edge as given.
        targets: (E,), its target.
        graph: the nodes and edges that are on some path.
        order: the indices of these edges, sorted by target.
        first: the position in ``order`` of the first edge into each node.
        tails: the source of each edge in ``order``; nodes that are on some path are numbered anew.
    """

    sources: Indices
    targets: Indices
    graph: Graph
    order: Indices
    first: Indices
    tails: Indices

    @property
    def nbytes(self) -> int:
        return self.graph.nbytes + 2 * sum(each.nbytes for each in (self.sources, self.targets, self.order))


@stays_outside
def _check_edges(sources: Tensor, targets: Tensor, edges: int, num_nodes: int) -> _Shape:
    """Check the sources and targets (E,) of a graph; return its shape."""
    for name, ends in (("sources", sources), ("targets", targets)):
        if check_integers(ends, name).shape != (edges,):
            raise ValueError(f"{name} must have shape ({edges},), one for each score, got {tuple(ends.shape)}")
    with without_transforms():  # torch.func would wrap these tensors
        tails, heads = (each.long().cpu().contiguous().numpy() for each in (sources, targets))
    return _shape(tails.tobytes(), heads.tobytes(), num_nodes)


@remembered()
def _shape(tail_bytes: bytes, head_bytes: bytes, num_nodes: int) -> _Shape:
    """The shape of a graph, from the bytes of its sources and targets, by which it is remembered."""
    tails, heads = (np.frombuffer(each, dtype=np.int64) for each in (tail_bytes, head_bytes))
    for name, ends in (("sources", tails), ("targets", heads)):
        if ((ends < 0) | (ends >= num_nodes)).any():
            wrong = ends[(ends < 0) | (ends >= num_nodes)][0]
            raise ValueError(f"{name} must be nodes in [0, {num_nodes - 1}], got {wrong}")
    if (tails >= heads).any():
        e = int(np.flatnonzero(tails >= heads)[0])
        raise ValueError(
            "targets must be greater than sources, edge by edge, so that there is no cycle: number the nodes in "
            f"topological order; edge {e} goes from node {tails[e]} to node {heads[e]}"
        )
    levels, useful = _levels(tails, heads, num_nodes)
    if not useful[-1]:
        raise ValueError(f"targets must lead to the sink: there is no path from node 0 to node {num_nodes - 1}")
    numbers = np.cumsum(useful) - 1
    order = np.flatnonzero(useful[tails] & useful[heads])
    order = order[np.argsort(heads[order], kind="stable")]
    new_tails, new_heads = numbers[tails[order]], numbers[heads[order]]
    graph = Graph(new_tails, new_heads, levels[useful], order, len(tails))
    first = np.searchsorted(new_heads, np.arange(useful.sum() + 1))
    return _Shape(np.array(tails), np.array(heads), graph, order, first, new_tails)


def _levels(tails: Indices, heads: Indices, num_nodes: int) -> tuple[Indices, np.ndarray[Any, np.dtype[np.bool_]]]:
    """The most edges on a path from the source to each node, (nodes,), and which nodes are on a path to the sink."""
    order = np.argsort(tails, kind="stable")
    level = [0] * num_nodes
    reached = [True] + [False] * (num_nodes - 1)
    for tail, head in zip(tails[order].tolist(), heads[order].tolist(), strict=True):
        if reached[tail]:
            level[head], reached[head] = max(level[head], level[tail] + 1), True
    leads_on = [False] * (num_nodes - 1) + [True]
    for tail, head in zip(tails[order[::-1]].tolist(), heads[order[::-1]].tolist(), strict=True):
        leads_on[tail] = leads_on[tail] or leads_on[head]
    return np.array(level), np.array(reached) & np.array(leads_on)
