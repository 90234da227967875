"""Tvmax of grids and its Jacobian product: the proximal operator of total variation on a grid, then sparsemax."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fenchel.kernels.cpu import vectors as vec
from fenchel.kernels.cpu.compiler import helper, kernel, strict_helper
from fenchel.kernels.cpu.maps.groups import (
    begin_row,
    finish_class_loss,
    loss_of_rows,
    map_rows,
    maximum_of,
    subtract_largest,
    threshold,
)
from fenchel.kernels.cpu.maps.simplex import as_rows, each, like
from fenchel.kernels.cpu.threads import over_rows

_HARD = 100  # operations per entry of a grid, as an estimate
_SIGNS = (1, -1, 1, -1)  # of the flow along an edge to a neighbour
_FEW = 64  # entries of which none is excluded
_STEPS = (16, 32, 64, 128)  # of the gradient method, before it is seen what they exclude
_LARGEST = 1e30  # strength with which they are tried, in single precision
_LOST = 1 << 30  # farther than any node
_TURNS = 4  # relabelled is a part of the nodes before distances are measured again
_NOTHING = -1e300  # the value of a group without mass
_ROUNDING = 64 * 2.2e-16  # an excess up to this, relative to the scores, is rounding error


def grid(z: Tensor, strength: float | Tensor, width: float) -> Tensor:
    """Compute tvmax of z (…, n), whose last dimension holds the rows of a grid of that width one after the other."""
    return map_rows(_grid_rows, z, strength, int(width), work=_HARD)


def grid_loss(
    z: Tensor, index: Tensor, residual: float, strength: float | Tensor, width: float
) -> tuple[Tensor, Tensor]:
    """The loss of classes, which are entries of z (…, n), for tvmax, and residual·(p − y)."""
    return loss_of_rows(_grid_rows, z, index, residual, strength, int(width), work=_HARD)


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
    nodes: Any, strength: float, slack: float, near: Any, excess: Any, flow: Any, far: Any, queue: Any, edges: Any
) -> None:
    """Compute a maximum flow from nodes with excess > 0 to nodes with excess < 0, within groups, at most λ per edge.

    By pushing and relabelling: measure the distance of each node to the nearest node with negative excess, then push
    excess to neighbours that are nearer, and put a node that has some left one farther than the nearest neighbour that
    can take it; after a while measure again. Afterwards ``far`` is _LOST where no such node can be reached.

    ``near`` are the neighbours of every node in its own group; in place of others it has the last element of ``far``.
    """
    size = near.shape[0]
    far[size] = _LOST + 1
    while True:
        tail = 0
        for a in range(nodes.size):
            i = nodes[a]
            far[i] = _LOST
            if excess[i] < -slack:
                far[i] = 0
                queue[tail] = i
                tail += 1
        head, stuck = 0, True
        while head < tail:
            j = queue[head]
            head += 1
            for k in range(4):
                i = near[j, k]
                if far[i] == _LOST and _SIGNS[k ^ 1] * flow[edges[j, k]] < strength:
                    far[i] = far[j] + 1
                    queue[tail] = i
                    tail += 1
                    stuck = stuck and excess[i] <= slack
        if stuck:
            return
        # From here on the queue is a ring of nodes with positive excess.
        first, length, turns = 0, 0, tail // _TURNS + 1
        for place in range(tail):
            i = queue[place]
            queue[length] = i
            length += 1 if excess[i] > slack else 0
        for place in range(length // 2):  # the farthest first
            queue[place], queue[length - 1 - place] = queue[length - 1 - place], queue[place]
        while length > 0 and turns > 0:
            i = queue[first]
            first = first + 1 if first + 1 < size else 0
            length -= 1
            while True:
                lowest, way, room = _LOST, 0, 0.0
                for k in range(4):
                    left = strength - _SIGNS[k] * flow[edges[i, k]]
                    nearer = far[near[i, k]] < lowest and left > 0.0
                    lowest = far[near[i, k]] if nearer else lowest
                    way = k if nearer else way
                    room = left if nearer else room
                if lowest >= far[i]:
                    break
                j, edge, sign = near[i, way], edges[i, way], _SIGNS[way]
                rests, part = excess[j] <= slack, min(excess[i], room)
                flow[edge] = flow[edge] + sign * part if part < room else sign * strength
                excess[i] -= part
                excess[j] += part
                if rests and excess[j] > slack:
                    last = first + length
                    queue[last if last < size else last - size] = j
                    length += 1
                if excess[i] == 0.0:
                    break
            if excess[i] > slack:
                turns -= 1
                far[i] = min(lowest + 1, _LOST)
                if lowest < _LOST:
                    last = first + length
                    queue[last if last < size else last - size] = i
                    length += 1


@strict_helper
def _descend(n: int, width: int, begin: int, end: int, work: Any) -> None:
    """Steps ``begin`` to ``end`` of the accelerated projected gradient method for the flow with the least ‖y‖.

    The flow along edges to the right and down is within ``most``; y = w less what flows away. ``ahead`` are the flows
    where the momentum leads. Entries stand from ``_margin(width)`` on, between zeros.
    """
    w, y, flows, ahead, most = work
    start = _margin(width)
    part = w.size
    for step in range(begin, end):
        momentum = w.dtype.type(step / (step + 3.0))
        for i in range(start, start + n, vec.lanes(w)):
            away = vec.load(ahead, i) - vec.load(ahead, i - 1)
            away += vec.load(ahead, part + i) - vec.load(ahead, part + i - width)
            vec.store(y, i, vec.load(w, i) - away)
        for i in range(start, start + n, vec.lanes(w)):
            here = vec.load(y, i)
            for k in range(2):
                at, further = k * part + i, i + (1 if k == 0 else width)
                limit = vec.load(most, at)
                flow = vec.load(ahead, at) + (here - vec.load(y, further)) * 0.125
                flow = vec.maximum(vec.minimum(flow, limit), 0.0 - limit)
                vec.store(ahead, at, flow + (flow - vec.load(flows, at)) * momentum)
                vec.store(flows, at, flow)


@strict_helper
def _margin(width: int) -> Any:
    return width + 16


@helper
def _exclude(
    n: int, width: int, count: int, strength: float, w: Any, group: Any, flow: Any, ways: Any, edges: Any, room: Any
) -> int:
    """Take entries out of a grid that have no mass, of ``count`` with group ≥ 0; returns how many are left.

    Any flow bounds y: what lies above a level can only be where w less the flow is above it, or where more could flow
    from there. Any set S gives a level below the threshold, (Σ w − λ·(edges that leave S) − 1)/|S|. A good flow and
    the set where its w is above its threshold make the two meet. ``w`` and ``flow`` are those of what is left.
    """
    work, y, sizes, queue, seen = room
    shifted, _, flows, ahead, most = work
    start, part = _margin(width), shifted.size
    limit = shifted.dtype.type(strength)
    if limit > strength:
        limit = np.nextafter(limit, shifted.dtype.type(0))
    shifted[:], flows[:], ahead[:], most[:] = 0, 0, 0, 0
    scale = strength
    for i in range(n):
        if group[i] >= 0:
            shifted[start + i] = w[i]
            scale = max(scale, abs(w[i]))
            for k in range(2):
                if group[ways[i, 2 * k]] >= 0:
                    most[k * part + start + i] = limit
    low, begin = -np.inf, 0
    for end in _STEPS:
        _descend(n, width, begin, end, work)
        begin = end
        for i in range(n):
            for k in range(2):
                along = flows[k * part + start + i]
                flow[k * n + i] = strength if along == limit else -strength if along == -limit else along
        size = 0
        for i in range(n):
            if group[i] >= 0:
                rest = w[i]
                for k in range(4):
                    if group[ways[i, k]] >= 0:
                        rest -= _SIGNS[k] * flow[edges[i, k]]
                y[size], sizes[size], queue[size] = rest, 1, i
                size += 1
        high = threshold(y, sizes, size)
        for i in range(n + 1):
            seen[i] = 0
        for a in range(size):
            seen[queue[a]] = 1 if y[a] > high else 0
        total, every, above = -1.0, -1.0 / size, 0
        for a in range(size):
            i = queue[a]
            every += w[i] / size
            if seen[i] == 1:
                above += 1
                total += w[i]
                for k in range(4):
                    if group[ways[i, k]] >= 0 and seen[ways[i, k]] == 0:
                        total -= strength
        low = max(low, max(total / max(above, 1), every))
        line = low - _ROUNDING * scale
        tail = 0
        for a in range(size):
            i = queue[a]
            seen[i] = 0
            if y[a] > line:
                seen[i] = 1
                queue[tail] = i
                tail += 1
        head = 0
        while head < tail:
            i = queue[head]
            head += 1
            for k in range(4):
                j = ways[i, k]
                if group[j] >= 0 and seen[j] == 0 and _SIGNS[k] * flow[edges[i, k]] < strength:
                    seen[j] = 1
                    queue[tail] = j
                    tail += 1
        if tail <= above + above // 8 or high - low < 1e-6 * scale:
            break
        if tail == size:  # one group, as soon as what is left of its differences can flow along any tree
            apart, largest = 0.0, 0.0
            for a in range(size):
                apart += abs(y[a] - (every + 1.0 / size))
            for k in range(2 * n):
                largest = max(largest, abs(flow[k]))
            if 0.5 * apart + largest <= strength:
                break
    for a in range(tail):
        i = queue[a]
        for k in range(4):
            if group[ways[i, k]] >= 0 and seen[ways[i, k]] == 0:
                w[i] -= strength
    for i in range(n):
        if group[i] >= 0 and seen[i] == 0:
            group[i] = -1
    return tail


@helper
def _gather(
    nodes: Any, strength: float, near: Any, excess: Any, flow: Any, parent: Any, queue: Any, edges: Any
) -> None:
    """Let the excess of nodes flow to the root of a tree that spans their group, as far as the edges have room."""
    parent[near.shape[0]] = 0
    for a in range(nodes.size):
        parent[nodes[a]] = -1
    tail = 0
    for a in range(nodes.size):
        if parent[nodes[a]] >= 0:
            continue
        head = tail
        queue[tail] = nodes[a]
        parent[nodes[a]] = 4
        tail += 1
        while head < tail:
            j = queue[head]
            head += 1
            for k in range(4):
                i = near[j, k]
                if parent[i] < 0:
                    parent[i] = k ^ 1
                    queue[tail] = i
                    tail += 1
    for place in range(tail - 1, -1, -1):
        i = queue[place]
        k = parent[i]
        if k < 4:
            edge, sign = edges[i, k], _SIGNS[k]
            before = sign * flow[edge]
            after = min(max(before + excess[i], -strength), strength)
            flow[edge] = sign * after
            excess[i] -= after - before
            excess[near[i, k]] += after - before


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
    excess, far = np.empty(n), np.empty(n + 1, np.int32)
    spill, rising, cut = np.zeros(n), np.empty(n, np.int32), np.empty(n)
    nodes, everything, near = np.empty(n, np.int32), np.empty(n, np.int32), np.empty((n, 4), np.int32)
    scale, count = strength, 0
    for i in range(n):
        if group[i] >= 0:
            scale = max(scale, abs(w[i]))
            nodes[count] = everything[count] = i
            count += 1
            for k in range(4):
                near[i, k] = ways[i, k] if group[ways[i, k]] >= 0 else n
    whole = count
    slack = _ROUNDING * scale
    groups, size[0] = 1, count
    while count > 0:
        some = nodes[:count]
        _levels(some, w, group, flow, size, ways, edges, excess, spill, level)
        tau = threshold(level, size, groups) - 4.0 * slack
        for g in range(groups):
            spill[g], rising[g], cut[g] = 0.0, -1, max(tau - level[g], 0.0)
        for a in range(count):
            excess[some[a]] -= cut[group[some[a]]]
        _gather(some, strength, near, excess, flow, far, queue, edges)
        _route(some, strength, slack, near, excess, flow, far, queue, edges)
        for a in range(count):
            i = some[a]
            spill[group[i]] += excess[i] if far[i] == _LOST else 0.0
        before = groups
        for g in range(before):
            if spill[g] > slack * (4 + size[g]):  # entries whose excess cannot flow form a group with a larger value
                rising[g] = groups
                size[groups] = 0
                groups += 1
        for a in range(count):
            i = some[a]
            g = group[i]
            if far[i] == _LOST and rising[g] >= 0:
                for k in range(4):
                    j = ways[i, k]
                    if group[j] == g and far[j] < _LOST:
                        flow[edges[i, k]] = _SIGNS[k] * strength
                        near[i, k] = near[j, k ^ 1] = n
        left = 0
        for a in range(count):
            i = some[a]
            g = group[i]
            if far[i] == _LOST and rising[g] >= 0:
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
def _grid_rows(
    first: int, last: int, x: Any, strengths: Any, width: int, out: Any, classes: Any, losses: Any, rate: Any
) -> None:
    """Compute tvmax of each grid of x (grids, n): groups of equal values among the candidates, then their threshold.

    If there are classes, compute their losses, and rate·(p − y) in place of p.
    """
    n = x.shape[1]
    kind = x.dtype.type
    ways, edges = _neighbours(n, width)
    w, flow, level, size = np.empty(n), np.empty(2 * n), np.empty(n), np.empty(n, np.int32)
    group, queue = np.full(n + 1, -1, np.int32), np.empty(n, np.int32)
    part = n + 2 * _margin(width)
    work = (
        np.empty(part, np.float32),
        np.zeros(part, np.float32),
        np.empty(2 * part, np.float32),
        np.empty(2 * part, np.float32),
        np.empty(2 * part, np.float32),
    )
    room = work, np.empty(n), np.empty(n, np.int32), queue, np.empty(n + 1, np.int8)
    for row in range(first, last):
        source, target = x[row], out[row]
        going, top, _ = begin_row(source, target)
        if not going:
            if classes.size > 0:
                finish_class_loss(row, source, target, target[0], top, 0.0, classes, losses, rate)
            continue
        strength = strengths[row]
        line = -(1.0 + 8.0 * strength)
        low = 0.0
        for i in range(n):
            w[i] = np.float64(source[i]) - top
            group[i] = 0 if w[i] > line else -1
            low = min(low, w[i] if w[i] > line else line if source[i] > -np.inf else 0.0)
        strength = min(strength, -n * low)
        candidates = 0
        for i in range(n):
            if group[i] == 0:
                candidates += 1
                for k in range(4):
                    j = ways[i, k]
                    if j < n and group[j] < 0 and source[j] > -np.inf:
                        w[i] -= strength
        groups = 1
        flow[:] = 0.0
        if 0.0 < strength < _LARGEST and candidates > _FEW:
            candidates = _exclude(n, width, candidates, strength, w, group, flow, ways, edges, room)
        if strength > 0.0:
            groups = _regions(n, strength, w, group, flow, level, size, queue, ways, edges)
        else:
            groups = 0
            for i in range(n):
                if group[i] == 0:
                    group[i], level[groups], size[groups] = groups, w[i], 1
                    groups += 1
        best = subtract_largest(level, groups)
        tau = threshold(level, size, groups)
        for i in range(n):
            if group[i] >= 0:
                target[i] = kind(max(level[group[i]] - tau, 0.0))
        if classes.size > 0:
            label, near = classes[row], 0
            for k in range(4):
                j = ways[max(label, 0), k]
                near += 1 if j < n and source[j] > -np.inf else 0
            maximum = maximum_of(level, size, groups, best, tau)
            finish_class_loss(row, source, target, maximum, top, strengths[row] * near, classes, losses, rate)


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
