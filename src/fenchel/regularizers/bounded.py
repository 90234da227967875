r"""Bounds and budgets on rows: max ⟨p, z⟩ − Ω(p) over 0 ≤ p ≤ u with Σp = k, for an Ω that is a sum over entries.

Every entry is at zero, at its bound, or free. The free entries share one level μ = z − Ω′(p). With s = 1/Ω″(p) on the
free entries, and w = ∂p/∂k = s/‖s‖₁, the derivatives are:

* ∂p/∂z = diag(s) − s wᵀ, which is symmetric, and ∂p/∂u = I − w1ᵀ for the entries that are held by their bound;
* ∂max/∂z = p, ∂max/∂k = μ, and ∂max/∂u = z − Ω′(u) − μ where held, the envelope theorem.

Where no entry is free, p is not differentiable in u and k, and w is the mean of its two one-sided derivatives: one-hot
at the entry that would leave its bound first, and at the zero that would become positive first.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel.regularizers.operators import register_map
from fenchel.regularizers.rowmap import Parameter, RowMap
from fenchel.regularizers.solvers.thresholds import capped_projection, capped_softmax
from fenchel.regularizers.tsallis import TSALLIS


class BoundedMap(RowMap):
    """One Ω over boxes and budgets. Its parameters are the bounds, one number or of the shape of z, and the budget.

    Subclasses set ``name`` and ``alpha``, the index of Ω among Tsallis' entropies.
    """

    alpha: float

    def keeps_scores(self, *a: Any) -> bool:
        return any(isinstance(each, Tensor) for each in a)

    @abstractmethod
    def slope(self, p: Tensor) -> Tensor:
        """Ω′(p), entry by entry."""

    @abstractmethod
    def mobility(self, p: Tensor) -> Tensor:
        """1/Ω″(p), entry by entry."""

    def align(self, z: Tensor, upper: Parameter, budget: Parameter) -> tuple[Any, ...]:
        bounds = upper.to(z.dtype).expand(z.shape) if isinstance(upper, Tensor) else upper
        return bounds, *super().align(z, budget)

    def value(self, p: Tensor, *a: Any, masked: Tensor | None = None) -> Tensor:
        return TSALLIS.value(p, self.alpha)

    def solve_plainly(self, z: Tensor, upper: Parameter, budget: Parameter) -> Tensor:
        top = z.amax(-1, keepdim=True)
        usable = top.isfinite()
        # No entry takes more than all.
        bound = upper.clamp_max(budget) if isinstance(upper, Tensor) else torch.full_like(z, upper).clamp_max(budget)
        p = self.solve(torch.where(usable, z, 0.0), torch.where(z == -torch.inf, 0.0, bound), budget)
        return torch.where(usable, p, torch.where(top == -torch.inf, 0.0, torch.nan))

    def product(self, v: Tensor, z: Tensor, p: Tensor, upper: Parameter, budget: Parameter) -> Tensor:
        s, w = self._moves(p, upper)
        v = _where(s > 0, v, p)
        return s * (v - (w * v).sum(-1, keepdim=True))

    def pull(self, v: Tensor, z: Tensor, p: Tensor, upper: Parameter, budget: Parameter) -> tuple[Tensor, ...]:
        state = self.state(z, p, upper)
        mean = (state.w * _where(state.w > 0, v, p)).sum(-1, keepdim=True)
        return state.s * (_where(state.s > 0, v, p) - mean), _where(state.held, v - mean, p), mean

    def push(
        self,
        dz: Tensor | None,
        da: tuple[Tensor | None, ...],
        z: Tensor,
        p: Tensor,
        upper: Parameter,
        budget: Parameter,
    ) -> Tensor:
        state = self.state(z, p, upper)
        du, dk = da
        dz = _where(state.s > 0, torch.zeros_like(p) if dz is None else dz, p)
        du = _where(state.held, torch.zeros_like(p) if du is None else du, p)
        taken = du.sum(-1, keepdim=True) - (0.0 if dk is None else dk)
        return state.s * (dz - (state.w * dz).sum(-1, keepdim=True)) + du - state.w * taken

    def envelope(self, z: Tensor, p: Tensor, upper: Parameter, budget: Parameter) -> tuple[Tensor, ...]:
        state = self.state(z, p, upper)
        return _where(state.held, state.excess, p), state.mu

    def _moves(self, p: Tensor, upper: Parameter) -> tuple[Tensor, Tensor]:
        """s and w of the module's docstring; both are zero in rows without free entries."""
        free = (p > 0) & (p < upper)
        s = torch.where(free, self.mobility(p), 0.0)
        total = s.sum(-1, keepdim=True)
        return s, s / torch.where(total == 0, 1.0, total)

    def state(self, z: Tensor, p: Tensor, upper: Parameter) -> _State:
        """The terms of the derivatives in the bounds and the budget."""
        s, w = self._moves(p, upper)
        unmasked = z > -torch.inf
        level = z - self.slope(p)
        full = unmasked & (p >= upper)
        leaving = _first(-level, full & (p > 0))
        entering = _first(level, unmasked & ~full & (p == 0) & (level < torch.inf))
        corner = (leaving + entering) / (leaving + entering).sum(-1, keepdim=True).clamp_min(1)
        w = torch.where((s > 0).any(-1, keepdim=True), w, corner)
        # Free entries agree on the level: its derivatives are theirs, whatever the weights of the mean.
        share = w.detach()
        mu = (share * torch.where(share > 0, level, 0.0)).sum(-1, keepdim=True)
        excess = torch.where(full, level, mu) - mu
        return _State(s, w, mu, excess, full & ((p > 0) | (excess > 0)))  # a bound of 0 holds only what would rise


class _State(NamedTuple):
    s: Tensor
    w: Tensor
    mu: Tensor
    excess: Tensor  # z − Ω′(p) − μ at the bound, 0 elsewhere
    held: Tensor


def _where(condition: Tensor, v: Tensor, p: Tensor) -> Tensor:
    """v where the condition holds, 0 elsewhere (whatever v is there), NaN in rows where p is NaN."""
    return torch.where(condition, v, 0.0 * p.detach())


def _first(key: Tensor, among: Tensor) -> Tensor:
    """One-hot at the largest key of a row among some entries; zero if there are none."""
    key = torch.where(among, key.detach(), -torch.inf)
    return torch.zeros_like(key).scatter(-1, key.argmax(-1, keepdim=True), 1.0) * among


class _Quadratic(BoundedMap):
    """Ω(p) = ½ Σ (p² − p): the projection onto a box and a budget."""

    name = "bounded_gini"
    alpha = 2.0

    def solve(self, z: Tensor, upper: Tensor, budget: Parameter) -> Tensor:
        return capped_projection(z, upper, budget)

    def slope(self, p: Tensor) -> Tensor:
        return p - 0.5

    def mobility(self, p: Tensor) -> Tensor:
        return torch.ones_like(p)


class _Entropic(BoundedMap):
    """Ω(p) = Σ p log p: a softmax whose mass above a bound goes to the other entries."""

    name = "bounded_shannon"
    alpha = 1.0

    def solve(self, z: Tensor, upper: Tensor, budget: Parameter) -> Tensor:
        return capped_softmax(z, upper, budget)

    def slope(self, p: Tensor) -> Tensor:
        return torch.where(p == 0, -torch.inf, 1 + torch.where(p == 0, 1.0, p).log())

    def mobility(self, p: Tensor) -> Tensor:
        return p


BOUNDED_GINI = _Quadratic()
BOUNDED_SHANNON = _Entropic()
register_map(BOUNDED_GINI)
register_map(BOUNDED_SHANNON)
