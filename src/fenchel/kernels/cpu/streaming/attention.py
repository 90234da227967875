"""Attention by supports: scores of some queries, their sparse weights as lists, and products over the lists alone.

A block is a matrix of scores, one row per query. ``select`` writes the support of each row to its front, and ``pack``
copies the supports of all rows to lists; row r owns the entries from ``starts[r]`` to ``starts[r + 1]``. Keys and
values of all heads are one matrix, in which ``heads[r]`` is the first row of the head that row r belongs to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel.kernels.cpu.compiler import inlined, kernel
from fenchel.kernels.cpu.maps.exponents import exponent
from fenchel.kernels.cpu.maps.selection import buffers, is_narrow, shift, sift, weigh
from fenchel.kernels.cpu.maps.simplex import as_rows, parameter
from fenchel.kernels.cpu.maps.streamed import sensitivity
from fenchel.kernels.cpu.streaming.products import scores
from fenchel.kernels.cpu.threads import over_rows

PART = 32
"""How many columns of a gradient one thread takes at a time."""


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """entmax(query keyᵀ) value of a block by its supports: see the table of kernels."""
    (heads, rows, _), count = query.shape, query.shape[0] * query.shape[1]
    keys = key.shape[1] if key_counts is None else int(key_counts.max())
    x = scores(query, key[:, :keys], mask, workspace).view(count, keys).numpy()
    places = workspace[count * keys :].view(torch.int32)[: count * keys].view(count, keys).numpy()
    limits = np.array([keys]) if key_counts is None else np.tile(key_counts.numpy(), heads)
    counts = np.empty(count, np.int64)
    over_rows(select, count, x.size, x, parameter(alpha - 1, x), limits, places, counts)
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    if counts.min(initial=0) < 0 or starts[-1] > most:
        return None
    weights, indices = query.new_empty(int(starts[-1])), torch.empty(int(starts[-1]), dtype=torch.int32, device="cpu")
    over_rows(pack, count, weights.numel(), x, places, starts, weights.numpy(), indices.numpy())
    factors = torch.nn.functional.dropout(torch.ones_like(weights), dropout) if dropout else weights[:0]
    used = weights * factors if dropout else weights
    output = value.new_empty(heads, rows, value.shape[-1])
    work = max(weights.numel() * value.shape[-1], output.numel())
    listed = starts, used.numpy(), indices.numpy(), _first_keys(query, key)
    over_rows(combine, count, work, *listed, as_rows(value), as_rows(output))
    return output, torch.from_numpy(starts), indices, weights, factors


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor,
    *,
    supports: tuple[Tensor, Tensor, Tensor, Tensor],
    to_weights: Tensor | None,
    to_key: Tensor | None,
    to_value: Tensor | None,
    learns: bool,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of a block from its supports: see the table of kernels."""
    starts, indices, weights, factors = map(Tensor.numpy, supports)
    g, q = as_rows(grad), as_rows(query)
    slopes, queries = np.empty_like(weights), torch.empty_like(query, memory_format=torch.contiguous_format)
    alphas = query.new_empty(query.shape[:2] if learns else 0)
    direct = slopes[:0] if to_weights is None else to_weights.contiguous().numpy()
    first_keys = _first_keys(query, key)
    over_rows(
        pull_back,
        len(q),
        weights.size * (g.shape[1] + q.shape[1]) + q.size,
        starts,
        weights,
        indices,
        factors,
        direct,
        first_keys,
        parameter(alpha - 1, q),
        g,
        as_rows(key),
        as_rows(value),
        slopes,
        as_rows(queries),
        alphas.numpy().reshape(-1),
    )
    heads, rows, _ = query.shape
    used = weights * factors if factors.size else weights
    for entries, table, to in ((slopes, q, to_key), (used, g, to_value)):
        if to is not None:
            parts = -(-table.shape[1] // PART)
            work = weights.size * table.shape[1] + 1
            bounds = np.arange(heads + 1) * rows
            listed = np.array([parts]), bounds, starts, entries, indices, first_keys
            over_rows(scatter, parts * heads, work, *listed, table, as_rows(to))
    return queries, alphas if learns else None


def _first_keys(query: Tensor, key: Tensor) -> Any:
    """The first key of each row's head, in the matrix of the keys of all heads."""
    return np.repeat(np.arange(query.shape[0]) * key.shape[1], query.shape[1])


@kernel
def select(first: int, last: int, x: Any, powers: Any, limits: Any, index: Any, counts: Any) -> None:
    """entmax of the first ``limits`` scores of each row; weights and keys of the support are written to its front."""
    kind = x.dtype.type
    zero = kind(0)
    maxima, z, p, places = buffers(x.shape[1], x)
    for row in range(first, last):
        c, _, power = exponent(powers, row, x)
        n = limits[row if limits.size > 1 else 0]
        scores, weights, found = x[row, :n], x[row], index[row]
        if n == 0:
            counts[row] = 0
            continue
        narrow = is_narrow(n, power)
        if narrow:
            k, _ = shift(scores, z)
        else:
            k, _ = sift(scores, c, power, maxima, p, z, places)
        if k <= 0:
            counts[row] = k
            continue
        weigh(z, k, c, power, True, p)
        count = 0
        for i in range(k):
            w = p[i]
            weights[count] = w
            found[count] = i if narrow else places[i]
            count += 1 if w > zero else 0
        counts[row] = count


@kernel
def pack(first: int, last: int, x: Any, index: Any, starts: Any, weights: Any, indices: Any) -> None:
    """Copy the supports at the fronts of the rows to lists."""
    for row in range(first, last):
        start = starts[row]
        for i in range(starts[row + 1] - start):
            weights[start + i] = x[row, i]
            indices[start + i] = index[row, i]


@inlined
def _combine(weights: Any, indices: Any, start: int, stop: int, head: int, table: Any, out: Any) -> None:
    """out = Σ weight · table[index] over one row's list, four at a time."""
    width = out.size
    out[:] = out.dtype.type(0)
    i = start
    while i + 4 <= stop:
        a, b, c, d = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        ta, tb = table[head + indices[i]], table[head + indices[i + 1]]
        tc, td = table[head + indices[i + 2]], table[head + indices[i + 3]]
        for j in range(width):
            out[j] += (a * ta[j] + b * tb[j]) + (c * tc[j] + d * td[j])
        i += 4
    while i < stop:
        a, ta = weights[i], table[head + indices[i]]
        for j in range(width):
            out[j] += a * ta[j]
        i += 1


@kernel
def combine(first: int, last: int, starts: Any, weights: Any, indices: Any, heads: Any, table: Any, out: Any) -> None:
    """The rows Σ weight · table[index]."""
    for row in range(first, last):
        _combine(weights, indices, starts[row], starts[row + 1], heads[row], table, out[row])


@kernel
def pull_back(
    first: int,
    last: int,
    starts: Any,
    weights: Any,
    indices: Any,
    kept: Any,
    direct: Any,
    heads: Any,
    powers: Any,
    grad: Any,
    keys: Any,
    values: Any,
    slopes: Any,
    queries: Any,
    alphas: Any,
) -> None:
    """From gradients of the output and of the weights (``direct``) to those of scores (``slopes``), queries and alpha.

    dS = s(dP − ⟨s, dP⟩/‖s‖₁) with s = p^(1−c), and dα = −⟨∂ln_c(p)/∂c, dS⟩, for J is symmetric.
    """
    kind = weights.dtype.type
    one = kind(1)
    width = grad.shape[1]
    for row in range(first, last):
        c, _, _ = exponent(powers, row, weights)
        start, stop, head = starts[row], starts[row + 1], heads[row]
        g = grad[row]
        mass, along = 0.0, 0.0
        for i in range(start, stop):
            v = values[head + indices[i]]
            dot = kind(0)
            for j in range(width):
                dot += g[j] * v[j]
            if kept.size > 0:
                dot *= kept[i]
            if direct.size > 0:
                dot += direct[i]
            p = weights[i]
            s = one if c == one else (np.sqrt(p) if c == kind(0.5) else p ** (one - c))
            slopes[i] = dot
            mass += s
            along += s * dot
        mean = kind(along / mass) if mass > 0.0 else kind(0)
        for i in range(start, stop):
            p = weights[i]
            s = one if c == one else (np.sqrt(p) if c == kind(0.5) else p ** (one - c))
            slopes[i] = s * (slopes[i] - mean)
        _combine(slopes, indices, start, stop, head, keys, queries[row])
        if alphas.size > 0:
            total = 0.0
            for i in range(start, stop):
                total -= sensitivity(np.float64(weights[i]), np.float64(c)) * slopes[i]
            alphas[row] = kind(total)


@kernel
def scatter(
    first: int,
    last: int,
    parts: Any,
    bounds: Any,
    starts: Any,
    weights: Any,
    indices: Any,
    heads: Any,
    table: Any,
    out: Any,
) -> None:
    """out[index] += weight · table[row]: the transpose of ``combine``, by parts of PART columns of one head's rows.

    Each part of each head adds the rows ``bounds[h]`` to ``bounds[h + 1]`` in order, so that sums do not depend on the
    number of threads.
    """
    width = table.shape[1]
    for unit in range(first, last):
        block, part = unit // parts[0], unit % parts[0]
        left = part * PART
        right = min(left + PART, width)
        for row in range(bounds[block], bounds[block + 1]):
            source = table[row, left:right]
            head = heads[row]
            for i in range(starts[row], starts[row + 1]):
                a = weights[i]
                target = out[head + indices[i], left:right]
                if right - left == PART:  # a length that the compiler knows
                    for j in range(PART):
                        target[j] += a * source[j]
                else:
                    for j in range(right - left):
                        target[j] += a * source[j]
