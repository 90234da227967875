"""Binary trees over spans: the smoothed CKY recursion, its gradient, and Hessian-vector products.

Eight trees are computed at once, one per lane. Choices are in the order of width, first word, split point and label;
the walk holds the probability of each among those of its span, eight lanes each. Everything but scores and results is
in double precision.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import strict, strict_helper
from fenchel.kernels.cpu.dp.choices import KINDS, SHANNON, arrays
from fenchel.kernels.cpu.dp.lanes import LANES, curvature, smooth_lanes
from fenchel.kernels.cpu.threads import over_rows

_LOG2E = math.log2(math.e)
_SMALL, _LARGE = 1e-120, 1e120  # between which products of two can be added

_CHEAP = 4
"""How many choices take as long as an element of other kernels, for which threads are started."""

# -- on tensors -------------------------------------------------------------------------------------------


def forward(scores: Tensor, lengths: Tensor, alpha: float, gamma: float, keep: bool) -> tuple[Tensor, Tensor]:
    """The value of each sentence, and the walk, which is of no use unless ``keep``.

    Args:
        scores: (B, N, N, L), of the span from word i to word j, with each label.
        lengths: (B,), int64: how many words there are.
        alpha: of Tsallis's entropy, one of ``choices.KINDS``.
        gamma: the temperature.
        keep: whether derivatives will be asked for.
    """
    batch, words, _, labels = scores.shape
    groups = -(-batch // LANES)
    choices = words + (words - 1) * words * (words + 1) // 6 if keep else words
    value = torch.empty(batch, dtype=torch.float64, device="cpu")
    walk = torch.empty((groups, choices * labels * LANES), dtype=torch.float64, device="cpu")
    given = arrays(scores, lengths)
    settings = np.array([gamma])
    over_rows(
        _forward,
        groups,
        batch * words**3 * labels // (6 * _CHEAP),
        *given,
        settings,
        KINDS[alpha],
        int(keep),
        value.numpy(),
        walk.numpy(),
    )
    return value, walk


def gradient(weight: Tensor, value: Tensor, walk: Tensor, lengths: Tensor, scores: Tensor) -> Tensor:
    """The expected spans, in shape and dtype of the scores (B, N, N, L), times weights (B,)."""
    spans = torch.empty(scores.shape, dtype=scores.dtype, device="cpu")
    given = arrays(weight.double(), value, walk, lengths)
    over_rows(_gradient, len(walk), walk.numel() // _CHEAP, *given, spans.numpy())
    return spans


def hessian_product(
    weight: Tensor, value: Tensor, walk: Tensor, lengths: Tensor, direction: Tensor, alpha: float, gamma: float
) -> tuple[Tensor, Tensor]:
    """The derivatives of the values (B,), and of what ``gradient`` returns, along a direction of the scores."""
    change = torch.empty(len(value), dtype=torch.float64, device="cpu")
    spans = torch.empty(direction.shape, dtype=direction.dtype, device="cpu")
    given = arrays(weight.double(), value, walk, lengths, direction)
    settings = np.array([gamma])
    over_rows(
        _hessian_product,
        len(walk),
        walk.numel() // _CHEAP,
        *given,
        settings,
        KINDS[alpha],
        change.numpy(),
        spans.numpy(),
    )
    return change, spans


# -- on arrays --------------------------------------------------------------------------------------------


@strict_helper
def _most_words(lengths: Any, group: int) -> int:
    """The number of words of the longest sentence of a group."""
    most = 1
    for b in range(group * LANES, min(group * LANES + LANES, lengths.size)):
        most = max(most, lengths[b])
    return most


@strict_helper
def _gather(x: Any, lengths: Any, group: int, s: Any, bad: Any, mean: Any) -> None:
    """Spans (N, N, L) of eight sentences in lanes, and the mean of those that are finite.

    Spans that a sentence does not have get the mean: they are computed with the others, and not used. ``bad`` counts
    entries that are NaN or +inf, which become 0.
    """
    batch, words, _, labels = x.shape
    flat, row = x.reshape(-1), words * labels
    for r in range(LANES):
        b = group * LANES + r
        length = lengths[b] if b < batch else 0
        first = b * words * row
        total, count, wrong = 0.0, 0, 0
        for i in range(length):
            for m in range(i * row + i * labels, i * row + length * labels):
                given = np.float64(flat[first + m])
                usable = given < np.inf
                found = given if usable else np.float64(0.0)
                wrong += 0 if usable else 1
                finite = found > -np.inf
                total += found if finite else 0.0
                count += 1 if finite else 0
                s[m * LANES + r] = found
        bad[r], mean[r] = wrong, total / max(count, 1)
        if length < words:
            for i in range(words):
                for m in range(i * row + max(i, length) * labels, (i + 1) * row):
                    s[m * LANES + r] = mean[r]


@strict_helper
def _scatter(s: Any, value: Any, group: int, x: Any) -> None:
    """Lanes of spans as (N, N, L) of each sentence: 0 for spans that are none, NaN where the value is."""
    batch, words, _, labels = x.shape
    flat, row = x.reshape(-1), words * labels
    for r in range(LANES):
        b = group * LANES + r
        if b < batch:
            fill = np.nan if value[b] != value[b] else 0.0
            first = b * words * row
            for i in range(words):
                for m in range(i * row, i * row + i * labels):
                    flat[first + m] = fill
                for m in range(i * row + i * labels, (i + 1) * row):
                    flat[first + m] = s[m * LANES + r] + fill


@strict_helper
def _seed(weight: Any, value: Any, lengths: Any, group: int, mass: Any) -> None:
    """Set masses (spans in lanes) to the weight at the root of each sentence that has a tree, else to 0."""
    mass[:] = 0.0
    for b in range(group * LANES, min(group * LANES + LANES, value.size)):
        if value[b] > -np.inf:
            mass[(lengths[b] - 1) * LANES + b - group * LANES] = weight[b]


@strict_helper
def _parts(v: Any, words: int, i: int, j: int, c: int) -> Any:
    """The sum of the values of the two parts of a span that is split behind word i + c; 0 for a word."""
    if i == j:
        return vec.splat(0.0)
    return vec.load(v, (i * words + i + c) * LANES) + vec.load(v, ((i + c + 1) * words + j) * LANES)


@strict_helper
def _inside(
    s: Any, mean: Any, words: int, labels: int, most: int, factor: float, keep: int, u: Any, walk: Any, at: int
) -> bool:
    """The recursion for Shannon's Ω in powers of 2, without a logarithm or a power per choice; False if that fails.

    u = 2^(factor·(v − (2w − 1)·mean) − 2(w − 1)) for a span of w words and value v: a tree has 2w − 1 spans, and there
    are about 4^w trees, so that u is near 1 unless scores differ much. Scores are replaced by their powers.
    """
    middle = vec.load(mean, 0)
    for width in range(most):
        for i in range(most - width):
            j = i + width
            span = (i * words + j) * LANES
            powers = vec.splat(0.0)
            for label in range(labels):
                place = span * labels + label * LANES
                e = vec.exp2((vec.load(s, place) - middle) * factor)
                vec.store(s, place, e)
                powers += e
            total = vec.splat(0.0)
            for c in range(width):
                left, right = vec.load(u, (i * words + i + c) * LANES), vec.load(u, ((i + c + 1) * words + j) * LANES)
                total = vec.fma(left, right, total)
            found = 0.25 * total * powers if width > 0 else powers
            vec.store(u, span, found)
            if vec.any_lane((found < _SMALL) | (found > _LARGE)):
                return False
            if keep:
                share = 1.0 / (total * powers if width > 0 else powers)
                for c in range(max(width, 1)):
                    if width > 0:
                        left = vec.load(u, (i * words + i + c) * LANES)
                        way = share * left * vec.load(u, ((i + c + 1) * words + j) * LANES)
                    else:
                        way = share
                    for label in range(labels):
                        vec.store(walk, at, way * vec.load(s, span * labels + label * LANES))
                        at += LANES
    return True


@strict
def _forward(
    first: int, last: int, scores: Any, lengths: Any, settings: Any, kind: int, keep: int, value: Any, walk: Any
) -> None:
    batch, words, _, labels = scores.shape
    gamma = settings[0]
    inverse_gamma = 1.0 / gamma
    s, v = np.empty(words * words * labels * LANES), np.zeros(words * words * LANES)
    bad, mean = np.empty(LANES), np.empty(LANES)
    for group in range(first, last):
        _gather(scores, lengths, group, s, bad, mean)
        start = group * walk.shape[1]
        at = start
        most = _most_words(lengths, group)
        if kind == SHANNON:
            factor = inverse_gamma * _LOG2E
            if _inside(s, mean, words, labels, most, factor, keep, v, walk, start):
                for b in range(group * LANES, min(group * LANES + LANES, batch)):
                    r, n = b - group * LANES, lengths[b]
                    power = math.log2(v[(n - 1) * LANES + r]) + 2.0 * (n - 1)
                    value[b] = np.nan if bad[r] > 0.0 else power / factor + (2 * n - 1) * mean[r]
                continue
            _gather(scores, lengths, group, s, bad, mean)
        for width in range(most):
            ways = max(width, 1)
            for i in range(most - width):
                j = i + width
                span = (i * words + j) * LANES
                at = at if keep else start
                top = vec.splat(-np.inf)
                for c in range(ways):
                    before = _parts(v, words, i, j, c)
                    for label in range(labels):
                        x = before + vec.load(s, span * labels + label * LANES)
                        vec.store(walk, at + (c * labels + label) * LANES, x)
                        top = vec.maximum(x, top)
                excess = smooth_lanes(kind, walk, at, ways * labels, top, inverse_gamma)
                vec.store(v, span, top + gamma * excess)
                at += ways * labels * LANES
        for b in range(group * LANES, min(group * LANES + LANES, batch)):
            r = b - group * LANES
            value[b] = np.nan if bad[r] > 0.0 else v[(lengths[b] - 1) * LANES + r]


@strict
def _gradient(first: int, last: int, weight: Any, value: Any, walk: Any, lengths: Any, spans: Any) -> None:
    _, words, _, labels = spans.shape
    mass, out = np.empty(words * words * LANES), np.empty(words * words * labels * LANES)
    for group in range(first, last):
        _seed(weight, value, lengths, group, mass)
        most = _most_words(lengths, group)
        at = group * walk.shape[1] + _choices(most) * labels * LANES
        out[:] = 0.0
        for width in range(most - 1, -1, -1):
            ways = max(width, 1)
            for i in range(most - width - 1, -1, -1):
                j = i + width
                span = (i * words + j) * LANES
                at -= ways * labels * LANES
                here = vec.load(mass, span)
                if not vec.any_lane((here > 0.0) | (here < 0.0)):
                    continue
                for c in range(ways if width > 0 or labels > 1 else 0):
                    passed = here * vec.load(walk, at + c * labels * LANES)
                    if labels > 1:
                        _add(out, span * labels, passed)
                        for label in range(1, labels):
                            taken = here * vec.load(walk, at + (c * labels + label) * LANES)
                            _add(out, span * labels + label * LANES, taken)
                            passed += taken
                    if width > 0:
                        _add(mass, (i * words + i + c) * LANES, passed)
                        _add(mass, ((i + c + 1) * words + j) * LANES, passed)
        # Without labels the mass of a span is all there is.
        _scatter(mass if labels == 1 else out, value, group, spans)


@strict_helper
def _choices(words: int) -> int:
    """How many split points all spans of a sentence have, words included."""
    return words + (words - 1) * words * (words + 1) // 6


@strict_helper
def _add(x: Any, place: int, v: Any) -> None:
    vec.store(x, place, vec.load(x, place) + v)


@strict
def _hessian_product(
    first: int,
    last: int,
    weight: Any,
    value: Any,
    walk: Any,
    lengths: Any,
    direction: Any,
    settings: Any,
    kind: int,
    change_of_value: Any,
    spans: Any,
) -> None:
    batch, words, _, labels = spans.shape
    inverse_gamma = 1.0 / settings[0]
    size = words * words * LANES
    s, out = np.empty(size * labels), np.empty(size * labels)
    v, mass, mass_change = np.zeros(size), np.empty(size), np.empty(size)
    bad, unused = np.empty(LANES), np.empty(LANES)
    for group in range(first, last):
        _gather(direction, lengths, group, s, bad, unused)
        out[:] = 0.0
        mass_change[:] = 0.0
        _seed(weight, value, lengths, group, mass)
        most = _most_words(lengths, group)
        at = group * walk.shape[1]
        for width in range(most):
            ways = max(width, 1)
            for i in range(most - width):
                j = i + width
                span = (i * words + j) * LANES
                total = vec.splat(0.0)
                for c in range(ways):
                    before = _parts(v, words, i, j, c)
                    for label in range(labels):
                        change = before + vec.load(s, span * labels + label * LANES)
                        total = vec.fma(vec.load(walk, at + (c * labels + label) * LANES), change, total)
                vec.store(v, span, total)
                at += ways * labels * LANES
        for b in range(group * LANES, min(group * LANES + LANES, batch)):
            moved = v[(lengths[b] - 1) * LANES + b - group * LANES]
            change_of_value[b] = moved if value[b] > -np.inf else (np.nan if value[b] != value[b] else 0.0)
        for width in range(most - 1, -1, -1):
            ways = max(width, 1)
            for i in range(most - width - 1, -1, -1):
                j = i + width
                span = (i * words + j) * LANES
                at -= ways * labels * LANES
                here, moved = vec.load(mass, span), vec.load(mass_change, span)
                if not vec.any_lane((here > 0.0) | (here < 0.0) | (moved > 0.0) | (moved < 0.0)):
                    continue
                along, total = vec.splat(0.0), vec.splat(0.0)
                for c in range(ways):
                    before = _parts(v, words, i, j, c)
                    for label in range(labels):
                        bend = curvature(kind, vec.load(walk, at + (c * labels + label) * LANES))
                        along = vec.fma(bend, before + vec.load(s, span * labels + label * LANES), along)
                        total += bend
                mean = along / vec.select(total > 0.0, total, 1.0)
                for c in range(ways):
                    before = _parts(v, words, i, j, c)
                    passed, drift = vec.splat(0.0), vec.splat(0.0)
                    for label in range(labels):
                        p = vec.load(walk, at + (c * labels + label) * LANES)
                        change = before + vec.load(s, span * labels + label * LANES)
                        response = curvature(kind, p) * (change - mean)
                        step = moved * p + here * (response * inverse_gamma)
                        passed += here * p
                        drift += step
                        _add(out, span * labels + label * LANES, step)
                    if width > 0:
                        for part in ((i * words + i + c) * LANES, ((i + c + 1) * words + j) * LANES):
                            _add(mass, part, passed)
                            _add(mass_change, part, drift)
        _scatter(out, value, group, spans)
