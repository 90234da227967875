"""Grouping regularizers: Gini plus a penalty, under which neighbours, near equals or regions share one probability.

The penalties (variation along a row, variation over a grid, the sum of pairwise maxima) have a property in common:
the level sets of the minimiser do not depend on each other. So the penalised projection onto the simplex is sparsemax
of the penalty's proximal map. Its Jacobian is a projection too: onto the directions that keep equal what is equal, zero
what is zero, and the sum. It takes means over the groups, minus the mean over the support, and can be read from p and
the mask.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from fenchel._checks import check_parameter, check_real
from fenchel._torch import below_autograd, known, readable
from fenchel.regularizers.base import Regularizer, hold
from fenchel.regularizers.derivatives import on_support
from fenchel.regularizers.operators import argmax_operator, pack
from fenchel.regularizers.rowmap import Parameter, ParameterMap
from fenchel.regularizers.rows import from_rows, parameter_rows, to_rows
from fenchel.regularizers.solvers import groups
from fenchel.regularizers.tsallis import Gini


class GroupingMap(ParameterMap):
    """Ω(p) = ½(‖p‖² − 1) + λ·penalty(p) with a penalty whose proximal map comes before sparsemax.

    Masked entries take no part in the penalty: they do not part their neighbours.
    """

    traceable = False
    parameter_name = "strength"

    @abstractmethod
    def penalty(self, p: Tensor, kept: Tensor, *layout: int) -> Tensor:
        """One value per row (dimension kept), differentiable in p, of the entries that are ``kept``."""

    @abstractmethod
    def slope(self, p: Tensor, kept: Tensor, *layout: int) -> Tensor:
        """A subgradient of the penalty, of which only the sum over each group is used, up to a constant per row."""

    @abstractmethod
    def proximal(self, z: Tensor, strength: Tensor, *layout: int) -> Tensor:
        """argmin_y ½‖y − z‖² + λ·penalty(y), up to a constant per row; λ > 0, masked entries at −inf."""

    @abstractmethod
    def reach(self, size: int) -> float:
        """How much the penalty moves the score of one entry against that of another, at most, in units of λ."""

    @abstractmethod
    def partition(self, p: Tensor, kept: Tensor, *layout: int) -> Tensor:
        """A number for every entry: those of the support with the same one are equal and tied to each other."""

    def total_slope(self, count: Tensor) -> Tensor:
        """The sum of every subgradient of the penalty of ``count`` kept entries; 0 if it is shift-invariant."""
        return torch.zeros_like(count)

    def prox(self, scores: Tensor, dim: int, mask: Tensor | None, strength: float | Tensor) -> Tensor:
        """argmin_y ½‖y − s‖² + λ·penalty(y) along ``dim``.

        The solver finds the groups; y is the mean over each of s − λ·slope, and has the derivatives of that.
        """
        rows = groups.widen(to_rows(scores, dim, mask))
        strength = parameter_rows(strength, self.parameter_name, scores, dim)
        strength = torch.as_tensor(strength, dtype=rows.dtype, device=rows.device)
        kept = rows != -torch.inf
        invalid = (rows.isnan() | (rows == torch.inf)).any(-1, keepdim=True)
        x = torch.where(kept & ~invalid, rows, 0.0)
        if rows.numel():
            with torch.no_grad():
                group, slope = self._groups(torch.where(kept, x, -torch.inf), strength.expand(*rows.shape[:-1], 1))
            x = groups.group_means(torch.where(kept, x - strength * slope, 0.0), group, kept)
        found = torch.where(kept, x, 0.0) + torch.where(invalid, torch.nan, 0.0)
        return from_rows(found, scores, dim)

    def _groups(self, z: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
        """The groups of the proximal map, and a subgradient of the penalty there, of which sums over groups matter."""
        kept = z > -torch.inf
        z = z - torch.where(kept, z, -torch.inf).amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
        spread = -torch.where(kept, z, 0.0).amin(-1, keepdim=True)
        y = self.proximal(z, torch.minimum(strength, z.shape[-1] * spread))
        y = torch.where(strength == 0, z, y)
        group = torch.where(
            strength == 0, torch.arange(z.shape[-1], device=z.device).expand_as(z), self.partition(y, kept)
        )
        slope = torch.where(kept, self.slope(y, kept), 0.0)
        count = kept.sum(-1, keepdim=True).to(z.dtype)
        return group, slope + (self.total_slope(count) - slope.sum(-1, keepdim=True)) / count.clamp_min(1)

    def keeps_scores(self, *a: Any) -> bool:
        return True

    def value(self, p: Tensor, *a: Any, masked: Tensor | None = None) -> Tensor:
        kept = torch.ones_like(p, dtype=torch.bool) if masked is None else ~masked
        gini = (p * p - p).sum(-1) / 2
        penalty: Tensor = a[0] * self.penalty(p, kept, *layout_of(a))
        return gini + penalty.squeeze(-1)

    def solve(self, z: Tensor, *a: Any) -> Tensor:
        wide = groups.widen(z)
        strength = torch.as_tensor(a[0], dtype=wide.dtype, device=wide.device).expand(*wide.shape[:-1], 1)
        masked = wide == -torch.inf
        # An entry so far down has no mass, however far it is; and nothing more is fused when everything is.
        low = -(1 + self.reach(z.shape[-1]) * strength) * (1 + 1e-3)
        wide = torch.where(masked, wide, torch.maximum(wide, low))
        spread = -torch.where(masked, 0.0, wide).amin(-1, keepdim=True)
        y = self.proximal(wide, torch.minimum(strength, z.shape[-1] * spread), *layout_of(a))
        p = groups.project(torch.where(strength == 0, wide, y))
        return torch.where(masked, 0.0, p).to(z.dtype)

    def product(self, v: Tensor, z: Tensor, p: Tensor, *a: Any) -> Tensor:
        """J v = (means over the groups) − (mean over the support), on the support."""
        v, strength = on_support(v, p), a[0]
        size = (p != 0).sum(-1, keepdim=True).clamp_min(1)
        mean = v.sum(-1, keepdim=True) / size
        means = v
        if isinstance(strength, Tensor) or strength != 0:
            group = self.partition(p.detach(), _kept(z), *layout_of(a))
            if isinstance(strength, Tensor):
                group = torch.where(strength == 0, torch.arange(p.shape[-1], device=p.device), group)
            means = groups.group_means(v, group, p != 0)
        return torch.where(p == 0, 0.0, means - mean)

    def value_sensitivity(self, z: Tensor, p: Tensor, *a: Any) -> Tensor:
        return self.penalty(p, _kept(z), *layout_of(a))

    def gradient_sensitivity(self, z: Tensor, p: Tensor, *a: Any) -> Tensor:
        return self.slope(p, _kept(z), *layout_of(a))

    def solve_any(self, z: Tensor, *a: Any) -> Tensor:
        return super().solve_any(z, *a) if readable(z) else self.solve_in_trace(z, *a)

    def solve_in_trace(self, z: Tensor, *a: Any) -> Tensor:
        """Call the operator: the number of rounds depends on the data, so a trace cannot contain its operations."""
        with below_autograd():
            chosen: Tensor = argmax_operator(z, *pack(a), self.name)
        return chosen


def layout_of(a: tuple[Any, ...]) -> tuple[int, ...]:
    """The parameters after the strength, such as the width of a grid, as integers."""
    return tuple(int(each) for each in a[1:])


def _kept(z: Tensor) -> Tensor:
    return z.detach() > -torch.inf


class Grouping(Regularizer):
    """Base class of the grouping regularizers: they have a strength, and leave masked entries out."""

    parameter_name = "strength"
    strength: float | Tensor

    def __init__(self, strength: float | Tensor = 0.1) -> None:
        super().__init__()
        hold(self, "strength", check_strength(strength))

    @property
    def parameter(self) -> Parameter:
        return self.strength  # also of a grid, which has no rule as long as its width is not known

    def canonical(self) -> tuple[Regularizer, float | Tensor]:
        """Gini for strength 0."""
        return (Gini() if not isinstance(self.strength, Tensor) and self.strength == 0 else self), 1.0

    def has_class_losses(self, scores: Tensor) -> bool:
        """Where there is a number as strength: the rule has no derivative of Ω at the class in it."""
        return self.rule is not None and not isinstance(self.strength, Tensor) and known(scores)


def check_strength(strength: float | Tensor) -> float | Tensor:
    """Check the strength of a penalty: a number ≥ 0, or a tensor of such numbers."""
    return check_parameter(
        check_real(strength, "strength"), "strength", 0.0, "0 <= strength < inf", closed=True, finite=True
    )
