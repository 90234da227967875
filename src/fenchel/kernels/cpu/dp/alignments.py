"""Alignments of two series: the smoothed recursion over a table, its gradient, and Hessian-vector products.

Cells of one antidiagonal do not depend on each other and are handled together. The walk holds, table by table and
antidiagonal by antidiagonal, the probabilities of the three ways into each cell: diagonal, from above, from the left;
each of the three has room for a multiple of eight cells, so that no loop has a remainder.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fenchel.kernels.cpu.compiler import helper, kernel
from fenchel.kernels.cpu.dp.choices import KINDS, arrays, jacobian_product, smooth_three
from fenchel.kernels.cpu.threads import over_rows

# -- on tensors -------------------------------------------------------------------------------------------


def forward(costs: Tensor, lengths: Tensor, alpha: float, gamma: float, keep: bool) -> tuple[Tensor, Tensor]:
    """Minus the smoothed least cost of each table, in double precision, and the walk (empty if it is not to be kept).

    Args:
        costs: (B, N, M); +inf forbids a cell.
        lengths: (B, 2), int64: the corner where each table ends.
        alpha: of Tsallis's entropy, one of ``choices.KINDS``.
        gamma: the temperature.
        keep: whether the walk is wanted.
    """
    batch, rows, columns = costs.shape
    value = torch.empty(batch, dtype=torch.float64, device="cpu")
    walk = torch.empty(
        (batch if keep else 0, 3 * (rows * columns + 7 * (rows + columns))), dtype=costs.dtype, device="cpu"
    )
    given = arrays(costs, lengths)
    over_rows(_forward, batch, 3 * costs.numel(), *given, np.array([gamma]), KINDS[alpha], value.numpy(), walk.numpy())
    return value, walk


def gradient(weight: Tensor, value: Tensor, walk: Tensor, lengths: Tensor, shape: torch.Size) -> Tensor:
    """The expected path, (B, N, M), times weights (B,).

    Zeros where the value is −inf or the weight 0, else NaN where the value is.
    """
    cells = torch.empty(shape, dtype=walk.dtype, device="cpu")
    given = arrays(weight.double(), value, walk, lengths)
    over_rows(_gradient, shape[0], walk.numel(), *given, cells.numpy())
    return cells


def hessian_product(
    weight: Tensor, value: Tensor, walk: Tensor, lengths: Tensor, scores: Tensor, alpha: float, gamma: float
) -> tuple[Tensor, Tensor]:
    """The derivatives of the values (B,), and of what ``gradient`` returns, along a direction of −costs."""
    change_of_value = torch.empty(len(scores), dtype=torch.float64, device="cpu")
    cells = torch.empty(scores.shape, dtype=walk.dtype, device="cpu")
    given = arrays(weight.double(), value, walk, lengths, scores.double())
    results = (change_of_value.numpy(), cells.numpy())
    over_rows(_hessian_product, len(scores), walk.numel(), *given, np.array([gamma]), KINDS[alpha], *results)
    return change_of_value, cells


def distances(x: Tensor, y: Tensor) -> Tensor:
    """Squared distances (B, N, M) between all points of series (B, N, D) and (B, M, D)."""
    costs = torch.empty((len(x), x.shape[1], y.shape[1]), dtype=x.dtype, device="cpu")
    over_rows(_distances, len(x), costs.numel() * x.shape[2], *arrays(x, y), costs.numpy())
    return costs


def distances_backward(weight: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ⟨weight, distances⟩ in x and in y."""
    towards_x = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    towards_y = torch.empty(y.shape, dtype=y.dtype, device="cpu")
    given = arrays(weight, x, y)
    over_rows(_distances_backward, len(x), weight.numel() * x.shape[2], *given, towards_x.numpy(), towards_y.numpy())
    return towards_x, towards_y


# -- on arrays --------------------------------------------------------------------------------------------
#
# Values of an antidiagonal have row i at index i + 1, so that every cell has neighbours.
# Tables are copied, a few antidiagonals at a time, into lines that have row i at index i.

_LINES = 32


@helper
def _padded(width):  # type: ignore[no-untyped-def]
    return (width + 7) // 8 * 8


@helper
def _walk_size(n, m):  # type: ignore[no-untyped-def]
    """The number of entries of the walk of a table of n × m cells."""
    total = 0
    for d in range(n + m - 1):
        total += 3 * _padded(min(d, n - 1) - max(0, d - m + 1) + 1)
    return total


@helper
def _diagonal_lines(rows, number):  # type: ignore[no-untyped-def]
    """Memory for some antidiagonals.

    Each takes an odd number of cache lines, or cells of one row would compete for places in the cache.
    """
    return np.empty((_LINES, 16 * ((rows + 15) // 16 | 1)), number)


@helper
def _copy_diagonals(table, n, m, start, diagonals, back):  # type: ignore[no-untyped-def]
    """Copy antidiagonals, from the given one on, out of a table into lines; back into the table if ``back``."""
    for i in range(max(0, start - m + 1), min(n, start + _LINES)):
        begin, end = max(0, start - i), min(m, start + _LINES - i)
        row, line = table[i, begin:], diagonals[i + begin - start :, i]
        if back:
            for j in range(end - begin):
                row[j] = line[j]
        else:
            for j in range(end - begin):
                line[j] = row[j]


@kernel
def _forward(first, last, costs, lengths, settings, kind, value, walk):  # type: ignore[no-untyped-def]
    _, rows, columns = costs.shape
    number = costs.dtype.type
    gamma = settings[0]
    inverse_gamma = 1.0 / gamma
    keep = walk.shape[0] > 0
    wide = _padded(min(rows, columns))
    lines = np.empty((3, rows + 1))
    top = np.empty(wide)
    x, spare, work = np.empty(3 * wide, costs.dtype), np.empty(3 * wide, costs.dtype), np.empty(3 * wide, costs.dtype)
    excess, diagonals = np.empty(wide, costs.dtype), _diagonal_lines(rows, costs.dtype)
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
                _copy_diagonals(costs[b], n, m, d, diagonals, False)
            low, high = max(0, d - m + 1), min(d, n - 1)
            width = high - low + 1
            cost = diagonals[(d - 1) % _LINES, low:]
            # Slices: an index that might be negative keeps a loop from vectorising.
            one, two, here = lines[(d - 1) % 3, low:], lines[(d - 2) % 3, low:], lines[d % 3, low:]
            padded = _padded(width)
            x0, x1, x2 = x[:padded], x[padded : 2 * padded], x[2 * padded : 3 * padded]
            for w in range(width):
                across, above, left = two[w], one[w], one[w + 1]
                best = across if across > above else above
                best = left if left > best else best
                top[w] = best
                base = best if best > -np.inf else 0.0
                x0[w] = number((across - base) * inverse_gamma)
                x1[w] = number((above - base) * inverse_gamma)
                x2[w] = number((left - base) * inverse_gamma)
            for w in range(width, padded):
                x0[w], x1[w], x2[w] = number(0), number(0), number(0)
            smooth_three(kind, padded, x, walk[b, offset : offset + 3 * padded] if keep else spare, excess, work)
            for w in range(width):
                here[w + 1] = top[w] + gamma * excess[w] - cost[w]
            offset += 3 * padded
        value[b] = lines[(n + m - 2) % 3, n]


@kernel
def _gradient(first, last, weight, value, walk, lengths, cells):  # type: ignore[no-untyped-def]
    rows = cells.shape[1]
    lines, diagonals = np.empty((3, rows + 1)), _diagonal_lines(rows, cells.dtype)
    for b in range(first, last):
        n, m = lengths[b, 0], lengths[b, 1]
        cells[b] = cells.dtype.type(np.nan if np.isnan(value[b]) and weight[b] != 0.0 else 0.0)
        if not value[b] > -np.inf:
            continue
        lines[:] = 0.0
        lines[(n + m - 2) % 3, n] = weight[b]
        offset = _walk_size(n, m)
        for d in range(n + m - 2, 0, -1):
            low, high = max(0, d - m + 1), min(d, n - 1)
            width = high - low + 1
            padded = _padded(width)
            offset -= 3 * padded
            q0, q1, q2 = walk[b, offset:], walk[b, offset + padded :], walk[b, offset + 2 * padded :]
            one, two, here = lines[(d - 1) % 3, low:], lines[(d - 2) % 3, low:], lines[d % 3, low:]
            cell = diagonals[(d - 1) % _LINES, low:]
            for w in range(width):
                cell[w] = here[w + 1]
            # The rounding error of the sum of the three would multiply over thousands of steps.
            for w in range(width):
                gap = 1.0 - np.float64(q0[w]) - np.float64(q1[w]) - np.float64(q2[w])
                here[w + 1] += here[w + 1] * gap
            # The diagonal step is the first that reaches its line: it assigns, and sets the cells beside it to 0.
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
                _copy_diagonals(cells[b], n, m, d, diagonals, True)
        cells[b, 0, 0] = lines[0, 1]


@kernel
def _hessian_product(  # type: ignore[no-untyped-def]
    first, last, weight, value, walk, lengths, scores, settings, kind, change_of_value, cells
):
    _, rows, columns = cells.shape
    inverse_gamma = 1.0 / settings[0]
    wide = _padded(min(rows, columns))
    v = np.empty((rows + 1, columns + 1))
    lines, changes = np.empty((3, rows + 1)), np.empty((3, rows + 1))
    change, response, work = np.empty(3 * wide), np.empty(3 * wide), np.empty(2 * wide)
    for b in range(first, last):
        n, m = lengths[b, 0], lengths[b, 1]
        nothing = cells.dtype.type(np.nan if np.isnan(value[b]) else 0.0)
        cells[b] = nothing
        change_of_value[b] = nothing
        if not value[b] > -np.inf:
            continue
        v[:] = 0.0
        v[1, 1] = scores[b, 0, 0]
        offset = 24
        for d in range(1, n + m - 1):
            low, high = max(0, d - m + 1), min(d, n - 1)
            width = high - low + 1
            padded = _padded(width)
            q = walk[b, offset : offset + 3 * padded]
            for w in range(width):
                i, j = low + w, d - low - w
                mean = q[w] * v[i, j] + q[padded + w] * v[i, j + 1] + q[2 * padded + w] * v[i + 1, j]
                gap = 1.0 - np.float64(q[w]) - np.float64(q[padded + w]) - np.float64(q[2 * padded + w])
                v[i + 1, j + 1] = scores[b, i, j] + mean + mean * gap
            offset += 3 * padded
        change_of_value[b] = v[n, m]
        lines[:] = 0.0
        changes[:] = 0.0
        lines[(n + m - 2) % 3, n] = weight[b]
        for d in range(n + m - 2, 0, -1):
            low, high = max(0, d - m + 1), min(d, n - 1)
            width = high - low + 1
            padded = _padded(width)
            offset -= 3 * padded
            q = walk[b, offset : offset + 3 * padded]
            for w in range(width):
                i, j = low + w, d - low - w
                change[w], change[padded + w], change[2 * padded + w] = v[i, j], v[i, j + 1], v[i + 1, j]
            jacobian_product(kind, 3, padded, q, change, response, work)
            here, changed = lines[d % 3], changes[d % 3]
            for w in range(width):
                cells[b, low + w, d - low - w] = changed[low + w + 1]
                gap = 1.0 - np.float64(q[w]) - np.float64(q[padded + w]) - np.float64(q[2 * padded + w])
                here[low + w + 1] += here[low + w + 1] * gap
                changed[low + w + 1] += changed[low + w + 1] * gap
            for k in range(3):
                # diagonal: two lines back, one row up; from above: one line, one row; from the left: one line
                back, row = (2 if k == 0 else 1), (1 if k == 2 else 0)
                there, their = lines[(d - back) % 3], changes[(d - back) % 3]
                for w in range(width):
                    mass, p = here[low + w + 1], q[k * padded + w]
                    there[low + w + row] += mass * p
                    their[low + w + row] += changed[low + w + 1] * p + mass * response[k * padded + w] * inverse_gamma
            here[:] = 0.0
            changed[:] = 0.0
        cells[b, 0, 0] = changes[0, 1]


# Differences are squared, not expanded: products would cancel where series are close to each other.


@helper
def _transpose(y, out):  # type: ignore[no-untyped-def]
    """Write yᵀ. An assignment of arrays would compile the message of an error about shapes with it, for a second."""
    for j in range(y.shape[0]):
        for k in range(y.shape[1]):
            out[k, j] = y[j, k]


@kernel
def _distances(first, last, x, y, costs):  # type: ignore[no-untyped-def]
    _, rows, columns = costs.shape
    depth = x.shape[2]
    across = np.empty((depth, columns), y.dtype)
    for b in range(first, last):
        _transpose(y[b], across)
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
def _distances_backward(first, last, weight, x, y, towards_x, towards_y):  # type: ignore[no-untyped-def]
    _, rows, columns = weight.shape
    depth = x.shape[2]
    across = np.empty((depth, columns), y.dtype)
    sums = np.empty((depth, columns))
    for b in range(first, last):
        _transpose(y[b], across)
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
