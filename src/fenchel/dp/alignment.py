"""Alignments of two series: dynamic time warping with a smoothed minimum."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel._checks import check_count, check_integers
from fenchel._torch import concrete
from fenchel.dp.calculus import Inputs
from fenchel.dp.graph import Graph, Walk, remembered, tensor_on, walk
from fenchel.dp.program import DynamicProgram, check_lengths, sum_over_edges
from fenchel.regularizers.base import Regularizer


class Alignment(DynamicProgram):
    r"""Monotonic alignments of two series at least cost: soft-DTW for Shannon's Ω.

    .. math:: r_{i,j} = c_{i,j} + {\min_\Omega} (r_{i-1,j-1}, r_{i-1,j}, r_{i,j-1}), \qquad
              {\min}_\Omega(x) = -{\max}_\Omega(-x), \qquad \mathrm{value} = r_{N,M}

    A path goes from the first cell to the last one; every step moves on by one in the first series, in the second, or
    in both. ``value`` is the smoothed minimum of its cost, ``marginals`` the expected alignment; with ``Gini()`` most
    cells are in no alignment of positive probability. ``loss`` is the target's cost − value. O(N M) time.

    Args:
        costs: (B, N, M), what it costs to align each pair; +inf forbids a cell.
        lengths: (B, 2), integers: how much of the first series and of the second there is; all if None.
        omega: smooths every minimum; one of the simplex.
        band: Sakoe and Chiba's: allow only cells within ``band`` steps of the diagonal, |i − j| ≤ band for series of
            one length. In general the diagonal is the straight line between the corners, and cells are allowed up to
            band + ½ steps of the shorter series from it; so there always is a path. None: all cells.

    A path is a tensor of cells, (…, B, L, 2), −1 after the end. ``walk`` is (B, N, M, 3): the probabilities that the
    path comes to a cell diagonally, from above and from the left.

    Example:
        >>> import torch
        >>> from fenchel import Gini
        >>> from fenchel.dp import Alignment
        >>> x, y = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 1.2, 1.3, 2.1])
        >>> d = Alignment((x[:, None] - y).square().unsqueeze(0), omega=Gini())
        >>> d.marginals
        tensor([[[1.0000, 0.0000, 0.0000, 0.0000],
                 [0.0000, 1.0000, 0.7801, 0.0000],
                 [0.0000, 0.0000, 0.4035, 1.0000]]])
        >>> d.map()[0].tolist()
        [[0, 0], [1, 1], [1, 2], [2, 3], [-1, -1], [-1, -1]]

    References: Sakoe & Chiba (1978); Cuturi & Blondel (2017); Mensch & Blondel (2018), section 4.2.
    """

    _step = "alignment"

    def __init__(
        self,
        costs: Tensor,
        lengths: Tensor | None = None,
        omega: Regularizer | None = None,
        band: int | None = None,
    ) -> None:
        costs, lengths = self._copied(omega, costs, lengths)
        super().__init__(costs, "costs", "(B, N, M)", omega)
        self.lengths = check_lengths(lengths, costs, "costs", costs.shape[1:])
        self.band = None if band is None else check_count(band, "band", 0)

    def __repr__(self) -> str:
        batch, rows, columns = self._inputs[0].shape
        band = "" if self.band is None else f"band={self.band}, "
        return f"Alignment({batch} tables of up to {rows} × {columns} cells, {band}omega={self.omega})"

    def _signed(self, maximum: Tensor) -> Tensor:
        return 0.0 - maximum  # and no −0

    def _ordered(self, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        return self._signed(upper), self._signed(lower)

    def _by_step(self, edges: Tensor) -> Tensor:
        return edges.reshape(-1, *self._inputs[0].shape[1:], 3)

    def _path(self, edges: Tensor, possible: Tensor) -> Tensor:
        columns = self._inputs[0].shape[2]
        order = (edges < 0).int().sort(dim=-1, stable=True).indices  # steps across skip a level
        cells = edges.gather(-1, order)
        cells = torch.where((cells < 0) | ~possible.unsqueeze(-1), -1, torch.div(cells, 3, rounding_mode="floor"))
        row = torch.where(cells < 0, -1, torch.div(cells, columns, rounding_mode="floor"))
        return torch.stack([row, torch.where(cells < 0, -1, cells % columns)], -1)

    def _total(self, path: Tensor, values: Tensor) -> Tensor:
        return sum_over_edges(values, self._edges(path.long()))

    def _score(self, path: Tensor) -> Tensor:
        edges = self._edges(path.long())
        costs = _masked(self._inputs[0].double(), self.lengths, self.band)
        return sum_over_edges(-costs.flatten(1), torch.div(edges, 3, rounding_mode="floor"))

    def _edges(self, path: Tensor) -> Tensor:
        """The edge into each cell of a path (…, B, L, 2): (…, B, L), −1 after the end."""
        row, column = path.unbind(-1)
        down = torch.diff(row, prepend=row[..., :1] - 1)
        right = torch.diff(column, prepend=column[..., :1] - 1)
        way = torch.where(down == 0, 2, torch.where(right == 0, 1, 0))
        cell = row * self._inputs[0].shape[2] + column
        return torch.where(row < 0, -1, 3 * cell + way)

    def _blank(self, path: Tensor) -> Tensor:
        return (check_integers(path, "path") < 0).all(-1).all(-1)

    def _check_path(self, path: Tensor, name: str, blank: Tensor | None) -> None:
        path = check_integers(path, name)
        batch = len(self.lengths)
        if path.dim() < 3 or path.shape[-3] != batch or path.shape[-1] != 2 or path.shape[-2] == 0:
            raise ValueError(f"{name} must have shape (…, {batch}, L, 2): cells; got {tuple(path.shape)}")
        if not concrete(path):
            return
        row, column = path.unbind(-1)
        there = row >= 0
        down, right = row.diff(), column.diff()
        steps = (down >= 0) & (down <= 1) & (right >= 0) & (right <= 1) & (down + right > 0)
        last = there.sum(-1, keepdim=True) - 1
        ends = [each.gather(-1, last.clamp_min(0)).squeeze(-1) for each in (row, column)]
        right_ends = (row[..., 0] == 0) & (column[..., 0] == 0) & (torch.stack(ends, -1) == self.lengths - 1).all(-1)
        closed = ((~there) <= (torch.arange(row.shape[-1], device=row.device) > last)).all(-1)
        good = right_ends & closed & (steps | ~there[..., 1:]).all(-1)
        good = good if blank is None else good | blank
        if not bool(good.all()):
            raise ValueError(
                f"{name} must go from cell (0, 0) to the last one, by steps of (1, 1), (1, 0) or (0, 1), with −1 after "
                f"the end; got {path[~good][0].tolist()}"
            )

    # -- the recursion -------------------------------------------------------------------------------

    def _forward(self, kernel: Any, inputs: Inputs, keep: bool) -> tuple[Tensor, Tensor]:
        # Kernels keep to the lengths, but do not know of bands.
        costs = inputs[0] if self.band is None else _masked(inputs[0].detach(), self.lengths, self.band)
        return super()._forward(kernel, (costs,), keep)

    def _gradient(self, kernel: Any, inputs: Inputs, value: Tensor, walk: Tensor, weight: Tensor) -> Inputs:
        return (kernel.gradient(-weight, value, walk, self.lengths, inputs[0].shape),)

    def _hessian_product(
        self, kernel: Any, inputs: Inputs, value: Tensor, walk: Tensor, weight: Tensor, directions: Inputs
    ) -> tuple[Tensor, Inputs]:
        change, found = kernel.hessian_product(-weight, value, walk, self.lengths, -directions[0], *self._numbers)
        return change, (found,)

    def _walk(self, inputs: Inputs, omega: Regularizer) -> Walk:
        costs = _masked(inputs[0].double(), self.lengths, self.band)
        last = (self.lengths[:, 0] - 1) * costs.shape[2] + self.lengths[:, 1] - 1
        ends = tensor_on(costs.device, self._graph.ranks)[1 + last]
        return walk(self._graph, (-costs).flatten(1).repeat_interleave(3, -1), omega, ends)

    @cached_property
    def _graph(self) -> Graph:
        return _graph(*self._inputs[0].shape[1:])

    def _collect(self, marginals: Tensor) -> Inputs:
        return (-marginals.reshape(-1, *self._inputs[0].shape[1:], 3).sum(-1),)


@remembered()
def _graph(rows: int, columns: int) -> Graph:
    """The graph of a table. Nodes: the source, then the cells. Edges of a cell: diagonal, from above, from the left."""
    cells = np.arange(rows * columns).reshape(rows, columns)
    across, above, left = np.full((3, rows, columns), -1)
    across[0, 0] = 0
    across[1:, 1:], above[1:], left[:, 1:] = cells[:-1, :-1] + 1, cells[:-1] + 1, cells[:, :-1] + 1
    sources = np.stack([across, above, left], -1).reshape(-1)
    edges = np.flatnonzero(sources >= 0)
    levels = np.concatenate([[0], (1 + np.arange(rows)[:, None] + np.arange(columns)).reshape(-1)])
    return Graph(sources[edges], 1 + edges // 3, levels, edges, len(sources))


def _masked(costs: Tensor, lengths: Tensor, band: int | None) -> Tensor:
    """Costs (B, N, M) with +inf in cells outside the lengths of a table or outside its band."""
    row = torch.arange(costs.shape[1], device=costs.device)[:, None]
    column = torch.arange(costs.shape[2], device=costs.device)
    n, m = lengths[:, 0, None, None], lengths[:, 1, None, None]
    inside = (row < n) & (column < m)
    if band is not None:
        # Distances times twice the steps of the longer series: whole numbers, without rounding.
        off = 2 * (row * (m - 1) - column * (n - 1)).abs()
        inside = inside & (off <= (2 * band + 1) * torch.maximum(n, m).sub(1))
    return torch.where(inside, costs, torch.inf)
