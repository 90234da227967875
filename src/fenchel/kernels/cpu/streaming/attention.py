"""Attention by supports: scores of some queries, their sparse weights as lists, and products over the lists alone.

A block is a matrix of scores, one row per query. ``find_supports`` writes the weights of each row over its scores; see
``lists``. Keys and values of all heads are one matrix, in which ``firsts[r]`` is the first row of the head that row r
belongs to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba.extending import overload
from torch import Tensor

from fenchel.kernels.cpu.compiler import INLINED, strict
from fenchel.kernels.cpu.maps.blocks import release_workspace, workspace
from fenchel.kernels.cpu.maps.parameters import power_at
from fenchel.kernels.cpu.maps.products import (
    dot_on_support,
    product_of_row,
    product_room,
    release_product,
    sensitivities,
)
from fenchel.kernels.cpu.maps.rows import solve_row
from fenchel.kernels.cpu.maps.simplex import as_rows, parameters, parameters_of_rows
from fenchel.kernels.cpu.maps.steep import steep_entmax
from fenchel.kernels.cpu.memory import borrowed
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
    powers = parameters_of_rows(alpha - 1, count)
    over_rows(find_supports, count, x.size, x, as_integers(x), powers, limits, counts, packed, finite)
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
    powers, firsts = parameters_of_rows(alpha - 1, count), _first_keys(query, key)
    given, slopes = np.empty_like(weights), np.empty_like(weights)
    direct = weights[:0] if to_weights is None else to_weights.contiguous().numpy()
    work = weights.size * g.shape[1] + 1
    over_rows(dot_rows, count, work, starts, indices, firsts, g, as_rows(value), factors, direct, given)
    over_rows(score_gradients, count, weights.size, starts, weights, powers, given, slopes)
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


def _first_keys(query: Tensor, key: Tensor) -> Any:
    """The first key of each row's head, in the matrix of the keys of all heads."""
    return np.repeat(np.arange(query.shape[0]) * key.shape[1], query.shape[1])


@strict
def find_supports(
    first: int, last: int, x: Any, slots: Any, powers: Any, limits: Any, counts: Any, packed: Any, finite: Any
) -> None:
    """Write entmax of the first ``limits`` scores of each row over it.

    ``counts`` is how many weights are not zero, ``packed`` whether the row holds these alone; a row with NaN or +inf
    is not ``finite``.
    """
    x, slots, powers, limits = borrowed(x), borrowed(slots), borrowed(powers), borrowed(limits)
    room, index = workspace(x.shape[1], x)
    for row in range(first, last):
        n = limits[row if limits.size > 1 else 0]
        count, w, places, finite[row] = weights_of_row(x.reshape(-1), row * x.shape[1], n, powers, row, room, index)
        counts[row], packed[row] = write_row(w, count, places, n, x, slots, row)
    release_workspace(room, index)


def weights_of_row(x: Any, start: int, n: int, powers: Any, row: int, room: Any, index: Any) -> Any:
    """The number of candidates of a row, −1 if there are all, their weights and places, and whether all is finite."""
    raise NotImplementedError("for compiled code")


@overload(weights_of_row, strict=False, jit_options=INLINED)
def _weights_of_row(x: Any, start: Any, n: Any, powers: Any, row: Any, room: Any, index: Any) -> Any:
    return _flat_weights if powers.ndim == 1 else _any_weights


def _flat_weights(x: Any, start: int, n: int, powers: Any, row: int, room: Any, index: Any) -> Any:
    _, count, _, _, _ = solve_row(x, start, n, powers, row, False, room, index)
    w = room[1]
    return count, w, index, n == 0 or w[0] == w[0]


def _any_weights(x: Any, start: int, n: int, powers: Any, row: int, room: Any, index: Any) -> Any:
    w = room[1]
    if powers[row, 0] > 1.0:
        count, _, _ = steep_entmax(x, start, n, powers[row, 0], room, index)
    else:
        _, count, _, _, _ = solve_row(x, start, n, powers, row, False, room, index)
    return count, w, index, n == 0 or w[0] == w[0]


@strict
def score_gradients(first: int, last: int, starts: Any, weights: Any, powers: Any, given: Any, slopes: Any) -> None:
    """The gradients of the scores from those of the weights: the Jacobian product of every row's list."""
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
