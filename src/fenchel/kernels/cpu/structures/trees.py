"""The highest-scoring dependency tree of a sentence: Chu-Liu-Edmonds' algorithm, and Eisner's for projective trees."""

from __future__ import annotations

import numpy as np

from fenchel.kernels.cpu.compiler import helper, kernel
from fenchel.kernels.cpu.structures.rows import LANES, copy, largest, merge

HEAD = 0
"""Row of a workspace's integers that holds the heads of the words."""


@helper
def words_present(scores, present):  # type: ignore[no-untyped-def]
    """Write the words that have at least one possible head to ``present``; return how many there are."""
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
def _contract_cycles(score, best, inside, index, words, single):  # type: ignore[no-untyped-def]
    """Chu-Liu-Edmonds' algorithm in O(N²): follow best heads, and contract every cycle that appears to one node.

    Row v of ``score`` holds the scores of the arcs into node v, one per word that can be the head (0 is the root); −inf
    if there is no such arc. Nodes 1 to ``words`` are words. Later nodes are contracted cycles: node v replaces nodes
    cycle[first[v]], …, cycle[first[v + 1] − 1], and contains the words inside[begin[v]], …, inside[begin[v + 1] − 1].
    within[w] is the outermost node that contains word w. best[v] is the score of the arc that node v has chosen. The
    result, head[w], is the head of word w in the best tree, −1 if no arc leads to w. At first it is the best head of
    each word, unless ``single``. Returns False if there is no tree.

    With ``single``, a node chooses the root only if it has no other head. The arcs from the root are the roots of the
    tree, so this finds the smallest number of roots first, and then the best tree with that number.
    """
    head, within, begin, first, cycle, mark, path = (
        index[HEAD], index[1], index[2], index[3], index[4], index[5], index[6],
    )  # fmt: skip
    total, width = words + 1, score.shape[1]
    for w in range(total):
        within[w], begin[w], inside[w] = w, w, w
        mark[w] = 0  # not visited; 1: on the current path, 2: connected to the root
    mark[0] = 2
    begin[total], first[total] = total, 0
    for start in range(1, words + 1):
        at, length = within[start], 0
        if mark[at] != 0:
            continue
        while True:
            if mark[at] == 0:
                if at > words or single:
                    root = score[at, 0]
                    if single:  # the root is chosen only if there is no other head
                        score[at, 0] = -np.inf
                    h = largest(score, at * width, width)
                    score[at, 0] = root
                    if h < 0 and root > -np.inf:
                        h = 0
                    head[at] = h
                else:
                    h = head[at]
                if h < 0:
                    if at == start:
                        break  # no arc leads to this word
                    return False
                best[at], mark[at], path[length] = score[at, h], 1, at
                length += 1
            at = within[head[at]]
            if mark[at] == 2:
                break
            if mark[at] == 0:
                continue
            # The path has come back to one of its nodes: contract the cycle.
            room, nodes = begin[total], first[total]
            length -= 1
            u = v = path[length]
            best[total] = 0.0
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
                # Of the two arcs from each head the better one.
                merge(score, u * width, best[u], v * width, best[v], total * width, width)
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
            if score[v, h] - best[v] > most:
                entered, most = v, score[v, h] - best[v]
        head[entered] = h
    return True


@helper
def tree_workspace(words):  # type: ignore[no-untyped-def]
    """Temporary arrays of ``best_tree`` for sentences of ``words`` words."""
    width, nodes = words + 1, 2 * words + 2
    score = np.empty((nodes, (width + LANES - 1) // LANES * LANES))
    return score, np.empty(nodes), np.empty(nodes * width, np.int64), np.empty((7, nodes + 1), np.int64)


@helper
def best_tree(scores, present, count, single, workspace):  # type: ignore[no-untyped-def]
    """Find the best tree for scores (N, N + 1) over the words that are present; return False if there is no tree.

    Words are numbered from 1. The head of word w is written to [HEAD, w] of the workspace's integers, or −1.
    """
    words, width = scores.shape
    score, best, inside, index = workspace
    head = index[HEAD]
    filled = score.shape[1]
    for m in range(words):
        copy(scores, m * width, width, score, (m + 1) * filled)
        score[m + 1, m + 1] = -np.inf
    if count < words:
        following = 0
        for m in range(words):
            if following < count and present[following] == m:
                following += 1
                continue
            for d in range(1, width):  # an absent word is the head of no other
                score[d, m + 1] = -np.inf
    if not single:  # one after the other: the walk along heads would wait for each
        for w in range(1, words + 1):
            head[w] = largest(score, w * filled, filled)
    if not _contract_cycles(score, best, inside, index, words, single):
        return False
    roots = 0
    for i in range(count):
        if head[present[i] + 1] < 0:
            return False
        roots += head[present[i] + 1] == 0
    return not (single and roots > 1)


@kernel
def best_trees(first, last, live, scores, heads, bonus, single):  # type: ignore[no-untyped-def]
    """The best tree of each row live[i] of scores (R, N, N+1), [modifier, head], where head 0 is the root.

    Writes heads (n, N), −1 for words without a possible head, which are left out of the tree, and bonus (n,), −inf if
    there is no tree and else 0.
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
def _fill_tables(score, n, closed_l, closed_r, open_l, open_r, split_l, split_r, cut):  # type: ignore[no-untyped-def]
    """Fill the tables of Eisner's algorithm over nodes 0, …, n − 1, for scores [modifier, head].

    A span s … t has its head at its left end s (tables …_r) or at its right end t (tables …_l). An open span contains
    the arc between its ends, a closed one any arcs inside it. The integer tables hold the best split points.
    """
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
def _read_heads(s, t, kind, split_l, split_r, cut, stack, found):  # type: ignore[no-untyped-def]
    """Write the heads of the words in span s … t to ``found``, from the tables of split points.

    Kinds of spans: 0 is closed_l, 1 is closed_r, 2 is open_l, 3 is open_r.
    """
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
    """``best_trees`` among projective trees, with the root before the first word: Eisner's algorithm, O(N³) time."""
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
        first_word = 0 if single else 1  # number of the first word: with a single root, the root is not a node
        if not single:
            score[0] = -np.inf
        for d in range(count):
            m = present[d]
            if not single:
                score[d + 1, 0] = row[m, 0]
            for h in range(count):
                score[d + first_word, h + first_word] = row[m, present[h] + 1] if h != d else -np.inf
        nodes = count + first_word
        _fill_tables(score, nodes, closed_l, closed_r, open_l, open_r, split_l, split_r, cut)
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
            _read_heads(0, top, 0, split_l, split_r, cut, stack, found)
            _read_heads(top, count - 1, 1, split_l, split_r, cut, stack, found)
        else:
            _read_heads(0, nodes - 1, 1, split_l, split_r, cut, stack, found)
        for d in range(count):
            h = found[d + first_word] - first_word
            heads[i, present[d]] = 0 if h < 0 else present[h] + 1
