"""Grouping regularizers: Gini plus a penalty, under which neighbours, near equals or regions share one probability.

The penalties (variation along a row, variation over a grid, the sum of pairwise maxima) have a property in common:
the level sets of the minimiser do not depend on each other. So the penalised projection onto the simplex is sparsemax
of the penalty's proximal map. Its Jacobian is a projection too: onto the directions that keep equal what is equal, zero
what is zero, and the sum. It takes means over the groups, minus the mean over the support, and can be read from p and
the mask.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fenchel._torch import below_autograd, outside_graphs, readable
from fenchel.regularizers import groups
from fenchel.regularizers.base import Regularizer, flatten, hold, show
from fenchel.regularizers.configs import written_by
from fenchel.regularizers.rowmap import Parameter, ParameterMap, argmax_operator, on_support, pack, register_map
from fenchel.regularizers.rows import (
    apply_mask,
    beside,
    check_floating,
    check_parameter,
    check_scores,
    is_integer,
)
from fenchel.regularizers.tsallis import Gini

_ALLOWED = "0 <= strength < inf"
_Dims = int | tuple[int, int] | None


class _GroupingMap(ParameterMap):
    """Ω(p) = ½(‖p‖² − 1) + λ·penalty(p) with a penalty whose proximal map comes before sparsemax.

    Masked entries take no part in the penalty: they do not part their neighbours.
    """

    zero_at_vertices = False

    @abstractmethod
    def penalty(self, p: Tensor, kept: Tensor, *layout: int) -> Tensor:
        """One value per row (dimension kept), differentiable in p, of the entries that are ``kept``."""

    @abstractmethod
    def slope(self, p: Tensor, kept: Tensor, *layout: int) -> Tensor:
        """A gradient of the penalty whose sums over groups are right, up to a constant per row."""

    @abstractmethod
    def proximal(self, z: Tensor, strength: Tensor, *layout: int) -> Tensor:
        """argmin_y ½‖y − z‖² + λ·penalty(y), up to a constant per row; λ > 0, masked entries at −inf."""

    @abstractmethod
    def reach(self, size: int) -> float:
        """How much the penalty moves the score of one entry against that of another, at most, in units of λ."""

    @abstractmethod
    def partition(self, p: Tensor, kept: Tensor, *layout: int) -> Tensor:
        """A number for every entry: those of the support with the same one are equal and tied to each other."""

    def keeps_scores(self, *a: Any) -> bool:
        return True

    def value(self, p: Tensor, *a: Any, masked: Tensor | None = None) -> Tensor:
        kept = torch.ones_like(p, dtype=torch.bool) if masked is None else ~masked
        gini = (p * p - p).sum(-1) / 2
        penalty: Tensor = a[0] * self.penalty(p, kept, *_layout(a))
        return gini + penalty.squeeze(-1)

    def solve(self, z: Tensor, *a: Any) -> Tensor:
        wide = groups.widen(z)
        strength = torch.as_tensor(a[0], dtype=wide.dtype, device=wide.device).expand(*wide.shape[:-1], 1)
        masked = wide == -torch.inf
        # An entry so far down has no mass, however far it is; and nothing more is fused when everything is.
        low = -(1 + self.reach(z.shape[-1]) * strength) * (1 + 1e-3)
        wide = torch.where(masked, wide, torch.maximum(wide, low))
        spread = -torch.where(masked, 0.0, wide).amin(-1, keepdim=True)
        y = self.proximal(wide, torch.minimum(strength, z.shape[-1] * spread), *_layout(a))
        p = groups.project(torch.where(strength == 0, wide, y))
        return torch.where(masked, 0.0, p).to(z.dtype)

    def product(self, v: Tensor, z: Tensor, p: Tensor, *a: Any) -> Tensor:
        """J v = (means over the groups) − (mean over the support), on the support."""
        v, strength = on_support(v, p), a[0]
        size = (p != 0).sum(-1, keepdim=True).clamp_min(1)
        mean = v.sum(-1, keepdim=True) / size
        means = v
        if isinstance(strength, Tensor) or strength != 0:
            group = self.partition(p.detach(), _kept(z), *_layout(a))
            if isinstance(strength, Tensor):
                group = torch.where(strength == 0, torch.arange(p.shape[-1], device=p.device), group)
            means = groups.group_means(v, group, p != 0)
        return torch.where(p == 0, 0.0, means - mean)

    def value_sensitivity(self, z: Tensor, p: Tensor, *a: Any) -> Tensor:
        return self.penalty(p, _kept(z), *_layout(a))

    def gradient_sensitivity(self, z: Tensor, p: Tensor, *a: Any) -> Tensor:
        return self.slope(p, _kept(z), *_layout(a))

    def solve_any(self, z: Tensor, *a: Any) -> Tensor:
        return super().solve_any(z, *a) if readable(z) else self.solve_in_trace(z, *a)

    def solve_in_trace(self, z: Tensor, *a: Any) -> Tensor:
        """The rounds of the solution depend on the data: a trace holds the operator, not what it does."""
        with below_autograd():
            return argmax_operator(z, *pack(a), self.name)


def _layout(a: tuple[Any, ...]) -> tuple[int, ...]:
    """What a map has to know of the rows beside their entries: parameters after the strength."""
    return tuple(int(each) for each in a[1:])


def _kept(z: Tensor) -> Tensor:
    return z.detach() > -torch.inf


class _FusedMap(_GroupingMap):
    """penalty(p) = Σ |pᵢ − pᵢ₊₁|; groups are runs of equal neighbours."""

    name = "fused"

    def penalty(self, p: Tensor, kept: Tensor, *layout: int) -> Tensor:
        return self._steps(p, kept).abs().sum(-1, keepdim=True)

    def slope(self, p: Tensor, kept: Tensor, *layout: int) -> Tensor:
        step = self._steps(p, kept).sign().detach()
        index, _ = groups.before(kept)
        return step - torch.zeros_like(step).scatter_add(-1, index, step)

    def proximal(self, z: Tensor, strength: Tensor, *layout: int) -> Tensor:
        return groups.fuse(z, strength)

    def reach(self, size: int) -> float:
        return 4.0

    def partition(self, p: Tensor, kept: Tensor, *layout: int) -> Tensor:
        return groups.runs(p, kept)

    def _steps(self, p: Tensor, kept: Tensor) -> Tensor:
        """From each entry's nearest kept one before it; 0 where there is none."""
        index, known = groups.before(kept)
        return torch.where(known & kept, p - p.gather(-1, index), 0.0)


class _OscarMap(_GroupingMap):
    """penalty(p) = Σᵢ<ⱼ max(pᵢ, pⱼ), on sorted entries Σₖ (n − k) p₍ₖ₎; groups are equal entries anywhere."""

    name = "oscar"

    def penalty(self, p: Tensor, kept: Tensor, *layout: int) -> Tensor:
        rank = torch.arange(1, p.shape[-1] + 1, device=p.device)
        ordered = p.sort(dim=-1, descending=True).values
        return ((kept.sum(-1, keepdim=True) - rank) * ordered).sum(-1, keepdim=True)

    def slope(self, p: Tensor, kept: Tensor, *layout: int) -> Tensor:
        _, size, smaller = groups.equals(p.detach())
        return smaller.to(p.dtype) + (size.to(p.dtype) - 1) / 2

    def proximal(self, z: Tensor, strength: Tensor, *layout: int) -> Tensor:
        return groups.pool(z, strength)

    def reach(self, size: int) -> float:
        return float(size - 1)

    def partition(self, p: Tensor, kept: Tensor, *layout: int) -> Tensor:
        return groups.equals(p)[0]


class _GridMap(_GroupingMap):
    """penalty(p) = Σ |pᵢ − pⱼ| over the edges of a grid, whose rows stand one after the other in those of p.

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


FUSED, OSCAR, GRID = _FusedMap(), _OscarMap(), _GridMap()
register_map(FUSED)
register_map(OSCAR)


class _Grouping(Regularizer):
    """What the grouping regularizers share: a strength, masks that take entries out, Ω that is not zero at vertices."""

    parameter_name = "strength"
    strength: float | Tensor

    def __init__(self, strength: float | Tensor = 0.1) -> None:
        super().__init__()
        hold(self, "strength", _check_strength(strength))

    @property
    def parameter(self) -> Parameter:
        return self.strength

    def canonical(self) -> tuple[Regularizer, float | Tensor]:
        """Gini for strength 0."""
        return (Gini() if not isinstance(self.strength, Tensor) and self.strength == 0 else self), 1.0

    def extra_repr(self) -> str:
        return f"strength={show(self.strength)}"


def _check_strength(strength: float | Tensor) -> float | Tensor:
    check_floating(strength, "strength")
    return check_parameter(strength, "strength", 0.0, _ALLOWED, closed=True, finite=True)


@written_by("strength")
class Fused(_Grouping):
    r"""Gini plus total variation, :math:`\frac12(\|p\|^2 - 1) + \lambda \sum_i |p_i - p_{i+1}|`. Argmax: fusedmax.

    Margin: 1 + 3·strength, which one takes who has a single entry on one side of it. Zero strength is :class:`Gini`.
    Masked entries are taken out, and their neighbours become each other's.

    Args:
        strength: λ, a number ≥ 0, or a tensor with one value a row or a head (size 1 along ``dim``); differentiable.

    Example:
        >>> import torch
        >>> from fenchel import Fused
        >>> Fused(0.2).argmax(torch.tensor([1.0, 0.7, 0.9, -1.0]))
        tensor([0.3333, 0.3333, 0.3333, 0.0000])

    References: Niculae & Blondel (2017); Tibshirani et al. (2005).
    """

    rule = FUSED

    @property
    def margin(self) -> float | Tensor:
        """1 + 3·strength: the penalty of two neighbours, and what a lone neighbour is pulled up by."""
        return 1 + 3 * self.strength


@written_by("strength")
class Oscar(_Grouping):
    r"""Gini plus pairwise maxima, :math:`\frac12(\|p\|^2 - 1) + \lambda \sum_{i<j} \max(p_i, p_j)`. Argmax: oscarmax.

    Margin: none that holds for every width; among n entries it takes a lead of 1 + strength·n/2. Zero strength is
    :class:`Gini`.

    Args:
        strength: λ, a number ≥ 0, or a tensor with one value a row or a head (size 1 along ``dim``); differentiable.

    Example:
        >>> import torch
        >>> from fenchel import Oscar
        >>> Oscar(0.1).argmax(torch.tensor([0.5, -1.0, 0.3, 0.48]))
        tensor([0.3467, 0.0000, 0.3067, 0.3467])

    References: Niculae & Blondel (2017); Bondell & Reich (2008).
    """

    rule = OSCAR


class _Grid(_Grouping):
    """Ω on the flattened grids of one width: what :class:`TotalVariation2d` is when the layout is known."""

    rule = GRID

    def __init__(self, strength: float | Tensor, width: int) -> None:
        super().__init__(strength)
        self.width = width

    def _parameters_beside(self, scores: Tensor, dim: int) -> tuple[Any, ...]:
        return *super()._parameters_beside(scores, dim), float(self.width)


@written_by("strength", "shape")
class TotalVariation2d(_Grouping):
    r"""Gini plus the variation over a grid, :math:`\frac12(\|p\|^2 - 1) + \lambda \sum_{i \sim j} |p_i - p_j|`.

    Argmax: tvmax2d. The sum is over pairs of pixels side by side or one above the other; masked pixels drop out with
    their edges. Margin: 1 + 5·strength, for a pixel with four neighbours that have no others (1 + 4.5·strength on a
    grid without masks). Zero strength is :class:`Gini`.

    Choices are made over a pair of dimensions, ``dim=(-2, -1)`` unless told. Given the ``shape`` of the grid, they are
    made along one dimension that holds the pixels row by row, as in attention over image patches:
    ``fenchel.attention(query, key, value, TotalVariation2d(0.1, shape=(14, 14)))``. A class index counts pixels row by
    row in both cases.

    Args:
        strength: λ, a number ≥ 0, or a tensor with one value a grid (size 1 along ``dim``); differentiable.
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
        """1 + 5·strength: the price of four edges, and what a lone neighbour is pulled up by."""
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
        """The Fenchel-Young loss, one value a grid: indices of pixels, row by row, or probabilities like scores."""
        flat, omega, dims = self._flat(scores, dim, mask)
        if isinstance(target, Tensor) and target.is_floating_point():
            if target.shape != scores.shape:
                raise ValueError(
                    f"target of probabilities must have the shape of scores, {tuple(scores.shape)}, "
                    f"got {tuple(target.shape)}"
                )
            target = flatten(target, dims)
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
        dims = self._dims(scores, dim)
        strength = self.strength
        if isinstance(strength, Tensor):
            for d in dims:
                strength = beside(strength, "strength", scores, d)
            strength = flatten(strength, dims)
        width = scores.shape[dims[-1]] if self.shape is None else self.shape[1]
        return flatten(apply_mask(scores, mask), dims), _Grid(strength, width), dims

    def _dims(self, scores: Tensor, dim: _Dims) -> tuple[int, ...]:
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
        if not isinstance(dim, tuple | list) or len(dim) != 2:
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


def fusedmax(scores: Tensor, strength: float | Tensor = 0.1, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Project scores onto the simplex with a price on every step between neighbours: contiguous segments.

    .. math:: \operatorname{argmax}_{p \in \Delta} \; \langle p, s \rangle - \frac12 (\|p\|^2 - 1)
              - \lambda \sum_i |p_i - p_{i+1}|

    Sparsemax of the proximal map of one-dimensional total variation. Neighbours that are fused have probabilities equal
    to the bit. Exact; on the CPU in linear time.

    Args:
        scores: any shape, floating point.
        strength: λ, a number ≥ 0, or a tensor that broadcasts to ``scores`` with size 1 along ``dim``; differentiable.
            0 is sparsemax.
        dim: the dimension to choose along.
        mask: boolean, broadcasts to ``scores``; True = may receive mass. Scores of −inf are masked too. Masked entries
            are taken out: those beside them become neighbours.

    Returns:
        Probabilities of the shape and dtype of ``scores``; rows with nothing unmasked are zero. Where groups are just
        about to part or join, the gradient is that of the joined ones.

    Example:
        >>> import torch, fenchel
        >>> scores = torch.tensor([0.9, 1.1, 0.8, -1.0, 0.7])
        >>> fenchel.sparsemax(scores)
        tensor([0.2750, 0.4750, 0.1750, 0.0000, 0.0750])
        >>> fenchel.fusedmax(scores, strength=0.1)
        tensor([0.3750, 0.3750, 0.2250, 0.0000, 0.0250])

    References: Niculae & Blondel (2017), section 3.
    """
    return FUSED.choose(scores, dim, mask, "strength", _check_strength(strength))


def oscarmax(scores: Tensor, strength: float | Tensor = 0.1, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Project scores onto the simplex with a price on every pair: near equals, wherever they stand, become equal.

    .. math:: \operatorname{argmax}_{p \in \Delta} \; \langle p, s \rangle - \frac12 (\|p\|^2 - 1)
              - \lambda \sum_{i<j} \max(p_i, p_j)

    Isotonic regression of the sorted scores, then sparsemax. The price of a pair adds up: among n entries a strength of
    2·(largest − smallest score)/n makes all of them equal. Exact, O(n log n) time, on the CPU mostly less.

    Args:
        scores: any shape, floating point.
        strength: λ, a number ≥ 0, or a tensor that broadcasts to ``scores`` with size 1 along ``dim``; differentiable.
            0 is sparsemax.
        dim: the dimension to choose along.
        mask: boolean, broadcasts to ``scores``; True = may receive mass. Scores of −inf are masked too.

    Returns:
        Probabilities of the shape and dtype of ``scores``; rows with nothing unmasked are zero. Where groups are just
        about to part or join, the gradient is that of the joined ones.

    Example:
        >>> import torch, fenchel
        >>> fenchel.oscarmax(torch.tensor([0.5, -1.0, 0.3, 0.48]), strength=0.1)
        tensor([0.3467, 0.0000, 0.3067, 0.3467])

    References: Niculae & Blondel (2017), section 3.
    """
    return OSCAR.choose(scores, dim, mask, "strength", _check_strength(strength))


@outside_graphs("tvmax2d")
def tvmax2d(scores: Tensor, strength: float | Tensor = 0.1, mask: Tensor | None = None) -> Tensor:
    r"""Project scores on a grid onto the simplex, with a price on every step between neighbours: blobs.

    .. math:: \operatorname{argmax}_{p \in \Delta} \; \langle p, s \rangle - \frac12 (\|p\|^2 - 1)
              - \lambda \sum_{i \sim j} |p_i - p_j|

    Sparsemax of the proximal map of anisotropic total variation, found by dividing the grid along minimum cuts until no
    part wants to be divided. It ends by itself, with an answer that is exact but for rounding (1e-13 in p), as the
    maximum flow of the last round proves: it closes the duality gap. Pixels of a region have probabilities equal to
    the bit. Cannot be part of a compiled, exported or traced graph.

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
