"""Which patterns a memory retrieves exactly, and from how far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import torch
from torch import Tensor

from fenchel._checks import check_mask
from fenchel.hopfield.structured import certify_structures
from fenchel.regularizers.base import Regularizer
from fenchel.streaming.plan import plan_pairs
from fenchel.structures import SparseMAP

Read = Callable[[], Iterator[tuple[int, Tensor]]]
"""``read()`` yields all patterns by blocks of the plan: the index of the first, and the block."""


@dataclass(frozen=True)
class Certificate:
    r"""Exact retrieval by a memory: five tensors with one value per pattern, or per association.

    Numbers are in double precision. With the margin m of Ω a state q gives pattern i all weight if and only if it
    leads: :math:`q^\top (x_i - x_j) \ge m/\beta` for every other j. For k patterns at once each of them has to lead
    every pattern that is not among them. All fields follow from that, for patterns of any norm. A structure y with
    higher-order scores h is chosen by SparseMAP if and only if :math:`\langle \beta X q - y, y - y' \rangle + h(y) -
    h(y') \ge 0` for every other y′.

    Args:
        separation: :math:`\Delta_i = x_i^\top x_i - \max_{j \ne i} x_i^\top x_j`. For an association y, with state
            :math:`q = X^\top y`, the least of :math:`q^\top X^\top (y - y')` over all other associations y′,
            higher-order scores not counted; negative if another one has a higher score.
        stationary: whether an update leaves the pattern, or the sum of the association, where it is. For a pattern
            outside the convex hull of the others that is :math:`\Delta_i \ge m/\beta`, and no other is. Copies of one
            pattern (Δ = 0) share the weight and need a smaller lead over the rest, which is accounted for here and
            below. An association with some but not all copies of a pattern counts as not stationary, for they share
            the weight. A pattern inside the hull of others may be a fixed point by their weights, which is not covered.
        radius: of the largest ball around it from which one update leads to it exactly, negative if it is not
            stationary: :math:`\min_j (x_i^\top (x_i - x_j) - m/\beta) / \|x_i - x_j\|`. Tight: beyond, in the direction
            of the j that attains it, another pattern gets weight. For k patterns at once it is the minimum over single
            swaps, one pattern out and one in, of the same ratio. For structures see ``exact``. Distances are those of
            normalized queries.
        min_beta: the smallest β that makes it stationary; inf if none does. For a pattern, or patterns without
            higher-order scores, all larger β do too; with transitions a larger β may be too large. NaN for a
            structure where double precision is not enough to find it.
        exact: whether ``radius`` is the largest one. False for most structures with higher-order scores or constraints
            of their own, where it is a lower bound, positive if any ball is, and never below that of Proposition 5; it
            is −inf if they are not stationary.

    Example:
        >>> import torch, fenchel
        >>> fenchel.hopfield.Memory(2 * torch.eye(3), fenchel.Gini()).certify().radius  # (4 − 1) / √8
        tensor([1.0607, 1.0607, 1.0607], dtype=torch.float64)

    References: Santos et al. (2024), Propositions 2 and 5, where the radii are smaller.
    """

    separation: Tensor
    stationary: Tensor
    radius: Tensor
    min_beta: Tensor
    exact: Tensor


def certify_patterns(
    read: Read, count: int, omega: Regularizer, beta: float, wanted: Tensor | None = None, own: Read | None = None
) -> Certificate:
    """Certify each pattern on its own, without a matrix of all pairs; or those that are wanted, boolean (N,).

    ``own`` reads blocks of the wanted patterns at least, where ``read`` may not be called for them alone.
    """
    group, copies = _groups(read, count)
    lead = needed_lead(omega, copies)
    if lead is None:
        raise ValueError(
            f"patterns are certified for an Ω that chooses one of them and has a known margin, omega is {omega}; for "
            "several at once pass associations"
        )
    wanted = torch.ones(count, dtype=torch.bool, device="cpu") if wanted is None else wanted
    needed = lead / beta
    gap, radius = torch.full((2, count), math.nan, dtype=torch.float64, device="cpu")
    mean = torch.stack([block.double().sum(0) for _, block in read()]).sum(0) / count
    for i, patterns in _gathered(own or read, wanted):
        exact = count * count * patterns.shape[1] <= plan_pairs().exact
        dtype = torch.float64 if exact else torch.promote_types(patterns.dtype, torch.float32)
        here = _Centered(patterns, mean, dtype)
        gap[i], radius[i], _ = _least_leads(read, here, needed[i], partial(_same_group, group[i], group))
    separation = torch.where(copies > 1, gap.clamp_max(0.0), gap)
    found = (separation, _enough(gap, needed), radius, _least_beta(lead, gap), torch.ones_like(wanted))
    return Certificate(*(each[wanted] for each in found))


def _gathered(read: Read, wanted: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Wanted patterns by blocks of the plan, each as their indices (n,) and the patterns (n, D), in one pass."""
    places: list[Tensor] = []
    rows: list[Tensor] = []
    held = 0
    for start, block in read():
        i = wanted[start : start + len(block)].nonzero().squeeze(-1)
        if held + len(i) > plan_pairs().columns:
            yield torch.cat(places), torch.cat(rows)
            places, rows, held = [], [], 0
        if len(i):
            places, rows, held = [*places, start + i], [*rows, block[i]], held + len(i)
    if held:
        yield torch.cat(places), torch.cat(rows)


class _Centered:
    """Patterns (R, D), of which every k form a set, minus a mean (D,), and their products.

    With a large common offset, products of the patterns themselves would round away their differences.

    Args:
        patterns: (R, D).
        mean: (D,), of all patterns.
        dtype: in which products with other patterns are computed.
        k: patterns per set.
    """

    def __init__(self, patterns: Tensor, mean: Tensor, dtype: torch.dtype, k: int = 1) -> None:
        self.patterns, self.mean, self.k = patterns.double(), mean, k
        self.state = self._sums(self.patterns)  # q, the sum of a set
        centered = self.patterns - mean
        self.times_mean = centered @ mean
        self.centered = centered.to(dtype)
        centered = self.centered.double()
        self.square = centered.square().sum(-1)
        self.times_state = (centered * self._sums(centered)).sum(-1)

    def _sums(self, rows: Tensor) -> Tensor:
        """The sum of each set, for every row of the set."""
        if self.k == 1:
            return rows
        return rows.reshape(-1, self.k, rows.shape[1]).sum(1).repeat_interleave(self.k, 0)

    def compare(self, other: _Centered, same: Tensor) -> tuple[Tensor, Tensor]:
        """⟨q, x − x′⟩ and ‖x − x′‖ for patterns x of this and x′ of the other, where q is the sum of the set of x.

        Computed from differences where these are small, and products of the patterns would be imprecise.
        """
        # In place where possible: new memory for matrices of this size takes longer than the arithmetic.
        products = (self.centered @ other.centered.T).double()
        both = self.square.unsqueeze(-1) + other.square
        squared = torch.add(both, products, alpha=-2)
        near = (squared < both.mul_(torch.finfo(self.centered.dtype).eps ** 0.375)).logical_and_(~same)
        leads = self._sums(products).neg_()
        leads += (self.times_state + self.k * self.times_mean).unsqueeze(-1)
        leads -= self.k * other.times_mean
        for pairs in torch.split(near.nonzero(), max(plan_pairs().held // self.patterns.shape[1], 1)):
            i, j = pairs.unbind(-1)
            apart = self.patterns[i] - other.patterns[j]
            leads[i, j], squared[i, j] = (self.state[i] * apart).sum(-1), apart.square().sum(-1)
        return leads, squared.clamp_min_(torch.finfo(torch.float64).tiny).sqrt_()


class _Least:
    """The other pattern x′ with the least value for each of some patterns x, among the blocks given so far."""

    def __init__(self, here: _Centered) -> None:
        self.here = here
        self.least = here.patterns.new_full((len(here.patterns),), math.inf)
        self.other = torch.zeros_like(here.patterns)

    def update(self, values: Tensor, other: Tensor) -> None:
        """Compare with a block of other patterns (n, D), given their values (R, n)."""
        least, index = values.min(-1)
        closer = least < self.least
        self.least = torch.where(closer, least, self.least)
        self.other[closer] = other[index[closer]]

    def pair(self) -> tuple[Tensor, Tensor]:
        """⟨q, x − x′⟩, inf where there is no x′, and ‖x − x′‖, from differences in double precision."""
        apart = self.here.patterns - self.other
        lead = (self.here.state * apart).sum(-1)
        return torch.where(self.least == math.inf, math.inf, lead), torch.linalg.vector_norm(apart, dim=-1)


def _least_leads(
    read: Read, here: _Centered, needed: Tensor, excluded: Callable[[slice], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The least lead of each pattern over all others, (R,), and the radius of its ball, (R,), in one pass.

    For sets of k > 1 also the k least leads of the first pattern of each, in ascending order.

    Args:
        read: reads all patterns.
        here: R patterns, of which every k form a set.
        needed: (R,), the lead that each needs.
        excluded: returns for a range of n patterns which of them are not compared, boolean (R, n).
    """
    nearest, tightest = _Least(here), _Least(here)
    lowest = here.patterns.new_empty(len(here.patterns) // here.k, 0)
    for start, block in read():
        other = _Centered(block, here.mean, here.centered.dtype)
        same = excluded(slice(start, start + len(block)))
        leads, distance = here.compare(other, same)
        nearest.update(leads.masked_fill_(same, math.inf), other.patterns)
        if here.k > 1:
            both = torch.cat([lowest, leads[:: here.k]], -1)
            lowest = both.topk(min(here.k, both.shape[-1]), -1, largest=False).values
        ratios = leads.sub_(needed.unsqueeze(-1)).div_(distance)
        tightest.update(ratios.masked_fill_(same, math.inf), other.patterns)
    gap, _ = nearest.pair()
    lead, distance = tightest.pair()
    # Of two copies one cannot lead the other, wherever the query is.
    ratio = torch.where(distance > 0, (lead - needed) / torch.where(distance > 0, distance, 1.0), -math.inf)
    return gap, torch.where(lead < math.inf, ratio, math.inf), lowest


def certify_associations(read: Read, count: int, omega: Regularizer, beta: float, associations: Tensor) -> Certificate:
    """Certify sets of patterns, boolean (A, N)."""
    chosen = check_mask(associations, "associations", "in the set").cpu()
    if chosen.dim() != 2 or chosen.shape[1] != count:
        raise ValueError(f"associations must have shape (A, {count}), one row per set, got {tuple(chosen.shape)}")
    simple, gamma = omega.canonical()
    factor = as_number(gamma, "the temperature of omega")
    if isinstance(simple, SparseMAP):  # only structures have an oracle, which their certificate calls
        closed = simple.structure.regularizer(count)
        if closed is None:
            return Certificate(*certify_structures(read, simple, factor, beta, chosen))
        simple = closed.canonical()[0]
    mass, margin = simple.mass(count), simple.margin
    if mass is None or margin is None:
        raise ValueError(f"associations are certified for an Ω with a known margin, or SparseMAP; omega is {omega}")
    k, lead = as_number(mass, "k of omega"), factor * as_number(margin, "the margin of omega")
    sizes = chosen.sum(-1)
    if bool((sizes != k).any()):
        raise ValueError(f"associations must have {k:g} patterns each, got one with {int(sizes[sizes != k][0])}")
    if k == 1:
        # Copies share, which is as good as one of them: see ``certify_patterns``.
        place = chosen.int().argmax(-1)
        wanted = torch.zeros(count, dtype=torch.bool, device="cpu").index_fill(0, place, True)
        each = certify_patterns(read, count, factor * simple, beta, wanted)
        at = (wanted.cumsum(0) - 1)[place]
        return Certificate(*(field[at] for field in vars(each).values()))
    separation, gap, radius = _certify_sets(read, chosen, int(k), lead / beta)
    lead_each = torch.full_like(gap, lead)
    stationary, min_beta = _enough(gap, lead_each / beta), _least_beta(lead_each, gap)
    return Certificate(separation, stationary, radius, min_beta, torch.ones_like(stationary))


def _certify_sets(read: Read, chosen: Tensor, k: int, needed: float) -> tuple[Tensor, Tensor, Tensor]:
    """For sets of k patterns, boolean (A, N): their separation, the least lead of a member over another pattern, radii.

    Single swaps suffice for the radius. A set is chosen if and only if each member leads each other pattern by m/β,
    that is, on an intersection of half-spaces, one per swap of a member i for another j; the largest ball around a
    point inside is bounded by the nearest of them, at distance (lead − m/β) / ‖xᵢ − xⱼ‖. The condition for any other
    set y′ follows: it is the sum of those of the swaps that lead from the set to y′. So no y′ has a smaller ratio, as
    long as the set is stationary. Where it is not, the ratio of a y′ may be below that of all swaps; no ball exists
    then, and both are negative.

    One pass over the patterns gathers the members of all sets. Then there is one pass for every block of members.
    """
    used_at, at = torch.unique(chosen.nonzero()[:, 1].reshape(-1, k), return_inverse=True)
    used = torch.zeros(chosen.shape[1], dtype=torch.bool, device="cpu").index_fill(0, used_at, True)
    found = [(block[used[start : start + len(block)]], block.double().sum(0)) for start, block in read()]
    rows, mean = torch.cat([part for part, _ in found]), torch.stack([total for _, total in found]).sum(0) / len(used)
    separation, gap, radius = torch.empty((3, len(chosen)), dtype=torch.float64, device="cpu")
    for sets in torch.split(torch.arange(len(chosen), device="cpu"), max(plan_pairs().columns // k, 1)):
        here = _Centered(rows[at[sets].flatten()], mean, torch.float64, k)
        members = chosen[sets].repeat_interleave(k, 0)
        lead = torch.full((len(members),), needed, dtype=torch.float64, device="cpu")
        *least, lowest = _least_leads(read, here, lead, partial(_columns, members))
        gap[sets], radius[sets] = (each.reshape(-1, k).amin(1) for each in least)
        # The best other set swaps the member with the lowest score for the best other pattern, the second lowest for
        # the second best, and so on while that raises the score; if no swap does, the best set is one swap away.
        inside = here.patterns.reshape(len(sets), k, -1)
        ahead = ((inside - inside[:, :1]) * here.state[::k].unsqueeze(1)).sum(-1).sort(-1).values
        swaps = (ahead[:, : lowest.shape[1]] + lowest).clamp_max(0.0).sum(-1)
        separation[sets] = torch.where(gap[sets] < 0, swaps, gap[sets])
    return separation, gap, radius


def _columns(members: Tensor, block: slice) -> Tensor:
    """Which patterns of a block are members of each set."""
    return members[:, block]


def _same_group(groups: Tensor, others: Tensor, block: slice) -> Tensor:
    """Which patterns of a block are copies of each pattern."""
    return groups.unsqueeze(-1) == others[block]


def needed_lead(omega: Regularizer, copies: Tensor) -> Tensor | None:
    """The lead over all other patterns that c copies of one need to share all weight; None if that is not known.

    For one copy that is the margin of Ω. Copies have equal scores: of c zeros and any others Ω chooses the zeros alone
    if and only if no other is above the line of c zeros.

    Args:
        omega: one that chooses one pattern.
        copies: integers, of any shape; the result has this shape, in double precision.
    """
    simple, gamma = omega.canonical()
    mass, margin = simple.mass(2), simple.margin
    if margin is None or mass is None or as_number(mass, "k of omega") != 1:
        return None
    factor, lead = as_number(gamma, "the temperature of omega"), as_number(margin, "the margin of omega")
    leads = torch.full(copies.shape, lead, dtype=torch.float64, device="cpu")
    rank = len(simple.parameter_shape or (1,))
    for c in torch.unique(copies[copies > 1]).tolist():
        line = simple.line(torch.zeros((1,) * (rank - 1) + (c,), dtype=torch.float64, device="cpu"))
        if line is not None:
            leads[copies == c] = -as_number(line, "the threshold of omega")
        elif lead < math.inf:
            return None
    return factor * leads


def as_number(value: float | Tensor, name: str) -> float:
    """A number, or a tensor with one element, as a number."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} must be one number for all queries, got a tensor of shape {tuple(value.shape)}")
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def _enough(gap: Tensor, needed: Tensor) -> Tensor:
    """Whether a lead is enough; where the margin is 0 (Hard) it must still be positive, because ties share."""
    return torch.where(needed > 0, gap >= needed, gap > 0)


def _least_beta(lead: Tensor, gap: Tensor) -> Tensor:
    """m/Δ: infinite where another pattern leads, zero where there is no other."""
    beta = lead / torch.where(gap > 0, gap, 1.0)
    return torch.where(gap == math.inf, 0.0, torch.where(gap > 0, beta, math.inf))


def _groups(read: Read, count: int) -> tuple[Tensor, Tensor]:
    """For each pattern the place of the first that equals it, and how many copies there are.

    Copies have the same product with a random direction, up to rounding: only patterns that share this product with
    another are compared in full.
    """
    suspect = _may_repeat(read, count)
    seen: dict[bytes, int] = {}
    group = torch.arange(count, device="cpu")
    for start, block in read():
        chosen = suspect[start : start + len(block)].nonzero().squeeze(-1)
        rows = (block[chosen].double() + 0.0).numpy()  # −0 and 0 are one
        for place, row in zip((start + chosen).tolist(), rows, strict=True):
            group[place] = seen.setdefault(blake2b(row.tobytes(), digest_size=16).digest(), place)
    return group, torch.bincount(group, minlength=count)[group]


def _may_repeat(read: Read, count: int) -> Tensor:
    """Boolean (N,): patterns whose product with a random direction is another's, up to rounding."""
    products, slack = (torch.empty(count, dtype=torch.float64, device="cpu") for _ in range(2))
    for start, block in read():
        rows = block.double()
        random = torch.Generator("cpu").manual_seed(0)
        direction = torch.randn(rows.shape[1], generator=random, dtype=torch.float64, device="cpu")
        here = slice(start, start + len(block))
        products[here] = rows @ direction
        slack[here] = rows.abs() @ direction.abs()
    slack *= rows.shape[1] * torch.finfo(torch.float64).eps  # an upper bound of a sum's rounding error
    order = products.argsort()
    close = products[order].diff() <= 2 * torch.maximum(slack[order[1:]], slack[order[:-1]])
    found = torch.zeros(count, dtype=torch.bool, device="cpu")
    found[order[1:][close]] = True
    found[order[:-1][close]] = True
    return found
