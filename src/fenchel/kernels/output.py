"""An output layer and its entmax loss, chunk by chunk of tokens: the logits of one chunk are all that is ever held.

A row of logits is read once. What is left of it afterwards, the support of rate·(p − y), takes the place of the logits:
values from the front of the row, their classes from the back; a row with a large support holds its residual whole.
Supports wait in a ledger until it is full; then both gradients are made of many chunks at once, so that weight and
gradient pass through the caches as seldom as possible. A chunk with large supports goes through dense products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel.kernels.compiler import inlined, kernel
from fenchel.kernels.exponents import exponent
from fenchel.kernels.maps import parameter
from fenchel.kernels.pool import over_rows
from fenchel.kernels.rows import attained, candidates, settle
from fenchel.kernels.selection import BAD, buffers, is_narrow, weigh

DENSE = 0.15
"""From this share of the classes on, dense products of a chunk are faster than sparse ones."""

_CLASSES = 4096  # whose logits are made at a time, while they are in the cache
_TILE = 32  # classes that are turned together
_STRIP = 64  # columns of the hidden states that stay together
_LEDGER = 4  # the logits of a chunk are so many times the supports that may wait


@dataclass
class Gradients:
    """Where gradients are added up; None for those that nobody needs."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def linear_entmax_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    c: float,
    rates: Tensor | None,
    gradients: Gradients,
    chunk: int,
) -> Tensor:
    """The entmax losses of tokens for c = α − 1 in (0, 1], as far as the maps are compiled; an index < 0 is left out.

    With rates, one a token, the gradients of Σ rate·loss are added up in ``gradients``.
    """
    tokens, classes = len(hidden), len(weight)
    losses = hidden.new_empty(tokens)
    room = hidden.new_empty(chunk, classes)
    block = hidden.new_empty(min(_CLASSES, classes) * chunk)
    rate = hidden.new_empty(0) if rates is None else rates
    count = np.empty(chunk, np.int64)
    ledger = None if rates is None else _Ledger(hidden, weight, gradients, room)
    for first in range(0, tokens, chunk):
        part = slice(first, min(first + chunk, tokens))
        rows = part.stop - first
        x = room[:rows]
        _logits(hidden[part], weight, bias, x, block)
        array = x.numpy()
        slots, counts = array.view(np.int32), count[:rows]
        arguments = parameter(c, array), index[part].numpy(), rate[part].numpy(), losses[part].numpy(), counts
        over_rows(_residuals, rows, x.numel(), array, slots, *arguments)
        if ledger is None:
            continue
        if counts.sum() <= DENSE * x.numel() and counts.max() < classes:
            ledger.add(array, slots, counts)
        else:
            over_rows(_spread, rows, x.numel(), array, slots, counts)
            _dense(x, hidden[part], weight, gradients, part)
            ledger.skip(rows)
    if ledger is not None:
        ledger.settle()
    return losses


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, block: Tensor) -> None:
    """hidden @ weight.T + bias; classes first, then turned: with few tokens BLAS is faster that way."""
    tokens, classes = out.shape
    rows = out.numpy()
    for first in range(0, classes, _CLASSES):
        part = slice(first, min(first + _CLASSES, classes))
        turned = block[: (part.stop - first) * tokens].view(-1, tokens)
        if bias is None:
            torch.mm(weight[part], hidden.t(), out=turned)
        else:
            torch.addmm(bias[part].unsqueeze(1), weight[part], hidden.t(), out=turned)
        _turn(turned.numpy(), first, rows)


def _dense(residual: Tensor, hidden: Tensor, weight: Tensor, gradients: Gradients, part: slice) -> None:
    if gradients.hidden is not None:
        torch.mm(residual, weight, out=gradients.hidden[part])
    if gradients.weight is not None:
        gradients.weight.addmm_(residual.t(), hidden)
    if gradients.bias is not None:
        gradients.bias.add_(residual.sum(0))


class _Ledger:
    """Supports of tokens, in their order, until there are enough of them."""

    def __init__(self, hidden: Tensor, weight: Tensor, gradients: Gradients, room: Tensor) -> None:
        size = room.numel() // _LEDGER
        self.hidden, self.weight, self.gradients = hidden, weight, gradients
        self.values = np.empty(size, room.numpy().dtype)
        self.classes = np.empty(size, np.int32)
        self.ends = np.zeros(len(hidden) + 1, np.int64)
        self.bounds = np.empty(len(weight) + 2, np.int64)
        self.room = room.view(-1).numpy()
        self.most = size - int(DENSE * room.numel())  # if there is more, another chunk may find no place
        self.start, self.rows = 0, 0

    def add(self, rows: Any, slots: Any, counts: Any) -> None:
        """Write down the supports of the next tokens."""
        ends = self.ends[self.rows : self.rows + len(counts) + 1]
        np.cumsum(counts, out=ends[1:])
        ends[1:] += ends[0]
        over_rows(_note, len(counts), int(counts.sum()), rows, slots, ends, self.values, self.classes)
        self.rows += len(counts)
        if ends[-1] > self.most:
            self.settle()

    def skip(self, tokens: int) -> None:
        """Leave out tokens that need no place here."""
        self.ends[self.rows + 1 : self.rows + tokens + 1] = self.ends[self.rows]
        self.rows += tokens

    def settle(self) -> None:
        """Add all that was written down to the gradients; sorted, it lies in the room that the logits leave free."""
        first, last = self.start, self.start + self.rows
        size = int(self.ends[self.rows])
        if size:
            half = self.room.size // 2
            tokens, values = self.room[half:].view(np.int32)[:size], self.room[:size]
            _sort(self.ends[: self.rows + 1], self.classes, self.values, self.bounds, tokens, values)
            bounds = self.bounds[:-1]
            hidden, weight, gradients = self.hidden, self.weight, self.gradients
            work = size * hidden.shape[1]
            if gradients.hidden is not None:
                to = gradients.hidden[first:last].numpy()
                strips = -(-hidden.shape[1] // _STRIP)
                over_rows(_to_hidden, strips, work, bounds, tokens, values, weight.numpy(), to)
            if gradients.weight is not None:
                to = gradients.weight.numpy()
                over_rows(_to_weight, len(weight), work, bounds, tokens, values, hidden[first:last].numpy(), to)
            if gradients.bias is not None:
                over_rows(_to_bias, len(weight), size, bounds, values, gradients.bias.numpy())
        self.start, self.rows, self.ends[0] = last, 0, 0


@kernel
def _turn(block: Any, first: int, rows: Any) -> None:
    """Columns of a block of classes become stretches of rows. On one thread: another would cost more than it gains."""
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
    """The losses of rows and, if there are rates, what is left of each row: the support of rate·(p − y), or all of it.

    ``slots`` are the same rows as integers; ``count`` tells how many entries a row has, all if it is whole.
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
        room = x if whole and rate.size > 0 else nothing
        settle(row, k, largest, value, x, p, index, one, narrow, target, loss, room)
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
    """Write the support of factor·(p − y) over a row, and how many entries it has."""
    kind = x.dtype.type
    last = slots.size - 1
    size = 0
    away = kind(-1) if label >= 0 else kind(0)  # what is still to be told of the label
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
def _spread(first: int, last: int, x: Any, slots: Any, count: Any) -> None:
    """Rows of which the support is left, whole again."""
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
def _note(first: int, last: int, x: Any, slots: Any, ends: Any, values: Any, classes: Any) -> None:
    """Copy the supports of rows to their places."""
    end = slots.shape[1] - 1
    for row in range(first, last):
        place = ends[row]
        for i in range(ends[row + 1] - place):
            values[place + i] = x[row, i]
            classes[place + i] = slots[row, end - i]


@kernel
def _sort(ends: Any, classes: Any, values: Any, bounds: Any, tokens: Any, sorted_values: Any) -> None:
    """Entries by class, those of a class by token; class j has bounds[j] to bounds[j + 1]."""
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
    """Add value·weight[class] to some strips of columns of every token: classes in order, each is read once."""
    begin, end = first * _STRIP, min(last * _STRIP, to.shape[1])
    for j in range(bounds.size - 1):
        source = weight[j, begin:end]
        for i in range(bounds[j], bounds[j + 1]):
            v, target = values[i], to[tokens[i], begin:end]
            for d in range(target.size):
                target[d] += v * source[d]


@kernel
def _to_bias(first: int, last: int, bounds: Any, values: Any, to: Any) -> None:
    for j in range(first, last):
        for i in range(bounds[j], bounds[j + 1]):
            to[j] += values[i]
