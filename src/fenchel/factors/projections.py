"""Projections of rows onto the polytopes of the logic factors, with exact derivatives.

The entries that are at a bound are found without derivatives. Given these, a projection is linear, and is computed by
differentiable operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDING = 1e-15
"""Entries closer to a bound than this are at the bound."""


def band(theta: Tensor, costs: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    r"""Project rows onto :math:`\{p \in [0, 1]^n : l \le \langle a, p \rangle \le b\}`.

    p = clip(θ − τa) for one number τ per row, found among its sorted breakpoints in O(n log n).
    """
    p = theta.clamp(0, 1)
    load = (costs * p).sum(-1)
    target = torch.minimum(torch.maximum(load, lower), upper).detach()
    tight = ((load <= lower) | (load >= upper)).unsqueeze(-1)
    if not bool(tight.any()):
        return p
    with torch.no_grad():
        free, ones = _pieces(theta, costs, target)
        first = _on_plane(theta, costs, target, free, ones)
        # At a vertex several entries reach their bounds at the same τ; none of them is free.
        free, ones = free & (first > ROUNDING) & (first < 1 - ROUNDING), ones | (free & (first >= 1 - ROUNDING))
    return torch.where(tight, _on_plane(theta, costs, target, free, ones), p)


def _pieces(theta: Tensor, costs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries are inside (0, 1) and which are 1 for the τ at which the sum is the target."""
    n = theta.shape[-1]
    paid = costs > 0
    rate = torch.where(paid, costs, 1.0)
    empty = torch.where(paid, theta, 0.0) / rate
    full = torch.where(paid, theta - 1, 0.0) / rate
    points = torch.cat([full, empty], -1).sort(-1).values
    low = torch.zeros_like(target, dtype=torch.long)
    high = torch.full_like(low, 2 * n - 1)
    for _ in range((2 * n - 1).bit_length()):  # the first point at which the sum has fallen to the target
        middle = (low + high) // 2
        tau = points.gather(-1, middle.unsqueeze(-1))
        fallen = (costs * (theta - tau * costs).clamp(0, 1)).sum(-1) <= target
        high = torch.where(fallen, middle, high)
        low = torch.where(fallen, low, torch.minimum(middle + 1, high))
    right = points.gather(-1, high.unsqueeze(-1))
    left = torch.where((high > 0).unsqueeze(-1), points.gather(-1, (high - 1).clamp_min(0).unsqueeze(-1)), -torch.inf)
    ones = torch.where(paid, (full >= right) & (empty > right), theta >= 1)
    zeros = torch.where(paid, empty <= left, theta <= 0)
    return ~ones & ~zeros, ones


def _on_plane(theta: Tensor, costs: Tensor, target: Tensor, free: Tensor, ones: Tensor) -> Tensor:
    """The free entries moved along the costs until the sum is the target, the others at their bounds."""
    moved = torch.where(free, costs, 0.0)
    norm = moved.square().sum(-1, keepdim=True)
    norm = torch.where(norm > 0, norm, 1.0)
    rest = target.unsqueeze(-1) - torch.where(ones, costs, 0.0).sum(-1, keepdim=True)
    theta = torch.where(free, theta, 0.0)
    with torch.no_grad():  # a shift close to the solution first: one difference of huge scores would lose all digits
        near = theta
        for _ in range(2):
            near = near - moved * (((moved * near).sum(-1, keepdim=True) - rest) / norm)
        far = theta - near
    theta = theta - far
    p = theta - moved * (((moved * theta).sum(-1, keepdim=True) - rest) / norm)
    return torch.where(free, p, ones.to(p.dtype)).clamp(0, 1)


def band_support(theta: Tensor, costs: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    r"""The largest :math:`\langle \theta, p \rangle` over the set of ``band``, per row: the minimum of the dual."""
    paid = costs > 0
    tau = torch.where(paid, theta / torch.where(paid, costs, 1.0), 0.0)
    tau = torch.cat([tau, torch.zeros_like(tau[..., :1])], -1)
    reduced = (theta.unsqueeze(-2) - tau.unsqueeze(-1) * costs.unsqueeze(-2)).clamp_min(0).sum(-1)
    room = torch.minimum(upper, costs.sum(-1)).unsqueeze(-1)
    value = reduced + torch.where(tau > 0, tau * room, tau * lower.unsqueeze(-1))
    return value.amin(-1)


def or_out(theta: Tensor) -> Tensor:
    """Project rows onto the convex hull of all (inputs, their disjunction); the output is the last entry.

    Entries are clipped. Inputs that exceed the output are averaged with it. If the output then exceeds the sum of the
    inputs, the projection is onto the face where both are equal.
    """
    inputs, output = theta[..., :-1], theta[..., -1:]
    count = inputs.shape[-1]
    with torch.no_grad():
        ordered = inputs.sort(-1, descending=True).values
        size = torch.arange(2, count + 2, device=theta.device, dtype=theta.dtype)
        means = (ordered.cumsum(-1) + output) / size
        before = torch.cat([output, means[..., :-1]], -1)
        joining = (ordered > before).sum(-1, keepdim=True)  # these are the largest inputs
        meeting = torch.cat([output, means], -1).gather(-1, joining)
        above = inputs > meeting
    members = torch.cat([above, torch.ones_like(output, dtype=torch.bool)], -1)
    mean = torch.where(members, theta, 0.0).sum(-1, keepdim=True) / members.sum(-1, keepdim=True)
    p = torch.where(members, mean, theta).clamp(0, 1)
    short = p[..., :-1].sum(-1, keepdim=True) <= p[..., -1:]
    if not bool(short.any()):
        return p
    one = torch.ones_like(theta[..., 0])
    flipped = band(torch.cat([inputs, 1 - output], -1), torch.ones_like(theta), one, one)
    equal = torch.cat([flipped[..., :-1], 1 - flipped[..., -1:]], -1)
    return torch.where(short, equal, p)


def or_out_support(theta: Tensor) -> Tensor:
    """The largest score of (inputs, their disjunction), per row: 0 if all are off."""
    inputs = theta[..., :-1]
    best = torch.maximum(inputs.clamp_min(0).sum(-1), inputs.amax(-1))
    best = torch.where((inputs > 0).any(-1), best, inputs.amax(-1))
    return (theta[..., -1] + best).clamp_min(0)


def pair(theta: Tensor, score: Tensor) -> Tensor:
    r"""Maximize :math:`\theta_1 p_1 + \theta_2 p_2 + s \, p_{12} - \tfrac12 \|p\|^2` over pairs p (…, 2).

    For s ≥ 0 the best p₁₂ is min(p₁, p₂): the score is added to the smaller entry, or both share it and are equal. A
    negative score of a pair equals a positive score of the first and the negated second variable.
    """
    negative = score < 0
    first = theta[..., 0] + score.clamp_max(0)
    second = torch.where(negative, 1 - theta[..., 1], theta[..., 1])
    reward = score.abs()
    shared = (first + second + reward) / 2
    p = torch.where(first > second + reward, first, torch.where(second > first + reward, first + reward, shared))
    q = torch.where(first > second + reward, second + reward, torch.where(second > first + reward, second, shared))
    p, q = p.clamp(0, 1), q.clamp(0, 1)
    return torch.stack([p, torch.where(negative, 1 - q, q)], -1)
