"""Long memory: a past of any length as a function over [0, 1], contracted at every update, read by densities."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fenchel._checks import check_count, check_floats, check_mask, check_number, check_shape
from fenchel.continuous.attention import Focus
from fenchel.continuous.basis import ValueFunction, as_line_basis, grid_positions
from fenchel.continuous.deformed import inverse_softplus
from fenchel.continuous.density import BetaGaussian
from fenchel.continuous.integrals import expected_functions
from fenchel.continuous.radial import check_one_alpha

_LEAST_VARIANCE = 1e-6  # of the densities


@dataclass(frozen=True)
class _Step:
    """An update: the coefficients become the product of the matrices and the coefficients, plus what is added."""

    matrices: tuple[Tensor, ...]
    added: Tensor

    def __call__(self, coefficients: Tensor) -> Tensor:
        for matrix in self.matrices:
            coefficients = matrix @ coefficients
        return coefficients + self.added


@dataclass(frozen=True)
class MemoryState:
    """What a ``LongMemory`` holds: a function over [0, 1] with values of width D.

    Args:
        coefficients: (B, N, D), of the basis functions.
        lengths: the number of values that each sequence has had so far: one number if no mask was given, or (B,).
        mass: (B, cells), the attention that parts of [0, 1] got since the last update; None if none was counted.
        base: the coefficients before the updates that gradients pass through.
        recent: these updates.

    Example:
        >>> import torch
        >>> from fenchel.continuous import GaussianBasis, LongMemory
        >>> memory = LongMemory(GaussianBasis.line(16, widths=(0.05,)), 8)
        >>> state = memory.update(torch.ones(2, 100, 8))
        >>> state.lengths, state.coefficients.shape
        (100, torch.Size([2, 16, 8]))
    """

    coefficients: Tensor
    lengths: int | Tensor
    mass: Tensor | None
    base: Tensor | None
    recent: tuple[_Step, ...]

    def detach(self) -> MemoryState:
        """The same function, through which no gradients pass."""
        return MemoryState(self.coefficients.detach(), self.lengths, self.mass, self.coefficients.detach(), ())


@dataclass(frozen=True)
class Recalled:
    """The result of attention over a ``LongMemory``.

    Args:
        context: (B, Q, D).
        penalty: (B,), the mean over queries and heads of KL(N(μ, σ²) ‖ N(μ, prior²)).
        state: for the next update; with ``sticky=True`` it counts this attention.
        focus: the densities: ``loc`` (B, Q, heads, 1, 1) and ``sigma`` (B, Q, heads, 1, 1, 1); None without a memory.

    Example:
        >>> import torch
        >>> from fenchel.continuous import GaussianBasis, LongMemory
        >>> memory = LongMemory(GaussianBasis.line(16, widths=(0.05,)), 8, num_heads=2)
        >>> found = memory.attend(torch.randn(3, 5, 8), memory.update(torch.randn(3, 100, 8)))
        >>> found.context.shape, found.penalty.shape, found.focus.loc.shape
        (torch.Size([3, 5, 8]), torch.Size([3]), torch.Size([3, 5, 2, 1, 1]))
    """

    context: Tensor
    penalty: Tensor
    state: MemoryState | None
    focus: Focus | None


class LongMemory(nn.Module):
    r"""A memory of sequences (B, …, D) of any length, in N coefficients per feature, and attention over it (∞-former).

    The past is a function :math:`X(t) = B^\top \psi(t)` over [0, 1], by ridge regression on a basis ψ. An update
    evaluates it at ``samples`` places, moves these values to [0, τ], puts the new values behind them on [τ, 1] and fits
    the function again. Time and memory of an update and of attention do not depend on the length of the past; what is
    old is smoothed more. A query attends with one density per head:

    .. math:: \mu = \mathrm{sigmoid}(w_\mu^\top s + b_\mu), \quad \sigma^2 = \mathrm{softplus}(w_\sigma^\top s +
              b_\sigma), \quad s = K q / \sqrt{d}, \quad c = \mathbb{E}_p[\psi(t)]^\top V

    where K = B W_K and V = B W_V are the keys and values of a head, and p is the density of the score
    −(t − μ)²/2σ²: a Gaussian for α = 1, a truncated parabola for α = 2.

    Args:
        basis: N functions of one dimension, such as ``GaussianBasis.line(64, widths=(0.02, 0.05))``.
        embed_dim: D, the width of values and queries.
        num_heads: the number of heads, which divides D.
        alpha: of the densities.
        contraction: τ in (0, 1), the part of [0, 1] that an update leaves to the past. None gives every value of the
            sequence an equal part.
        samples: the number of places at which the past is evaluated; by default 2N.
        sticky: whether these places are more where attention was since the last update; otherwise they are even.
        ridge: λ of the regression.
        horizon: gradients of a state reach the values of its last ``horizon`` updates.
        prior: the standard deviation that ``penalty`` pulls σ to; also σ of the first densities.

    Example:
        >>> import torch
        >>> from fenchel.continuous import GaussianBasis, LongMemory
        >>> memory = LongMemory(GaussianBasis.line(32, widths=(0.03,)), 16, num_heads=4, alpha=2.0)
        >>> state = None
        >>> for chunk in torch.randn(2, 1000, 16).split(100, dim=1):
        ...     state = memory.update(chunk, state)
        >>> found = memory.attend(torch.randn(2, 7, 16), state)
        >>> found.context.shape, found.state.lengths
        (torch.Size([2, 7, 16]), 1000)

    References: Martins, Marinho & Martins (2022), ∞-former: infinite memory transformer.
    """

    def __init__(
        self,
        basis: nn.Module,
        embed_dim: int,
        num_heads: int = 1,
        alpha: float = 2.0,
        *,
        contraction: float | None = 0.5,
        samples: int | None = None,
        sticky: bool = False,
        ridge: float = 0.01,
        horizon: int = 1,
        prior: float = 0.1,
    ) -> None:
        super().__init__()
        self.basis = as_line_basis(basis)
        self.embed_dim, self.num_heads = check_count(embed_dim, "embed_dim"), check_count(num_heads, "num_heads")
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        self.alpha = check_one_alpha(alpha, 1)
        self.contraction = None if contraction is None else check_number(contraction, "contraction", 0, 1)
        size = len(self.basis)
        self.samples = 2 * size if samples is None else check_count(samples, "samples")
        self.sticky = bool(sticky)
        self.ridge, self.horizon = check_number(ridge, "ridge", 0), check_count(horizon, "horizon")
        self.prior = check_number(prior, "prior", 0)
        self.query = nn.Linear(embed_dim, embed_dim, bias=False)
        self.key = nn.Linear(embed_dim, embed_dim, bias=False)
        self.value = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out = nn.Linear(embed_dim, embed_dim, bias=False)
        self.loc, self.spread = nn.Linear(size, 1), nn.Linear(size, 1)
        with torch.no_grad():
            nn.init.zeros_(self.loc.bias)
            nn.init.constant_(self.spread.bias, inverse_softplus(self.prior**2))
            # Coefficients of tall functions are small. Scaled by the height the scores are of the size of values; the
            # weights w are then measured in other units, and the memory computes the same functions.
            heights = self.basis(self._places(4 * size).to(self.basis.like.dtype)).abs().amax(0).to(self.loc.weight)
        self.heights: Tensor
        self.register_buffer("heights", torch.where(heights > 0, heights, 1.0), persistent=False)

    def extra_repr(self) -> str:
        fields = "embed_dim", "num_heads", "alpha", "contraction", "samples", "sticky", "ridge", "horizon", "prior"
        return ", ".join(f"{name}={getattr(self, name)}" for name in fields)

    def forward(self, query: Tensor, state: MemoryState | None, mask: Tensor | None = None) -> Recalled:
        """``attend``."""
        return self.attend(query, state, mask)

    # -- writing -----------------------------------------------------------------------------------------------------

    def update(
        self,
        values: Tensor,
        state: MemoryState | None = None,
        mask: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> MemoryState:
        """The state after new values: the past is contracted, the values are put behind it.

        Args:
            values: (B, L, D).
            state: of the last update, or as ``attend`` returned it; None for a new memory.
            mask: boolean (B, L); True = there is a value. A sequence without values keeps its function.
            generator: with ``sticky=True`` the places are drawn by it, independently, as in the paper. By default
                they are evenly spaced quantiles of the attention mass, which are the same at every call.
        """
        check_floats(values, "values", "B", "L", self.embed_dim)
        if values.shape[1] == 0:
            raise ValueError(f"values must hold at least one value per sequence, got shape {tuple(values.shape)}")
        if mask is not None:
            check_shape(check_mask(mask, true="there is a value"), "mask", *values.shape[:2])
        self._check_state(state, values, "values")
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        if state is None:
            state = MemoryState(values.new_zeros(len(values), len(self.basis), self.embed_dim), 0, None, None, ())
        if mask is not None or isinstance(state.lengths, Tensor):
            return self._advanced(state, *self._ragged(values, state, mask, generator))
        return self._advanced(state, *self._even(values, state, state.lengths, generator))

    def _even(
        self, values: Tensor, state: MemoryState, past: int, generator: torch.Generator | None
    ) -> tuple[_Step, int]:
        """An update with equally many values for all sequences."""
        count = values.shape[1]
        if past == 0:
            weights = self.basis.weights((count,), ridge=self.ridge)
            return _Step((), weights.to(values).mT @ values), count
        share = past / (past + count) if self.contraction is None else self.contraction
        key = share, count, self.samples, self.ridge
        solver = self.basis.cached(("new", *key), partial(self._fitting, share, count))
        added = solver[self.samples :].to(values).mT @ values
        places = self._sticky_places(state, generator)
        if places is not None:
            return _Step((self._evaluated(places, values), solver[: self.samples].to(values).mT), added), past + count

        def contract() -> Tensor:
            old = self.basis.precise(self._places(self.samples))
            return (solver[: self.samples].double().mT @ old).to(solver.dtype)

        matrix = self.basis.cached(("old", *key), contract)
        return _Step((matrix.to(values),), added), past + count

    def _fitting(self, share: float, count: int) -> Tensor:
        """The matrix of the regression on contracted places and ``count`` new ones, (samples + count, N)."""
        positions = torch.cat([share * self._places(self.samples), share + (1 - share) * self._places(count)])
        return self.basis.regression(positions, ridge=self.ridge)

    def _ragged(
        self, values: Tensor, state: MemoryState, mask: Tensor | None, generator: torch.Generator | None
    ) -> tuple[_Step, Tensor]:
        """An update with a number of values of its own for every sequence."""
        batch, size = values.shape[:2]
        mask = torch.ones(batch, size, dtype=torch.bool, device=values.device) if mask is None else mask
        past = torch.as_tensor(state.lengths, device=values.device).expand(batch)
        rank = mask.cumsum(-1)
        count, is_new, is_kept = rank[:, -1], (past == 0).unsqueeze(-1), rank[:, -1] == 0
        if self.contraction is None:
            share = past.double() / (past + count).clamp_min(1)
        else:
            share = (past > 0).double() * self.contraction
        share = share.unsqueeze(-1)
        behind = share + (1 - share) * ((rank.double() - 0.5) / count.clamp_min(1).unsqueeze(-1))
        even = self._places(self.samples).squeeze(-1)
        positions = torch.cat([share * even, behind], -1).unsqueeze(-1)
        there = torch.cat([~is_new.expand(-1, self.samples), mask], -1)
        solver = self.basis.regression(positions, there, ridge=self.ridge).to(values)
        old, new = solver[:, : self.samples].mT, solver[:, self.samples :].mT
        places = self._sticky_places(state, generator)
        evaluated = self._evaluated(even if places is None else places, values)
        added = new @ torch.where(mask.unsqueeze(-1), values, 0.0)
        keep = is_kept[:, None, None]
        matrix = torch.where(keep, torch.eye(len(self.basis), dtype=old.dtype, device=old.device), old @ evaluated)
        return _Step((matrix,), torch.where(keep, 0.0, added)), past + count

    def _advanced(self, state: MemoryState, step: _Step, lengths: int | Tensor) -> MemoryState:
        """The state after a step. Steps that gradients pass through are kept and repeated, the others are not."""
        base = state.coefficients.detach() if state.base is None else state.base
        steps = (*state.recent, step)
        if len(steps) > self.horizon:
            base = steps[0](base).detach()
            steps = steps[1:]
        coefficients = base
        for each in steps:
            coefficients = each(coefficients)
        return MemoryState(coefficients, lengths, None, base, steps)

    def _places(self, count: int) -> Tensor:
        """The middles of equal parts of [0, 1], (count, 1), in double precision."""
        return grid_positions((count,), self.basis.like)

    def _evaluated(self, places: Tensor, values: Tensor) -> Tensor:
        """The basis functions at places (…, M) as a matrix (…, M, N)."""
        return self.basis.precise(places.double().unsqueeze(-1)).to(values)

    def _sticky_places(self, state: MemoryState, generator: torch.Generator | None) -> Tensor | None:
        """Ascending quantiles (B, M) of the mass of past attention; None if places are even."""
        if state.mass is None:
            return None
        mass = state.mass.double()
        total = mass.sum(-1, keepdim=True)
        share = torch.where(total > 0, mass / torch.where(total > 0, total, 1.0), 1 / mass.shape[-1])
        if generator is None:
            levels = self._places(self.samples).squeeze(-1).expand(len(mass), -1)
        else:
            levels = torch.rand(len(mass), self.samples, generator=generator, dtype=torch.float64, device=mass.device)
            levels = levels.sort(-1).values
        return quantiles(share, levels)

    # -- reading -----------------------------------------------------------------------------------------------------

    def function(self, state: MemoryState) -> ValueFunction:
        """The function X(t) that a state holds, with values (B, …, D)."""
        return ValueFunction(self.basis, state.coefficients)

    def attend(self, query: Tensor, state: MemoryState | None, mask: Tensor | None = None) -> Recalled:
        """The context of each query.

        Args:
            query: (B, Q, D).
            state: of the memory. None, and sequences that have had no value, give zeros.
            mask: boolean (B, Q); True = a query. Others get zeros, and count neither for the penalty nor for the mass.
        """
        check_floats(query, "query", "B", "Q", self.embed_dim)
        if mask is not None:
            check_shape(check_mask(mask, true="there is a query"), "mask", *query.shape[:2])
        self._check_state(state, query, "query")
        precise = torch.promote_types(query.dtype, torch.float32)
        if state is None:
            return Recalled(torch.zeros_like(query), query.new_zeros(len(query), dtype=precise), None, None)
        coefficients = state.coefficients.to(self.key.weight.dtype)
        keys = self._split(self.key(coefficients * self.heights.unsqueeze(-1).to(coefficients)))
        scores = self._split(self.query(query)) @ keys.mT / math.sqrt(self.embed_dim // self.num_heads)
        loc = torch.sigmoid(self.loc(scores))  # (B, heads, Q, 1)
        sigma = F.softplus(self.spread(scores).to(torch.promote_types(scores.dtype, torch.float32))) + _LEAST_VARIANCE
        expected = expected_functions(loc, sigma.unsqueeze(-1), self.basis, self.alpha)
        parts = expected.to(coefficients.dtype) @ self._split(self.value(coefficients))
        context = self.out(parts.transpose(1, 2).flatten(-2))
        counted = self._counted(query, state, mask)
        if counted is not None:
            context = torch.where(counted.unsqueeze(-1), context, 0.0)
        focus = Focus(loc.transpose(1, 2).unsqueeze(-1), sigma.transpose(1, 2)[..., None, None])
        mass = self._mass(loc, sigma, counted, state.mass) if self.sticky else None
        return Recalled(context, self._penalty(sigma, counted), replace(state, mass=mass), focus)

    def _counted(self, query: Tensor, state: MemoryState, mask: Tensor | None) -> Tensor | None:
        """Which queries (B, Q) count; None for all."""
        if not isinstance(state.lengths, Tensor):
            return mask
        there = (state.lengths > 0).unsqueeze(-1).expand(query.shape[:2])
        return there if mask is None else there & mask

    def _penalty(self, sigma: Tensor, counted: Tensor | None) -> Tensor:
        ratio = sigma.squeeze(-1) / self.prior**2
        each = 0.5 * (ratio - ratio.log() - 1).mean(1)  # over the heads
        if counted is None:
            return each.mean(-1) if each.shape[-1] else each.sum(-1)
        return torch.where(counted, each, 0.0).sum(-1) / counted.sum(-1).clamp_min(1)

    @torch.no_grad()
    def _mass(self, loc: Tensor, sigma: Tensor, counted: Tensor | None, before: Tensor | None) -> Tensor:
        """The mass (B, N) that attention gave to N equal parts of [0, 1], added to that of earlier calls."""
        ends = torch.linspace(0, 1, len(self.basis) + 1, dtype=torch.float64, device=loc.device)
        density = BetaGaussian(loc.double(), sigma=sigma.double().unsqueeze(-1), alpha=self.alpha, validate_args=False)
        below = density.cdf(ends.reshape(-1, 1, 1, 1, 1))  # (ends, B, heads, Q)
        each = below.diff(dim=0)
        if counted is not None:
            each = torch.where(counted.unsqueeze(1), each, 0.0)
        mass = each.sum((-2, -1)).mT.to(sigma.dtype)
        return mass if before is None else before + mass

    def _split(self, x: Tensor) -> Tensor:
        """(B, n, D) as (B, heads, n, D/heads)."""
        return x.reshape(*x.shape[:-1], self.num_heads, -1).transpose(1, 2)

    def _check_state(self, state: MemoryState | None, like: Tensor, name: str) -> None:
        if state is None:
            return
        if not isinstance(state, MemoryState):
            raise TypeError(f"state must be the result of update, or None, got {type(state).__name__}")
        check_shape(state.coefficients, "state.coefficients", "B", len(self.basis), self.embed_dim)
        if len(state.coefficients) != len(like):
            raise ValueError(f"{name} must have the {len(state.coefficients)} sequences of state, got {len(like)}")


def quantiles(mass: Tensor, levels: Tensor) -> Tensor:
    """Quantiles (B, M) at levels (B, M) of a density that is constant on n equal parts of [0, 1], with mass (B, n)."""
    cells = mass.shape[-1]
    ends = mass.cumsum(-1)
    levels = levels * ends[:, -1:]  # so that rounding leaves nothing above the last end
    cell = torch.searchsorted(ends.contiguous(), levels.contiguous()).clamp_max(cells - 1)
    inside = mass.gather(-1, cell)
    start = ends.gather(-1, cell) - inside
    within = torch.where(inside > 0, (levels - start) / torch.where(inside > 0, inside, 1.0), 0.5)
    return (cell + within.clamp(0, 1)) / cells
