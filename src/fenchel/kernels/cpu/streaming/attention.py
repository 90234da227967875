"""Attention by supports: scores of some queries, their sparse weights as lists, and products over the lists alone.

A block is a matrix of scores, one row per query. ``find_supports`` writes the weights of each row over its scores; see
``lists``. Keys and values of all heads are one matrix, in which ``firsts[r]`` is the first row of the head that row r
belongs to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import strict
from fenchel.kernels.cpu.maps.blocks import release_workspace, workspace
from fenchel.kernels.cpu.maps.parameters import is_steep, power_at
from fenchel.kernels.cpu.maps.products import (
    dot_on_support,
    product_of_row,
    product_room,
    release_product,
    sensitivities,
)
from fenchel.kernels.cpu.maps.rows import solve_row
from fenchel.kernels.cpu.maps.simplex import as_rows, parameters, parameters_of_rows
from fenchel.kernels.cpu.maps.steep import steep_entmax, steep_product
from fenchel.kernels.cpu.memory import allocate, borrowed, release
from fenchel.kernels.cpu.streaming.lists import (
    as_integers,
    combine,
    copy_lists,
    dot_rows,
    sort_by_place,
    unpack_rows,
    write_row,
)
from fenchel.kernels.cpu.streaming.products import scores
from fenchel.kernels.cpu.threads import over_rows

Lists = tuple[Tensor, Tensor, Tensor, Tensor]

_EVERY = np.zeros(1, np.int64)  # places that nothing is added to


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    *,
    mask: Tensor | None,
    key_counts: Tensor | None,
    dropout: float,
    most: float,
    workspace: Tensor,
) -> tuple[Tensor, Lists | None]:
    """entmax(query keyᵀ) value of a block, and its supports: see the table of kernels."""
    (heads, rows, _), count = query.shape, query.shape[0] * query.shape[1]
    keys = key.shape[1] if key_counts is None else int(key_counts.max())
    dense = scores(query, key[:, :keys], mask, workspace)
    x = dense.view(count, keys).numpy()
    limits = np.array([keys]) if key_counts is None else np.tile(key_counts.numpy(), heads)
    counts, packed, finite = np.empty(count, np.int64), np.empty(count, np.bool_), np.empty(count, np.bool_)
    powers = parameters_of_rows(alpha - 1)
    for kernel in _kernels(powers, find_supports, find_steep_supports):
        over_rows(kernel, count, x.size, x, as_integers(x), powers, limits, counts, packed, finite)
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    if starts[-1] > most or not finite.all():
        over_rows(unpack_rows, count, x.size, x, as_integers(x), packed, counts)
        return torch.bmm(dense, value[:, :keys]), None
    weights, indices = query.new_empty(int(starts[-1])), torch.empty(int(starts[-1]), dtype=torch.int32, device="cpu")
    lists = starts, weights.numpy(), indices.numpy()
    over_rows(copy_lists, count, weights.numel(), x, as_integers(x), packed, *lists)
    factors = torch.nn.functional.dropout(torch.ones_like(weights), dropout) if dropout else weights[:0]
    used = weights * factors if dropout else weights
    output = value.new_empty(heads, rows, value.shape[-1])
    work = max(weights.numel() * value.shape[-1], output.numel())
    lists = starts, used.numpy(), indices.numpy()
    over_rows(combine, count, work, *lists, _first_keys(query, key), as_rows(value), 0, as_rows(output))
    return output, (torch.from_numpy(starts), indices, weights, factors)


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    *,
    supports: Lists,
    to_weights: Tensor | None,
    to_key: Tensor | None,
    to_value: Tensor | None,
    learns: bool,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of a block from its supports: see the table of kernels."""
    starts, indices, weights, factors = map(Tensor.numpy, supports)
    g, q, count = as_rows(grad), as_rows(query), len(starts) - 1
    powers, firsts = parameters_of_rows(alpha - 1), _first_keys(query, key)
    given, slopes = np.empty_like(weights), np.empty_like(weights)
    direct = weights[:0] if to_weights is None else to_weights.contiguous().numpy()
    work = weights.size * g.shape[1] + 1
    over_rows(dot_rows, count, work, starts, indices, firsts, g, as_rows(value), factors, direct, given)
    for kernel in _kernels(powers, score_gradients, steep_score_gradients):
        over_rows(kernel, count, weights.size, starts, weights, powers, given, slopes)
    queries = torch.empty_like(query, memory_format=torch.contiguous_format)
    over_rows(combine, count, work, starts, slopes, indices, firsts, as_rows(key), 0, as_rows(queries))
    alphas = query.new_empty(query.shape[:2]) if learns else None
    if alphas is not None:
        own = parameters(alpha - 1, False)
        over_rows(alpha_gradients, count, work, starts, weights, own, slopes, given, alphas.numpy().reshape(-1))
    if to_key is not None or to_value is not None:
        bounds = np.empty(query.shape[0] * key.shape[1] + 2, np.int64)
        rows, order = np.empty_like(indices), np.empty(indices.size, np.int64)
        sort_by_place(starts, indices, firsts, bounds, rows, order)
        used = weights * factors if factors.size else weights
        for entries, table, to in ((slopes, q, to_key), (used, g, to_value)):
            if to is not None:
                lists = bounds[:-1], entries[order], rows
                over_rows(combine, bounds.size - 2, work, *lists, _EVERY, table, 1, as_rows(to))
    return queries, alphas


def _kernels(powers: Any, flat: Any, steep: Any) -> list[Any]:
    """The kernel for rows with c ≤ 1, that for those above, or both."""
    above = powers > 1.0 if powers.dtype == np.float64 else np.zeros(1, np.bool_)
    return [kernel for kernel, serves in ((flat, not above.all()), (steep, above.any())) if serves]


def _first_keys(query: Tensor, key: Tensor) -> Any:
    """The first key of each row's head, in the matrix of the keys of all heads."""
    return np.repeat(np.arange(query.shape[0]) * key.shape[1], query.shape[1])


@strict
def find_supports(
    first: int, last: int, x: Any, slots: Any, powers: Any, limits: Any, counts: Any, packed: Any, finite: Any
) -> None:
    """Write entmax of the first ``limits`` scores of each row over it, where c ≤ 1.

    ``counts`` is how many weights are not zero, ``packed`` whether the row holds these alone; a row with NaN or +inf
    is not ``finite``.
    """
    x, slots, powers, limits = borrowed(x), borrowed(slots), borrowed(powers), borrowed(limits)
    room, index = workspace(x.shape[1], x)
    for row in range(first, last):
        if is_steep(powers, row):
            continue
        n, w = limits[row if limits.size > 1 else 0], room[1]
        _, count, _, _, _ = solve_row(x.reshape(-1), row * x.shape[1], n, powers, row, False, room, index)
        finite[row] = n == 0 or w[0] == w[0]
        counts[row], packed[row] = write_row(w, count, index, n, x, slots, row)
    release_workspace(room, index)


@strict
def find_steep_supports(
    first: int, last: int, x: Any, slots: Any, powers: Any, limits: Any, counts: Any, packed: Any, finite: Any
) -> None:
    """As ``find_supports`` where c > 1, ∞ included."""
    x, slots, powers, limits = borrowed(x), borrowed(slots), borrowed(powers), borrowed(limits)
    room, index = workspace(x.shape[1], x)
    for row in range(first, last):
        c = power_at(powers, row)
        if c > 1.0:
            n, w = limits[row if limits.size > 1 else 0], room[1]
            count, _, _ = steep_entmax(x.reshape(-1), row * x.shape[1], n, c, room, index)
            finite[row] = n == 0 or w[0] == w[0]
            counts[row], packed[row] = write_row(w, count, index, n, x, slots, row)
    release_workspace(room, index)


@strict
def score_gradients(first: int, last: int, starts: Any, weights: Any, powers: Any, given: Any, slopes: Any) -> None:
    """The gradients of the scores from those of the weights, where c ≤ 1: the Jacobian product of every row's list."""
    starts, weights, powers = borrowed(starts), borrowed(weights), borrowed(powers)
    given, slopes = borrowed(given), borrowed(slopes)
    longest = 0
    for row in range(first, last):
        longest = max(longest, starts[row + 1] - starts[row])
    room = product_room(longest, weights)
    for row in range(first, last):
        start, end = starts[row], starts[row + 1]  # a part of its own: whole arrays may be written by aligned stores
        product_of_row(weights[start:end], 0, end - start, powers, row, given[start:end], slopes[start:end], room)
    release_product(room)


@strict
def steep_score_gradients(
    first: int, last: int, starts: Any, weights: Any, powers: Any, given: Any, slopes: Any
) -> None:
    """As ``score_gradients`` where c > 1, ∞ included."""
    starts, weights, powers = borrowed(starts), borrowed(weights), borrowed(powers)
    given, slopes = borrowed(given), borrowed(slopes)
    live = allocate(weights.size // vec.lanes(weights) + 1, np.int32)
    for row in range(first, last):
        start, end, c = starts[row], starts[row + 1], power_at(powers, row)
        if c > 1.0:
            steep_product(weights[start:end], 0, end - start, c, given[start:end], slopes[start:end], live)
    release(live)


@strict
def alpha_gradients(
    first: int, last: int, starts: Any, weights: Any, powers: Any, slopes: Any, room: Any, out: Any
) -> None:
    """The gradient of every row's alpha, −⟨∂ln_c(p)/∂c, dS⟩: the Jacobian is symmetric."""
    weights, slopes, room = borrowed(weights), borrowed(slopes), borrowed(room)
    for row in range(first, last):
        start, end, c = starts[row], starts[row + 1], power_at(powers, row)
        out[row] = 0
        if c < np.inf:
            sensitivities(weights, start, end - start, c, room[start:end])
            out[row] = -dot_on_support(weights[start:end], 0, end - start, slopes[start:end], room[start:end])
