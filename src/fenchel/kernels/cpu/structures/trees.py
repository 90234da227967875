"""Loops over dependency trees: the best arborescence, and the best projective one."""

from __future__ import annotations

import numpy as np

from fenchel.kernels.cpu.compiler import kernel


@kernel
def _words(scores, present):  # type: ignore[no-untyped-def]
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


@kernel
def _best_head(score, d, nodes, alive, single):  # type: ignore[no-untyped-def]
    """The best head of a node among those alive; with a single root the root only if there is no other. −1: none."""
    best, most = -1, -np.inf
    for i in range(nodes):
        h = alive[i]
        if score[d, h] > most:
            best, most = h, score[d, h]
    if score[d, 0] > (-np.inf if best < 0 else np.inf if single else most):
        best = 0
    return best


@kernel
def _contract(score, arc, nodes, members, size, head, rep, alive):  # type: ignore[no-untyped-def]
    """Make one node, called ``rep``, of a cycle. Returns how many nodes are left.

    An arc into the cycle takes the place of the one inside it that ends at the same node; an arc out of it starts at
    the best of its nodes. Which arc an entry stands for, in ``arc``, goes along.
    """
    width = score.shape[1]
    for i in range(size):
        v = members[i]
        lost = score[v, head[v]]
        for h in range(width):
            score[v, h] -= lost
    for i in range(size):
        v = members[i]
        if v != rep:
            for h in range(width):
                better = score[v, h] > score[rep, h]
                score[rep, h] = score[v, h] if better else score[rep, h]
                arc[rep, h] = arc[v, h] if better else arc[rep, h]
    left = 0
    for i in range(nodes):
        d = alive[i]
        inside = False
        for j in range(size):
            inside = inside or members[j] == d
        if inside and d != rep:
            continue
        alive[left] = d
        left += 1
        if d == rep:
            continue
        for j in range(size):
            v = members[j]
            if score[d, v] > score[d, rep]:
                score[d, rep], arc[d, rep] = score[d, v], arc[d, v]
    for j in range(size):
        score[rep, members[j]] = -np.inf
    return left


@kernel
def _arborescence(score, nodes, single, arc, up, node, head, alive, mark, path, chosen, heads):  # type: ignore[no-untyped-def]
    """Chu-Liu-Edmonds in O(n²): follow best heads; contract a cycle to one node wherever the path closes.

    score[d, h] for nodes 0 (the root) to nodes − 1, −inf on the diagonal. heads[d] is the result; False if there is
    none. Only the root's arcs count how many roots there are, so that preferring every other head before the root, in
    each choice, gives the fewest roots, and among such trees the best.

    Every contraction gets a number from ``nodes`` on; ``up`` leads from a node or contraction to the one that holds it,
    and ``node`` from the place of a row in the matrix to what it stands for now.
    """
    total = nodes
    for d in range(nodes):
        up[d], node[d], mark[d] = -1, d, 0
        for h in range(nodes):
            arc[d, h] = d * nodes + h
    left = nodes - 1
    for i in range(left):
        alive[i] = i + 1
    mark[0] = 2  # 0: not seen, 1: on the path, 2: hangs on the root
    for start in range(1, nodes):
        if mark[start] != 0:
            continue
        at, length = start, 0
        while True:
            if mark[at] == 0:
                mark[at] = 1
                path[length] = at
                length += 1
                head[at] = _best_head(score, at, left, alive, single)
                if head[at] < 0:
                    return False
                chosen[node[at]] = arc[at, head[at]]
            following = head[at]
            if mark[following] == 2:
                break
            if mark[following] == 0:
                at = following
                continue
            first = length - 1
            while path[first] != following:
                first -= 1
            for i in range(first, length):
                up[node[path[i]]] = total
            left = _contract(score, arc, left, path[first:length], length - first, head, following, alive)
            for i in range(first, length):
                mark[path[i]] = 1  # never started from again
            mark[following] = 0
            node[following] = total
            up[total] = -1
            total += 1
            length = first
            at = following
        for i in range(length):
            mark[path[i]] = 2
    for c in range(total - 1, nodes - 1, -1):
        at = chosen[c] // nodes
        while up[at] != c:
            at = up[at]
        chosen[at] = chosen[c]
    for d in range(1, nodes):
        heads[d] = chosen[d] % nodes
    return True


@kernel
def best_trees(first, last, live, scores, heads, bonus, single):  # type: ignore[no-untyped-def]
    """The best tree of row b = live[i] of scores (R, N, N+1), [modifier, head], head 0 the root.

    heads (n, N) is −1 for words that have no head to choose, which are left out; bonus is −inf if there is no tree.
    """
    words = scores.shape[1]
    room = 2 * words + 2
    whole = np.empty((words + 1) * (words + 1))
    arcs = np.empty((words + 1) * (words + 1), np.int32)
    up, node, head, path = (
        np.empty(room, np.int32),
        np.empty(room, np.int32),
        np.empty(room, np.int32),
        np.empty(room, np.int32),
    )
    alive, chosen, found = np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.int32)
    mark = np.empty(room, np.uint8)
    present = np.empty(words, np.int32)
    for i in range(first, last):
        row = scores[live[i]]
        count = _words(row, present)
        heads[i] = -1
        bonus[i] = 0.0
        n = count + 1
        score, arc = whole[: n * n].reshape(n, n), arcs[: n * n].reshape(n, n)
        score[0] = -np.inf
        for d in range(count):
            m = present[d]
            score[d + 1, 0] = row[m, 0]
            for h in range(count):
                score[d + 1, h + 1] = row[m, present[h] + 1]
            score[d + 1, d + 1] = -np.inf
        if not _arborescence(score, n, single, arc, up, node, head, alive, mark, path, chosen, found):
            bonus[i] = -np.inf
            continue
        roots = 0
        for d in range(count):
            h = found[d + 1]
            roots += h == 0
            heads[i, present[d]] = 0 if h == 0 else present[h - 1] + 1
        if single and roots > 1:
            bonus[i] = -np.inf


@kernel
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


@kernel
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
        count = _words(row, present)
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
