"""How members of active sets are stored and read: copied to larger arrays, put side by side, summed over.

Arrays as in ``kernels.active``.
"""

from __future__ import annotations

from fenchel.kernels.cpu.compiler import kernel
from fenchel.kernels.cpu.structures.gram import square


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
