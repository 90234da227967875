"""The active set of a quadratic program over the convex hull of 0/1 vectors, one program per row.

    min_p ½‖Σ_k p_k y_k‖² − Σ_k p_k q_k   over distributions p,   q_k = ⟨θ, y_k⟩ + h_k

A row keeps members y_k (the indices of their ones), weights p > 0, and the bordered Gram matrix M of the members with
its inverse (``gram.py``). A step adds a candidate to the active set, solves for the weights, and drops members whose
weight becomes 0.

Rows differ in capacity. Row b has space for capacities[b] members: their lists, weights and scores begin at starts[b]
of the arrays ``members``, ``counts``, ``weights``, ``solution`` (λ, p), ``values`` q and ``extra`` h; its two matrices
of capacities[b] + 1 rows begin at squares[b] of ``matrices`` and ``inverses``. ``row_of`` returns its views.
"""

from __future__ import annotations

import numpy as np

from fenchel.kernels.cpu.compiler import helper, kernel
from fenchel.kernels.cpu.structures.gram import (
    FLAT,
    WORN,
    begin,
    insert,
    multiply,
    project,
    rebuild,
    remove,
    residual_of,
    solve_weights,
    square,
    workspace,
)

SOLVE, OFFER, CERTIFY = 0, 1, 2
"""Modes: add a candidate that improves, else the row is done; add it if it improves; only measure the gap."""

LIVE, DONE, FRESH, DOUBTED = 0, 1, 2, 3
"""States: unfinished; done; unfinished, with refined weights; done, after a candidate that is worse than a member."""

TINY = 1e-15
"""Weights up to this count as 0."""

NEAR = 1e-7
"""Gains below this, relative to their terms, are computed from differences."""

STILL = 1e-14
"""Weights that refinement would change by at most this are left unchanged."""

ROUNDING = 8 * 2.0**-52


@helper
def row_of(  # type: ignore[no-untyped-def]
    b, starts, capacities, squares, members, counts, weights, solution, values, extra, matrices, inverses
):  # fmt: skip
    """Views of row b: members, counts, weights p, solution x, values q, extra h, M and M⁻¹."""
    at = starts[b]
    matrix, inverse = square(matrices, squares[b], capacities[b]), square(inverses, squares[b], capacities[b])
    return members[at:], counts[at:], weights[at:], solution[at:], values[at:], extra[at:], matrix, inverse


@helper
def place(y, mark):  # type: ignore[no-untyped-def]
    """Mark the parts of a candidate y (L,), filled up with −1; return how many there are."""
    count = 0
    while count < y.size and y[count] >= 0:
        mark[y[count]] = 1
        count += 1
    return count


@helper
def _forget(at, last, members, counts, values, extra, weights):  # type: ignore[no-untyped-def]
    """Replace the member at ``at`` by the last one."""
    if at != last:
        for j in range(counts[last]):
            members[at, j] = members[last, j]
        counts[at] = counts[last]
        values[at] = values[last]
        extra[at] = extra[last]
        weights[at] = weights[last]
    weights[last] = 0.0


@helper
def keep(at, y, count, value, bonus, weight, own, tally, q, h, p):  # type: ignore[no-untyped-def]
    """Write a candidate of ``count`` parts as the member at ``at``."""
    for j in range(count):
        own[at, j] = y[j]
    tally[at], q[at], h[at], p[at] = count, value, bonus, weight


@helper
def sum_parts(source, members, counts, size, u):  # type: ignore[no-untyped-def]
    """Write the sums of ``source`` (parts,) over the parts of each member to u[1], …, u[size].

    The sums of a candidate's marks are its inner products with the members.
    """
    for k in range(size):
        total = source.dtype.type(0)
        for i in range(counts[k]):
            total += source[members[k, i]]
        u[k + 1] = total


@helper
def _aligned_column(y, count, members, size, u):  # type: ignore[no-untyped-def]
    """``sum_parts`` of the marks of y, where equal parts stand at the same place of the lists of structures."""
    for k in range(size):
        common = 0
        for i in range(count):
            common += members[k, i] == y[i]
        u[k + 1] = common


@helper
def _mix(theta, members, counts, weights, size, mu, residual):  # type: ignore[no-untyped-def]
    """Write the mixture μ = Σ p_k y_k and the residual θ − μ, both (parts,)."""
    mu[:] = 0.0
    for k in range(size):
        weight = weights[k]
        for i in range(counts[k]):
            mu[np.uint32(members[k, i])] += weight  # unsigned: no test for places counted from the end
    for j in range(theta.size):
        residual[j] = theta[j] - mu[j]


@helper
def _descend(matrix, inverse, x, size, members, counts, values, extra, weights, newest, v, r):  # type: ignore[no-untyped-def]
    """Move the weights to x; where a weight becomes 0 on the way, drop its member and solve for x anew.

    ``newest`` is the place of the newest member, ``size`` if there is none. Returns how many are left, and whether the
    newest was refused at once, so that nothing has changed.
    """
    none = size
    moved, refused = False, False
    while True:
        at, step = none, 1.0
        for k in range(size):
            if x[k + 1] <= TINY:
                reach = weights[k] / (weights[k] - x[k + 1]) if weights[k] > x[k + 1] else 0.0
                if at == none or reach < step:
                    at, step = k, reach
        if at == none or size == 1:
            break
        for k in range(size):
            weights[k] += step * (x[k + 1] - weights[k])
        moved = moved or step > 0.0
        refused = refused or (at == newest and not moved)
        _forget(at, size - 1, members, counts, values, extra, weights)
        remove(matrix, inverse, size, at, values, x, v, r)
        size -= 1
        if at == newest:
            newest = none
        elif newest == size:
            newest = at
    for k in range(size):
        weights[k] = x[k + 1]
    if size == 1:
        weights[0] = 1.0
    return size, refused


@helper
def _unevenness(members, counts, extra, weights, x, size, mu, residual, r):  # type: ignore[no-untyped-def]
    """Write r = (1, q) − M (λ, p), from the reduced scores of the members; return its largest entry.

    The mean residual is subtracted from all terms and added back once: the terms are then small where members tie.
    """
    mean, total = 0.0, 0.0
    for j in range(mu.size):
        if mu[j] > 0.0:
            mean += mu[j] * residual[j]
            total += mu[j]
    mean /= total
    r[0] = 1.0
    worst = 0.0
    for k in range(size):
        r[0] -= weights[k]
        reduced = extra[k]
        for i in range(counts[k]):
            reduced += residual[members[k, i]] - mean
        r[k + 1] = reduced + (mean * counts[k] - x[0])
        worst = max(worst, abs(r[k + 1]))
    return max(worst, abs(r[0]))


@helper
def _polish(theta, members, counts, values, extra, weights, x, matrix, inverse, size, mu, residual, u, v, r):  # type: ignore[no-untyped-def]
    """Refine the weights to the last digits. Returns how many members are left, and whether anything changed."""
    if size == 1:
        return size, False
    n = size + 1
    if _unevenness(members, counts, extra, weights, x, size, mu, residual, r) > WORN:
        rebuild(matrix, n, inverse)
    multiply(inverse, n, r, u)
    largest = 0.0
    for k in range(size):
        largest = max(largest, abs(u[k + 1]))
    if largest <= STILL:
        return size, False
    x[0] += u[0]
    for k in range(size):
        x[k + 1] = weights[k] + u[k + 1]
    size, _ = _descend(matrix, inverse, x, size, members, counts, values, extra, weights, size, v, r)
    total = 0.0
    for k in range(size):
        total += weights[k]
    for k in range(size):
        weights[k] /= total
        x[k + 1] = weights[k]
    _mix(theta, members, counts, weights, size, mu, residual)
    return size, True


@helper
def gain_of(y, count, bonus, weights, extra, size, mu, residual):  # type: ignore[no-untyped-def]
    """The gain of a structure over the mixture, ⟨θ − μ, y − μ⟩ + h(y) − Σ p h, and the size of its terms."""
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


@helper
def _doubtful(gain, least, residual):  # type: ignore[no-untyped-def]
    """Whether the best structure that was found is worse than the mixture, by more than an oracle may round."""
    if gain >= -least:
        return False
    largest = 0.0
    for j in range(residual.size):
        if residual[j] > -np.inf:
            largest = max(largest, abs(residual[j]))
    return gain < -least - 4 * ROUNDING * residual.size * largest


@helper
def _swap(at, y, count, value, bonus, length, own, tally, q, h, p, x, matrix, inverse, size, mark, u, v, r):  # type: ignore[no-untyped-def]
    """Replace the member at ``at`` by a candidate, which comes last, and solve for x. False if M would be singular."""
    _forget(at, size - 1, own, tally, q, h, p)
    remove(matrix, inverse, size, at, q, x, v, r)
    u[0] = 1.0
    sum_parts(mark, own, tally, size - 1, u)
    s = project(count, matrix, inverse, size - 1, u, v, r)
    if not s > FLAT:
        return False
    insert(matrix, inverse, size - 1, count, u, v, s)
    keep(size - 1, y, count, value, bonus, length, own, tally, q, h, p)
    solve_weights(matrix, inverse, size, q, x, u, r)
    return True


@helper
def _take(y, count, value, bonus, own, tally, p, x, q, h, matrix, inverse, size, mark, u, v, r):  # type: ignore[no-untyped-def]
    """Add a candidate with Gram column u. Returns the number of members, and whether the candidate was refused."""
    s = project(count, matrix, inverse, size, u, v, r)
    newest = size
    if s > FLAT:
        length = value - x[0]
        for k in range(size):
            length -= u[k + 1] * x[k + 1]
        length /= s
        for k in range(size + 1):
            x[k] -= length * v[k]
        x[size + 1] = length
        insert(matrix, inverse, size, count, u, v, s)
        keep(size, y, count, value, bonus, 0.0, own, tally, q, h, p)
        size += 1
    else:
        # y = Σ c_k y_k: only higher-order scores tell it from a mixture, and it can replace a member.
        at, length = size, np.inf
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
            newest = size
    return _descend(matrix, inverse, x, size, own, tally, q, h, p, newest, v, r)


@helper
def step(  # type: ignore[no-untyped-def]
    b, y, bonus, theta, own, tally, p, x, q, h, matrix, inverse, mu, residual, sizes, gap, floor, state, mode, goal,
    mark, u, v, r, aligned,
):  # fmt: skip
    """One step of row b: add the candidate y to the active set, solve, drop members whose weight becomes 0.

    The row's own arrays are its scores, members with their counts, weights p, solution x, values q, extra h, M, M⁻¹, mu
    and residual; mark, u, v, r are workspaces. ``aligned`` tells that members' lists are of one length, and that parts
    they have in common stand at the same place.

    A row is done when y, the best structure for θ − μ, does not improve on μ by more than the goal and rounding, and
    the weights are exact: then, and only then, its gain is the duality gap of these weights. Returns whether to go on.
    """
    size = sizes[b]
    count = place(y, mark)
    value, reduced, terms = bonus, bonus, 1.0 + abs(bonus)
    for j in range(count):
        value += theta[y[j]]
        reduced += residual[y[j]]
        terms += 1.0 + abs(residual[y[j]])
    going = True
    if size == 0:
        if mode != CERTIFY:
            keep(size, y, count, value, bonus, 1.0, own, tally, q, h, p)
            begin(matrix, inverse, count)
            x[0], x[1] = value - count, 1.0
            sizes[b] = size + 1
            _mix(theta, own, tally, p, size + 1, mu, residual)
    else:
        u[0] = 1.0
        if aligned:
            _aligned_column(y, count, own, size, u)
        else:
            sum_parts(mark, own, tally, size, u)
        known = False
        for k in range(size):
            known = known or (u[k + 1] == count and tally[k] == count)
        # The gain is the candidate's reduced score less λ, which is that of all members; near 0 it is computed anew.
        gain = reduced - x[0]
        exact = mode != SOLVE or state[b] == FRESH
        if known or mode == CERTIFY or not gain > NEAR * terms:
            if not exact:
                size, moved = _polish(theta, own, tally, q, h, p, x, matrix, inverse, size, mu, residual, u, v, r)
                sizes[b], state[b], exact = size, FRESH, not moved
                u[0] = 1.0
                sum_parts(mark, own, tally, size, u)
            gain, terms = gain_of(y, count, bonus, p, h, size, mu, residual)
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
    first, last, live, candidates, bonus, thetas, starts, capacities, squares, members, counts, sizes, weights,
    solution, values, extra, matrices, inverses, mus, residuals, gap, floor, state, mode, goal,
):  # fmt: skip
    """One ``step`` of every live row: candidates (n, L), filled up with −1, and their bonus h.

    Rows of (R, …): theta, mu, residual = θ − μ over D parts (−inf: forbidden). ``goal[0]`` is the gap at which a row is
    done.
    """
    mark, u, v, r = workspace(capacities, thetas.shape[1])
    for i in range(first, last):
        b = live[i]
        own, tally, p, x, q, h, matrix, inverse = row_of(
            b, starts, capacities, squares, members, counts, weights, solution, values, extra, matrices, inverses
        )
        step(
            b, candidates[i], bonus[i], thetas[b], own, tally, p, x, q, h, matrix, inverse, mus[b], residuals[b], sizes,
            gap, floor, state, mode, goal, mark, u, v, r, False,
        )  # fmt: skip


@helper
def include(y, bonus, weight, theta, own, tally, p, q, h, matrix, inverse, size, mark, u, v, r):  # type: ignore[no-untyped-def]
    """Add a candidate with a given weight, unless it lies in the members' affine hull. Returns the number of members.

    The weights of the other members, and the solution, are not changed: ``accept_weights`` follows.
    """
    count = place(y, mark)
    value = bonus
    for j in range(count):
        value += theta[y[j]]
    if size == 0:
        begin(matrix, inverse, count)
        s = 1.0
    else:
        u[0] = 1.0
        sum_parts(mark, own, tally, size, u)
        s = project(count, matrix, inverse, size, u, v, r)
        if s > FLAT:
            insert(matrix, inverse, size, count, u, v, s)
    for j in range(count):
        mark[y[j]] = 0
    if not s > FLAT:
        return size
    keep(size, y, count, value, bonus, weight, own, tally, q, h, p)
    return size + 1


@helper
def accept_weights(theta, own, tally, q, p, x, size, mu, residual):  # type: ignore[no-untyped-def]
    """Normalise the given weights of members to sum 1; write the mixture and the solution x that belong to them."""
    total, level = 0.0, 0.0
    for k in range(size):
        total += p[k]
    for k in range(size):
        p[k] /= total
        x[k + 1] = p[k]
        level += p[k] * q[k]
    _mix(theta, own, tally, p, size, mu, residual)
    for j in range(mu.size):
        level -= mu[j] * mu[j]
    x[0] = level


@kernel
def resume(  # type: ignore[no-untyped-def]
    first, last, live, thetas, starts, capacities, squares, members, counts, sizes, weights, solution, values, extra,
    matrices, inverses, mus, residuals, gap, floor, state,
):  # fmt: skip
    """Solve rows on their present members, for scores that may be new; members whose weight becomes 0 are dropped.

    A row with a member that the scores forbid begins without members.
    """
    _, u, _, r = workspace(capacities, thetas.shape[1])
    for i in range(first, last):
        b = live[i]
        size = sizes[b]
        own, tally, p, x, q, h, matrix, inverse = row_of(
            b, starts, capacities, squares, members, counts, weights, solution, values, extra, matrices, inverses
        )
        allowed = True
        for k in range(size):
            q[k] = h[k]
            for j in range(tally[k]):
                q[k] += thetas[b, own[k, j]]
            allowed = allowed and q[k] > -np.inf
        if not allowed:
            sizes[b] = 0
            continue
        solve_weights(matrix, inverse, size, q, x, u, r)
        x[0] -= q[0]
        worn = residual_of(matrix, size + 1, u, x, r) > WORN
        x[0] += q[0]
        if worn:
            rebuild(matrix, size + 1, inverse)
            solve_weights(matrix, inverse, size, q, x, u, r)
        sizes[b], _ = _descend(matrix, inverse, x, size, own, tally, q, h, p, size, u, r)
        _mix(thetas[b], own, tally, p, sizes[b], mus[b], residuals[b])


@kernel
def refine(  # type: ignore[no-untyped-def]
    first, last, live, thetas, starts, capacities, squares, members, counts, sizes, weights, solution, values, extra,
    matrices, inverses, mus, residuals, gap, floor, state,
):  # fmt: skip
    """Refine the weights of rows that stop before they are done."""
    _, u, v, r = workspace(capacities, thetas.shape[1])
    for i in range(first, last):
        b = live[i]
        own, tally, p, x, q, h, matrix, inverse = row_of(
            b, starts, capacities, squares, members, counts, weights, solution, values, extra, matrices, inverses
        )
        sizes[b], _ = _polish(
            thetas[b], own, tally, q, h, p, x, matrix, inverse, sizes[b], mus[b], residuals[b], u, v, r
        )  # fmt: skip
