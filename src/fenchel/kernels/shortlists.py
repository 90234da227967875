"""Active sets of dependency trees, grown from a short list of arcs.

Few arcs of a sentence have a chance: those that lose little against the best head of their word, and those of trees
that are members already. The best tree of these alone takes a tenth of the time, and one after the other goes into the
active set while that improves it. What comes out is a good start, not yet a proof: the best of all trees gives that.
"""

from __future__ import annotations

import numpy as np

from fenchel.kernels.active import LIVE, SOLVE, step
from fenchel.kernels.compiler import kernel

LOSS = 1.5
"""How much an arc of the short list may lose against the best: sparsemax of a word's heads alone would allow 1."""


@kernel
def _shortlist(theta, words, members, counts, size, mark, top, begin, end, arcs, owner, listed):  # type: ignore[no-untyped-def]
    """The arcs of each word w, counted from 1, at places begin[w] to end[w]; the word and the head of each.

    Words that have no head to choose are not in the sentence: they have no arcs, nor has anybody to them.
    """
    width = words + 1
    for k in range(size):
        for i in range(counts[k]):
            mark[members[k, i]] = 1
    top[0] = 0.0
    for m in range(words):
        best = -np.inf
        for a in range(m * width, m * width + width):
            best = max(best, theta[a])
        top[m + 1] = best
    total = 0
    for w in range(1, width):
        begin[w] = total
        least = top[w] - LOSS
        for h in range(width):
            a = (w - 1) * width + h
            if mark[a] or (theta[a] >= least and least > -np.inf and top[h] > -np.inf):
                arcs[total], owner[total], listed[total] = a, w, h
                total += 1
        end[w] = total
    for k in range(size):
        for i in range(counts[k]):
            mark[members[k, i]] = 0


@kernel
def _contract(cycle, size, node, worth, begin, end, heads, score, place, within, slot, total):  # type: ignore[no-untyped-def]
    """The list of a new node, from ``total`` on, out of those of a cycle. Returns its end.

    Arcs into a cycle take the place of the one inside that ends at the same node, so that they are worth less by what
    that was. Of several from one word, the best is kept; ``slot``, all −1, tells where.
    """
    start = total
    for i in range(size):
        v = cycle[i]
        less = worth[v]
        for a in range(begin[v], end[v]):
            h = heads[a]
            if within[h] == node:
                continue
            value = score[a] - less
            at = slot[h]
            if at < 0:
                slot[h], heads[total], score[total], place[total] = total, h, value, place[a]
                total += 1
            elif value > score[at]:
                score[at], place[at] = value, place[a]
    for a in range(start, total):
        slot[heads[a]] = -1
    return total


@kernel
def _best_tree(  # type: ignore[no-untyped-def]
    words,
    begin,
    end,
    heads,
    score,
    place,
    owner,
    within,
    first,
    final,
    following,
    into,
    worth,
    up,
    mark,
    path,
    slot,
    chosen,
):
    """Chu-Liu-Edmonds' algorithm on lists of arcs, as ``trees._arborescence`` does it on a matrix. False if there is no
    tree. chosen[m + 1] is the arc of word m, as its place in the list to begin with.

    Node v has the list from begin[v] to end[v], with the head and the score of each arc, and where it stood at first.
    A node is a set of words, from ``first`` over ``following`` to ``final``; ``within`` tells the node of a word.
    """
    for w in range(words + 1):
        within[w], first[w], final[w], following[w], up[w] = w, w, w, 0, 0
        mark[w] = 0  # not seen; 1: on the path, 2: hangs on the root
    mark[0] = 2
    total, room = words + 1, end[words]
    for start in range(1, words + 1):
        at, length = within[start], 0
        if mark[at] != 0 or begin[start] == end[start]:
            continue
        while True:
            if mark[at] == 0:
                mark[at] = 1
                path[length] = at
                length += 1
                best, most = -1, -np.inf
                for a in range(begin[at], end[at]):
                    better = score[a] > most
                    most = score[a] if better else most
                    best = a if better else best
                if best < 0:
                    return False
                into[at], worth[at], chosen[at] = heads[best], most, place[best]
            at = within[into[at]]
            if mark[at] == 2:
                break
            if mark[at] == 0:
                continue
            # The path closes: the cycle becomes a node.
            top = length
            while path[length - 1] != at:
                length -= 1
            length -= 1
            last = 0
            for i in range(length, top):
                v = path[i]
                up[v] = total
                w = first[v]
                while w > 0:
                    within[w] = total
                    w = following[w]
                if last > 0:
                    following[last] = first[v]
                last = final[v]
            first[total], final[total], up[total], mark[total] = first[at], last, 0, 0
            begin[total] = room
            room = _contract(
                path[length:top], top - length, total, worth, begin, end, heads, score, place, within, slot, room
            )
            end[total] = room
            at = total
            total += 1
        for i in range(length):
            mark[path[i]] = 2
    for c in range(total - 1, words, -1):
        a = chosen[c]
        at = owner[a]
        while up[at] != c:
            at = up[at]
        chosen[at] = a
    return True


@kernel
def explore_trees(  # type: ignore[no-untyped-def]
    first,
    last,
    live,
    theta,
    members,
    counts,
    sizes,
    weights,
    solution,
    values,
    extra,
    inverse,
    mu,
    residual,
    gap,
    state,
    goal,
    tried,
    most,
    single,
):
    """Offer the best trees of the short list to every live row until one does not improve, or ``tried`` is ``most``.

    Rows as ``active.advance`` has them. A row whose active set is full waits for a larger one.
    """
    parts, full = theta.shape[1], weights.shape[1]
    words = int(np.sqrt(parts))
    nodes = 2 * words + 2
    room = parts + nodes * (words + 1)
    mark, y = np.zeros(parts, np.uint8), np.empty(words, np.int32)
    u, v = np.empty(full + 2), np.empty(full + 2)
    begin, end, worth = np.zeros(nodes, np.int32), np.zeros(nodes, np.int32), np.empty(nodes)
    arcs, owner, listed = np.empty(parts, np.int32), np.empty(parts, np.int32), np.empty(parts, np.int32)
    heads, place, score, top = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room), np.empty(words + 1)
    within, following, slot = (
        np.empty(words + 1, np.int32),
        np.empty(words + 1, np.int32),
        np.full(words + 1, -1, np.int32),
    )
    starts, finals, up = np.empty(nodes, np.int32), np.empty(nodes, np.int32), np.empty(nodes, np.int32)
    into, chosen, path = np.empty(nodes, np.int32), np.empty(nodes, np.int32), np.empty(nodes, np.int32)
    seen = np.empty(nodes, np.uint8)
    for i in range(first, last):
        b = live[i]
        scores, own, tally, p, x = theta[b], members[b], counts[b], weights[b], solution[b]
        q, h, minv, mixture, rest = values[b], extra[b], inverse[b], mu[b], residual[b]
        _shortlist(scores, words, own, tally, sizes[b], mark, top, begin, end, arcs, owner, listed)
        count = end[words]
        while sizes[b] < full and tried[b] < most:
            low, high = np.inf, -np.inf
            for a in range(count):
                score[a], heads[a], place[a] = rest[arcs[a]], listed[a], a
                low, high = min(low, score[a]), max(high, score[a])
            if single:  # no sum of other arcs makes up for a second root
                for a in range(count):
                    score[a] -= (words + 1) * (high - low) if heads[a] == 0 else 0.0
            if not _best_tree(
                words,
                begin,
                end,
                heads,
                score,
                place,
                owner,
                within,
                starts,
                finals,
                following,
                into,
                worth,
                up,
                seen,
                path,
                slot,
                chosen,
            ):
                break
            y[:] = -1
            length, roots = 0, 0
            for w in range(1, words + 1):
                if begin[w] < end[w]:
                    y[length] = arcs[chosen[w]]
                    roots += listed[chosen[w]] == 0
                    length += 1
            if single and roots > 1:
                break
            tried[b] += 1
            if not step(
                b,
                y,
                0.0,
                scores,
                own,
                tally,
                p,
                x,
                q,
                h,
                minv,
                mixture,
                rest,
                sizes,
                gap,
                state,
                SOLVE,
                goal,
                mark,
                u,
                v,
            ):
                state[b] = LIVE  # of the short list alone it is the best
                break
