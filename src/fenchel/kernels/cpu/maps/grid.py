"""Tvmax of grids and its Jacobian product: the proximal operator of total variation on a grid, then sparsemax."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fenchel.kernels.cpu.compiler import helper, kernel
from fenchel.kernels.cpu.maps.groups import begin_row, threshold
from fenchel.kernels.cpu.maps.simplex import as_rows, each, like
from fenchel.kernels.cpu.threads import over_rows

_HARD = 100  # operations per entry of a grid, as an estimate
_ROUNDING = 64 * 2.2e-16  # an excess up to this, relative to the scores, is rounding error


def grid(z: Tensor, strength: float | Tensor, width: float) -> Tensor:
    """Compute tvmax of z (…, n), whose last dimension holds the rows of a grid of that width one after the other."""
    x, out = as_rows(z), like(z)
    over_rows(_grid_rows, len(x), _HARD * x.size, x, each(strength, len(x)), int(width), as_rows(out))
    return out


def grid_product(v: Tensor, z: Tensor, p: Tensor, strength: float | Tensor, width: float) -> Tensor:
    """Multiply v (…, n) by the Jacobian of tvmax, given its result p."""
    q, out = as_rows(p), like(p)
    over_rows(_grid_product_rows, len(q), q.size, q, each(strength, len(q)), int(width), as_rows(v), as_rows(out))
    return out


@helper
def _ways(i: int, n: int, width: int, ways: Any) -> int:
    """Write the neighbours of i on the grid, right, left, below, above, to ``ways`` (4, 3); return how many there are.

    A row of ``ways`` holds the neighbour, the edge that leads there, and the sign of its direction. The number of an
    edge is that of its first end, plus n if it is vertical.
    """
    count = 0
    if (i + 1) % width != 0:
        ways[count, 0], ways[count, 1], ways[count, 2] = i + 1, i, 1
        count += 1
    if i % width != 0:
        ways[count, 0], ways[count, 1], ways[count, 2] = i - 1, i - 1, -1
        count += 1
    if i + width < n:
        ways[count, 0], ways[count, 1], ways[count, 2] = i + width, n + i, 1
        count += 1
    if i >= width:
        ways[count, 0], ways[count, 1], ways[count, 2] = i - width, n + i - width, -1
        count += 1
    return count


@helper
def _route(
    n: int,
    width: int,
    strength: float,
    slack: float,
    group: Any,
    excess: Any,
    flow: Any,
    far: Any,
    queue: Any,
    ways: Any,
) -> None:
    """Compute a maximum flow from nodes with excess > 0 to nodes with excess < 0, within groups, at most λ per edge.

    In rounds: measure the distance of each node to the nearest node with negative excess, then push excess to
    neighbours that are nearer, from the farthest nodes on. Afterwards ``far`` is negative where none can be reached.
    """
    while True:
        tail = 0
        for i in range(n):
            far[i] = -1
            if group[i] >= 0 and excess[i] < -slack:
                far[i] = 0
                queue[tail] = i
                tail += 1
        head, stuck = 0, True
        while head < tail:
            j = queue[head]
            head += 1
            for k in range(_ways(j, n, width, ways)):
                i, edge, sign = ways[k, 0], ways[k, 1], -ways[k, 2]
                if group[i] == group[j] and far[i] < 0 and sign * flow[edge] < strength:
                    far[i] = far[j] + 1
                    queue[tail] = i
                    tail += 1
                    stuck = stuck and excess[i] <= slack
        if stuck:
            return
        for place in range(tail - 1, -1, -1):
            i = queue[place]
            if far[i] == 0:
                break
            if excess[i] <= 0.0:
                continue
            for k in range(_ways(i, n, width, ways)):
                j, edge, sign = ways[k, 0], ways[k, 1], ways[k, 2]
                if group[i] == group[j] and far[j] == far[i] - 1:
                    room = strength - sign * flow[edge]
                    if excess[i] >= room:
                        excess[i] -= room
                        excess[j] += room
                        flow[edge] = sign * strength
                    else:
                        flow[edge] += sign * excess[i]
                        excess[j] += excess[i]
                        excess[i] = 0.0
                        break


@helper
def _regions(
    n: int, width: int, strength: float, w: Any, group: Any, flow: Any, level: Any, size: Any, queue: Any, ways: Any
) -> int:
    """Solve argmin ½‖y − w‖² + λ Σ |yᵢ − yⱼ| over the edges of a grid between entries with group ≥ 0, all 0 at first.

    Groups are split until a flow within each cancels its deviations from its mean; ``flow`` is then the solution of
    the dual problem. Returns how many groups there are, numbered in ``group``, with their values in ``level``.
    """
    excess, far = np.empty(n), np.empty(n, np.int32)
    spill, needy = np.empty(n), np.empty(n, np.int32)
    scale = strength
    for i in range(n):
        scale = max(scale, abs(w[i]) if group[i] >= 0 else 0.0)
    slack = _ROUNDING * scale
    flow[:] = 0.0
    groups, finished, size[0] = 1, 0, 0
    for i in range(n):
        if group[i] >= 0:
            size[0] += 1
    while True:
        for i in range(n):
            excess[i] = w[i] if group[i] >= 0 else 0.0
        for i in range(n):
            if group[i] >= 0:
                for k in range(_ways(i, n, width, ways)):
                    if group[ways[k, 0]] >= 0:
                        excess[i] -= ways[k, 2] * flow[ways[k, 1]]
        level[:groups] = 0.0
        for _ in range(2):  # the mean, and what it has rounded away
            spill[:groups] = 0.0
            for i in range(n):
                if group[i] >= 0:
                    spill[group[i]] += excess[i]
            for i in range(n):
                if group[i] >= 0:
                    excess[i] -= spill[group[i]] / size[group[i]]
            for g in range(groups):
                level[g] += spill[g] / size[g]
        if finished == groups:
            return groups
        _route(n, width, strength, slack, group, excess, flow, far, queue, ways)
        spill[:groups] = 0.0
        for i in range(n):
            if group[i] >= 0 and far[i] < 0:
                spill[group[i]] += excess[i]
        before = groups
        for g in range(before):
            needy[g] = -1
            if spill[g] > slack * (4 + size[g]):  # entries whose excess cannot flow form a group with a larger value
                needy[g] = groups
                size[groups] = 0
                groups += 1
        finished = groups if groups == before else 0
        for i in range(n):
            g = group[i]
            if g >= 0 and far[i] < 0 and needy[g] >= 0:
                for k in range(_ways(i, n, width, ways)):
                    j = ways[k, 0]
                    if group[j] == g and far[j] >= 0:
                        flow[ways[k, 1]] = ways[k, 2] * strength
        for i in range(n):
            g = group[i]
            if g >= 0 and g < before and far[i] < 0 and needy[g] >= 0:
                group[i] = needy[g]
                size[needy[g]] += 1
                size[g] -= 1


@kernel
def _grid_rows(first: int, last: int, x: Any, strengths: Any, width: int, out: Any) -> None:
    """Compute tvmax of each grid of x (grids, n): groups of equal values among the candidates, then their threshold."""
    n = x.shape[1]
    kind = x.dtype.type
    ways = np.empty((4, 3), np.int64)
    w, flow, level, size = np.empty(n), np.empty(2 * n), np.empty(n), np.empty(n, np.int32)
    group, queue = np.empty(n, np.int32), np.empty(n, np.int32)
    for row in range(first, last):
        source, target = x[row], out[row]
        going, top, _ = begin_row(source, target)
        if not going:
            continue
        strength = strengths[row]
        line = -(1.0 + 8.0 * strength)
        low = 0.0
        for i in range(n):
            w[i] = np.float64(source[i]) - top
            group[i] = 0 if w[i] > line else -1
            low = min(low, w[i] if w[i] > line else line if source[i] > -np.inf else 0.0)
        strength = min(strength, -n * low)
        for i in range(n):
            if group[i] == 0:
                for k in range(_ways(i, n, width, ways)):
                    j = ways[k, 0]
                    w[i] -= strength if group[j] < 0 and source[j] > -np.inf else 0.0
        groups = 1
        if strength > 0.0:
            groups = _regions(n, width, strength, w, group, flow, level, size, queue, ways)
        else:
            groups = 0
            for i in range(n):
                if group[i] == 0:
                    group[i], level[groups], size[groups] = groups, w[i], 1
                    groups += 1
        tau = threshold(level, size, groups)
        for i in range(n):
            if group[i] >= 0:
                target[i] = kind(max(level[group[i]] - tau, 0.0))


@kernel
def _grid_product_rows(first: int, last: int, p: Any, strengths: Any, width: int, v: Any, out: Any) -> None:
    """Compute J v of each grid: the mean of v over each connected group, less its mean over the support."""
    n = p.shape[1]
    kind = p.dtype.type
    ways = np.empty((4, 3), np.int64)
    queue, seen = np.empty(n, np.int32), np.empty(n, np.bool_)
    for row in range(first, last):
        source, g, target = p[row], v[row], out[row]
        total, count = 0.0, 0
        bad = False
        for i in range(n):
            target[i] = 0
            seen[i] = source[i] == 0
            bad = bad or source[i] != source[i]
            if not seen[i]:
                total += g[i]
                count += 1
        if bad:
            target[:] = np.nan
            continue
        mean = total / max(count, 1)
        alone = strengths[row] == 0.0
        for start in range(n):
            if seen[start]:
                continue
            seen[start] = True
            queue[0] = start
            head, tail = 0, 1
            part = 0.0
            while head < tail:
                i = queue[head]
                head += 1
                part += g[i] - mean
                if alone:
                    continue
                for k in range(_ways(i, n, width, ways)):
                    j = ways[k, 0]
                    if not seen[j] and source[j] == source[i]:
                        seen[j] = True
                        queue[tail] = j
                        tail += 1
            share = kind(part / tail)
            for k in range(tail):
                target[queue[k]] = share
