"""Monotonic alignments of tokens to frames, none skipped: what speech synthesis and recognition search for."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel import kernels
from fenchel._checks import check_integers
from fenchel._torch import concrete
from fenchel.dp.calculus import Inputs, stays_outside
from fenchel.dp.graph import Graph, Walk, remembered, tensor_on, walk
from fenchel.dp.program import DynamicProgram, check_lengths, sum_over_edges
from fenchel.regularizers.base import Regularizer


class Monotonic(DynamicProgram):
    r"""Alignments of N tokens to T frames: every frame has one token, tokens are in order, and none is skipped.

    .. math:: v_{i,t} = s_{i,t} + {\max_\Omega} (v_{i-1,t-1}, v_{i,t-1}), \qquad \mathrm{value} = v_{N,T}

    The first frame belongs to the first token, the last frame to the last, and each frame to the token of the frame
    before or to the next one. With ``Shannon()`` and log-probabilities as scores, ``value`` is the log-likelihood of
    the frames; ``map()`` is the search that Glow-TTS calls monotonic alignment search. With fewer frames than tokens
    there is no alignment: ``value`` is −inf, marginals are 0, paths −1. O(N T) time.

    Args:
        scores: (B, N, T), of each token at each frame; −inf forbids a pair. Scores that no alignment can use, as those
            of the second token at the first frame, do not matter.
        lengths: (B, 2), integers: how many tokens and how many frames there are; all if None.
        omega: smooths every maximum; one of the simplex.

    A path is a tensor of tokens, (…, B, T), −1 after the end. ``walk`` is (B, N, T, 2): the probabilities that the
    frame before has the same token, and the token before.

    Example:
        >>> import torch
        >>> from fenchel import Gini
        >>> from fenchel.dp import Monotonic
        >>> scores = torch.tensor([[[1.0, 0.8, 0.0, 0.0], [0.0, 0.6, 1.0, 0.0], [0.0, 0.0, 0.4, 1.0]]])
        >>> d = Monotonic(scores, omega=Gini())
        >>> d.map(), d.durations(hard=True)
        (tensor([[0, 0, 1, 2]]), tensor([[2, 1, 1]]))
        >>> d.marginals
        tensor([[[1.0000, 0.5880, 0.0000, 0.0000],
                 [0.0000, 0.4120, 0.9800, 0.0000],
                 [0.0000, 0.0000, 0.0200, 1.0000]]])
        >>> d.durations()
        tensor([[1.5880, 1.3920, 1.0200]])

    References: Kim et al. (2020), Glow-TTS, appendix A; Mensch & Blondel (2018).
    """

    _step = "monotonic"

    def __init__(self, scores: Tensor, lengths: Tensor | None = None, omega: Regularizer | None = None) -> None:
        scores, lengths = self._copied(omega, scores, lengths)
        super().__init__(scores, "scores", "(B, N, T)", omega)
        self.lengths = check_lengths(lengths, scores, "scores", scores.shape[1:])

    def durations(self, hard: bool = False) -> Tensor:
        """How many frames each token has, (B, N).

        Args:
            hard: True counts the frames of ``map()``, as integers. False takes the mean over all alignments, the sums
                of the marginals, which are differentiable.

        Example:
            >>> import torch, fenchel
            >>> d = fenchel.dp.Monotonic(torch.zeros(1, 2, 4))
            >>> d.durations(), d.durations(hard=True)
            (tensor([[2., 2.]]), tensor([[1, 3]]))
        """
        if not hard:
            return self.marginals.sum(-1)
        path = self.map()
        tokens = torch.arange(self._inputs[0].shape[1], device=path.device)
        return (path.unsqueeze(1) == tokens.unsqueeze(-1)).sum(-1)

    @stays_outside
    @torch.no_grad()
    def map(self) -> Tensor:
        scores = self._inputs[0]
        kernel = kernels.find(self._step, "tsallis", (math.inf,), scores) if len(scores) else None
        return super().map() if kernel is None else kernel.best_paths(scores, self.lengths).to(self._device)

    def __repr__(self) -> str:
        batch, tokens, frames = self._inputs[0].shape
        return f"Monotonic({batch} alignments of up to {tokens} tokens to {frames} frames, omega={self.omega})"

    def _by_step(self, edges: Tensor) -> Tensor:
        return edges.reshape(-1, *self._inputs[0].shape[1:], 2)

    def _path(self, edges: Tensor, possible: Tensor) -> Tensor:
        frames = self._inputs[0].shape[2]
        tokens = torch.div(edges, 2 * frames, rounding_mode="floor")
        return torch.where((edges < 0) | ~possible.unsqueeze(-1), -1, tokens)

    def _total(self, path: Tensor, values: Tensor) -> Tensor:
        return sum_over_edges(values, self._edges(path))

    def _score(self, path: Tensor) -> Tensor:
        cells = torch.div(self._edges(path), 2, rounding_mode="floor")
        score = sum_over_edges(_masked(self._inputs[0].double(), self.lengths).flatten(1), cells)
        return torch.where(self._possible, score, -torch.inf)

    def _edges(self, path: Tensor) -> Tensor:
        """The edge into each cell of paths (…, B, T); −1 after the end."""
        frames = self._inputs[0].shape[2]
        path = path.long().clamp_min(0)
        advance = torch.diff(path, prepend=path[..., :1]).clamp(0, 1)
        edges = 2 * (path * frames + torch.arange(frames, device=path.device)) + advance
        return torch.where(self._inside, edges, -1)

    @property
    def _possible(self) -> Tensor:
        """Which batch elements have at least as many frames as tokens, (B,)."""
        return self.lengths[:, 0] <= self.lengths[:, 1]

    @property
    def _inside(self) -> Tensor:
        """Which frames are before the end, (B, T)."""
        return torch.arange(self._inputs[0].shape[2], device=self.lengths.device) < self.lengths[:, 1:]

    def _blank(self, path: Tensor) -> Tensor:
        return (check_integers(path, "path") < 0).all(-1)

    def _check_path(self, path: Tensor, name: str, blank: Tensor | None) -> None:
        path = check_integers(path, name)
        batch, _, frames = self._inputs[0].shape
        if path.shape[-2:] != (batch, frames):
            raise ValueError(f"{name} must have shape (…, {batch}, {frames}): tokens; got {tuple(path.shape)}")
        if not concrete(path):
            return
        step = path.diff()
        good = (((step == 0) | (step == 1)) | ~self._inside[:, 1:]).all(-1) & (path[..., 0] == 0)
        last = path.gather(-1, (self.lengths[:, 1:] - 1).expand(*path.shape[:-1], 1)).squeeze(-1)
        good = (good & (last == self.lengths[:, 0] - 1)) | ~self._possible  # there no path is right, nor wrong
        good = good if blank is None else good | blank
        if not bool(good.all()):
            raise ValueError(
                f"{name} must begin with token 0 and end with the last one, by steps of 0 or 1 from frame to frame; "
                f"got {path[~good][0].tolist()}"
            )

    # -- the recursion -------------------------------------------------------------------------------

    def _gradient(self, kernel: Any, inputs: Inputs, value: Tensor, walk: Tensor, weight: Tensor) -> Inputs:
        return (kernel.gradient(weight, value, walk, self.lengths, inputs[0]),)

    def _hessian_product(
        self, kernel: Any, inputs: Inputs, value: Tensor, walk: Tensor, weight: Tensor, directions: Inputs
    ) -> tuple[Tensor, Inputs]:
        given = (weight, value, walk, self.lengths, directions[0])
        change, found = kernel.hessian_product(*given, *self._numbers)
        return change, (found,)

    def _walk(self, inputs: Inputs, omega: Regularizer) -> Walk:
        scores = _masked(inputs[0].double(), self.lengths)
        frames = scores.shape[2]
        last = (self.lengths[:, 0] - 1) * frames + self.lengths[:, 1] - 1
        ends = tensor_on(scores.device, self._graph.ranks)[1 + last]
        return walk(self._graph, scores.flatten(1).repeat_interleave(2, -1), omega, ends)

    @cached_property
    def _graph(self) -> Graph:
        return _graph(*self._inputs[0].shape[1:])

    def _collect(self, marginals: Tensor) -> Inputs:
        return (marginals.reshape(-1, *self._inputs[0].shape[1:], 2).sum(-1),)


@remembered()
def _graph(tokens: int, frames: int) -> Graph:
    """The graph of a table. Nodes: the source, then the cells [token, frame].

    Edges of a cell: from the same token, from the one before. All cells of the first frame have one from the source, as
    every node must have an edge.
    """
    cells = np.arange(tokens * frames).reshape(tokens, frames)
    same, before = np.full((2, tokens, frames), -1)
    same[:, 0] = 0
    same[:, 1:], before[1:, 1:] = cells[:, :-1] + 1, cells[:-1, :-1] + 1
    sources = np.stack([same, before], -1).reshape(-1)
    edges = np.flatnonzero(sources >= 0)
    levels = np.concatenate([[0], np.broadcast_to(1 + np.arange(frames), (tokens, frames)).reshape(-1)])
    return Graph(sources[edges], 1 + edges // 2, levels, edges, len(sources))


def _masked(scores: Tensor, lengths: Tensor) -> Tensor:
    """Scores (B, N, T) with −inf in cells that are on no alignment."""
    token = torch.arange(scores.shape[1], device=scores.device)[:, None]
    frame = torch.arange(scores.shape[2], device=scores.device)
    n, m = lengths[:, 0, None, None], lengths[:, 1, None, None]
    usable = (token <= frame) & (token < n) & (frame < m) & (token >= n - m + frame) & (n <= m)
    return torch.where(usable, scores, -torch.inf)
