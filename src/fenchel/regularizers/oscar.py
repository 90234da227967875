"""The sum of pairwise maxima: entries with similar scores, wherever they are, share one probability."""

from __future__ import annotations

import torch
from torch import Tensor

from fenchel._torch import outside_graphs
from fenchel.regularizers.configs import written_by
from fenchel.regularizers.grouping import Grouping, GroupingMap, check_strength
from fenchel.regularizers.operators import register_map
from fenchel.regularizers.solvers import groups


class _OscarMap(GroupingMap):
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

    def total_slope(self, count: Tensor) -> Tensor:
        return count * (count - 1) / 2

    def partition(self, p: Tensor, kept: Tensor, *layout: int) -> Tensor:
        return groups.equals(p)[0]


OSCAR = _OscarMap()
register_map(OSCAR)


@written_by("strength")
class Oscar(Grouping):
    r"""Gini plus pairwise maxima, :math:`\frac12(\|p\|^2 - 1) + \lambda \sum_{i<j} \max(p_i, p_j)`. Argmax: oscarmax.

    Margin: none that holds for every width; among n entries it takes a lead of 1 + strength·n/2. Zero strength is
    :class:`Gini`.

    Args:
        strength: λ, a number ≥ 0, or a tensor with one value per row or head (size 1 along ``dim``); differentiable.

    Example:
        >>> import torch
        >>> from fenchel import Oscar
        >>> Oscar(0.1).argmax(torch.tensor([0.5, -1.0, 0.3, 0.48]))
        tensor([0.3467, 0.0000, 0.3067, 0.3467])

    References: Niculae & Blondel (2017); Bondell & Reich (2008).
    """

    rule = OSCAR


def oscarmax(scores: Tensor, strength: float | Tensor = 0.1, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Project scores onto the simplex with a penalty on every pair: entries with similar scores become equal.

    .. math:: \operatorname{argmax}_{p \in \Delta} \; \langle p, s \rangle - \frac12 (\|p\|^2 - 1)
              - \lambda \sum_{i<j} \max(p_i, p_j)

    Isotonic regression of the sorted scores, then sparsemax. The price of a pair adds up: among n entries a strength of
    2·(largest − smallest score)/n makes all of them equal. Exact, O(n log n) time, on the CPU mostly less.

    On devices without kernels it works in rounds with one host sync each, 2 to 7 on normal scores.

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
    return OSCAR.choose(scores, dim, mask, "strength", check_strength(strength))


@outside_graphs("prox_oscar")
def prox_oscar(scores: Tensor, strength: float | Tensor = 0.1, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    r"""Cluster rows by pairwise maxima: the proximal map of which oscarmax is the sparsemax.

    .. math:: \operatorname{argmin}_{y \in \mathbb{R}^n} \; \tfrac12 \|y - s\|^2 + \lambda \sum_{i<j} \max(y_i, y_j)

    The maxima are of the entries with their signs, as on the simplex. The OSCAR of magnitudes agrees where all y ≥ 0,
    and does not give oscarmax in general. Isotonic regression of the sorted scores; exact, in torch operations, so
    ``torch.compile`` breaks its graph here.

    Args:
        scores: any shape, floating point.
        strength: λ, a number ≥ 0, or a tensor that broadcasts to ``scores`` with size 1 along ``dim``; differentiable.
        dim: the dimension of the rows.
        mask: boolean, broadcasts to ``scores``; False = left out, and 0 in the result. Scores of −inf are left out too.

    Returns:
        y of the shape and dtype of ``scores``. Where groups are just about to part or join, the gradient is that of the
        joined ones.

    Example:
        >>> import torch, fenchel
        >>> fenchel.prox_oscar(torch.tensor([0.5, -1.0, 0.3, 0.48]), strength=0.1)
        tensor([ 0.2400, -1.0000,  0.2000,  0.2400])

    References: Bondell & Reich (2008); Niculae & Blondel (2017).
    """
    return OSCAR.prox(scores, dim, mask, check_strength(strength))
