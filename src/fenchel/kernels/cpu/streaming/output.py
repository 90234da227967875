"""An output layer and its entmax loss for a block of tokens, and the gradients from supports.

A row of logits is read once. The support of rate·(p − y) is then written over it; see ``lists``. Gradients are computed
from the supports of many tokens at once, sorted by class, so that each row of the weight and of its gradient is read
once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import strict, strict_helper
from fenchel.kernels.cpu.maps.blocks import release_workspace, workspace
from fenchel.kernels.cpu.maps.parameters import scale_of
from fenchel.kernels.cpu.maps.places import count_nonzero
from fenchel.kernels.cpu.maps.products import dot_on_support, sensitivities
from fenchel.kernels.cpu.maps.rows import finish_loss, solve_row, value_of_row
from fenchel.kernels.cpu.maps.simplex import parameters
from fenchel.kernels.cpu.memory import borrowed
from fenchel.kernels.cpu.streaming.lists import (
    STRIP,
    as_integers,
    combine,
    copy_lists,
    scatter,
    sort_by_place,
    unpack_rows,
    write_row,
)
from fenchel.kernels.cpu.threads import over_rows

Lists = tuple[Tensor, Tensor, Tensor]

_EVERY = np.zeros(1, np.int64)  # places that nothing is added to


def linear_class_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    alpha: float,
    *,
    rates: Tensor | None,
    learns: bool,
    most: float,
    workspace: Tensor,
    columns: int,
) -> tuple[Tensor, Lists | None, Tensor | None]:
    """The entmax losses of tokens, the supports of their gradients and their slopes: see the table of kernels."""
    tokens = len(hidden)
    x = workspace[:tokens]
    for first in range(0, len(weight), columns):
        part = slice(first, first + columns)
        if bias is None:
            torch.mm(hidden, weight[part].t(), out=x[:, part])
        else:
            torch.addmm(bias[part], hidden, weight[part].t(), out=x[:, part])
    array, losses, slopes = x.numpy(), hidden.new_empty(tokens), hidden.new_empty(tokens if learns else 0)
    counts, packed = np.empty(tokens, np.int64), np.zeros(tokens, np.bool_)
    rate = np.empty(0, array.dtype) if rates is None else rates.numpy()
    results = losses.numpy(), slopes.numpy(), counts, packed
    powers, slots = parameters(alpha - 1, False), as_integers(array)
    over_rows(class_losses, tokens, x.numel(), array, slots, powers, index.numpy(), rate, *results)
    slope = slopes if learns else None
    if rates is None:
        return losses, None, slope
    starts = np.zeros(tokens + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    if starts[-1] > most:
        over_rows(unpack_rows, tokens, x.numel(), array, slots, packed, counts)
        return losses, None, slope
    values, found = np.empty(starts[-1], array.dtype), np.empty(starts[-1], np.int32)
    over_rows(copy_lists, tokens, values.size, array, slots, packed, starts, values, found)
    return losses, (torch.from_numpy(starts), torch.from_numpy(found), torch.from_numpy(values)), slope


def linear_class_loss_backward(
    hidden: Tensor,
    weight: Tensor,
    supports: Lists,
    *,
    to_hidden: Tensor | None,
    to_weight: Tensor | None,
    to_bias: Tensor | None,
) -> None:
    """Add the gradients of tokens to those of many: see the table of kernels."""
    starts, classes, values = map(Tensor.numpy, supports)
    bounds, tokens = np.empty(len(weight) + 2, np.int64), np.empty_like(classes)
    order = np.empty(classes.size, np.int64)
    sort_by_place(starts, classes, _EVERY, bounds, tokens, order)
    bounds, values, work = bounds[:-1], values[order], values.size * hidden.shape[1]
    if to_hidden is not None:
        strips = -(-hidden.shape[1] // STRIP)
        over_rows(scatter, strips, work, bounds, tokens, values, weight.numpy(), to_hidden.numpy())
    if to_weight is not None:
        lists = bounds, values, tokens, _EVERY
        over_rows(combine, len(weight), work, *lists, hidden.numpy(), 1, to_weight.numpy())
    if to_bias is not None:
        over_rows(add_sums, len(weight), values.size, bounds, values, to_bias.numpy())


@strict
def class_losses(
    first: int,
    last: int,
    x: Any,
    slots: Any,
    powers: Any,
    target: Any,
    rates: Any,
    losses: Any,
    slopes: Any,
    counts: Any,
    packed: Any,
) -> None:
    """The losses of rows and, if there is room for them, their slopes in alpha; with rates, rate·(p − y) of each row.

    ``counts`` is how many entries of a row are not zero, ``packed`` whether it holds these alone.
    """
    x, slots, powers, target, losses = (
        borrowed(x),
        borrowed(slots),
        borrowed(powers),
        borrowed(target),
        borrowed(losses),
    )
    n = x.shape[1]
    room, index = workspace(n, x)
    w = room[1]
    for row in range(first, last):
        label = target[row]
        if label < 0:  # left out
            losses[row], counts[row], packed[row] = 0, 0, True
            if slopes.size > 0:
                slopes[row] = 0
            continue
        m, count, top, rule, offset = solve_row(x.reshape(-1), row * n, n, powers, row, False, room, index)
        value, along = value_of_row(m, rule, offset, room)
        finish_loss(row, x, max(value, 0.0), vec.first_lane(top), w[0], target, losses)
        if rates.size > 0:
            label = label if x[row, label] > -np.inf else -1
            count, packed[row] = write_row(w, count, index, n, x, slots, row)
            counts[row] = _subtract_target(x, slots, row, count, packed[row], label, rates[row])
        if slopes.size > 0:
            slopes[row] = _alpha_slope(m, vec.first_lane(scale_of(rule, offset)), along - value, room)
    release_workspace(room, index)


@strict_helper
def _alpha_slope(m: int, c: float, omega: float, room: Any) -> Any:
    """−∂Ω(p)/∂α = (Ω(p) − Σ p·∂ln_c(p)/∂c)/α, of weights in the workspace; the scores there are overwritten."""
    z, w, _, _ = room
    size = m * vec.lanes(z)
    sensitivities(w, 0, size, c, z)
    return (omega - dot_on_support(w, 0, size, w, z)) / (1.0 + c)


@strict_helper
def _subtract_target(x: Any, slots: Any, row: int, count: int, packed: bool, label: int, rate: Any) -> Any:
    """rate·(p − y) in place of p; returns how many entries are not zero."""
    n, last = x.shape[1], slots.shape[1] - 1
    if not packed:
        if label >= 0:
            x[row, label] -= 1
        for i in range(row * n, row * n + n, vec.lanes(x)):
            size = min(vec.lanes(x), row * n + n - i)
            vec.store_part(x, i, vec.load_part(x, i, size, 0.0) * rate, size)
        return count_nonzero(x, row * n, n)
    at = count if label >= 0 else -1
    for k in range(count):
        at = k if slots[row, last - k] == label else at
    if at == count:
        x[row, count], slots[row, last - count] = 0, label
        count += 1
    if at >= 0:
        x[row, at] -= 1
    for k in range(count):
        x[row, k] *= rate
    return count


@strict
def add_sums(first: int, last: int, bounds: Any, values: Any, to: Any) -> None:
    """Add the values of some classes to their entries."""
    for j in range(first, last):
        for i in range(bounds[j], bounds[j + 1]):
            to[j] += values[i]
