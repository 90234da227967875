"""The density of any score over an interval: many modes, and supports of several intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from fenchel._checks import check_entries, check_floats, check_number
from fenchel._quadrature import gauss_legendre, ranks
from fenchel.continuous.basis import as_line_basis
from fenchel.continuous.deformed import log_of
from fenchel.continuous.matrices import broadcast_shapes
from fenchel.continuous.pieces import Nodes, Pieces, expected
from fenchel.continuous.radial import log_shape

Score = Callable[[Tensor], Tensor]

CELLS = 512
"""The number of equal parts of the interval at whose ends the score is searched for extrema."""

_POINTS = 17  # of a search that narrows a bracket
_ROUNDS = 14  # of it: 8¹⁴ is more than 10¹²
_PART_POINTS = 32  # nodes over a part of a panel
_MAX_STEPS = 100
_DROPS = (1.0, 40.0)  # nats below the peak at which panels end for α ≤ 1
_TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5}


class ScoreDensity(Distribution):
    r"""The density (…) over an interval that maximizes the expectation of any score minus Tsallis's Ω.

    .. math:: \operatorname{argmax}_p \; \mathbb{E}_p[f(t)] - \Omega_\alpha(p)
              \;=\; \exp_{2-\alpha}(f(t) - A) \;=\; [1 + (\alpha-1)(f(t) - A)]_+^{1/(\alpha-1)}

    with the A, ``log_partition``, for which it integrates to 1. For α > 1 the support is the set where f is high
    enough: one interval or several. α = 1 is the density proportional to exp(f).

    The score is evaluated at 513 evenly spaced points; every extremum between them is narrowed down until its place is
    exact, and the ends of the support are found between neighbouring extrema. Integrals are computed by panels that end
    there and are halved until they are stable, to about 11 digits. So modes may be as narrow as you like if the score
    rises towards them from one of the 513 points at least, as it does for a quadratic well. What cannot be guaranteed
    for a function that is only known at points: a mode, or a gap, that lies between two neighbouring points and changes
    the score at neither is overlooked.

    Gradients reach every tensor that the score reads, to second order: A, the ends of the support, densities,
    expectations and samples.

    Args:
        score: f, vectorised in t: for points (…, n) of the shape of the batch it returns (…, n). Its own tensors have
            the shape of the batch and a last dimension of size 1.
        low: the lower end of the interval, finite.
        high: the upper end.
        alpha: α > 0.
        dtype: of the points that the score is called with; float32 for networks in single precision, with 5 digits.

    Example:
        >>> import torch
        >>> from fenchel.continuous import ScoreDensity
        >>> centers = torch.tensor([0.2, 0.8])
        >>> p = ScoreDensity(lambda t: -100 * (t.unsqueeze(-1) - centers).square().amin(-1))  # two wells
        >>> p.support  # two intervals
        tensor([[0.0446, 0.3554],
                [0.6446, 0.9554]], dtype=torch.float64)
        >>> p.mean
        tensor(0.5000, dtype=torch.float64)

    References: Martins et al. (2020), definition 1 and equation 9; Moreno et al. (2022), kernel deformed exponential
    families.
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    has_rsample = True

    def __init__(
        self,
        score: Score,
        low: float = 0.0,
        high: float = 1.0,
        alpha: float = 2.0,
        *,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        if not callable(score):
            raise TypeError(f"score must be callable, a torch function of points, got {type(score).__name__}")
        self.low, self.high = check_number(low, "low"), check_number(high, "high")
        if not self.low < self.high:
            raise ValueError(f"low must be less than high, got {low} and {high}")
        self.alpha = check_number(alpha, "alpha", 0)
        if not isinstance(dtype, torch.dtype) or dtype not in _TOLERANCES:
            raise ValueError(f"dtype must be torch.float64 or torch.float32, got {dtype}")
        self.score, self.dtype = score, dtype
        self._c = self.alpha - 1
        grid = torch.linspace(self.low, self.high, CELLS + 1, dtype=dtype)
        values = score(grid)
        if not isinstance(values, Tensor) or not values.is_floating_point() or values.shape[-1:] != grid.shape:
            what = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"score must return floats (…, n) for points (…, n), got {what} for ({CELLS + 1},)")
        self._device = values.device
        grid = grid.to(self._device)
        super().__init__(values.shape[:-1], validate_args=False)
        self._count = math.prod(self.batch_shape)
        flat = values.detach().to(dtype).reshape(self._count, -1)
        with torch.no_grad():
            breaks, top = self._extrema(grid, flat)
            if self._c <= 0:  # where there is no end of the support, panels end where the peak does
                breaks = torch.cat([breaks, *(self._crossings(breaks, top - drop) for drop in _DROPS)], -1)
                breaks = breaks.sort(-1).values
            # Rows with NaN or +inf, or without any finite score, have no density.
            self._bad = ~(flat < math.inf).all(-1) | ~top.isfinite()
            log_partition = self._solve(breaks, top, self._first_guess(grid, flat, top))
        self._finish(breaks, log_partition)

    def __repr__(self) -> str:
        return (
            f"ScoreDensity(batch: {tuple(self.batch_shape)}, low: {self.low:g}, high: {self.high:g}, "
            f"alpha: {self.alpha:g})"
        )

    # -- the score at points of rows ---------------------------------------------------------------------------------

    def _scores(self, t: Tensor, rows: Tensor) -> Tensor:
        """f at points (Q,) of the batch entries rows (Q,), which are ascending."""
        place, counts = ranks(rows, self._count)
        width = int(counts.max()) if len(rows) else 0
        table = torch.full((self._count, width), 0.5 * (self.low + self.high), dtype=t.dtype, device=t.device)
        table = table.index_put((rows, place), t)
        values = self.score(table.reshape(*self.batch_shape, width))
        values = values.to(self.dtype).expand(*self.batch_shape, width)
        return values.reshape(self._count, width)[rows, place]

    def _log_density(self, scores: Tensor, log_partition: Tensor) -> Tensor:
        return log_shape(log_partition - scores, self._c)

    # -- normalisation -----------------------------------------------------------------------------------------------

    def _extrema(self, grid: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Ascending breaks (count, M) between which f is monotone, padded with ``high``; and the largest f (count,)."""
        top = values.amax(-1)
        # A score of −inf is a deep plateau: its edge is an extremum.
        finite = torch.where(values > -math.inf, values, math.inf).amin(-1, keepdim=True)
        values = torch.maximum(values, torch.where(finite < math.inf, finite - 1, 0.0))
        before, here, after = values[:, :-2], values[:, 1:-1], values[:, 2:]
        rise, fall = here - before, after - here
        turns = (rise * fall < 0) | ((rise == 0) != (fall == 0))
        rows, cells = turns.nonzero(as_tuple=True)
        sign = torch.where((rise - fall)[rows, cells] > 0, 1.0, -1.0).to(values.dtype)  # +1 at maxima
        # The largest value may be hidden in the first or last cell.
        place, height = self._narrowed(grid[cells], grid[cells + 2], rows, sign)
        edges = torch.arange(self._count, device=rows.device)
        for cell in (0, CELLS - 1):
            for s in (1.0, -1.0):
                signs = torch.full((self._count,), s, dtype=values.dtype, device=values.device)
                t, v = self._narrowed(grid[cell].expand(self._count), grid[cell + 1].expand(self._count), edges, signs)
                rows, place, height = torch.cat([rows, edges]), torch.cat([place, t]), torch.cat([height, v])
        top = top.scatter_reduce(0, rows, height, "amax")
        order = torch.argsort(rows, stable=True)
        rows, place = rows[order], place[order]
        spot, counts = ranks(rows, self._count)
        size = int(counts.max()) if self._count else 0
        breaks = torch.full((self._count, size + 2), self.high, dtype=grid.dtype, device=grid.device)
        breaks[:, 0] = self.low
        breaks[rows, spot + 1] = place
        return breaks.sort(-1).values, top

    def _narrowed(self, left: Tensor, right: Tensor, rows: Tensor, sign: Tensor) -> tuple[Tensor, Tensor]:
        """The place (Q,) of the largest sign · f in brackets, and f there."""
        order = torch.argsort(rows, stable=True)
        back = torch.argsort(order, stable=True)
        left, right, rows, sign = left[order], right[order], rows[order], sign[order]
        share = torch.linspace(0, 1, _POINTS, dtype=left.dtype, device=left.device)
        t, best = left.unsqueeze(-1), torch.zeros(len(rows), 1, dtype=torch.long, device=rows.device)
        values = t
        for _ in range(_ROUNDS):
            t = left.unsqueeze(-1) + (right - left).unsqueeze(-1) * share
            values = self._scores(t.reshape(-1), rows.repeat_interleave(_POINTS)).reshape(t.shape)
            best = (sign.unsqueeze(-1) * values).argmax(-1, keepdim=True)
            left = t.gather(-1, (best - 1).clamp_min(0)).squeeze(-1)
            right = t.gather(-1, (best + 1).clamp_max(_POINTS - 1)).squeeze(-1)
        return t.gather(-1, best).squeeze(-1)[back], values.gather(-1, best).squeeze(-1)[back]

    def _first_guess(self, grid: Tensor, values: Tensor, top: Tensor) -> Tensor:
        """A (count,) by trapezoids over the grid."""
        high = self._upper(top)
        low = high - 1 if self._c >= 0 else self._lowest(top)
        step = (self.high - self.low) / CELLS
        weights = torch.full_like(grid, step)
        weights[0] = weights[-1] = step / 2

        def mass(a: Tensor) -> Tensor:
            return (self._log_density(values, a.unsqueeze(-1)).exp() * weights).sum(-1)

        for _ in range(200 if self._c >= 0 else 0):
            missing = (mass(low) < 1) & ~self._bad
            if not bool(missing.any()):
                break
            low = torch.where(missing, high - 2 * (high - low), low)
        for _ in range(50):
            middle = 0.5 * (low + high)
            is_above = mass(middle) > 1
            low, high = torch.where(is_above, middle, low), torch.where(is_above, high, middle)
        return torch.where(self._bad, 0.0, 0.5 * (low + high))

    def _upper(self, top: Tensor) -> Tensor:
        """An A for which the density is at most 1 / (high − low)."""
        return top - log_of(torch.full_like(top, -math.log(self.high - self.low)), self._c)

    def _lowest(self, top: Tensor) -> Tensor:
        """The A at which the density of an α < 1 is infinite at the highest score."""
        return top + 1 / self._c

    def _solve(self, breaks: Tensor, top: Tensor, start: Tensor) -> Tensor:
        """A (count,), by Newton's steps on the logarithm of the mass inside a bracket."""
        high = self._upper(top)
        low = torch.full_like(high, -math.inf) if self._c >= 0 else self._lowest(top)
        a, step = torch.minimum(start, high), torch.ones_like(high)
        tolerance = _TOLERANCES[self.dtype]
        for _ in range(_MAX_STEPS):
            pieces = self._pieces(breaks, a)[0]
            nodes = self._rule(pieces, a)
            mass, slope = self._mass(pieces, nodes, a)
            error = mass.log()
            if bool(((error.abs() <= tolerance) | (high - low <= tolerance * a.abs()) | self._bad).all()):
                break
            low, high = torch.where(error > 0, a, low), torch.where(error > 0, high, a)
            new = a + error * mass / slope
            outside = ~((new > low) & (new < high))
            bounded = low.isfinite()
            middle = torch.where(bounded, 0.5 * (low + high), a - step)
            step = torch.where(outside & ~bounded, 2 * step, step)
            a = torch.where(outside, middle, new)
        return a

    def _mass(self, pieces: Pieces, nodes: Nodes, a: Tensor) -> tuple[Tensor, Tensor]:
        """∫ p and ∫ p^(2−α), (count,) each: the second is minus the derivative of the first in A."""
        t, weights, rows = pieces.place(nodes)
        log = self._log_density(self._scores(t, rows), a[rows])
        kept = log.isfinite() & (weights > 0)
        log = torch.where(kept, log, 0.0)
        both = torch.stack([log.exp(), ((1 - self._c) * log).exp()], -1)
        found = pieces.sums(torch.where(kept.unsqueeze(-1), both * weights.unsqueeze(-1), 0.0), rows)
        return found[:, 0], found[:, 1]

    def _rule(self, pieces: Pieces, a: Tensor) -> Nodes:
        """Nodes that resolve the density, its power 2 − α and its entropy."""

        def values(t: Tensor, rows: Tensor) -> Tensor:
            log = self._log_density(self._scores(t, rows), a[rows])
            kept = log.isfinite()
            log = torch.where(kept, log, 0.0)
            parts = [log.exp(), ((1 - self._c) * log).exp(), log * log.exp()]
            return torch.where(kept.unsqueeze(-1), torch.stack(parts, -1), 0.0)

        return pieces.rule(values, _TOLERANCES[self.dtype])

    # -- the support -------------------------------------------------------------------------------------------------

    def _pieces(self, breaks: Tensor, a: Tensor) -> tuple[Pieces, Tensor, Tensor]:
        """The parts of the support between neighbouring breaks, and whether each begins and ends at a root of p."""
        size = breaks.shape[-1]
        every = torch.arange(self._count, device=breaks.device).repeat_interleave(size)
        scores = self._scores(breaks.reshape(-1), every).reshape(breaks.shape)
        inside = self._height(scores, a.unsqueeze(-1)) > 0
        cells = (inside[:, :-1] | inside[:, 1:]) & (breaks[:, 1:] > breaks[:, :-1])
        rows, cell = cells.nonzero(as_tuple=True)
        start, end = breaks[rows, cell], breaks[rows, cell + 1]
        at_start, at_end = ~inside[rows, cell], ~inside[rows, cell + 1]

        def is_inside(scores: Tensor, rows: Tensor) -> Tensor:
            return self._height(scores, a[rows]) > 0

        root = self._root(start, end, rows, at_start | at_end, at_start, is_inside)
        start, end = torch.where(at_start, root, start), torch.where(at_end, root, end)
        kept = end > start
        return Pieces(start[kept], end[kept], rows[kept], self._count), at_start[kept], at_end[kept]

    def _crossings(self, breaks: Tensor, level: Tensor) -> Tensor:
        """Where f crosses a level (count,) between neighbouring breaks, (count, M − 1); ``high`` if it does not."""
        size = breaks.shape[-1]
        rows = torch.arange(self._count, device=breaks.device)
        scores = self._scores(breaks.reshape(-1), rows.repeat_interleave(size)).reshape(breaks.shape)
        inside = scores > level.unsqueeze(-1)
        rising, crossed = ~inside[:, :-1], inside[:, :-1] != inside[:, 1:]
        ends = breaks[:, :-1].reshape(-1), breaks[:, 1:].reshape(-1)

        def is_inside(scores: Tensor, rows: Tensor) -> Tensor:
            return scores > level[rows]

        found = self._root(*ends, rows.repeat_interleave(size - 1), crossed.reshape(-1), rising.reshape(-1), is_inside)
        return torch.where(crossed, found.reshape(crossed.shape), self.high)

    def _height(self, scores: Tensor, a: Tensor) -> Tensor:
        """1 + (α−1)(f − A), positive inside the support; 1 for α ≤ 1, where all is inside."""
        return 1 + self._c * (scores - a) if self._c > 0 else torch.ones_like(scores)

    def _root(
        self,
        left: Tensor,
        right: Tensor,
        rows: Tensor,
        wanted: Tensor,
        rising: Tensor,
        is_inside: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """The last point inside between two breaks where one is inside and the other not, (Q,), where it is wanted.

        Args:
            left: the break on the left.
            right: that on the right.
            rows: of the breaks.
            wanted: where there is such a point.
            rising: whether the break on the right is the one inside.
            is_inside: a function of scores and rows.
        """
        if not bool(wanted.any()):
            return left
        share = torch.linspace(0, 1, _POINTS, dtype=left.dtype, device=left.device)
        many = rows.repeat_interleave(_POINTS)
        for _ in range(_ROUNDS):
            t = left.unsqueeze(-1) + (right - left).unsqueeze(-1) * share
            inside = is_inside(self._scores(t.reshape(-1), many), many).reshape(t.shape)
            # f is monotone here: the number of points on the left of the root.
            number = torch.where(rising.unsqueeze(-1), ~inside, inside).sum(-1, keepdim=True).clamp(1, _POINTS - 1)
            left, right = t.gather(-1, number - 1).squeeze(-1), t.gather(-1, number).squeeze(-1)
        return torch.where(rising, right, left)

    def _moving(self, pieces: Pieces, at_start: Tensor, at_end: Tensor, a: Tensor) -> Pieces:
        """The same pieces with gradients of the ends of the support, to second order, by two Newton steps."""
        both = torch.stack([pieces.start, pieces.end], -1).reshape(-1)
        is_root = torch.stack([at_start, at_end], -1).reshape(-1)
        rows = pieces.rows.repeat_interleave(2)
        if not bool(is_root.any()):
            return pieces
        t = both
        for _ in range(2):
            with torch.enable_grad():
                leaf = t if t.requires_grad else t.detach().requires_grad_()
                scores = self._scores(leaf, rows)
                (slope,) = torch.autograd.grad(scores.sum(), leaf, create_graph=True, allow_unused=True)
            if slope is None:
                return pieces
            height = self._height(scores, a[rows])
            steep = is_root & (slope != 0)
            step = height / torch.where(steep, self._c * slope, 1.0)
            # The value stays that of the search, the derivative is Newton's.
            t = torch.where(steep, t - step, t)
        t = both + (t - t.detach())
        start, end = t.reshape(-1, 2).unbind(-1)
        return Pieces(start, end, pieces.rows, pieces.count)

    def _finish(self, breaks: Tensor, a: Tensor) -> None:
        """Keep A, the pieces and the nodes; with gradients if the score has any."""
        with torch.no_grad():
            pieces, at_start, at_end = self._pieces(breaks, a)
            nodes = self._rule(pieces, a)
        tracked = torch.is_grad_enabled() and self._tracks(pieces, nodes)
        moving = pieces
        if tracked:
            fixed = a
            for _ in range(2):
                moving = self._moving(pieces, at_start, at_end, a)
                mass, slope = self._mass(moving, nodes, a)
                a = a + mass.log() * mass / slope
            a = fixed + (a - a.detach())
            moving = self._moving(pieces, at_start, at_end, a)
        self._pieces_found, self._nodes, self._at = moving, nodes, (at_start, at_end)
        self._a = torch.where(self._bad, math.nan, a)
        self.log_partition = self._a.reshape(self.batch_shape)
        """A, (…)."""

    def _tracks(self, pieces: Pieces, nodes: Nodes) -> bool:
        t, _, rows = pieces.place(nodes)
        return self._scores(t[:1], rows[:1]).requires_grad if len(rows) else False

    @property
    def support(self) -> Tensor:  # type: ignore[override]
        """The intervals of the support in ascending order, (…, K, 2); rows with fewer than K are padded with NaN."""
        pieces, (at_start, at_end) = self._pieces_found, self._at
        rows = pieces.rows
        first = torch.ones_like(at_start)
        last = torch.ones_like(at_start)
        # Neighbouring pieces of one interval share an end that is no root.
        joined = (rows[1:] == rows[:-1]) & ~at_start[1:] & ~at_end[:-1] & (pieces.start[1:] == pieces.end[:-1])
        first[1:], last[:-1] = ~joined, ~joined
        owner = rows[first]
        place, counts = ranks(owner, self._count)
        size = int(counts.max()) if len(owner) else 0
        found = torch.full((self._count, size, 2), math.nan, dtype=self.dtype, device=rows.device)
        found = found.index_put((owner, place), torch.stack([pieces.start[first], pieces.end[last]], -1))
        return torch.where(self._bad[:, None, None], math.nan, found).reshape(*self.batch_shape, size, 2)

    # -- density -----------------------------------------------------------------------------------------------------

    def log_prob(self, value: Tensor) -> Tensor:
        check_floats(value, "value")
        t = value.to(self.dtype).expand(broadcast_shapes(value.shape, self.batch_shape))
        extra = t.shape[: t.dim() - len(self.batch_shape)]
        points = t.reshape(-1, *self.batch_shape).movedim(0, -1)
        scores = self.score(points.clamp(self.low, self.high)).to(self.dtype).expand(points.shape)
        log = self._log_density(scores, self.log_partition.unsqueeze(-1))
        log = torch.where((points < self.low) | (points > self.high), -math.inf, log)
        return log.movedim(-1, 0).reshape((*extra, *self.batch_shape)).to(value.dtype)

    def _weighted(self, pieces: Pieces, nodes: Nodes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Points (Q,), their rows, log p there (0 outside of the support) and p times the weights of the rule."""
        t, weights, rows = pieces.place(nodes)
        log = self._log_density(self._scores(t, rows), self._a[rows])
        kept = ~(log == -math.inf)
        log = torch.where(kept, log, 0.0)
        return t, rows, log, torch.where(kept, log.exp() * weights, 0.0)

    def expectation(self, basis: Any) -> Tensor:
        """E_p[ψ_j(t)], (…, n), of basis functions: a ``Basis``, or a module that returns (…, n) at points (…, 1).

        Panels are halved until the sums are stable; for a ``GaussianBasis`` none is longer than two standard deviations
        of the narrowest function, so that none is overlooked.
        """
        basis = as_line_basis(basis)
        found = expected(basis, self._pieces_found, self._log_at, _TOLERANCES[self.dtype])
        return torch.where(self._bad.unsqueeze(-1), math.nan, found).reshape(*self.batch_shape, len(basis))

    def _log_at(self, t: Tensor, rows: Tensor) -> Tensor:
        return self._log_density(self._scores(t, rows), self._a[rows])

    def entropy(self) -> Tensor:
        """The differential (Shannon) entropy, (…), in nats."""
        _, rows, log, p = self._weighted(self._pieces_found, self._nodes)
        return self._filled(-self._pieces_found.sums(p * log, rows))

    def tsallis_entropy(self) -> Tensor:
        r"""−Ω of the density, :math:`(1 - \int p^\alpha) / (\alpha(\alpha-1))`, (…); Shannon's for α = 1."""
        if self._c == 0:
            return self.entropy()
        _, rows, log, p = self._weighted(self._pieces_found, self._nodes)
        return self._filled(-self._pieces_found.sums(p * torch.expm1(self._c * log), rows) / (self.alpha * self._c))

    def _moment(self, power: int, around: Tensor) -> Tensor:
        t, rows, _, p = self._weighted(self._pieces_found, self._nodes)
        return self._pieces_found.sums(p * (t - around[rows]) ** power, rows)

    @property
    def mean(self) -> Tensor:
        middle = torch.full_like(self._a, 0.5 * (self.low + self.high))
        return self._filled(middle + self._moment(1, middle))

    @property
    def variance(self) -> Tensor:
        return self._filled(self._moment(2, self.mean.reshape(-1)))

    def _filled(self, values: Tensor) -> Tensor:
        return torch.where(self._bad, math.nan, values).reshape(self.batch_shape)

    # -- distribution function and samples ---------------------------------------------------------------------------

    def cdf(self, value: Tensor) -> Tensor:
        """The probability (…) of the interval up to value (…)."""
        check_floats(value, "value")
        return self._flat(value, lambda t, rows: self._below(t, rows)[0])

    def icdf(self, value: Tensor) -> Tensor:
        """The quantiles (…) of probabilities (…)."""
        check_floats(value, "value")
        check_entries((value >= 0) & (value <= 1), value, "value", "hold probabilities in [0, 1]")
        return self._flat(value, self._quantiles)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 (torch's own signature)
        shape = self._extended_shape(sample_shape)
        return self.icdf(torch.rand(shape, dtype=self.dtype, device=self._device))

    def _flat(self, value: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """A function of numbers (Q,) and ascending rows (Q,), applied to a tensor that broadcasts with the batch."""
        x = value.to(self.dtype).expand(broadcast_shapes(value.shape, self.batch_shape))
        shape = x.shape
        x = x.reshape(-1, self._count).mT  # (count, extra)
        rows = torch.arange(self._count, device=x.device).repeat_interleave(x.shape[1])
        found = function(x.reshape(-1), rows).reshape(x.shape)
        found = torch.where(self._bad.unsqueeze(-1), math.nan, found)
        return found.mT.reshape(shape).to(value.dtype)

    def _panels(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ends of the panels (P,), the mass of each, and the mass of its row up to its end."""
        pieces, nodes = self._pieces_found, self._nodes
        t, rows, _, p = self._weighted(pieces, nodes)
        points = nodes.share.shape[-1]
        rows = rows.reshape(-1, points)[:, 0]
        # One sum runs over all rows: in double precision, and past rows without a density.
        mass = torch.where(self._bad[rows], 0.0, p.reshape(-1, points).sum(-1))
        total = mass.cumsum(0, dtype=torch.float64)
        counts = torch.bincount(rows, minlength=self._count)
        before = torch.cat([total.new_zeros(1), total])[(counts.cumsum(0) - counts)]
        ends = t.reshape(-1, points)
        return ends[:, 0], ends[:, -1], mass, (total - before[rows]).to(mass.dtype)

    def _below(self, t: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The mass below points (Q,), and the index of the panel of each."""
        start, end, mass, upto = self._panels()
        owner = self._pieces_found.rows[self._nodes.piece]
        counts = torch.bincount(owner, minlength=self._count)
        first = counts.cumsum(0) - counts
        # Panels are sorted by row and place; a key makes rows disjoint, so that one search serves all.
        span = self.high - self.low + 1
        keys = (owner * span + end.detach().double() - self.low).contiguous()
        panel = torch.searchsorted(keys, (rows * span + t.detach().double() - self.low).contiguous())
        panel = torch.minimum(torch.maximum(panel, first[rows]), (first + counts - 1)[rows])
        return self._part(t, rows, panel, start, mass, upto), panel

    def _part(self, t: Tensor, rows: Tensor, panel: Tensor, start: Tensor, mass: Tensor, upto: Tensor) -> Tensor:
        """The mass below points inside of panels."""
        pieces, nodes = self._pieces_found, self._nodes
        begin, end = start[panel], pieces.end[nodes.piece[panel]]
        part = Pieces(begin, torch.minimum(torch.maximum(t, begin), end), rows, self._count)
        share, weights = (t.detach().new_tensor(v).expand(len(t), -1) for v in gauss_legendre(_PART_POINTS))
        _, _, _, p = self._weighted(part, Nodes(torch.arange(len(t), device=t.device), share, weights, mass))
        return upto[panel] - mass[panel] + p.reshape(len(t), -1).sum(-1)

    def _quantiles(self, q: Tensor, rows: Tensor) -> Tensor:
        with torch.no_grad():
            start, end, mass, upto = self._panels()
            owner = self._pieces_found.rows[self._nodes.piece]
            counts = torch.bincount(owner, minlength=self._count)
            first = counts.cumsum(0) - counts
            panel = torch.searchsorted((2 * owner + upto.double()).contiguous(), 2 * rows + q.double())
            panel = torch.minimum(torch.maximum(panel, first[rows]), (first + counts - 1)[rows])
            left, right = start[panel], end[panel]
            for _ in range(50 if self.dtype == torch.float64 else 25):
                middle = 0.5 * (left + right)
                is_below = self._part(middle, rows, panel, start, mass, upto) < q
                left, right = torch.where(is_below, middle, left), torch.where(is_below, right, middle)
            found = 0.5 * (left + right)
        if not (torch.is_grad_enabled() and (q.requires_grad or self._a.requires_grad)):
            return found
        t = found
        for _ in range(2):  # Newton's steps: the value stays, derivatives to second order appear
            log = self._log_at(t, rows)
            log = torch.where(log == -math.inf, 0.0, log)
            t = t - (self._below(t, rows)[0] - q) * torch.exp(-log)
        return found + (t - t.detach())
