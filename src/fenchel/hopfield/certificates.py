"""Which patterns a memory retrieves exactly and from how far, and how many patterns it can hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import torch
from torch import Tensor

from fenchel._checks import check_count, check_mask, check_number, check_positive
from fenchel.regularizers.base import Regularizer, check_omega
from fenchel.streaming.plan import plan_pairs
from fenchel.structures import SparseMAP
from fenchel.structures.base import best, free_parts

Read = Callable[[], Iterator[tuple[int, Tensor]]]
"""``read()`` yields all patterns by blocks of the plan: the index of the first, and the block."""

PAIRS = 1 << 22
"""The most entries of differences of patterns that are held at a time."""

PROBES = 200
"""The most calls of the oracle for the smallest β of a structure; a handful is usual."""


@dataclass(frozen=True)
class Certificate:
    r"""Exact retrieval by a memory: four tensors with one value per pattern, or per association.

    Numbers are in double precision. With the margin m of Ω a state q gives pattern i all weight if and only if it
    leads: :math:`q^\top (x_i - x_j) \ge m/\beta` for every other j. For k patterns at once each of them has to lead
    every pattern that is not among them. All fields follow from that, for patterns of any norm.

    Args:
        separation: :math:`\Delta_i = x_i^\top x_i - \max_{j \ne i} x_i^\top x_j`. For an association, with state q the
            sum of its patterns: the least lead of one that is in it over one that is not.
        stationary: whether an update leaves the pattern, or the sum of the association, where it is. For a pattern
            outside the convex hull of the others that is :math:`\Delta_i \ge m/\beta`, and no other is. Copies of one
            pattern (Δ = 0) share the weight and need a smaller lead over the rest, which is accounted for here and
            below. A pattern inside the hull of others may be a fixed point by their weights, which is not covered.
        radius: of the largest ball around it from which one update leads to it exactly, negative if it is not
            stationary: :math:`\min_j (x_i^\top (x_i - x_j) - m/\beta) / \|x_i - x_j\|`. Tight: beyond, in the direction
            of the j that attains it, another pattern gets weight. Distances are those of normalized queries.
        min_beta: the smallest β that makes it stationary; inf if none does. For a pattern, or patterns without
            higher-order scores, all larger β do too; with transitions a larger β may be too large. NaN for a
            structure where double precision is not enough to find it.

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


def certify_patterns(
    read: Read, count: int, omega: Regularizer, beta: float, wanted: Tensor | None = None
) -> Certificate:
    """Certify each pattern on its own, without a matrix of all pairs; or those that are wanted, boolean (N,)."""
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
    for i, patterns in _gathered(read, wanted):
        exact = count * count * patterns.shape[1] <= plan_pairs().exact
        dtype = torch.float64 if exact else torch.promote_types(patterns.dtype, torch.float32)
        here = _Centered(patterns, mean, dtype)
        gap[i], radius[i] = _least_leads(read, here, needed[i], partial(_same_group, group[i], group))
    separation = torch.where(copies > 1, gap.clamp_max(0.0), gap)
    found = (separation, _enough(gap, needed), radius, _least_beta(lead, gap))
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
        for pairs in torch.split(near.nonzero(), max(PAIRS // self.patterns.shape[1], 1)):
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
) -> tuple[Tensor, Tensor]:
    """The least lead of each pattern over all others, (R,), and the radius of its ball, (R,), in one pass.

    Args:
        read: reads all patterns.
        here: R patterns, of which every k form a set.
        needed: (R,), the lead that each needs.
        excluded: returns for a range of n patterns which of them are not compared, boolean (R, n).
    """
    nearest, tightest = _Least(here), _Least(here)
    for start, block in read():
        other = _Centered(block, here.mean, here.centered.dtype)
        same = excluded(slice(start, start + len(block)))
        leads, distance = here.compare(other, same)
        nearest.update(leads.masked_fill_(same, math.inf), other.patterns)
        ratios = leads.sub_(needed.unsqueeze(-1)).div_(distance)
        tightest.update(ratios.masked_fill_(same, math.inf), other.patterns)
    gap, _ = nearest.pair()
    lead, distance = tightest.pair()
    # Of two copies one cannot lead the other, wherever the query is.
    ratio = torch.where(distance > 0, (lead - needed) / torch.where(distance > 0, distance, 1.0), -math.inf)
    return gap, torch.where(lead < math.inf, ratio, math.inf)


def certify_associations(read: Read, count: int, omega: Regularizer, beta: float, associations: Tensor) -> Certificate:
    """Certify sets of patterns, boolean (A, N)."""
    chosen = check_mask(associations, "associations", "in the set").cpu()
    if chosen.dim() != 2 or chosen.shape[1] != count:
        raise ValueError(f"associations must have shape (A, {count}), one row per set, got {tuple(chosen.shape)}")
    simple, gamma = omega.canonical()
    factor = _number(gamma, "the temperature of omega")
    if isinstance(simple, SparseMAP):  # only structures have an oracle, which their certificate calls
        closed = simple.structure.regularizer(count)
        if closed is None:
            return _certify_structures(read, simple, factor, beta, chosen)
        simple = closed.canonical()[0]
    mass, margin = simple.mass(count), simple.margin
    if mass is None or margin is None:
        raise ValueError(f"associations are certified for an Ω with a known margin, or SparseMAP; omega is {omega}")
    k, lead = _number(mass, "k of omega"), factor * _number(margin, "the margin of omega")
    sizes = chosen.sum(-1)
    if bool((sizes != k).any()):
        raise ValueError(f"associations must have {k:g} patterns each, got one with {int(sizes[sizes != k][0])}")
    if k == 1:
        # Copies share, which is as good as one of them: see ``certify_patterns``.
        place = chosen.int().argmax(-1)
        wanted = torch.zeros(count, dtype=torch.bool, device="cpu").index_fill(0, place, True)
        each = certify_patterns(read, count, factor * simple, beta, wanted)
        at = (wanted.cumsum(0) - 1)[place]
        return Certificate(each.separation[at], each.stationary[at], each.radius[at], each.min_beta[at])
    gap, radius = _certify_sets(read, chosen, int(k), lead / beta)
    lead_each = torch.full_like(gap, lead)
    return Certificate(gap, _enough(gap, lead_each / beta), radius, _least_beta(lead_each, gap))


def _certify_sets(read: Read, chosen: Tensor, k: int, needed: float) -> tuple[Tensor, Tensor]:
    """For sets of k patterns, boolean (A, N): the least lead of a member over another pattern, and the ball's radius.

    One pass over the patterns gathers the members of all sets. Then there is one pass for every block of members.
    """
    used_at, at = torch.unique(chosen.nonzero()[:, 1].reshape(-1, k), return_inverse=True)
    used = torch.zeros(chosen.shape[1], dtype=torch.bool, device="cpu").index_fill(0, used_at, True)
    found = [(block[used[start : start + len(block)]], block.double().sum(0)) for start, block in read()]
    rows, mean = torch.cat([part for part, _ in found]), torch.stack([total for _, total in found]).sum(0) / len(used)
    gap, radius = torch.empty((2, len(chosen)), dtype=torch.float64, device="cpu")
    for sets in torch.split(torch.arange(len(chosen), device="cpu"), max(plan_pairs().columns // k, 1)):
        here = _Centered(rows[at[sets].flatten()], mean, torch.float64, k)
        members = chosen[sets].repeat_interleave(k, 0)
        lead = torch.full((len(members),), needed, dtype=torch.float64, device="cpu")
        least = _least_leads(read, here, lead, partial(_columns, members))
        gap[sets], radius[sets] = (each.reshape(-1, k).amin(1) for each in least)
    return gap, radius


def _columns(members: Tensor, block: slice) -> Tensor:
    """Which patterns of a block are members of each set."""
    return members[:, block]


def _same_group(groups: Tensor, others: Tensor, block: slice) -> Tensor:
    """Which patterns of a block are copies of each pattern."""
    return groups.unsqueeze(-1) == others[block]


def _certify_structures(read: Read, omega: SparseMAP, gamma: float, beta: float, chosen: Tensor) -> Certificate:
    """Certify structures with calls of the oracle: ``stationary`` and ``min_beta``; leads and radii are not known.

    A structure y is not returned if another y′ has βa + c > 0, where a is the lead of y′ in score and c the terms of
    the margin and of higher-order scores. The β at which no y′ violates the margin are an interval. Its lower end is
    found by Newton's method from 0, which never passes it: each step solves βa + c = 0 for the worst y′ at the last β.
    """
    y = chosen.double()
    q = torch.stack([y[:, start : start + len(block)] @ block.double() for start, block in read()]).sum(0)
    scores = torch.cat([q @ block.double().T for _, block in read()], -1) / gamma
    largest = torch.stack([torch.linalg.vector_norm(block.double(), dim=-1).amax() for _, block in read()]).amax()
    sizes = 1 + y.sum(-1)
    rounding = 32 * torch.finfo(torch.float64).eps * sizes * torch.linalg.vector_norm(q, dim=-1) * largest / gamma

    def worst(beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, c, impossible = _violation_terms(omega, scores, y, beta)
        a = torch.where((a.abs() <= rounding) | impossible, 0.0, a)  # a tie, whatever β
        return a, c, (beta * a + c > 1e-12 * (1 + c.abs())) | impossible

    least, known = _least_accepted(worst, torch.zeros(len(y), device=y.device).double())
    stationary = (least < math.inf) & ~worst(torch.full_like(least, beta))[-1]
    # Where scores at this β are rounded by more than margins differ, the oracle cannot tell.
    known &= (least == math.inf) | (least * rounding < 1e-3)
    unknown = torch.full_like(least, math.nan)
    return Certificate(unknown, stationary, unknown.clone(), torch.where(known, least, math.nan))


def _violation_terms(omega: SparseMAP, scores: Tensor, y: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """⟨s, y′ − y⟩ and −⟨y, y′ − y⟩ + h(y′) − h(y), for the y′ that at scores βs violates the margin of y most.

    The third tensor says which y are impossible, (A,). The two terms are returned separately, unlike in
    ``SparseMAP.violation``: at a large β their sum would round the second one away.
    """
    structure = omega.structure
    omega.check_target(y, scores, -1, None)
    free = free_parts(structure, scores, None)
    theta = torch.where(free, scores, 0.0)
    if structure.fixed_dims:  # an offset changes nothing then
        theta = torch.where(free, scores - torch.where(free, scores, -math.inf).amax(-1, keepdim=True), 0.0)
    other = best(structure, torch.where(free, beta.unsqueeze(-1) * theta - y, -math.inf), free).double()
    moved = other - y
    constant = -(moved * y).sum(-1)
    after, before = structure.higher(other), structure.higher(y)
    if after is not None and before is not None:
        constant = constant + after - before
    impossible = constant.isnan() | ((y != 0) & ~free).any(-1)
    return (moved * theta).sum(-1), constant, impossible


def _least_accepted(worst: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], least: Tensor) -> tuple[Tensor, Tensor]:
    """The lower end of the β > 0 without a violation, inf if there is none; and whether it was found."""
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
    if margin is None or mass is None or _number(mass, "k of omega") != 1:
        return None
    factor, lead = _number(gamma, "the temperature of omega"), _number(margin, "the margin of omega")
    leads = torch.full(copies.shape, lead, dtype=torch.float64, device="cpu")
    rank = len(simple.parameter_shape or (1,))
    for c in torch.unique(copies[copies > 1]).tolist():
        line = simple.line(torch.zeros((1,) * (rank - 1) + (c,), dtype=torch.float64, device="cpu"))
        if line is not None:
            leads[copies == c] = -_number(line, "the threshold of omega")
        elif lead < math.inf:
            return None
    return factor * leads


def _number(value: float | Tensor, name: str) -> float:
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


@dataclass(frozen=True)
class Capacity:
    r"""How many patterns a memory can hold so that each is retrieved in one update. Lower bounds, as logarithms.

    Args:
        angle: what must lie between any two patterns on the sphere, in radians: :math:`M^2(1 - \cos\theta) = m/\beta +
            2M\epsilon`.
        noise: the largest ε that patterns 60° apart can stand, :math:`M/4 - m/(2\beta M)`; negative if they are not
            even stationary.
        log_equidistant: log of how many can be placed that far apart: :math:`\sqrt{2\pi D} \cos\theta /
            \sin^{D-1}\theta`, up to a factor that tends to 1 as D grows.
        log_random: log of how many can be drawn at random, so that all are retrieved with probability 1 − p:
            :math:`\sqrt{2p/\kappa_{D-1}}\, \theta^{-(D-1)/2}`. Holds for every D.

    Example:
        >>> import fenchel
        >>> found = fenchel.hopfield.capacity(64, 1.0, fenchel.Gini(), norm=8.0)
        >>> round(found.noise, 4), found.equidistant > 1e6
        (1.9375, True)
    """

    angle: float
    noise: float
    log_equidistant: float
    log_random: float

    @property
    def equidistant(self) -> float:
        """How many patterns can be placed; inf if that is no number of the machine."""
        return _exp(self.log_equidistant)

    @property
    def random(self) -> float:
        """How many patterns can be drawn at random."""
        return _exp(self.log_random)


def capacity(
    dim: int,
    beta: float,
    omega: Regularizer,
    *,
    norm: float = 1.0,
    noise: float = 0.0,
    failure: float = 0.01,
) -> Capacity:
    r"""How many patterns of one norm a memory retrieves exactly, in one update, from queries within ``noise`` of them.

    Exponentially many in the dimension. Lower bounds, and loose: they ask for ‖x_i − x_j‖ ≤ 2M alone.

    Args:
        dim: D, the width of a pattern, at least 2.
        beta: inverse temperature.
        omega: an Ω with a margin, for the simplex.
        norm: M, of every pattern.
        noise: ε, how far a query may be from its pattern.
        failure: p, the probability that patterns drawn at random are not all retrieved.

    Example:
        >>> import fenchel
        >>> from fenchel.hopfield import capacity
        >>> found = capacity(64, beta=10.0, omega=fenchel.Tsallis(1.5), norm=2.0, noise=0.1)
        >>> round(found.angle, 4), round(found.noise, 4), f"{found.equidistant:.2g}", f"{found.random:.2g}"
        (0.5548, 0.45, '5.9e+18', '7.2e+07')

    References: Santos et al. (2024), Proposition 3; Brauchart et al. (2018) for patterns at random.
    """
    dim = check_count(dim, "dim", 2)
    norm = check_number(norm, "norm", 0)
    noise = check_number(noise, "noise", 0, ends="[)")
    failure = check_number(failure, "failure", 0, 1)
    lead = needed_lead(check_omega(omega), torch.ones(1, dtype=torch.long, device="cpu"))
    if lead is None or not math.isfinite(float(lead)):
        raise ValueError(f"omega must have a finite margin, as entmax with alpha > 1 and normmax do, got {omega}")
    needed = float(lead) / _number(check_positive(beta, "beta"), "beta") / norm**2
    cosine = 1 - needed - 2 * noise / norm
    angle = math.acos(cosine) if cosine >= -1 else math.nan
    gamma = math.lgamma(dim / 2) - math.lgamma((dim - 1) / 2)
    log_kappa = gamma - math.log(dim - 1) - math.log(math.pi) / 2
    apart = at_random = 0.0  # one pattern is always retrieved
    if 0 < cosine < 1:
        apart = math.log(2 * math.pi * dim) / 2 + math.log(cosine) - (dim - 1) * math.log(math.sin(angle))
    if -1 <= cosine < 1:
        at_random = (math.log(2 * failure) - log_kappa - (dim - 1) * math.log(angle)) / 2
    if cosine == 1:
        apart = at_random = math.inf
    return Capacity(angle, norm / 4 - needed * norm / 2, max(apart, 0.0), max(at_random, 0.0))


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
