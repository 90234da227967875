"""Monotonic alignments of tokens to frames: the smoothed recursion, its gradient, Hessian products, the best path.

Everything is in double precision. Eight frames at a time are copied into lines that hold the tokens of each: a loop
along the tokens of a frame has no dependencies, and runs on vectors. The walk holds, for every frame and token, the
probability that the frame before belongs to the token before; the rest is the probability that it belongs to the same.

Token i can have frame t only if i ≤ t and as many frames are left as tokens: i ≥ n − m + t for n tokens and m frames.
Scores of other cells do not matter. No way leads from these cells to the end, or from the start to them.
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
    load,
    load_square,
    log2,
    maximum,
    minimum,
    select,
    sqrt,
    store,
    store_square,
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
    walk = torch.zeros((batch if keep else 0, frames, _padded(tokens)), dtype=torch.float64, device="cpu")
    given, results = arrays(scores, lengths), (value.numpy(), walk.numpy())
    over_rows(_forward, batch, scores.numel(), *given, np.array([gamma]), KINDS[alpha], *results)
    return value, walk


def gradient(weight: Tensor, value: Tensor, walk: Tensor, lengths: Tensor, scores: Tensor) -> Tensor:
    """The expected path, (B, N, T), times weights (B,).

    Zeros where the value is −inf or the weight 0, else NaN where the value is.
    """
    cells = torch.empty(scores.shape, dtype=scores.dtype, device="cpu")
    over_rows(_gradient, len(walk), walk.numel(), *arrays(weight.double(), value, walk, lengths), cells.numpy())
    return cells


def hessian_product(
    weight: Tensor, value: Tensor, walk: Tensor, lengths: Tensor, scores: Tensor, alpha: float, gamma: float
) -> tuple[Tensor, Tensor]:
    """The derivatives of the values (B,), and of what ``gradient`` returns, along a direction of the scores."""
    change_of_value = torch.empty(len(walk), dtype=torch.float64, device="cpu")
    cells = torch.empty(scores.shape, dtype=scores.dtype, device="cpu")
    given = arrays(weight.double(), value, walk, lengths, scores)
    results = (change_of_value.numpy(), cells.numpy())
    over_rows(_hessian_product, len(walk), walk.numel(), *given, np.array([gamma]), KINDS[alpha], *results)
    return change_of_value, cells


def best_paths(scores: Tensor, lengths: Tensor) -> Tensor:
    """The token of each frame on the path of highest score, (B, T), int64; −1 after the end, and where there is none.

    Of two equal ways to a cell, that from the same token is taken.
    """
    batch, _, frames = scores.shape
    path = torch.empty((batch, frames), dtype=torch.long, device="cpu")
    over_rows(_best_paths, batch, scores.numel(), *arrays(scores, lengths), path.numpy())
    return path


def _padded(tokens: int) -> int:
    """Room for the tokens of a frame, and for a vector that begins at any of them or one behind."""
    return (tokens // _FRAMES + 2) * _FRAMES


# -- on arrays --------------------------------------------------------------------------------------------
#
# In lines of values, token i is at index i + 1, so that each has a token before; lines have room for a vector more.
# Blocks hold eight tokens of eight frames: a vector per frame.

_FRAMES = 8  # the lanes of a vector of doubles
_LOG2E, _LN2 = math.log2(math.e), math.log(2.0)


@strict_helper
def _copy_frames(table: Any, b: int, t: int, blocks: Any, back: bool) -> None:
    """Copy eight frames, or those that there are, from t on, of a table (B, N, T) into blocks; back if ``back``."""
    _, tokens, frames = table.shape
    flat = table.reshape(-1)
    whole = tokens // _FRAMES * _FRAMES if t + _FRAMES <= frames else 0
    for i in range(0, whole, _FRAMES):
        place = (b * tokens + i) * frames + t
        if back:
            store_square(blocks, i * _FRAMES, flat, place, frames)
        else:
            load_square(flat, place, frames, blocks, i * _FRAMES)
    for i in range(whole, tokens):
        for k in range(min(_FRAMES, frames - t)):
            place, cell = (b * tokens + i) * frames + t + k, (i // _FRAMES * _FRAMES + k) * _FRAMES + i % _FRAMES
            if back:
                flat[place] = blocks[cell]
            else:
                blocks[cell] = np.float64(flat[place])


@strict_helper
def _number(tokens: int) -> Any:
    """0, 1, 2, … for as many tokens and a vector more."""
    return np.arange(tokens + _FRAMES).astype(np.float64)


@strict_helper
def _usable(numbers: Any, i: int, low: int, high: int) -> Any:
    """Which of eight tokens from i on are in a range."""
    number = load(numbers, i)
    return (number >= np.float64(low)) & (number <= np.float64(high))


@strict_helper
def _scores_of(blocks: Any, numbers: Any, i: int, t: int, low: int, high: int) -> Any:
    """The scores of eight tokens from i on at frame t, 0 where NaN or +inf; and the bits of such tokens in a range."""
    given = load(blocks, (i + t % _FRAMES) * _FRAMES)
    fine = given < np.inf
    return select(fine, given, 0.0), bits_of(_usable(numbers, i, low, high)) & ~bits_of(fine)


@strict_helper
def _write_frame(line: Any, cells: Any, b: int, t: int, n: int, blocks: Any) -> None:
    """Put the n tokens of frame t into blocks; at the first frame of a block, copy this into cells (B, N, T)."""
    for i in range(0, n, _FRAMES):
        store(blocks, (i + t % _FRAMES) * _FRAMES, load(line, i))
    if t % _FRAMES == 0:
        _copy_frames(cells, b, t, blocks, True)
        blocks[:] = 0.0


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
    _, tokens, most = scores.shape
    gamma = settings[0]
    inverse_gamma = 1.0 / gamma
    keep, wide = walk.shape[0] > 0, walk.shape[2]
    v, blocks, numbers = np.empty(wide + 1), np.zeros(wide * _FRAMES), _number(tokens)
    for b in range(first, last):
        n, m = lengths[b, 0], lengths[b, 1]
        value[b] = -np.inf
        if m < n:
            continue
        v[:] = -np.inf
        bad = np.uint64(0)
        for t in range(m):
            low, high = max(0, n - m + t), min(t, n - 1)
            if t % _FRAMES == 0:
                _copy_frames(scores, b, t, blocks, False)
            v[0] = 0.0 if t == 0 else -np.inf  # the start leads to the first token
            # From the last token down: the values of the frame before are still there for the tokens below.
            for i in range(high // _FRAMES * _FRAMES, low // _FRAMES * _FRAMES - 1, -_FRAMES):
                score, wrong = _scores_of(blocks, numbers, i, t, low, high)
                bad |= wrong
                before, here = load(v, i), load(v, i + 1)
                advance, excess = _choose(kind, before, here, inverse_gamma)
                store(v, i + 1, maximum(before, here) + excess * gamma + score)
                if keep:
                    store(walk, (b * most + t) * wide + i, advance)
        value[b] = np.nan if bad > 0 else v[n]


@strict
def _best_paths(first, last, scores, lengths, path):  # type: ignore[no-untyped-def]
    """The path of highest score, by one bit per cell: whether the frame before belongs to the token before."""
    _, tokens, most = scores.shape
    wide = (tokens // _FRAMES + 2) * _FRAMES
    v, blocks, numbers = np.empty(wide + 1), np.zeros(wide * _FRAMES), _number(tokens)
    advances = np.empty((most, wide // _FRAMES), np.uint8)
    for b in range(first, last):
        n, m = lengths[b, 0], lengths[b, 1]
        path[b] = -1
        if m < n:
            continue
        v[:] = -np.inf
        bad = np.uint64(0)
        for t in range(m):
            low, high = max(0, n - m + t), min(t, n - 1)
            if t % _FRAMES == 0:
                _copy_frames(scores, b, t, blocks, False)
            v[0] = 0.0 if t == 0 else -np.inf
            for i in range(high // _FRAMES * _FRAMES, low // _FRAMES * _FRAMES - 1, -_FRAMES):
                score, wrong = _scores_of(blocks, numbers, i, t, low, high)
                bad |= wrong
                before, here = load(v, i), load(v, i + 1)
                store(v, i + 1, maximum(before, here) + score)
                advances[t, i // _FRAMES] = bits_of(before > here)
        if bad > 0 or not v[n] > -np.inf:
            continue
        token = n - 1
        for t in range(m - 1, -1, -1):
            path[b, t] = token
            token -= (advances[t, token // _FRAMES] >> (token % _FRAMES)) & 1


@strict
def _gradient(first, last, weight, value, walk, lengths, cells):  # type: ignore[no-untyped-def]
    most, wide = walk.shape[1:]
    mass, blocks = np.empty(wide + 1), np.empty(wide * _FRAMES)
    for b in range(first, last):
        n, m = lengths[b, 0], lengths[b, 1]
        cells[b] = cells.dtype.type(np.nan if np.isnan(value[b]) and weight[b] != 0.0 else 0.0)
        if not value[b] > -np.inf:
            continue
        mass[:] = 0.0
        mass[n - 1] = weight[b]
        blocks[:] = 0.0
        for t in range(m - 1, -1, -1):
            _write_frame(mass, cells, b, t, n, blocks)
            low, high = max(0, n - m + t - 1), min(t, n - 1)  # one token more, whose mass has moved on
            for i in range(low // _FRAMES * _FRAMES, high + 1 if t > 0 else 0, _FRAMES):
                at = (b * most + t) * wide + i
                here = load(mass, i)
                store(mass, i, (here - here * load(walk, at)) + load(mass, i + 1) * load(walk, at + 1))


@strict
def _hessian_product(  # type: ignore[no-untyped-def]
    first, last, weight, value, walk, lengths, scores, settings, kind, change_of_value, cells
):
    _, tokens, most = cells.shape
    inverse_gamma = 1.0 / settings[0]
    wide = walk.shape[2]
    line = wide + 1
    v, blocks = np.empty(most * line), np.zeros(wide * _FRAMES)
    mass, change, numbers = np.empty(line), np.empty(line), _number(tokens)
    for b in range(first, last):
        n, m = lengths[b, 0], lengths[b, 1]
        nothing = np.nan if np.isnan(value[b]) else 0.0
        cells[b] = cells.dtype.type(nothing)
        change_of_value[b] = nothing
        if not value[b] > -np.inf:
            continue
        v[:] = 0.0
        for t in range(m):
            if t % _FRAMES == 0:
                _copy_frames(scores, b, t, blocks, False)
            for i in range(0, n, _FRAMES):
                usable = _usable(numbers, i, max(0, n - m + t), min(t, n - 1))
                found = select(usable, load(blocks, (i + t % _FRAMES) * _FRAMES), 0.0)
                if t > 0:
                    advance, at = load(walk, (b * most + t) * wide + i), (t - 1) * line + i
                    here = load(v, at + 1)
                    found = here + (load(v, at) - here) * advance + found
                store(v, t * line + i + 1, found)
        change_of_value[b] = v[(m - 1) * line + n]
        mass[:] = 0.0
        change[:] = 0.0
        mass[n - 1] = weight[b]
        blocks[:] = 0.0
        for t in range(m - 1, -1, -1):
            _write_frame(change, cells, b, t, n, blocks)
            low, high = max(0, n - m + t - 1), min(t, n - 1)
            for i in range(low // _FRAMES * _FRAMES, high + 1 if t > 0 else 0, _FRAMES):
                at, line_before = (b * most + t) * wide + i, (t - 1) * line + i
                stay, advance = load(walk, at), load(walk, at + 1)
                below, same, above = load(v, line_before), load(v, line_before + 1), load(v, line_before + 2)
                stay_change = _response(kind, stay) * (below - same) * inverse_gamma
                advance_change = _response(kind, advance) * (same - above) * inverse_gamma
                here, onward = load(mass, i), load(mass, i + 1)
                here_change, onward_change = load(change, i), load(change, i + 1)
                moved = here_change - here_change * stay - here * stay_change
                moved = moved + onward_change * advance + onward * advance_change
                store(mass, i, (here - here * stay) + onward * advance)
                store(change, i, moved)


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
