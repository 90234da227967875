"""Chains of states: the smoothed recursion, its gradient (the expected path), and Hessian-vector products.

The walk holds, chain by chain, the probabilities of the previous state given the current one, step by step and
[previous, current], and at its end those of the last state. Scores are summed in double precision; choices are computed
from differences, in the precision of the scores.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fenchel.kernels.cpu.compiler import helper, kernel
from fenchel.kernels.cpu.dp.choices import KINDS, SHANNON, arrays, count_invalid, deficits, jacobian_product, smooth
from fenchel.kernels.cpu.powers import exp2, log2
from fenchel.kernels.cpu.threads import over_rows

# -- on tensors -------------------------------------------------------------------------------------------


def forward(
    unary: Tensor,
    transition: Tensor,
    ends: tuple[Tensor, Tensor],
    lengths: Tensor,
    alpha: float,
    gamma: float,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """The value of each chain, in double precision, and the walk (empty if it is not to be kept).

    Args:
        unary: (B, T, S).
        transition: (1 or B, 1 or T−1, S, S).
        ends: what the first and the last state score, (1 or B, S) each.
        lengths: (B,), int64, from 1 to T.
        alpha: of Tsallis's entropy, one of ``choices.KINDS``.
        gamma: the temperature.
        keep: whether the walk is wanted.
    """
    batch, steps, states = unary.shape
    value = torch.empty(batch, dtype=torch.float64, device="cpu")
    walk = torch.empty((batch if keep else 0, (steps - 1) * states**2 + states), dtype=unary.dtype, device="cpu")
    given = arrays(unary, transition, *ends, lengths)
    over_rows(
        _forward, batch, unary.numel() * states, *given, np.array([gamma]), KINDS[alpha], value.numpy(), walk.numpy()
    )
    return value, walk


def gradient(
    weight: Tensor, value: Tensor, walk: Tensor, lengths: Tensor, shape: torch.Size, steps: int
) -> tuple[Tensor, Tensor]:
    """Expected states (B, T, S) and pairs of states (B, steps, S, S), times weights (B,).

    Zeros where the value is −inf or the weight 0, else NaN where the value is.

    Args:
        weight: (B,).
        value: (B,), as ``forward`` returned it.
        walk: as ``forward`` returned it.
        lengths: (B,), int64.
        shape: (B, T, S).
        steps: T − 1, or 1 for the sum over all steps.
    """
    states = torch.empty(shape, dtype=walk.dtype, device="cpu")
    pairs = torch.empty((shape[0], steps, shape[2], shape[2]), dtype=walk.dtype, device="cpu")
    given = arrays(weight.double(), value, walk, lengths)
    over_rows(_gradient, shape[0], walk.numel(), *given, states.numpy(), pairs.numpy())
    return states, pairs


def hessian_product(
    weight: Tensor,
    value: Tensor,
    walk: Tensor,
    lengths: Tensor,
    unary: Tensor,
    transition: Tensor,
    alpha: float,
    gamma: float,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The derivatives of the values (B,), and of what ``gradient`` returns, along a direction (unary, transition)."""
    change = torch.empty(len(unary), dtype=torch.float64, device="cpu")
    states = torch.empty(unary.shape, dtype=walk.dtype, device="cpu")
    pairs = torch.empty((len(unary), *transition.shape[1:]), dtype=walk.dtype, device="cpu")
    given = arrays(weight.double(), value, walk, lengths, unary.double(), transition.double())
    results = (change.numpy(), states.numpy(), pairs.numpy())
    over_rows(_hessian_product, len(unary), walk.numel(), *given, np.array([gamma]), KINDS[alpha], *results)
    return change, (states, pairs)


# -- on arrays --------------------------------------------------------------------------------------------

_LOG2E, _LN2 = math.log2(math.e), math.log(2.0)
_SPREAD = 40.0
"""The largest difference of scores of steps, in units of γ, for which no sum of their powers underflows."""


@helper
def _powers(step, inverse_gamma, weights, peaks):  # type: ignore[no-untyped-def]
    """exp(score − peak) of each step, peak: of all steps into a state. Returns False if scores are too far apart."""
    size = peaks.size
    peaks[:] = -np.inf
    least = np.inf
    for p in range(size):
        onward = step[p]
        for s in range(size):
            peaks[s] = max(peaks[s], np.float64(onward[s]))
            least = min(least, np.float64(onward[s]))
    if not (np.max(peaks) - least) * inverse_gamma <= _SPREAD:
        return False
    scale = inverse_gamma * _LOG2E
    for p in range(size):
        onward, weight = step[p], weights[p]
        for s in range(size):
            weight[s] = exp2((onward[s] - peaks[s]) * scale)
    return True


@helper
def _shannon_step(peak, inverse_gamma, weights, peaks, v, q, before, share):  # type: ignore[no-untyped-def]
    """A step of Shannon's recursion by products of powers, which takes S exponentials in place of S².

    v becomes the value of each state without its own score, and q the probabilities of the previous states.
    """
    size = v.size
    number = weights.dtype.type
    zero, lowest = number(0), (-126.0 if weights.itemsize == 4 else -1022.0)
    scale = inverse_gamma * _LOG2E
    for p in range(size):
        y = (v[p] - peak) * scale
        e = number(exp2(y))
        before[p] = e if y >= lowest else zero
    for s in range(size):
        share[s] = zero
    for p in range(size):
        e, weight = before[p], weights[p]
        for s in range(size):
            share[s] += e * weight[s]
    for s in range(size):
        v[s] = peak + peaks[s] + log2(np.float64(share[s])) * (_LN2 / inverse_gamma)
        share[s] = number(1) / share[s]
    for p in range(size):
        e, weight, chosen = before[p], weights[p], q[p * size : (p + 1) * size]
        for s in range(size):
            chosen[s] = e * weight[s] * share[s]


@kernel
def _forward(  # type: ignore[no-untyped-def]
    first, last, unary, transition, start, end, lengths, settings, kind, value, walk
):
    _, steps, size = unary.shape
    number = unary.dtype.type
    gamma = settings[0]
    inverse_gamma = 1.0 / gamma
    square = size * size
    keep = walk.shape[0] > 0
    v, top, base = np.empty(size), np.empty(size), np.empty(size)
    x, spare, work = np.empty(square, unary.dtype), np.empty(square, unary.dtype), np.empty(3 * size, unary.dtype)
    excess, table = np.empty(size, unary.dtype), x.reshape((size, size))
    weights, peaks = np.empty((size, size), unary.dtype), np.empty(size)
    known, close = False, False
    for b in range(first, last):
        length = lengths[b]
        scores = transition[b if transition.shape[0] > 1 else 0]
        used = scores[: length - 1] if scores.shape[0] > 1 or length == 1 else scores
        opening, closing = start[b if start.shape[0] > 1 else 0], end[b if end.shape[0] > 1 else 0]
        bad = (
            count_invalid(unary[b, :length].reshape(-1))
            + count_invalid(used.reshape(-1))
            + count_invalid(opening)
            + count_invalid(closing)
        )
        if bad:
            value[b] = np.nan
            continue
        for s in range(size):
            v[s] = np.float64(unary[b, 0, s]) + np.float64(opening[s])
        if kind == SHANNON and scores.shape[0] == 1 and (transition.shape[0] > 1 or not known):
            known, close = True, _powers(scores[0], inverse_gamma, weights, peaks)
        for t in range(1, length):
            step = scores[t - 1 if scores.shape[0] > 1 else 0]
            q = walk[b, (t - 1) * square : t * square] if keep else spare
            peak = np.max(v)
            if close and peak > -np.inf:
                _shannon_step(peak, inverse_gamma, weights, peaks, v, q, excess, work)
                for s in range(size):
                    v[s] += unary[b, t, s]
                continue
            for s in range(size):
                top[s] = -np.inf
            for p in range(size):
                before, onward = v[p], step[p]
                for s in range(size):
                    reached = before + onward[s]
                    top[s] = reached if reached > top[s] else top[s]
            for s in range(size):
                base[s] = top[s] if top[s] > -np.inf else 0.0
            for p in range(size):
                before, onward, choice = v[p], step[p], table[p]
                for s in range(size):
                    choice[s] = number((before + onward[s] - base[s]) * inverse_gamma)
            smooth(kind, size, size, x, q, excess, work)
            for s in range(size):
                v[s] = top[s] + gamma * excess[s] + unary[b, t, s]
        highest = -np.inf
        for s in range(size):
            v[s] += closing[s]
            highest = v[s] if v[s] > highest else highest
        for s in range(size):
            x[s] = number((v[s] - (highest if highest > -np.inf else 0.0)) * inverse_gamma)
        offset = (steps - 1) * square
        smooth(kind, size, 1, x, walk[b, offset:] if keep else spare, excess, work)
        value[b] = highest + gamma * excess[0]


@kernel
def _gradient(first, last, weight, value, walk, lengths, states, steps):  # type: ignore[no-untyped-def]
    _, longest, size = states.shape
    square = size * size
    shared = steps.shape[1] == 1
    mass, earlier, gap = np.empty(size), np.empty(size), np.empty(size)
    for b in range(first, last):
        length = lengths[b]
        nothing = states.dtype.type(np.nan if np.isnan(value[b]) and weight[b] != 0.0 else 0.0)
        states[b] = nothing
        steps[b] = nothing
        if not value[b] > -np.inf:
            continue
        q = walk[b, (longest - 1) * square :]
        deficits(q.reshape((size, 1)), gap)
        for s in range(size):
            mass[s] = weight[b] * q[s] * (1.0 + gap[0])
        for t in range(length - 1, -1, -1):
            for s in range(size):
                states[b, t, s] = mass[s]
            if t == 0:
                break
            out = steps[b, 0 if shared else t - 1]
            q = walk[b, (t - 1) * square : t * square]
            deficits(q.reshape((size, size)), gap)
            for s in range(size):
                mass[s] += mass[s] * gap[s]
            for p in range(size):
                share, there = q[p * size : (p + 1) * size], out[p]
                total = 0.0
                for s in range(size):
                    taken = mass[s] * share[s]
                    there[s] += taken
                    total += taken
                earlier[p] = total
            for s in range(size):
                mass[s] = earlier[s]


@kernel
def _hessian_product(  # type: ignore[no-untyped-def]
    first, last, weight, value, walk, lengths, unary, transition, settings, kind, change_of_value, states, steps
):
    _, longest, size = states.shape
    square = size * size
    shared = steps.shape[1] == 1
    inverse_gamma = 1.0 / settings[0]
    v = np.empty((longest, size))
    mass, earlier, mass_change, earlier_change = np.empty(size), np.empty(size), np.empty(size), np.empty(size)
    gap = np.empty(size)
    change, response, work = np.empty(square), np.empty(square), np.empty(2 * size)
    for b in range(first, last):
        length = lengths[b]
        nothing = states.dtype.type(np.nan if np.isnan(value[b]) else 0.0)
        states[b] = nothing
        steps[b] = nothing
        change_of_value[b] = nothing
        if not value[b] > -np.inf:
            continue
        scores = transition[b if transition.shape[0] > 1 else 0]
        for s in range(size):
            v[0, s] = unary[b, 0, s]
        for t in range(1, length):
            step = scores[0 if scores.shape[0] == 1 else t - 1]
            q = walk[b, (t - 1) * square : t * square]
            deficits(q.reshape((size, size)), gap)
            for s in range(size):
                v[t, s] = 0.0
            for p in range(size):
                for s in range(size):
                    v[t, s] += q[p * size + s] * (v[t - 1, p] + step[p, s])
            for s in range(size):
                v[t, s] += v[t, s] * gap[s] + unary[b, t, s]
        q = walk[b, (longest - 1) * square :]
        jacobian_product(kind, size, 1, q, v[length - 1], response, work)
        deficits(q.reshape((size, 1)), gap)
        total = 0.0
        for s in range(size):
            share = q[s] * (1.0 + gap[0])
            total += share * v[length - 1, s]
            mass[s] = weight[b] * share
            mass_change[s] = weight[b] * response[s] * inverse_gamma
        change_of_value[b] = total
        for t in range(length - 1, -1, -1):
            for s in range(size):
                states[b, t, s] = mass_change[s]
            if t == 0:
                break
            step = scores[0 if scores.shape[0] == 1 else t - 1]
            out = steps[b, 0 if shared else t - 1]
            q = walk[b, (t - 1) * square : t * square]
            for p in range(size):
                for s in range(size):
                    change[p * size + s] = v[t - 1, p] + step[p, s]
            jacobian_product(kind, size, size, q, change, response, work)
            deficits(q.reshape((size, size)), gap)
            for s in range(size):
                mass[s] += mass[s] * gap[s]
                mass_change[s] += mass_change[s] * gap[s]
            for p in range(size):
                total, total_change = 0.0, 0.0
                for s in range(size):
                    taken = mass[s] * q[p * size + s]
                    moved = mass_change[s] * q[p * size + s] + mass[s] * response[p * size + s] * inverse_gamma
                    out[p, s] += moved
                    total += taken
                    total_change += moved
                earlier[p] = total
                earlier_change[p] = total_change
            mass, earlier = earlier, mass
            mass_change, earlier_change = earlier_change, mass_change
