"""The bordered Gram matrix of a row's members, and its inverse.

    M = [0 1ᵀ; 1 G],   G_jk = ⟨y_j, y_k⟩

M is regular exactly if the members y_k are affinely independent; the lower block of M⁻¹ is the Jacobian ∂p/∂q of the
weights p, by the members' scores q. M (λ, p) = (1, q) says that p is optimal on the members, and that all of them have
the reduced score λ.

The inverse is updated when members are added or removed: Niculae et al. (2018), appendix B. M holds integers and has no
rounding error, so an update refines the column that it adds or removes, where two equations of M or a small distance
show the need: errors of the inverse then add up, but are not multiplied. Where the residual of a column exceeds
``WORN`` the inverse is computed anew.
"""

from __future__ import annotations

import numpy as np

from fenchel.kernels.cpu.compiler import helper
from fenchel.kernels.cpu.structures.rows import add_multiple, combine, dot

FLAT = 1e-9
"""Squared distance to the members' affine hull below which a candidate lies in it."""

CLOSE = 0.25
"""Squared distance below which columns of the inverse are refined."""

SHAKY = 1e-10
"""Residual of two equations above which columns are refined too."""

WORN = 1e-8
"""Residual of a column of the inverse above which the inverse is computed anew."""


@helper
def square(flat, start, capacity):  # type: ignore[no-untyped-def]
    """The (capacity + 1) × (capacity + 1) matrix of a row, as a view of the array of all rows."""
    n = capacity + 1
    return flat[start : start + n * n].reshape(n, n)


@helper
def workspace(capacities, parts):  # type: ignore[no-untyped-def]
    """Workspaces for rows of these capacities and so many parts: marks of parts (parts,), all 0, and three vectors."""
    most = 0
    for capacity in capacities:
        most = max(most, capacity)
    mark = np.empty(parts, np.uint8)
    for j in range(parts):
        mark[j] = 0
    return mark, np.empty(most + 2), np.empty(most + 2), np.empty(most + 2)


@helper
def residual_of(matrix, n, right, x, r):  # type: ignore[no-untyped-def]
    """Write r = right − M x (n,); return its largest entry relative to that of the right-hand side."""
    worst, scale = 0.0, 1.0
    combine(x, matrix, 0, matrix.shape[1], n, r)
    for i in range(n):
        r[i] = right[i] - r[i]
        worst = max(worst, abs(r[i]))
        scale = max(scale, abs(right[i]))
    return worst / scale


@helper
def row_product(matrix, n, row, x):  # type: ignore[no-untyped-def]
    """The product of one row of M, or of M⁻¹, and x (n,): a number."""
    return dot(matrix, row * matrix.shape[1], x, n)


@helper
def multiply(inverse, n, u, v):  # type: ignore[no-untyped-def]
    """Write v = M⁻¹u (n,); M⁻¹ is symmetric."""
    combine(u, inverse, 0, inverse.shape[1], n, v)


@helper
def correct(inverse, n, r, x):  # type: ignore[no-untyped-def]
    """Add M⁻¹r to x (n,): a step of iterative refinement."""
    for i in range(n):
        x[i] += row_product(inverse, n, i, r)


@helper
def rebuild(matrix, n, inverse):  # type: ignore[no-untyped-def]
    """Compute M⁻¹ (n, n) from M alone, by Gauss-Jordan elimination with pivots."""
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


@helper
def project(count, matrix, inverse, size, u, v, r):  # type: ignore[no-untyped-def]
    """Write v = M⁻¹u for the Gram column u of a candidate: its projection on the members' affine hull is Σ v_k y_k.

    Returns its squared distance to the hull, ⟨y, y⟩ − uᵀv − vᵀ(u − Mv), in which errors of v are squared.
    """
    n = size + 1
    multiply(inverse, n, u, v)
    s, total = float(count), -v[0]  # the first row of M is (0, 1, …, 1)
    for i in range(n):
        s -= v[i] * u[i]
        total += v[i]
    off = abs(total - u[0]) + abs(row_product(matrix, n, size, v) - u[size])
    if s > CLOSE and off <= SHAKY * (1.0 + u[size]):
        return s
    if residual_of(matrix, n, u, v, r) > WORN:
        rebuild(matrix, n, inverse)
        multiply(inverse, n, u, v)
        residual_of(matrix, n, u, v, r)
    s = float(count)
    for i in range(n):
        s -= v[i] * (u[i] + r[i])
    correct(inverse, n, r, v)
    return s


@helper
def begin(matrix, inverse, count):  # type: ignore[no-untyped-def]
    """Write M and M⁻¹ (2, 2) of one member."""
    matrix[0, 0], matrix[0, 1], matrix[1, 0], matrix[1, 1] = 0.0, 1.0, 1.0, count
    inverse[0, 0], inverse[0, 1], inverse[1, 0], inverse[1, 1] = -count, 1.0, 1.0, 0.0


@helper
def insert(matrix, inverse, size, count, u, v, s):  # type: ignore[no-untyped-def]
    """Add one member to M and M⁻¹: u is its Gram column, v = M⁻¹u, s its squared distance to the hull."""
    n = size + 1
    for i in range(n):
        factor = v[i] / s
        add_multiple(inverse, i * inverse.shape[1], factor, v, n)
        inverse[i, n] = -factor
        inverse[n, i] = -factor
        matrix[i, n] = u[i]
        matrix[n, i] = u[i]
    inverse[n, n] = 1.0 / s
    matrix[n, n] = count


@helper
def erase(square, at, last):  # type: ignore[no-untyped-def]
    """Replace a row and column of a matrix by the last ones."""
    if at != last:
        for i in range(last + 1):
            square[i, at] = square[i, last]
        for i in range(last + 1):
            square[at, i] = square[last, i]
        square[at, at] = square[last, last]


@helper
def remove(matrix, inverse, size, at, q, x, v, r):  # type: ignore[no-untyped-def]
    """Remove the member at ``at`` from M, M⁻¹ and x = M⁻¹(1, q); the last member takes its place.

    ``q`` are the values of the members that are left, in their new order.
    """
    n, i = size + 1, at + 1
    total = -inverse[0, i]
    for a in range(n):
        v[a] = inverse[a, i]
        total += v[a]
    off = abs(total) + abs(row_product(matrix, n, i, v) - 1.0)
    if v[i] * CLOSE > 1.0 or off > SHAKY:
        worst = 0.0
        for a in range(n):
            r[a] = (1.0 if a == i else 0.0) - row_product(matrix, n, a, v)
            worst = max(worst, abs(r[a]))
        if worst > WORN:
            erase(matrix, i, n - 1)
            rebuild(matrix, n - 1, inverse)
            solve_weights(matrix, inverse, size - 1, q, x, v, r)
            return
        correct(inverse, n, r, v)
    share = x[i] / v[i]
    for a in range(n):
        factor = v[a] / v[i]
        x[a] -= v[a] * share
        add_multiple(inverse, a * inverse.shape[1], -factor, v, n)
    erase(matrix, i, n - 1)
    erase(inverse, i, n - 1)
    x[i] = x[n - 1]


@helper
def solve_weights(matrix, inverse, size, q, x, u, r):  # type: ignore[no-untyped-def]
    """Solve for x = (λ, p) = M⁻¹(1, q), with one refinement. Scores are relative to the first, which changes λ only."""
    n = size + 1
    u[0] = 1.0
    for k in range(size):
        u[k + 1] = q[k] - q[0]
    multiply(inverse, n, u, x)
    residual_of(matrix, n, u, x, r)
    correct(inverse, n, r, x)
    x[0] += q[0]
