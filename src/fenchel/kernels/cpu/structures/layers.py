"""Structures that are paths through a layered graph, such as chains: which edges the optimal mixture uses.

With small transitions very many mixtures have nearly the same marginals, and an active set that grows by one structure
at a time needs thousands of steps to find the best. Here the program is solved at a temperature ε first, by Newton's
method, and cooled down: the minimiser of

    F(ν) = ½‖ν‖² + ε log Σ_y exp((⟨θ − ν, y⟩ + h(y)) / ε)

equals the marginals of the Gibbs distribution of the scores θ − ν. As ε falls it tends to the marginals of SparseMAP,
and the Gibbs distribution to a mixture of optimal structures: edges that no optimal structure uses lose their
probability.

The graph has T layers of W nodes. parts[t, w] is the part that node w of layer t stands for, −1 if it stands for none,
−2 if there is no such node. The edges that leave node w lead to the nodes ends[begin[w]], …, ends[begin[w + 1] − 1] of
the next layer. An edge of kind kinds[e] scores bonus[t, kinds[e]], or bonus[0, kinds[e]] if it is the same for all
layers. Paths end at nodes w of the last layer with last[w]. Layers at the end without a node that may be chosen are
left out.
"""

from __future__ import annotations

import numpy as np

from fenchel.kernels.cpu.compiler import kernel

WARM = 1.0
"""The temperature to begin with."""

COLD = 1e-13
"""The temperature to end with."""

CLOSE = 0.1
"""Newton steps of this size, relative to the temperature, are small enough to go on to the next one."""

SHORT = 0.02
"""Newton steps are not taken if they have to be shortened to less than this."""

UNLIKELY = 1e-14
"""Nodes with a smaller probability are left out of Newton's equations."""

USED = 1e-9
"""Edges with a larger probability are taken to be used by optimal structures."""


@kernel
def count_layers(theta, parts):  # type: ignore[no-untyped-def]
    """How many layers have a node that may be chosen, up to the first that has none."""
    for t in range(parts.shape[0]):
        some = False
        for w in range(parts.shape[1]):
            k = parts[t, w]
            some = some or k == -1 or (k >= 0 and theta[k] > -np.inf)
        if not some:
            return t
    return parts.shape[0]


@kernel
def _gibbs(theta, nu, eps, layers, graph, value, step, node):  # type: ignore[no-untyped-def]
    """The Gibbs distribution of the scores θ − ν at temperature ε, as a Markov chain. False if there is no path.

    node[t, w] is the probability of a node, step[t, e] that of an edge given the node it leaves. ``value`` is room for
    the smoothed maximum over the rest of the path, relative to the largest in the layer.
    """
    parts, begin, ends, kinds, bonus, last = graph
    width = parts.shape[1]
    for t in range(layers - 1, -1, -1):
        link = bonus[t if bonus.shape[0] > 1 else 0]
        top = -np.inf
        for w in range(width):
            value[t, w] = -np.inf
            k = parts[t, w]
            if k == -2:
                continue
            best, total = (0.0 if last[w] else -np.inf), 1.0
            if t < layers - 1:
                best, total = -np.inf, 0.0
                for e in range(begin[w], begin[w + 1]):
                    best = max(best, link[kinds[e]] + value[t + 1, ends[e]])
                for e in range(begin[w], begin[w + 1]):
                    step[t, e] = (
                        0.0 if best == -np.inf else np.exp((link[kinds[e]] + value[t + 1, ends[e]] - best) / eps)
                    )
                    total += step[t, e]
            if best > -np.inf:
                if t < layers - 1:
                    for e in range(begin[w], begin[w + 1]):
                        step[t, e] /= total
                value[t, w] = best + eps * np.log(total) + (theta[k] - nu[k] if k >= 0 else 0.0)
                top = max(top, value[t, w])
        if top == -np.inf:
            return False
        for w in range(width):
            value[t, w] -= top
    total = 0.0
    for w in range(width):
        node[0, w] = np.exp(value[0, w] / eps)
        total += node[0, w]
    for w in range(width):
        node[0, w] /= total
    for t in range(layers - 1):
        node[t + 1] = 0.0
        for w in range(width):
            if node[t, w] > 0.0:
                for e in range(begin[w], begin[w + 1]):
                    node[t + 1, ends[e]] += node[t, w] * step[t, e]
    return True


@kernel
def _marginals(layers, parts, node, mu):  # type: ignore[no-untyped-def]
    """The probability of every part."""
    mu[:] = 0.0
    for t in range(layers):
        for w in range(parts.shape[1]):
            if parts[t, w] >= 0:
                mu[parts[t, w]] += node[t, w]


@kernel
def _propagate(t, n, begin, ends, step, node, alive, count, place, cov, room, turned):  # type: ignore[no-untyped-def]
    """cov ← PᵀcovP + D, from the nodes of layer t − 1 to the n of layer t: P their transition matrix, D the covariance
    of what the transition adds."""
    before = count[t - 1]
    for i in range(n):
        for j in range(before):
            room[i, j] = 0.0
    for a in range(before):
        w = alive[t - 1, a]
        for e in range(begin[w], begin[w + 1]):
            i, p = place[ends[e]], step[t - 1, e]
            if i >= 0 and p > 0.0:
                for j in range(before):
                    room[i, j] += p * cov[a, j]
    for i in range(n):
        for j in range(before):
            turned[j, i] = room[i, j]
    for i in range(n):
        for j in range(n):
            cov[i, j] = 0.0
    for a in range(before):
        w = alive[t - 1, a]
        for e in range(begin[w], begin[w + 1]):
            i, p = place[ends[e]], step[t - 1, e]
            if i >= 0 and p > 0.0:
                for j in range(n):
                    cov[i, j] += p * turned[a, j]
                share = p * node[t - 1, w]
                cov[i, i] += share
                for f in range(begin[w], begin[w + 1]):
                    j = place[ends[f]]
                    if j >= 0:
                        cov[i, j] -= share * step[t - 1, f]


@kernel
def _smooth(wanted, eps, layers, graph, step, node, y, alive, count, place, covariance, filtered):  # type: ignore[no-untyped-def]
    """y = C (εI + C)⁻¹ wanted, C the covariance of the parts: one Newton step, in O(T W E).

    Nodes of a Markov chain are a linear system that is driven by noise: z_t = Pᵀz_{t−1} + noise. So y is the best
    estimate of the parts from observations ``wanted`` with noise of variance ε: a Kalman filter that observes one part
    after the other, and its backward pass. The filter leaves the estimate x and its covariance; for the i-th observed
    part of layer t, gain[t, i] is the column of the covariance, spread[t, i] the variance of the observation,
    surprise[t, i] what it differs by, and seen[t, i] the first node of the part.
    """
    parts, begin, ends, _, _, _ = graph
    (cov, room, turned, x, moved), (gain, seen, surprise, spread) = covariance, filtered
    width, most = parts.shape[1], gain.shape[1]
    y[:] = 0.0
    for t in range(layers):
        n = 0
        for w in range(width):
            place[w] = -1
            if node[t, w] > UNLIKELY:
                alive[t, n], place[w] = w, n
                n += 1
        count[t] = n
        if t == 0:
            for i in range(n):
                x[i] = 0.0
                p = node[0, alive[0, i]]
                for j in range(n):
                    cov[i, j] = -p * node[0, alive[0, j]]
                cov[i, i] += p
        else:
            for i in range(n):
                moved[i] = 0.0
            for a in range(count[t - 1]):
                w = alive[t - 1, a]
                for e in range(begin[w], begin[w + 1]):
                    i = place[ends[e]]
                    if i >= 0:
                        moved[i] += step[t - 1, e] * x[a]
            for i in range(n):
                x[i] = moved[i]
            _propagate(t, n, begin, ends, step, node, alive, count, place, cov, room, turned)
        found = 0
        for i in range(n):
            k = parts[t, alive[t, i]]
            known = k < 0
            for j in range(found):
                known = known or parts[t, alive[t, seen[t, j]]] == k
            if known:
                continue
            g, total, off = gain[t, found], eps, wanted[k]
            for j in range(n):
                g[j] = 0.0
            for h in range(i, n):
                if parts[t, alive[t, h]] == k:
                    off -= x[h]
                    for j in range(n):
                        g[j] += cov[h, j]
            for h in range(i, n):
                if parts[t, alive[t, h]] == k:
                    total += g[h]
            seen[t, found], spread[t, found], surprise[t, found] = i, total, off
            found += 1
            for j in range(n):
                share = g[j] / total
                x[j] += share * off
                for h in range(n):
                    cov[j, h] -= share * g[h]
        if found < most:
            seen[t, found] = -1
    for i in range(count[layers - 1]):
        x[i] = 0.0
    for t in range(layers - 1, -1, -1):
        n, found = count[t], 0
        while found < most and seen[t, found] >= 0:
            found += 1
        for c in range(found - 1, -1, -1):
            k = parts[t, alive[t, seen[t, c]]]
            total = surprise[t, c]
            for j in range(n):
                total -= gain[t, c, j] * x[j]
            total /= spread[t, c]
            y[k] = wanted[k] - eps * total
            for h in range(seen[t, c], n):
                if parts[t, alive[t, h]] == k:
                    x[h] += total
        if t > 0:
            for w in range(width):
                place[w] = -1
            for i in range(n):
                place[alive[t, i]] = i
            for a in range(count[t - 1]):
                w = alive[t - 1, a]
                total = 0.0
                for e in range(begin[w], begin[w + 1]):
                    i = place[ends[e]]
                    if i >= 0:
                        total += step[t - 1, e] * x[i]
                moved[a] = total
            for a in range(count[t - 1]):
                x[a] = moved[a]


@kernel
def _norm(x):  # type: ignore[no-untyped-def]
    """The Euclidean norm of a vector."""
    total = 0.0
    for i in range(x.size):
        total += x[i] * x[i]
    return np.sqrt(total)


@kernel
def _minimise(theta, nu, eps, near, most, layers, graph, chain, newton, vectors):  # type: ignore[no-untyped-def]
    """Newton's method for the minimiser of F at temperature ε, from ν, until a step is at most ``near`` times ε.

    That is by how much the logarithm of a probability changes. The last three arguments are room to work in. Returns
    how many steps it took; −1 if ``most`` were not enough, or if the last led no further.
    """
    parts = graph[0]
    value, step, node = chain
    alive, count, place, covariance, filtered = newton
    mu, y, trial, other = vectors
    if not _gibbs(theta, nu, eps, layers, graph, value, step, node):
        return -1
    _marginals(layers, parts, node, mu)
    off = _norm(nu - mu)
    for steps in range(most):
        _smooth(nu - mu, eps, layers, graph, step, node, y, alive, count, place, covariance, filtered)
        length, change = 1.0, np.abs(mu + y - nu).max()
        while True:
            trial[:] = nu + length * (mu + y - nu)
            _gibbs(theta, trial, eps, layers, graph, value, step, node)
            _marginals(layers, parts, node, other)
            far = _norm(trial - other)
            if far < (1.0 - 0.1 * length) * off:
                break
            if change <= near * eps:
                return steps + 1
            length /= 2
            if length < SHORT:
                return -1
        nu[:] = trial
        mu[:] = other
        off = far
        if change <= near * eps:
            return steps + 1
    return -1


@kernel
def cool(first, last, rows, thetas, parts, begin, ends, kinds, bonus, final, nus, mus, eps):  # type: ignore[no-untyped-def]
    """Follow the minimisers ν of F from the temperature ``WARM`` to ``COLD``, or as far as rounding allows.

    Rows b = rows[i] of thetas (R, D); of bonus (R, T − 1 or 1, C) and final (R, W) there may be one for all. nus[b] is
    the minimiser at the temperature eps[b], 0 if there is none, and mus[b] its limit as the temperature falls to 0.
    """
    depth, width = parts.shape
    most = 0
    for t in range(depth):
        different = 0
        for w in range(width):
            new = parts[t, w] >= 0
            for h in range(w):
                new = new and parts[t, h] != parts[t, w]
            different += new
        most = max(most, different)
    chain = (np.empty((depth, width)), np.zeros((depth, ends.size)), np.empty((depth, width)))
    square = (np.empty((width, width)), np.empty((width, width)), np.empty((width, width)))
    filtered = (
        np.empty((depth, most, width)), np.empty((depth, most), np.int64), np.empty((depth, most)),
        np.empty((depth, most)),
    )  # fmt: skip
    newton = (
        np.empty((depth, width), np.int64), np.empty(depth, np.int64), np.empty(width, np.int64),
        (*square, np.empty(width), np.empty(width)), filtered,
    )  # fmt: skip
    size = thetas.shape[1]
    vectors = (np.empty(size), np.empty(size), np.empty(size), np.empty(size))
    older, current = np.empty(size), np.empty(size)
    for i in range(first, last):
        b = rows[i]
        theta, nu, layers = thetas[b], nus[b], count_layers(thetas[b], parts)
        link, goal = bonus[b if bonus.shape[0] > 1 else 0], final[b if final.shape[0] > 1 else 0]
        graph = (parts, begin, ends, kinds, link, goal)
        at, reached, previous, factor = WARM, 0.0, 0.0, 4.0
        nu[:] = 0.0
        current[:] = 0.0
        while True:
            tries = 12 if reached > 0.0 else 60
            steps = _minimise(theta, current, at, CLOSE, tries, layers, graph, chain, newton, vectors)
            if steps >= 0:
                older[:] = nu
                nu[:] = current
                previous, reached = reached, at
                if at <= COLD:
                    break
                if steps <= 3:
                    factor = min(1.5 * factor, 30.0)
                elif steps > 6:
                    factor = np.sqrt(factor)
            else:
                # Too far at once, or too cold for double precision.
                factor = np.sqrt(factor)
                if reached == 0.0 or factor < 1.05:
                    break
            at = max(reached / factor, COLD)
            current[:] = nu
            if previous > 0.0:
                current += (nu - older) * ((at - reached) / (reached - previous))
        eps[b] = reached
        if reached == 0.0:
            continue
        # As exactly as they get, at two temperatures: from there to 0 minimisers change linearly.
        _minimise(theta, nu, reached, 1e-6, 12, layers, graph, chain, newton, vectors)
        current[:] = nu
        if previous > 0.0:
            current += (nu - older) * (0.25 * reached / (reached - previous))
        _minimise(theta, current, 1.25 * reached, 1e-6, 12, layers, graph, chain, newton, vectors)
        mus[b] = 5.0 * nu - 4.0 * current


@kernel
def used_edges(theta, nu, eps, layers, graph, value, step, node, used):  # type: ignore[no-untyped-def]
    """The probability of edges at temperature ε, in the place of ``step``, and whether it is more than nothing."""
    parts, begin = graph[0], graph[1]
    _gibbs(theta, nu, eps, layers, graph, value, step, node)
    for t in range(layers - 1):
        for w in range(parts.shape[1]):
            for e in range(begin[w], begin[w + 1]):
                step[t, e] *= node[t, w]
                used[t, e] = step[t, e] > USED


@kernel
def _span(flow, used, ends, source, label, chosen):  # type: ignore[no-untyped-def]
    """Choose edges between two layers that form no cycles, and connect all that can be: those with most flow first."""
    width = label.size // 2
    for v in range(2 * width):
        label[v] = v
    chosen[:] = 0
    for e in np.argsort(-flow):
        if used[e] and label[source[e]] != label[width + ends[e]]:
            old, new = label[width + ends[e]], label[source[e]]
            for v in range(2 * width):
                label[v] = new if label[v] == old else label[v]
            chosen[e] = 1


@kernel
def _balance(flow, ends, source, chosen, room, degree, left):  # type: ignore[no-untyped-def]
    """Make the flow fit what has to flow through nodes, by the chosen edges: the only one of a node carries the rest.

    ``room`` is what has to flow through nodes, ``degree`` and ``left`` are room to work in.
    """
    width = room.size // 2
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
            room[v] -= flow[e]
            room[w] -= flow[e]
    while edges:
        for e in range(ends.size):
            v, w = source[e], width + ends[e]
            if left[e] and (degree[v] == 1 or degree[w] == 1):
                flow[e] = room[v] if degree[v] == 1 else room[w]
                room[v] -= flow[e]
                room[w] -= flow[e]
                degree[v] -= 1
                degree[w] -= 1
                left[e] = 0
                edges -= 1


@kernel
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


@kernel
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
    degree, room = np.empty(2 * width, np.int64), np.empty(2 * width)
    for w in range(width):
        for e in range(begin[w], begin[w + 1]):
            source[e] = w
    for t in range(layers - 1):
        for w in range(width):
            room[w], room[width + w] = mu[parts[t, w]], mu[parts[t + 1, w]]
        for e in range(ends.size):
            flow[t, e] = flow[t, e] if used[t, e] else 0.0
        _span(flow[t], used[t], ends, source, label, chosen)
        _balance(flow[t], ends, source, chosen, room, degree, left)
        for e in range(ends.size):
            if used[t, e] and not chosen[e]:
                _cancel(e, flow[t], bonus[t if bonus.shape[0] > 1 else 0], kinds, ends, source, chosen, queue, by)
    return True


@kernel
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


@kernel
def best_path(scores, layers, graph, used, value, choice, y):  # type: ignore[no-untyped-def]
    """The best path over the edges that are used. y are its parts, filled up with −1.

    Returns the sum of its edges' scores, −inf if there is no path.
    """
    parts, begin, ends, kinds, bonus, last = graph
    width = parts.shape[1]
    for t in range(layers - 1, -1, -1):
        link = bonus[t if bonus.shape[0] > 1 else 0]
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
