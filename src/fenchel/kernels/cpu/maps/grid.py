"""Tvmax of grids and its Jacobian product: the proximal operator of total variation on a grid, then sparsemax."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fenchel.kernels.cpu.compiler import helper, kernel
from fenchel.kernels.cpu.maps.groups import begin_row, subtract_largest, threshold
from fenchel.kernels.cpu.maps.simplex import as_rows, each, like
from fenchel.kernels.cpu.threads import over_rows

_HARD = 100  # operations per entry of a grid, as an estimate
_SIGNS = (1, -1, 1, -1)  # of the flow along an edge to a neighbour
_NOTHING = -1e300  # the value of a group without mass
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
def _neighbours(n: int, width: int) -> Any:
    """The neighbours of every entry of a grid, right, left, below, above, (n, 4), and the edges that lead there.

    Where there is none, it is n, which is in no group. The number of an edge is that of its first end, plus n if it is
    vertical; it leads to the right or down: ``_signs``.
    """
    ways, edges = np.empty((n, 4), np.int32), np.zeros((n, 4), np.int32)
    for i in range(n):
        ways[i, 0] = i + 1 if (i + 1) % width != 0 else n
        ways[i, 1] = i - 1 if i % width != 0 else n
        ways[i, 2] = i + width if i + width < n else n
        ways[i, 3] = i - width if i >= width else n
        edges[i, 0], edges[i, 1] = i, max(i - 1, 0)
        edges[i, 2], edges[i, 3] = n + i, max(n + i - width, 0)
    return ways, edges


@helper
def _route(
    nodes: Any,
    strength: float,
    slack: float,
    group: Any,
    excess: Any,
    flow: Any,
    far: Any,
    queue: Any,
    ring: Any,
    ways: Any,
    edges: Any,
) -> None:
    """Compute a maximum flow from nodes with excess > 0 to nodes with excess < 0, within groups, at most λ per edge.

    By pushing and relabelling: measure the distance of each node to the nearest node with negative excess, then push
    excess to neighbours that are nearer, and put a node that has some left one farther than the nearest neighbour that
    can take it; after a while measure again. Afterwards ``far`` is negative where no such node can be reached.
    """
    while True:
        tail = 0
        for a in range(nodes.size):
            i = nodes[a]
            far[i] = -1
            if excess[i] < -slack:
                far[i] = 0
                queue[tail] = i
                tail += 1
        head, stuck = 0, True
        while head < tail:
            j = queue[head]
            head += 1
            for k in range(4):
                i, edge, sign = ways[j, k], edges[j, k], _SIGNS[k ^ 1]
                if group[i] == group[j] and far[i] < 0 and sign * flow[edge] < strength:
                    far[i] = far[j] + 1
                    queue[tail] = i
                    tail += 1
                    stuck = stuck and excess[i] <= slack
        if stuck:
            return
        first, length, turns = 0, 0, tail
        for place in range(tail - 1, -1, -1):
            i = queue[place]
            if excess[i] > slack:
                ring[length] = i
                length += 1
        while length > 0 and turns > 0:
            i = ring[first]
            first = first + 1 if first + 1 < ring.size else 0
            length -= 1
            lowest = ring.size
            for k in range(4):
                j, edge, sign = ways[i, k], edges[i, k], _SIGNS[k]
                if group[i] != group[j] or far[j] < 0:
                    continue
                room = strength - sign * flow[edge]
                if room > 0.0 and far[j] < far[i]:
                    rests = excess[j] <= slack
                    if excess[i] >= room:
                        excess[i] -= room
                        excess[j] += room
                        flow[edge] = sign * strength
                    else:
                        flow[edge] += sign * excess[i]
                        excess[j] += excess[i]
                        excess[i] = 0.0
                    if rests and excess[j] > slack:
                        last = first + length
                        ring[last if last < ring.size else last - ring.size] = j
                        length += 1
                    if excess[i] == 0.0:
                        break
                elif room > 0.0:
                    lowest = min(lowest, far[j])
            if excess[i] > slack:
                turns -= 1
                far[i] = lowest + 1
                if lowest < ring.size:
                    last = first + length
                    ring[last if last < ring.size else last - ring.size] = i
                    length += 1


@helper
def _levels(
    nodes: Any, w: Any, group: Any, flow: Any, size: Any, ways: Any, edges: Any, excess: Any, spill: Any, level: Any
) -> None:
    """The means of w less what flows away, of the groups of these nodes, and by how much each node exceeds its own."""
    for a in range(nodes.size):
        i = nodes[a]
        rest = w[i]
        for k in range(4):
            if group[ways[i, k]] >= 0:
                rest -= _SIGNS[k] * flow[edges[i, k]]
        excess[i] = rest
        level[group[i]] = 0.0
    for _ in range(2):  # the mean, and what it has rounded away
        for a in range(nodes.size):
            spill[group[nodes[a]]] = 0.0
        for a in range(nodes.size):
            spill[group[nodes[a]]] += excess[nodes[a]]
        for a in range(nodes.size):
            i = nodes[a]
            g = group[i]
            excess[i] -= spill[g] / size[g]
        for a in range(nodes.size):
            g = group[nodes[a]]
            level[g] += spill[g] / size[g]
            spill[g] = 0.0


@helper
def _regions(
    n: int, strength: float, w: Any, group: Any, flow: Any, level: Any, size: Any, queue: Any, ways: Any, edges: Any
) -> int:
    """Solve argmin ½‖y − w‖² + λ Σ |yᵢ − yⱼ| over the edges of a grid between entries with group ≥ 0, all 0 at first.

    Groups are split until a flow within each cancels its deviations from its mean. The threshold that their means have
    is not above that of y, whose mean over each group they are: a group with a mean below it is split there once, and
    what is left of it has no mass. Returns how many groups there are, numbered in ``group``, with their values in
    ``level``, ``_NOTHING`` where there is no mass.
    """
    excess, far, ring = np.empty(n), np.empty(n, np.int32), np.empty(n, np.int32)
    spill, rising, cut = np.zeros(n), np.empty(n, np.int32), np.empty(n)
    nodes, everything = np.empty(n, np.int32), np.empty(n, np.int32)
    scale, count = strength, 0
    for i in range(n):
        if group[i] >= 0:
            scale = max(scale, abs(w[i]))
            nodes[count] = everything[count] = i
            count += 1
    whole = count
    slack = _ROUNDING * scale
    flow[:] = 0.0
    groups, size[0] = 1, count
    while count > 0:
        some = nodes[:count]
        _levels(some, w, group, flow, size, ways, edges, excess, spill, level)
        tau = threshold(level, size, groups) - 4.0 * slack
        for g in range(groups):
            spill[g], rising[g], cut[g] = 0.0, -1, max(tau - level[g], 0.0)
        for a in range(count):
            excess[some[a]] -= cut[group[some[a]]]
        _route(some, strength, slack, group, excess, flow, far, queue, ring, ways, edges)
        for a in range(count):
            i = some[a]
            spill[group[i]] += excess[i] if far[i] < 0 else 0.0
        before = groups
        for g in range(before):
            if spill[g] > slack * (4 + size[g]):  # entries whose excess cannot flow form a group with a larger value
                rising[g] = groups
                size[groups] = 0
                groups += 1
        for a in range(count):
            i = some[a]
            g = group[i]
            if far[i] < 0 and rising[g] >= 0:
                for k in range(4):
                    j = ways[i, k]
                    if group[j] == g and far[j] >= 0:
                        flow[edges[i, k]] = _SIGNS[k] * strength
        left = 0
        for a in range(count):
            i = some[a]
            g = group[i]
            if far[i] < 0 and rising[g] >= 0:
                group[i] = rising[g]
                size[rising[g]] += 1
                size[g] -= 1
                nodes[left] = i
                left += 1
            elif cut[g] == 0.0 and rising[g] >= 0:
                nodes[left] = i
                left += 1
        for g in range(before):
            if cut[g] > 0.0:
                level[g] = _NOTHING
        for g in range(before, groups):
            level[g] = _NOTHING
        count = left
    _finish(everything[:whole], w, group, flow, size, ways, edges, excess, spill, level)
    return groups


@helper
def _finish(
    nodes: Any, w: Any, group: Any, flow: Any, size: Any, ways: Any, edges: Any, excess: Any, spill: Any, level: Any
) -> None:
    """The values of groups that have mass, all edges that leave them being saturated."""
    kept = 0
    for a in range(nodes.size):
        if level[group[nodes[a]]] > _NOTHING:
            nodes[kept] = nodes[a]
            kept += 1
    _levels(nodes[:kept], w, group, flow, size, ways, edges, excess, spill, level)


@kernel
def _grid_rows(first: int, last: int, x: Any, strengths: Any, width: int, out: Any) -> None:
    """Compute tvmax of each grid of x (grids, n): groups of equal values among the candidates, then their threshold."""
    n = x.shape[1]
    kind = x.dtype.type
    ways, edges = _neighbours(n, width)
    w, flow, level, size = np.empty(n), np.empty(2 * n), np.empty(n), np.empty(n, np.int32)
    group, queue = np.full(n + 1, -1, np.int32), np.empty(n, np.int32)
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
                for k in range(4):
                    j = ways[i, k]
                    if j < n and group[j] < 0 and source[j] > -np.inf:
                        w[i] -= strength
        groups = 1
        if strength > 0.0:
            groups = _regions(n, strength, w, group, flow, level, size, queue, ways, edges)
        else:
            groups = 0
            for i in range(n):
                if group[i] == 0:
                    group[i], level[groups], size[groups] = groups, w[i], 1
                    groups += 1
        subtract_largest(level, groups)
        tau = threshold(level, size, groups)
        for i in range(n):
            if group[i] >= 0:
                target[i] = kind(max(level[group[i]] - tau, 0.0))


@kernel
def _grid_product_rows(first: int, last: int, p: Any, strengths: Any, width: int, v: Any, out: Any) -> None:
    """Compute J v of each grid: the mean of v over each connected group, less its mean over the support."""
    n = p.shape[1]
    kind = p.dtype.type
    ways, _ = _neighbours(n, width)
    queue, seen = np.empty(n, np.int32), np.ones(n + 1, np.bool_)
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
                for k in range(4):
                    j = ways[i, k]
                    if not seen[j] and source[j] == source[i]:
                        seen[j] = True
                        queue[tail] = j
                        tail += 1
            share = kind(part / tail)
            for k in range(tail):
                target[queue[k]] = share
