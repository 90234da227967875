"""Flows along the edges of a layered graph (``layers.py``), and their decomposition into paths."""

from __future__ import annotations

import numpy as np

from fenchel.kernels.cpu.compiler import helper
from fenchel.kernels.cpu.structures.layers import gibbs

USED = 1e-9
"""Edges with a larger probability are taken to be used by optimal structures."""


@helper
def used_edges(theta, nu, eps, layers, graph, value, step, node, used):  # type: ignore[no-untyped-def]
    """The probability of edges at temperature ε, in the place of ``step``, and whether it is more than nothing."""
    parts, begin = graph[0], graph[1]
    gibbs(theta, nu, eps, layers, graph, value, step, node)
    for t in range(layers - 1):
        for w in range(parts.shape[1]):
            for e in range(begin[w], begin[w + 1]):
                step[t, e] *= node[t, w]
                used[t, e] = step[t, e] > USED


@helper
def _span(flow, used, ends, source, label, chosen):  # type: ignore[no-untyped-def]
    """Choose edges between two layers that form no cycles, and connect all that can be: those with more flow first."""
    width = label.size // 2
    for v in range(2 * width):
        label[v] = v
    chosen[:] = 0
    least = 0.1
    for _ in range(10):
        for e in range(ends.size):
            old, new = label[width + ends[e]], label[source[e]]
            if used[e] and flow[e] > least and old != new:
                for v in range(2 * width):
                    label[v] = new if label[v] == old else label[v]
                chosen[e] = 1
        least /= 10


@helper
def _balance(flow, ends, source, chosen, needed, degree, left):  # type: ignore[no-untyped-def]
    """Make the flow fit what has to flow through nodes, by the chosen edges: the only one of a node carries the rest.

    ``needed`` is what has to flow through nodes, ``degree`` and ``left`` are workspaces.
    """
    width = needed.size // 2
    degree[:] = 0
    edges = 0
    for e in range(ends.size):
        v, w = source[e], width + ends[e]
        left[e] = chosen[e]
        if chosen[e]:
            degree[v] += 1
            degree[w] += 1
            edges += 1
        else:
            needed[v] -= flow[e]
            needed[w] -= flow[e]
    while edges:
        for e in range(ends.size):
            v, w = source[e], width + ends[e]
            if left[e] and (degree[v] == 1 or degree[w] == 1):
                flow[e] = needed[v] if degree[v] == 1 else needed[w]
                needed[v] -= flow[e]
                needed[w] -= flow[e]
                degree[v] -= 1
                degree[w] -= 1
                left[e] = 0
                edges -= 1


@helper
def _cancel(new, flow, link, kinds, ends, source, chosen, queue, by):  # type: ignore[no-untyped-def]
    """Push flow around the cycle that an edge closes, in the direction that scores more, until an edge carries nothing.

    That one is not chosen any more; the new one is, if it is another. Marginals stay what they are.
    """
    width = queue.size // 2
    start, goal = source[new], width + ends[new]
    by[:] = -1  # the edge through which a node is reached from the start
    queue[0] = start
    head, length = 0, 1
    while by[goal] < 0:
        node = queue[head]
        head += 1
        for e in range(ends.size):
            if chosen[e] and (source[e] == node or width + ends[e] == node):
                other = width + ends[e] if source[e] == node else source[e]
                if other != start and by[other] < 0:
                    by[other] = e
                    queue[length] = other
                    length += 1
    # Along the cycle the flow rises and falls in turns.
    gain, sign, at = link[kinds[new]], -1.0, goal
    while at != start:
        gain += sign * link[kinds[by[at]]]
        sign = -sign
        at = source[by[at]] if at >= width else width + ends[by[at]]
    direction = 1.0 if gain >= 0.0 else -1.0
    out, amount = new, flow[new] if direction < 0.0 else np.inf
    sign, at = -direction, goal
    while at != start:
        if sign < 0.0 and flow[by[at]] < amount:
            out, amount = by[at], flow[by[at]]
        sign = -sign
        at = source[by[at]] if at >= width else width + ends[by[at]]
    flow[new] += direction * amount
    sign, at = -direction, goal
    while at != start:
        flow[by[at]] += sign * amount
        sign = -sign
        at = source[by[at]] if at >= width else width + ends[by[at]]
    chosen[new] = 1
    chosen[out] = 0
    flow[out] = 0.0


@helper
def tree_flow(mu, layers, graph, used, flow):  # type: ignore[no-untyped-def]
    """Make a flow along the used edges one that has the marginals μ, no cycles between layers, and scores no less.

    Only for graphs in which every node stands for a part of its own; returns False for others.
    """
    parts, begin, ends, kinds, bonus, _ = graph
    width = parts.shape[1]
    for t in range(layers):
        for w in range(width):
            if parts[t, w] < 0:
                return False
            for h in range(w):
                if parts[t, w] == parts[t, h]:
                    return False
    source, chosen, left = np.empty(ends.size, np.int64), np.empty(ends.size, np.uint8), np.empty(ends.size, np.uint8)
    label, queue, by = np.empty(2 * width, np.int64), np.empty(2 * width, np.int64), np.empty(2 * width, np.int64)
    degree, needed = np.empty(2 * width, np.int64), np.empty(2 * width)
    for w in range(width):
        for e in range(begin[w], begin[w + 1]):
            source[e] = w
    for t in range(layers - 1):
        for w in range(width):
            needed[w], needed[width + w] = mu[parts[t, w]], mu[parts[t + 1, w]]
        for e in range(ends.size):
            flow[t, e] = flow[t, e] if used[t, e] else 0.0
        _span(flow[t], used[t], ends, source, label, chosen)
        _balance(flow[t], ends, source, chosen, needed, degree, left)
        for e in range(ends.size):
            if used[t, e] and not chosen[e]:
                _cancel(e, flow[t], bonus[t if bonus.shape[0] > 1 else 0], kinds, ends, source, chosen, queue, by)
    return True


@helper
def widest_path(flow, layers, graph, value, choice, y):  # type: ignore[no-untyped-def]
    """The path whose smallest flow is largest, which is then taken out of the flow. y are its parts, up to −1.

    Returns that smallest flow, and the sum of the edges' scores. Repeated, it decomposes a flow into paths.
    """
    parts, begin, ends, kinds, bonus, last = graph
    width = parts.shape[1]
    for t in range(layers - 1, -1, -1):
        for w in range(width):
            best = np.inf if t == layers - 1 and last[w] else 0.0
            if t < layers - 1:
                for e in range(begin[w], begin[w + 1]):
                    through = min(flow[t, e], value[t + 1, ends[e]])
                    if through > best:
                        best, choice[t, w] = through, e
            value[t, w] = best
    at, total = 0, 0.0
    for w in range(width):
        at = w if value[0, w] > value[0, at] else at
    amount = value[0, at]
    y[:] = -1
    if amount == 0.0:
        return 0.0, 0.0
    for t in range(layers):
        y[t] = parts[t, at]
        if t < layers - 1:
            e = choice[t, at]
            flow[t, e] -= amount
            total += bonus[t if bonus.shape[0] > 1 else 0, kinds[e]]
            at = ends[e]
    return amount, total


@helper
def best_path(scores, layers, graph, used, value, choice, y):  # type: ignore[no-untyped-def]
    """The best path over the edges that are used. y are its parts, filled up with −1.

    Returns the sum of its edges' scores, −inf if there is no path.
    """
    parts, begin, ends, kinds, bonus, last = graph
    width = parts.shape[1]
    for t in range(layers - 1, -1, -1):
        link = bonus[min(t, bonus.shape[0] - 1)]
        for w in range(width):
            k = parts[t, w]
            best = 0.0 if t == layers - 1 and last[w] else -np.inf
            if t < layers - 1:
                for e in range(begin[w], begin[w + 1]):
                    total = link[kinds[e]] + value[t + 1, ends[e]] if used[t, e] else -np.inf
                    if total > best:
                        best, choice[t, w] = total, e
            value[t, w] = -np.inf if k == -2 else best + (scores[k] if k >= 0 else 0.0)
    at = 0
    for w in range(width):
        at = w if value[0, w] > value[0, at] else at
    y[:] = -1
    if value[0, at] == -np.inf:
        return -np.inf
    total, count = 0.0, 0
    for t in range(layers):
        if parts[t, at] >= 0:
            y[count] = parts[t, at]
            count += 1
        if t < layers - 1:
            e = choice[t, at]
            total += bonus[t if bonus.shape[0] > 1 else 0, kinds[e]]
            at = ends[e]
    return total
