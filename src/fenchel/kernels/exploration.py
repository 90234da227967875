"""Active sets that grow by themselves: search and step in one loop, row after row.

The best structure of what is left goes into the active set while that improves it; when it no longer does, the row is
done, and its gap certified. Rows for which no best structure is found are left as they are, to the structure's oracle.
"""

from __future__ import annotations

import numpy as np

from fenchel.kernels.active import SOLVE, step
from fenchel.kernels.compiler import inlined, kernel
from fenchel.kernels.gram import square
from fenchel.kernels.subsets import best_sequence


@inlined
def _best_head(score, v):  # type: ignore[no-untyped-def]
    """Where the largest score of row v stands; −1 if all are −inf. Rows are four long, or a multiple: a lane each."""
    a, b, c, d = score[v, 0], score[v, 1], score[v, 2], score[v, 3]
    i, j, k, m = 0, 1, 2, 3
    for h in range(4, score.shape[1], 4):
        e, f, g, o = score[v, h], score[v, h + 1], score[v, h + 2], score[v, h + 3]
        i = h if e > a else i
        j = h + 1 if f > b else j
        k = h + 2 if g > c else k
        m = h + 3 if o > d else m
        a = e if e > a else a
        b = f if f > b else b
        c = g if g > c else c
        d = o if o > d else d
    if b > a:
        a, i = b, j
    if d > c:
        c, k = d, m
    if c > a:
        a, i = c, k
    return i if a > -np.inf else -1


@inlined
def _join(score, worth, u, v, new):  # type: ignore[no-untyped-def]
    """The arcs into a node made of nodes u and v: the better of each, in place of the arcs that u and v have."""
    for h in range(score.shape[1]):
        a, b = score[u, h] - worth[u], score[v, h] - worth[v]
        score[new, h] = a if a > b else b


@kernel
def _best_tree(score, words, single, within, begin, inside, first, cycle, worth, mark, path, head):  # type: ignore[no-untyped-def]
    """Chu-Liu-Edmonds' algorithm, as ``trees._arborescence``, on rows alone. False if there is no tree.

    Row v of ``score`` are the arcs into node v, by the word that is their head, 0 the root; −inf where there is none.
    Nodes from words + 1 on are cycles that became one: of the nodes in ``cycle`` from first[v] to first[v + 1].
    The words of node v are those ``inside`` from begin[v] to begin[v + 1]; ``within`` tells the node of a word.
    head[w] is the head of a word, −1 for one that is not in the sentence, which has no arcs at all.
    """
    total = words + 1
    for w in range(total):
        within[w], begin[w], inside[w] = w, w, w
        mark[w] = 0  # not seen; 1: on the path, 2: hangs on the root
    mark[0] = 2
    begin[total], first[total] = total, 0
    for start in range(1, words + 1):
        at, length = within[start], 0
        if mark[at] != 0:
            continue
        while True:
            if mark[at] == 0:
                root = score[at, 0]
                if single:  # a word hangs on it only if there is no other head
                    score[at, 0] = -np.inf
                h = _best_head(score, at)
                score[at, 0] = root
                if h < 0 and root > -np.inf:
                    h = 0
                head[at] = h
                if h < 0:
                    if at == start:
                        break  # not in the sentence
                    return False
                worth[at], mark[at], path[length] = score[at, h], 1, at
                length += 1
            at = within[head[at]]
            if mark[at] == 2:
                break
            if mark[at] == 0:
                continue
            # The path closes: the cycle becomes a node.
            room, nodes = begin[total], first[total]
            length -= 1
            u = v = path[length]
            worth[total] = 0.0
            while True:
                cycle[nodes] = v
                nodes += 1
                for j in range(begin[v], begin[v + 1]):
                    within[inside[j]] = total
                    inside[room] = inside[j]
                    room += 1
                if v == at:
                    break
                length -= 1
                v = path[length]
                _join(score, worth, u, v, total)
                u = total
            for j in range(begin[total], room):
                score[total, inside[j]] = -np.inf
            at, mark[total] = total, 0
            total += 1
            begin[total], first[total] = room, nodes
        for i in range(length):
            mark[path[i]] = 2
    for c in range(total - 1, words, -1):
        h, entered, most = head[c], -1, -np.inf
        for i in range(first[c], first[c + 1]):
            v = cycle[i]
            if score[v, h] - worth[v] > most:
                entered, most = v, score[v, h] - worth[v]
        head[entered] = h
    return True


@kernel
def explore_trees(  # type: ignore[no-untyped-def]
    first, last, live, thetas, starts, rooms, squares, members, counts, sizes, weights, solution, values, extra,
    matrices, inverses, mus, residuals, gap, floor, state, goal, tried, most, single,
):  # fmt: skip
    """Trees for every live row until one does not improve, or ``tried`` is ``most``.

    Rows as ``active.advance`` has them. A row whose active set is full waits for a larger one.
    """
    parts, room = thetas.shape[1], rooms.max() + 2
    words = int(np.sqrt(parts))
    width, nodes = words + 1, 2 * words + 2
    mark, y = np.zeros(parts, np.uint8), np.empty(words, np.int32)
    u, v, r = np.empty(room), np.empty(room), np.empty(room)
    score = np.full((nodes, (width + 3) // 4 * 4), -np.inf)
    within, begin, inside = np.empty(width, np.int64), np.empty(nodes + 1, np.int64), np.empty(nodes * width, np.int64)
    start, cycle, worth = np.empty(nodes + 1, np.int64), np.empty(nodes, np.int64), np.empty(nodes)
    seen, path, head = np.empty(nodes, np.int64), np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    absent = np.empty(words, np.int64)
    for i in range(first, last):
        b = live[i]
        scores, rest, at = thetas[b], residuals[b], starts[b]
        own, tally, p, x = members[at:], counts[at:], weights[at:], solution[at:]
        q, h, mixture = values[at:], extra[at:], mus[b]
        matrix, inverse = square(matrices, squares[b], rooms[b]), square(inverses, squares[b], rooms[b])
        missing = 0
        for m in range(words):
            there = False
            for a in range(m * width, (m + 1) * width):
                there = there or scores[a] > -np.inf
            if not there:
                absent[missing] = m + 1
                missing += 1
        while sizes[b] < rooms[b] and tried[b] < most:
            for m in range(words):
                for a in range(width):
                    score[m + 1, a] = rest[m * width + a]
                for j in range(missing):  # nobody hangs on a word that is not in the sentence
                    score[m + 1, absent[j]] = -np.inf
            if not _best_tree(score, words, single, within, begin, inside, start, cycle, worth, seen, path, head):
                break
            y[:] = -1
            length, roots = 0, 0
            for w in range(1, width):
                if head[w] >= 0:
                    y[length] = (w - 1) * width + head[w]
                    roots += head[w] == 0
                    length += 1
            if single and roots > 1:
                break
            tried[b] += 1
            if not step(
                b, y, 0.0, scores, own, tally, p, x, q, h, matrix, inverse, mixture, rest, sizes, gap, floor, state,
                SOLVE, goal, mark, u, v, r, True,
            ):  # fmt: skip
                break


@kernel
def explore_sequences(  # type: ignore[no-untyped-def]
    first, last, live, thetas, starts, rooms, squares, members, counts, sizes, weights, solution, values, extra,
    matrices, inverses, mus, residuals, gap, floor, state, goal, tried, most, transition, budget,
):  # fmt: skip
    """As ``explore_trees``, with sequential subsets: of budget[n] positions in a row of which n are allowed."""
    length, room = thetas.shape[1], rooms.max() + 2
    k = budget[length]
    mark, y = np.zeros(length, np.uint8), np.empty(k, np.int32)
    u, v, r = np.empty(room), np.empty(room), np.empty(room)
    off, on = np.empty((length, k + 2)), np.empty((length, k + 2))
    for i in range(first, last):
        b = live[i]
        scores, rest, at = thetas[b], residuals[b], starts[b]
        own, tally, p, x = members[at:], counts[at:], weights[at:], solution[at:]
        q, h, mixture = values[at:], extra[at:], mus[b]
        matrix, inverse = square(matrices, squares[b], rooms[b]), square(inverses, squares[b], rooms[b])
        between = transition[b if transition.shape[0] > 1 else 0]
        allowed = 0
        for t in range(length):
            allowed += scores[t] > -np.inf
        size = budget[allowed]
        while sizes[b] < rooms[b] and tried[b] < most:
            bonus = best_sequence(rest, between, size, off, on, y)
            if bonus == -np.inf:
                break
            tried[b] += 1
            if not step(
                b, y, bonus, scores, own, tally, p, x, q, h, matrix, inverse, mixture, rest, sizes, gap, floor, state,
                SOLVE, goal, mark, u, v, r, False,
            ):  # fmt: skip
                break
