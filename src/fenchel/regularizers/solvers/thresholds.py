r"""Thresholds: the one number per row that a sparse map has to find, in plain torch for every device.

Scores are rows with largest entry 0 and masked entries at −inf. Most thresholds are the root of a function of one
unknown that is convex, so that Newton's method converges from one side, and never passes the root. On the CPU the steps
end when every row has converged. Elsewhere reading values would mean to wait for the device, and in a trace it cannot
be done: there the number of steps is the one that ``newton_steps`` proves to be enough. At α = 1.5 and 2 a sort and the
closed form take their place.

Proof. Let f be convex and decreasing, with f(t₀) ≥ 0, and let Newton's method visit t₀, t₁, … with values fᵢ and slopes
−gᵢ. The tangent at tᵢ₊₁ lies below f at tᵢ, hence fᵢ₊₁/fᵢ + gᵢ₊₁/gᵢ ≤ 1. If slopes differ by a factor R at most, the
product of the ratios of slopes in k steps is at least 1/R, and the product of the ratios of values is largest if they
are all equal: f_k ≤ f₀ (1 − R^(−1/k))ᵏ. For the norm ‖[z − t]₊‖_q of n entries, R is n^(1/q).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from fenchel._torch import known

# Stands for the width of rows where a trace leaves that open. Positions beyond it stay below 2³¹, for ONNX Runtime 1.31
# does not clip larger integers.
_ANY_WIDTH = 1 << 29
_BLOCK = 1 << 16  # numbers per thread that are worked on at a time: a few temporaries of that size fit into its cache
_FEW = 4  # candidates are gathered if they are at most one in so many


@lru_cache(1 << 10)
def newton_steps(n: int, c: float, precision: float) -> int:
    """How many steps of Newton's method solve Σ [1 + c(z − A)]₊^(1/c) = 1 for n scores, |c| ≤ 1; see the module.

    With R = n^|c|, the offset A is first off by (R − 1)/|c| at most. It is enough to reach ``precision``.
    """
    log_ratio = abs(c) * math.log(max(n, 2))
    first = math.expm1(log_ratio) / abs(c)
    steps = 1
    while first * (-math.expm1(-log_ratio / steps)) ** steps > precision:
        steps += 1
    return steps


def _most(z: Tensor) -> int:
    """The number of scores per row, or more than there can be if it is a symbol, so that loops have a fixed length."""
    n = z.shape[-1]
    return n if type(n) is int else _ANY_WIDTH  # in a trace of torch.jit it is a tensor


class _Newton:
    """Steps of Newton's method, row by row. On the CPU a row whose step is down to rounding stays as it is.

    So a row does not depend on how many steps the others need.
    """

    def __init__(self, z: Tensor) -> None:
        self.looks = known(z)
        self.moving: Tensor | None = None

    def move(self, unknown: Tensor, excess: Tensor, slope: Tensor, unit: float | Tensor = 0.0) -> Tensor:
        """The unknown after the step excess/slope, which is small relative to ``unit`` or to the unknown itself."""
        moved = torch.addcdiv(unknown, excess, slope)
        if not self.looks:
            return moved
        large = (moved - unknown).abs() > 8 * torch.finfo(moved.dtype).eps * unknown.abs().clamp_min(unit)
        if self.moving is not None:
            moved, large = torch.where(self.moving, moved, unknown), self.moving & large
        self.moving = large
        return moved

    @property
    def converged(self) -> bool:
        """Whether all rows have converged; False where values cannot be read."""
        return self.moving is not None and not bool(self.moving.any())


def _in_blocks(solve: Callable[..., Tensor], z: Tensor, reach: float | Tensor, *parameters: float | Tensor) -> Tensor:
    """``solve(z, *parameters)``; on the CPU block by block, and on the candidates alone where these are few.

    Args:
        solve: computes rows from rows and parameters.
        z: rows (…, n).
        reach: entries with z ≤ −reach are known to be zero in the result. A number, or one per row, (…, 1).
        parameters: numbers, or tensors (…, 1).
    """
    if not known(z) or not z.numel():
        return solve(z, *parameters)
    n = z.shape[-1]
    rows = z.reshape(-1, n).contiguous()
    size = max(1, _BLOCK * torch.get_num_threads() // n)
    given = [
        torch.split(each.expand(*z.shape[:-1], 1).reshape(-1, 1), size) if isinstance(each, Tensor) else each
        for each in (reach, *parameters)
    ]
    result = torch.empty_like(rows)
    for i, (part, into) in enumerate(zip(torch.split(rows, size), torch.split(result, size), strict=True)):
        bound, *others = (each if isinstance(each, float) else each[i] for each in given)
        candidates = part > -bound
        count = candidates.sum(-1, keepdim=True)
        most = int(count.max())
        if _FEW * most > n:
            into.copy_(solve(part, *others))
            continue
        place = candidates.view(-1).nonzero().squeeze(-1)
        row = place // n
        first = count.cumsum(0) - count
        column = torch.arange(len(place), device=z.device) - first.view(-1)[row]
        few = part.new_full((len(part), max(most, 1)), -torch.inf)
        few[row, column] = part.view(-1)[place]
        into.zero_().view(-1)[place] = solve(few, *others)[row, column]
    return result.view(z.shape)


def _power(x: Tensor, exponent: float | Tensor) -> Tensor:
    """x^exponent for x ≥ 0, with 0 at x = 0 even if the exponent is 0."""
    if isinstance(exponent, Tensor):
        return torch.where(x > 0, x.pow(exponent), x)
    if exponent == 0:
        return x.sign()
    if exponent == 1:
        return x
    return x.square() if exponent == 2 else x.pow(exponent)


def _mass(x: Tensor, c: float | Tensor) -> tuple[Tensor, Tensor]:
    """p = x^(1/c), and s = x^(1/c − 1), c times its derivative, for x ≥ 0; x may be +inf if c < 0."""
    if not isinstance(c, Tensor) and c < 0:
        p = x.pow(1 / c)
        return p, p / x
    s = _power(x, 1 / c - 1)
    return s * x, s


def _threshold(y: Tensor, c: float | Tensor) -> Tensor:
    r"""τ with Σ [y − τ]₊^(1/c) = 1, by Newton on the norm (Σ [y − τ]₊^(1/c))^c from τ = −1.

    The entries of y nearest to the threshold of a single one, which is −1, are 0. For c in (0, 1] they are the largest,
    and y ≤ 0; for c < 0, where y ≥ 0, they are the smallest, and the norm, of a negative order, is concave in τ.
    """
    if not isinstance(c, Tensor) and c in (0.5, 1.0) and not known(y):
        tau = _threshold_of_sorted(y, c)
        steps = 0 if y.dtype != wide(y) else 2  # sums of sorted entries lose digits
    else:
        tau = torch.full_like(y[..., :1], -1.0)
        bound = 1.0 if isinstance(c, Tensor) else abs(c)
        steps = newton_steps(_most(y), bound, torch.finfo(y.dtype).eps / bound)
    newton = _Newton(y)
    for _ in range(steps):
        p, s = _mass((y - tau).clamp_min(0), c)
        total = p.sum(-1, keepdim=True)
        tau = newton.move(tau, total - total.pow(1 - c), s.sum(-1, keepdim=True), unit=1.0)
        if newton.converged:
            break
    return tau


def wide(z: Tensor) -> torch.dtype:
    """The widest floating-point dtype of the device of a tensor."""
    return torch.float32 if z.device.type == "mps" else torch.float64


def _threshold_of_sorted(y: Tensor, c: float) -> Tensor:
    """The threshold for c = 1 and ½, from the sums of the largest k entries, and of their squares, for every k.

    That of the largest k is a lower bound of the whole row's, and reached for the right k.
    """
    ordered = y.clamp_min(-1).sort(dim=-1, descending=True).values.to(wide(y))
    size = torch.ones_like(ordered).cumsum(-1)  # a DTensor too, if y is one
    mean = ordered.cumsum(-1) / size
    if c == 1:
        tau = mean - size.reciprocal()
    else:
        variance = ordered.square().cumsum(-1) / size - mean.square()
        rest = size.reciprocal() - variance
        # Negative, or tau above the k-th entry, where that is below the threshold. The entry is a lower bound then, and
        # never above the mean.
        tau = torch.minimum(mean - rest.clamp_min(0).sqrt(), ordered)
    return tau.amax(-1, keepdim=True).to(y.dtype)


def _correct(p: Tensor, s: Tensor) -> Tensor:
    """p, moved along s to sum 1. A threshold is only as fine as its own last digit; p can be finer."""
    return (p - s * ((p.sum(-1, keepdim=True) - 1) / s.sum(-1, keepdim=True))).clamp_min(0)


_SMALL = 0.25  # below this |c|, (1 + c·u)^(1/c) magnifies the rounding of the sum too much


def entmax_up_to_2(z: Tensor, c: float | Tensor) -> Tensor:
    r"""α-entmax for 0 < α ≤ 2 (c = α − 1): p = [1 + c(z − A)]₊^(1/c) with the offset A for which Σp = 1."""
    if isinstance(c, Tensor):
        tiny = 1e-20  # so near to c = 0, where p = exp(z − A), nothing changes any more
        c = torch.where(c.abs() < tiny, tiny, c)
        return _in_blocks(_entmax_by_offset, z, torch.where(c > 0, 1 / c, torch.inf), c)
    solve = _entmax_by_offset if abs(c) < _SMALL else _entmax_by_threshold
    return _in_blocks(solve, z, 1 / c if c > 0 else math.inf, c)


def _entmax_by_threshold(z: Tensor, c: float) -> Tensor:
    y = z if c == 1 else c * z
    return _correct(*_mass((y - _threshold(y, c)).clamp_min(0), c))


def _entmax_by_offset(z: Tensor, c: float | Tensor) -> Tensor:
    r"""Newton on B = c·A from 0; (Σp)^c is a norm of the shifted scores, convex (concave for c < 0) in A ≥ 0.

    For a small c it is nearly linear: the limit c → 0 is log Σ exp(z − A), and one step is exact.
    """
    inverse = 1 / c
    rest = inverse - 1
    unit: float | Tensor
    if isinstance(c, Tensor):
        unit, bound = c.abs(), 1.0
        rest = torch.where(c == 1, torch.finfo(z.dtype).tiny, rest)  # 0 times log 0 would be NaN
    else:
        unit = bound = abs(c)
    steps = newton_steps(_most(z), bound, torch.finfo(z.dtype).eps)
    newton = _Newton(z)
    y = c * z
    log = torch.log1p(y.clamp_min(-1))
    offset = torch.zeros_like(z[..., :1])
    for _ in range(steps):
        total = (log * inverse).exp().sum(-1, keepdim=True)
        missing = total * torch.expm1(-c * total.log())
        offset = newton.move(offset, -missing, (log * rest).exp().sum(-1, keepdim=True), unit)
        log = torch.log1p((y - offset).clamp_min(-1))
        if newton.converged:
            break
    return _correct((log * inverse).exp(), (log * rest).exp())


def _smallest_of_support(z: Tensor, scale: float | Tensor, power: float | Tensor) -> Tensor:
    r"""The smallest score zₖ of the support of p = [scale·z − τ]₊^power with Σp = 1.

    Entry k is in the support if and only if the mass at the threshold τ = scale·zₖ is below 1.
    """
    ordered = z.sort(dim=-1, descending=True).values
    exponent = power.unsqueeze(-1) if isinstance(power, Tensor) else power
    last = _last_below(
        ordered,
        lambda zk: (ordered.unsqueeze(-2) - zk).clamp_min(0).pow(exponent),
        1 / scale**power,  # the mass is measured in units of this
    )
    return ordered.gather(-1, last.clamp_min(0))


def entmax_from_2(z: Tensor, c: float | Tensor) -> Tensor:
    r"""α-entmax for α ≥ 2 (c = α − 1), by Newton on the smallest probability w of the support."""
    return _in_blocks(_entmax_from_2, z, 1 / c, c)


def _entmax_from_2(z: Tensor, c: float | Tensor) -> Tensor:
    r"""p = (a^c + w^c)^(1/c) with a = (c(z − zₖ))^(1/c): the c-norm of (a, w), with Σp convex in w.

    Scores enter by their distance from zₖ alone, which keeps the small probabilities exact where the threshold itself,
    in floating point, could not (an error δ in it is δ^(1/c) in mass). The slope is between 1 and n.
    """
    zk = _smallest_of_support(z, c, 1 / c)
    inside = z >= zk
    weight = inside.to(z.dtype)
    distance = torch.where(inside, c * (z - zk), 0.0)
    log_distance = distance.log()
    w = 1 / weight.sum(-1, keepdim=True)
    newton = _Newton(z)
    for _ in range(newton_steps(_most(z), 1.0, _most(z) * torch.finfo(z.dtype).eps)):  # Σp is at most 2 at first
        log_w = w.log()
        log_p = torch.logaddexp(log_distance, c * log_w) / c
        missing = 1 - (weight * log_p.exp()).sum(-1, keepdim=True)
        slope = (weight * ((c - 1) * (log_w - log_p)).exp()).sum(-1, keepdim=True)
        w = newton.move(w, missing, slope).clamp_min(torch.finfo(z.dtype).tiny)
        if newton.converged:
            break
    a = distance.pow(1 / c)
    p = weight * _hypotenuse(a, w, c)
    # One more step, without the rounding of logarithms.
    slope = (weight * (w / torch.maximum(p, w)).pow(c - 1)).sum(-1, keepdim=True)
    w = (w - (p.sum(-1, keepdim=True) - 1) / slope).clamp_min(0)
    return weight * _hypotenuse(a, w, c)


def _hypotenuse(a: Tensor, w: Tensor, c: float | Tensor) -> Tensor:
    """(a^c + w^c)^(1/c) without under- or overflow."""
    longer, shorter = torch.maximum(a, w), torch.minimum(a, w)
    ratio = shorter / longer.clamp_min(torch.finfo(a.dtype).tiny)
    return longer * (1 + ratio.pow(c)).pow(1 / c)


def normmax(z: Tensor, c: float | Tensor) -> Tensor:
    r"""α-normmax for 1 < α ≤ ∞ (c = α − 1): p ∝ b^(1/c), b = [z − τ]₊ with ‖b‖_q = 1 and q = 1 + 1/c."""
    return _in_blocks(_normmax, z, 1.0, c)


def _normmax(z: Tensor, c: float | Tensor) -> Tensor:
    b = (z - _threshold(z, 1 / (1 + 1 / c))).clamp_min(0)
    weights = _power(b / b.amax(-1, keepdim=True), 1 / c)
    return weights / weights.sum(-1, keepdim=True)


def capped_projection(z: Tensor, upper: Tensor, budget: float | Tensor) -> Tensor:
    r"""The p with Σp = budget and 0 ≤ p ≤ upper that is nearest to z; ``upper`` itself if that sums to less.

    p = min([z − τ]₊, upper). Scores enter by their distance d from the smallest of the support alone, which keeps p
    exact however far from 0 that lies; what is left, Σ min(d + x, upper) = budget on the support, is linear between the
    x at which entries reach their bounds.
    """
    ordered = z.sort(dim=-1, descending=True).values
    rows, bounds = z.unsqueeze(-2), upper.unsqueeze(-2)
    last = _last_below(ordered, lambda zk: (rows - zk).clamp_min(0).minimum(bounds), budget)
    d = z - ordered.gather(-1, last.clamp_min(0))
    support = d >= 0
    room = torch.where(support, upper - d, torch.inf)
    ordered = room.sort(dim=-1).values.clamp_min(0)
    rows, bounds = (torch.where(support, each, 0.0).unsqueeze(-2) for each in (d, upper))
    last = _last_below(ordered, lambda x: (rows + x).minimum(bounds), budget)
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
    z, upper = z.to(wide(z)), upper.to(wide(z))
    budget = budget.to(z.dtype) if isinstance(budget, Tensor) else budget
    inside = upper > 0
    z = z - z.amax(-1, keepdim=True)
    t = torch.where(inside, z - torch.where(inside, upper, 1.0).log(), -torch.inf)
    ordered = t.sort(dim=-1, descending=True).values
    rows, bounds = (torch.where(inside, each, 0.0).unsqueeze(-2) for each in (t, upper))
    last = _last_below(ordered, lambda tk: bounds * (rows - tk).clamp_max(0).exp(), budget)
    full = inside & (last >= 0) & (t >= ordered.gather(-1, last.clamp_min(0)))
    free = inside & ~full
    rest = (budget - torch.where(full, upper, 0.0).sum(-1, keepdim=True)).clamp_min(0)
    weights = torch.softmax(torch.where(free, z, -torch.inf), -1)
    return torch.where(full, upper, torch.where(free, (rest * weights).minimum(upper), 0.0)).to(dtype)


def _last_below(ordered: Tensor, p: Callable[[Tensor], Tensor], budget: float | Tensor) -> Tensor:
    """The last position at which Σ p(value there), which grows along the row, is below the budget; −1 if none is.

    By a search that divides the number of positions by 2 in each round; off the CPU by 4, which takes half as many
    operators.

    Args:
        ordered: values (…, n).
        p: maps values (…, k, 1) to rows (…, k, n).
        budget: a number, or one per row, (…, 1).
    """
    n = ordered.shape[-1]
    ways = 2 if known(ordered) else 4
    last = torch.full_like(ordered[..., :1], -1, dtype=torch.long)
    ahead = torch.ones_like(last).expand(*last.shape[:-1], ways - 1).cumsum(-1)
    stride = 1
    while stride * ways <= _most(ordered):
        stride *= ways
    while stride:
        # Behind the last position stands the last value again: where that is below the budget, all are.
        value = ordered.gather(-1, torch.add(last, ahead, alpha=stride).clamp_max(n - 1))
        below = p(value.unsqueeze(-1)).sum(-1) < budget
        last = torch.add(last, below.sum(-1, keepdim=True), alpha=stride)
        stride //= ways
    return last.clamp_max(n - 1)
