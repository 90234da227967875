r"""Groups of entries that share a value, in plain torch for every device, in double precision where it is supported.

The proximal maps of the grouping penalties are computed by division. Every group starts at its mean. A binary problem
with an exact solution decides which members of a group must be above its mean and which below; the group is divided
accordingly, and the penalty between its parts becomes linear. When no group is divided any more, every group is at its
value. All groups of all rows are processed at once, so the number of rounds is that of the row with the most divisions.

Groups are later recognized by values that are equal to the bit. Hence rows are changed only by functions of the value
once their groups are found.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fenchel._torch import readable
from fenchel.regularizers.solvers.thresholds import entmax_up_to_2, wide

_ROUNDING = 16
"""Differences from the mean of a group up to this many units in the last place count as rounding."""


def widen(z: Tensor) -> Tensor:
    """Rows in double precision, if their device has it."""
    return z.to(wide(z))


def project(y: Tensor) -> Tensor:
    """Sparsemax of rows with masked entries at −inf; equal entries stay equal."""
    return entmax_up_to_2(y - y.amax(-1, keepdim=True), 1.0)


def fuse(z: Tensor, strength: Tensor) -> Tensor:
    r"""argmin_y ½‖y − z‖² + λ Σ |yᵢ − yᵢ₊₁| of rows. Entries at −inf are passed over, and stay."""
    masked = z == -torch.inf
    order = masked.to(torch.uint8).argsort(dim=-1, stable=True)
    kept = ~masked.gather(-1, order)
    z = z.gather(-1, order)
    x = torch.where(kept, z, 0.0)
    first = torch.cat([torch.ones_like(kept[..., :1]), kept[..., 1:] != kept[..., :-1]], -1)
    slack = _ROUNDING * torch.finfo(x.dtype).eps * (strength + x.abs().amax(-1, keepdim=True))
    pull = torch.zeros_like(x)  # how many neighbours are above an entry's group, minus how many are below
    while True:
        excess = x + strength * pull
        excess = excess - _means(excess, first)
        above = _above(excess, first, strength, slack)
        parted = ~first[..., 1:] & (above[..., 1:] != above[..., :-1])
        if not bool(parted.any()):
            break
        step = torch.where(parted, above[..., :-1].to(x.dtype) - above[..., 1:].to(x.dtype), 0.0)
        pull[..., :-1] -= step
        pull[..., 1:] += step
        first = torch.cat([first[..., :1], first[..., 1:] | parted], -1)
    y = torch.where(kept, _means(x, first) + strength * _means(pull, first), z)
    return torch.empty_like(y).scatter(-1, order, y)


def _above(excess: Tensor, first: Tensor, strength: Tensor, slack: Tensor) -> Tensor:
    """The x in {0, 1} that maximises Σ eᵢxᵢ − λ Σ |xᵢ − xᵢ₊₁| on every group: the members that are above the mean.

    By dynamic programming: what is gained by xᵢ = 1 over xᵢ = 0, when all before i do their best, is
    Fᵢ = eᵢ + clip(Fᵢ₋₁, −λ, λ). Beyond ±λ it decides xᵢ, between them xᵢ follows its successor.
    """
    gain = _clipped_walk(excess, first, strength)
    last = torch.cat([first[..., 1:], torch.ones_like(first[..., :1])], -1)
    decided = last | (gain.abs() > strength + slack)
    n = excess.shape[-1]
    index = torch.where(decided, torch.arange(n, device=excess.device), n - 1)
    follows = index.flip(-1).cummin(-1).values.flip(-1)
    return (gain > 0).gather(-1, follows)


def _clipped_walk(step: Tensor, first: Tensor, bound: Tensor) -> Tensor:
    """Fᵢ = stepᵢ + clip(Fᵢ₋₁, −bound, bound), and Fᵢ = stepᵢ where ``first``: a scan in log₂ n rounds.

    Each step is a function x ↦ clip(x + a, low, high), constant (low = high) where ``first``; so are compositions.
    """
    a = step
    low, high = torch.where(first, step, step - bound), torch.where(first, step, step + bound)
    reach = 1
    while reach < step.shape[-1]:
        lower, upper, shift = low[..., reach:], high[..., reach:], a[..., reach:]
        low_next = torch.minimum(torch.maximum(low[..., :-reach] + shift, lower), upper)
        high_next = torch.minimum(torch.maximum(high[..., :-reach] + shift, lower), upper)
        a = torch.cat([a[..., :reach], a[..., :-reach] + shift], -1)
        low = torch.cat([low[..., :reach], low_next], -1)
        high = torch.cat([high[..., :reach], high_next], -1)
        reach *= 2
    return low


def pool(z: Tensor, strength: Tensor) -> Tensor:
    r"""argmin_y ½‖y − z‖² + λ Σᵢ<ⱼ max(yᵢ, yⱼ) of rows, up to a constant per row. Entries at −inf are left out.

    On sorted entries the penalty is the linear function λ Σₖ (n − k) y₍ₖ₎, so y is the decreasing sequence nearest
    to z₍ₖ₎ + λk: isotonic regression. The members of a group that belong above its mean are those up to where
    their running sum is largest.
    """
    x, order = z.sort(dim=-1, descending=True, stable=True)
    kept = x > -torch.inf
    rank = torch.arange(x.shape[-1], device=x.device, dtype=x.dtype).expand_as(x)
    level = torch.where(kept, x, 0.0)
    first = torch.cat([torch.ones_like(kept[..., :1]), kept[..., 1:] != kept[..., :-1]], -1)
    unit = _ROUNDING * torch.finfo(x.dtype).eps
    while True:
        raised = level + strength * rank
        sums = (raised - _means(raised, first)).cumsum(-1)
        group = first.cumsum(-1) - 1
        most = torch.zeros_like(sums).scatter_reduce(-1, group, sums, "amax").gather(-1, group)
        inside = torch.cat([~first[..., 1:], torch.zeros_like(first[..., :1])], -1)
        ends = inside & (sums == most) & (sums > unit * sums.abs().amax(-1, keepdim=True))
        if not bool(ends.any()):
            break
        first = torch.cat([first[..., :1], first[..., 1:] | ends[..., :-1]], -1)
    y = torch.where(kept, _means(level, first) + strength * _means(rank, first), x)
    return torch.empty_like(y).scatter(-1, order, y)


def _means(x: Tensor, first: Tensor) -> Tensor:
    """The mean of each group of neighbours, at each of its members; groups begin where ``first`` is true."""
    return group_means(x, first.cumsum(-1) - 1)


def group_means(x: Tensor, group: Tensor, counted: Tensor | None = None) -> Tensor:
    """The mean of each group at each of its members, over the members that are counted. Linear in x."""
    ones = torch.ones_like(x) if counted is None else counted.to(x.dtype)
    sizes = torch.zeros_like(x).scatter_add(-1, group, ones).gather(-1, group).clamp_min(1)
    start = torch.zeros_like(x).scatter_add(-1, group, x).gather(-1, group) / sizes
    # Sums of many terms are coarse; what is left of them is not.
    rest = x - start if counted is None else torch.where(counted, x - start, 0.0)
    return start + torch.zeros_like(x).scatter_add(-1, group, rest).gather(-1, group) / sizes


def runs(p: Tensor, kept: Tensor) -> Tensor:
    """A number for each group of equal neighbours; entries that are not kept are passed over."""
    index, known = before(kept)
    first = kept & ~(known & (p.gather(-1, index) == p))
    return first.cumsum(-1) - first[..., :1].to(torch.long)


def before(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Where the nearest kept entry before each entry stands, and whether there is one."""
    place = torch.arange(kept.shape[-1], device=kept.device)
    latest = torch.where(kept, place, -1).cummax(-1).values
    index = torch.cat([torch.full_like(latest[..., :1], -1), latest[..., :-1]], -1)
    return index.clamp_min(0), index >= 0


def equals(p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each entry of a row: a number for its group of equal values, the size of it, and how many are smaller."""
    ordered, order = p.sort(dim=-1)
    first = torch.cat([torch.zeros_like(p[..., :1], dtype=torch.bool), ordered[..., 1:] != ordered[..., :-1]], -1)
    number = first.cumsum(-1)
    sizes = torch.zeros_like(number).scatter_add(-1, number, torch.ones_like(number))
    smaller = (sizes.cumsum(-1) - sizes).gather(-1, number)
    back = torch.empty_like(order).scatter(-1, order, torch.arange(p.shape[-1], device=p.device).expand_as(order))
    return number.gather(-1, back), sizes.gather(-1, number).gather(-1, back), smaller.gather(-1, back)


# -- grids: the last two dimensions -------------------------------------------------------------------------


def without(z: Tensor, zero: Tensor, strength: Tensor) -> Tensor:
    """Remove entries of a grid that are known to have no mass: set them to −inf, subtract λ from their neighbours."""
    kept = z > -torch.inf
    for dim in (-1, -2):
        edges = _Edges(kept, dim, z)
        z = z - strength * (edges.open & edges.ahead(zero)).to(z.dtype)
        z = z - strength * edges.back((edges.open & zero).to(z.dtype))
    return torch.where(zero, -torch.inf, z)


class _Edges:
    """The edges of a grid along one dimension, each kept by the first of its ends, and what flows along them."""

    def __init__(self, kept: Tensor, dim: int, like: Tensor) -> None:
        self.dim = dim
        place = torch.arange(kept.shape[dim], device=kept.device)
        place = place.unsqueeze(-1) if dim == -2 else place
        self.open = kept & self.ahead(kept) & (place < kept.shape[dim] - 1)
        self.flow = torch.zeros_like(like)

    def ahead(self, x: Tensor) -> Tensor:
        """The value at the other end of each edge."""
        return x.roll(-1, self.dim)

    def back(self, x: Tensor) -> Tensor:
        """The value at an edge, moved to its other end."""
        return x.roll(1, self.dim)

    def within(self, group: Tensor) -> Tensor:
        """Edges that join members of one group."""
        return self.open & (group == self.ahead(group))


def spread(z: Tensor, strength: Tensor) -> Tensor:
    r"""argmin_y ½‖y − z‖² + λ Σ |yᵢ − yⱼ| over the edges of a grid. Entries at −inf and their edges are left out.

    The members above the mean of a group are one side of a minimum cut, found by a maximum flow: excess over the mean
    is sent to entries below it, at most λ along an edge. Entries with excess that cannot be sent are above. The flow
    solves the dual problem.
    """
    kept = z > -torch.inf
    x = torch.where(kept, z, 0.0)
    edges = [_Edges(kept, dim, x) for dim in (-1, -2)]
    group = _renumber(kept.long())
    slack = 4 * _ROUNDING * torch.finfo(x.dtype).eps * torch.maximum(strength, x.abs().amax((-2, -1), keepdim=True))
    while True:
        excess = x
        for e in edges:
            excess = excess - e.flow + e.back(e.flow)
        level = group_means(excess.flatten(-2), group.flatten(-2)).view_as(x)
        excess = torch.where(kept, excess - level, 0.0)
        excess, reached = _route(excess, group, edges, strength, slack)
        spill = torch.where(reached, 0.0, excess).flatten(-2)
        size = torch.zeros_like(spill).scatter_add(-1, group.flatten(-2), torch.ones_like(spill))
        spill = torch.zeros_like(spill).scatter_add(-1, group.flatten(-2), spill)
        parted = (spill > slack.flatten(-2) * (4 + size)).gather(-1, group.flatten(-2)).view_as(kept)
        above = parted & ~reached & kept
        if not bool(above.any()):
            return torch.where(kept, level, z)
        for e in edges:
            step = above.to(x.dtype) - e.ahead(above).to(x.dtype)
            e.flow = torch.where(e.within(group) & (step != 0), step * strength, e.flow)
        group = _renumber(2 * group + above)


def _renumber(number: Tensor) -> Tensor:
    """The same groups, numbered below the size of the grid."""
    ordered, order = number.flatten(-2).sort(dim=-1)
    steps = torch.cat([torch.zeros_like(ordered[..., :1]), (ordered[..., 1:] != ordered[..., :-1]).long()], -1)
    return torch.empty_like(ordered).scatter(-1, order, steps.cumsum(-1)).view_as(number)


def _route(
    excess: Tensor, group: Tensor, edges: list[_Edges], strength: Tensor, slack: Tensor
) -> tuple[Tensor, Tensor]:
    """Send excess along the edges to entries with a deficit, the farthest first.

    Returns what is left of the excess, and which entries can reach a deficit.
    """
    size = group.shape[-1] * group.shape[-2]
    inner = [e.within(group) for e in edges]
    while True:
        far = torch.where(excess < -slack, 0, size)
        while True:
            nearer = far
            for e, inside in zip(edges, inner, strict=True):
                onward = torch.where(inside & (e.flow < strength), e.ahead(nearer) + 1, size)
                backward = torch.where(inside & (e.flow > -strength), nearer + 1, size)
                nearer = torch.minimum(torch.minimum(nearer, onward), e.back(backward))
            if torch.equal(nearer, far):
                break
            far = nearer
        ready = (excess > slack) & (far < size)
        if not bool(ready.any()):
            return excess, far < size
        for distance in range(int(far[far < size].max()), 0, -1):
            here, there = far == distance, far == distance - 1
            for e, inside in zip(edges, inner, strict=True):
                ahead = torch.where(inside & here & e.ahead(there), excess.clamp_min(0), 0.0)
                ahead = torch.minimum(ahead, strength - e.flow)
                excess = excess - ahead + e.back(ahead)
                back = torch.where(inside & there & e.ahead(here), e.ahead(excess).clamp_min(0), 0.0)
                back = torch.minimum(back, strength + e.flow)
                excess = excess + back - e.back(back)
                # Exactly full: a remainder from rounding would leave an edge open that carries nothing.
                full = (ahead > 0) & (ahead == strength - e.flow)
                empty = (back > 0) & (back == strength + e.flow)
                flow = e.flow + ahead - back
                e.flow = torch.where(full, strength, torch.where(empty, -strength, flow))


def regions(p: Tensor) -> Tensor:
    """A number for each connected region of equal, positive entries of a grid, flattened: its first member's place.

    Every entry takes the smallest number of its neighbours, then the number of the entry with that number, until
    nothing changes.
    """
    alive = p != 0
    edges = [_Edges(alive, dim, p) for dim in (-1, -2)]
    joins = [e.open & (p == e.ahead(p)) for e in edges]
    size = p.shape[-1] * p.shape[-2]
    number = torch.arange(size, device=p.device).view(p.shape[-2:]).expand(p.shape)
    # Where values cannot be looked at, as many rounds as the longest way could take.
    known = readable(p)
    for _ in range(size):
        least = number
        for e, join in zip(edges, joins, strict=True):
            least = torch.minimum(least, torch.where(join, e.ahead(least), size))
            least = torch.minimum(least, e.back(torch.where(join, least, size)))
        least = least.flatten(-2)
        least = least.gather(-1, least).view(p.shape)
        if known and torch.equal(least, number):
            break
        number = least
    return number.flatten(-2)
