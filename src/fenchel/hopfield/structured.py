"""Certificates of structures: when SparseMAP over a structure returns an association, and from how far.

A structure y is returned at scores θ if and only if its slack over every other structure y′ is not negative:
⟨θ − y, y − y′⟩ + h(y) − h(y′), where h are higher-order scores. Everything here asks the oracle of the structure for
the y′ that is best for some scores, and then computes its terms precisely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.streaming.plan import plan_pairs
from fenchel.structures import SparseMAP
from fenchel.structures.base import best, free_parts

PROBES = 200
"""The most calls of the oracle for one number of a structure; a handful is usual."""


class Sizes(NamedTuple):
    """Bounds of ‖Xᵀ(y − y′)‖ for patterns X and any two structures.

    Args:
        norms: (N,): it is at most the sum of these over the parts in which y and y′ differ.
        spectral: it is at most this times ‖y − y′‖.
    """

    norms: Tensor
    spectral: Tensor


def certify_structures(
    read: Callable[[], Iterator[tuple[int, Tensor]]], omega: SparseMAP, gamma: float, beta: float, chosen: Tensor
) -> tuple[Tensor, ...]:
    r"""Certify structures, boolean (A, N), among N patterns X with calls of the oracle.

    One update takes q to the sum of y if and only if the slack of y over every y′ is not negative. The slack is an
    affine function of q with slope β/γ ‖Xᵀ(y − y′)‖, hence the radius of the largest ball is the minimum of
    slack / (β/γ ‖Xᵀ(y − y′)‖) over all y′. The slack is linear in y′, the norm is not, and the minimum is
    bounded from below by two bounds of the norm, of which the better one counts.

    1. Σ aᵢ over the parts in which y and y′ differ, with aᵢ the norms of the patterns (if all structures have equally
       many parts, of the patterns minus any vector). The minimum of this ratio of linear functions is found by
       Dinkelbach's method, exactly.
    2. σ ‖y − y′‖ with the largest singular value σ. With d = ‖y − y′‖², the least slack c and the least ratio l of
       slack to d, the slack is at least max(c, l·d), and the bound is the minimum of max(c, l·d) / (σ√d) over the
       possible d.

    Neither is smaller than the radius of Proposition 5. The radius is exact where the y′ that attains the first bound
    has that norm. It is −inf where y is not returned from its own sum.

    Args:
        read: yields blocks of patterns, each with the index of its first pattern.
        omega: SparseMAP over the structure.
        gamma: its temperature.
        beta: inverse temperature.
        chosen: boolean (A, N).

    Returns:
        The fields of ``Certificate``, (A,) each.
    """
    problem = _Problem(read, omega, gamma, chosen)
    separation = problem.separation()
    least, known = _least_accepted(problem.worst, torch.zeros(len(chosen), dtype=torch.float64, device="cpu"))
    at = torch.full_like(least, beta)
    stationary = (least < math.inf) & ~problem.worst(at)[-1]
    # Where scores at this β are rounded by more than margins differ, the oracle cannot decide.
    known &= (least == math.inf) | (least * problem.rounding < 1e-3)
    radius, exact = problem.radius(beta)
    radius = torch.where(stationary, radius.clamp_min(0.0), -math.inf)
    return separation, stationary, radius, torch.where(known, least, math.nan), exact & stationary


class _Problem:
    """Structures y, (A, N), with the scores of their sums, (A, N), and an oracle."""

    def __init__(
        self, read: Callable[[], Iterator[tuple[int, Tensor]]], omega: SparseMAP, gamma: float, chosen: Tensor
    ) -> None:
        self.read, self.structure, self.gamma = read, omega.structure, gamma
        self.y = y = chosen.double()
        self.q = torch.stack([y[:, start : start + len(block)] @ block.double() for start, block in read()]).sum(0)
        scores = torch.cat([self.q @ block.double().T for _, block in read()], -1) / gamma
        omega.check_target(y, scores, -1, None)
        largest = torch.stack([torch.linalg.vector_norm(block.double(), dim=-1).amax() for _, block in read()]).amax()
        norm = torch.linalg.vector_norm(self.q, dim=-1)
        self.rounding = 32 * torch.finfo(torch.float64).eps * (1 + y.sum(-1)) * norm * largest / gamma
        self.free = free_parts(self.structure, scores, None)
        self.fixed = self.structure.fixed_dims > 0
        self.theta = torch.where(self.free, scores, 0.0)
        if self.fixed:  # an offset changes nothing then
            top = torch.where(self.free, scores, -math.inf).amax(-1, keepdim=True)
            self.theta = torch.where(self.free, scores - top, 0.0)
        higher = self.structure.higher(y)
        self.higher = None if higher is None else higher.double().expand(len(y))

    # -- the slack ---------------------------------------------------------------------------------------

    def terms(self, rows: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """⟨s, y′ − y⟩ and −⟨y, y′ − y⟩ + h(y′) − h(y) of structures y′, (R, N), for some of the rows, (R,).

        They are returned separately, unlike in ``SparseMAP.violation``: at a large β their sum would round the second
        one away.
        """
        y = self.y[rows]
        moved = other - y
        constant = -(moved * y).sum(-1)
        if self.higher is not None:
            after = self.structure.higher(other)
            assert after is not None
            constant = constant + after.double() - self.higher[rows]
        return (moved * self.theta[rows]).sum(-1), constant

    def slack(self, beta: float, rows: Tensor, other: Tensor) -> Tensor:
        """⟨βs − y, y − y′⟩ + h(y) − h(y′)."""
        lead, constant = self.terms(rows, other)
        return -(beta * lead + constant)

    def best(self, rows: Tensor, scores: Tensor) -> Tensor:
        """The best structures for scores (R, N) of some of the rows."""
        free = self.free[rows]
        return best(self.structure, torch.where(free, scores, -math.inf), free).double()

    def worst(self, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The terms of the y′ that violates the margin of y most at β, (A,), and whether it does violate it."""
        rows = torch.arange(len(self.y), device="cpu")
        a, c = self.terms(rows, self.best(rows, beta.unsqueeze(-1) * self.theta - self.y))
        impossible = c.isnan() | (c == math.inf) | ((self.y != 0) & ~self.free).any(-1)  # h(y) may be −inf
        a = torch.where((a.abs() <= self.rounding) | impossible, 0.0, a)  # a tie, whatever β
        return a, c, (beta * a + c > 1e-12 * (1 + c.abs())) | impossible

    # -- the best of all other structures ------------------------------------------------------------------

    def others(self, scores: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each y, structures y′ ≠ y of which one is the best for scores (A, N): rows, (R,), and structures, (R, N).

        Every y′ lacks a part of y or, where sizes differ, has one that y does not have. The best of those that differ
        from y in a given part is the best for scores in which that part has a large penalty, or a large bonus.
        """
        pairs = (self.y == 1 if self.fixed else self.free).nonzero()
        size = 1 + torch.where(self.free, scores, 0.0).abs().sum(-1)
        if self.higher is not None:
            size = size + torch.where(self.higher.isfinite(), self.higher.abs(), 0.0)
        for some in torch.split(pairs, max(plan_pairs().held // scores.shape[1], 1)):
            rows, parts = some.unbind(-1)
            for large in (64.0, 1e8):  # the second only where higher-order scores are larger than the first
                each, wanted = torch.arange(len(rows), device="cpu"), 1 - self.y[rows, parts]
                changed = scores[rows]
                changed[each, parts] += large * size[rows] * (2 * wanted - 1)
                found = self.best(rows, changed)
                differs = found[each, parts] == wanted
                yield rows[differs], found[differs]
                rows, parts = rows[~differs], parts[~differs]
                if not len(rows):
                    break

    def separation(self) -> Tensor:
        """The least lead in score over another structure, (A,); inf if there is none.

        Scores are scaled so that higher-order scores, which the oracle adds, decide between ties only.
        """
        scale = torch.ones(len(self.y), dtype=torch.float64, device="cpu")
        if self.higher is not None:
            spread = self.theta.abs().amax(-1)
            scale = 1e9 * (1 + self.higher.abs().nan_to_num(0.0, 0.0)) / torch.where(spread > 0, spread, 1.0)
        least = torch.full_like(scale, math.inf)
        for rows, other in self.others(scale.unsqueeze(-1) * self.theta):
            least.scatter_reduce_(0, rows, -self.terms(rows, other)[0] * self.gamma, "amin")
        return least

    # -- the radius ----------------------------------------------------------------------------------------

    def radius(self, beta: float) -> tuple[Tensor, Tensor]:
        """A lower bound of the radius, (A,), valid where y is returned, and whether it is the radius."""
        count, parts = self.y.shape
        bounds = self._sizes()
        least, nearest = self._least_slack(beta)
        ratio, tightest = self._least_ratio(beta, bounds.norms, least, nearest)
        per_part, _ = self._least_ratio(beta, torch.ones_like(bounds.norms), least, nearest)
        # Structures of one size differ in two parts at least.
        size = self.y.sum(-1)
        most = 2 * torch.minimum(size, parts - size) if self.fixed else torch.full_like(size, parts)
        few = 2.0 if self.fixed else 1.0
        distance = (least / per_part).nan_to_num(few).clamp_min(few).minimum(most.clamp_min(few))
        by_spectrum = torch.maximum(least, per_part * distance) / (bounds.spectral * distance.sqrt())
        unit = self.gamma / beta
        radius = unit * torch.maximum(ratio, by_spectrum.nan_to_num(0.0, math.inf))
        alone = least == math.inf
        rows = torch.arange(count, device="cpu")
        attained = unit * torch.minimum(*(self._attained(beta, rows, other) for other in (nearest, tightest)))
        exact = alone | (attained <= radius * (1 + 1e-9) + 1e-300)
        return torch.where(alone, math.inf, radius), exact

    def _sizes(self) -> Sizes:
        """Bounds of ‖Xᵀ(y − y′)‖. Where all structures have equally many parts, X may be shifted."""
        total = torch.stack([block.double().sum(0) for _, block in self.read()]).sum(0)
        mean = total / self.y.shape[1]
        shifts = [mean, torch.zeros_like(mean)] if self.fixed else [torch.zeros_like(mean)]
        norms = [
            torch.cat([torch.linalg.vector_norm(block.double() - shift, dim=-1) for _, block in self.read()])
            for shift in shifts
        ]
        shortest = min(norms, key=lambda each: float(each.amax()))
        count, width = self.y.shape[1], len(mean)
        if width <= count:
            gram = torch.zeros(width, width, dtype=torch.float64, device="cpu")
            for _, block in self.read():
                centered = block.double() - shifts[0]
                gram.addmm_(centered.T, centered)
        else:
            centered = torch.cat([block.double() - shifts[0] for _, block in self.read()])
            gram = centered @ centered.T
        spectral = torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt() * (1 + 1e-12)
        # Patterns that equal the shift: nothing is divided by zero.
        return Sizes(shortest.clamp_min(1e-150), spectral)

    def _least_slack(self, beta: float) -> tuple[Tensor, Tensor]:
        """The least slack of y over another structure, (A,), inf if there is none; and that structure."""
        least, nearest = self.y.new_full((len(self.y),), math.inf), self.y.clone()
        for rows, other in self.others(beta * self.theta - self.y):
            slack = self.slack(beta, rows, other)
            low = torch.full_like(least, math.inf).scatter_reduce(0, rows, slack, "amin")
            hit = ((slack == low[rows]) & (slack < least[rows])).nonzero().squeeze(-1)
            first = torch.full_like(least, len(rows)).long().scatter_reduce(0, rows[hit], hit, "amin")
            closer = first < len(rows)
            least[closer], nearest[closer] = slack[first[closer]], other[first[closer]]
        return least, nearest

    def _least_ratio(self, beta: float, weights: Tensor, least: Tensor, nearest: Tensor) -> tuple[Tensor, Tensor]:
        """The least of slack / Σ weights of the parts in which y′ differs, (A,), by Dinkelbach's method, and its y′.

        Each step takes the y′ that minimizes slack − ratio · Σ weights for the last ratio; its own ratio is smaller,
        unless the last one was the least. Where y is not returned, or steps are not enough, the result is 0.
        """
        other = nearest.clone()
        rows = ((least > 0) & (least < math.inf)).nonzero().squeeze(-1)
        ratio = torch.zeros_like(least)
        apart = ((self.y - other).abs() * weights).sum(-1)
        ratio[rows] = least[rows] / apart[rows]
        for _ in range(PROBES):
            if not len(rows):
                break
            y = self.y[rows]
            bonus = ratio[rows].unsqueeze(-1) * weights * (1 - 2 * y)
            found = self.best(rows, beta * self.theta[rows] - y + bonus)
            slack, apart = self.slack(beta, rows, found), ((y - found).abs() * weights).sum(-1)
            lower = slack < ratio[rows] * apart - 1e-13 * (1 + slack.abs())
            rows = rows[lower]
            ratio[rows], other[rows] = slack[lower] / apart[lower], found[lower]
        ratio[rows] = 0.0
        return ratio, other

    def _attained(self, beta: float, rows: Tensor, other: Tensor) -> Tensor:
        """slack / ‖Xᵀ(y − y′)‖ for one y′ per structure."""
        moved = self.y - other
        parts = [moved[:, start : start + len(block)] @ block.double() for start, block in self.read()]
        norm = torch.linalg.vector_norm(torch.stack(parts).sum(0), dim=-1)
        slack = self.slack(beta, rows, other)
        return torch.where(norm > 0, slack / torch.where(norm > 0, norm, 1.0), math.inf)


def _least_accepted(worst: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], least: Tensor) -> tuple[Tensor, Tensor]:
    """The least β > 0 at which no margin is violated, inf if there is none; and whether it was found."""
    trial, done = torch.zeros_like(least), torch.zeros_like(least, dtype=torch.bool)
    for _ in range(PROBES):
        a, c, violated = worst(torch.where(least > 0, least, trial))
        # No violation at 0 is not enough: a y′ that ties there and leads in score violates every β > 0. Try one.
        first = ~done & ~violated & (least == 0) & (trial == 0)
        smaller = violated & (trial > 0) & (least == 0) & (a > 0) & (c < 0)
        never = violated & ~smaller & (a >= 0)
        raised = violated & ~smaller & (a < 0)
        trial = torch.where(first, 1.0, torch.where(smaller & ~done, -c / torch.where(smaller, a, 1.0) / 2, trial))
        least = torch.where(done, least, torch.where(never, math.inf, least))
        least = torch.where(raised & ~done, c / torch.where(raised, -a, 1.0), least)
        done = done | never | (~violated & ~first)
        if bool(done.all()):
            break
    return least, done
