"""Structures that are paths through a layered graph, such as chains: which edges the optimal mixture uses.

With small transitions very many mixtures have nearly the same marginals, and an active set that grows by one structure
at a time needs thousands of steps to find the best. Here the program is smoothed first, with a temperature ε that falls
step by step, and solved by Newton's method: the minimiser of

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

from fenchel.kernels.cpu.compiler import helper, kernel

WARM = 1.0
"""The temperature to begin with."""

COLD = 1e-13
"""The temperature to end with."""

CLOSE = 0.1
"""Newton steps of this size, relative to the temperature, are small enough to go on to the next one."""

EXACT = 1e-6
"""The same for the last ones."""

SHORT = 0.02
"""Newton steps are not taken if they have to be shortened to less than this."""

UNLIKELY = 1e-14
"""Nodes with a smaller probability are left out of Newton's equations."""


@helper
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


@helper
def gibbs(theta, nu, eps, layers, graph, value, step, node):  # type: ignore[no-untyped-def]
    """The Gibbs distribution of the scores θ − ν at temperature ε, as a Markov chain. False if there is no path.

    node[t, w] is the probability of a node, step[t, e] that of an edge given the node it leaves. ``value`` is a
    workspace for the smoothed maximum over the rest of the path, relative to the largest in the layer.
    """
    parts, begin, ends, kinds, bonus, last = graph
    width = parts.shape[1]
    for t in range(layers - 1, -1, -1):
        link = bonus[min(t, bonus.shape[0] - 1)]
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


@helper
def _times_transition(t, n, columns, begin, ends, step, alive, count, place, source, target):  # type: ignore[no-untyped-def]
    """Write Pᵀ source to target (n, columns): P is the transition matrix from layer t − 1 to the n nodes of layer t."""
    for i in range(n):
        for j in range(columns):
            target[i, j] = 0.0
    for a in range(count[t - 1]):
        w = alive[t - 1, a]
        for e in range(begin[w], begin[w + 1]):
            i, p = place[ends[e]], step[t - 1, e]
            if i >= 0 and p > 0.0:
                for j in range(columns):
                    target[i, j] += p * source[a, j]


@helper
def _propagate(t, n, begin, ends, step, node, alive, count, place, cov, room, turned):  # type: ignore[no-untyped-def]
    """Replace cov by PᵀcovP + D (n, n): P as in ``_times_transition``, D the covariance that the transition adds."""
    before = count[t - 1]
    _times_transition(t, n, before, begin, ends, step, alive, count, place, cov, room)
    for i in range(n):
        for j in range(before):
            turned[j, i] = room[i, j]
    _times_transition(t, n, n, begin, ends, step, alive, count, place, turned, cov)
    for a in range(before):
        w = alive[t - 1, a]
        for e in range(begin[w], begin[w + 1]):
            i, p = place[ends[e]], step[t - 1, e]
            if i >= 0 and p > 0.0:
                share = p * node[t - 1, w]
                cov[i, i] += share
                for f in range(begin[w], begin[w + 1]):
                    j = place[ends[f]]
                    if j >= 0:
                        cov[i, j] -= share * step[t - 1, f]


@helper
def _solve(wanted, eps, layers, graph, step, node, z, alive, count, place, covariance, filtered):  # type: ignore[no-untyped-def]
    """z = (εI + C)⁻¹ wanted, C the covariance of the parts, in O(T W E): Newton's equations, as I + C/ε is F's Hessian.

    Indicators of the nodes of a Markov chain are a linear system that is driven by noise, s_t = Pᵀs_{t−1} + noise. So
    Cz is the best estimate of the parts from observations ``wanted`` with noise of variance ε, and z is found by a
    Kalman filter that observes one part after the other, and its backward pass. The filter leaves the estimate x and
    its covariance; for the i-th observed part of layer t, gain[t, i] is the column of the covariance, variance[t, i]
    that of the observation, error[t, i] its error, and seen[t, i] the first node of the part.
    """
    parts, begin, ends, _, _, _ = graph
    (cov, room, turned, x, moved), (gain, seen, error, variance) = covariance, filtered
    width, most = parts.shape[1], gain.shape[1]
    for j in range(z.size):
        z[j] = wanted[j] / eps
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
            seen[t, found], variance[t, found], error[t, found] = i, total, off
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
            total = error[t, c]
            for j in range(n):
                total -= gain[t, c, j] * x[j]
            total /= variance[t, c]
            z[k] = total
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


@helper
def _mismatch(nu, eps, theta, layers, graph, value, step, node, off):  # type: ignore[no-untyped-def]
    """off = ν less the marginals of the Gibbs distribution of θ − ν, the gradient of F; its norm, inf if no path is."""
    if not gibbs(theta, nu, eps, layers, graph, value, step, node):
        return np.inf
    parts = graph[0]
    for j in range(nu.size):
        off[j] = nu[j]
    for t in range(layers):
        for w in range(parts.shape[1]):
            if parts[t, w] >= 0:
                off[parts[t, w]] -= node[t, w]
    total = 0.0
    for j in range(nu.size):
        total += off[j] * off[j]
    return np.sqrt(total)


@helper
def _minimise(theta, nu, eps, near, most, layers, graph, chain, newton, vectors):  # type: ignore[no-untyped-def]
    """Newton's method for the minimiser of F at temperature ε, from ν, until a step is at most ``near`` times ε.

    That is by how much the logarithm of a probability changes. The last three arguments are workspaces. Returns
    how many steps it took; −1 if ``most`` were not enough, or if the last led no further.
    """
    value, step, node = chain
    alive, count, place, covariance, filtered = newton
    z, trial, off, other = vectors
    size = nu.size
    norm = _mismatch(nu, eps, theta, layers, graph, value, step, node, off)
    if norm == np.inf:
        return -1
    for steps in range(most):
        _solve(off, eps, layers, graph, step, node, z, alive, count, place, covariance, filtered)
        length, change = 1.0, 0.0
        for j in range(size):
            change = max(change, abs(z[j]))
        while True:
            for j in range(size):
                trial[j] = nu[j] - length * eps * z[j]
            far = _mismatch(trial, eps, theta, layers, graph, value, step, node, other)
            if far < (1.0 - 0.1 * length) * norm:
                break
            if change <= near:
                return steps + 1
            length /= 2
            if length < SHORT:
                return -1
        for j in range(size):
            nu[j], off[j] = trial[j], other[j]
        norm = far
        if change <= near:
            return steps + 1
    return -1


@kernel
def anneal(first, last, rows, thetas, parts, begin, ends, kinds, bonus, final, nus, mus, eps):  # type: ignore[no-untyped-def]
    """Compute the minimisers ν of F at falling temperatures, from ``WARM`` to ``COLD`` or as far as rounding allows.

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
        for j in range(size):
            nu[j], current[j] = 0.0, 0.0
        while True:
            tries = 12 if reached > 0.0 else 60
            steps = _minimise(theta, current, at, CLOSE, tries, layers, graph, chain, newton, vectors)
            if steps >= 0:
                for j in range(size):
                    older[j], nu[j] = nu[j], current[j]
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
            ahead = (at - reached) / (reached - previous) if previous > 0.0 else 0.0
            for j in range(size):
                current[j] = nu[j] + ahead * (nu[j] - older[j])
        eps[b] = reached
        if reached == 0.0:
            continue
        # As exactly as they get, at two temperatures: from there to 0 minimisers change linearly.
        _minimise(theta, nu, reached, EXACT, tries, layers, graph, chain, newton, vectors)
        ahead = 0.25 * reached / (reached - previous) if previous > 0.0 else 0.0
        for j in range(size):
            current[j] = nu[j] + ahead * (nu[j] - older[j])
        _minimise(theta, current, 1.25 * reached, EXACT, tries, layers, graph, chain, newton, vectors)
        for j in range(size):
            mus[b, j] = 5.0 * nu[j] - 4.0 * current[j]
