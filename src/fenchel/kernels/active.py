"""The active set of a quadratic program over the convex hull of 0/1 vectors, one program a row.

    min_p ½‖Σ_k p_k y_k‖² − Σ_k p_k q_k   over distributions p,   q_k = ⟨θ, y_k⟩ + h_k

A row keeps members y_k (the places of their ones), weights p > 0, and the inverse of the bordered Gram matrix

    M = [0 1ᵀ; 1 G],   G_jk = ⟨y_j, y_k⟩,

which is regular exactly if the members are affinely independent, and whose lower block is the Jacobian ∂p/∂q.
M (λ, p) = (1, q) then says that p solves the program on the members, and that all have the reduced score λ.
Updates of rank one follow as members come and go: Niculae et al. (2018), appendix B.
"""

from __future__ import annotations

import numpy as np

from fenchel.kernels.compiler import kernel

SOLVE, OFFER, CERTIFY, COMPLETE = 0, 1, 2, 3
"""Take a candidate if it improves, else the row is done; take it or not; only measure the gap; take it if it ties."""

LIVE, DONE = 0, 1

FLAT = 1e-9
"""Squared distance to the members' affine hull below which a candidate lies in it."""

TINY = 1e-15
"""Weights up to this are none."""

TIE = 1e-10
"""Reduced scores closer than this, relative to their terms, are equal."""

NEAR = 1e-7
"""Gains below this, relative to their terms, are computed with care."""

WORN = 1e-12
"""Above this misfit, relative to the scores, updates have worn M⁻¹ out."""

ROUNDING = 16 * 2.0**-52


@kernel
def _place(y, mark):  # type: ignore[no-untyped-def]
    """Mark the parts of a candidate; count them."""
    count = 0
    while count < y.size and y[count] >= 0:
        mark[y[count]] = 1
        count += 1
    return count


@kernel
def _insert(inverse, size, v, s):  # type: ignore[no-untyped-def]
    """M⁻¹ with one more member, v = M⁻¹u for its Gram column u, s its squared distance."""
    n = size + 1
    for i in range(n):
        factor = v[i] / s
        for j in range(n):
            inverse[i, j] += factor * v[j]
        inverse[i, n] = -factor
        inverse[n, i] = -factor
    inverse[n, n] = 1.0 / s


@kernel
def _remove(inverse, size, at, x):  # type: ignore[no-untyped-def]
    """M⁻¹, and x = M⁻¹(1, q), without the member at ``at``; the last takes its place."""
    n = size + 1
    pivot = inverse[at, at]
    share = x[at] / pivot
    for i in range(n):
        if i != at:
            factor = inverse[i, at] / pivot
            x[i] -= inverse[i, at] * share
            for j in range(n):
                if j != at:
                    inverse[i, j] -= factor * inverse[at, j]
    last = n - 1
    if at != last:
        for i in range(n):
            inverse[i, at] = inverse[i, last]
        for i in range(n):
            inverse[at, i] = inverse[last, i]
        inverse[at, at] = inverse[last, last]
        x[at] = x[last]


@kernel
def _forget(at, last, members, counts, values, extra, weights):  # type: ignore[no-untyped-def]
    """The last member takes the place of another."""
    if at != last:
        for j in range(counts[last]):
            members[at, j] = members[last, j]
        counts[at] = counts[last]
        values[at] = values[last]
        extra[at] = extra[last]
        weights[at] = weights[last]
    weights[last] = 0.0


@kernel
def _keep(at, y, count, value, bonus, weight, own, tally, q, h, p):  # type: ignore[no-untyped-def]
    """Write a candidate in the place of a member."""
    for j in range(count):
        own[at, j] = y[j]
    tally[at], q[at], h[at], p[at] = count, value, bonus, weight


@kernel
def _column(mark, members, counts, size, u):  # type: ignore[no-untyped-def]
    """The Gram column of the marked candidate, under the 1 of the border."""
    u[0] = 1.0
    for k in range(size):
        common = 0
        for i in range(counts[k]):
            common += mark[members[k, i]]
        u[k + 1] = common


@kernel
def _aligned_column(y, count, members, size, u):  # type: ignore[no-untyped-def]
    """The same for structures that are equal in a part only if it stands at the same place of their lists."""
    u[0] = 1.0
    for k in range(size):
        common = 0
        for i in range(count):
            common += members[k, i] == y[i]
        u[k + 1] = common


@kernel
def _times(inverse, n, u, v):  # type: ignore[no-untyped-def]
    for i in range(n):
        total = 0.0
        for j in range(n):
            total += inverse[i, j] * u[j]
        v[i] = total


@kernel
def _distance(norm, u, v, n):  # type: ignore[no-untyped-def]
    """‖y − aff‖² = ⟨y, y⟩ − uᵀM⁻¹u."""
    total = norm
    for i in range(n):
        total -= u[i] * v[i]
    return total


@kernel
def _invert(matrix, n, inverse):  # type: ignore[no-untyped-def]
    """Gauss-Jordan elimination with pivots, in place of a sum of many updates."""
    for i in range(n):
        for j in range(n):
            inverse[i, j] = 1.0 if i == j else 0.0
    for c in range(n):
        best = c
        for i in range(c + 1, n):
            if abs(matrix[i, c]) > abs(matrix[best, c]):
                best = i
        if best != c:
            for j in range(n):
                matrix[c, j], matrix[best, j] = matrix[best, j], matrix[c, j]
                inverse[c, j], inverse[best, j] = inverse[best, j], inverse[c, j]
        pivot = matrix[c, c]
        for j in range(n):
            matrix[c, j] /= pivot
            inverse[c, j] /= pivot
        for i in range(n):
            factor = matrix[i, c]
            if i != c and factor != 0.0:
                for j in range(n):
                    matrix[i, j] -= factor * matrix[c, j]
                    inverse[i, j] -= factor * inverse[c, j]


@kernel
def _rebuild(mark, members, counts, size, inverse):  # type: ignore[no-untyped-def]
    """M⁻¹ from the members alone."""
    n = size + 1
    matrix = np.zeros((n, n))
    u = np.empty(n)
    for k in range(size):
        for i in range(counts[k]):
            mark[members[k, i]] = 1
        _column(mark, members, counts, size, u)
        for j in range(n):
            matrix[k + 1, j] = u[j]
        matrix[0, k + 1] = 1.0
        for i in range(counts[k]):
            mark[members[k, i]] = 0
    _invert(matrix, n, inverse)


@kernel
def _mix(members, counts, weights, size, mu):  # type: ignore[no-untyped-def]
    mu[:] = 0.0
    for k in range(size):
        weight = weights[k]
        for i in range(counts[k]):
            mu[members[k, i]] += weight


@kernel
def _misfit(members, counts, values, weights, x, size, mu, u):  # type: ignore[no-untyped-def]
    """(1, q) − M (λ, p), by the marginals; its largest entry relative to its terms."""
    total = 1.0
    worst = 0.0
    for k in range(size):
        total -= weights[k]
        reached = 0.0
        for i in range(counts[k]):
            reached += mu[members[k, i]]
        u[k + 1] = values[k] - x[0] - reached
        worst = max(worst, abs(u[k + 1]) / (1.0 + abs(values[k])))
    u[0] = total
    return max(worst, abs(total))


@kernel
def _polish(mark, members, counts, values, weights, x, inverse, size, mu, u, v):  # type: ignore[no-untyped-def]
    """A step of iterative refinement, after which p is right to the last digits; M⁻¹ anew if updates wore it out."""
    n = size + 1
    if _misfit(members, counts, values, weights, x, size, mu, u) > 1e-9:
        _rebuild(mark, members, counts, size, inverse)
    _times(inverse, n, u, v)
    x[0] += v[0]
    for k in range(size):
        # A weight that refinement would make negative is none.
        weights[k] = max(weights[k] + v[k + 1], 0.0)
        x[k + 1] = weights[k]
    _mix(members, counts, weights, size, mu)


@kernel
def _gain(y, count, bonus, members, counts, weights, extra, size, residual):  # type: ignore[no-untyped-def]
    """⟨θ − μ, y − μ⟩ + h(y) − Σ p h: what a structure gains on the mixture."""
    gain = bonus
    for j in range(count):
        gain += residual[y[j]]
    for k in range(size):
        reduced = extra[k]
        for j in range(counts[k]):
            reduced += residual[members[k, j]]
        gain -= weights[k] * reduced
    return gain


@kernel
def _descend(inverse, x, size, members, counts, values, extra, weights, newest):  # type: ignore[no-untyped-def]
    """Go towards x; wherever a weight runs out on the way, drop its member.

    Returns how many are left, and whether the newest was refused at once, so that nothing has changed.
    """
    moved, refused = False, False
    while True:
        at, step = -1, 1.0
        for k in range(size):
            if x[k + 1] <= TINY:
                reach = weights[k] / (weights[k] - x[k + 1]) if weights[k] > x[k + 1] else 0.0
                if at < 0 or reach < step:
                    at, step = k, reach
        if at < 0 or size == 1:
            break
        for k in range(size):
            weights[k] += step * (x[k + 1] - weights[k])
        moved = moved or step > 0.0
        refused = refused or (at == newest and not moved)
        _remove(inverse, size, at + 1, x)
        size -= 1
        _forget(at, size, members, counts, values, extra, weights)
        if at == newest:
            newest = -1
        elif newest == size:
            newest = at
    for k in range(size):
        weights[k] = x[k + 1]
    if size == 1:
        weights[0] = 1.0
    return size, refused


@kernel
def step(  # type: ignore[no-untyped-def]
    b, y, bonus, theta, own, tally, p, x, q, h, minv, mu, residual, sizes, gap, state, mode, goal, mark, u, v, aligned
):
    """One step of row b: take the candidate y into the active set, solve, drop members whose weight runs out.

    The row's own arrays are members with their counts, weights p, solution x, values q, extra h and M⁻¹ as ``advance``
    has them; mark, u, v are room to work in; ``aligned`` tells that members' lists are of one length, and that parts
    they have in common stand at the same place. Returns whether the candidate was taken.
    """
    parts = theta.size
    size = sizes[b]
    count = _place(y, mark)
    value, reduced, terms = bonus, bonus, 1.0 + abs(bonus)
    taken = False
    for j in range(count):
        value += theta[y[j]]
        reduced += residual[y[j]]
        terms += abs(residual[y[j]])
    if size == 0:
        if mode != CERTIFY:
            _keep(0, y, count, value, bonus, 1.0, own, tally, q, h, p)
            minv[0, 0], minv[0, 1], minv[1, 0], minv[1, 1] = -count, 1.0, 1.0, 0.0
            x[0], x[1] = value - count, 1.0
            sizes[b] = 1
            taken = True
    else:
        if aligned:
            _aligned_column(y, count, own, size, u)
        else:
            _column(mark, own, tally, size, u)
        known = False
        for k in range(size):
            known = known or (u[k + 1] == count and tally[k] == count)
        # What the candidate gains: its reduced score less λ, which all members have, unless it is a close call.
        if known or mode > OFFER or not reduced - x[0] > NEAR * terms:
            if mode == SOLVE:
                for j in range(count):
                    mark[y[j]] = 0
                _polish(mark, own, tally, q, p, x, minv, size, mu, u, v)
                for j in range(parts):
                    residual[j] = theta[j] - mu[j]
                _place(y, mark)
                _column(mark, own, tally, size, u)
            reduced = _gain(y, count, bonus, own, tally, p, h, size, residual)
        else:
            reduced -= x[0]
        if mode == SOLVE or mode == CERTIFY:  # noqa: SIM109 (a tuple would be built in every row)
            gap[b] = max(reduced, 0.0)
        small = not reduced > max(goal[0], ROUNDING * terms)
        take = not known and not small and mode <= OFFER
        refused = False
        if mode == COMPLETE:
            _times(minv, size + 1, u, v)
            s = _distance(count, u, v, size + 1)
            if not known and s > FLAT and reduced > -TIE * terms:
                _insert(minv, size, v, s)
                _keep(size, y, count, value, bonus, 0.0, own, tally, q, h, p)
                x[size + 1] = 0.0
                sizes[b] = size + 1
            else:
                state[b] = DONE
        if take:
            _times(minv, size + 1, u, v)
            s = _distance(count, u, v, size + 1)
            newest = size
            if s > FLAT:
                length = value
                for k in range(size + 1):
                    length -= u[k] * x[k]
                length /= s
                for k in range(size + 1):
                    x[k] -= length * v[k]
                x[size + 1] = length
                _insert(minv, size, v, s)
                _keep(size, y, count, value, bonus, 0.0, own, tally, q, h, p)
                size += 1
            else:
                # y = Σ c_k y_k: only higher-order scores tell it from a mixture, and it can replace a member.
                at, length = -1, np.inf
                for k in range(size):
                    if v[k + 1] > 1e-9:
                        reach = p[k] / v[k + 1]
                        if reach < length or (reach == length and v[k + 1] > v[at + 1]):
                            at, length = k, reach
                for k in range(size):
                    p[k] = max(p[k] - length * v[k + 1], 0.0)
                _remove(minv, size, at + 1, x)
                _forget(at, size - 1, own, tally, q, h, p)
                newest = size - 1
                _column(mark, own, tally, newest, u)
                _times(minv, newest + 1, u, v)
                _insert(minv, newest, v, _distance(count, u, v, newest + 1))
                _keep(newest, y, count, value, bonus, length, own, tally, q, h, p)
                u[0] = 1.0
                for k in range(size):
                    u[k + 1] = q[k]
                _times(minv, size + 1, u, x)
            size, refused = _descend(minv, x, size, own, tally, q, h, p, newest)
            sizes[b] = size
        taken = take and not refused
        if mode == SOLVE and not taken:
            state[b] = DONE
    for j in range(count):
        mark[y[j]] = 0
    if mode != COMPLETE and mode != CERTIFY:
        _mix(own, tally, p, sizes[b], mu)
        for j in range(parts):
            residual[j] = theta[j] - mu[j]
    return taken


@kernel
def advance(  # type: ignore[no-untyped-def]
    first,
    last,
    live,
    candidates,
    bonus,
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
    mode,
    goal,
):
    """One ``step`` of every live row.

    Rows of (R, …): theta, mu, residual = θ − μ over D parts (−inf: forbidden), members (K, L) with counts, weights,
    solution (λ, p), values q, extra h, inverse (K+1, K+1). Of the live ones (n, …): candidates (L, filled up with −1)
    and their bonus h. ``goal[0]`` is the gap at which a row is done.
    """
    room = weights.shape[1] + 2
    mark = np.zeros(theta.shape[1], np.uint8)
    u, v = np.empty(room), np.empty(room)
    for i in range(first, last):
        b = live[i]
        step(
            b,
            candidates[i],
            bonus[i],
            theta[b],
            members[b],
            counts[b],
            weights[b],
            solution[b],
            values[b],
            extra[b],
            inverse[b],
            mu[b],
            residual[b],
            sizes,
            gap,
            state,
            mode,
            goal,
            mark,
            u,
            v,
            False,
        )


@kernel
def resume(  # type: ignore[no-untyped-def]
    first, last, live, theta, members, counts, sizes, weights, solution, values, extra, inverse, mu, residual
):
    """Solve every live row on the members that it has, for scores that may be new, and drop those of weight 0."""
    room = weights.shape[1] + 2
    mark = np.zeros(theta.shape[1], np.uint8)
    u, v = np.empty(room), np.empty(room)
    for i in range(first, last):
        b = live[i]
        size = sizes[b]
        own, tally, q, h, p, x = members[b], counts[b], values[b], extra[b], weights[b], solution[b]
        u[0] = 1.0
        for k in range(size):
            total = h[k]
            for j in range(tally[k]):
                total += theta[b, own[k, j]]
            q[k] = total
            u[k + 1] = total
        if not np.isfinite(u[: size + 1]).all():
            sizes[b] = 0
            continue
        _times(inverse[b], size + 1, u, x)
        _mix(own, tally, x[1:], size, mu[b])
        if _misfit(own, tally, q, x[1:], x, size, mu[b], v) > WORN:
            _rebuild(mark, own, tally, size, inverse[b])
            _times(inverse[b], size + 1, u, x)
        sizes[b], _ = _descend(inverse[b], x, size, own, tally, q, h, p, -1)
        _mix(own, tally, p, sizes[b], mu[b])
        for j in range(theta.shape[1]):
            residual[b, j] = theta[b, j] - mu[b, j]


@kernel
def outward(first, last, live, noise, theta, members, counts, sizes, inverse, mu, probe, scale):  # type: ignore[no-untyped-def]
    """θ − μ plus a little noise across the members' affine hull: what ties with them outside it then comes out best."""
    parts = theta.shape[1]
    room = members.shape[1] + 2
    u, v = np.empty(room), np.empty(room)
    across = np.empty(parts)
    for i in range(first, last):
        b = live[i]
        size = sizes[b]
        own, tally = members[b], counts[b]
        u[0] = 0.0
        for k in range(size):
            total = 0.0
            for j in range(tally[k]):
                total += noise[own[k, j]]
            u[k + 1] = total
        _times(inverse[b], size + 1, u, v)
        for j in range(parts):
            across[j] = noise[j]
        for k in range(size):
            for j in range(tally[k]):
                across[own[k, j]] -= v[k + 1]
        largest = 1.0
        for j in range(parts):
            if mu[b, j] > 0.0:
                largest = max(largest, abs(theta[b, j] - mu[b, j]))
        for j in range(parts):
            probe[b, j] = theta[b, j] - mu[b, j] + scale[0] * largest * across[j]


@kernel
def collect(first, last, members, counts, sizes, weights, extra, inverse, outside, index, w, h, jacobian):  # type: ignore[no-untyped-def]
    """The active sets of all rows side by side: places filled up with ``outside``, all else with zeros."""
    room, most = index.shape[1], index.shape[2]
    for b in range(first, last):
        size = sizes[b]
        for k in range(room):
            count = counts[b, k] if k < size else 0
            for i in range(count):
                index[b, k, i] = members[b, k, i]
            for i in range(count, most):
                index[b, k, i] = outside
            w[b, k] = weights[b, k] if k < size else 0.0
            h[b, k] = extra[b, k] if k < size else 0.0
            inside = size if k < size else 0
            for j in range(inside):
                jacobian[b, k, j] = inverse[b, k + 1, j + 1]
            for j in range(inside, room):
                jacobian[b, k, j] = 0.0


@kernel
def add_up(first, last, index, theta, q):  # type: ignore[no-untyped-def]
    """q[b, k] is the sum of theta[b] over the places index[b, k]; beyond the last there is nothing to add."""
    parts = theta.shape[1]
    for b in range(first, last):
        for k in range(index.shape[1]):
            total = 0.0
            for i in range(index.shape[2]):
                at = index[b, k, i]
                total += theta[b, at] if at < parts else 0.0
            q[b, k] = total


@kernel
def spread(first, last, index, w, mu):  # type: ignore[no-untyped-def]
    """The adjoint of ``add_up``: mu[b] gets w[b, k] at each of the places index[b, k]."""
    parts = mu.shape[1]
    for b in range(first, last):
        mu[b] = 0.0
        for k in range(index.shape[1]):
            weight = w[b, k]
            for i in range(index.shape[2]):
                at = index[b, k, i]
                if at >= parts:
                    break
                mu[b, at] += weight
