"""An output layer and its entmax loss for a block of tokens, and the gradients from supports.

A row of logits is read once. The support of rate·(p − y) is then written over it: values from the front of the row,
their classes from the back. A row with a large support holds all of rate·(p − y) instead. Gradients are computed from
the supports of many tokens at once, sorted by class, so that each row of the weight and of its gradient is read once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel.kernels.cpu.compiler import inlined, kernel
from fenchel.kernels.cpu.maps.exponents import exponent
from fenchel.kernels.cpu.maps.selection import BAD, buffers, is_narrow, weigh
from fenchel.kernels.cpu.maps.simplex import parameter
from fenchel.kernels.cpu.maps.streamed import attained, candidates, settle
from fenchel.kernels.cpu.threads import over_rows

_TILE = 32  # classes that are transposed together
_STRIP = 64  # columns of the hidden states that one thread adds to

Lists = tuple[Tensor, Tensor, Tensor]


def linear_class_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    alpha: float,
    *,
    rates: Tensor | None,
    most: float,
    workspace: Tensor,
    transposed: Tensor,
) -> tuple[Tensor, Lists | None]:
    """The entmax losses of tokens and the supports of their gradients: see the table of kernels."""
    tokens, classes = len(hidden), len(weight)
    x = workspace[:tokens]
    _logits(hidden, weight, bias, x, transposed)
    array, losses, counts = x.numpy(), hidden.new_empty(tokens), np.empty(tokens, np.int64)
    slots, rate = array.view(np.int32), np.empty(0, array.dtype) if rates is None else rates.numpy()
    arguments = parameter(alpha - 1, array), index.numpy(), rate, losses.numpy(), counts
    over_rows(_residuals, tokens, x.numel(), array, slots, *arguments)
    if rates is None:
        return losses, None
    if counts.sum() > most or counts.max(initial=0) == classes:
        over_rows(_fill_rows, tokens, x.numel(), array, slots, counts)
        return losses, None
    starts = np.zeros(tokens + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    values, found = np.empty(starts[-1], array.dtype), np.empty(starts[-1], np.int32)
    over_rows(_copy_supports, tokens, values.size, array, slots, starts, values, found)
    return losses, (torch.from_numpy(starts), torch.from_numpy(found), torch.from_numpy(values))


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
    bounds, tokens, ordered = np.empty(len(weight) + 2, np.int64), np.empty_like(classes), np.empty_like(values)
    _sort_by_class(starts, classes, values, bounds, tokens, ordered)
    bounds, work = bounds[:-1], values.size * hidden.shape[1]
    if to_hidden is not None:
        strips = -(-hidden.shape[1] // _STRIP)
        over_rows(_to_hidden, strips, work, bounds, tokens, ordered, weight.numpy(), to_hidden.numpy())
    if to_weight is not None:
        over_rows(_to_weight, len(weight), work, bounds, tokens, ordered, hidden.numpy(), to_weight.numpy())
    if to_bias is not None:
        over_rows(_to_bias, len(weight), values.size, bounds, ordered, to_bias.numpy())


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, block: Tensor) -> None:
    """hidden @ weight.T + bias, (tokens, classes). Computed with the classes first: faster for few tokens."""
    tokens, classes = out.shape
    rows, columns, block = out.numpy(), len(block), block.view(-1)
    for first in range(0, classes, columns):
        part = slice(first, min(first + columns, classes))
        transposed = block[: (part.stop - first) * tokens].view(-1, tokens)
        if bias is None:
            torch.mm(weight[part], hidden.t(), out=transposed)
        else:
            torch.addmm(bias[part].unsqueeze(1), weight[part], hidden.t(), out=transposed)
        _transpose(transposed.numpy(), first, rows)


@kernel
def _transpose(block: Any, first: int, rows: Any) -> None:
    """Copy logits (some classes, tokens) to columns of rows (tokens, classes). One thread: more would be slower."""
    classes, tokens = block.shape
    for start in range(0, classes, _TILE):
        stop = min(start + _TILE, classes)
        for t in range(tokens):
            for j in range(start, stop):
                rows[t, first + j] = block[j, t]


@kernel
def _residuals(
    first: int, last: int, x: Any, slots: Any, powers: Any, target: Any, rate: Any, loss: Any, count: Any
) -> None:
    """The losses of rows; if there are rates, the support of rate·(p − y), or all of it, is written over each row.

    ``slots`` are the same rows as integers; ``count`` is the number of entries of a row, all if it was not packed.
    """
    kind = x.dtype.type
    one = kind(1)
    n = x.shape[1]
    maxima, z, p, index = buffers(n, x)
    nothing = np.empty((0, n), x.dtype)
    c, _, power = exponent(powers, 0, x)
    narrow = is_narrow(n, power)
    for row in range(first, last):
        label = target[row]
        k, largest = 0, kind(0)
        if label >= 0:
            k, largest = candidates(x[row], c, power, maxima, p, z, index)
        value = 0.0
        if k > 0:
            value = attained(z, p, k, np.float64(c), weigh(z, k, c, power, True, p))
        whole = narrow or k == BAD or 2 * (k + 1) > n
        residual = x if whole and rate.size > 0 else nothing
        settle(row, k, largest, value, x, p, index, one, narrow, target, loss, residual)
        if rate.size > 0:
            factor = rate[row] if label >= 0 else kind(0)
            if whole:
                count[row] = n
                if label >= 0:
                    for i in range(n):
                        x[row, i] *= factor
            else:
                hit = label if label >= 0 and x[row, max(label, 0)] != -np.inf else -1
                count[row] = _pack(x[row], slots[row], k, p, index, hit, factor)


@inlined
def _pack(x: Any, slots: Any, k: int, p: Any, index: Any, label: int, factor: Any) -> int:
    """Write the support of factor·(p − y) over a row; return its number of entries."""
    kind = x.dtype.type
    last = slots.size - 1
    size = 0
    away = kind(-1) if label >= 0 else kind(0)  # −y at the label, until an entry includes it
    for i in range(k):
        if p[i] > 0:
            value = p[i]
            if index[i] == label:
                value += away
                away = kind(0)
            x[size] = value * factor
            slots[last - size] = index[i]
            size += 1
    if away != 0:
        x[size] = away * factor
        slots[last - size] = label
        size += 1
    return size


@kernel
def _fill_rows(first: int, last: int, x: Any, slots: Any, count: Any) -> None:
    """Replace packed supports by rows with all their entries."""
    n = x.shape[1]
    end = slots.shape[1] - 1
    values, index = np.empty(n, x.dtype), np.empty(n, np.int32)
    for row in range(first, last):
        size = count[row]
        if size < n:
            for i in range(size):
                values[i] = x[row, i]
                index[i] = slots[row, end - i]
            x[row, :] = 0
            for i in range(size):
                x[row, index[i]] = values[i]


@kernel
def _copy_supports(first: int, last: int, x: Any, slots: Any, ends: Any, values: Any, classes: Any) -> None:
    """Copy the packed supports of rows to one list of values and classes."""
    end = slots.shape[1] - 1
    for row in range(first, last):
        place = ends[row]
        for i in range(ends[row + 1] - place):
            values[place + i] = x[row, i]
            classes[place + i] = slots[row, end - i]


@kernel
def _sort_by_class(ends: Any, classes: Any, values: Any, bounds: Any, tokens: Any, sorted_values: Any) -> None:
    """Sort entries by class, then by token; class j owns the entries from bounds[j] to bounds[j + 1]."""
    bounds[:] = 0
    for i in range(ends[-1]):
        bounds[classes[i] + 2] += 1
    for j in range(2, bounds.size):
        bounds[j] += bounds[j - 1]
    for row in range(ends.size - 1):
        for i in range(ends[row], ends[row + 1]):
            place = bounds[classes[i] + 1]
            bounds[classes[i] + 1] += 1
            tokens[place] = row
            sorted_values[place] = values[i]


@kernel
def _to_weight(first: int, last: int, bounds: Any, tokens: Any, values: Any, hidden: Any, to: Any) -> None:
    """Add value·hidden[token] to the rows of some classes."""
    for j in range(first, last):
        target = to[j]
        for i in range(bounds[j], bounds[j + 1]):
            v, source = values[i], hidden[tokens[i]]
            for d in range(target.size):
                target[d] += v * source[d]


@kernel
def _to_hidden(first: int, last: int, bounds: Any, tokens: Any, values: Any, weight: Any, to: Any) -> None:
    """Add value·weight[class] to some strips of columns of every token; each row of the weight is read once."""
    begin, end = first * _STRIP, min(last * _STRIP, to.shape[1])
    for j in range(bounds.size - 1):
        source = weight[j, begin:end]
        for i in range(bounds[j], bounds[j + 1]):
            v, target = values[i], to[tokens[i], begin:end]
            for d in range(target.size):
                target[d] += v * source[d]


@kernel
def _to_bias(first: int, last: int, bounds: Any, values: Any, to: Any) -> None:
    """Add the values of some classes to their entries."""
    for j in range(first, last):
        for i in range(bounds[j], bounds[j + 1]):
            to[j] += values[i]
