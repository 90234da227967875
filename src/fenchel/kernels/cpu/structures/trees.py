"""Loops over dependency trees: the best arborescence, and the best projective one."""

from __future__ import annotations

import numpy as np

from fenchel.kernels.cpu.compiler import helper, kernel

HEAD = 0
"""Where the heads of words are in the integers of a workspace."""


@helper
def words_present(scores, present):  # type: ignore[no-untyped-def]
    """The words of a sentence: those with a head to choose. Returns how many."""
    count = 0
    for m in range(scores.shape[0]):
        some = False
        for h in range(scores.shape[1]):
            some = some or (h != m + 1 and scores[m, h] > -np.inf)
        if some:
            present[count] = m
            count += 1
    return count


@helper
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


@helper
def _join(score, worth, u, v, new):  # type: ignore[no-untyped-def]
    """The arcs into a node made of nodes u and v: the better of each, in place of the arcs that u and v have."""
    for h in range(score.shape[1]):
        a, b = score[u, h] - worth[u], score[v, h] - worth[v]
        score[new, h] = a if a > b else b


@helper
def _contract_cycles(score, worth, inside, index, words, single):  # type: ignore[no-untyped-def]
    """Chu-Liu-Edmonds' algorithm in O(N²): follow best heads; where the path closes, the cycle becomes one node.

    Row v of ``score`` are the arcs into node v, by the word that is their head, 0 the root; −inf where there is none.
    Nodes from words + 1 on are cycles that became one: of the nodes in ``cycle`` from first[v] to first[v + 1].
    The words of node v are those ``inside`` from begin[v] to begin[v + 1]; ``within`` tells the node of a word.
    head[w] is the best head of word w, −1 if it has no arcs at all. Returns False if there is no tree.

    With a single root, each choice prefers every other head to the root. Only arcs of the root count how many roots
    there are, so this gives the fewest roots, and the best tree among those.
    """
    head, within, begin, first, cycle, mark, path = (
        index[HEAD], index[1], index[2], index[3], index[4], index[5], index[6],
    )  # fmt: skip
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
                        break  # a word without arcs
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


@helper
def tree_workspace(words):  # type: ignore[no-untyped-def]
    """Arrays that ``best_tree`` works in, for sentences of so many words."""
    width, nodes = words + 1, 2 * words + 2
    score = np.empty((nodes, (width + 3) // 4 * 4))
    for v in range(nodes):
        for h in range(width, score.shape[1]):
            score[v, h] = -np.inf
    return score, np.empty(nodes), np.empty(nodes * width, np.int64), np.empty((7, nodes + 1), np.int64)


@helper
def best_tree(scores, present, count, single, workspace):  # type: ignore[no-untyped-def]
    """The heads of the best tree for scores (N, N + 1) over the words that are present. False if there is no tree.

    Words are numbered from 1; the head of word w is left at [HEAD, w] of the workspace's integers; −1 if it is absent.
    """
    words, width = scores.shape
    score, worth, inside, index = workspace
    head = index[HEAD]
    for m in range(words):
        for h in range(width):
            score[m + 1, h] = scores[m, h]
        score[m + 1, m + 1] = -np.inf
    if count < words:
        following = 0
        for m in range(words):
            if following < count and present[following] == m:
                following += 1
                continue
            for d in range(1, width):  # nothing hangs on a word that is absent
                score[d, m + 1] = -np.inf
    if not _contract_cycles(score, worth, inside, index, words, single):
        return False
    roots = 0
    for i in range(count):
        if head[present[i] + 1] < 0:
            return False
        roots += head[present[i] + 1] == 0
    return not (single and roots > 1)


@kernel
def best_trees(first, last, live, scores, heads, bonus, single):  # type: ignore[no-untyped-def]
    """The best tree of row b = live[i] of scores (R, N, N+1), [modifier, head], head 0 the root.

    heads (n, N) is −1 for words that have no head to choose, which are left out; bonus is −inf if there is no tree.
    """
    words = scores.shape[1]
    workspace, present = tree_workspace(words), np.empty(words, np.int32)
    for i in range(first, last):
        row = scores[live[i]]
        found = best_tree(row, present, words_present(row, present), single, workspace)
        bonus[i] = 0.0 if found else -np.inf
        for m in range(words):
            heads[i, m] = workspace[-1][HEAD, m + 1] if found else -1


@helper
def _spans(score, n, closed_l, closed_r, open_l, open_r, split_l, split_r, cut):  # type: ignore[no-untyped-def]
    """Eisner's recursion over spans of nodes 0 … n−1, [d, h]: heads at the left end (…_r) or at the right end (…_l)."""
    for s in range(n):
        closed_l[s, s] = 0.0
        closed_r[s, s] = 0.0
    for width in range(1, n):
        for s in range(n - width):
            t = s + width
            best, at = -np.inf, s
            for r in range(s, t):
                value = closed_r[s, r] + closed_l[r + 1, t]
                if value > best:
                    best, at = value, r
            cut[s, t] = at
            open_l[s, t] = best + score[s, t]
            open_r[s, t] = best + score[t, s]
            best, at = -np.inf, s
            for r in range(s, t):
                value = closed_l[s, r] + open_l[r, t]
                if value > best:
                    best, at = value, r
            closed_l[s, t], split_l[s, t] = best, at
            best, at = -np.inf, t
            for r in range(s + 1, t + 1):
                value = open_r[s, r] + closed_r[r, t]
                if value > best:
                    best, at = value, r
            closed_r[s, t], split_r[s, t] = best, at


@helper
def _unfold(s, t, kind, split_l, split_r, cut, stack, found):  # type: ignore[no-untyped-def]
    """Read the heads of a span off the tables. Kinds: 0 closed left, 1 closed right, 2 open left, 3 open right."""
    stack[0, 0], stack[0, 1], stack[0, 2] = s, t, kind
    depth = 1
    while depth:
        depth -= 1
        s, t, kind = stack[depth, 0], stack[depth, 1], stack[depth, 2]
        if s == t:
            continue
        if kind == 0:
            r = split_l[s, t]
            stack[depth, 0], stack[depth, 1], stack[depth, 2] = s, r, 0
            stack[depth + 1, 0], stack[depth + 1, 1], stack[depth + 1, 2] = r, t, 2
        elif kind == 1:
            r = split_r[s, t]
            stack[depth, 0], stack[depth, 1], stack[depth, 2] = s, r, 3
            stack[depth + 1, 0], stack[depth + 1, 1], stack[depth + 1, 2] = r, t, 1
        else:
            r = cut[s, t]
            if kind == 2:
                found[s] = t
            else:
                found[t] = s
            stack[depth, 0], stack[depth, 1], stack[depth, 2] = s, r, 1
            stack[depth + 1, 0], stack[depth + 1, 1], stack[depth + 1, 2] = r + 1, t, 0
        depth += 2


@kernel
def best_projective(first, last, live, scores, heads, bonus, single):  # type: ignore[no-untyped-def]
    """As ``best_trees`` among trees whose arcs do not cross, with the root in front: Eisner's algorithm, O(N³)."""
    words = scores.shape[1]
    n = words + 1
    score = np.empty((n, n))
    closed_l, closed_r, open_l, open_r = np.empty((n, n)), np.empty((n, n)), np.empty((n, n)), np.empty((n, n))
    split_l, split_r, cut = np.empty((n, n), np.int32), np.empty((n, n), np.int32), np.empty((n, n), np.int32)
    stack = np.empty((3 * n + 3, 3), np.int32)
    present, found = np.empty(words, np.int32), np.empty(n, np.int32)
    for i in range(first, last):
        row = scores[live[i]]
        count = words_present(row, present)
        heads[i] = -1
        bonus[i] = 0.0
        front = 0 if single else 1  # where words begin: with a single root, the root is not a node but a choice
        if not single:
            score[0] = -np.inf
        for d in range(count):
            m = present[d]
            if not single:
                score[d + 1, 0] = row[m, 0]
            for h in range(count):
                score[d + front, h + front] = row[m, present[h] + 1] if h != d else -np.inf
        nodes = count + front
        _spans(score, nodes, closed_l, closed_r, open_l, open_r, split_l, split_r, cut)
        top, best = -1, -np.inf
        if single:
            for r in range(count):
                value = closed_l[0, r] + closed_r[r, count - 1] + row[present[r], 0]
                if value > best:
                    top, best = r, value
        else:
            best = closed_r[0, nodes - 1]
        if not best > -np.inf:
            bonus[i] = -np.inf
            continue
        if single:
            found[top] = -1
            _unfold(0, top, 0, split_l, split_r, cut, stack, found)
            _unfold(top, count - 1, 1, split_l, split_r, cut, stack, found)
        else:
            _unfold(0, nodes - 1, 1, split_l, split_r, cut, stack, found)
        for d in range(count):
            h = found[d + front] - front
            heads[i, present[d]] = 0 if h < 0 else present[h] + 1
