"""Which entries a program works on, how it reads them, and lists of the few entries of a row that matter."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from fenchel.kernels.gpu.arithmetic import jit


@jit
def block_of_rows(n: tl.tensor, rows: tl.tensor, R: tl.constexpr, BLOCK: tl.constexpr) -> Any:
    """The R rows of this program, their columns, which of both exist, and where they are in memory."""
    r = tl.program_id(0) * R + tl.arange(0, R)
    j = tl.arange(0, BLOCK)
    inside = (r < rows)[:, None] & (j < n)[None, :]
    return r, j, inside, r.to(tl.int64)[:, None] * n + j[None, :]


@jit
def read(X: tl.tensor, at: tl.tensor, inside: tl.tensor, other: tl.constexpr, EPS: tl.constexpr) -> Any:
    """Entries of X in the precision of the arithmetic; ``other`` where there are none."""
    x = tl.load(X + at, mask=inside, other=other)
    return x.to(tl.float64) if EPS < 1e-10 else x.to(tl.float32)


@jit
def read_bounds(
    UPPER: tl.tensor, at: tl.tensor, inside: tl.tensor, DTYPE: tl.constexpr, EACH: tl.constexpr, EPS: tl.constexpr
) -> Any:
    """Upper bounds of entries, or the one that all share, in the precision of the arithmetic, but rounded to a type."""
    if EACH:
        u = read(UPPER, at, inside, 0.0, EPS)
    else:
        u = tl.load(UPPER)
        u = u.to(tl.float64) if EPS < 1e-10 else u.to(tl.float32)
    return u.to(DTYPE).to(u.dtype)


@jit
def free_part(
    p: tl.tensor,
    UPPER: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    DTYPE: tl.constexpr,
    BOUNDED: tl.constexpr,
    EPS: tl.constexpr,
) -> Any:
    """p where it is below its bound, else 0; p itself if not ``BOUNDED``, which is as in ``products``.

    The bound is rounded to the type that p was written in, as an entry that has reached it was.
    """
    if BOUNDED > 0:
        u = read_bounds(UPPER, at, inside, DTYPE, BOUNDED == 2, EPS)
        p = tl.where(p >= u, 0.0, p)
    return p


@jit
def append(
    VALUES: tl.tensor,
    PLACES: tl.tensor,
    x: tl.tensor,
    at: tl.tensor,
    chosen: tl.tensor,
    count: tl.tensor,
    CAP: tl.constexpr,
) -> Any:
    """Write the chosen entries of a block to a list that has ``count`` of them; how many the row has now.

    Those beyond the end of the list are counted and not written. Every entry goes to a place of its own, so no two
    threads write to one address; whoever reads the list needs a barrier first.
    """
    place = count + tl.cumsum(chosen.to(tl.int32), 0) - 1
    fits = chosen & (place < CAP)
    tl.store(VALUES + place, x.to(VALUES.dtype.element_ty), mask=fits)
    tl.store(PLACES + place, at, mask=fits)
    return count + tl.sum(chosen.to(tl.int32))
