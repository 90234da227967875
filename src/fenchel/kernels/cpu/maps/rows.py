"""α-entmax and α-normmax of rows, and their losses with class indices."""

from __future__ import annotations

from typing import Any

import numpy as np

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import strict, strict_helper, unrolled
from fenchel.kernels.cpu.maps.batches import (
    LEFT_OUT,
    batch_room,
    solve_batch,
    solve_steep_batch,
    store_batch,
    store_residuals,
    store_steep_batch,
    store_steep_residuals,
)
from fenchel.kernels.cpu.maps.blocks import (
    filter_candidates,
    gather_candidates,
    load_row,
    padded,
    release_workspace,
    rough_level,
    row_maxima,
    shift,
    workspace,
)
from fenchel.kernels.cpu.maps.newton import GROUP, approach, solve
from fenchel.kernels.cpu.maps.parameters import offset_of, power_at, reach_of, rule_of, scale_of
from fenchel.kernels.cpu.maps.places import fill
from fenchel.kernels.cpu.maps.steep import steep_entmax
from fenchel.kernels.cpu.maps.stores import finish_streams, matrix, store_candidates, store_row
from fenchel.kernels.cpu.memory import borrowed, release


@strict_helper
def solve_row(x: Any, start: int, n: int, powers: Any, row: int, norm: bool, room: Any, index: Any) -> Any:
    """p of one row, n scores of x from ``start`` on, by the parameters of ``row``, in the workspace.

    Returns:
        the number of vectors, the number of candidates, −1 if all entries are there, the largest score, the rule and
        the offset A of the level. A row with NaN or +inf is all NaN, one without any score above −inf all 0.
    """
    z, w, tops, numbers = room
    rule, level = rule_of(powers, row, 1, norm, numbers)
    groups, top, bad = row_maxima(x, start, n, z, tops)
    largest = vec.first_lane(top)
    wrong = vec.any_lane(bad) or largest == np.inf
    if wrong or largest == -np.inf:
        m = padded((n + vec.lanes(x) - 1) // vec.lanes(x))
        fill(w, 0, m * vec.lanes(x), np.nan if wrong else 0.0)
        return m, -1, top, rule, vec.widen(level)
    shift(tops, groups, top)
    level = rough_level(tops, groups, True, rule, level)
    count = filter_candidates(x, start, n, top, reach_of(rule, level), tops, groups, index)
    m = gather_candidates(x, start, top, index, count, z) if count >= 0 else load_row(x, start, n, top, z)
    return m, count, top, rule, _finish(z, m, True, rule, norm, level, w)


@strict_helper
def _finish(z: Any, m: int, across: bool, rule: Any, norm: bool, level: Any, w: Any) -> Any:
    if len(rule) == 3:
        level = approach(z, m, across, rule, level)
    level, fine, _, slope = solve(z, m, across, rule, not norm, level, vec.precision(z), w)
    if norm:
        _rescale(w, m, vec.narrow(1.0 / vec.select(slope > 0.0, slope, 1.0), level))
    return vec.widen(fine) + offset_of(rule, level)


@strict_helper
def _rescale(w: Any, m: int, factor: Any) -> None:
    lanes = vec.lanes(w)
    for i in range(0, m * lanes, lanes):
        vec.store(w, i, vec.load(w, i) * factor)


@strict
def argmax_of_narrow(
    first: int, last: int, source: int, target: int, size: int, n: int, norm: int, powers: Any, like: Any
) -> None:
    """α-entmax of each row, or α-normmax if ``norm``, of rows up to NARROW_WIDTH.

    Scores and results are at addresses: see ``stores.matrix``.
    """
    powers, like = borrowed(powers), borrowed(like)
    x, out = matrix(source, size, n, like), matrix(target, size, n, like)
    room = batch_room(n, x)
    for row in range(first, last, vec.lanes(x)):
        rows = min(vec.lanes(x), last - row)
        _, _, _, rule, _ = solve_batch(x, row, rows, powers, norm != 0, room)
        store_batch(x, row, rows, rule, norm != 0, room, out)
    release(room[0])
    finish_streams()


@unrolled
def argmax_of_wide(
    first: int, last: int, source: int, target: int, size: int, n: int, norm: int, powers: Any, like: Any
) -> None:
    """As ``argmax_of_narrow`` for wider rows."""
    powers, like = borrowed(powers), borrowed(like)
    x, out = matrix(source, size, n, like).reshape(-1), matrix(target, size, n, like).reshape(-1)
    room, index = workspace(n, x)
    for row in range(first, last):
        _, count, _, _, _ = solve_row(x, row * n, n, powers, row, norm != 0, room, index)
        _store(room[1], count, index, out, row * n, n)
    release_workspace(room, index)
    finish_streams()


@strict_helper
def _store(w: Any, count: int, index: Any, out: Any, start: int, n: int) -> None:
    if count >= 0:
        store_candidates(w, count, index, out, start, n)
    else:
        store_row(w, out, start, n)


@strict
def loss_of_narrow(
    first: int,
    last: int,
    source: int,
    losses: int,
    slopes: int,
    size: int,
    n: int,
    norm: int,
    powers: Any,
    target: Any,
    rate: Any,
) -> None:
    """The loss max_Ω(x) − x at a target and, if there is room for it, rate·(p − y); a target < 0 is left out.

    Scores, losses and gradients (or 0) are at addresses: see ``stores.matrix``. The array ``rate`` has one number.
    """
    powers, target, rate = borrowed(powers), borrowed(target), borrowed(rate)
    x, loss, residual = _loss_arrays(source, losses, slopes, size, n, rate)
    lanes = vec.lanes(x)
    room = batch_room(n, x)
    z, w = room[:2]
    for row in range(first, last, lanes):
        rows = min(lanes, last - row)
        m, top, bad, rule, offset = solve_batch(x, row, rows, powers, norm != 0, room)
        value = offset if norm else _maximum(rule, offset, _along(w, z, m))
        value = vec.narrow(vec.maximum(value, 0.0), top)
        _finish_losses(row, rows, x, vec.select(bad, np.nan, value), top, target, loss, room)
        if residual.size > 0:
            store_residuals(x, row, rows, rule, norm != 0, room, rate[0], residual)
    release(room[0])
    finish_streams()


@strict_helper
def _loss_arrays(source: int, losses: int, slopes: int, size: int, n: int, like: Any) -> Any:
    """Scores, losses, and gradients, an empty array if these are not asked for."""
    loss = matrix(losses, size // n, 1, like).reshape(-1)
    return matrix(source, size, n, like), loss, matrix(slopes, size if slopes != 0 else 0, n, like)


@unrolled
def loss_of_wide(
    first: int,
    last: int,
    source: int,
    losses: int,
    slopes: int,
    size: int,
    n: int,
    norm: int,
    powers: Any,
    target: Any,
    rate: Any,
) -> None:
    """As ``loss_of_narrow`` for wider rows."""
    powers, target, rate = borrowed(powers), borrowed(target), borrowed(rate)
    x, loss, residual = _loss_arrays(source, losses, slopes, size, n, rate)
    scores, out = x.reshape(-1), residual.reshape(-1)
    room, index = workspace(n, x)
    w = room[1]
    for row in range(first, last):
        m, count, top, rule, offset = solve_row(scores, row * n, n, powers, row, norm != 0, room, index)
        number = vec.first_lane(offset) if norm else value_of_row(m, rule, offset, room)[0]
        label = finish_loss(row, x, max(number, 0.0), vec.first_lane(top), w[0], target, loss)
        if residual.size > 0:
            _store_residual(w, count, index, target[row], label, rate[0], out, row * n, n)
    release_workspace(room, index)
    finish_streams()


@strict_helper
def value_of_row(m: int, rule: Any, offset: Any, room: Any) -> Any:
    """max_Ω of entmax less the largest score, and ⟨p, z⟩, of a row that ``solve_row`` left in the workspace."""
    along = vec.sum_everywhere(_along(room[1], room[0], m))
    return vec.first_lane(_maximum(rule, offset, along)), vec.first_lane(along)


@strict_helper
def _maximum(rule: Any, offset: Any, along: Any) -> Any:
    """max_Ω of entmax less the largest score: ⟨p, z⟩ − Ω(p) where p^c = 1 + c(z − A) on the support."""
    c = scale_of(rule, offset)
    return (c * along + offset) / (c + 1.0)


@strict_helper
def _along(w: Any, z: Any, m: int) -> Any:
    """Σ w·z over the support, lane by lane."""
    lanes = vec.lanes(z)
    zero = vec.splat(z.dtype.type(0))
    total = vec.widen(zero)
    for start in range(0, m * lanes, GROUP * lanes):
        t = zero
        for j in range(GROUP):
            p = vec.load(w, start + j * lanes)
            t += p * vec.select(p > 0.0, vec.load(z, start + j * lanes), zero)
        total += vec.widen(t)
    return total


@strict_helper
def _finish_losses(row: int, rows: int, x: Any, value: Any, top: Any, target: Any, loss: Any, room: Any) -> None:
    """``finish_loss`` of one row per lane; their values are NaN where p is. The classes are left in the room."""
    lanes = vec.lanes(x)
    scores, labels = room[2], room[5]
    usual = rows == lanes
    for r in range(rows):
        label = target[row + r]
        usual = usual and label >= 0
        scores[r], labels[r] = x[row + r, max(label, 0)], label
    score = vec.load(scores, 0)
    if usual and not vec.any_lane(score == -np.inf):
        lead = vec.maximum(vec.widen(top) - vec.widen(score), 0.0)
        vec.store(loss, row, vec.narrow(vec.widen(value) + lead, value))
        return
    vec.store(scores, 0, value)
    vec.store(scores, lanes, top)
    for r in range(rows):
        some = finish_loss(row + r, x, scores[r], scores[lanes + r], scores[r], target, loss)
        labels[r] = some if target[row + r] >= 0 else LEFT_OUT


@strict_helper
def finish_loss(row: int, x: Any, value: Any, top: Any, some: Any, target: Any, loss: Any) -> int:
    """The loss of one row, whose target may be left out (negative) or impossible (a score of −inf).

    Returns:
        the class, −1 if there is none.
    """
    kind = x.dtype.type
    label = target[row]
    score = x[row, max(label, 0)]
    if label < 0:
        loss[row] = kind(0)
        return -1
    if some != some:
        loss[row] = kind(np.nan)
    elif score == -np.inf:
        loss[row] = kind(np.inf)
    else:
        loss[row] = kind(value + max(np.float64(top) - np.float64(score), 0.0))
    return label if score > -np.inf else -1


@strict_helper
def _store_residual(
    w: Any, count: int, index: Any, target: int, label: int, rate: Any, out: Any, start: int, n: int
) -> None:
    """rate·(p − y) of one row whose p is in w: 0 if its target is left out (negative), y = 0 if the label is −1."""
    if target < 0:
        fill(out, start, n, 0.0)
        return
    size, at = (n, label) if count < 0 else (count, -1)
    for k in range(count):
        at = k if index[k] == label else at
    if at >= 0:
        w[at] -= w.dtype.type(1)
    _rescale(w, (size + vec.lanes(w) - 1) // vec.lanes(w), vec.splat(rate))
    _store(w, count, index, out, start, n)
    if at < 0 and label >= 0:
        out[start + label] = -rate


@strict
def steep_argmax_of_narrow(
    first: int, last: int, source: int, target: int, size: int, n: int, norm: int, powers: Any, like: Any
) -> None:
    """As ``argmax_of_narrow`` for entmax with one α > 2, ∞ included."""
    powers, like = borrowed(powers), borrowed(like)
    x, out = matrix(source, size, n, like), matrix(target, size, n, like)
    room = batch_room(n, x)
    for row in range(first, last, vec.lanes(x)):
        rows = min(vec.lanes(x), last - row)
        solve_steep_batch(x, row, rows, powers[0], room)
        store_steep_batch(x, row, rows, room, out)
    release(room[0])


@strict
def steep_argmax_of_wide(
    first: int, last: int, source: int, target: int, size: int, n: int, norm: int, powers: Any, like: Any
) -> None:
    """As ``argmax_of_wide`` for one α > 2, or one per row, of which those above 2 are taken; of rows of any width."""
    powers, like = borrowed(powers), borrowed(like)
    x, out = matrix(source, size, n, like).reshape(-1), matrix(target, size, n, like).reshape(-1)
    room, index = workspace(n, x)
    for row in range(first, last):
        c = power_at(powers, row)
        if c > 1.0:
            count, _, _ = steep_entmax(x, row * n, n, c, room, index)
            _store(room[1], count, index, out, row * n, n)
    release_workspace(room, index)
    finish_streams()


@strict
def steep_loss_of_narrow(
    first: int,
    last: int,
    source: int,
    losses: int,
    slopes: int,
    size: int,
    n: int,
    norm: int,
    powers: Any,
    target: Any,
    rate: Any,
) -> None:
    """As ``loss_of_narrow`` for entmax with one α > 2, ∞ included."""
    powers, target, rate = borrowed(powers), borrowed(target), borrowed(rate)
    x, loss, residual = _loss_arrays(source, losses, slopes, size, n, rate)
    lanes = vec.lanes(x)
    room = batch_room(n, x)
    for row in range(first, last, lanes):
        rows = min(lanes, last - row)
        top, bad, value = solve_steep_batch(x, row, rows, powers[0], room)
        number = vec.select(bad, np.nan, vec.narrow(value, top))
        _finish_losses(row, rows, x, number, top, target, loss, room)
        if residual.size > 0:
            store_steep_residuals(x, row, rows, room, rate[0], residual)
    release(room[0])


@strict
def steep_loss_of_wide(
    first: int,
    last: int,
    source: int,
    losses: int,
    slopes: int,
    size: int,
    n: int,
    norm: int,
    powers: Any,
    target: Any,
    rate: Any,
) -> None:
    """As ``loss_of_wide`` for one α > 2, or one per row, of which those above 2 are taken; of rows of any width."""
    powers, target, rate = borrowed(powers), borrowed(target), borrowed(rate)
    x, loss, residual = _loss_arrays(source, losses, slopes, size, n, rate)
    scores, out = x.reshape(-1), residual.reshape(-1)
    room, index = workspace(n, x)
    for row in range(first, last):
        c = power_at(powers, row)
        if c > 1.0:
            count, top, value = steep_entmax(scores, row * n, n, c, room, index)
            label = finish_loss(row, x, value, top, value, target, loss)
            if residual.size > 0:
                _store_residual(room[1], count, index, target[row], label, rate[0], out, row * n, n)
    release_workspace(room, index)
    finish_streams()
