"""Probabilities of boxes and simplices under a Gaussian: in closed form, by quadrature, or by quasi-Monte Carlo."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.special import log_ndtr, ndtri

from fenchel._quadrature import log_concave
from fenchel._torch import forward_mode

SHIFTS = 8
LATTICES = {127: 37, 509: 118, 1021: 467, 4093: 665}
"""Numbers of points of a lattice, which is shifted at random ``SHIFTS`` times, and Korobov's generator for each. More
points are used while the error is too large. Generators are the best below half the number of points, by the product of
P₂ over several dimensions up to 16."""
MAX_PERIODIC = 6
"""The largest number of dimensions for which integrands are made periodic; above, the variance would grow more."""
TOLERANCE = 1e-4
CHUNK = 2**17
"""The number of samples that are computed at a time, to bound the memory."""
MAX_DEVIATIONS = 38.0
"""Standard deviations beyond which a Gaussian tail is zero in double precision."""


def log_interval(a: Tensor, b: Tensor) -> Tensor:
    """log(Φ(b) − Φ(a)) for a < b, either of which may be infinite; precise in both tails and for narrow intervals."""
    flip = a + b > 0
    low, high = torch.where(flip, -b, a), torch.where(flip, -a, b)
    width, middle = high - low, (low + high) / 2
    narrow = width * (1 + middle.abs()) < 1e-2
    apart = ~narrow & (low > -torch.inf)
    below = (log_ndtr(torch.where(apart, low, high - 1)) - log_ndtr(high)).exp()
    wide = log_ndtr(high) + torch.log1p(-torch.where(apart, below, 0.0))
    w = torch.where(narrow & (width > 0), width, 1.0)
    m = torch.where(narrow, middle, 0.0)
    series = 1 + w.square() * ((m.square() - 1) / 24 + w.square() * (m**4 - 6 * m.square() + 3) / 1920)
    close = -m.square() / 2 - 0.5 * math.log(2 * math.pi) + w.log() + torch.where(narrow, series, 1.0).log()
    nothing = torch.where(width.isnan(), torch.nan, -torch.inf)
    return torch.where(width > 0, torch.where(narrow, close, wide), nothing)


def log_box(mean: Tensor, tril: Tensor, bounded: Tensor) -> tuple[Tensor, Tensor]:
    r"""log P(c ≥ 0 and the first entries sum to at most 1) for c ~ N(mean, tril trilᵀ), and its standard error.

    Args:
        mean: (R, D), double precision.
        tril: (R, D, D).
        bounded: (R,), the number of first entries whose sum is at most 1; the others are only positive.

    Returns:
        The log-probability (R,), and the relative standard error of the probability: zero for D = 1 (closed form) and
        D = 2 (quadrature).
    """
    rows, dim = mean.shape
    if dim == 0 or rows == 0:
        return mean.new_zeros(rows) + mean.sum(-1), mean.new_zeros(rows)
    if dim == 1:
        return _log_weights(mean, tril, bounded, (mean.new_zeros(1, 0), mean.new_zeros(1))).squeeze(-1), mean.new_zeros(
            rows
        )
    if dim == 2:
        return _by_quadrature(mean, tril, bounded), mean.new_zeros(rows)
    if mean.requires_grad or tril.requires_grad or forward_mode():
        return _by_lattice(mean, tril, bounded)
    # Without derivatives equal rows are computed once, such as those of samples on the same vertex.
    keys = torch.cat([mean, tril.flatten(1), bounded.unsqueeze(-1)], -1)
    unique_rows, which = keys.unique(dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
    first, factor, count = unique_rows.split([dim, dim * dim, 1], -1)
    log_prob, error = _by_lattice(first, factor.unflatten(-1, (dim, dim)), count.squeeze(-1))
    return log_prob[which], error[which]


def _limits(centre: Tensor, scale: Tensor, simplex: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """The interval of the next standard normal: its entry is positive, and in the simplex at most 1 minus ``used``."""
    upper = (1 - used - centre) / scale
    return -centre / scale, torch.where(simplex, upper, torch.inf)


def _log_weights(mean: Tensor, tril: Tensor, bounded: Tensor, rule: tuple[Tensor, Tensor]) -> Tensor:
    """Log-weights (R, N) of N samples, drawn entry by entry from truncated normals (Geweke, Genz)."""
    uniform, log_weight = rule
    x: list[Tensor] = []
    used = mean.new_zeros(())
    within = int(bounded.max()) if len(bounded) else 0
    for k in range(mean.shape[1]):
        centre = mean[:, k : k + 1]
        for past, value in enumerate(x):
            centre = centre + tril[:, k, past : past + 1] * value
        scale, last = tril[:, k, k : k + 1], k + 1 == mean.shape[1]
        if k < within:
            simplex = (k < bounded).unsqueeze(-1)
            a, b = _limits(centre, scale, simplex, used)
            log_weight = log_weight + log_interval(a, b)
            if not last:
                x.append(_truncated(a, b, uniform[:, k]))
                used = used + torch.where(simplex, centre + scale * x[-1], 0.0)
        else:  # bounded from below only
            a = centre / scale
            log_mass = log_ndtr(a)
            log_weight = log_weight + log_mass
            if not last:
                x.append(torch.maximum(-ndtri((log_mass.exp() * uniform[:, k]).clamp_min(1e-300)), -a))
    return log_weight


def _truncated(a: Tensor, b: Tensor, uniform: Tensor) -> Tensor:
    """The quantile of a standard normal on [a, b]."""
    flip = a + b > 0
    low, high = torch.where(flip, -b, a), torch.where(flip, -a, b)
    below = log_ndtr(low).exp()  # torch's ndtr has no digits left in this tail
    p = below + uniform * (log_ndtr(high).exp() - below)
    x = torch.minimum(torch.maximum(ndtri(p.clamp(1e-300, 1 - 1e-16)), low), high)
    return torch.where(flip, -x, x)


def _by_quadrature(mean: Tensor, tril: Tensor, bounded: Tensor) -> Tensor:
    """``log_box`` for D = 2."""
    first, second = (bounded > 0), (bounded > 1)

    def log_density(value: Tensor, row: Tensor) -> Tensor:  # of the first entry, whose limits are fixed
        x = (value - mean[row, 0]) / tril[row, 0, 0]
        centre = mean[row, 1] + tril[row, 1, 0] * x
        a, b = _limits(centre, tril[row, 1, 1], second[row], value)
        return -x.square() / 2 - tril[row, 0, 0].log() + log_interval(a, b)

    with torch.no_grad():
        scale, slope = tril[:, 0, 0], tril[:, 1, 0]
        sure = torch.where(slope > 0, (MAX_DEVIATIONS * tril[:, 1, 1] - mean[:, 1]) / slope, 0.0).clamp(0, 1e15)
        furthest = mean[:, 0] + scale * (torch.maximum(-mean[:, 0] / scale, sure) + 9)
        rule = log_concave(log_density, torch.zeros_like(scale), torch.where(first, 1.0, furthest))
    return rule.log_integral(log_density(rule.nodes, rule.rows)) - 0.5 * math.log(2 * math.pi)


def _by_lattice(mean: Tensor, tril: Tensor, bounded: Tensor) -> tuple[Tensor, Tensor]:
    """``log_box`` for D ≥ 3, with more points for rows whose error is above ``TOLERANCE``."""
    log_prob, error = torch.zeros_like(mean[:, 0]), torch.zeros_like(mean[:, 0])
    differentiable = mean.requires_grad or tril.requires_grad or forward_mode()
    left = torch.arange(len(mean), device=mean.device)
    for points in LATTICES:
        rule = _lattice(points, mean)

        def log_mean(i: Tensor, rule: tuple[Tensor, Tensor] = rule) -> tuple[Tensor, Tensor]:
            samples = _log_weights(mean[i], tril[i], bounded[i], rule)
            return torch.logsumexp(samples, -1) - math.log(samples.shape[-1]), _spread(samples.detach())

        with torch.no_grad():
            value, spread = (torch.cat(each) for each in zip(*map(log_mean, _chunks(left, rule[1])), strict=True))
        precise = ~(spread > TOLERANCE) if points < max(LATTICES) else torch.ones_like(left, dtype=torch.bool)
        for i in _chunks(left[precise], rule[1]) if differentiable else ():
            log_prob = log_prob.index_add(0, i, log_mean(i)[0])
        if not differentiable:
            log_prob = log_prob.index_add(0, left[precise], value[precise])
        error = error.index_add(0, left[precise], spread[precise])
        left = left[~precise]
        if not len(left):
            break
    return log_prob, error


def _chunks(rows: Tensor, samples: Tensor) -> Sequence[Tensor]:
    chunks: Sequence[Tensor] = rows.split(max(CHUNK // len(samples), 1))  # type: ignore[no-untyped-call]
    return chunks if len(rows) else ()


def _spread(log_weight: Tensor) -> Tensor:
    """The relative standard error (R,), from the differences between shifts."""
    scaled = (log_weight - log_weight.max(-1, keepdim=True).values).exp()
    means = scaled.reshape(len(scaled), SHIFTS, -1).mean(-1)
    return means.std(-1) / math.sqrt(SHIFTS) / means.mean(-1)


def _lattice(points: int, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Uniform numbers (SHIFTS · points, D − 1) and log-weights (SHIFTS · points,), the same in every call.

    Korobov's lattice with random shifts. Sidi's transform makes smooth integrands periodic, for which lattices converge
    fast. The baker's transform, in more dimensions, makes them only continuous, but all weights are equal.
    """
    dim = mean.shape[1] - 1
    powers = torch.tensor([pow(LATTICES[points], k, points) for k in range(dim)], dtype=mean.dtype, device=mean.device)
    generator = torch.Generator().manual_seed(0)
    shift = torch.rand(SHIFTS, 1, dim, dtype=mean.dtype, generator=generator, device="cpu").to(mean.device)
    t = (torch.arange(points, dtype=mean.dtype, device=mean.device).unsqueeze(-1) * powers / points + shift) % 1
    t, log_weight = t.reshape(-1, dim), t.new_zeros(SHIFTS * points)
    if dim < MAX_PERIODIC:
        log_weight = (2 * torch.sin(math.pi * t).square()).clamp_min(1e-300).log().sum(-1)
        t = t - torch.sin(2 * math.pi * t) / (2 * math.pi)
    else:
        t = (2 * t - 1).abs()
    return t.clamp(1e-12, 1 - 1e-12).to(mean.device), log_weight.to(mean.device)
