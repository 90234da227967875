"""The whole search for active sets in compiled loops: oracle and step in one loop, row after row.

The best structure for the residual θ − μ is added to the active set while that improves the mixture; when it no longer
does, the row is done, and its gap certified. Rows for which no best structure is found are left to the structure's
oracle. The loop is written out for each kind of structure: a kernel that takes its oracle as an argument cannot be
cached.
"""

from __future__ import annotations

import numpy as np

from fenchel.kernels.cpu.compiler import kernel
from fenchel.kernels.cpu.structures.active import LIVE, SOLVE, accept_weights, include, row_of, step
from fenchel.kernels.cpu.structures.flows import best_path, tree_flow, used_edges, widest_path
from fenchel.kernels.cpu.structures.gram import workspace
from fenchel.kernels.cpu.structures.layers import count_layers
from fenchel.kernels.cpu.structures.subsets import best_sequence
from fenchel.kernels.cpu.structures.trees import HEAD, best_tree, tree_workspace, words_present

NOTHING = 1e-15
"""Flows up to this are rounding errors."""


@kernel
def explore_trees(  # type: ignore[no-untyped-def]
    first, last, live, thetas, starts, capacities, squares, members, counts, sizes, weights, solution, values, extra,
    matrices, inverses, mus, residuals, gap, floor, state, goal, tried, most, single,
):  # fmt: skip
    """Add trees to the active set of every live row until one does not improve, or ``tried`` is ``most``.

    Arrays as in ``active.advance``. A row whose active set is full stops: the caller enlarges it.
    """
    words = members.shape[1]
    width = words + 1
    (mark, u, v, r), y = workspace(capacities, thetas.shape[1]), np.empty(words, np.int32)
    arrays, present = tree_workspace(words), np.empty(words, np.int32)
    for i in range(first, last):
        b = live[i]
        scores, rest, mixture = thetas[b], residuals[b], mus[b]
        own, tally, p, x, q, h, matrix, inverse = row_of(
            b, starts, capacities, squares, members, counts, weights, solution, values, extra, matrices, inverses
        )
        sentence, head = rest.reshape(words, width), arrays[-1][HEAD]
        count = words_present(scores.reshape(words, width), present)
        while sizes[b] < capacities[b] and tried[b] < most:
            if not best_tree(sentence, present, count, single, arrays):
                break
            y[:] = -1
            for j in range(count):
                y[j] = present[j] * width + head[present[j] + 1]
            tried[b] += 1
            if not step(
                b, y, 0.0, scores, own, tally, p, x, q, h, matrix, inverse, mixture, rest, sizes, gap, floor, state,
                SOLVE, goal, mark, u, v, r, True,
            ):  # fmt: skip
                break


@kernel
def explore_sequences(  # type: ignore[no-untyped-def]
    first, last, live, thetas, starts, capacities, squares, members, counts, sizes, weights, solution, values, extra,
    matrices, inverses, mus, residuals, gap, floor, state, goal, tried, most, transition, budget,
):  # fmt: skip
    """As ``explore_trees``, with sequential subsets: of budget[n] positions in a row of which n are allowed."""
    length = thetas.shape[1]
    k = budget[length]
    (mark, u, v, r), y = workspace(capacities, length), np.empty(k, np.int32)
    off, on = np.empty((length, k + 2)), np.empty((length, k + 2))
    for i in range(first, last):
        b = live[i]
        scores, rest, mixture = thetas[b], residuals[b], mus[b]
        own, tally, p, x, q, h, matrix, inverse = row_of(
            b, starts, capacities, squares, members, counts, weights, solution, values, extra, matrices, inverses
        )
        between = transition[b if transition.shape[0] > 1 else 0]
        allowed = 0
        for t in range(length):
            allowed += scores[t] > -np.inf
        size = budget[allowed]
        while sizes[b] < capacities[b] and tried[b] < most:
            bonus = best_sequence(rest, between, size, off, on, y)
            if bonus == -np.inf:
                break
            tried[b] += 1
            if not step(
                b, y, bonus, scores, own, tally, p, x, q, h, matrix, inverse, mixture, rest, sizes, gap, floor, state,
                SOLVE, goal, mark, u, v, r, False,
            ):  # fmt: skip
                break


@kernel
def decompose(  # type: ignore[no-untyped-def]
    first, last, live, thetas, starts, capacities, squares, members, counts, sizes, weights, solution, values, extra,
    matrices, inverses, mus, residuals, gap, floor, state, parts, begin, ends, kinds, bonus, final, nus, limits, eps,
):  # fmt: skip
    """Replace the members of rows by paths through a layered graph whose mixture has the marginals limits[b].

    The paths use the edges that are used at temperature eps[b]: ``layers.anneal`` found nus[b], limits[b] and eps[b].
    Rows of graphs whose nodes are not parts, or with more paths than the capacity of their active set, get no members.
    """
    depth, width = parts.shape
    (mark, u, v, r), y = workspace(capacities, thetas.shape[1]), np.empty(depth, np.int32)
    value, node, choice = np.empty((depth, width)), np.empty((depth, width)), np.empty((depth, width), np.int64)
    flow, used = np.empty((depth, ends.size)), np.empty((depth, ends.size), np.uint8)
    for i in range(first, last):
        b = live[i]
        scores = thetas[b]
        own, tally, p, x, q, h, matrix, inverse = row_of(
            b, starts, capacities, squares, members, counts, weights, solution, values, extra, matrices, inverses
        )
        link, end = bonus[b if bonus.shape[0] > 1 else 0], final[b if final.shape[0] > 1 else 0]
        graph, layers = (parts, begin, ends, kinds, link, end), count_layers(scores, parts)
        for j in range(scores.size):
            mus[b, j], residuals[b, j] = 0.0, scores[j]
        sizes[b], state[b] = 0, LIVE
        used_edges(scores, nus[b], eps[b], layers, graph, value, flow, node, used)
        if layers < 2 or not tree_flow(limits[b], layers, graph, used, flow):
            continue
        size, independent = 0, True
        while independent:
            amount, score = widest_path(flow, layers, graph, value, choice, y)
            if amount <= NOTHING:
                break
            before = size
            if size < capacities[b]:
                size = include(y, score, amount, scores, own, tally, p, q, h, matrix, inverse, size, mark, u, v, r)
            independent = size > before
        if independent and size > 0:
            sizes[b] = size
            accept_weights(scores, own, tally, q, p, x, size, mus[b], residuals[b])


@kernel
def explore_paths(  # type: ignore[no-untyped-def]
    first, last, live, thetas, starts, capacities, squares, members, counts, sizes, weights, solution, values, extra,
    matrices, inverses, mus, residuals, gap, floor, state, goal, tried, most, parts, begin, ends, kinds, bonus, final,
    nus, eps,
):  # fmt: skip
    """As ``explore_trees``, with paths through a layered graph: over the edges that are used at temperature eps[b].

    ``layers.anneal`` found nus[b] and eps[b].
    """
    depth, width = parts.shape
    (mark, u, v, r), y = workspace(capacities, thetas.shape[1]), np.empty(depth, np.int32)
    value, node, choice = np.empty((depth, width)), np.empty((depth, width)), np.empty((depth, width), np.int64)
    chance, used = np.empty((depth, ends.size)), np.empty((depth, ends.size), np.uint8)
    for i in range(first, last):
        b = live[i]
        scores, rest, mixture = thetas[b], residuals[b], mus[b]
        own, tally, p, x, q, h, matrix, inverse = row_of(
            b, starts, capacities, squares, members, counts, weights, solution, values, extra, matrices, inverses
        )
        link, end = bonus[b if bonus.shape[0] > 1 else 0], final[b if final.shape[0] > 1 else 0]
        graph, layers = (parts, begin, ends, kinds, link, end), count_layers(scores, parts)
        used_edges(scores, nus[b], eps[b], layers, graph, value, chance, node, used)
        while sizes[b] < capacities[b] and tried[b] < most:
            score = best_path(rest, layers, graph, used, value, choice, y)
            tried[b] += 1
            if not step(
                b, y, score, scores, own, tally, p, x, q, h, matrix, inverse, mixture, rest, sizes, gap, floor, state,
                SOLVE, goal, mark, u, v, r, False,
            ):  # fmt: skip
                break
