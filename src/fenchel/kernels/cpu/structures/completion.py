"""Structures that tie with a row's members: found by noise across the members' affine hull, kept with weight 0.

Arrays as in ``kernels.active``.
"""

from __future__ import annotations

import numpy as np

from fenchel.kernels.cpu.compiler import kernel
from fenchel.kernels.cpu.structures.active import gain_of, gram_column, keep, place
from fenchel.kernels.cpu.structures.gram import FLAT, insert, multiply, project, rebuild, residual_of, square, workspace

TIE = 1e-11
"""Reduced scores closer than this, relative to their terms, are equal."""

SHARP = 1e-10
"""Residual above which an inverse that derivatives are made of is computed anew."""


@kernel
def outward(  # type: ignore[no-untyped-def]
    first, last, live, noise, scale, probe, thetas, starts, rooms, squares, members, counts, sizes, weights, solution,
    values, extra, matrices, inverses, mus, residuals, gap, floor, state,
):  # fmt: skip
    """θ − μ plus a little noise across the members' affine hull: what ties with them outside it then comes out best."""
    parts = thetas.shape[1]
    _, u, v, _ = workspace(rooms, parts)
    across = np.empty(parts)
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
        multiply(inverse, n, u, v)
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
    mark, u, v, r = workspace(rooms, thetas.shape[1])
    for i in range(first, last):
        b, y = live[i], candidates[i]
        at, size = starts[b], sizes[b]
        own, tally, p, q, h = members[at:], counts[at:], weights[at:], values[at:], extra[at:]
        matrix, inverse = square(matrices, squares[b], rooms[b]), square(inverses, squares[b], rooms[b])
        count = place(y, mark)
        gram_column(mark, own, tally, size, u)
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
                solution[at + size + 1] = 0.0
                sizes[b] = size + 1
        for j in range(count):
            mark[y[j]] = 0


@kernel
def sharpen(  # type: ignore[no-untyped-def]
    first, last, live, starts, rooms, squares, sizes, matrices, inverses
):  # fmt: skip
    """M⁻¹ anew in rows where a trial shows that updates wore it out: derivatives are made of it."""
    _, u, v, r = workspace(rooms, len(live))
    for i in range(first, last):
        b = live[i]
        n = sizes[b] + 1
        matrix, inverse = square(matrices, squares[b], rooms[b]), square(inverses, squares[b], rooms[b])
        for j in range(n):
            u[j] = np.cos(j * (j + 1.0))
        multiply(inverse, n, u, v)
        if n > 2 and residual_of(matrix, n, u, v, r) > SHARP:
            rebuild(matrix, n, inverse)
