"""Binary trees over spans: the smoothed CKY recursion, its gradient, and Hessian-vector products.

Eight trees are computed at once, one per lane, in lists of vectors: of the value of each span, of the score of each
span and label, and of the probability of each choice among those of its span (the ways), in the order of width, first
word, split point and label. Everything is in double precision, scores too, so that there is one kernel for all: what
a copy of the scores takes is little beside the recursion. Nothing but results is kept: the expected spans are computed
with the values, and a Hessian-vector product begins anew.
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
_HUGE = 1e300  # the sum of some scores may be larger than any number
_POWERS, _GENERAL = 0, 1  # the recursion in powers of 2, and the one with a logarithm per span

_CHEAP = 4  # how many choices take as long as an element of other kernels

# -- on tensors -------------------------------------------------------------------------------------------


def forward(
    scores: Tensor, lengths: Tensor, alpha: float, gamma: float, keep: bool
) -> tuple[Tensor, tuple[Tensor, bool]]:
    """The value of each sentence; the expected spans, in shape and dtype of the scores, and whether any is NaN.

    Args:
        scores: (B, N, N) or (B, N, N, L), of the span from word i to word j, with each label.
        lengths: (B,), int64: how many words there are.
        alpha: of Tsallis's entropy, one of ``choices.KINDS``.
        gamma: the temperature.
        keep: whether derivatives will be asked for; if not, the expected spans are empty.
    """
    x, n = arrays(scores.double(), lengths)
    value, spans = np.empty(len(x)), np.empty(x.shape if keep else (0,) * x.ndim, x.dtype)
    settings = np.array([gamma, 0.0])
    over_rows(_forward, *_extent(x), _with_labels(x), n, settings, KINDS[alpha], value, _with_labels(spans))
    return torch.from_numpy(value), (torch.from_numpy(spans).to(scores.dtype), settings[1] > 0)


def gradient(weight: Tensor, expected: tuple[Tensor, bool]) -> Tensor:
    """The expected spans times weights (B,).

    Zeros where the value is −inf or the weight 0, else NaN where the value is.
    """
    spans, invalid = expected
    each = weight.to(spans.dtype).reshape(-1, *[1] * (spans.dim() - 1))
    found = spans * each
    return torch.where(each == 0, 0.0, found) if invalid else found


def hessian_product(
    weight: Tensor, value: Tensor, scores: Tensor, lengths: Tensor, direction: Tensor, alpha: float, gamma: float
) -> tuple[Tensor, Tensor]:
    """The derivatives of the values (B,), and of what ``gradient`` returns, along a direction of the scores."""
    w, v, n, x, along = arrays(weight.double(), value, lengths, scores.double(), direction.double())
    change, spans = np.empty(len(v)), np.empty(x.shape, x.dtype)
    given = w, v, n, _with_labels(x), _with_labels(along), np.array([gamma]), KINDS[alpha]
    over_rows(_hessian_product, *_extent(x), *given, change, _with_labels(spans))
    return torch.from_numpy(change), torch.from_numpy(spans).to(scores.dtype)


def _extent(x: np.ndarray[Any, Any]) -> tuple[int, int]:
    """The number of groups, and how many elements of other kernels take as long, for which threads are started."""
    return -(-len(x) // LANES), x.size * x.shape[1] // (6 * _CHEAP)


def _with_labels(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array (B, N, N) or (B, N, N, L) as (B, N, N, L)."""
    return x if x.ndim == 4 else x.reshape(*x.shape, 1)


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
    size, start = words * row, group * LANES * words * row
    whole = size // LANES * LANES if group * LANES + LANES <= batch else 0
    for m in range(0, whole, LANES):
        vec.load_square(flat, start + m, size, s, m * LANES)
    least = words
    for r in range(LANES):
        b = group * LANES + r
        for m in range(whole, size if b < batch else 0):
            s[m * LANES + r] = np.float64(flat[start + r * size + m])
        length = lengths[b] if b < batch else 0
        least = min(least, length)
        if length < words:
            for i in range(words):
                for m in range(i * row + max(i, length) * labels, (i + 1) * row):
                    s[m * LANES + r] = -np.inf  # not counted
    zero = vec.splat(0.0)
    total, count, wrong = zero, zero, zero
    for i in range(words):
        for m in range((i * row + i * labels) * LANES, (i + 1) * row * LANES, LANES):
            given = vec.load(s, m)
            usable = given < np.inf
            found = vec.select(usable, given, zero)
            wrong += vec.select(usable, zero, 1.0)
            finite = found > -np.inf
            total += vec.select(finite, found, zero)
            count += vec.select(finite, 1.0, zero)
            vec.store(s, m, found)
    vec.store(bad, 0, wrong)
    vec.store(mean, 0, total / vec.maximum(count, 1.0))
    if least < words:
        for r in range(LANES):
            b = group * LANES + r
            length = lengths[b] if b < batch else 0
            for i in range(words):
                for m in range(i * row + max(i, length) * labels, (i + 1) * row):
                    s[m * LANES + r] = mean[r]


@strict_helper
def _centre(s: Any, mean: Any) -> None:
    """Take the mean off the scores: a tree of w words has 2w − 1 spans, so that trees keep their probabilities."""
    middle = vec.load(mean, 0)
    middle = vec.select((middle > -_HUGE) & (middle < _HUGE), middle, 0.0)
    vec.store(mean, 0, middle)
    for place in range(0, s.size, LANES):
        vec.store(s, place, vec.load(s, place) - middle)


@strict_helper
def _scatter(s: Any, value: Any, group: int, chosen: int, x: Any) -> None:
    """Lanes of spans as (N, N, L) of each sentence: NaN where the value is. ``s`` is 0 for spans that are none."""
    batch, words, _, labels = x.shape
    flat, size = x.reshape(-1), words * words * labels
    start = group * LANES * size
    whole = size // LANES * LANES if chosen == 2**LANES - 1 else 0
    for m in range(0, whole, LANES):
        vec.store_square(s, m * LANES, flat, start + m, size)
    for b in range(group * LANES, min(group * LANES + LANES, batch)):
        r = b - group * LANES
        if chosen >> r & 1:
            for m in range(whole, size):
                flat[b * size + m] = s[m * LANES + r]
            if value[b] != value[b]:
                x[b] = np.nan


@strict_helper
def _seed(value: Any, lengths: Any, group: int, chosen: int, mass: Any) -> None:
    """Set masses (spans in lanes) to 1 at the root of each chosen sentence that has a tree, else to 0."""
    mass[:] = 0.0
    for b in range(group * LANES, min(group * LANES + LANES, value.size)):
        if chosen >> (b - group * LANES) & 1 and value[b] > -np.inf:
            mass[(lengths[b] - 1) * LANES + b - group * LANES] = 1.0


@strict_helper
def _parts(v: Any, words: int, i: int, j: int, c: int) -> Any:
    """The sum of the values of the two parts of a span that is split behind word i + c; 0 for a word."""
    if i == j:
        return vec.splat(0.0)
    return vec.load(v, (i * words + i + c) * LANES) + vec.load(v, ((i + c + 1) * words + j) * LANES)


@strict_helper
def _by_powers(
    x: Any, lengths: Any, group: int, kind: int, gamma: float, s: Any, u: Any, bad: Any, mean: Any, ends: Any
) -> Any:
    """``_inside`` of eight sentences; returns those that are right, sentence r as bit r: none but for Shannon's Ω."""
    batch, words, _, labels = x.shape
    if kind != SHANNON:
        return 0
    _gather(x, lengths, group, s, bad, mean)
    _centre(s, mean)
    present = min(LANES, batch - group * LANES)
    for r in range(LANES):
        ends[r] = lengths[group * LANES + r] if r < present else 0
    right = _inside(s, ends, words, labels, _most_words(lengths, group), _LOG2E / gamma, u)
    return right & ((1 << present) - 1)


@strict_helper
def _inside(s: Any, ends: Any, words: int, labels: int, most: int, factor: float, u: Any) -> Any:
    """The recursion for Shannon's Ω in powers of 2, without a logarithm or a power per choice.

    u = 2^(factor·v − 2(w − 1)) for a span of w words and value v: there are about 4^w trees, so that u is near 1 unless
    scores differ much; it is 1 for spans that a sentence does not have. Scores are replaced by their powers. Returns
    the lanes in which no power was too large or too small, as bits.
    """
    row, end = words * LANES, vec.load(ends, 0)
    fine = end == end
    for width in range(most):
        for i in range(most - width):
            span = i * row + (i + width) * LANES
            powers = vec.splat(0.0)
            for place in range(span * labels, (span + LANES) * labels, LANES):
                y = vec.load(s, place) * factor
                e = vec.select(y >= -1022.0, vec.exp2(y), 0.0)
                vec.store(s, place, e)
                powers += e
            outside = end <= float(i + width)
            # No power of a label was too large for ``exp2``, and those too small for it are nothing beside the sum.
            fine = fine & (outside | ((powers >= _SMALL * _SMALL) & (powers <= _LARGE * _LARGE)))
            if width > 0:
                left, right = i * row + i * LANES, span + row
                total, other = vec.splat(0.0), vec.splat(0.0)
                for _ in range(width):
                    # Two sums in turns: one would wait for itself.
                    total, other = other, vec.fma(vec.load(u, left), vec.load(u, right), total)
                    left += LANES
                    right += row
                powers = 0.25 * (total + other) * powers
            powers = vec.select(outside, 1.0, powers)
            vec.store(u, span, powers)
            fine = fine & (powers >= _SMALL) & (powers <= _LARGE)
    return np.int64(vec.bits_of(fine))


@strict_helper
def _outside(u: Any, s: Any, words: int, labels: int, most: int, mass: Any, part: Any) -> None:
    """From the roots' masses, those of all spans, by what ``_inside`` found.

    A span i … j has a share of the mass of the spans i … k and h … j that it is the first or the second part of.
    ``part`` is what their masses have to be multiplied by the values of both parts.
    """
    row = words * LANES
    for width in range(most - 1, -1, -1):
        for i in range(most - width):
            j = i + width
            span = i * row + j * LANES
            inside = vec.load(u, span)
            over = vec.load(mass, span) / inside if i == 0 else vec.splat(0.0)
            other, powers = vec.splat(0.0), vec.splat(0.0)
            for h in range(0, i * row, row):
                over, other = other, vec.fma(vec.load(part, h + j * LANES), vec.load(u, h + (i - 1) * LANES), over)
            # Last, with zeros at the end: which of the two sums gets a term must not depend on longer sentences.
            for k in range((j + 1) * LANES, most * LANES, LANES):
                over, other = other, vec.fma(vec.load(part, i * row + k), vec.load(u, (j + 1) * row + k), over)
            for place in range(span * labels, (span + LANES) * labels, LANES):
                powers += vec.load(s, place)
            over += other
            vec.store(part, span, 0.25 * over * powers)
            vec.store(mass, span, over * inside)


@strict_helper
def _lengthen(u: Any, s: Any, words: int, labels: int, most: int, ways: Any) -> None:
    """Write the probabilities of all choices, from what ``_inside`` found."""
    at = 0
    for width in range(most):
        for i in range(most - width):
            span = (i * words + i + width) * LANES
            # All choices of a span with one label, and all its labels, have the same sums.
            share = (0.25 if width > 0 else 1.0) / vec.load(u, span)
            for c in range(max(width, 1)):
                way = share
                if width > 0:
                    left = vec.load(u, (i * words + i + c) * LANES)
                    way = share * left * vec.load(u, ((i + c + 1) * words + i + width) * LANES)
                for place in range(span * labels, (span + LANES) * labels, LANES):
                    vec.store(ways, at, way * vec.load(s, place))
                    at += LANES


@strict_helper
def _recurse(
    x: Any, lengths: Any, group: int, kind: int, gamma: float, ways: Any, s: Any, v: Any, bad: Any, mean: Any
) -> None:
    """The recursion of eight sentences. Without room for more, the ways are those of one span after the other."""
    _, words, _, labels = x.shape
    most = _most_words(lengths, group)
    _gather(x, lengths, group, s, bad, mean)
    _centre(s, mean)
    at, keep = 0, ways.size > words * labels * LANES
    for width in range(most):
        count = max(width, 1)
        for i in range(most - width):
            j = i + width
            span = (i * words + j) * LANES
            top = vec.splat(-np.inf)
            for c in range(count):
                before = _parts(v, words, i, j, c)
                for label in range(labels):
                    given = before + vec.load(s, span * labels + label * LANES)
                    vec.store(ways, at + (c * labels + label) * LANES, given)
                    top = vec.maximum(given, top)
            excess = smooth_lanes(kind, ways, at, count * labels, top, 1.0 / gamma)
            vec.store(v, span, top + gamma * excess)
            at += count * labels * LANES if keep else 0


@strict
def _forward(
    first: int, last: int, scores: Any, lengths: Any, settings: Any, kind: int, value: Any, spans: Any
) -> None:
    batch, words, _, labels = scores.shape
    size, keep = words * words * LANES, spans.size > 0
    s, v, bad, mean, ends = np.empty(size * labels), np.empty(size), np.empty(LANES), np.empty(LANES), np.empty(LANES)
    ways = np.empty((_choices(words) if keep else words) * labels * LANES)
    mass, part, out = np.empty(size), np.empty(size), np.empty(size * labels if labels > 1 else 0)
    right = 0
    for turn in range(2 * first, 2 * last):
        group, way = turn // 2, turn % 2
        if way == _POWERS:
            right = _by_powers(scores, lengths, group, kind, settings[0], s, v, bad, mean, ends)
        chosen = _chosen(way, right, batch, group)
        if chosen == 0:
            continue
        if way == _GENERAL:
            _recurse(scores, lengths, group, kind, settings[0], ways, s, v, bad, mean)
        for b in range(group * LANES, min(group * LANES + LANES, batch)):
            r, n = b - group * LANES, lengths[b]
            if chosen >> r & 1:
                found = v[(n - 1) * LANES + r]
                if way == _POWERS:
                    found = (math.log2(found) + 2.0 * (n - 1)) * settings[0] / _LOG2E
                value[b] = found + (2 * n - 1) * mean[r]
                if bad[r] > 0.0:
                    value[b], settings[1] = np.nan, 1.0
        if keep:
            _seed(value, lengths, group, chosen, mass)
            _expect(way, v, s, ways, words, labels, _most_words(lengths, group), mass, part, out)
            # Without labels the mass of a span is all there is.
            _scatter(mass if labels == 1 else out, value, group, chosen, spans)


@strict_helper
def _chosen(way: int, right: int, batch: int, group: int) -> int:
    """The sentences of a group whose results are those of a recursion: where powers of 2 fail, of the general one.

    Which one that is must not depend on the other sentences.
    """
    return right if way == _POWERS else ((1 << min(LANES, batch - group * LANES)) - 1) ^ right


@strict_helper
def _expect(
    way: int, v: Any, s: Any, ways: Any, words: int, labels: int, most: int, mass: Any, part: Any, out: Any
) -> None:
    """From the roots' masses, those of all spans, and if there are several labels, those of spans and labels."""
    out[:] = 0.0
    if way == _POWERS:
        _outside(v, s, words, labels, most, mass, part)
        if labels > 1:
            _share(s, mass, words, labels, most, out)
        return
    at = _choices(most) * labels * LANES
    for width in range(most - 1, -1, -1):
        for i in range(most - width - 1, -1, -1):
            at -= max(width, 1) * labels * LANES
            here = vec.load(mass, (i * words + i + width) * LANES)
            if vec.any_lane((here > 0.0) | (here < 0.0)):
                _pass_on(here, ways, at, words, labels, i, width, mass, out)


@strict_helper
def _share(s: Any, mass: Any, words: int, labels: int, most: int, out: Any) -> None:
    """The mass of each span, divided among labels in the proportion of their powers s."""
    for i in range(most):
        for span in range((i * words + i) * LANES, (i * words + most) * LANES, LANES):
            powers = vec.splat(0.0)
            for place in range(span * labels, (span + LANES) * labels, LANES):
                powers += vec.load(s, place)
            each = vec.load(mass, span) / powers
            for place in range(span * labels, (span + LANES) * labels, LANES):
                vec.store(out, place, each * vec.load(s, place))


@strict_helper
def _pass_on(here: Any, ways: Any, at: int, words: int, labels: int, i: int, width: int, mass: Any, out: Any) -> None:
    """Add the mass of a span to those of the parts that it is split into, and to its labels, if there are several."""
    span = (i * words + i + width) * LANES
    for c in range(max(width, 1)):
        passed = vec.splat(0.0)
        for label in range(labels):
            taken = here * vec.load(ways, at)
            if labels > 1:
                _add(out, span * labels + label * LANES, taken)
            passed += taken
            at += LANES
        if width > 0:
            _add(mass, (i * words + i + c) * LANES, passed)
            _add(mass, ((i + c + 1) * words + i + width) * LANES, passed)


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
    lengths: Any,
    scores: Any,
    direction: Any,
    settings: Any,
    kind: int,
    change_of_value: Any,
    spans: Any,
) -> None:
    batch, words, _, labels = spans.shape
    inverse_gamma = 1.0 / settings[0]
    size = words * words * LANES
    s, out, ways = np.empty(size * labels), np.empty(size * labels), np.empty(_choices(words) * labels * LANES)
    v, mass, mass_change = np.empty(size), np.empty(size), np.empty(size)
    bad, mean_score, ends = np.empty(LANES), np.empty(LANES), np.empty(LANES)
    right = 0
    for turn in range(2 * first, 2 * last):
        group, way = turn // 2, turn % 2
        most = _most_words(lengths, group)
        if way == _POWERS:
            right = _by_powers(scores, lengths, group, kind, settings[0], s, v, bad, mean_score, ends)
        chosen = _chosen(way, right, batch, group)
        if chosen == 0:
            continue
        if way == _POWERS:
            _lengthen(v, s, words, labels, most, ways)
        else:
            _recurse(scores, lengths, group, kind, settings[0], ways, s, v, bad, mean_score)
        _gather(direction, lengths, group, s, bad, mean_score)
        out[:] = 0.0
        mass_change[:] = 0.0
        _seed(value, lengths, group, chosen, mass)
        for b in range(group * LANES, min(group * LANES + LANES, batch)):
            mass[(lengths[b] - 1) * LANES + b - group * LANES] *= weight[b]
        at = 0
        for width in range(most):
            count = max(width, 1)
            for i in range(most - width):
                j = i + width
                span = (i * words + j) * LANES
                total = vec.splat(0.0)
                for c in range(count):
                    before = _parts(v, words, i, j, c)
                    for label in range(labels):
                        change = before + vec.load(s, span * labels + label * LANES)
                        total = vec.fma(vec.load(ways, at + (c * labels + label) * LANES), change, total)
                vec.store(v, span, total)
                at += count * labels * LANES
        for b in range(group * LANES, min(group * LANES + LANES, batch)):
            moved = v[(lengths[b] - 1) * LANES + b - group * LANES]
            if chosen >> (b - group * LANES) & 1:
                change_of_value[b] = moved if value[b] > -np.inf else (np.nan if value[b] != value[b] else 0.0)
        for width in range(most - 1, -1, -1):
            count = max(width, 1)
            for i in range(most - width - 1, -1, -1):
                j = i + width
                span = (i * words + j) * LANES
                at -= count * labels * LANES
                here, moved = vec.load(mass, span), vec.load(mass_change, span)
                if not vec.any_lane((here > 0.0) | (here < 0.0) | (moved > 0.0) | (moved < 0.0)):
                    continue
                along, total = vec.splat(0.0), vec.splat(0.0)
                for c in range(count):
                    before = _parts(v, words, i, j, c)
                    for label in range(labels):
                        bend = curvature(kind, vec.load(ways, at + (c * labels + label) * LANES))
                        along = vec.fma(bend, before + vec.load(s, span * labels + label * LANES), along)
                        total += bend
                mean = along / vec.select(total > 0.0, total, 1.0)
                for c in range(count):
                    before = _parts(v, words, i, j, c)
                    passed, drift = vec.splat(0.0), vec.splat(0.0)
                    for label in range(labels):
                        p = vec.load(ways, at + (c * labels + label) * LANES)
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
        _scatter(out, value, group, chosen, spans)
