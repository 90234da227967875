"""Operations on the members of active sets besides the steps of the search: copies, sums over parts, tied members.

At ties, structures that could be members are found with noise orthogonal to the members' affine hull, and are added
with weight 0. Arrays as in ``active.py``.
"""

from __future__ import annotations

import numpy as np

from fenchel.kernels.cpu.compiler import kernel
from fenchel.kernels.cpu.structures.active import gain_of, keep, place, row_of, sum_parts
from fenchel.kernels.cpu.structures.gram import FLAT, insert, multiply, project, rebuild, residual_of, square, workspace

TIE = 1e-11
"""Reduced scores closer than this, relative to their terms, are equal."""

SHARP = 1e-10
"""Residual above which an inverse that derivatives are made of is computed anew."""


@kernel
def copy_rows(  # type: ignore[no-untyped-def]
    first, last, sizes, old_starts, old_capacities, old_squares, old_members, old_counts, old_weights, old_solution,
    old_values, old_extra, old_matrices, old_inverses, starts, capacities, squares, members, counts, weights, solution,
    values, extra, matrices, inverses,
):  # fmt: skip
    """Copy the active sets of rows to arrays with larger capacities."""
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
            before, after = (
                square(old_matrices, old_squares[b], old_capacities[b]),
                square(matrices, squares[b], capacities[b]),
            )
            was, now = (
                square(old_inverses, old_squares[b], old_capacities[b]),
                square(inverses, squares[b], capacities[b]),
            )
            for i in range(size + 1):
                solution[new + i] = old_solution[old + i]
                for j in range(size + 1):
                    after[i, j] = before[i, j]
                    now[i, j] = was[i, j]


@kernel
def gather(  # type: ignore[no-untyped-def]
    first, last, rows, starts, capacities, squares, members, counts, sizes, weights, extra, inverses, outside, index, w,
    h, jacobian,
):  # fmt: skip
    """Copy the active sets of n rows to arrays (n, K, …): parts filled up with ``outside``, all else with zeros."""
    capacity, most = index.shape[1], index.shape[2]
    for i in range(first, last):
        b = rows[i]
        size, at = sizes[b], starts[b]
        inverse = square(inverses, squares[b], capacities[b])
        for k in range(capacity):
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
            for j in range(inside, capacity):
                jacobian[i, k, j] = 0.0


@kernel
def sum_scores(first, last, index, theta, q):  # type: ignore[no-untyped-def]
    """Write q[b, k], the sum of theta[b] over the parts index[b, k]; indices beyond the last part add nothing."""
    parts = theta.shape[1]
    for b in range(first, last):
        for k in range(index.shape[1]):
            total = 0.0
            for i in range(index.shape[2]):
                at = index[b, k, i]
                total += theta[b, at] if at < parts else 0.0
            q[b, k] = total


@kernel
def mix(first, last, index, w, mu):  # type: ignore[no-untyped-def]
    """Write mu[b] = Σ_k w[b, k] y_k, where member y_k has the parts index[b, k]: the adjoint of ``sum_scores``."""
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


@kernel
def perturb_residuals(  # type: ignore[no-untyped-def]
    first, last, live, noise, scale, probe, thetas, starts, capacities, squares, members, counts, sizes, weights,
    solution, values, extra, matrices, inverses, mus, residuals, gap, floor, state,
):  # fmt: skip
    """Write θ − μ plus a little noise orthogonal to the members' affine hull to probe (R, parts).

    A structure outside the hull that ties with the members is then the best one for some noise.
    """
    parts = thetas.shape[1]
    _, u, v, _ = workspace(capacities, parts)
    across = np.empty(parts)
    for i in range(first, last):
        b = live[i]
        size, own, tally = sizes[b], members[starts[b] :], counts[starts[b] :]
        u[0] = 0.0
        sum_parts(noise, own, tally, size, u)
        multiply(square(inverses, squares[b], capacities[b]), size + 1, u, v)
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
def add_tied(  # type: ignore[no-untyped-def]
    first, last, live, candidates, bonus, verdict, thetas, starts, capacities, squares, members, counts, sizes, weights,
    solution, values, extra, matrices, inverses, mus, residuals, gap, floor, state,
):  # fmt: skip
    """Add candidates that tie with the members but lie outside their affine hull, with weight 0.

    ``verdict`` (n,) is 1 where a candidate was added, 0 where it lies in the hull, −1 where it does not tie.
    """
    mark, u, v, r = workspace(capacities, thetas.shape[1])
    for i in range(first, last):
        b, y = live[i], candidates[i]
        size = sizes[b]
        own, tally, p, x, q, h, matrix, inverse = row_of(
            b, starts, capacities, squares, members, counts, weights, solution, values, extra, matrices, inverses
        )
        count = place(y, mark)
        u[0] = 1.0
        sum_parts(mark, own, tally, size, u)
        known = False
        for k in range(size):
            known = known or (u[k + 1] == count and tally[k] == count)
        verdict[i] = 0
        if not known:
            s = project(count, matrix, inverse, size, u, v, r)
            if s > FLAT:
                gain, terms = gain_of(y, count, bonus[i], p, h, size, mus[b], residuals[b])
                verdict[i] = 1 if gain > -TIE * terms else -1
            if verdict[i] > 0:
                value = bonus[i]
                for j in range(count):
                    value += thetas[b, y[j]]
                insert(matrix, inverse, size, count, u, v, s)
                keep(size, y, count, value, bonus[i], 0.0, own, tally, q, h, p)
                x[size + 1] = 0.0
                sizes[b] = size + 1
        for j in range(count):
            mark[y[j]] = 0


@kernel
def refresh_inverses(first, last, live, capacities, squares, sizes, matrices, inverses):  # type: ignore[no-untyped-def]
    """Compute M⁻¹ anew in rows where a test vector shows a large error: derivatives are computed from it."""
    _, u, v, r = workspace(capacities, len(live))
    for i in range(first, last):
        b = live[i]
        n = sizes[b] + 1
        matrix, inverse = square(matrices, squares[b], capacities[b]), square(inverses, squares[b], capacities[b])
        for j in range(n):
            u[j] = np.cos(j * (j + 1.0))
        multiply(inverse, n, u, v)
        if n > 2 and residual_of(matrix, n, u, v, r) > SHARP:
            rebuild(matrix, n, inverse)
