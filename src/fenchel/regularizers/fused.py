"""Total variation along a row: neighbours share one probability, so that segments are chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from fenchel._torch import known, outside_graphs
from fenchel.regularizers.configs import written_by
from fenchel.regularizers.grouping import Grouping, GroupingMap, check_strength
from fenchel.regularizers.operators import register_map
from fenchel.regularizers.solvers import groups


class _FusedMap(GroupingMap):
    """penalty(p) = Σ |pᵢ − pᵢ₊₁|; groups are runs of equal neighbours."""

    name = "fused"

    def penalty(self, p: Tensor, kept: Tensor, *layout: int) -> Tensor:
        whole = known(kept) and bool(kept.all())
        return (p.diff(dim=-1) if whole else self._steps(p, kept)).abs().sum(-1, keepdim=True)

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


FUSED = _FusedMap()
register_map(FUSED)


@written_by("strength")
class Fused(Grouping):
    r"""Gini plus total variation, :math:`\frac12(\|p\|^2 - 1) + \lambda \sum_i |p_i - p_{i+1}|`. Argmax: fusedmax.

    Margin: 1 + 3·strength, which is reached by an entry with a single entry on one side of it. Strength 0 is
    :class:`Gini`. Masked entries are left out, and the entries on their two sides become neighbours.

    Args:
        strength: λ, a number ≥ 0, or a tensor with one value per row or head (size 1 along ``dim``); differentiable.

    Example:
        >>> import torch
        >>> from fenchel import Fused
        >>> Fused(0.2).argmax(torch.tensor([1.0, 0.7, 0.9, -1.0]))
        tensor([0.3333, 0.3333, 0.3333, 0.0000])

    References: Niculae & Blondel (2017); Tibshirani et al. (2005).
    """

    rule = FUSED
    ordered = True

    @property
    def margin(self) -> float | Tensor:
        """1 + 3·strength: 2·strength for the two neighbours, and strength for a neighbour that has no other."""
        return 1 + 3 * self.strength


def fusedmax(scores: Tensor, strength: float | Tensor = 0.1, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Project scores onto the simplex with a penalty on the differences between neighbours: contiguous segments.

    .. math:: \operatorname{argmax}_{p \in \Delta} \; \langle p, s \rangle - \frac12 (\|p\|^2 - 1)
              - \lambda \sum_i |p_i - p_{i+1}|

    Sparsemax of the proximal map of one-dimensional total variation. Neighbours that are fused have probabilities equal
    to the bit. Exact; on the CPU in linear time.

    On devices without kernels it works in rounds with one host sync each, 4 to 5 on normal scores.

    Args:
        scores: any shape, floating point.
        strength: λ, a number ≥ 0, or a tensor that broadcasts to ``scores`` with size 1 along ``dim``; differentiable.
            0 is sparsemax.
        dim: the dimension to choose along.
        mask: boolean, broadcasts to ``scores``; True = may receive mass. Scores of −inf are masked too. Masked entries
            are left out: the entries on their two sides become neighbours.

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
    return FUSED.choose(scores, dim, mask, "strength", check_strength(strength))


@outside_graphs("prox_tv1d")
def prox_tv1d(scores: Tensor, strength: float | Tensor = 0.1, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Denoise rows by total variation: the proximal map of which fusedmax is the sparsemax.

    .. math:: \operatorname{argmin}_{y \in \mathbb{R}^n} \; \tfrac12 \|y - s\|^2 + \lambda \sum_i |y_i - y_{i+1}|

    Piecewise constant, with the sum of the scores; ``fusedmax(s, strength)`` is ``sparsemax(prox_tv1d(s, strength))``.
    Exact, in torch operations: the number of rounds depends on the scores, so ``torch.compile`` breaks its graph here.

    Args:
        scores: any shape, floating point.
        strength: λ, a number ≥ 0, or a tensor that broadcasts to ``scores`` with size 1 along ``dim``; differentiable.
        dim: the dimension along which neighbours are compared.
        mask: boolean, broadcasts to ``scores``; False = left out, and 0 in the result. Scores of −inf are left out too.

    Returns:
        y of the shape and dtype of ``scores``. Where groups are just about to part or join, the gradient is that of the
        joined ones.

    Example:
        >>> import torch, fenchel
        >>> fenchel.prox_tv1d(torch.tensor([0.1, -0.1, 0.2, 1.1, 0.9, 1.0]), strength=0.3)
        tensor([0.1500, 0.1500, 0.2000, 0.9000, 0.9000, 0.9000])

    References: Tibshirani et al. (2005); Niculae & Blondel (2017), whose map has no factor ½.
    """
    return FUSED.prox(scores, dim, mask, check_strength(strength))
