"""Total variation over a grid: pixels side by side share one probability, so that regions are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fenchel._checks import check_like, is_integer
from fenchel._torch import outside_graphs
from fenchel.regularizers.base import Posed, Regularizer, flatten
from fenchel.regularizers.configs import written_by
from fenchel.regularizers.grouping import Grouping, GroupingMap
from fenchel.regularizers.rows import apply_mask, beside, check_scores
from fenchel.regularizers.solvers import groups

_Dims = int | tuple[int, int] | None


class _GridMap(GroupingMap):
    """penalty(p) = Σ |pᵢ − pⱼ| over the edges of a grid; a row of p holds its rows one after the other.

    Groups are connected regions of equal entries. The width of the grid is the second parameter.
    """

    name = "grid"

    def penalty(self, p: Tensor, kept: Tensor, *layout: int) -> Tensor:
        total = torch.zeros_like(p[..., :1])
        for dim in (-1, -2):
            total = total + self._steps(p, kept, dim, *layout).abs().sum((-2, -1)).unsqueeze(-1)
        return total

    def slope(self, p: Tensor, kept: Tensor, *layout: int) -> Tensor:
        down = torch.zeros_like(_as_grid(p, *layout))
        for dim in (-1, -2):
            step = self._steps(p.detach(), kept, dim, *layout).sign()
            ends = [1, 0, 0, 0] if dim == -1 else [0, 0, 1, 0]
            starts = [0, 1, 0, 0] if dim == -1 else [0, 0, 0, 1]
            down = down + torch.nn.functional.pad(step, ends) - torch.nn.functional.pad(step, starts)
        return down.flatten(-2)

    def proximal(self, z: Tensor, strength: Tensor, *layout: int) -> Tensor:
        grid, each = _as_grid(z, *layout), strength.unsqueeze(-1)
        return groups.spread(groups.without(grid, grid <= -1 - 8 * each, each), each).flatten(-2)

    def reach(self, size: int) -> float:
        return 8.0

    def partition(self, p: Tensor, kept: Tensor, *layout: int) -> Tensor:
        return groups.regions(_as_grid(p, *layout))

    def argmax(self, z: Tensor, *a: Any) -> Tensor:
        return self.solve_in_trace(z, *a) if torch.compiler.is_compiling() else super().argmax(z, *a)

    def solve_in_trace(self, z: Tensor, *a: Any) -> Tensor:
        raise RuntimeError(
            "tvmax2d cannot be traced, and needs data (no fake or meta tensors), for its rounds depend on the scores; "
            "call it outside of the graph"
        )

    def _steps(self, p: Tensor, kept: Tensor, dim: int, *layout: int) -> Tensor:
        """Differences along a dimension of the grid; 0 beside a masked entry."""
        grid, kept = _as_grid(p, *layout), _as_grid(kept, *layout)
        n = grid.shape[dim]
        both = kept.narrow(dim, 1, n - 1) & kept.narrow(dim, 0, n - 1)
        return torch.where(both, grid.diff(dim=dim), 0.0)


def _as_grid(rows: Tensor, width: int) -> Tensor:
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // width, width)


GRID = _GridMap()


class _Grid(Grouping):
    """Ω on the flattened grids of one width: what :class:`TotalVariation2d` is when the layout is known."""

    rule = GRID

    def __init__(self, strength: float | Tensor, width: int) -> None:
        super().__init__(strength)
        self.width = width

    def _pose(self, scores: Tensor, dim: int, mask: Tensor | None = None) -> Posed:
        posed = super()._pose(scores, dim, mask)
        return posed._replace(parameters=(*posed.parameters, float(self.width)))


@written_by("strength", "shape")
class TotalVariation2d(Grouping):
    r"""Gini plus the variation over a grid, :math:`\frac12(\|p\|^2 - 1) + \lambda \sum_{i \sim j} |p_i - p_j|`.

    Argmax: tvmax2d. The sum is over pairs of pixels side by side or one above the other; masked pixels drop out with
    their edges. Margin: 1 + 5·strength, for a pixel with four neighbours that have no others (1 + 4.5·strength on a
    grid without masks). Zero strength is :class:`Gini`.

    Choices are made over a pair of dimensions, ``dim=(-2, -1)`` by default. Given the ``shape`` of the grid, they are
    made along one dimension that holds the pixels row by row, as in attention over image patches:
    ``fenchel.attention(query, key, value, TotalVariation2d(0.1, shape=(14, 14)))``. A class index counts pixels row by
    row in both cases.

    Args:
        strength: λ, a number ≥ 0, or a tensor with one value per grid (size 1 along ``dim``); differentiable.
        shape: (height, width) of grids that are flattened.

    Example:
        >>> import torch
        >>> from fenchel import TotalVariation2d
        >>> scores = torch.tensor([[1.0, 0.9, 0.0], [0.8, 1.0, 0.0], [0.0, 0.0, 0.9]])
        >>> TotalVariation2d(0.1).argmax(scores)
        tensor([[0.2250, 0.2250, 0.0000],
                [0.2250, 0.2250, 0.0000],
                [0.0000, 0.0000, 0.1000]])

    References: Niculae & Blondel (2017); Chambolle & Darbon (2009).
    """

    ordered = True

    def __init__(self, strength: float | Tensor = 0.1, shape: tuple[int, int] | None = None) -> None:
        super().__init__(strength)
        if shape is not None and (
            not isinstance(shape, Sequence) or len(shape) != 2 or any(not is_integer(n) or n < 1 for n in shape)
        ):
            raise ValueError(f"shape must be a pair (height, width) of positive integers, got {shape!r}")
        self.shape = None if shape is None else (int(shape[0]), int(shape[1]))

    @property
    def default_dim(self) -> Any:
        """The last dimension if the shape of the grids is known, else the last two."""
        return (-2, -1) if self.shape is None else -1

    def canonical(self) -> tuple[Regularizer, float | Tensor]:
        """Gini for strength 0 and flattened grids."""
        return (self, 1.0) if self.shape is None else super().canonical()

    @property
    def margin(self) -> float | Tensor:
        """1 + 5·strength: 4·strength for the four edges, and strength for a neighbour that has no other."""
        return 1 + 5 * self.strength

    @outside_graphs("tvmax2d")
    def forward(self, p: Tensor, dim: _Dims = None) -> Tensor:
        """Ω(p) of distributions over the grid."""
        flat, omega, _ = self._flat(p, dim, None)
        value: Tensor = omega(flat)
        return value

    @outside_graphs("tvmax2d")
    def argmax(self, scores: Tensor, dim: _Dims = None, mask: Tensor | None = None) -> Tensor:
        """The regularized choice over the grid."""
        flat, omega, dims = self._flat(scores, dim, mask)
        p = omega.argmax(flat)
        if len(dims) == 1:
            return p.movedim(-1, dims[0])
        return p.reshape(*p.shape[:-1], *_sizes(scores, dims)).movedim((-2, -1), dims)

    @outside_graphs("tvmax2d")
    def max(self, scores: Tensor, dim: _Dims = None, mask: Tensor | None = None) -> Tensor:
        """The regularized maximum over the grid. Its gradient is ``argmax``."""
        flat, omega, _ = self._flat(scores, dim, mask)
        return omega.max(flat)

    @outside_graphs("tvmax2d")
    def loss(self, scores: Tensor, target: Tensor, dim: _Dims = None, mask: Tensor | None = None) -> Tensor:
        """The Fenchel-Young loss, one value per grid: indices of pixels, row by row, or probabilities like scores."""
        flat, omega, dims = self._flat(scores, dim, mask)
        if isinstance(target, Tensor) and target.is_floating_point():
            target = flatten(check_like(target, "target of probabilities", scores), dims)
        return omega.loss(flat, target)

    def in_rows(
        self, scores: Tensor, target: Tensor, dim: Any, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Any, Tensor | None, Regularizer]:
        """Scores (masked ones at −inf) and target with grids flattened along the last dimension, and Ω for these."""
        flat, omega, dims = self._flat(scores, None if dim == -1 else dim, mask)
        return flat, flatten(target, dims) if target.shape == scores.shape else target, -1, None, omega

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.shape is None else f", shape={self.shape}")

    def _flat(self, scores: Tensor, dim: _Dims, mask: Tensor | None) -> tuple[Tensor, _Grid, tuple[int, ...]]:
        """Scores with their grids in the last dimension, masked ones at −inf; Ω of the width; and their dimensions."""
        dims = self.dims(scores, dim)
        strength = self.strength
        if isinstance(strength, Tensor):
            for d in dims:
                strength = beside(strength, "strength", scores, d)
            strength = flatten(strength, dims)
        width = scores.shape[dims[-1]] if self.shape is None else self.shape[1]
        return flatten(apply_mask(scores, mask), dims), _Grid(strength, width), dims

    def dims(self, scores: Tensor, dim: _Dims) -> tuple[int, ...]:
        """The dimensions of the grid, counted from the front."""
        dim = self.default_dim if dim is None else dim
        if is_integer(dim):
            if self.shape is None:
                raise ValueError(
                    f"dim must be a pair such as (-2, -1), got {dim}; for grids flattened along one dimension "
                    "give their shape: TotalVariation2d(strength, shape=(height, width))"
                )
            d = check_scores(scores, dim)
            if scores.shape[d] != self.shape[0] * self.shape[1]:
                raise ValueError(
                    f"scores must have size {self.shape[0]}·{self.shape[1]} along dim {dim} for grids of shape "
                    f"{self.shape}, got shape {tuple(scores.shape)}"
                )
            return (d,)
        if not isinstance(dim, (tuple, list)) or len(dim) != 2:
            raise TypeError(f"dim must be a pair of dimensions, got {dim!r}")
        if isinstance(scores, Tensor) and scores.is_floating_point() and scores.dim() < 2:
            raise ValueError(f"scores must have at least two dimensions, got shape {tuple(scores.shape)}")
        dims = (check_scores(scores, dim[0]), check_scores(scores, dim[1]))
        if dims[0] == dims[1]:
            raise ValueError(f"dim must be two different dimensions, got {tuple(dim)}")
        if self.shape is not None and _sizes(scores, dims) != self.shape:
            raise ValueError(f"scores must hold grids of shape {self.shape}, got {_sizes(scores, dims)}")
        return dims


def _sizes(scores: Tensor, dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(scores.shape[d] for d in dims)


@outside_graphs("tvmax2d")
def tvmax2d(scores: Tensor, strength: float | Tensor = 0.1, mask: Tensor | None = None) -> Tensor:
    r"""Project scores on a grid onto the simplex, with a penalty on the differences between neighbours.

    .. math:: \operatorname{argmax}_{p \in \Delta} \; \langle p, s \rangle - \frac12 (\|p\|^2 - 1)
              - \lambda \sum_{i \sim j} |p_i - p_j|

    Sparsemax of the proximal map of anisotropic total variation, found by dividing the grid along minimum cuts until no
    part is divided any more. The result is exact up to rounding (1e-13 in p): the maximum flow of the last round closes
    the duality gap. Pixels of a region have probabilities equal to the bit. Cannot be part of a compiled, exported or
    traced graph.

    On devices without kernels it works in rounds with one host sync each, some 40 to 200 on normal scores.

    Args:
        scores: (…, height, width), floating point.
        strength: λ, a number ≥ 0, or a tensor that broadcasts to ``scores`` with size 1 along the last two dimensions;
            differentiable. 0 is sparsemax over all pixels.
        mask: boolean, broadcasts to ``scores``; True = may receive mass. Scores of −inf are masked too. Masked pixels
            drop out with their edges.

    Returns:
        Probabilities of the shape and dtype of ``scores``, with sum 1 over the last two dimensions; grids with nothing
        unmasked are zero. Where regions are just about to part or join, the gradient is that of the joined ones.

    Example:
        >>> import torch, fenchel
        >>> scores = torch.tensor([[1.0, 0.9, 0.0], [0.8, 1.0, 0.0], [0.0, 0.0, 0.9]])
        >>> fenchel.tvmax2d(scores, strength=0.1)
        tensor([[0.2250, 0.2250, 0.0000],
                [0.2250, 0.2250, 0.0000],
                [0.0000, 0.0000, 0.1000]])

    References: Niculae & Blondel (2017); Chambolle & Darbon (2009), for the division by cuts.
    """
    return TotalVariation2d(strength).argmax(scores, mask=mask)
