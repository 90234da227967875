r"""Thresholds: the one number per row that a sparse map has to find, in plain torch for every device.

Scores are rows with largest entry 0 and masked entries at −inf. A support is found exactly, by binary search over
the sorted scores; what is left is a smooth convex equation in one unknown, solved by Newton's method from the side
from which it converges monotonically. Nothing depends on the data but the numbers: where values cannot be read the
loops have fixed lengths, so the functions can be traced, compiled and mapped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fenchel._torch import concrete

NEWTON_STEPS = 32
"""Ordinary rows need 1 to 6 steps; the worst that could be constructed, with α > 2 and 10,000 entries, took 20."""


class _Newton:
    """Steps of Newton's method, row by row: a row whose step is down to rounding stays as it is.

    So a row does not depend on the others, and on the CPU the loop may end when all have converged (elsewhere looking
    would mean to wait for the device, and in a trace it cannot be done).
    """

    def __init__(self) -> None:
        self.moving: Tensor | None = None

    def move(self, unknown: Tensor, step: Tensor, unit: float = 0.0) -> Tensor:
        """The unknown after a step, which is small relative to ``unit`` or to the unknown itself."""
        large = step.abs() > 8 * torch.finfo(step.dtype).eps * unknown.abs().clamp_min(unit)
        if self.moving is None:
            self.moving = large
            return unknown + step
        moved = torch.where(self.moving, unknown + step, unknown)
        self.moving = self.moving & large
        return moved

    @property
    def converged(self) -> bool:
        """Whether all rows have converged; False where values cannot be read."""
        moving = self.moving
        if moving is None or moving.device.type != "cpu" or not concrete(moving):
            return False
        return not bool(moving.any())


def smallest_of_support(z: Tensor, scale: float | Tensor, power: float | Tensor) -> Tensor:
    r"""The smallest score zₖ of the support of p ∝ [scale·z − τ]₊^power with Σ [scale·z − τ]₊^power = 1.

    Entry k is in the support if and only if the mass at the threshold τ = scale·zₖ is below 1.
    """
    ordered = z.sort(dim=-1, descending=True).values
    n = z.shape[-1]
    lowest = torch.zeros_like(ordered[..., :1], dtype=torch.long)
    highest = torch.full_like(lowest, n - 1)
    for _ in range((n - 1).bit_length()):
        middle = (lowest + highest + 1) // 2
        candidate = ordered.gather(-1, middle)
        mass = (scale * (ordered - candidate)).clamp_min(0).pow(power).sum(-1, keepdim=True)
        inside = mass < 1
        lowest = torch.where(inside, middle, lowest)
        highest = torch.where(inside, highest, middle - 1)
    return ordered.gather(-1, lowest)


def expm1_ratio(x: Tensor, c: float | Tensor) -> Tensor:
    """expm1(c·x) / c, and its limit x at c = 0."""
    if isinstance(c, Tensor):
        at_zero = c == 0
        nonzero = torch.where(at_zero, 1.0, c)
        return torch.where(at_zero, x, torch.expm1(nonzero * x) / nonzero)
    return torch.expm1(c * x) / c if c else x


_SMALL = 0.25  # below this |c|, (1 + c·u)^(1/c) magnifies the rounding of the sum too much


def tsallis_exp(u: Tensor, c: float | Tensor) -> Tensor:
    """[1 + c·u]₊^(1/c), the (2−α)-exponential for c = α − 1, and its limit exp(u) at c = 0."""
    if isinstance(c, Tensor):
        by_log = torch.where(c.abs() < _SMALL, c, _SMALL)
        by_power = torch.where(c.abs() < _SMALL, 1.0, c)
        return torch.where(c.abs() < _SMALL, _exp_by_log(u, by_log), _exp_by_power(u, by_power))
    return _exp_by_log(u, c) if abs(c) < _SMALL else _exp_by_power(u, c)


def _exp_by_power(u: Tensor, c: float | Tensor) -> Tensor:
    return (1 + c * u).clamp_min(0).pow(1 / c)


def _exp_by_log(u: Tensor, c: float | Tensor) -> Tensor:
    if isinstance(c, Tensor):
        nonzero = torch.where(c == 0, 1.0, c)
        limited = torch.log1p((nonzero * u).clamp_min(-1)) / nonzero
        return torch.exp(torch.where(c == 0, u, limited))
    return torch.exp(torch.log1p((c * u).clamp_min(-1)) / c) if c else torch.exp(u)


def entmax_up_to_2(z: Tensor, c: float | Tensor) -> Tensor:
    r"""α-entmax for 0 < α ≤ 2 (c = α − 1), by Newton on the offset A of p = [1 + c(z − A)]₊^(1/c).

    (Σp)^c is a norm of the shifted scores: convex (concave for c < 0) in A, and nearly linear, so that Newton
    from A ≤ A* is monotone and takes few steps. At c = 0 it is log Σ exp(z − A), and one step is exact.
    """
    inside = z > -torch.inf
    if isinstance(c, Tensor):
        positive = torch.where(c > 0, c, 1.0)
        inside = inside & ((c <= 0) | (z >= smallest_of_support(z, positive, 1 / positive)))
    elif c > 0:
        inside = inside & (z >= smallest_of_support(z, c, 1 / c))
    size = inside.sum(-1, keepdim=True).to(z.dtype)
    smallest = torch.where(inside, z, 0.0).amin(-1, keepdim=True)
    offset = (smallest - expm1_ratio(-size.log(), c)).clamp_min(0)
    newton = _Newton()
    for _ in range(NEWTON_STEPS):
        p = torch.where(inside, tsallis_exp(z - offset, c), 0.0)
        total = p.sum(-1, keepdim=True)
        step = -total * expm1_ratio(-total.log(), c) / _curvature(p, c).sum(-1, keepdim=True)
        offset = newton.move(offset, step, unit=1.0)
        if newton.converged:
            break
    p = torch.where(inside, tsallis_exp(z - offset, c), 0.0)
    # The offset is only as fine as its own last digit; what is missing from Σp = 1 is given to p itself.
    s = _curvature(p, c)
    return (p - s * ((p.sum(-1, keepdim=True) - 1) / s.sum(-1, keepdim=True))).clamp_min(0)


def _curvature(p: Tensor, c: float | Tensor) -> Tensor:
    """s = p^(2−α) on the support: minus the derivative of p with respect to the offset."""
    return torch.where(p > 0, p.pow(1 - c), 0.0)


def entmax_from_2(z: Tensor, c: float | Tensor) -> Tensor:
    r"""α-entmax for α ≥ 2 (c = α − 1), by Newton on the smallest probability w of the support.

    p = (a^c + w^c)^(1/c) with a = (c(z − zₖ))^(1/c): the c-norm of (a, w), convex in w, with slopes between 1 and
    the size of the support. Scores enter by their distance from zₖ alone, which keeps the small probabilities exact
    where the threshold itself, in floating point, could not (an error δ in it is δ^(1/c) in mass).
    """
    zk = smallest_of_support(z, c, 1 / c)
    inside = z >= zk
    a = torch.where(inside, (c * (z - zk)).clamp_min(0).pow(1 / c), 0.0)
    w = 1 / inside.sum(-1, keepdim=True).to(z.dtype)
    newton = _Newton()
    for _ in range(NEWTON_STEPS):
        p = _hypotenuse(a, w, c)
        slope = torch.where(inside & (p > 0), (w / p).pow(c - 1), 0.0).sum(-1, keepdim=True)
        excess = torch.where(inside, p, 0.0).sum(-1, keepdim=True) - 1
        w = newton.move(w, -excess / slope.clamp_min(1)).clamp_min(0)
        if newton.converged:
            break
    return torch.where(inside, _hypotenuse(a, w, c), 0.0)


def _hypotenuse(a: Tensor, w: Tensor, c: float | Tensor) -> Tensor:
    """(a^c + w^c)^(1/c) without under- or overflow."""
    longer, shorter = torch.maximum(a, w), torch.minimum(a, w)
    ratio = torch.where(longer > 0, shorter / longer, 0.0)
    return longer * (1 + ratio.pow(c)).pow(1 / c)


def normmax(z: Tensor, c: float | Tensor) -> Tensor:
    r"""α-normmax for 1 < α ≤ ∞ (c = α − 1): p ∝ b^(1/c), b = [z − μ]₊ with ‖b‖_q = 1 and q = 1 + 1/c.

    Newton on the offset x = zₖ − μ from the smallest score of the support; ‖z − zₖ + x‖_q is convex in x.
    """
    q = 1 + 1 / c
    zk = smallest_of_support(z, 1.0, q)
    inside = z >= zk
    gaps = torch.where(inside, z - zk, 0.0)
    size = inside.sum(-1, keepdim=True).to(z.dtype)
    x = torch.minimum(size.pow(-1 / q), 1 - gaps.amax(-1, keepdim=True))
    newton = _Newton()
    for _ in range(NEWTON_STEPS):
        b = gaps + x
        total = torch.where(inside, b.pow(q), 0.0).sum(-1, keepdim=True)
        slope = torch.where(inside, b.pow(q - 1), 0.0).sum(-1, keepdim=True)
        x = newton.move(x, total * torch.expm1(-total.log() / q) / slope).clamp_min(0)
        if newton.converged:
            break
    b = gaps + x
    weights = torch.where(inside, (b / b.amax(-1, keepdim=True)).pow(1 / c), 0.0)
    return weights / weights.sum(-1, keepdim=True)


def capped_projection(z: Tensor, upper: Tensor, budget: float | Tensor) -> Tensor:
    r"""The p with Σp = budget and 0 ≤ p ≤ upper that is nearest to z; ``upper`` itself if that sums to less.

    p = min([z − τ]₊, upper). Scores enter by their distance d from the smallest of the support alone, which keeps p
    exact however far from 0 that lies; what is left, Σ min(d + x, upper) = budget on the support, is linear between the
    x at which entries reach their bounds.
    """
    ordered = z.sort(dim=-1, descending=True).values
    last = _last_below(ordered, lambda zk: (z - zk).clamp_min(0).minimum(upper), budget)
    d = z - ordered.gather(-1, last.clamp_min(0))
    support = d >= 0
    room = torch.where(support, upper - d, torch.inf)
    ordered = room.sort(dim=-1).values.clamp_min(0)
    last = _last_below(ordered, lambda x: torch.where(support, (d + x).minimum(upper), 0.0), budget)
    reached = torch.where(last < 0, 0.0, ordered.gather(-1, last.clamp_min(0)))
    free = support & (room > reached)
    size = free.sum(-1, keepdim=True).to(z.dtype).clamp_min(1)
    full = torch.where(support & ~free, upper, 0.0)
    rest = budget - full.sum(-1, keepdim=True)  # apart: a few free entries beside many would drown in rounding
    p = torch.where(free, d, 0.0)
    for _ in range(2):  # the second time for what was lost in rounding
        missing = (rest - p.sum(-1, keepdim=True)) / size
        p = torch.where(free, (p + missing).clamp_min(0).minimum(upper), 0.0)
    return full + p


def capped_softmax(z: Tensor, upper: Tensor, budget: float | Tensor) -> Tensor:
    r"""The p = min(exp(z − τ), upper) with Σp = budget; ``upper`` itself if that sums to less.

    Entries reach their bounds in the order of t = z − log(upper).
    """
    dtype = z.dtype
    # In double: next to a huge score log(upper) would be rounded away, and with it the order of the bounds.
    z, upper = z.double(), upper.double()
    budget = budget.double() if isinstance(budget, Tensor) else budget
    inside = upper > 0
    z = z - z.amax(-1, keepdim=True)
    t = torch.where(inside, z - torch.where(inside, upper, 1.0).log(), -torch.inf)
    ordered = t.sort(dim=-1, descending=True).values
    last = _last_below(ordered, lambda tk: torch.where(inside, upper * (t - tk).clamp_max(0).exp(), 0.0), budget)
    full = inside & (last >= 0) & (t >= ordered.gather(-1, last.clamp_min(0)))
    free = inside & ~full
    rest = (budget - torch.where(full, upper, 0.0).sum(-1, keepdim=True)).clamp_min(0)
    weights = torch.softmax(torch.where(free, z, -torch.inf), -1)
    return torch.where(full, upper, torch.where(free, (rest * weights).minimum(upper), 0.0)).to(dtype)


def _last_below(ordered: Tensor, p: Callable[[Tensor], Tensor], budget: float | Tensor) -> Tensor:
    """The last position at which Σ p(value there), which grows along the row, is below the budget; −1 if none is."""
    n = ordered.shape[-1]
    lowest = torch.full_like(ordered[..., :1], -1, dtype=torch.long)
    highest = torch.full_like(lowest, n - 1)
    for _ in range(n.bit_length()):
        middle = (lowest + highest + 1) // 2
        below = p(ordered.gather(-1, middle.clamp_min(0))).sum(-1, keepdim=True) < budget
        lowest, highest = (
            torch.where(below & (highest > lowest), middle, lowest),
            torch.where(below | (highest == lowest), highest, middle - 1),
        )
    return lowest
