"""Monotonic alignments of tokens to frames: the smoothed recursion, its gradient, Hessian products, the best path.

Everything is in double precision, and frames lie one after the other, each with the scores of all tokens: a loop along
the tokens of a frame has no dependencies, and runs on vectors. The walk holds, for every frame and token, the
probability that the frame before belongs to the token before; the rest is the probability that it belongs to the same.

Token i can have frame t only if i ≤ t and as many frames are left as tokens: i ≥ n − m + t for n tokens and m frames.
Scores of other cells are not read.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel.kernels.cpu.compiler import strict, strict_helper
from fenchel.kernels.cpu.dp.choices import GINI, HALVES, KINDS, SHANNON, arrays
from fenchel.kernels.cpu.threads import over_rows
from fenchel.kernels.cpu.vectors import (
    bits_of,
    exp2,
    lanes,
    load,
    load_part,
    log2,
    maximum,
    minimum,
    select,
    sqrt,
    store_part,
    unordered,
)

# -- on tensors -------------------------------------------------------------------------------------------


def forward(scores: Tensor, lengths: Tensor, alpha: float, gamma: float, keep: bool) -> tuple[Tensor, Tensor]:
    """The value of each alignment, in double precision, and the walk (B, T, N) (empty if it is not to be kept).

    Args:
        scores: (B, N, T), tokens and frames.
        lengths: (B, 2), int64: how many tokens and frames there are.
        alpha: of Tsallis's entropy, one of ``choices.KINDS``.
        gamma: the temperature.
        keep: whether the walk is wanted.
    """
    batch, tokens, frames = scores.shape
    value = torch.empty(batch, dtype=torch.float64, device="cpu")
    walk = torch.zeros((batch if keep else 0, frames, tokens), dtype=torch.float64, device="cpu")
    given = arrays(_by_frames(scores), lengths)
    results = (value.numpy(), walk.numpy())
    over_rows(_forward, batch, scores.numel(), *given, np.array([gamma]), KINDS[alpha], *results)
    return value, walk


def gradient(weight: Tensor, value: Tensor, walk: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """The expected path, (B, N, T), times weights (B,).

    Zeros where the value is −inf or the weight 0, else NaN where the value is.
    """
    cells = torch.empty(walk.shape, dtype=torch.float64, device="cpu")
    over_rows(_gradient, len(walk), walk.numel(), *arrays(weight.double(), value, walk, lengths), cells.numpy())
    return cells.transpose(1, 2).to(dtype)


def hessian_product(
    weight: Tensor, value: Tensor, walk: Tensor, lengths: Tensor, scores: Tensor, alpha: float, gamma: float
) -> tuple[Tensor, Tensor]:
    """The derivatives of the values (B,), and of what ``gradient`` returns, along a direction of the scores."""
    change_of_value = torch.empty(len(walk), dtype=torch.float64, device="cpu")
    cells = torch.empty(walk.shape, dtype=torch.float64, device="cpu")
    given = arrays(weight.double(), value, walk, lengths, _by_frames(scores))
    results = (change_of_value.numpy(), cells.numpy())
    over_rows(_hessian_product, len(walk), walk.numel(), *given, np.array([gamma]), KINDS[alpha], *results)
    return change_of_value, cells.transpose(1, 2).to(scores.dtype)


def best_paths(scores: Tensor, lengths: Tensor) -> Tensor:
    """The token of each frame on the path of highest score, (B, T), int64; −1 after the end, and where there is none.

    Of two equal ways to a cell, that from the same token is taken.
    """
    value, walk = forward(scores, lengths, math.inf, 1.0, True)
    path = torch.empty(walk.shape[:2], dtype=torch.long, device="cpu")
    over_rows(_trace_back, len(walk), path.numel(), *arrays(value, walk, lengths), path.numpy())
    return path


def _by_frames(scores: Tensor) -> Tensor:
    """Scores (B, N, T) in double precision as (B, T, N), contiguous."""
    return scores.detach().transpose(1, 2).contiguous().double()


# -- on arrays --------------------------------------------------------------------------------------------
#
# In lines of values, token i is at index i + 1, so that each has a token before; lines have room for a vector more.

_LOG2E, _LN2 = math.log2(math.e), math.log(2.0)


@strict_helper
def _choose(kind: Any, before: Any, here: Any, inverse_gamma: float) -> Any:
    """Of the values at the token before and at the same token: the probability of the former, max_Ω/γ less the maximum.

    With two choices every Ω has a closed form in the difference x ≤ 0 of the smaller from the larger.
    """
    top = maximum(before, here)
    x = (minimum(before, here) - select(top > -np.inf, top, 0.0)) * inverse_gamma
    zero = x * 0.0
    zero = select(x > -np.inf, zero, 0.0)
    if kind == SHANNON:
        y = x * _LOG2E
        power = select(y >= -1022.0, exp2(y), 0.0)  # smaller powers are not normal numbers
        total = power + 1.0
        less, excess = power / total, log2(total) * _LN2
    elif kind == GINI:
        less = maximum((x + 1.0) * 0.5, 0.0)
        excess = less * less
    elif kind == HALVES:
        # p = r² with r² + (r − u)² = 1 for half the difference u
        u = minimum(x * -0.5, 1.0)
        larger = (u + sqrt(2.0 - u * u)) * 0.5
        smaller = larger - u
        less = smaller * smaller
        excess = (1.0 - larger * larger * larger - smaller * less) * (4.0 / 3.0) - u * less * 2.0
        excess = maximum(excess, 0.0)
    else:
        less, excess = select(x == 0.0, zero + 0.5, 0.0), zero
    return select(before > here, 1.0 - less, less), excess


@strict
def _forward(first, last, scores, lengths, settings, kind, value, walk):  # type: ignore[no-untyped-def]
    _, most, width = scores.shape
    gamma = settings[0]
    inverse_gamma = 1.0 / gamma
    keep = walk.shape[0] > 0
    v = np.empty(width + 1 + lanes(scores))
    for b in range(first, last):
        n, m = lengths[b, 0], lengths[b, 1]
        value[b] = -np.inf
        if m < n:
            continue
        v[:] = -np.inf
        v[1] = scores[b, 0, 0]
        bad = bits_of(load_part(scores, b * most * width, 1, 0.0) >= np.inf)
        if np.isnan(v[1]):
            bad += np.uint64(1)
        for t in range(1, m):
            low, high = max(0, n - m + t), min(t, n - 1)
            row = (b * most + t) * width
            # From the last token down: the values of the frame before are still there for the tokens below.
            for i in range(low + (high - low) // lanes(scores) * lanes(scores), low - 1, -lanes(scores)):
                count = min(lanes(scores), high - i + 1)
                score = load_part(scores, row + i, count, 0.0)
                bad += bits_of(unordered(score, score) | (score >= np.inf))
                before, here = load(v, i), load(v, i + 1)
                advance, excess = _choose(kind, before, here, inverse_gamma)
                store_part(v, i + 1, maximum(before, here) + excess * gamma + score, count)
                if keep:
                    store_part(walk, row + i, advance, count)
        value[b] = np.nan if bad > 0 else v[n]


@strict
def _gradient(first, last, weight, value, walk, lengths, cells):  # type: ignore[no-untyped-def]
    _, most, width = cells.shape
    mass = np.empty(width + 1 + lanes(cells))
    for b in range(first, last):
        n, m = lengths[b, 0], lengths[b, 1]
        cells[b] = np.nan if np.isnan(value[b]) and weight[b] != 0.0 else 0.0
        if not value[b] > -np.inf:
            continue
        mass[:] = 0.0
        mass[n - 1] = weight[b]
        cells[b, m - 1, n - 1] = weight[b]
        for t in range(m - 1, 0, -1):
            low, high = max(0, n - m + t - 1), min(t - 1, n - 1)
            row = (b * most + t) * width
            # Where the walk was not written it is 0, and no mass moves from there to the token before.
            for i in range(low, high + 1, lanes(cells)):
                count = min(lanes(cells), high - i + 1)
                stay = load_part(walk, row + i, count, 0.0)
                advance = load_part(walk, row + i + 1, min(count, width - i - 1), 0.0)
                here = load(mass, i)
                moved = (here - here * stay) + load(mass, i + 1) * advance
                store_part(mass, i, moved, count)
                store_part(cells, row - width + i, moved, count)


@strict
def _hessian_product(  # type: ignore[no-untyped-def]
    first, last, weight, value, walk, lengths, scores, settings, kind, change_of_value, cells
):
    _, most, width = cells.shape
    inverse_gamma = 1.0 / settings[0]
    v = np.empty((most, width + 1 + lanes(cells)))
    line = v.shape[1]
    mass, change = np.empty(line), np.empty(line)
    for b in range(first, last):
        n, m = lengths[b, 0], lengths[b, 1]
        nothing = np.nan if np.isnan(value[b]) else 0.0
        cells[b] = nothing
        change_of_value[b] = nothing
        if not value[b] > -np.inf:
            continue
        v[:] = 0.0
        v[0, 1] = scores[b, 0, 0]
        for t in range(1, m):
            low, high = max(0, n - m + t), min(t, n - 1)
            row = (b * most + t) * width
            for i in range(low, high + 1, lanes(cells)):
                count = min(lanes(cells), high - i + 1)
                advance = load_part(walk, row + i, count, 0.0)
                here = load(v, (t - 1) * line + i + 1)
                found = here + (load(v, (t - 1) * line + i) - here) * advance + load_part(scores, row + i, count, 0.0)
                store_part(v, t * line + i + 1, found, count)
        change_of_value[b] = v[m - 1, n]
        mass[:] = 0.0
        change[:] = 0.0
        mass[n - 1] = weight[b]
        for t in range(m - 1, 0, -1):
            low, high = max(0, n - m + t - 1), min(t - 1, n - 1)
            row = (b * most + t) * width
            for i in range(low, high + 1, lanes(cells)):
                count = min(lanes(cells), high - i + 1)
                stay = load_part(walk, row + i, count, 0.0)
                advance = load_part(walk, row + i + 1, min(count, width - i - 1), 0.0)
                at = (t - 1) * line + i
                below, same, above = load(v, at), load(v, at + 1), load(v, at + 2)
                stay_change = _response(kind, stay) * (below - same) * inverse_gamma
                advance_change = _response(kind, advance) * (same - above) * inverse_gamma
                here, onward = load(mass, i), load(mass, i + 1)
                here_change, onward_change = load(change, i), load(change, i + 1)
                moved = here_change - here_change * stay - here * stay_change
                moved = moved + onward_change * advance + onward * advance_change
                store_part(mass, i, (here - here * stay) + onward * advance, count)
                store_part(change, i, moved, count)
                store_part(cells, row - width + i, moved, count)


@strict_helper
def _response(kind: Any, p: Any) -> Any:
    """The derivative of one of two probabilities in the difference of their scores: s₁s₂/(s₁ + s₂), s = p^(2−α)."""
    rest = 1.0 - p
    if kind == SHANNON:
        return p * rest
    both = select(p > 0.0, select(rest > 0.0, p * 0.0 + 1.0, 0.0), 0.0)
    if kind == GINI:
        return both * 0.5
    if kind == HALVES:
        a, b = sqrt(p), sqrt(rest)
        return select(both > 0.0, a * b / (a + b), 0.0)
    return p * 0.0


@strict
def _trace_back(first, last, value, walk, lengths, path):  # type: ignore[no-untyped-def]
    for b in range(first, last):
        token, m = lengths[b, 0] - 1, lengths[b, 1]
        path[b] = -1
        if not value[b] > -np.inf:
            continue
        for t in range(m - 1, -1, -1):
            path[b, t] = token
            if walk[b, t, token] > 0.5:
                token -= 1
