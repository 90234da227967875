"""Alignments of two series: the smoothed recursion over the cells of a table, its expected path, and how that responds.

Cells of one antidiagonal do not depend on each other and are handled together. The walk holds, table by table and
antidiagonal by antidiagonal, the probabilities of the three ways into each cell: across, from above, from the left;
each of the three has room for a multiple of eight cells, so that no loop has a remainder.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fenchel.kernels.cpu.compiler import kernel
from fenchel.kernels.cpu.dp.choices import KINDS, respond, smooth_three
from fenchel.kernels.cpu.threads import over_rows

Arrays = np.ndarray[Any, Any]


# -- on tensors -------------------------------------------------------------------------------------------


def advance(costs: Tensor, lengths: Tensor, alpha: float, gamma: float, keep: bool) -> tuple[Tensor, Tensor]:
    """Minus the smoothed least cost of each table, in double precision, and the walk (empty if it is not to be kept).

    Args:
        costs: (B, N, M); +inf forbids a cell.
        lengths: (B, 2), int64: the corner where each table ends.
        alpha: of Tsallis's entropy, one of ``columns.KINDS``.
        gamma: the temperature.
        keep: whether the walk is wanted.
    """
    batch, rows, columns = costs.shape
    value = torch.empty(batch, dtype=torch.float64, device="cpu")
    walk = torch.empty(
        (batch if keep else 0, 3 * (rows * columns + 7 * (rows + columns))), dtype=costs.dtype, device="cpu"
    )
    arrays = [_array(t) for t in (costs, lengths)]
    over_rows(_advance, batch, 3 * costs.numel(), *arrays, np.array([gamma]), KINDS[alpha], value.numpy(), walk.numpy())
    return value, walk


def expect(weight: Tensor, value: Tensor, walk: Tensor, lengths: Tensor, shape: torch.Size) -> Tensor:
    """The expected path, (B, N, M), times weights (B,)."""
    cells = torch.empty(shape, dtype=walk.dtype, device="cpu")
    arrays = [_array(t) for t in (weight.double(), value, walk, lengths)]
    over_rows(_expect, shape[0], walk.numel(), *arrays, cells.numpy())
    return cells


def curve(
    weight: Tensor, value: Tensor, walk: Tensor, lengths: Tensor, scores: Tensor, alpha: float, gamma: float
) -> tuple[Tensor, Tensor]:
    """Along a direction of the scores (minus costs): the change of the values, and of the weighted expected path."""
    tangent = torch.empty(len(scores), dtype=torch.float64, device="cpu")
    cells = torch.empty(scores.shape, dtype=walk.dtype, device="cpu")
    arrays = [_array(t) for t in (weight.double(), value, walk, lengths, scores.double())]
    results = (tangent.numpy(), cells.numpy())
    over_rows(_curve, len(scores), walk.numel(), *arrays, np.array([gamma]), KINDS[alpha], *results)
    return tangent, cells


def distances(x: Tensor, y: Tensor) -> Tensor:
    """Squared distances (B, N, M) between all points of series (B, N, D) and (B, M, D)."""
    costs = torch.empty((len(x), x.shape[1], y.shape[1]), dtype=x.dtype, device="cpu")
    over_rows(_distances, len(x), costs.numel() * x.shape[2], _array(x), _array(y), costs.numpy())
    return costs


def pull(weight: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ⟨weight, distances⟩ in x and in y."""
    towards_x, towards_y = (torch.empty(each.shape, dtype=each.dtype, device="cpu") for each in (x, y))
    arrays = [_array(t) for t in (weight, x, y)]
    over_rows(_pull, len(x), weight.numel() * x.shape[2], *arrays, towards_x.numpy(), towards_y.numpy())
    return towards_x, towards_y


def _array(tensor: Tensor) -> Arrays:
    array: Arrays = tensor.detach().contiguous().numpy()
    return array


# -- on arrays --------------------------------------------------------------------------------------------
#
# Row i of a table stands at place i + 1 of what is kept of an antidiagonal: its neighbours are always there.
# Tables are turned, a few antidiagonals at a time, into lines where row i stands at place i.

_LINES = 32


@kernel
def _room(width):  # type: ignore[no-untyped-def]
    return (width + 7) // 8 * 8


@kernel
def _extent(n, m):  # type: ignore[no-untyped-def]
    """How much of the walk a table takes."""
    total = 0
    for d in range(n + m - 1):
        total += 3 * _room(min(d, n - 1) - max(0, d - m + 1) + 1)
    return total


@kernel
def _slanted(rows, number):  # type: ignore[no-untyped-def]
    """Room for some antidiagonals: an odd number of cache lines each, or cells of a row would fight for places."""
    return np.empty((_LINES, 16 * ((rows + 15) // 16 | 1)), number)


@kernel
def _slant(table, n, m, start, slanted):  # type: ignore[no-untyped-def]
    """Antidiagonals from the given one on."""
    for i in range(max(0, start - m + 1), min(n, start + _LINES)):
        begin, end = max(0, start - i), min(m, start + _LINES - i)
        row, there = table[i, begin:], slanted[i + begin - start :, i]
        for j in range(end - begin):
            there[j] = row[j]


@kernel
def _straighten(slanted, n, m, start, table):  # type: ignore[no-untyped-def]
    """Back into the table."""
    for i in range(max(0, start - m + 1), min(n, start + _LINES)):
        begin, end = max(0, start - i), min(m, start + _LINES - i)
        row, there = table[i, begin:], slanted[i + begin - start :, i]
        for j in range(end - begin):
            row[j] = there[j]


@kernel
def _advance(first, last, costs, lengths, settings, kind, value, walk):  # type: ignore[no-untyped-def]
    _, rows, columns = costs.shape
    number = costs.dtype.type
    gamma = settings[0]
    sharp = 1.0 / gamma
    keep = walk.shape[0] > 0
    wide = _room(min(rows, columns))
    lines = np.empty((3, rows + 1))
    top = np.empty(wide)
    x, spare, work = np.empty(3 * wide, costs.dtype), np.empty(3 * wide, costs.dtype), np.empty(3 * wide, costs.dtype)
    rise, slanted = np.empty(wide, costs.dtype), _slanted(rows, costs.dtype)
    for b in range(first, last):
        n, m = lengths[b, 0], lengths[b, 1]
        bad = 0
        for i in range(n):
            for j in range(m):
                bad += 0 if costs[b, i, j] > -np.inf else 1
        if bad:
            value[b] = np.nan
            continue
        lines[:] = -np.inf
        lines[0, 1] = -np.float64(costs[b, 0, 0])
        if keep:
            walk[b, :24] = number(0)
            walk[b, 0] = number(1)
        offset = 24
        for d in range(1, n + m - 1):
            if (d - 1) % _LINES == 0:
                _slant(costs[b], n, m, d, slanted)
            low, high = max(0, d - m + 1), min(d, n - 1)
            width = high - low + 1
            cost = slanted[(d - 1) % _LINES, low:]
            # Slices: an index that might be negative keeps a loop from vectorising.
            one, two, here = lines[(d - 1) % 3, low:], lines[(d - 2) % 3, low:], lines[d % 3, low:]
            room = _room(width)
            x0, x1, x2 = x[:room], x[room : 2 * room], x[2 * room : 3 * room]
            for w in range(width):
                across, above, left = two[w], one[w], one[w + 1]
                best = across if across > above else above
                best = left if left > best else best
                top[w] = best
                base = best if best > -np.inf else 0.0
                x0[w] = number((across - base) * sharp)
                x1[w] = number((above - base) * sharp)
                x2[w] = number((left - base) * sharp)
            for w in range(width, room):
                x0[w], x1[w], x2[w] = number(0), number(0), number(0)
            smooth_three(kind, room, x, walk[b, offset : offset + 3 * room] if keep else spare, rise, work)
            for w in range(width):
                here[w + 1] = top[w] + gamma * rise[w] - cost[w]
            offset += 3 * room
        value[b] = lines[(n + m - 2) % 3, n]


@kernel
def _expect(first, last, weight, value, walk, lengths, cells):  # type: ignore[no-untyped-def]
    rows = cells.shape[1]
    lines, slanted = np.empty((3, rows + 1)), _slanted(rows, cells.dtype)
    for b in range(first, last):
        n, m = lengths[b, 0], lengths[b, 1]
        cells[b] = cells.dtype.type(np.nan if np.isnan(value[b]) else 0.0)
        if not value[b] > -np.inf:
            continue
        lines[:] = 0.0
        lines[(n + m - 2) % 3, n] = weight[b]
        offset = _extent(n, m)
        for d in range(n + m - 2, 0, -1):
            low, high = max(0, d - m + 1), min(d, n - 1)
            width = high - low + 1
            room = _room(width)
            offset -= 3 * room
            q0, q1, q2 = walk[b, offset:], walk[b, offset + room :], walk[b, offset + 2 * room :]
            one, two, here = lines[(d - 1) % 3, low:], lines[(d - 2) % 3, low:], lines[d % 3, low:]
            cell = slanted[(d - 1) % _LINES, low:]
            for w in range(width):
                cell[w] = here[w + 1]
            # What rounding took from the sum of the three would multiply up over thousands of steps.
            for w in range(width):
                gap = 1.0 - np.float64(q0[w]) - np.float64(q1[w]) - np.float64(q2[w])
                here[w + 1] += here[w + 1] * gap
            # What comes across is the first to get there: it replaces what stood there, and no more is beside it.
            for w in range(width):
                two[w] = here[w + 1] * q0[w]
            two[width] = 0.0
            if low > 0:
                lines[(d - 2) % 3, low - 1] = 0.0
            one[0] += here[1] * q1[0]
            for w in range(width - 1):
                one[w + 1] += here[w + 2] * q1[w + 1] + here[w + 1] * q2[w]
            one[width] += here[width] * q2[width - 1]
            if (d - 1) % _LINES == 0:
                _straighten(slanted, n, m, d, cells[b])
        cells[b, 0, 0] = lines[0, 1]


@kernel
def _curve(  # type: ignore[no-untyped-def]
    first, last, weight, value, walk, lengths, scores, settings, kind, tangent, cells
):
    _, rows, columns = cells.shape
    sharp = 1.0 / settings[0]
    wide = _room(min(rows, columns))
    v = np.empty((rows + 1, columns + 1))
    lines, bends = np.empty((3, rows + 1)), np.empty((3, rows + 1))
    change, response, work = np.empty(3 * wide), np.empty(3 * wide), np.empty(2 * wide)
    for b in range(first, last):
        n, m = lengths[b, 0], lengths[b, 1]
        nothing = cells.dtype.type(np.nan if np.isnan(value[b]) else 0.0)
        cells[b] = nothing
        tangent[b] = nothing
        if not value[b] > -np.inf:
            continue
        v[:] = 0.0
        v[1, 1] = scores[b, 0, 0]
        offset = 24
        for d in range(1, n + m - 1):
            low, high = max(0, d - m + 1), min(d, n - 1)
            width = high - low + 1
            room = _room(width)
            q = walk[b, offset : offset + 3 * room]
            for w in range(width):
                i, j = low + w, d - low - w
                mean = q[w] * v[i, j] + q[room + w] * v[i, j + 1] + q[2 * room + w] * v[i + 1, j]
                gap = 1.0 - np.float64(q[w]) - np.float64(q[room + w]) - np.float64(q[2 * room + w])
                v[i + 1, j + 1] = scores[b, i, j] + mean + mean * gap
            offset += 3 * room
        tangent[b] = v[n, m]
        lines[:] = 0.0
        bends[:] = 0.0
        lines[(n + m - 2) % 3, n] = weight[b]
        for d in range(n + m - 2, 0, -1):
            low, high = max(0, d - m + 1), min(d, n - 1)
            width = high - low + 1
            room = _room(width)
            offset -= 3 * room
            q = walk[b, offset : offset + 3 * room]
            for w in range(width):
                i, j = low + w, d - low - w
                change[w], change[room + w], change[2 * room + w] = v[i, j], v[i, j + 1], v[i + 1, j]
            respond(kind, 3, room, q, change, response, work)
            here, bent = lines[d % 3], bends[d % 3]
            for w in range(width):
                cells[b, low + w, d - low - w] = bent[low + w + 1]
                gap = 1.0 - np.float64(q[w]) - np.float64(q[room + w]) - np.float64(q[2 * room + w])
                here[low + w + 1] += here[low + w + 1] * gap
                bent[low + w + 1] += bent[low + w + 1] * gap
            for k in range(3):
                # across: two lines back and a row up; from above: one and a row up; from the left: one
                back, row = (2 if k == 0 else 1), (1 if k == 2 else 0)
                there, their = lines[(d - back) % 3], bends[(d - back) % 3]
                for w in range(width):
                    mass, p = here[low + w + 1], q[k * room + w]
                    there[low + w + row] += mass * p
                    their[low + w + row] += bent[low + w + 1] * p + mass * response[k * room + w] * sharp
            here[:] = 0.0
            bent[:] = 0.0
        cells[b, 0, 0] = bends[0, 1]


# Differences are squared, not multiplied out: products would cancel where series meet.


@kernel
def _distances(first, last, x, y, costs):  # type: ignore[no-untyped-def]
    _, rows, columns = costs.shape
    depth = x.shape[2]
    across = np.empty((depth, columns), y.dtype)
    for b in range(first, last):
        across[:] = y[b].T
        for i in range(rows):
            here = costs[b, i]
            point, line = x[b, i, 0], across[0]
            for j in range(columns):
                gap = point - line[j]
                here[j] = gap * gap
            for k in range(1, depth):
                point, line = x[b, i, k], across[k]
                for j in range(columns):
                    gap = point - line[j]
                    here[j] += gap * gap


@kernel
def _pull(first, last, weight, x, y, towards_x, towards_y):  # type: ignore[no-untyped-def]
    _, rows, columns = weight.shape
    depth = x.shape[2]
    across = np.empty((depth, columns), y.dtype)
    sums = np.empty((depth, columns))
    for b in range(first, last):
        across[:] = y[b].T
        sums[:] = 0.0
        for i in range(rows):
            mass = weight[b, i]
            for k in range(depth):
                point, line, there = x[b, i, k], across[k], sums[k]
                total = 0.0
                for j in range(columns):
                    gap = mass[j] * (point - line[j])
                    drawn = np.float64(gap if mass[j] != 0 else mass[j])  # no NaN from points without weight
                    total += drawn
                    there[j] -= drawn
                towards_x[b, i, k] = 2.0 * total
        for j in range(columns):
            for k in range(depth):
                towards_y[b, j, k] = 2.0 * sums[k, j]
