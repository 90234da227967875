"""Constituency trees: binary bracketings of a sentence, scored by span; the CKY recursion with max_Ω."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fenchel._checks import check_mask
from fenchel._torch import concrete
from fenchel.dp.calculus import Inputs
from fenchel.dp.forest import forest
from fenchel.dp.graph import Graph, Indices, Walk, remembered, tensor_on
from fenchel.dp.program import DynamicProgram, check_lengths
from fenchel.regularizers.base import Regularizer


class Constituency(DynamicProgram):
    r"""Binary trees over the words of sentences, scored by span: the inside algorithm for Shannon's Ω, CKY for Hard.

    .. math:: v_{i,j} = {\max_\Omega}_{k,\,l} \, (s_{i,j,l} + v_{i,k} + v_{k+1,j}), \qquad
              v_{i,i} = {\max_\Omega}_l \, s_{i,i,l}, \qquad \mathrm{value} = v_{1,N}

    A tree over N words has 2N − 1 spans: all words, the whole sentence, and each span of several words is split into
    two. One maximum per span is smoothed, over all its split points i ≤ k < j and labels l together. ``value`` is the
    log-partition function for ``Shannon()``; with ``Gini()`` most trees have probability zero. ``marginals`` are
    the probabilities that spans, with their labels, are in the tree. O(N³ L) time.

    Args:
        scores: (B, N, N), the score of the span from word i to word j, both included, at [i, j]; or (B, N, N, L), one
            score per label. Entries with i > j do not matter.
        lengths: (B,), integers from 1 to N, the number of words; what stands behind does not matter. N if None.
        omega: smooths every maximum; one of the simplex.

    A path is a tree: boolean, (…, B, N, N) or (…, B, N, N, L), True at its spans. ``walk`` is (B, N, N, N), or with
    labels (B, N, N, N, L): at [i, j, k] the probability that span i … j, if it is in the tree, is split behind word k
    (for words, k = i). :func:`to_brackets` and :func:`from_brackets` convert trees to strings and back.

    Example:
        >>> import torch
        >>> from fenchel import Gini
        >>> from fenchel.dp import Constituency, to_brackets
        >>> scores = torch.zeros(1, 4, 4)
        >>> scores[0, 0, 1], scores[0, 2, 3], scores[0, 1, 2] = 1.0, 0.8, 0.5
        >>> d = Constituency(scores, omega=Gini())
        >>> to_brackets(d.map()[0], "the cat is here".split())
        '((the cat) (is here))'
        >>> d.marginals[0, 0]
        tensor([1.0000, 0.9672, 0.1312, 1.0000])
        >>> d.value, d.top(3).probs
        (tensor([1.8172]), tensor([[0.8687, 0.0984, 0.0328]]))

    References: Baker (1979); Mensch & Blondel (2018).
    """

    _step = "constituency"

    def __init__(self, scores: Tensor, lengths: Tensor | None = None, omega: Regularizer | None = None) -> None:
        (scores,) = self._copied(omega, scores)
        labelled = isinstance(scores, Tensor) and scores.dim() == 4
        super().__init__(scores, "scores", "(B, N, N, L)" if labelled else "(B, N, N)", omega)
        if scores.shape[1] != scores.shape[2]:
            raise ValueError(f"scores must have shape (B, N, N) or (B, N, N, L), got {tuple(scores.shape)}")
        self.lengths = check_lengths(lengths, scores, "scores", scores.shape[1:2])
        self._labelled = labelled

    def __repr__(self) -> str:
        batch, words, _, labels = self._spans(self._inputs[0]).shape
        shown = f"{labels} labels, " if self._labelled else ""
        return f"Constituency({batch} sentences of up to {words} words, {shown}omega={self.omega})"

    def _spans(self, each: Tensor) -> Tensor:
        """Scores, or a path, as (…, N, N, L)."""
        return each if self._labelled else each.unsqueeze(-1)

    def _by_step(self, edges: Tensor) -> Tensor:
        shape = self._shape
        words, labels = shape.words, shape.labels
        found = torch.zeros(len(edges), words**3 * labels, dtype=edges.dtype, device=edges.device)
        invalid = torch.where(edges[:, :1].detach().isnan(), torch.nan, 0.0).to(edges.dtype)
        found = found.index_copy(1, tensor_on(edges.device, shape.splits), edges) + invalid
        found = found.reshape(len(edges), words, words, words, labels)
        inside = torch.arange(words, device=edges.device) < self.lengths.unsqueeze(-1)
        found = torch.where(inside[:, None, :, None, None], found, 0.0 * found.detach())
        return found if self._labelled else found.squeeze(-1)

    def _path(self, edges: Tensor, possible: Tensor) -> Tensor:
        shape = self._shape
        size = shape.words**2 * shape.labels
        spans = torch.where(edges < 0, size, tensor_on(edges.device, shape.spans)[edges.clamp_min(0)])
        taken = torch.zeros((*edges.shape[:-1], size + 1), dtype=torch.bool, device=edges.device)
        taken = taken.scatter(-1, spans, True)[..., :-1] & possible.unsqueeze(-1)
        return taken.reshape(*edges.shape[:-1], *self._inputs[0].shape[1:])

    def _total(self, path: Tensor, values: Tensor) -> Tensor:
        on = self._spans(path)
        shape = self._shape
        some = torch.nn.functional.pad(on.any(-1).flatten(-2), (1, 0), value=True)  # the source of the graph is first
        left, right = tensor_on(path.device, shape.children).unbind(-1)
        chosen = on.flatten(-3)[..., tensor_on(path.device, shape.spans)] & some[..., left] & some[..., right]
        return torch.where(chosen, values, 0.0).sum(-1)

    def _score(self, path: Tensor) -> Tensor:
        dims = tuple(range(-(self._inputs[0].dim() - 1), 0))
        return torch.where(path, self._inputs[0].double(), 0.0).sum(dims)

    def _blank(self, path: Tensor) -> Tensor:
        return ~self._spans(check_mask(path, "path", "in the tree")).flatten(-3).any(-1)

    def _check_path(self, path: Tensor, name: str, blank: Tensor | None) -> None:
        check_mask(path, name, "in the tree")
        shape = tuple(self._inputs[0].shape)
        if path.shape[-len(shape) :] != shape:
            raise ValueError(f"{name} must have shape (…, {str(shape)[1:]}: spans; got {tuple(path.shape)}")
        if not concrete(path):
            return
        good = self._is_tree(self._spans(path))
        good = good if blank is None else good | blank
        if not bool(good.all()):
            spans = self._spans(path).any(-1)[~good][0].nonzero().tolist()
            raise ValueError(
                f"{name} must be a binary tree: the whole sentence, all its words, and two parts of each span of "
                f"several words, one label each; got spans {spans}"
            )

    def _is_tree(self, path: Tensor) -> Tensor:
        """Whether spans (…, B, N, N, L) are those of a tree, (…, B).

        The whole sentence, and two parts of every span of several words, contain a tree; it has 2N − 1 spans.
        """
        on = path.any(-1)
        words = self.lengths.to(path.device)
        root = on[..., 0, :].gather(-1, (words - 1).expand(on.shape[:-2]).unsqueeze(-1)).squeeze(-1)
        # Split points k of span i … j: (i, k) and (k + 1, j) are both there.
        halves = on[..., :-1].unsqueeze(-2) & on[..., 1:, :].transpose(-1, -2).unsqueeze(-3)  # [i, j, k]
        first = torch.arange(on.shape[-1], device=on.device)
        between = (first[:-1] >= first[:, None, None]) & (first[:-1] < first[:, None])
        split = (halves & between).any(-1) | (first[:, None] == first)
        count = path.flatten(-3).sum(-1)
        return root & (split | ~on).flatten(-2).all(-1) & (count == 2 * words - 1)

    # -- the recursion -------------------------------------------------------------------------------

    @property
    def _shape(self) -> _Shape:
        scores = self._inputs[0]
        return _shape(scores.shape[1], scores.shape[3] if self._labelled else 1)

    def _gradient(self, kernel: Any, inputs: Inputs, value: Tensor, walk: Any, weight: Tensor) -> Inputs:
        return (kernel.gradient(weight, walk),)

    def _hessian_product(
        self, kernel: Any, inputs: Inputs, value: Tensor, walk: Any, weight: Tensor, directions: Inputs
    ) -> tuple[Tensor, Inputs]:
        given = weight, value, inputs[0], self.lengths, directions[0]
        change, found = kernel.hessian_product(*given, *self._numbers)
        return change, (found,)

    def _walk(self, inputs: Inputs, omega: Regularizer) -> Walk:
        scores = self._spans(inputs[0].double())
        inside = torch.arange(scores.shape[2], device=scores.device) < self.lengths.unsqueeze(-1)
        scores = torch.where(inside[:, None, :, None], scores, -torch.inf).flatten(1)
        shape = self._shape
        ends = tensor_on(scores.device, shape.graph.ranks)[self.lengths]  # nodes: the source, then [i, j] in this order
        return forest(shape.graph, scores[:, tensor_on(scores.device, shape.spans)], omega, ends)

    def _collect(self, marginals: Tensor) -> Inputs:
        shape = self._shape
        found = torch.zeros(
            len(marginals), shape.words**2 * shape.labels, dtype=marginals.dtype, device=marginals.device
        )
        found = found.index_add(1, tensor_on(marginals.device, shape.spans), marginals)
        invalid = torch.where(marginals[:, :1].isnan(), torch.nan, 0.0).to(marginals.dtype)
        return ((found + invalid).reshape(self._inputs[0].shape),)


class _Shape(NamedTuple):
    """The hypergraph of trees over N words with L labels. Nodes: the source, then spans [i, j], i > j without edges.

    Args:
        words: N.
        labels: L.
        graph: its nodes and hyperedges, without those spans that are none.
        spans: (E,), the score of each hyperedge, in (N, N, L).
        children: (E, 2), the two parts: 0 for none, else 1 + their position in (N, N).
        splits: (E,), the position of each hyperedge in (N, N, N, L).
    """

    words: int
    labels: int
    graph: Graph
    spans: Indices
    children: Indices
    splits: Indices

    @property
    def nbytes(self) -> int:
        return self.graph.nbytes + sum(each.nbytes for each in (self.spans, self.children, self.splits))


@remembered()
def _shape(words: int, labels: int) -> _Shape:
    """The hypergraph, by number of words and labels; its hyperedges are sorted by width, first word, split, label."""
    index = np.arange(words)
    i, j, k = (each.reshape(-1) for each in np.meshgrid(index, index, index, indexing="ij"))
    some = ((i <= k) & (k < j)) | ((i == j) & (k == i))
    order = np.flatnonzero(some)
    order = order[np.lexsort((k[order], i[order], (j - i)[order]))]
    i, j, k, label = (np.repeat(each, labels) for each in (i[order], j[order], k[order], 0 * order))
    label = np.tile(np.arange(labels), len(order))
    leaf = i == j
    children = np.stack([np.where(leaf, 0, 1 + i * words + k), np.where(leaf, 0, 1 + (k + 1) * words + j)], -1)
    # Spans in the order of their nodes in the graph: by first word, and those of i > j left out.
    number = np.zeros(words**2 + 1, dtype=np.int64)
    first, last = np.triu_indices(words)
    number[1 + first * words + last] = 1 + np.arange(len(first))
    levels = np.concatenate([[0], 1 + last - first])
    graph = Graph(number[children], number[1 + i * words + j], levels)
    spans = (i * words + j) * labels + label
    return _Shape(words, labels, graph, spans, children, ((i * words + j) * words + k) * labels + label)
