"""The active set of a quadratic program over the convex hull of 0/1 vectors, one program per row.

    min_p ½‖Σ_k p_k y_k‖² − Σ_k p_k q_k   over distributions p,   q_k = ⟨θ, y_k⟩ + h_k

A row keeps members y_k (the places of their ones), weights p > 0, and the bordered Gram matrix with its inverse,

    M = [0 1ᵀ; 1 G],   G_jk = ⟨y_j, y_k⟩.

M is regular exactly if the members are affinely independent; the lower block of M⁻¹ is the Jacobian ∂p/∂q.
M (λ, p) = (1, q) says that p solves the program on the members, and that all have the reduced score λ.
The inverse follows by updates of rank one as members come and go: Niculae et al. (2018), appendix B. M holds integers
and has no rounding error, so an update refines the column that it adds or takes away, where two equations of M or a
small distance show the need: errors of the inverse then add up, but are not multiplied. Where a column is off by more
than ``WORN`` the inverse is made anew.

Rows have as much room as they need. Row b has room for rooms[b] members: their lists, weights and scores begin at
starts[b] of the arrays ``members``, ``counts``, ``weights``, ``solution`` (λ, p), ``values`` q and ``extra`` h; its two
matrices of rooms[b] + 1 rows begin at squares[b] of ``matrix`` and ``inverse``.
"""

from __future__ import annotations

import numpy as np

from fenchel.kernels.cpu.compiler import kernel

SOLVE, OFFER, CERTIFY = 0, 1, 2
"""Take a candidate if it improves, else the row is done; take it or not; only measure the gap."""

LIVE, DONE, FRESH, DOUBTED = 0, 1, 2, 3
"""Going on; finished; going on, with weights as exact as they get; finished, by a candidate worse than a member."""

FLAT = 1e-9
"""Squared distance to the members' affine hull below which a candidate lies in it."""

TINY = 1e-15
"""Weights up to this are none."""

TIE = 1e-11
"""Reduced scores closer than this, relative to their terms, are equal."""

NEAR = 1e-7
"""Gains below this, relative to their terms, are computed with care."""

STILL = 1e-14
"""Weights that refinement would change by no more than this stay as they are."""

CLOSE = 0.25
"""Squared distance below which columns of the inverse are refined."""

SHAKY = 1e-10
"""The residual of two equations from which on they are."""

WORN = 1e-8
"""The residual of a column of the inverse from which on the inverse is made anew."""

SHARP = 1e-10
"""The same for an inverse that derivatives are made of."""

ROUNDING = 8 * 2.0**-52


@kernel
def _place(y, mark):  # type: ignore[no-untyped-def]
    """Mark the parts of a candidate; count them."""
    count = 0
    while count < y.size and y[count] >= 0:
        mark[y[count]] = 1
        count += 1
    return count


@kernel
def square(flat, start, room):  # type: ignore[no-untyped-def]
    """The matrix of a row."""
    n = room + 1
    return flat[start : start + n * n].reshape(n, n)


@kernel
def _residual(matrix, n, right, x, r):  # type: ignore[no-untyped-def]
    """r = right − M x; its largest entry relative to that of the right-hand side."""
    worst, scale = 0.0, 1.0
    for i in range(n):
        total = right[i]
        for j in range(n):
            total -= matrix[i, j] * x[j]
        r[i] = total
        worst = max(worst, abs(total))
        scale = max(scale, abs(right[i]))
    return worst / scale


@kernel
def _equation(matrix, n, row, x):  # type: ignore[no-untyped-def]
    """A row of M times x."""
    total = 0.0
    for j in range(n):
        total += matrix[row, j] * x[j]
    return total


@kernel
def _times(inverse, n, u, v):  # type: ignore[no-untyped-def]
    for i in range(n):
        total = 0.0
        for j in range(n):
            total += inverse[i, j] * u[j]
        v[i] = total


@kernel
def _correct(inverse, n, r, x):  # type: ignore[no-untyped-def]
    """x + M⁻¹r: a step of iterative refinement."""
    for i in range(n):
        total = 0.0
        for j in range(n):
            total += inverse[i, j] * r[j]
        x[i] += total


@kernel
def _rebuild(matrix, n, inverse):  # type: ignore[no-untyped-def]
    """M⁻¹ from M alone: Gauss-Jordan elimination with pivots."""
    left = np.empty((n, n))
    for i in range(n):
        for j in range(n):
            left[i, j] = matrix[i, j]
            inverse[i, j] = 1.0 if i == j else 0.0
    for c in range(n):
        best = c
        for i in range(c + 1, n):
            if abs(left[i, c]) > abs(left[best, c]):
                best = i
        if best != c:
            for j in range(n):
                left[c, j], left[best, j] = left[best, j], left[c, j]
                inverse[c, j], inverse[best, j] = inverse[best, j], inverse[c, j]
        pivot = left[c, c]
        for j in range(n):
            left[c, j] /= pivot
            inverse[c, j] /= pivot
        for i in range(n):
            factor = left[i, c]
            if i != c and factor != 0.0:
                for j in range(n):
                    left[i, j] -= factor * left[c, j]
                    inverse[i, j] -= factor * inverse[c, j]


@kernel
def _hull(count, matrix, inverse, size, u, v, r):  # type: ignore[no-untyped-def]
    """v = M⁻¹u for the Gram column u of a candidate: its projection on the members' affine hull is Σ v_k y_k.

    Returns its squared distance to the hull, ⟨y, y⟩ − uᵀv − vᵀ(u − Mv), in which errors of v are squared.
    """
    n = size + 1
    _times(inverse, n, u, v)
    s = float(count)
    for i in range(n):
        s -= v[i] * u[i]
    off = abs(_equation(matrix, n, 0, v) - u[0]) + abs(_equation(matrix, n, size, v) - u[size])
    if s > CLOSE and off <= SHAKY * (1.0 + u[size]):
        return s
    if _residual(matrix, n, u, v, r) > WORN:
        _rebuild(matrix, n, inverse)
        _times(inverse, n, u, v)
        _residual(matrix, n, u, v, r)
    s = float(count)
    for i in range(n):
        s -= v[i] * (u[i] + r[i])
    _correct(inverse, n, r, v)
    return s


@kernel
def _insert(matrix, inverse, size, count, u, v, s):  # type: ignore[no-untyped-def]
    """M and M⁻¹ with one more member: u its Gram column, v = M⁻¹u, s its squared distance."""
    n = size + 1
    for i in range(n):
        factor = v[i] / s
        for j in range(n):
            inverse[i, j] += factor * v[j]
        inverse[i, n] = -factor
        inverse[n, i] = -factor
        matrix[i, n] = u[i]
        matrix[n, i] = u[i]
    inverse[n, n] = 1.0 / s
    matrix[n, n] = count


@kernel
def _erase(square, at, last):  # type: ignore[no-untyped-def]
    """The last row and column take the place of another."""
    if at != last:
        for i in range(last + 1):
            square[i, at] = square[i, last]
        for i in range(last + 1):
            square[at, i] = square[last, i]
        square[at, at] = square[last, last]


@kernel
def _remove(matrix, inverse, size, at, q, x, v, r):  # type: ignore[no-untyped-def]
    """M, M⁻¹ and x = M⁻¹(1, q) without the member at ``at``; the last takes its place.

    ``q`` are the values of the members that are left, in their new order.
    """
    n, i = size + 1, at + 1
    for a in range(n):
        v[a] = inverse[a, i]
    off = abs(_equation(matrix, n, 0, v)) + abs(_equation(matrix, n, i, v) - 1.0)
    if v[i] * CLOSE > 1.0 or off > SHAKY:
        worst = 0.0
        for a in range(n):
            r[a] = (1.0 if a == i else 0.0) - _equation(matrix, n, a, v)
            worst = max(worst, abs(r[a]))
        if worst > WORN:
            _erase(matrix, i, n - 1)
            _rebuild(matrix, n - 1, inverse)
            _solution(matrix, inverse, size - 1, q, x, v, r)
            return
        _correct(inverse, n, r, v)
    share = x[i] / v[i]
    for a in range(n):
        factor = v[a] / v[i]
        x[a] -= v[a] * share
        for c in range(n):
            inverse[a, c] -= factor * v[c]
    _erase(matrix, i, n - 1)
    _erase(inverse, i, n - 1)
    x[i] = x[n - 1]


@kernel
def _solution(matrix, inverse, size, q, x, u, r):  # type: ignore[no-untyped-def]
    """x = (λ, p) = M⁻¹(1, q), refined. Scores are taken relative to the first: only λ depends on their level."""
    n = size + 1
    u[0] = 1.0
    for k in range(size):
        u[k + 1] = q[k] - q[0]
    _times(inverse, n, u, x)
    _residual(matrix, n, u, x, r)
    _correct(inverse, n, r, x)
    x[0] += q[0]


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
def _mix(theta, members, counts, weights, size, mu, residual):  # type: ignore[no-untyped-def]
    """μ = Σ p_k y_k, and θ − μ."""
    mu[:] = 0.0
    for k in range(size):
        weight = weights[k]
        for i in range(counts[k]):
            mu[members[k, i]] += weight
    for j in range(theta.size):
        residual[j] = theta[j] - mu[j]


@kernel
def _descend(matrix, inverse, x, size, members, counts, values, extra, weights, newest, v, r):  # type: ignore[no-untyped-def]
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
        _forget(at, size - 1, members, counts, values, extra, weights)
        _remove(matrix, inverse, size, at, values, x, v, r)
        size -= 1
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
def _polish(theta, members, counts, values, extra, weights, x, matrix, inverse, size, mu, residual, u, v, r):  # type: ignore[no-untyped-def]
    """Solve for the weights anew, so that they are right to the last digits. Returns how many members are left, and
    whether anything changed."""
    if size == 1:
        return size, False
    n = size + 1
    u[0] = 1.0
    level = values[0]
    for k in range(size):
        u[k + 1] = values[k] - level
        v[k + 1] = weights[k]
    v[0] = x[0] - level
    if _residual(matrix, n, u, v, r) > WORN:
        _rebuild(matrix, n, inverse)
    _times(inverse, n, r, u)
    largest = 0.0
    for k in range(size):
        largest = max(largest, abs(u[k + 1]))
    if largest <= STILL:
        return size, False
    x[0] += u[0]
    for k in range(size):
        x[k + 1] = weights[k] + u[k + 1]
    size, _ = _descend(matrix, inverse, x, size, members, counts, values, extra, weights, -1, v, r)
    total = 0.0
    for k in range(size):
        total += weights[k]
    for k in range(size):
        weights[k] /= total
        x[k + 1] = weights[k]
    _mix(theta, members, counts, weights, size, mu, residual)
    return size, True


@kernel
def _gain(y, count, bonus, weights, extra, size, mu, residual):  # type: ignore[no-untyped-def]
    """⟨θ − μ, y − μ⟩ + h(y) − Σ p h: what a structure gains on the mixture, and the size of the terms."""
    gain, terms = bonus, 1.0 + abs(bonus)
    for j in range(count):
        gain += residual[y[j]]
        terms += 1.0 + abs(residual[y[j]])
    for k in range(size):
        gain -= weights[k] * extra[k]
        terms += weights[k] * abs(extra[k])
    for j in range(mu.size):
        if mu[j] != 0.0:
            gain -= mu[j] * residual[j]
            terms += mu[j] * (1.0 + abs(residual[j]))
    return gain, terms


@kernel
def _doubtful(gain, least, residual):  # type: ignore[no-untyped-def]
    """Whether the best structure that was found is worse than the mixture, by more than an oracle may round."""
    if gain >= -least:
        return False
    largest = 0.0
    for j in range(residual.size):
        if residual[j] > -np.inf:
            largest = max(largest, abs(residual[j]))
    return gain < -least - 4 * ROUNDING * residual.size * largest


@kernel
def _swap(at, y, count, value, bonus, length, own, tally, q, h, p, x, matrix, inverse, size, mark, u, v, r):  # type: ignore[no-untyped-def]
    """Put a candidate in the place of the member at ``at``, as the last one; solve for x. False if it cannot be."""
    _forget(at, size - 1, own, tally, q, h, p)
    _remove(matrix, inverse, size, at, q, x, v, r)
    _column(mark, own, tally, size - 1, u)
    s = _hull(count, matrix, inverse, size - 1, u, v, r)
    if not s > FLAT:
        return False
    _insert(matrix, inverse, size - 1, count, u, v, s)
    _keep(size - 1, y, count, value, bonus, length, own, tally, q, h, p)
    _solution(matrix, inverse, size, q, x, u, r)
    return True


@kernel
def _take(y, count, value, bonus, own, tally, p, x, q, h, matrix, inverse, size, mark, u, v, r):  # type: ignore[no-untyped-def]
    """Take a candidate with Gram column u into the active set: how many members there are then, and whether it was
    refused."""
    s = _hull(count, matrix, inverse, size, u, v, r)
    newest = size
    if s > FLAT:
        length = value - x[0]
        for k in range(size):
            length -= u[k + 1] * x[k + 1]
        length /= s
        for k in range(size + 1):
            x[k] -= length * v[k]
        x[size + 1] = length
        _insert(matrix, inverse, size, count, u, v, s)
        _keep(size, y, count, value, bonus, 0.0, own, tally, q, h, p)
        size += 1
    else:
        # y = Σ c_k y_k: only higher-order scores tell it from a mixture, and it can replace a member.
        at, length = -1, np.inf
        for k in range(size):
            if v[k + 1] > 1e-7:
                reach = p[k] / v[k + 1]
                if reach < length or (reach == length and v[k + 1] > v[at + 1]):
                    at, length = k, reach
        for k in range(size):
            p[k] = max(p[k] - length * v[k + 1], 0.0)
        newest = size - 1
        if not _swap(at, y, count, value, bonus, length, own, tally, q, h, p, x, matrix, inverse, size, mark, u, v, r):
            size -= 1
            newest = -1
    return _descend(matrix, inverse, x, size, own, tally, q, h, p, newest, v, r)


@kernel
def step(  # type: ignore[no-untyped-def]
    b, y, bonus, theta, own, tally, p, x, q, h, matrix, inverse, mu, residual, sizes, gap, floor, state, mode, goal,
    mark, u, v, r, aligned,
):  # fmt: skip
    """One step of row b: take the candidate y into the active set, solve, drop members whose weight runs out.

    The row's own arrays are its scores, members with their counts, weights p, solution x, values q, extra h, M, M⁻¹, mu
    and residual; mark, u, v, r are room to work in. ``aligned`` tells that members' lists are of one length, and that
    parts they have in common stand at the same place.

    A row is done when y, the best structure for θ − μ, does not improve on μ by more than the goal and rounding, and
    the weights are exact: then, and only then, its gain is the duality gap of these weights. Returns whether to go on.
    """
    size = sizes[b]
    count = _place(y, mark)
    value, reduced, terms = bonus, bonus, 1.0 + abs(bonus)
    for j in range(count):
        value += theta[y[j]]
        reduced += residual[y[j]]
        terms += 1.0 + abs(residual[y[j]])
    going = True
    if size == 0:
        if mode != CERTIFY:
            _keep(0, y, count, value, bonus, 1.0, own, tally, q, h, p)
            matrix[0, 0], matrix[0, 1], matrix[1, 0], matrix[1, 1] = 0.0, 1.0, 1.0, count
            inverse[0, 0], inverse[0, 1], inverse[1, 0], inverse[1, 1] = -count, 1.0, 1.0, 0.0
            x[0], x[1] = value - count, 1.0
            sizes[b] = 1
            _mix(theta, own, tally, p, 1, mu, residual)
    else:
        if aligned:
            _aligned_column(y, count, own, size, u)
        else:
            _column(mark, own, tally, size, u)
        known = False
        for k in range(size):
            known = known or (u[k + 1] == count and tally[k] == count)
        # What the candidate gains: its reduced score less λ, which all members have, unless it is a close call.
        gain = reduced - x[0]
        exact = mode != SOLVE or state[b] == FRESH
        if known or mode == CERTIFY or not gain > NEAR * terms:
            if not exact:
                size, moved = _polish(theta, own, tally, q, h, p, x, matrix, inverse, size, mu, residual, u, v, r)
                sizes[b] = size
                state[b] = FRESH
                exact = not moved
                _column(mark, own, tally, size, u)
            gain, terms = _gain(y, count, bonus, p, h, size, mu, residual)
        least = max(goal[0], ROUNDING * terms)
        if mode != OFFER:
            gap[b], floor[b] = max(gain, 0.0), ROUNDING * terms
        taken = False
        if gain > least and not known and mode <= OFFER:
            size, refused = _take(y, count, value, bonus, own, tally, p, x, q, h, matrix, inverse, size, mark, u, v, r)
            taken = not refused
            if refused and not exact:
                size, _ = _polish(theta, own, tally, q, h, p, x, matrix, inverse, size, mu, residual, u, v, r)
                state[b] = FRESH
            sizes[b] = size
            _mix(theta, own, tally, p, size, mu, residual)
        if taken:
            state[b] = LIVE
        elif exact and mode != OFFER:
            state[b] = DOUBTED if _doubtful(gain, least, residual) else DONE
            going = False
    for j in range(count):
        mark[y[j]] = 0
    return going


@kernel
def advance(  # type: ignore[no-untyped-def]
    first, last, live, candidates, bonus, thetas, starts, rooms, squares, members, counts, sizes, weights, solution,
    values, extra, matrices, inverses, mus, residuals, gap, floor, state, mode, goal,
):  # fmt: skip
    """One ``step`` of every live row: candidates (n, L), filled up with −1, and their bonus h.

    Rows of (R, …): theta, mu, residual = θ − μ over D parts (−inf: forbidden). ``goal[0]`` is the gap at which a row is
    done.
    """
    room = rooms.max() + 2
    mark = np.zeros(thetas.shape[1], np.uint8)
    u, v, r = np.empty(room), np.empty(room), np.empty(room)
    for i in range(first, last):
        b = live[i]
        at = starts[b]
        matrix, inverse = square(matrices, squares[b], rooms[b]), square(inverses, squares[b], rooms[b])
        step(
            b, candidates[i], bonus[i], thetas[b], members[at:], counts[at:], weights[at:], solution[at:], values[at:],
            extra[at:], matrix, inverse, mus[b], residuals[b], sizes, gap, floor, state, mode, goal, mark, u, v, r,
            False,
        )  # fmt: skip


@kernel
def resume(  # type: ignore[no-untyped-def]
    first, last, live, thetas, starts, rooms, squares, members, counts, sizes, weights, solution, values, extra,
    matrices, inverses, mus, residuals, gap, floor, state,
):  # fmt: skip
    """Solve rows on the members that they have, for scores that may be new; members whose weight runs out are dropped.

    A row with a member that the scores forbid begins anew.
    """
    room = rooms.max() + 2
    u, r = np.empty(room), np.empty(room)
    for i in range(first, last):
        b = live[i]
        at, size = starts[b], sizes[b]
        own, tally, q, h = members[at:], counts[at:], values[at:], extra[at:]
        p, x = weights[at:], solution[at:]
        matrix, inverse = square(matrices, squares[b], rooms[b]), square(inverses, squares[b], rooms[b])
        allowed = True
        for k in range(size):
            q[k] = h[k]
            for j in range(tally[k]):
                q[k] += thetas[b, own[k, j]]
            allowed = allowed and q[k] > -np.inf
        if not allowed:
            sizes[b] = 0
            continue
        _solution(matrix, inverse, size, q, x, u, r)
        x[0] -= q[0]
        worn = _residual(matrix, size + 1, u, x, r) > WORN
        x[0] += q[0]
        if worn:
            _rebuild(matrix, size + 1, inverse)
            _solution(matrix, inverse, size, q, x, u, r)
        sizes[b], _ = _descend(matrix, inverse, x, size, own, tally, q, h, p, -1, u, r)
        _mix(thetas[b], own, tally, p, sizes[b], mus[b], residuals[b])


@kernel
def refine(  # type: ignore[no-untyped-def]
    first, last, live, thetas, starts, rooms, squares, members, counts, sizes, weights, solution, values, extra,
    matrices, inverses, mus, residuals, gap, floor, state,
):  # fmt: skip
    """Weights of rows that stop before they are done: as exact as they get."""
    room = rooms.max() + 2
    u, v, r = np.empty(room), np.empty(room), np.empty(room)
    for i in range(first, last):
        b = live[i]
        at = starts[b]
        matrix, inverse = square(matrices, squares[b], rooms[b]), square(inverses, squares[b], rooms[b])
        sizes[b], _ = _polish(
            thetas[b], members[at:], counts[at:], values[at:], extra[at:], weights[at:], solution[at:], matrix, inverse,
            sizes[b], mus[b], residuals[b], u, v, r,
        )  # fmt: skip


@kernel
def outward(  # type: ignore[no-untyped-def]
    first, last, live, noise, scale, probe, thetas, starts, rooms, squares, members, counts, sizes, weights, solution,
    values, extra, matrices, inverses, mus, residuals, gap, floor, state,
):  # fmt: skip
    """θ − μ plus a little noise across the members' affine hull: what ties with them outside it then comes out best."""
    parts = thetas.shape[1]
    room = rooms.max() + 2
    u, v, across = np.empty(room), np.empty(room), np.empty(parts)
    for i in range(first, last):
        b = live[i]
        size, n = sizes[b], sizes[b] + 1
        own, tally = members[starts[b] :], counts[starts[b] :]
        inverse = square(inverses, squares[b], rooms[b])
        u[0] = 0.0
        for k in range(size):
            total = 0.0
            for j in range(tally[k]):
                total += noise[own[k, j]]
            u[k + 1] = total
        _times(inverse, n, u, v)
        for j in range(parts):
            across[j] = noise[j] if thetas[b, j] > -np.inf else 0.0
        for k in range(size):
            for j in range(tally[k]):
                across[own[k, j]] -= v[k + 1]
        largest, longest = 1.0, 1e-300
        for j in range(parts):
            longest = max(longest, abs(across[j]))
            if mus[b, j] > 0.0:
                largest = max(largest, abs(residuals[b, j]))
        for j in range(parts):
            probe[b, j] = residuals[b, j] + scale[b] * largest / longest * across[j]


@kernel
def complete(  # type: ignore[no-untyped-def]
    first, last, live, candidates, bonus, verdict, thetas, starts, rooms, squares, members, counts, sizes, weights,
    solution, values, extra, matrices, inverses, mus, residuals, gap, floor, state,
):  # fmt: skip
    """Take in candidates that tie with the members but lie outside their affine hull, with weight 0.

    ``verdict`` (n,) is 1 where a candidate was taken, 0 where it lies in the hull, −1 where it does not tie.
    """
    room = rooms.max() + 2
    mark = np.zeros(thetas.shape[1], np.uint8)
    u, v, r = np.empty(room), np.empty(room), np.empty(room)
    for i in range(first, last):
        b, y = live[i], candidates[i]
        at, size = starts[b], sizes[b]
        own, tally, p, q, h = members[at:], counts[at:], weights[at:], values[at:], extra[at:]
        matrix, inverse = square(matrices, squares[b], rooms[b]), square(inverses, squares[b], rooms[b])
        count = _place(y, mark)
        _column(mark, own, tally, size, u)
        known = False
        for k in range(size):
            known = known or (u[k + 1] == count and tally[k] == count)
        verdict[i] = 0
        if not known:
            s = _hull(count, matrix, inverse, size, u, v, r)
            if s > FLAT:
                gain, terms = _gain(y, count, bonus[i], p, h, size, mus[b], residuals[b])
                verdict[i] = 1 if gain > -TIE * terms else -1
            if verdict[i] > 0:
                value = bonus[i]
                for j in range(count):
                    value += thetas[b, y[j]]
                _insert(matrix, inverse, size, count, u, v, s)
                _keep(size, y, count, value, bonus[i], 0.0, own, tally, q, h, p)
                solution[at + size + 1] = 0.0
                sizes[b] = size + 1
        for j in range(count):
            mark[y[j]] = 0


@kernel
def sharpen(  # type: ignore[no-untyped-def]
    first, last, live, starts, rooms, squares, sizes, matrices, inverses
):  # fmt: skip
    """M⁻¹ anew in rows where a trial shows that updates wore it out: derivatives are made of it."""
    room = rooms.max() + 2
    u, v, r = np.empty(room), np.empty(room), np.empty(room)
    for i in range(first, last):
        b = live[i]
        n = sizes[b] + 1
        matrix, inverse = square(matrices, squares[b], rooms[b]), square(inverses, squares[b], rooms[b])
        for j in range(n):
            u[j] = np.cos(j * (j + 1.0))
        _times(inverse, n, u, v)
        if n > 2 and _residual(matrix, n, u, v, r) > SHARP:
            _rebuild(matrix, n, inverse)


@kernel
def carry(  # type: ignore[no-untyped-def]
    first, last, sizes, old_starts, old_rooms, old_squares, old_members, old_counts, old_weights, old_solution,
    old_values, old_extra, old_matrices, old_inverses, starts, rooms, squares, members, counts, weights, solution,
    values, extra, matrices, inverses,
):  # fmt: skip
    """Rows into arrays with more room."""
    for b in range(first, last):
        size, old, new = sizes[b], old_starts[b], starts[b]
        for k in range(size):
            for j in range(old_counts[old + k]):
                members[new + k, j] = old_members[old + k, j]
            counts[new + k] = old_counts[old + k]
            weights[new + k] = old_weights[old + k]
            values[new + k] = old_values[old + k]
            extra[new + k] = old_extra[old + k]
        if size:
            before, after = square(old_matrices, old_squares[b], old_rooms[b]), square(matrices, squares[b], rooms[b])
            was, now = square(old_inverses, old_squares[b], old_rooms[b]), square(inverses, squares[b], rooms[b])
            for i in range(size + 1):
                solution[new + i] = old_solution[old + i]
                for j in range(size + 1):
                    after[i, j] = before[i, j]
                    now[i, j] = was[i, j]


@kernel
def collect(  # type: ignore[no-untyped-def]
    first, last, rows, starts, rooms, squares, members, counts, sizes, weights, extra, inverses, outside, index, w, h,
    jacobian,
):  # fmt: skip
    """The active sets of some rows side by side: places filled up with ``outside``, all else with zeros."""
    room, most = index.shape[1], index.shape[2]
    for i in range(first, last):
        b = rows[i]
        size, at = sizes[b], starts[b]
        inverse = square(inverses, squares[b], rooms[b])
        for k in range(room):
            count = counts[at + k] if k < size else 0
            for j in range(count):
                index[i, k, j] = members[at + k, j]
            for j in range(count, most):
                index[i, k, j] = outside
            w[i, k] = weights[at + k] if k < size else 0.0
            h[i, k] = extra[at + k] if k < size else 0.0
            inside = size if k < size else 0
            for j in range(inside):
                jacobian[i, k, j] = inverse[k + 1, j + 1]
            for j in range(inside, room):
                jacobian[i, k, j] = 0.0


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
