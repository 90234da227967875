r"""The entmax of rows whose entries live on several ranks: one offset per row, equal on all ranks.

With c = α − 1, p = [1 + c(z − A)]₊^(1/c), where the offset A makes the p of all ranks sum to 1. The offset of a part of
the row is a lower bound of the whole row's, since more entries raise it: the largest of the ranks' own offsets, one
all-reduce, is where Newton's method on (Σp)^c = 1 starts. That function is convex in A, so the steps go up. Every round
reduces a few sums per row, in double precision; all ranks get the same sums and stop after the same round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel.distributed.collectives import Group, all_max, all_sum, rank_in
from fenchel.regularizers.solvers.thresholds import wide
from fenchel.regularizers.tsallis import TSALLIS

Alpha = float | Tensor
"""A number, or a tensor with one value per row, (R, 1), in double precision."""

_MOST_ROUNDS = 64
_TINY = 1e-20  # so near to c = 0, where p = exp(z − A), nothing changes any more


@dataclass(frozen=True)
class Bounds:
    """What is known of rows before their offsets are computed: one value per row each, (R, 1), in double precision.

    Args:
        top: the largest score, −inf if there is none.
        offset: a lower bound of the offset A, −inf if there is no score.
        bad: whether a score is NaN or +inf.
        too_many: whether more entries may have mass than are listed; after ``shared``, on any rank.
        first: after ``shared``, how many entries the ranks before this one have.
        total: after ``shared``, how many all ranks have.
    """

    top: Tensor
    offset: Tensor
    bad: Tensor
    too_many: bool = False
    first: int = 0
    total: int = 0

    def shared(self, size: int, ranks: int, group: Group) -> Bounds:
        """The bounds of the whole rows, from those of all ranks' parts, by one all-reduce.

        Args:
            size: how many entries this rank has.
            ranks: the number of ranks.
            group: the process group.
        """
        rows, rank = len(self.top), rank_in(group)
        numbers = self.top.new_zeros(3 * rows + ranks + 1)
        numbers[: 3 * rows] = torch.cat([self.top, self.offset, self.bad.to(self.top.dtype)], -1).view(-1)
        numbers[3 * rows + rank] = size
        numbers[-1] = self.too_many
        all_max(numbers, group)
        top, offset, bad = (each.unsqueeze(-1) for each in numbers[: 3 * rows].view(rows, 3).unbind(-1))
        sizes = numbers[3 * rows : -1]
        too_many, first, total = torch.stack([numbers[-1], sizes[:rank].sum(), sizes.sum()]).tolist()
        return Bounds(top, offset, bad > 0, too_many > 0, int(first), int(total))

    def level(self, alpha: Alpha) -> Tensor:
        """A score below which no entry has mass, (R, 1): A − 1/c, lowered by far more than rounding."""
        c = _above_zero(alpha)
        return self.offset - (1 / c + 1e-3) - 1e-6 * self.top.abs()


@dataclass(frozen=True)
class Entries:
    """This rank's entries of rows that may have mass, (R, m), −inf where a row has fewer.

    Args:
        scores: less the largest score of the row, in double precision; for ``alpha = 1`` in that of the row.
        place: (R, m), where each stands in this rank's part; None if all entries are there in order.
    """

    scores: Tensor
    place: Tensor | None

    def spread(self, values: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Values (R, m) of the entries at their places in rows (R, width), 0 elsewhere."""
        if self.place is None:
            return values.to(dtype)
        # Places of padding repeat the first one, where nothing is to be added.
        return torch.zeros(len(values), width, dtype=dtype, device=values.device).scatter_add_(
            -1, self.place, values.to(dtype)
        )


@dataclass(frozen=True)
class Solution:
    """The choice in rows, this rank's part.

    Args:
        entries: the entries that may have mass.
        offset: (R, 1), A less the largest score of the row, equal on all ranks.
        value: (R, 1), max_Ω less the largest score of the row, equal on all ranks.
        reached: (R, 1), the sum over ranks of what was given as such.
        alpha: that of the rows.
        rounds: how many all-reduces of sums there were.
        broken: (R, 1), rows that are NaN.
    """

    entries: Entries
    offset: Tensor
    value: Tensor
    reached: Tensor
    alpha: Alpha
    rounds: int
    broken: Tensor

    def probabilities(self) -> Tensor:
        """p of the entries, (R, m), in double precision; 0 in rows that are NaN."""
        p, _ = choose(self.entries.scores - self.offset.to(self.entries.scores.dtype), self.alpha)
        return p.masked_fill_(self.broken, 0.0) if bool(self.broken.any()) else p

    def spread(self, values: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Values of the entries at their places in rows (R, width), 0 elsewhere; rows that are NaN are so entirely."""
        rows = self.entries.spread(values, width, dtype)
        return rows.masked_fill_(self.broken, torch.nan) if bool(self.broken.any()) else rows


def local_bounds(z: Tensor, alpha: Alpha) -> Bounds:
    """The bounds of this rank's part (R, n) of rows, in float32 or better; by a kernel where there is one."""
    exact = wide(z)
    if not z.shape[-1]:
        nothing = z.new_full((len(z), 1), -torch.inf, dtype=exact)
        return Bounds(nothing, nothing, torch.zeros_like(nothing, dtype=torch.bool))
    if _is_one(alpha):  # one round is enough from any offset
        top = z.amax(-1, keepdim=True).to(exact)
        bad = top.isnan() | (top == torch.inf)
        top = torch.where(bad, -torch.inf, top)
        return Bounds(top, top, bad)
    own = TSALLIS.align(z, alpha)
    # Its largest p alone is needed: (1 − p^c)/c is how far the offset is above the largest score.
    p = TSALLIS.solve_any(z, *own).amax(-1, keepdim=True).to(exact)
    top = z.amax(-1, keepdim=True).to(exact)
    bad = p.isnan()
    c = _above_zero(alpha)
    above = -torch.expm1(c * p.log()) / c - 16 * torch.finfo(z.dtype).eps
    top = torch.where(bad, -torch.inf, top)
    offset = torch.where(top == -torch.inf, top, top + above.clamp_min(0) - 4 * torch.finfo(exact).eps * top.abs())
    return Bounds(top, offset, bad)


def shifted(z: Tensor, top: Tensor, alpha: Alpha) -> Entries:
    """All entries of rows (R, n), less the rows' largest scores."""
    base = torch.where(top > -torch.inf, top, 0.0)
    # Softmax is not steep anywhere: the precision of the scores is enough, which are many.
    return Entries(z - base.to(z.dtype) if _is_one(alpha) else z.to(wide(z)) - base, None)


def candidates(z: Tensor, bounds: Bounds, alpha: Alpha, top: Tensor) -> Entries:
    """The entries of rows (R, n) above the level of bounds, less the rows' ``top``; all where they are many."""
    exact, (rows, n) = wide(z), z.shape
    if n and not _is_one(alpha):
        level, base = bounds.level(alpha), torch.where(top > -torch.inf, top, 0.0)
        above = z > level.to(z.dtype)
        count = above.sum(-1)
        most = int(count.max()) if rows else 0
        if 4 * most <= n:
            row, column = above.nonzero(as_tuple=True)
            position = torch.arange(len(row), device=z.device) - (count.cumsum(0) - count)[row]
            scores = z.new_full((rows, most), -torch.inf, dtype=exact)
            place = torch.zeros(rows, most, dtype=torch.long, device=z.device)
            scores[row, position] = z[row, column].to(exact)
            place[row, position] = column
            return Entries(scores - base, place)
    return shifted(z, top, alpha)


def choose(u: Tensor, alpha: Alpha) -> tuple[Tensor, Tensor]:
    """p = [1 + c·u]₊^(1/c) and s = p^(1−c), minus its derivative in the offset, of scores less the offset."""
    if isinstance(alpha, Tensor) or 0 < alpha - 1 < 0.25:
        c = _above_zero(alpha)
        log = torch.log1p((c * u).clamp_min(-1))
        p = (log / c).exp()
        return p, torch.where(p > 0, (log * (1 / c - 1)).exp(), 0.0)
    c = alpha - 1
    if c == 0:
        p = u.exp()
        return p, p
    x = (1 + c * u).clamp_min(0)
    if c == 1:
        return x, x.sign()
    if c == 0.5:
        return x.square(), x
    p = x.pow(1 / c)
    return p, torch.where(x > 0, x.pow(1 / c - 1), 0.0)


def solve(
    entries: Entries, bounds: Bounds, alpha: Alpha, reached: Tensor | None, dtype: torch.dtype, group: Group
) -> Solution:
    """The offsets of rows by rounds of Newton's method, as many on every rank.

    Args:
        entries: this rank's entries that may have mass.
        bounds: of the whole rows, shared.
        alpha: in [1, 2].
        reached: (R, 1), a number of this rank per row, added over the ranks in the first round; None for 0.
        dtype: of the scores, which says how exact the result has to be.
        group: the process group.
    """
    u, top = entries.scores, bounds.top
    idle = bounds.bad | (top == -torch.inf)
    sent = top.new_zeros(len(u), 1) if reached is None else reached
    if _is_one(alpha):  # max_Ω is the offset: log Σ exp
        mass = torch.where(idle, 0.0, u.exp().sum(-1, keepdim=True, dtype=top.dtype))
        shared = all_sum(torch.cat([mass, sent], -1), group)
        offset = torch.where(idle, 0.0, shared[:, :1].log())
        return Solution(entries, offset, offset, shared[:, 1:], alpha, 1, bounds.bad)
    a = torch.where(idle, 0.0, bounds.offset - top).clamp_min(0)
    c = alpha - 1
    goal = 1e-9 if torch.finfo(dtype).eps > 1e-10 else 1e-14
    # After a step δ the error is of the order δ², or δ^(1/c) where entries leave the support.
    tolerance = goal ** (c.clamp_min(0.5) if isinstance(c, Tensor) else max(c, 0.5))
    total = sent
    step = torch.zeros_like(a)
    for rounds in range(1, _MOST_ROUNDS + 1):
        p, s = choose(u - a, alpha)
        mean = torch.where(p > 0, p * (u - a), 0.0)
        sums = [p.sum(-1, keepdim=True), s.sum(-1, keepdim=True), mean.sum(-1, keepdim=True)]
        sums = [torch.where(idle, 0.0, each) for each in sums]
        shared = all_sum(torch.cat([*sums, sent] if rounds == 1 else sums, -1), group)
        mass, slope, mean = shared[:, :1], shared[:, 1:2], shared[:, 2:3]
        total = shared[:, 3:] if rounds == 1 else total
        log = mass.clamp_min(torch.finfo(u.dtype).tiny).log()
        ratio = -torch.expm1(-_above_zero(alpha) * log) / _above_zero(alpha)
        step = torch.where(slope > 0, mass * ratio / slope.clamp_min(torch.finfo(u.dtype).tiny), 0.0)
        if bool((step.abs() <= tolerance * a.clamp_min(1)).all()):
            break
        a = a + step
    # The dual value A + (cV + S − 1)/α is least at the right offset; its terms up to second order in the last step.
    value = a + (c * mean + mass - 1) / alpha + (1 - mass) * step + slope * step.square() / 2
    value = torch.where(idle, 0.0, value)
    return Solution(entries, a + step, value, total, alpha, rounds, bounds.bad)


def solve_rows(
    z: Tensor, alpha: Alpha, ranks: int, group: Group, index: Tensor | None = None
) -> tuple[Solution, Bounds, Tensor | None]:
    """The choice in rows of which this rank has a part (R, n); with class indices (R,) also the score of the class.

    Returns:
        The solution, whose ``reached`` is the score of the class less the largest of the row; the shared bounds; and
        the index in this rank's part, −1 where the class is on another rank or is ignored.
    """
    bounds = local_bounds(z, alpha).shared(z.shape[-1], ranks, group)
    entries = candidates(z, bounds, alpha, bounds.top)
    place = reached = None
    if index is not None:
        place = local_index(index, bounds, z.shape[-1])
        reached = score_at(z, place, bounds.top)
    return solve(entries, bounds, alpha, reached, z.dtype, group), bounds, place


def local_index(index: Tensor, bounds: Bounds, size: int) -> Tensor:
    """Class indices as places in this rank's part, −1 for those of other ranks and where an index is negative."""
    place = index - bounds.first
    return torch.where((place >= 0) & (place < size) & (index >= 0), place, -1)


def score_at(z: Tensor, place: Tensor, top: Tensor) -> Tensor:
    """The score at a place of each row (R, n), less the row's largest, (R, 1); 0 where the place is −1."""
    if not z.shape[-1]:
        return torch.zeros_like(top)
    own = z.gather(-1, place.clamp_min(0).unsqueeze(-1)).to(top.dtype) - torch.where(top > -torch.inf, top, 0.0)
    own = torch.where(own.isnan(), 0.0, own)  # the row is NaN anyway
    return torch.where(place.unsqueeze(-1) >= 0, own, 0.0)


def slope_in_alpha(solution: Solution, group: Group) -> Tensor:
    """∂max_Ω/∂α of whole rows, (R, 1), by one all-reduce."""
    p = solution.probabilities()
    alpha = solution.alpha if isinstance(solution.alpha, Tensor) else p.new_full((len(p), 1), solution.alpha)
    own = TSALLIS.envelope(None, p, alpha)[0] if p.shape[-1] else torch.zeros_like(solution.offset)
    return all_sum(own.contiguous(), group)


def _is_one(alpha: Alpha) -> bool:
    """Whether alpha is the number 1: softmax."""
    return not isinstance(alpha, Tensor) and alpha == 1


def _above_zero(alpha: Alpha) -> Alpha:
    """c = α − 1, replaced by a tiny number at 0, so that it can be divided by."""
    if isinstance(alpha, Tensor):
        c = alpha - 1
        return torch.where(c.abs() < _TINY, _TINY, c)
    return max(alpha - 1, _TINY)
